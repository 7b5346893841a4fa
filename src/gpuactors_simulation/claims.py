"""Claims of GPUs on the simulated node: a kernel that does what the daemon writes to sysfs, and what is seen of both.

The daemon is the real one, with its own client of the API server, its own DRA plugin, checkpoint and CDI files; only
its writes to sysfs go to the fake kernel in this process. Must not judge: what must hold is in
`expectations_claims.py`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, final

from msgspec.structs import replace

from gpuactors.acts.driver import SysfsBinder
from gpuactors.core.kinds.table import slice_name
from gpuactors.core.state import NodeState
from gpuactors.core.values.model import DeviceKey
from gpuactors.daemon.app import Outside
from gpuactors.host.root import HostRoot
from gpuactors_simulation.cluster import NAMESPACE, NODE, Cluster, open_cluster
from gpuactors_simulation.host.kernel import FakeKernel
from gpuactors_simulation.host.tree import HostTree, PciSpec, Uevent
from gpuactors_simulation.kubelet.dra.values import Surroundings
from gpuactors_simulation.kubelet.values import KubeletView
from gpuactors_simulation.memory.acts import MemoryPersistence, MemoryWrites, inline
from gpuactors_simulation.situation import ClaimsSeen, GpuSeen

DRIVER: Final = "gpu.nvidia.com"
_GPU_CLASS: Final = "03"


@asynccontextmanager
async def open_claims(
    directory: Path, tree: HostTree, deliver: Callable[[Sequence[Uevent]], None]
) -> AsyncIterator[ClaimsSide]:
    """The API server and the kernel of a node; `deliver` sends the kernel's uevents."""
    async with open_cluster(directory, DRIVER) as cluster:
        yield ClaimsSide(cluster, FakeKernel(tree, deliver=deliver))


@final
class ClaimsSide:
    """Made by `open_claims`."""

    def __init__(self, cluster: Cluster, kernel: FakeKernel) -> None:
        self.kernel = kernel
        self.settings: Mapping[str, Any] = {"dra": "on", **cluster.settings}
        """The daemon's configuration of claims."""
        self._cluster = cluster
        self._writes = MemoryWrites(kernel)

    def around(self) -> Surroundings:
        """Return the surroundings of kubelet's DRA manager."""
        return self._cluster.around()

    def within(self, outside: Outside) -> Outside:
        """Return the daemon's outside with this kernel for its writes."""
        assert outside.dra is not None
        root = HostRoot(str(self.kernel.tree.root))
        binder = SysfsBinder(root, self._writes, MemoryPersistence(self.kernel), inline)
        return replace(outside, dra=replace(outside.dra, binder=binder))

    # --- what happens -------------------------------------------------------------------------------------------

    def plug(self, spec: PciSpec) -> None:
        """Plug in a function."""
        self.kernel.plug(spec)

    def allocate(self, name: str, *addresses: str) -> None:
        """Make a claim, and allocate these GPUs to it."""
        server = self._cluster.server
        request = {"name": "gpu", "exactly": {"deviceClassName": "vfio.gpu.nvidia.com"}}
        metadata = {"namespace": NAMESPACE, "name": name}
        server.add_claim({"metadata": metadata, "spec": {"devices": {"requests": [request]}}})
        results = [
            {"request": "gpu", "driver": DRIVER, "pool": NODE, "device": slice_name(DeviceKey(a))}
            for a in addresses
        ]
        server.set_claim_status(NAMESPACE, name, {"allocation": {"devices": {"results": results}}})

    def delete(self, name: str) -> None:
        """Delete a claim's object, even while its pod exists."""
        self._cluster.server.delete_claim(NAMESPACE, name)

    def lose_checkpoint(self) -> None:
        """Implement `Cluster.lose_checkpoint`."""
        self._cluster.lose_checkpoint()

    # --- what is seen -------------------------------------------------------------------------------------------

    def seen(self, view: KubeletView, state: NodeState | None) -> ClaimsSeen:
        """Collect the facts now, by the API server, the kernel, the disk and kubelet; of the daemon only its words."""
        addresses = {slice_name(DeviceKey(a)): a for a in self.kernel.tree.functions}
        entries = state.gpus.claims.entries.values() if state is not None else ()
        files = self._cluster.left(self._cluster.plugin_dir / "metadata")
        tree = self.kernel.tree
        overrides = (f"driver_override {o} of {a}" for a in tree.functions if (o := self.kernel.override(a)))
        claims = self._cluster.claims(view, entries, addresses.get)
        return ClaimsSeen(self._gpus(), claims, (*files, *overrides))

    def _gpus(self) -> tuple[GpuSeen, ...]:
        offers, tree = self._cluster.offers(), self.kernel.tree
        return tuple(
            GpuSeen(
                address,
                driver=tree.driver_of(address),
                companions=tuple(
                    (companion, tree.driver_of(companion))
                    for companion in sorted(tree.group_members(spec.group) if spec.group is not None else ())
                    if companion != address
                ),
                is_offered=slice_name(DeviceKey(address)) in offers,
                is_tainted=offers.get(slice_name(DeviceKey(address)), False),
            )
            for address, spec in sorted(tree.functions.items())
            if spec.class_code.startswith(_GPU_CLASS)
        )
