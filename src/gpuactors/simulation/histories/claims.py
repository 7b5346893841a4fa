"""What of a node is there for claims: the drivers that it binds, its disk, the cluster's API server, the claims.

A node of a history has it if the seed says so (`CLAIMS`). It outlives the daemons, and the disk and the API server
outlive a reboot. The rules are those of the fakes; what can happen is in `claim_events.py`, what must hold in
`claim_check.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import PurePosixPath
from typing import Final, final

from gpuactors.acts.apart import StoredCheckpoint, StoredFiles, inline
from gpuactors.acts.checkpoint import FILE_NAME, CheckpointFile
from gpuactors.acts.driver import SysfsBinder
from gpuactors.acts.files import ClaimFiles
from gpuactors.core.dra.entries import ClaimSettings
from gpuactors.core.dra.offered import device_name
from gpuactors.core.model import PciAddress
from gpuactors.dra import DraOutside
from gpuactors.host.root import HostRoot
from gpuactors.kube.claims import KubeClaims
from gpuactors.kube.nodes import KubeNode
from gpuactors.kube.slices import KubeSlices
from gpuactors.ports import ClaimsKubelet
from gpuactors.simulation.disk.disk import FakeDisk
from gpuactors.simulation.host.kernel import NVIDIA, FakeKernel
from gpuactors.simulation.host.tree import HostTree, PciSpec
from gpuactors.simulation.host.uevents import Uevent
from gpuactors.simulation.kube.server import FakeApiServer
from gpuactors.simulation.kube.status import CLAIMS as CLAIM_OBJECTS
from gpuactors.simulation.kubelet.dra.values import ClaimObject, Surroundings
from gpuactors.simulation.memory.acts import MemoryPersistence, MemoryWrites
from gpuactors.simulation.memory.kube import MemoryApiServer

CLAIMS: Final = 1 << 32
"""The bit of a history's seed by which its daemons serve claims."""

DRIVER: Final = "gpu.nvidia.com"
NODE: Final = "node-1"
CDI_DIR: Final = "/var/run/cdi"
PLUGIN_DIR: Final = f"/var/lib/kubelet/plugins/{DRIVER}"
CHECKPOINT: Final = f"{PLUGIN_DIR}/{FILE_NAME}"
NAMESPACE: Final = "default"

COMPANION_DRIVER: Final = "snd_hda_intel"


