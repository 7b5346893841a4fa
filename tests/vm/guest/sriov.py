"""SR-IOV in the guest as an operator handles it: make, list and remove the virtual functions of a card.

Plain writes to sysfs with their plain errors. Must not share code with the daemon.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.support.patience import patient
from tests.vm.guest.runner import eventually
from tests.vm.guest.sysfs import Function, function_behind, write
from tests.vm.machine import Machine, PciFunction

IGB: Final = PciFunction("card", "igb", "rp1", properties=("romfile=",))
"""A card whose driver, `igb`, removes its virtual functions when it is unbound. They have ids of their own."""

NVME: Final = PciFunction(
    "nvme",
    "nvme",
    "rp2",
    properties=(
        "serial=1", "subsys=subsystem", "sriov_max_vfs=2", "sriov_vq_flexible=4", "sriov_vi_flexible=2",
    ),
    before=("nvme-subsys,id=subsystem",),
)  # fmt: skip
"""A card whose driver, `nvme`, leaves its virtual functions when it is unbound. They have the card's own ids. Without
queues of their own they do not work as disks; vfio-pci does not ask for that."""

BOOTED_WITHIN_S: Final = patient(10.0)
"""A driver of the host has its card."""


@dataclass(frozen=True, slots=True)
class PhysicalFunction:
    """A function that can have virtual functions, on a driver that makes them."""

    function: Function

    @classmethod
    def booted(cls, machine: Machine, card: PciFunction) -> PhysicalFunction:
        """IGB or NVME, when its driver has it, whose name is the model's. Raises TimeoutError."""
        function = function_behind(machine, card.port)
        eventually(f"{card.model} bound", lambda: function.driver == card.model, timeout_s=BOOTED_WITHIN_S)
        return cls(function)

    @property
    def path(self) -> Path:
        """Its directory in sysfs."""
        return self.function.path

    @property
    def virtual_functions(self) -> tuple[Function, ...]:
        """Its virtual functions by the links `virtfnN`, by number."""
        links = sorted(self.path.glob("virtfn*"), key=lambda link: int(link.name.removeprefix("virtfn")))
        return tuple(Function(link.readlink().name) for link in links)

    def address_of(self, number: int) -> str:
        """Where its virtual function of this number is, from 1 on, or would be (PCI Express, 9.3.3.9 and 9.3.3.10)."""
        offset, stride = (
            int((self.path / f"sriov_{name}").read_text(encoding="ascii")) for name in ("offset", "stride")
        )
        domain, bus, slot, function = re.split("[:.]", self.function.address)
        own = int(bus, 16) << 8 | int(slot, 16) << 3 | int(function)
        its = own + offset + (number - 1) * stride
        return f"{domain}:{its >> 8:02x}:{its >> 3 & 0x1F:02x}.{its & 7}"

    @property
    def total(self) -> int:
        """How many virtual functions the card can have."""
        return int((self.path / "sriov_totalvfs").read_text(encoding="ascii"))

    def enable(self, count: int) -> tuple[Function, ...]:
        """Make `count` virtual functions; they are there when it returns. A plain OSError says what the kernel refused:
        EBUSY where there are some already."""
        write(self.path / "sriov_numvfs", f"{count}\n")
        return self.virtual_functions

    def disable(self) -> None:
        """Remove all virtual functions. Blocks while somebody holds one."""
        write(self.path / "sriov_numvfs", "0\n")

    def autoprobe(self, wanted: bool) -> None:
        """Whether new virtual functions are offered to the drivers that know their ids."""
        write(self.path / "sriov_drivers_autoprobe", f"{int(wanted)}\n")


def physical_function_of(function: Function) -> Function | None:
    """The card whose virtual function it is, by the link `physfn`; None where there is no such link."""
    link = function.path / "physfn"
    return Function(link.readlink().name) if link.is_symlink() else None
