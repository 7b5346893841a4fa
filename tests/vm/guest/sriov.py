"""SR-IOV in the guest as an operator handles it: make, list and remove the virtual functions of a card.

Plain writes to sysfs with their plain errors. Must not share code with the daemon.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.vm.guest.sysfs import Function, write


@dataclass(frozen=True, slots=True)
class PhysicalFunction:
    """A function that can have virtual functions, on a driver that makes them."""

    function: Function

    @property
    def path(self) -> Path:
        """Its directory in sysfs."""
        return self.function.path

    @property
    def virtual_functions(self) -> tuple[Function, ...]:
        """Its virtual functions by the links `virtfnN`, by number."""
        links = sorted(self.path.glob("virtfn*"), key=lambda link: int(link.name.removeprefix("virtfn")))
        return tuple(Function(link.readlink().name) for link in links)

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
