"""The part of a node for claims of GPUs: the drivers that it binds, and what every driver's claims need
(`dra_node.py`).

A node of a history has it if the seed says so (`CLAIMS`). The rules are those of the fakes; what can happen is in
`claim_events.py`, what must hold in `claim_check.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, final

from msgspec.structs import replace

from gpuactors.acts.driver import SysfsBinder
from gpuactors.core.kinds.table import slice_name
from gpuactors.core.values.model import DeviceKey
from gpuactors.daemon.claims import DraOutside
from gpuactors.host.root import HostRoot
from gpuactors.ports.claims import ClaimsKubelet
from gpuactors_simulation.host.kernel import NVIDIA, FakeKernel
from gpuactors_simulation.host.tree import HostTree, PciSpec
from gpuactors_simulation.host.uevents import Uevent
from gpuactors_simulation.memory.acts import MemoryPersistence, MemoryWrites, inline
from tests.histories.administrator import ADMINISTERED, LOADS_LATE, Administrator
from tests.histories.dra_node import NAMESPACE, NODE, DraNode

CLAIMS: Final = 1 << 32
"""The bit of a history's seed by which its daemons serve claims of GPUs."""

DRIVER: Final = "gpu.nvidia.com"

COMPANION_DRIVER: Final = "snd_hda_intel"


@final
class ClaimsNode(DraNode):
    """The parts of one node that claims of GPUs need."""

    def __init__(self, tree: HostTree, seed: int, deliver: Callable[[Sequence[Uevent]], None]) -> None:
        super().__init__(DRIVER, seed)
        self._tree = tree
        self.kernel = FakeKernel(tree, deliver=deliver)
        self.home: dict[str, str | None] = {}
        """The driver that the boot gives to each function."""
        self.administrator = (
            Administrator(self.kernel, self.home, loads_late=seed & LOADS_LATE != 0)
            if seed & ADMINISTERED
            else None
        )
        """The second one; None if nobody but the daemon touches drivers and files."""
        self.writes = self._open_writes()
        self.forgotten: set[str] = set()
        """Functions that a daemon had written to before the checkpoint was lost in this boot, or was about to by an act
        under way: their original driver and override are not known any more."""
        self.forgotten_claims: set[str] = set()
        """The UIDs of claims that were there when the checkpoint was lost in this boot: only their files, and kubelet,
        say that they are prepared."""
        self.users: dict[str, int] = {}
        """The process that uses a card by its host driver, by address."""
        self.pulled: dict[str, list[PciSpec]] = {}
        """The functions of each card that is pulled, by the card's address."""
        self.freed: list[int] = []
        """The numbers of IOMMU groups that such cards had."""
        self.moved: set[str] = set()
        """The UIDs of claims under which a card was pulled: their pods may have lost it, and may never start again."""
        self.unidentified: set[str] = set()
        """The UIDs of claims that were there when a checkpoint was lost: nothing says which model they had."""

    def _open_writes(self) -> MemoryWrites:
        if self.administrator is None:
            return MemoryWrites(self.kernel)
        return MemoryWrites(self.kernel, on_write=self.administrator.written)

    def plug(self, spec: PciSpec) -> None:
        """A function that is there from the boot on."""
        self.home[spec.address] = spec.driver
        self.kernel.plug(spec)

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
            {"request": f"gpu-{i}", "driver": DRIVER, "pool": NODE, "device": slice_name(DeviceKey(a))}
            for i, a in enumerate(addresses)
        ]
        self.api.set_claim_status(NAMESPACE, name, {"allocation": {"devices": {"results": results}}})
        self.given[made["metadata"]["uid"]] = tuple(addresses)

    def hand_on(self, old: str, name: str) -> None:
        """Implement `DraNode.hand_on`."""
        self.allocate(name, self.given[old])

    # --- what happens to it ---------------------------------------------------------------------------------

    def use(self, address: str, pid: int) -> None:
        """A process opens a card by its host driver."""
        self.kernel.use(address, pid)
        self.users[address] = pid

    def end_user(self, address: str) -> None:
        """That process ends."""
        self.kernel.end(self.users.pop(address))

    def kill(self, daemon: str) -> None:
        """Implement `DraNode.kill`; the processes that write to sysfs for it go on."""
        super().kill(daemon)
        self.writes.settle()

    def power_cut(self) -> None:
        """Implement `DraNode.power_cut`; no write goes on."""
        super().power_cut()
        self.kernel.power_off()
        self.users.clear()
        self.writes = self._open_writes()
        if self.administrator is not None:
            self.administrator.reboot()
        self.forgotten.clear()
        self.forgotten_claims.clear()

    def lose_checkpoint(self) -> None:
        """Implement `DraNode.lose_checkpoint`."""
        super().lose_checkpoint()
        self._forget()

    def spoil_checkpoint(self, at: int) -> None:
        """Implement `DraNode.spoil_checkpoint`."""
        super().spoil_checkpoint(at)
        self._forget()

    def _forget(self) -> None:
        self.forgotten_claims |= self.given.keys()
        self.unidentified |= self.given.keys()
        written = self.writes.written
        self.forgotten.update(a for a in self.home if any(a in path or a in text for path, text in written))
        functions = self._tree.functions
        self.forgotten.update(
            a for a in self.home if a in functions and functions[a].group in self.writes.groups
        )

    # --- what is there --------------------------------------------------------------------------------------

    @property
    def cards(self) -> list[str]:
        """The cards, without their companions."""
        return [a for a, driver in self.home.items() if driver != COMPANION_DRIVER]

    def is_on_host_driver(self, address: str) -> bool:
        """NVIDIA's driver has it."""
        return address in self._tree.functions and self._tree.driver_of(address) == NVIDIA

    def outside_of(self, daemon: str, kubelet: ClaimsKubelet) -> DraOutside:
        """All that a daemon reaches for claims."""
        root = HostRoot(str(self._tree.root))
        binder = SysfsBinder(root, self.writes, MemoryPersistence(self.kernel), inline)
        outside = self.dra_outside(self.network.client(daemon), kubelet, binder)
        return outside if self.administrator is None else replace(outside, touched=self.touched)
