"""Claims on the simulated node: an API server on loopback, a kernel that does what the daemon writes to sysfs, and what
is seen of both.

The daemon is the real one, with its own client of the API server, its own DRA plugin, checkpoint and CDI files; only
its writes to sysfs go to the fake kernel in this process. Must not judge: what must hold is in
`expectations_claims.py`.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, final

from gpuactors.acts.apart import inline
from gpuactors.acts.driver import SysfsBinder
from gpuactors.app import Outside
from gpuactors.core.dra.offered import device_name
from gpuactors.core.model import PciAddress
from gpuactors.core.state import NodeState
from gpuactors.host.root import HostRoot
from gpuactors.simulation.expectations_claims import ClaimSeen, ClaimsSeen, GpuSeen
from gpuactors.simulation.host.kernel import FakeKernel
from gpuactors.simulation.host.tree import HostTree, PciSpec, Uevent
from gpuactors.simulation.kube.http import serve_loopback
from gpuactors.simulation.kube.server import FakeApiServer
from gpuactors.simulation.kube.status import CLAIMS
from gpuactors.simulation.kubelet.dra.values import ClaimObject, Surroundings
from gpuactors.simulation.kubelet.values import KubeletView
from gpuactors.simulation.memory.acts import MemoryPersistence, MemoryWrites

DRIVER: Final = "gpu.nvidia.com"
NODE: Final = "node-1"
NAMESPACE: Final = "default"
_GPU_CLASS: Final = "03"
_CHECKPOINT: Final = "checkpoint.json"


@asynccontextmanager
async def open_claims(
    directory: Path, tree: HostTree, deliver: Callable[[Sequence[Uevent]], None]
) -> AsyncIterator[ClaimsSide]:
    """The API server and the kernel of a node; `deliver` sends the kernel's uevents."""
    server = FakeApiServer()
    server.add_node(NODE)
    async with serve_loopback(server) as port:
        (directory / "kubeconfig").write_text(json.dumps(_kubeconfig(port)))
        yield ClaimsSide(directory, server, FakeKernel(tree, deliver=deliver))


def _kubeconfig(port: int) -> Mapping[str, object]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "simulation",
        "clusters": [{"name": "simulation", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "simulation", "user": {}}],
        "contexts": [{"name": "simulation", "context": {"cluster": "simulation", "user": "simulation"}}],
    }


