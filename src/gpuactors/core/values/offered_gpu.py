"""A GPU as the node offers it to claims: its name and its attributes.

The name follows from the PCI address alone: it survives a restart, and a hot-plug of another one.
"""

from __future__ import annotations

import re
from typing import Final
from uuid import NAMESPACE_DNS, uuid5

from msgspec import Struct

from gpuactors.core.values.model import DeviceKey
from gpuactors.core.values.slices import Attribute, BlockReason

SLICE_STRING_MAX_BYTES: Final = 64
"""A string attribute of a device (DeviceAttributeMaxValueLength)."""

STANDARD = "resource.kubernetes.io/"
"""The prefix of the attributes that Kubernetes defines (k8s.io/dynamic-resource-allocation/deviceattribute)."""

_PCI_BUS_ID = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]")


def device_name(address: DeviceKey) -> str:
    """The device's name in its slice, a DNS label: `gpu-0000-23-00-0`."""
    return f"gpu-{address.replace(':', '-').replace('.', '-')}"


class OfferedGpu(Struct, frozen=True, gc=False):
    """A GPU in a slice; see `slices.OfferedDevice`."""

    address: DeviceKey
    vendor: str
    """Four hex digits, as in `PciFunction`; so is `device`."""
    device: str
    model: str | None
    numa_node: int | None
    pcie_root: str | None
    iommu_group: int | None
    iommufd: bool
    """The node has iommufd, so that a virtual machine may open it by its cdev once it is on vfio."""
    memory_bytes: int = 0
    is_nvswitch: bool = False
    part_of: DeviceKey | None = None
    """The device that it is a part of, a physical function: see `Device.parent`."""
    blocked: BlockReason | None = None
    claimed: bool = False

    @property
    def name(self) -> str:
        """Its name in its slice."""
        return device_name(self.address)

    @property
    def invalid(self) -> str:
        """Why no slice can have it."""
        if self.part_of is not None and not self.claimed:
            return f"{self.address} is a virtual function of {self.part_of}, which is no whole GPU"
        if _PCI_BUS_ID.fullmatch(self.address):
            return ""
        return (
            f"{self.address} has a PCI domain of more than four digits (it is behind an Intel VMD controller), "
            "which neither Kubernetes' attribute pciBusID nor KubeVirt knows; switch VMD off for its slot"
        )

    @property
    def attributes(self) -> dict[str, Attribute]:
        """Scalars only: lists need a gate."""
        found: dict[str, str | int | bool | None] = {
            f"{STANDARD}pciBusID": self.address,
            f"{STANDARD}pcieRoot": self.pcie_root,
            f"{STANDARD}numaNode": self.numa_node,
            # A DeviceClass selects GPUs by it.
            "type": "nvswitch" if self.is_nvswitch else "vfio",
            # As NVIDIA's driver makes it for a device of this type: it is not the GPU's own, which vfio does not show.
            "uuid": None if self.is_nvswitch else str(uuid5(NAMESPACE_DNS, self.address)),
            "vendorID": f"0x{self.vendor}" if self.vendor else None,
            "deviceID": f"0x{self.device}" if self.device else None,
            "productName": self.model,
            "iommuGroup": self.iommu_group,
            "iommuFDEnabled": self.iommufd,
        }
        return {name: attribute(value) for name, value in found.items() if value is not None}

    @property
    def capacity(self) -> dict[str, str]:
        """As NVIDIA's driver: the memory behind the BARs, which is more than the GPU's own, if it is known."""
        return {"addressableMemory": quantity(self.memory_bytes)} if self.memory_bytes else {}


def quantity(size_bytes: int) -> str:
    """Bytes as Kubernetes writes them: `128Gi` (k8s.io/apimachinery, resource.Quantity of BinarySI)."""
    for suffix in ("", "Ki", "Mi", "Gi", "Ti", "Pi"):
        if size_bytes % 1024 or not size_bytes:
            return f"{size_bytes}{suffix}"
        size_bytes //= 1024
    return f"{size_bytes}Ei"


def attribute(value: str | int | bool) -> Attribute:
    """`value` with its type; a string as far as the server takes it."""
    match value:
        case bool():
            return Attribute("bool", value)
        case int():
            return Attribute("int", value)
        case str():
            # The server counts bytes; a character that would be cut in half is left out.
            short = value.encode()[:SLICE_STRING_MAX_BYTES].decode(errors="ignore")
            return Attribute("string", short)
