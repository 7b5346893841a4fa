"""From facts to devices: which functions are advertised to kubelet, under which resource, and the members of their
groups.

Must not judge a device's health (`assessment/`) and must not keep anything: everything here is derived from the facts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NewType

from msgspec import Struct

from gpuactors.core.values.model import DeviceKey, Orphan, PciFunction, ResourceName, device_key
from gpuactors.core.values.naming import resource_name
from gpuactors.core.values.selector import Selector, matches

KindName = NewType("KindName", str)
"""Names a kind of device (`kinds/table.py`)."""

COMPANION_CLASSES: Final = ("0403", "0c03", "0c80")
"""Audio, USB and the USB-C controller of a card: they share the GPU's slot and group and are allocated with it, but are
no GPU (kubevirt-gpu-device-plugin #67). Only a selector that names a class, a device or an address chooses one."""


class Device(Struct, frozen=True, gc=False):
    """A device that is (or would be) advertised to kubelet, or offered to claims. It answers for itself: only the
    module of its kind reads the facts of its units."""

    key: DeviceKey
    kind: KindName
    resource: ResourceName
    """The resource of its model; of a device that a pod has the one that it was allocated as."""
    model: str
    """Identifies its model: vendor and device id, `10de:2330`; empty if they could not be read."""
    is_selected: bool
    """The operator's selectors choose it."""
    units: tuple[PciFunction, ...]
    """The functions of the host that it consists of; of a whole function that one."""
    members: tuple[PciFunction, ...]
    """All known functions of its IOMMU group, sorted by address."""
    group: int | None
    """The number of its IOMMU group; None: it is in none."""
    parent: DeviceKey | None
    """The device that it is a part of: of an SR-IOV virtual function its physical function. None: it is whole."""
    nodes: tuple[str, ...]
    """The device nodes that a container with it gets, as paths of the host."""
    numa_node: int | None
    pcie_root: str | None
    driver: str | None
    """The driver that it is on; of a part of a device the one that makes it."""
    has_backing: bool
    """It is on a driver by which a virtual machine can open it."""
    may_be_unbinding: bool
    """See `may_be_unbinding`."""
    fault: str | None
    """The parts of it that could not be read, as a sentence; None if all could."""
    iommufd: bool
    """The node has `/dev/iommu`, so that a virtual machine may open it by its cdev once it is on vfio: any function was
    inspected beside it. It is there from the first bind on, on most nodes, and each function is inspected when it is
    bound."""

    @property
    def owned_keys(self) -> set[DeviceKey]:
        """Its key and that of each function of its IOMMU group: its owner has them all."""
        return {self.key, *(device_key(member.address) for member in self.members)}


def orphans_of(device: Device, orphans: Mapping[DeviceKey, Orphan]) -> list[Orphan]:
    """The devices of its group that a pod had which has left kubelet's ledger and may still hold them, by address."""
    return [orphans[key] for key in sorted(device.owned_keys) if key in orphans]


def is_selected(selectors: Iterable[Selector], function: PciFunction) -> bool:
    """Whether an operator's selectors choose this function as a device of its own.

    A function whose ids could never be read is not chosen: its resource is not known.
    """
    if not (function.vendor and function.device):
        return False
    companion = function.class_code.startswith(COMPANION_CLASSES)
    met = [
        selector
        for selector in selectors
        if matches(
            selector,
            vendor=function.vendor,
            device=function.device,
            class_code=function.class_code,
            address=function.address,
        )
    ]
    return not any(selector.exclude for selector in met) and any(
        not (companion and selector.class_prefix is selector.device is selector.address is None)
        for selector in met
    )


def ids_of(function: PciFunction) -> str:
    """Vendor and device id, which identify the model: `10de:2330`; empty if they could not be read."""
    return f"{function.vendor}:{function.device}" if function.vendor and function.device else ""


def may_be_unbinding(function: PciFunction) -> bool:
    """It has no driver, and its group's node is still there: it may be open, which only a poll can show.

    The driver's link goes first in an unbind or unplug; then the kernel waits until no process has the function open,
    and the node goes when the last function of the group has been released (drivers/base/dd.c, __device_release_driver;
    drivers/vfio/vfio_main.c, vfio_unregister_group_dev).
    """
    return function.driver is None and function.has_node


def named(function: PciFunction) -> ResourceName:
    """The resource of its model: the operator's own, else of its name in pci.ids."""
    return function.own_name or resource_name(function.vendor, function.device, function.model)