@final
class ClaimsSide:
    """Made by `open_claims`."""

    def __init__(self, directory: Path, server: FakeApiServer, kernel: FakeKernel) -> None:
        self.server = server
        self.kernel = kernel
        self.settings: Mapping[str, Any] = {
            "dra": "on",
            "node_name": NODE,
            "kubeconfig": directory / "kubeconfig",
            "cdi_dir": directory / "c",
        }
        """What the daemon's configuration has for claims."""
        self._cdi_dir = directory / "c"
        self._plugin_dir = directory / "k/plugins" / DRIVER
        self._writes = MemoryWrites(kernel)

    def around(self) -> Surroundings:
        """What is around kubelet's DRA manager."""
        return Surroundings(self._claim_object, self._wipe, self._nodes)

    def within(self, outside: Outside) -> Outside:
        """The daemon's outside with this kernel for its writes."""
        assert outside.dra is not None
        root = HostRoot(str(self.kernel.tree.root))
        binder = SysfsBinder(root, self._writes, MemoryPersistence(self.kernel), inline)
        return replace(outside, dra=replace(outside.dra, binder=binder))

    # --- what happens -------------------------------------------------------------------------------------------

    def plug(self, spec: PciSpec) -> None:
        """A function is plugged in."""
        self.kernel.plug(spec)

    def allocate(self, name: str, *addresses: str) -> None:
        """A claim is made, and the scheduler allocates these GPUs to it."""
        request = {"name": "gpu", "exactly": {"deviceClassName": "vfio.gpu.nvidia.com"}}
        metadata = {"namespace": NAMESPACE, "name": name}
        self.server.add_claim({"metadata": metadata, "spec": {"devices": {"requests": [request]}}})
        results = [
            {"request": "gpu", "driver": DRIVER, "pool": NODE, "device": device_name(PciAddress(a))}
            for a in addresses
        ]
        self.server.set_claim_status(NAMESPACE, name, {"allocation": {"devices": {"results": results}}})

    def delete(self, name: str) -> None:
        """A claim's object goes, whatever became of its pod."""
        self.server.delete_claim(NAMESPACE, name)

    def lose_checkpoint(self) -> None:
        """The daemon's checkpoint is lost while no daemon runs; the claims' files are still there."""
        (self._plugin_dir / _CHECKPOINT).unlink()

    # --- what kubelet and the container runtime read ------------------------------------------------------------

    def _claim_object(self, namespace: str, name: str) -> ClaimObject | None:
        found = self.server.store.find(CLAIMS, namespace, name)
        if found is None:
            return None
        drivers = dict.fromkeys(result["driver"] for result in _results(found))
        return ClaimObject(namespace, name, found["metadata"]["uid"], tuple(drivers))

    def _wipe(self, driver: str | None) -> None:
        self.server.delete_slices(driver)

    def _nodes(self, cdi_ids: Sequence[str]) -> Sequence[str]:
        known = dict(self._cdi_devices())
        return [node for cdi_id in cdi_ids for node in known[cdi_id]]

    def _cdi_devices(self) -> Iterator[tuple[str, list[str]]]:
        """Each device of the CDI files by its id, with its nodes."""
        for path in sorted(self._cdi_dir.glob("*.json")):
            try:
                spec = json.loads(path.read_text())
            except FileNotFoundError:  # of a claim that ends at this moment
                continue
            for device in spec["devices"]:
                nodes = device.get("containerEdits", {}).get("deviceNodes", ())
                yield f"{spec['kind']}={device['name']}", [node["path"] for node in nodes]

    # --- what is seen -------------------------------------------------------------------------------------------

    def seen(self, view: KubeletView, state: NodeState | None) -> ClaimsSeen:
        """What there is now, by the API server, the kernel, the disk and kubelet; of the daemon only its words."""
        entries = state.claims.entries.values() if state is not None else ()
        words = {str(e.name.uid): (str(e.state), e.problem) for e in entries}
        known = {info.uid: info for info in view.dra.claims}
        names = {info.uid: info.name for info in view.dra.claims}
        devices = {info.uid: frozenset(d.device for d in info.devices) for info in view.dra.claims}
        for found in self.server.store.objects(CLAIMS):
            uid = found["metadata"]["uid"]
            names[uid] = found["metadata"]["name"]
            devices[uid] = frozenset(result["device"] for result in _results(found))
        addresses = {device_name(PciAddress(a)): a for a in self.kernel.tree.functions}
        claims = tuple(
            ClaimSeen(
                name,
                devices=frozenset(addresses[d] for d in devices[uid] if d in addresses),
                is_known=uid in known,
                is_prepared=uid in known and known[uid].prepared,
                state=words.get(uid, ("", ""))[0],
                problem=words.get(uid, ("", ""))[1],
            )
            for uid, name in sorted(names.items(), key=lambda item: item[1])
        )
        return ClaimsSeen(self._gpus(), claims, tuple(self._left()))

    def _gpus(self) -> tuple[GpuSeen, ...]:
        offers = {
            device["name"]: bool(device.get("taints"))
            for found in self.server.slices(DRIVER)
            for device in found["spec"].get("devices") or ()
        }
        tree = self.kernel.tree
        return tuple(
            GpuSeen(
                address,
                driver=tree.driver_of(address),
                companions=tuple(
                    (other, tree.driver_of(other))
                    for other in sorted(tree.group_members(spec.group) if spec.group is not None else ())
                    if other != address
                ),
                is_offered=device_name(PciAddress(address)) in offers,
                is_tainted=offers.get(device_name(PciAddress(address)), False),
            )
            for address, spec in sorted(tree.functions.items())
            if spec.class_code.startswith(_GPU_CLASS)
        )

    def _left(self) -> Iterator[str]:
        """What claims have on the node: files, entries of the checkpoint, overrides."""
        yield from (str(path.name) for path in self._files() if path.name != _CHECKPOINT)
        checkpoint = self._plugin_dir / _CHECKPOINT
        if checkpoint.is_file():
            for uid in json.loads(checkpoint.read_text())["checkpoint"]["claims"]:
                yield f"an entry of the checkpoint, of claim {uid}"
        for address in self.kernel.tree.functions:
            if override := self.kernel.override(address):
                yield f"driver_override {override} of {address}"

    def _files(self) -> Iterator[Path]:
        """They come and go while this looks: the daemon removes them in a thread. `os.walk` takes that."""
        for directory in (self._cdi_dir, self._plugin_dir / "metadata"):
            yield from sorted(Path(at, name) for at, _, names in os.walk(directory) for name in names)
        if (checkpoint := self._plugin_dir / _CHECKPOINT).is_file():
            yield checkpoint


def _results(claim: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    found = claim.get("status", {}).get("allocation", {}).get("devices", {}).get("results", ())
    return tuple(found)
