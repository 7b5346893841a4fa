"""What is derived of the node's functions, devices and owners: data only. `core/devices/` derives it.

Each part begins with what it is derived of, so that a comparison by identity shows whether it is still that of the
state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from gpuactors.core.values.group import GroupKey
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
from gpuactors.core.values.owner import Given, Named, Owner

_EMPTY: Final[frozenset[Any]] = frozenset()


@dataclass(frozen=True, slots=True)
class Inventory:
    """What is there, of the functions and the operator's selectors."""

    functions: Mapping[PciAddress, PciFunction] = field(default_factory=dict)
    """As `Host.functions`."""

    kinds: Mapping[PciAddress, tuple[ResourceName, str] | None] = field(default_factory=dict)
    """Each function's resource and model (`10de:2330`); None: no selector chooses it."""
    groups: Mapping[int, tuple[PciFunction, ...]] = field(default_factory=dict)
    """By the number of their IOMMU group; each sorted by address."""
    group_of: Mapping[PciAddress, GroupKey] = field(default_factory=dict)
    """The group of each function."""
    iommufd: bool = False
    """The node has `/dev/iommu`: any function was inspected beside it. It is there from the first bind on, on most
    nodes, and each function is inspected when it is bound."""
    switches: frozenset[PciAddress] = _EMPTY
    """The NVSwitches that are on a driver of the host."""
    names: Mapping[PciAddress, ResourceName] = field(default_factory=dict)
    """The selected functions with the resource of their model's name, sorted by address: an older plugin's ID, which is
    the group's number, means the first of the group's members."""
    models: Mapping[ResourceName, frozenset[str]] = field(default_factory=dict)
    """The models of the selected functions, by the resource of their name. A device that is listed by a former name,
    because a pod has it, does not count."""
    uuids: Mapping[str, PciAddress] = field(default_factory=dict)
    """The GPUs by the UUID that NVIDIA's driver names them by, where it is known."""


NOTHING_KNOWN: Final = Inventory()


@dataclass(frozen=True, slots=True)
class Meanings:
    """The devices that the names in kubelet's ledger and our grants mean."""

    resolved: Mapping[Named, Resolved] = field(default_factory=dict)
    """As `Kubelet.resolved`."""

    names: Mapping[PciAddress, tuple[Named, ...]] = field(default_factory=dict)
    """The names of each device, in order."""
    aliases: Mapping[Named, PciAddress] = field(default_factory=dict)
    """The names that are no PCI address."""
    inspected_always: frozenset[PciAddress] = _EMPTY
    """The devices of our resources that are allocated to pods: inspected whatever the selectors choose."""


NOTHING_MEANT: Final = Meanings()


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices of this node."""

    inventory: Inventory = NOTHING_KNOWN
    meanings: Meanings = NOTHING_MEANT
    resources: frozenset[ResourceName] = _EMPTY
    """The resources that are served here: of the selected functions, of the lists, and those that an earlier daemon
    served, as long as a pod has a device of them by an ID of ours."""

    kept: Mapping[PciAddress, ResourceName] = field(default_factory=dict)
    """The devices that belong to another resource than that of their name, or have no name, because a pod has them."""
    devices: Mapping[PciAddress, Device] = field(default_factory=dict)
    """Every device of this node, sorted by address: the selected functions, and the allocated ones. Whatever is
    selected or named now, an allocated device belongs to the resource that it was allocated as, until the pod ends."""
    unbinding: frozenset[PciAddress] = _EMPTY
    """The devices that may be being unbound."""


@dataclass(frozen=True, slots=True)
class Holdings:
    """Who has each device by the word of kubelet, and by ours."""

    names: Mapping[PciAddress, tuple[Named, ...]] = field(default_factory=dict)
    """As `Meanings.names`."""
    entries: Mapping[Named, Pod] = field(default_factory=dict)
    claims: Mapping[PciAddress, tuple[ClaimedDevice, ...]] = field(default_factory=dict)
    """As kubelet lists them."""
    reserved: Mapping[PciAddress, ClaimedDevice] = field(default_factory=dict)
    """As `Claims.reserved`: our own claims' devices, which kubelet does not list yet, or not any more."""
    admin: frozenset[AdminAccess] = _EMPTY
    """As `Claims.admin`: those of the claims that own nothing."""
    ended: frozenset[tuple[str, str]] = _EMPTY
    """As `Claims.ended`: those of the claims that own nothing any more, though kubelet still lists them."""

    pods: Mapping[Named, Pod | None] = field(default_factory=dict)
    """The pod of each name that means a device, by kubelet's ledger."""
    by_name: Mapping[Named, Given] = field(default_factory=dict)
    """The entry of each of these names."""
    by_claim: Mapping[PciAddress, list[Given]] = field(default_factory=dict)
    """The claims that have a device for themselves."""
    by_address: Mapping[PciAddress, tuple[Given, ...]] = field(default_factory=dict)
    """Both, by the device."""
    owners: Mapping[PciAddress, Owner] = field(default_factory=dict)
    """Every device that kubelet has given to a pod or claim, under whatever ID and API."""
    given: Mapping[ResourceName, frozenset[DeviceId]] = field(default_factory=dict)
    """The IDs that kubelet's ledger gives to pods, by resource, those of other plugins included."""
    may_mean: Mapping[Named, bool] = field(default_factory=dict)
    """The names in kubelet's ledger that mean no device, and whether they may come to mean one whatever their resource:
    a PCI address, or an ID of NVIDIA's device plugin for containers."""
    unlisted: frozenset[Named] = _EMPTY
    """The names that mean a device and are not in kubelet's ledger."""


