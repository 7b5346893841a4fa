"""Mediated devices in the guest as an operator handles them: create, read, remove. Their parent is the kernel's sample
driver mtty, which is no PCI device.

Plain writes to sysfs with their plain errors. Must not share code with the daemon.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.vm.guest.sysfs import DEV_VFIO, link_name, write

PARENT: Final = Path("/sys/devices/virtual/mtty/mtty")
ONE_PORT, TWO_PORTS = "mtty-1", "mtty-2"
"""The types that it can make."""

ON_BUS: Final = Path("/sys/bus/mdev/devices")


@dataclass(frozen=True, slots=True)
class Mediated:
    """A mediated device by its UUID."""

    uuid: str

    @property
    def path(self) -> Path:
        """Its entry on the bus; may be gone."""
        return ON_BUS / self.uuid

    @property
    def type_id(self) -> str | None:
        """The name of its type's directory."""
        return link_name(self.path / "mdev_type")

    @property
    def group(self) -> str | None:
        """Number of its IOMMU group."""
        return link_name(self.path / "iommu_group")

    @property
    def group_node(self) -> Path:
        """`/dev/vfio/<group>`."""
        group = self.group
        assert group is not None, f"{self.uuid} has no IOMMU group"
        return DEV_VFIO / group

    @property
    def qemu_device(self) -> str:
        """How QEMU gets it."""
        return f"vfio-pci,sysfsdev={self.path}"

    def create(self, type_id: str) -> None:
        """Have its parent make it. A plain OSError says what the kernel refused: EEXIST where it is there."""
        write(PARENT / "mdev_supported_types" / type_id / "create", f"{self.uuid}\n")

    def remove(self) -> None:
        """Blocks while somebody has it open."""
        write(self.path / "remove", "1\n")
