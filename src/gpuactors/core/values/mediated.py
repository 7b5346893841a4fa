"""Mediated devices, as an inspection reads them: parts of a device that its driver makes for virtual machines (vGPUs).

A file of its own: the other facts about the host are of PCI functions (`values/model.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from msgspec import Struct

from gpuactors.core.values.model import DeviceKey, PciAddress, PciFunction

_UUID: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def is_mediated_key(text: str) -> bool:
    """Return whether `text` is a UUID as sysfs spells it (drivers/vfio/mdev/mdev_core.c, `%pUl`)."""
    return _UUID.fullmatch(text) is not None


class MediatedDevice(Struct, frozen=True, gc=False):
    """One mediated device as an inspection read it from sysfs and /dev."""

    key: DeviceKey
    """Its UUID, in lower case."""
    parent: PciAddress | None
    """The PCI function whose driver made it, which may be a virtual function; None if the parent is no PCI function, as
    that of the kernel's sample driver mtty."""
    parent_name: str
    """The name of its parent in sysfs: the PCI address, or `mtty`; empty if it could not be read."""
    type_id: str | None
    """The name of its type's directory, `<driver>-<type>`: `nvidia-593`. None while the kernel has not made the link
    `mdev_type`, which comes after the last uevent (drivers/vfio/mdev/mdev_core.c, mdev_device_create)."""
    type_name: str
    """The name of its type: `NVIDIA A10-24Q`; `type_id` if the type has no name, empty if the type is not known."""
    driver: str | None
    """The driver that it is bound to, which makes it a vfio device; None if it is bound to none."""
    iommu_group: int | None
    """Its own group, which has no IOMMU behind it and no other member."""
    cdevs: tuple[str, ...]
    """The names of its vfio devices: `vfio7`; empty before Linux 6.1."""
    nodes: tuple[str, ...]
    """The device nodes that exist for it, as paths of the host: the container's and its group's."""
    numa_node: int | None
    """The NUMA node of its parent; None if the kernel has -1, or none."""
    pcie_root: str | None
    """The host bridge of its parent: `pci0000:20`; None if the parent is no PCI function."""
    fault: str | None
    """The parts that could not be read, as a sentence; None if all could."""
    presence: int = 0
    """The inode number of its directory in sysfs, as `PciFunction.presence`: it changes when the device is removed and
    made again with the same UUID. 0 if unknown."""
    made_by: str = ""
    """Another program that has made it for a use of its own, as the subject of a sentence: `NVIDIA's DRA driver`. Empty
    if none has, or that is not known."""

    @property
    def has_node(self) -> bool:
        """True if a virtual machine could open it by its group's node."""
        return f"/dev/vfio/{self.iommu_group}" in self.nodes


MediatedDevices = Mapping[DeviceKey, MediatedDevice]
"""The mediated devices of the host, by key."""

HostPart = PciFunction | MediatedDevice
"""A part of the host, as an inspection reads it."""


def key_of_part(part: HostPart) -> PciAddress | DeviceKey:
    """Return the key that the part is inspected by."""
    return part.key if isinstance(part, MediatedDevice) else part.address


def functions_of(parts: tuple[HostPart, ...]) -> tuple[PciFunction, ...]:
    """Return the functions among the parts, in their order."""
    return tuple([part for part in parts if isinstance(part, PciFunction)])


def mediated_of(parts: tuple[HostPart, ...]) -> tuple[MediatedDevice, ...]:
    """Return the mediated devices among the parts, in their order."""
    return tuple([part for part in parts if isinstance(part, MediatedDevice)])
