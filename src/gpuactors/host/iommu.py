"""Reads an IOMMU group: its members, and whether firmware reserves memory for one of them.

Synchronous. A read of `reserved_regions` takes the group's mutex (drivers/iommu/iommu.c), which an unbind that waits
for its holder does not have.
"""

from __future__ import annotations

import os
import re
from typing import Final

from msgspec import Struct

from gpuactors.core.values.model import PciAddress, is_pci_address
from gpuactors.core.values.text import encodable
from gpuactors.host.faults import GONE, raise_if_short
from gpuactors.host.root import IOMMU_GROUPS, HostRoot

_REGION: Final = re.compile(r"0x([0-9a-f]+) 0x([0-9a-f]+) direct")
"""The start and end of a region that the kernel must map one to one (drivers/iommu/iommu.c,
iommu_group_show_resv_regions); a region of type `direct-relaxable`, `reserved` or `msi` keeps the group from nobody."""
_REGIONS_BYTES: Final = 65_536


class IommuGroup(Struct, frozen=True):
    """An IOMMU group as it was read."""

    functions: tuple[PciAddress, ...] = ()
    """Its PCI functions, sorted."""
    other_members: tuple[tuple[str, str], ...] = ()
    """See `PciFunction.other_members`."""
    direct_region: str = ""
    """See `PciFunction.direct_region`."""


def read_group(root: HostRoot, number: int) -> IommuGroup:
    """Read an IOMMU group. Raises `OSError` if it is gone or cannot be read, `HostError` for want of descriptors."""
    directory = root.real(f"{IOMMU_GROUPS}/{number}")
    try:
        names = sorted(os.listdir(f"{directory}/devices"))
        others = [name for name in names if not is_pci_address(name)]
        drivers = ((encodable(name), _driver(f"{directory}/devices/{name}")) for name in others)
        return IommuGroup(
            tuple([PciAddress(name) for name in names if is_pci_address(name)]),
            tuple([(name, driver) for name, driver in drivers if driver is not None]),
            _direct_region(f"{directory}/reserved_regions"),
        )
    except OSError as error:
        raise_if_short(error, directory)
        raise


def _driver(device: str) -> str | None:
    try:
        return encodable(os.path.basename(os.readlink(f"{device}/driver")))
    except OSError as error:
        if error.errno in GONE:
            return None
        raise


def _direct_region(path: str) -> str:
    """Return the first region of the type `direct`; empty if there is none, or no such file (before Linux 4.11)."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in GONE:
            return ""
        raise
    try:
        text = os.read(descriptor, _REGIONS_BYTES).decode("latin-1")
    finally:
        os.close(descriptor)
    for line in text.splitlines():
        if (region := _REGION.fullmatch(line.strip())) is not None:
            return f"{int(region[1], 16):#x} to {int(region[2], 16):#x}"
    return ""