@dataclass(frozen=True, slots=True)
class Index:
    """The four parts, and what follows from several."""

    known: Inventory = NOTHING_KNOWN
    meant: Meanings = NOTHING_MEANT
    of: Devices = Devices()
    held: Holdings = Holdings()
    served: frozenset[ResourceName] = _EMPTY
    """Without their models."""
    device_lists: Mapping[ResourceName, DeviceList] = field(default_factory=dict)
    leaving: frozenset[PciAddress] = _EMPTY
    """As `Polls.leaving`."""
    observed: Mapping[int, Observed] = field(default_factory=dict)
    """As `Polls.groups`."""

    aliases_of: Mapping[ResourceName, Mapping[DeviceId, PciAddress]] = field(default_factory=dict)
    """The IDs of each list that are no PCI address."""
    listed_aliases: Mapping[Named, PciAddress] = field(default_factory=dict)
    """The devices that are listed by another ID than their PCI address."""
    unresolved: frozenset[Named] = _EMPTY
    """The names in kubelet's ledger that mean no known device, and may come to mean one: a PCI address, an ID of a
    resource that is served here, or one of NVIDIA's device plugin for containers. Of all others, which may be
    thousands, no device is ever looked for."""
    by_id: Mapping[ResourceName, Mapping[DeviceId, Device]] = field(default_factory=dict)
    """The devices of each resource by the IDs that kubelet may use: the listed and allocated IDs, and the PCI
    address."""
    polled: Mapping[int, tuple[PciAddress, ...]] = field(default_factory=dict)
    """The groups with a device that is on a vfio driver, or may be leaving one, sorted, with the functions that a
    virtual machine can have open: those on a vfio driver, and those that are leaving one."""
    in_use: frozenset[int] = _EMPTY
    """The groups that were in use when they were last polled."""

    @property
    def functions(self) -> Mapping[PciAddress, PciFunction]:
        return self.known.functions

    @property
    def groups(self) -> Mapping[int, tuple[PciFunction, ...]]:
        return self.known.groups

    @property
    def iommufd(self) -> bool:
        return self.known.iommufd

    @property
    def switches(self) -> frozenset[PciAddress]:
        return self.known.switches

    @property
    def names(self) -> Mapping[PciAddress, ResourceName]:
        return self.known.names

    @property
    def models(self) -> Mapping[ResourceName, frozenset[str]]:
        return self.known.models

    @property
    def uuids(self) -> Mapping[str, PciAddress]:
        return self.known.uuids

    @property
    def resolved(self) -> Mapping[Named, Resolved]:
        return self.meant.resolved

    @property
    def resolved_by(self) -> Mapping[PciAddress, tuple[Named, ...]]:
        return self.meant.names

    @property
    def aliases(self) -> Mapping[Named, PciAddress]:
        return self.meant.aliases

    @property
    def inspected_always(self) -> frozenset[PciAddress]:
        return self.meant.inspected_always

    @property
    def resources(self) -> frozenset[ResourceName]:
        return self.of.resources

    @property
    def devices(self) -> Mapping[PciAddress, Device]:
        return self.of.devices

    @property
    def unbinding(self) -> frozenset[PciAddress]:
        return self.of.unbinding

    @property
    def owners(self) -> Mapping[PciAddress, Owner]:
        return self.held.owners

    @property
    def given(self) -> Mapping[ResourceName, frozenset[DeviceId]]:
        return self.held.given

    @property
    def unlisted(self) -> frozenset[Named]:
        return self.held.unlisted


NO_INDEX: Final = Index()
"""Of a state in which nothing is known."""
