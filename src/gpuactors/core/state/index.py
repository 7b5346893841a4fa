"""What is derived of the node's functions, devices and owners: data only. `core/devices/index.py` derives it."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from gpuactors.core.values.inventory import Device
from gpuactors.core.values.model import (
    AdminAccess,
    ClaimedDevice,
    DeviceId,
    DeviceList,
    Observed,
    PciAddress,
    PciFunction,
    Pod,
    Resolved,
    ResourceName,
)
from gpuactors.core.values.owner import Named, Owner


@dataclass(frozen=True, slots=True)
class Index:
    """The derived values, preceded by the values that they are derived from."""

    functions: Mapping[PciAddress, PciFunction]
    """As `Host.functions`."""
    resolved: Mapping[Named, Resolved]
    entries: Mapping[Named, Pod]
    claims: Mapping[PciAddress, tuple[ClaimedDevice, ...]]
    """As kubelet lists them."""
    reserved: Mapping[PciAddress, ClaimedDevice]
    """As `Claims.reserved`: our own claims' devices, which kubelet does not list yet, or not any more."""
    admin: frozenset[AdminAccess]
    """As `Claims.admin`: those of the claims that own nothing."""
    ended: frozenset[tuple[str, str]]
    """As `Claims.ended`: those of the claims that own nothing any more, though kubelet still lists them."""
    served: frozenset[ResourceName]
    """Without their models."""
    device_lists: Mapping[ResourceName, DeviceList]
    leaving: frozenset[PciAddress]
    """As `Polls.leaving`."""
    observed: Mapping[int, Observed]
    """As `Polls.groups`."""

    groups: Mapping[int, tuple[PciFunction, ...]]
    """By the number of their IOMMU group; each sorted by address."""
    iommufd: bool
    """The node has `/dev/iommu`: any function was inspected beside it. It is there from the first bind on, on most
    nodes, and each function is inspected when it is bound."""
    switches: frozenset[PciAddress]
    """The NVSwitches that are on a driver of the host."""
    names: Mapping[PciAddress, ResourceName]
    """The selected functions with the resource of their model's name, sorted by address: an older plugin's ID, which is
    the group's number, means the first of the group's members."""
    models: Mapping[ResourceName, frozenset[str]]
    """The models (`10de:2330`) of the selected functions, by the resource of their name. A device that is listed by a
    former name, because a pod has it, does not count."""
    resources: Set[ResourceName]
    """The resources that are served here: of the selected functions, of the lists, and those that an earlier daemon
    served, as long as a pod has a device of them by an ID of ours."""
    uuids: Mapping[str, PciAddress]
    """The GPUs by the UUID that NVIDIA's driver names them by, where it is known."""
    devices: Mapping[PciAddress, Device]
    """Every device of this node, sorted by address: the selected functions, and the allocated ones. Whatever is
    selected or named now, an allocated device belongs to the resource that it was allocated as, until the pod ends."""
    kept: Mapping[PciAddress, ResourceName]
    """The devices that belong to another resource than that of their name, or have no name, because a pod has them."""
    unbinding: frozenset[PciAddress]
    """The devices that may be being unbound."""
    resolved_by: Mapping[PciAddress, tuple[Named, ...]]
    """The names in kubelet's ledger and our grants that mean a device, in order."""
    aliases: Mapping[Named, PciAddress]
    """Those of them that are no PCI address."""
    listed_aliases: Mapping[Named, PciAddress]
    """The devices that are listed by another ID than their PCI address."""
    given: Mapping[ResourceName, frozenset[DeviceId]]
    """The IDs that kubelet's ledger gives to pods, by resource, those of other plugins included."""
    unresolved: frozenset[Named]
    """The names in kubelet's ledger that mean no known device, and may come to mean one: a PCI address, an ID of a
    resource that is served here, or one of NVIDIA's device plugin for containers. Of all others, which may be
    thousands, no device is ever looked for."""
    unlisted: frozenset[Named]
    """The names that mean a device and are not in kubelet's ledger."""
    unsettled: frozenset[Named]
    """The names of devices whose allocated model is not known yet."""
    inspected_always: frozenset[PciAddress]
    """The devices of our resources that are allocated to pods: inspected whatever the selectors choose."""
    by_id: Mapping[ResourceName, Mapping[DeviceId, Device]]
    """The devices of each resource by the IDs that kubelet may use: the listed and allocated IDs, and the PCI
    address."""
    owners: Mapping[PciAddress, Owner]
    """Every device that kubelet has given to a pod or claim, under whatever ID and API."""
    polled: Mapping[int, tuple[PciAddress, ...]]
    """The groups with a device that is on a vfio driver, or may be leaving one, sorted, with the functions that a
    virtual machine can have open: those on a vfio driver, and those that are leaving one."""
    in_use: frozenset[int]
    """The groups that were in use when they were last polled."""


_NOTHING: Final[Mapping[Any, Any]] = MappingProxyType({})
_EMPTY: Final[frozenset[Any]] = frozenset()

NO_INDEX: Final = Index(
    functions=_NOTHING,
    resolved=_NOTHING,
    entries=_NOTHING,
    claims=_NOTHING,
    reserved=_NOTHING,
    admin=_EMPTY,
    ended=_EMPTY,
    served=_EMPTY,
    device_lists=_NOTHING,
    leaving=_EMPTY,
    observed=_NOTHING,
    groups=_NOTHING,
    iommufd=False,
    switches=_EMPTY,
    names=_NOTHING,
    models=_NOTHING,
    resources=_EMPTY,
    uuids=_NOTHING,
    devices=_NOTHING,
    kept=_NOTHING,
    unbinding=_EMPTY,
    resolved_by=_NOTHING,
    aliases=_NOTHING,
    listed_aliases=_NOTHING,
    given=_NOTHING,
    unresolved=_EMPTY,
    unlisted=_EMPTY,
    unsettled=_EMPTY,
    inspected_always=_EMPTY,
    by_id=_NOTHING,
    owners=_NOTHING,
    polled=_NOTHING,
    in_use=_EMPTY,
)
"""Of a state in which nothing is known."""
