"""The part of a node for the claims of any DRA driver: its disk, the cluster's API server, the claims.

It outlives the daemons, and the disk and the API server outlive a reboot. What each driver has besides is in
`claims.py` and `domains.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator
from pathlib import PurePosixPath
from typing import Final, final

from msgspec.structs import replace

from gpuactors.acts.blocking_runner import StoredCheckpoint, StoredFiles
from gpuactors.acts.checkpoint import FILE_NAME, CheckpointFile
from gpuactors.acts.files import ClaimFiles
from gpuactors.acts.theirs import TheirClaims
from gpuactors.concurrency.latest import Latest
from gpuactors.core.state.claims import ClaimSettings
from gpuactors.core.values.claim import ClaimUid
from gpuactors.daemon.claims import DraOutside
from gpuactors.kube.claims import KubeClaims
from gpuactors.kube.client import ApiClient
from gpuactors.kube.nodes import KubeNode
from gpuactors.kube.slices import KubeSlices
from gpuactors.ports.claims import ClaimsKubelet, DriverBinder
from gpuactors_simulation.kube.server import FakeApiServer
from gpuactors_simulation.kube.status import CLAIMS as CLAIM_OBJECTS
from gpuactors_simulation.kubelet.dra.surroundings import surroundings_of
from gpuactors_simulation.kubelet.dra.values import Surroundings
from gpuactors_simulation.memory.acts import NoLock, inline
from tests.memory.disk import FakeDisk
from tests.memory.kube import MemoryApiServer

NODE: Final = "node-1"
CDI_DIR: Final = "/var/run/cdi"
NAMESPACE: Final = "default"


@final
class Touched:
    """Implements `ports.claims.TouchedFiles`, for every daemon of the node."""

    def __init__(self) -> None:
        self._times = Latest(0)

    def touch(self) -> None:
        """Somebody has written or removed a file in the directory, or the directory."""
        self._times.set(self._times.value + 1)

    async def touches(self) -> AsyncGenerator[frozenset[ClaimUid] | None, None]:
        """Implement `TouchedFiles.touches`."""
        async for _ in self._times.subscribe():
            yield None


class DraNode(ABC):
    """The parts of one node that the claims of one driver need."""

    def __init__(self, driver: str, seed: int) -> None:
        self.driver: Final = driver
        self.plugin_dir: Final = f"/var/lib/kubelet/plugins/{driver}"
        self.checkpoint: Final = f"{self.plugin_dir}/{FILE_NAME}"
        self._boots = 1
        self.disk = FakeDisk(in_memory=("/run", "/var/run"))
        for made in (self.plugin_dir, "/var/run"):
            self.disk.put(f"{made}/.made", b"")
        self.api = FakeApiServer(seed=seed, device_taints=seed // 512 % 4 != 1)
        self.api.add_node(NODE)
        self.network = MemoryApiServer(self.api)
        self.given: dict[str, tuple[str, ...]] = {}
        """The devices of every claim of a pod that was ever allocated, by UID."""
        self.touched = Touched()
        """Where a daemon hears that somebody has touched CDI files."""
        self.wipes = 0
        """How often kubelet has deleted slices."""

    @property
    def surroundings(self) -> Surroundings:
        """Of the fake kubelet's DRA manager."""
        around = surroundings_of(self.api, self._cdi_files)

        def wipe(driver: str | None) -> None:
            around.wipe(driver)
            self.wipes += 1

        return replace(around, wipe=wipe)

    def _cdi_files(self) -> Iterator[bytes]:
        for path, content in self.disk.files.items():
            if str(PurePosixPath(path).parent) == CDI_DIR and path.endswith(".json"):
                yield content

    # --- claims ---------------------------------------------------------------------------------------------

    @property
    def claims(self) -> dict[str, str]:
        """The claims of pods at the API server: UID by name."""
        found = self.api.store.objects(CLAIM_OBJECTS, NAMESPACE)
        return {o["metadata"]["name"]: o["metadata"]["uid"] for o in found}

    def allocated(self) -> set[str]:
        """The devices that claims of the API server have: the scheduler gives them to no other one."""
        return {device for uid in self.claims.values() for device in self.given[uid]}

    @abstractmethod
    def hand_on(self, old: str, name: str) -> None:
        """A claim is made like the one with the UID `old`, and the scheduler gives it the same devices."""

    def delete(self, name: str) -> None:
        """The claim goes, if it is there."""
        if name in self.claims:
            self.api.delete_claim(NAMESPACE, name)

    # --- what happens to it ---------------------------------------------------------------------------------

    def kill(self, daemon: str) -> None:
        """A daemon's process is killed."""
        self.network.kill(daemon)
        self.disk.restart()

    def power_cut(self) -> None:
        """The machine stops: what was not synced is lost."""
        self.disk.power_cut()
        self.disk.full = False
        self.disk.keeps = ""
        self._boots += 1

    def lose_checkpoint(self) -> None:
        """The file is gone."""
        self.disk.lose(self.checkpoint)

    def spoil_checkpoint(self, at: int) -> None:
        """A byte of the file is another one."""
        content = bytearray(self.disk.files[self.checkpoint])
        content[at % len(content)] ^= 0x15
        self.disk.put(self.checkpoint, bytes(content))

    def end_faults(self) -> None:
        """End the faults of the API server and the disk."""
        self.api.end_faults()
        self.api.away = False
        self.disk.full = False
        self.disk.keeps = ""

    # --- what is there --------------------------------------------------------------------------------------

    @property
    def boot_id(self) -> str:
        """Of the boot that runs."""
        return f"boot-{self._boots}"

    def left_over(self) -> list[str]:
        """CDI and metadata files."""
        ours = (f"{CDI_DIR}/", f"{self.plugin_dir}/metadata/")
        return [p for p in self.disk.files if p.startswith(ours)]

    def dra_outside(
        self, client: ApiClient, kubelet: ClaimsKubelet, binder: DriverBinder | None
    ) -> DraOutside:
        """All that a daemon reaches for claims of this driver."""
        theirs = TheirClaims(self.disk, driver=self.driver, cdi_dir=CDI_DIR, places=None)
        checkpoint = CheckpointFile(self.disk, self.plugin_dir, self.boot_id, theirs)
        files = ClaimFiles(self.disk, driver=self.driver, cdi_dir=CDI_DIR, plugin_dir=self.plugin_dir)
        return DraOutside(
            settings=ClaimSettings(self.driver, NODE, side_by_side=True),
            store=StoredCheckpoint(checkpoint, inline, NoLock()),
            files=StoredFiles(files, inline, NoLock()),
            touched=None,
            binder=binder,
            claims=KubeClaims(client, self.driver, NODE),
            node=KubeNode(client, NODE),
            slices=KubeSlices(client, self.driver, NODE),
            kubelet=kubelet,
        )
