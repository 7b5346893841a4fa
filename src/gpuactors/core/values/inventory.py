"""A device, and the rules by which a function becomes one: selection, model and resource.

Must not judge a device's health (`assessment/`). Everything here is derived from the facts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NewType

from msgspec import Struct

from gpuactors.core.values.model import (
    DeviceKey,
    InspectedKey,
    Orphan,
    PciFunction,
    ResourceName,
    device_key,
    is_pci_address,
)
from gpuactors.core.values.naming import resource_name, virtual_name
from gpuactors.core.values.own_resources import resource_of
from gpuactors.core.values.selector import Selector, matches

KindName = NewType("KindName", str)
"""The name of a kind of device (`kinds/table.py`)."""

COMPANION_CLASSES: Final = ("0403", "0c03", "0c80")
"""The classes of a card's audio, USB and USB-C controllers: they share the GPU's slot and group and are allocated with
it (kubevirt-gpu-device-plugin #67). Only a selector that names a class, a device or an address chooses one."""


class Device(Struct, frozen=True, gc=False):
    """A device that is, or would be, advertised to kubelet or offered to claims. Only the module of its kind reads the
    facts of its units."""

    key: DeviceKey
    kind: KindName
    resource: ResourceName
    """The resource of its model; for a device that a pod has, the resource that it was allocated as."""
    model: str
    """The model: vendor and device id, `10de:2330`; empty if they could not be read."""
    is_selected: bool
    """True if the operator's selectors choose it."""
    units: tuple[PciFunction, ...]
    """The functions of the host whose facts it depends on, its own first: a whole function; an SR-IOV virtual function
    and its physical one, if that is known; the parent of a mediated device, and the physical function of that. Empty
    only if the parent is no PCI function, or not known."""
    members: tuple[PciFunction, ...]
    """All known functions of its IOMMU group, sorted by address."""
    group: int | None
    """The number of its IOMMU group; None if it is in none."""
    parent: DeviceKey | None
    """The device that it is a part of: the physical function of an SR-IOV virtual function, the function that a
    mediated device was made of. None if it is whole, or its parent is no PCI function."""
    nodes: tuple[str, ...]
    """The device nodes that a container with it gets, as paths of the host."""
    numa_node: int | None
    pcie_root: str | None
    driver: str | None
    """The driver that it is on; for a part of a device, the driver that makes it."""
    has_backing: bool
    """True if it is on a driver by which a virtual machine can open it."""
    may_be_unbinding: bool
    """The value of `may_be_unbinding` for its function."""
    fault: str | None
    """The parts of it that could not be read, as a sentence; None if all could."""
    iommufd: bool
    """True if any function was inspected while `/dev/iommu` existed, so that a virtual machine may open the device by
    its cdev once it is on vfio. On most nodes the first bind makes `/dev/iommu`, and each bound function is
    inspected."""
    ancestors: tuple[DeviceKey, ...] = ()
    """Its parent, the parent of that, and so on, whether they are there or not. Set by `devices/inventory.py`."""
    parts: tuple[DeviceKey, ...] = ()
    """The devices that have it among their ancestors, sorted. Set by `devices/inventory.py`."""
    made_by: str = ""
    """Another program that has made it for a use of its own, as the subject of a sentence; empty if none has."""

    @property
    def relatives(self) -> tuple[DeviceKey, ...]:
        """The devices that exclude it while they have an owner. Two parts of one device do not exclude each other."""
        return self.ancestors + self.parts

    mixed: str = ""
    """Why KubeVirt cannot use it beside the other devices of its resource, as a sentence; empty if it can. Set by
    `devices/mixed.py`."""
    unnamed: str = ""
    """Why the name of its model is not known, as a sentence; empty if it is. Such a device is in no list, unless a pod
    has it."""

    @property
    def owned_keys(self) -> set[DeviceKey]:
        """The keys of the device and of each function of its IOMMU group: its owner has them all."""
        return {self.key, *(device_key(member.address) for member in self.members)}


def described(device: DeviceKey, relative: DeviceKey, *, is_part: bool) -> str:
    """Return a relative of a device, as the subject of a sentence: `its virtual function 0000:3b:00.4`."""
    if is_part:
        return f"its {'virtual function' if is_pci_address(relative) else 'part'} {relative}"
    return f"its {'physical function' if is_pci_address(device) else 'parent'} {relative}"


def inspected_keys(device: DeviceKey, units: Iterable[PciFunction]) -> tuple[InspectedKey, ...]:
    """Return what is inspected of a device with these units (`Device.units`): its key, and the address of each."""
    keys: tuple[InspectedKey, ...] = (device, *(unit.address for unit in units))
    return tuple(dict.fromkeys(keys))


def orphans_of(device: Device, orphans: Mapping[DeviceKey, Orphan]) -> list[Orphan]:
    """Return the orphans of the device's group, sorted by address."""
    return [orphans[key] for key in sorted(device.owned_keys) if key in orphans]


def is_selected(selectors: Iterable[Selector], function: PciFunction) -> bool:
    """Return whether the operator's selectors choose this function as a device of its own.

    A function whose ids could never be read is not chosen: its resource is not known. Nor is one whose name was not
    looked up: the scan by the selectors of a changed file does that.
    """
    if not (function.vendor and function.device) or function.model is None:
        return False
    is_companion = function.class_code.startswith(COMPANION_CLASSES)
    matching = [
        selector
        for selector in selectors
        if not selector.names_only
        and matches(
            selector,
            vendor=function.vendor,
            device=function.device,
            class_code=function.class_code,
            address=function.address,
        )
    ]
    return not any(selector.exclude for selector in matching) and any(
        not (is_companion and selector.class_prefix is selector.device is selector.address is None)
        for selector in matching
    )


def ids_of(function: PciFunction) -> str:
    """Return vendor and device id, which identify the model: `10de:2330`; empty if they could not be read."""
    return f"{function.vendor}:{function.device}" if function.vendor and function.device else ""


def may_be_unbinding(function: PciFunction) -> bool:
    """Return whether a function has no driver while its group's node still exists: only a poll can show if it is open.

    The driver's link goes first in an unbind or unplug; then the kernel waits until no process has the function open,
    and the node goes when the last function of the group has been released (drivers/base/dd.c, __device_release_driver;
    drivers/vfio/vfio_main.c, vfio_unregister_group_dev).
    """
    return function.driver is None and function.has_node


def named(function: PciFunction, selectors: Iterable[Selector]) -> ResourceName:
    """Return the resource of the function: the operator's, else that of its model's name in pci.ids."""
    return resource_of(selectors, function) or _model_name(function)


def named_virtual(
    function: PciFunction, physical: PciFunction | None, selectors: Iterable[Selector]
) -> ResourceName:
    """Return the resource of a virtual function: that of the physical function has another name, unless the operator
    names it."""
    if (own := resource_of(selectors, function)) is not None:
        return own
    name = _model_name(function)
    if physical is None:
        return name
    is_shared = ids_of(function) == ids_of(physical) or name == named(physical, selectors)
    return virtual_name(name) if is_shared else name


def _model_name(function: PciFunction) -> ResourceName:
    """Return the resource of the model's name in pci.ids."""
    return resource_name(function.vendor, function.device, function.model)