@final
class ClaimsNode:
    """The parts of one node that claims need."""

    def __init__(self, tree: HostTree, seed: int, deliver: Callable[[Sequence[Uevent]], None]) -> None:
        self._tree = tree
        self._boots = 1
        self.kernel = FakeKernel(tree, deliver=deliver)
        self.disk = FakeDisk(in_memory=("/run", "/var/run"))
        for made in (PLUGIN_DIR, "/var/run"):
            self.disk.put(f"{made}/.made", b"")
        self.writes = MemoryWrites(self.kernel)
        self.api = FakeApiServer(seed=seed, device_taints=seed // 512 % 4 != 1)
        self.api.add_node(NODE)
        self.network = MemoryApiServer(self.api)
        self.home: dict[str, str | None] = {}
        """The driver that the boot gives to each function."""
        self.given: dict[str, tuple[str, ...]] = {}
        """The cards of every claim that was ever allocated, by UID."""
        self.forgotten: set[str] = set()
        """Functions that a daemon had written to before the checkpoint was lost in this boot: their first driver and
        override are not known any more."""
        self.users: dict[str, int] = {}
        """The process that uses a card by its host driver, by address."""

    def plug(self, spec: PciSpec) -> None:
        """A function that is there from the boot on."""
        self.home[spec.address] = spec.driver
        self.kernel.plug(spec)

    # --- what kubelet has around it -------------------------------------------------------------------------

    @property
    def surroundings(self) -> Surroundings:
        """Of the fake kubelet's DRA manager."""
        return Surroundings(self._object, self.api.delete_slices, self._nodes)

    def _object(self, namespace: str, name: str) -> ClaimObject | None:
        found = self.api.store.find(CLAIM_OBJECTS, namespace, name)
        if found is None:
            return None
        drivers = (DRIVER,) if found.get("status", {}).get("allocation") else ()
        return ClaimObject(namespace, name, found["metadata"]["uid"], drivers)

    def _nodes(self, cdi_ids: Sequence[str]) -> Sequence[str]:
        """The device nodes of CDI ids, as the container runtime finds them. Raises `LookupError`."""
        found: dict[str, tuple[str, ...]] = {}
        for path, content in self.disk.files.items():
            if str(PurePosixPath(path).parent) != CDI_DIR or not path.endswith(".json"):
                continue
            spec = json.loads(content)
            for device in spec["devices"]:
                edits = device["containerEdits"].get("deviceNodes", ())
                found[f"{spec['kind']}={device['name']}"] = tuple(n.get("hostPath", n["path"]) for n in edits)
        nodes: dict[str, None] = {}
        for cdi_id in cdi_ids:
            if cdi_id not in found:
                raise LookupError(cdi_id)
            nodes |= dict.fromkeys(found[cdi_id])
        return tuple(nodes)

    # --- claims ---------------------------------------------------------------------------------------------

    def allocate(self, name: str, addresses: Sequence[str]) -> None:
        """A claim is made, and the scheduler gives it these cards, one for each request."""
        requests = [
            {"name": f"gpu-{i}", "exactly": {"deviceClassName": "vfio.gpu.nvidia.com"}}
            for i, _ in enumerate(addresses)
        ]
        made = self.api.add_claim(
            {
                "metadata": {"namespace": NAMESPACE, "name": name},
                "spec": {"devices": {"requests": requests}},
            }
        )
        results = [
            {"request": f"gpu-{i}", "driver": DRIVER, "pool": NODE, "device": device_name(PciAddress(a))}
            for i, a in enumerate(addresses)
        ]
        self.api.set_claim_status(NAMESPACE, name, {"allocation": {"devices": {"results": results}}})
        self.given[made["metadata"]["uid"]] = tuple(addresses)

    @property
    def claims(self) -> dict[str, str]:
        """The claims of the API server: UID by name."""
        return {o["metadata"]["name"]: o["metadata"]["uid"] for o in self.api.store.objects(CLAIM_OBJECTS)}

    def allocated(self) -> set[str]:
        """The cards that claims of the API server have: the scheduler gives them to no other one."""
        return {card for uid in self.claims.values() for card in self.given[uid]}

    def delete(self, name: str) -> None:
        """The claim goes, if it is there."""
        if name in self.claims:
            self.api.delete_claim(NAMESPACE, name)

    # --- what happens to it ---------------------------------------------------------------------------------

    def use(self, address: str, pid: int) -> None:
        """A process opens a card by its host driver."""
        self.kernel.use(address, pid)
        self.users[address] = pid

    def end_user(self, address: str) -> None:
        """That process ends."""
        self.kernel.end(self.users.pop(address))

    def kill(self, daemon: str) -> None:
        """A daemon's process is killed; the processes that write to sysfs for it go on."""
        self.network.kill(daemon)
        self.disk.restart()
        self.writes.settle()

    def power_cut(self) -> None:
        """The machine stops: no write goes on, and what was not synced is lost."""
        self.disk.power_cut()
        self.disk.full = False
        self.kernel.power_off()
        self.users.clear()
        self.writes = MemoryWrites(self.kernel)
        self.forgotten.clear()
        self._boots += 1

    def lose_checkpoint(self) -> None:
        """The file is gone."""
        self.disk.lose(CHECKPOINT)
        self._forget()

    def spoil_checkpoint(self, at: int) -> None:
        """A byte of the file is another one."""
        content = bytearray(self.disk.files[CHECKPOINT])
        content[at % len(content)] ^= 0x15
        self.disk.put(CHECKPOINT, bytes(content))
        self._forget()

    def _forget(self) -> None:
        written = self.writes.written
        self.forgotten.update(a for a in self.home if any(a in path or a in text for path, text in written))

    # --- what is there --------------------------------------------------------------------------------------

    @property
    def boot_id(self) -> str:
        """Of the boot that runs."""
        return f"boot-{self._boots}"

    @property
    def cards(self) -> list[str]:
        """The cards, without their companions."""
        return [a for a, driver in self.home.items() if driver != COMPANION_DRIVER]

    def is_on_host_driver(self, address: str) -> bool:
        """NVIDIA's driver has it."""
        return self._tree.driver_of(address) == NVIDIA

    def left_over(self) -> list[str]:
        """CDI and metadata files."""
        ours = (f"{CDI_DIR}/", f"{PLUGIN_DIR}/metadata/")
        return [p for p in self.disk.files if p.startswith(ours)]

    def outside_of(self, daemon: str, kubelet: ClaimsKubelet) -> DraOutside:
        """All that a daemon reaches for claims."""
        root, client = HostRoot(str(self._tree.root)), self.network.client(daemon)
        checkpoint = CheckpointFile(self.disk, PLUGIN_DIR, self.boot_id)
        files = ClaimFiles(self.disk, driver=DRIVER, cdi_dir=CDI_DIR, plugin_dir=PLUGIN_DIR)
        return DraOutside(
            settings=ClaimSettings(DRIVER, NODE),
            store=StoredCheckpoint(checkpoint, inline),
            files=StoredFiles(files, inline),
            touched=None,
            binder=SysfsBinder(root, self.writes, MemoryPersistence(self.kernel), inline),
            claims=KubeClaims(client, DRIVER, NODE),
            node=KubeNode(client, NODE),
            slices=KubeSlices(client, DRIVER, NODE),
            kubelet=kubelet,
        )
