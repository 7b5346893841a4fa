"""A second administrator of the node: binds and unbinds functions, loads and unloads modules, touches files.

He knows nothing of gpuactors and asks nobody. What he did is remembered here, as the truth of which driver each
function is to be on when no claim has it: the histories' check is that nobody undoes what he decided. He writes to the
same kernel as the daemon, and the kernel refuses him what it refuses everybody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from copy import deepcopy
from typing import Any, Final, final

from gpuactors_simulation.host.kernel import DRIVERS, NVIDIA, FakeKernel, SleepsError

ADMINISTERED: Final = 1 << 34
"""The bit of a history's seed by which a node with claims of GPUs has a second administrator."""

LOADS_LATE: Final = 2
"""The bit of such a seed by which he loads NVIDIA's driver only when all claims are gone, if he has unloaded it."""

VFIO: Final = "vfio-pci"

VIRTUAL_FUNCTIONS: Final = 3
"""How many a card of such a node can have."""

UNBINDS: Final = (
    "an administrator binds a card to vfio-pci",
    "an administrator writes the id of a card to vfio-pci",
    "an administrator unbinds a card",
    "an administrator unbinds a card under its virtual machine",
    "an administrator binds a card to its host driver",
    "an administrator unloads vfio-pci",
)
"""The kinds of events by which a function loses its driver."""

_DEVICES: Final = "/sys/bus/pci/devices"
_PCI_DRIVERS: Final = "/sys/bus/pci/drivers"


@final
class Administrator:
    """An administrator's acts and decisions."""

    def __init__(
        self, kernel: FakeKernel, home: Mapping[str, str | None], *, loads_late: bool = False
    ) -> None:
        """`home` has the driver that the boot gives to each function."""
        self._kernel = kernel
        self._home = home
        self.loads_late: Final = loads_late
        self.claims_of: Callable[[str], Set[str]] = lambda _address: frozenset()
        """The UIDs of the claims that have, or may be getting, this function, by a naive reading of the node."""
        self.on_change: Callable[[str], None] = lambda _address: None
        """Called with each function of which he has changed the driver."""
        self._last: dict[str, frozenset[str | None]] = {}
        """The drivers that a function may be on at rest, where he has decided."""
        self._bound: set[str] = set()
        """Functions that he has bound to vfio-pci while no claim had them: who unbinds them undoes his decision."""
        self.overrode: set[str] = set()
        """Functions of which he has written the `driver_override`: what is in it at rest may be his."""
        self.disturbed: set[str] = set()
        """The UIDs of claims under which he has changed a driver: their pods may never run."""
        self.undone: list[str] = []
        """Acts of others against his decisions, as sentences."""
        self.slices: list[dict[str, Any]] = []
        """Copies of ResourceSlices that he has kept, newest last."""

    # --- what is to be ------------------------------------------------------------------------------------------------

    def at_rest(self, address: str) -> frozenset[str | None]:
        """The drivers that the function may be on when no claim has it."""
        return self._last.get(address, frozenset({self._home[address]}))

    def has_decided(self, address: str) -> bool:
        """He has ever changed its driver in this boot."""
        return address in self._last

    def written(self, path: str, text: str) -> None:
        """Somebody else than he, the daemon that is, writes to sysfs."""
        address = text.strip()
        if address not in self._bound:
            return
        if path.endswith(f"/{VFIO}/unbind"):
            self.undone.append(f"{address} was bound to {VFIO} by an administrator, and is taken from it")
        elif path.endswith(("/bind", "/drivers_probe")):
            self._bound.discard(address)

    # --- what he does -------------------------------------------------------------------------------------------------

    def write(self, path: str, text: str) -> bool:
        """A line of his script; whether it was done. One that sleeps in the kernel was not, and may be later."""
        with suppress(OSError, SleepsError):
            self._kernel.write(f"{self._kernel.tree.root}{path}", f"{text}\n")
            return True
        return False

    def override(self, address: str, driver: str) -> None:
        """Writes a driver's name to `driver_override`, or clears it (empty)."""
        self.overrode.add(address)
        self.write(f"{_DEVICES}/{address}/driver_override", driver)

    def unbind(self, address: str) -> None:
        """Unbinds a function from its driver."""
        with self._deciding():
            self._unbind(address)

    def to_vfio(self, address: str, *, keeps_override: bool) -> None:
        """As driverctl and vfio-manager do, which leave the override, or a script that clears it."""
        with self._deciding():
            self.override(address, VFIO)
            self._unbind(address)
            self.write(f"{_PCI_DRIVERS}/{VFIO}/bind", address)
            if not keeps_override:
                self.override(address, "")

    def to_vfio_by_id(self, address: str) -> None:
        """Follow the kernel's documentation of vfio: every function of this model that is without a driver goes."""
        spec = self._kernel.tree.functions[address]
        with self._deciding():
            self._unbind(address)
            self.write(f"{_PCI_DRIVERS}/{VFIO}/new_id", f"{spec.vendor} {spec.device}")

    def to_home(self, address: str) -> None:
        """Gives a function back to the host's driver."""
        with self._deciding():
            self.override(address, "")
            self._unbind(address)
            self.write(f"{_PCI_DRIVERS}/{self.host_driver(address)}/bind", address)

    def host_driver(self, address: str) -> str:
        """The host's driver for this function, whatever the boot has put it on."""
        spec = self._kernel.tree.functions[address]
        return next(name for name, ids in DRIVERS.items() if f"{spec.vendor}:{spec.device}" in ids)

    def unload(self, driver: str) -> None:
        """`rmmod`, which the kernel may refuse."""
        with self._deciding(), suppress(OSError):
            self._kernel.rmmod(driver)

    def load(self, driver: str) -> None:
        """`modprobe`."""
        if driver not in self._kernel.drivers:
            with self._deciding():
                self._kernel.modprobe(driver, DRIVERS[driver])

    def virtualize(self, address: str, count: int) -> None:
        """Starts virtual functions of a card, or ends them (0)."""
        with self._deciding():
            self.write(f"{_DEVICES}/{address}/sriov_numvfs", str(count))

    def _unbind(self, address: str) -> None:
        driver = self._kernel.tree.driver_of(address)
        if driver is not None:
            self.write(f"{_PCI_DRIVERS}/{driver}/unbind", address)

    @contextmanager
    def _deciding(self) -> Iterator[None]:
        """Record the changes made meanwhile as his decision."""
        before = self._drivers()
        yield
        for address, driver in self._drivers().items():
            if driver != before.get(address):
                self._decided(address, before.get(address), driver)

    def _drivers(self) -> dict[str, str | None]:
        tree = self._kernel.tree
        return {address: tree.driver_of(address) for address in self._home if address in tree.functions}

    def _decided(self, address: str, before: str | None, driver: str | None) -> None:
        uids, known = self.claims_of(address), self.at_rest(address)
        # Under a claim, or while its return is owed, a change may be seen by nobody: either way is right then.
        if uids or before not in known:
            self._last[address] = known | {driver}
            self._bound.discard(address)
        else:
            self._last[address] = frozenset({driver})
            (self._bound.add if driver == VFIO else self._bound.discard)(address)
        self.disturbed |= uids
        self.on_change(address)

    # --- the slices ---------------------------------------------------------------------------------------------------

    def keep(self, slices: Sequence[Mapping[str, Any]]) -> None:
        """He saves the node's slices."""
        self.slices = [deepcopy(dict(one)) for one in slices]

    # --- the end ------------------------------------------------------------------------------------------------------

    def repair(self) -> None:
        """Every module is loaded, but NVIDIA's where that comes late, and no card has virtual functions."""
        self._end_virtual_functions()
        for driver in DRIVERS:
            if driver != NVIDIA or not self.loads_late:
                self.load(driver)

    @property
    def is_late(self) -> bool:
        """NVIDIA's driver is still to be loaded: what is to go back to it is owed."""
        return NVIDIA not in self._kernel.drivers

    def reboot(self) -> None:
        """The machine stops: the boot decides again."""
        self._end_virtual_functions()
        for driver, ids in DRIVERS.items():
            self._kernel.load(driver, ids)
        for held in (self._last, self._bound, self.overrode):
            held.clear()

    def _end_virtual_functions(self) -> None:
        for address in self._home:
            if address in self._kernel.tree.functions and self._kernel.tree.virtual_functions(address):
                self.virtualize(address, 0)
