"""The index of the node's functions, devices and owners, derived from parts of the state.

Each part is derived as a whole by a function of `inventory.py`, `holdings.py` or `others.py`, from its arguments alone.
The expensive ones remember their last results (`values/memo.py`). `NodeState.index` is the index of that state.

Must not judge: owner and status of a device are decided in `assessment/`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

from msgspec import Struct

from gpuactors.core.devices.holdings import holdings, owned, relatives_owned, unresolved
from gpuactors.core.devices.inventory import (
    Inventory,
    by_id,
    devices,
    devices_by_group,
    inventory_of,
    meanings_of,
    polled,
)
from gpuactors.core.devices.others import doubted, of_ids, others
from gpuactors.core.values.cdi import CdiSpecs
from gpuactors.core.values.group import GroupKey, Owned, RelativeOwner
from gpuactors.core.values.inventory import Device
from gpuactors.core.values.mediated import MediatedDevices
from gpuactors.core.values.memo import memoized
from gpuactors.core.values.model import (
    AdminAccess,
    ClaimedDevice,
    DeviceId,
    DeviceKey,
    DeviceList,
    Functions,
    Observed,
    PciAddress,
    PciFunction,
    Pod,
    Resolved,
    ResourceName,
)
from gpuactors.core.values.owner import Named, OwnClaims, Owner
from gpuactors.core.values.selector import Selector
from gpuactors.core.values.vgpu import CardTypes, OwnVgpuType


class Index(Struct, frozen=True, gc=False):
    """All parts of the index, flat."""

    groups: Mapping[int, tuple[PciFunction, ...]]
    """The same as in `Inventory`, like the next fields."""
    present: Mapping[DeviceKey, Device]
    parts: Mapping[DeviceKey, tuple[DeviceKey, ...]]
    group_of: Mapping[DeviceKey, GroupKey]
    switches: frozenset[PciAddress]
    names: Mapping[DeviceKey, ResourceName]
    models: Mapping[ResourceName, frozenset[str]]
    uuids: Mapping[str, DeviceKey]

    resolved_by: Mapping[DeviceKey, tuple[Named, ...]]
    """The same as `Meanings.names`."""
    aliases: Mapping[Named, DeviceKey]
    """The same as in `Meanings`, like the next field."""
    inspected_always: frozenset[PciAddress]

    resources: frozenset[ResourceName]
    """The resources that are served here: of the selected functions, of the device lists, and those that an earlier
    daemon served, as long as a pod has a device of them by an ID of gpuactors."""
    devices: Mapping[DeviceKey, Device]
    """The selected and the allocated devices, sorted by key, from `inventory.devices`."""
    devices_by_group: Mapping[GroupKey, tuple[Device, ...]]
    """The devices of each group, sorted by key."""
    unbinding: frozenset[DeviceKey]
    """The devices that may be in the middle of an unbind."""
    by_id: Mapping[ResourceName, Mapping[DeviceId, Device]]
    """The devices of each resource by the IDs that kubelet may use: the listed and allocated IDs, and the PCI
    address."""
    listed_aliases: Mapping[Named, DeviceKey]
    """The devices that are listed by another ID than their PCI address, by that ID."""
    polled: Mapping[int, tuple[PciAddress, ...]]
    """The groups to poll: those with a device that is on a vfio driver, or may be leaving one. Sorted, each with the
    functions that a VM can have open: those on a vfio driver or leaving one; none for a group that has no function of
    the host."""
    in_use: frozenset[int]
    """The groups that were in use when they were last polled."""

    owners: Mapping[DeviceKey, Owner]
    """The same as in `Holdings`, like the next two fields."""
    given: Mapping[ResourceName, frozenset[DeviceId]]
    unlisted: frozenset[Named]
    unresolved: frozenset[Named]
    """The names in kubelet's ledger that mean no known device, but may come to mean one: a PCI address, an ID of a
    resource that is served here, or one of NVIDIA's device plugin for containers. Other names, maybe thousands, are
    ignored."""
    possible_owners: Mapping[DeviceKey, Owner]
    """The owners, and those that may own a device without an owner."""
    owned: Mapping[GroupKey, Owned]
    """The possible owners of each group's devices."""
    relatives_owned: Mapping[GroupKey, tuple[RelativeOwner, ...]]
    """The owners of the relatives of each group's devices, sorted by relative."""
    ancestors: Mapping[DeviceKey, tuple[DeviceKey, ...]]
    """The same as `Kubelet.ancestors`."""

    def relatives(self, device: DeviceKey) -> frozenset[DeviceKey]:
        """Return the relatives of a device, which need not be there: its ancestors, its parts, and those parts that
        have gone while they have an owner."""
        present = self.present.get(device)
        above = self.ancestors.get(device, ()) if present is None else present.ancestors
        gone = [part for part, ancestors in self.ancestors.items() if device in ancestors]
        return frozenset((*above, *self.parts.get(device, ()), *gone))

    def group_number(self, device: DeviceKey) -> int | None:
        """Return the number of a device's IOMMU group; None if it is in none, or not there."""
        group = self.group_of.get(device)
        return group if isinstance(group, int) else None

    def group_numbers(self, devices: Iterable[DeviceKey]) -> frozenset[int]:
        """Return the numbers of these devices' groups."""
        return frozenset(g for device in devices if isinstance(g := self.group_of.get(device), int))


@memoized
def index(
    functions: Functions,
    mediated: MediatedDevices,
    selectors: tuple[Selector, ...],
    vgpu_types: Mapping[PciAddress, CardTypes],
    own_vgpu_types: tuple[OwnVgpuType, ...],
    observed: Mapping[int, Observed],
    leaving: frozenset[PciAddress],
    resolved: Mapping[Named, Resolved],
    entries: Mapping[Named, Pod],
    claims: Mapping[DeviceKey, tuple[ClaimedDevice, ...]],
    unplaced: frozenset[ClaimedDevice],
    specs: CdiSpecs,
    reserved: Mapping[DeviceKey, ClaimedDevice],
    admin: frozenset[AdminAccess],
    ended: frozenset[tuple[str, str]],
    own: OwnClaims,
    served: Set[ResourceName],
    device_lists: Mapping[ResourceName, DeviceList],
    ancestors: Mapping[DeviceKey, tuple[DeviceKey, ...]],
) -> Index:
    """Derive the index from parts of the state: `Host`, `Polls`, `Kubelet`, `Ledger`, `Gpus` and `Published`."""
    inventory = inventory_of(functions, mediated, selectors, vgpu_types, own_vgpu_types)
    meanings = meanings_of(resolved)
    resources = _resources(inventory, resolved, served, device_lists)
    node_devices = devices(inventory, meanings, resolved, resources)
    listed_aliases = _aliases(device_lists)
    other_claims = others(inventory, unplaced, specs, own, reserved)
    held = holdings(meanings.names, entries, claims, reserved, admin, ended, other_claims.allocations)
    doubts = (*other_claims.doubts, *(of_ids(inventory, held.vague, entries) if held.vague else ()))
    possible_owners = {**held.owners, **doubted(doubts, held.owners)} if doubts else held.owners
    return Index(
        groups=inventory.groups,
        present=inventory.present,
        parts=inventory.parts,
        group_of=inventory.group_of,
        switches=inventory.switches,
        names=inventory.names,
        models=inventory.models,
        uuids=inventory.uuids,
        resolved_by=meanings.names,
        aliases=meanings.aliases,
        inspected_always=meanings.inspected_always,
        resources=resources,
        devices=node_devices,
        devices_by_group=devices_by_group(node_devices, inventory.group_of),
        unbinding=frozenset([key for key, device in node_devices.items() if device.may_be_unbinding]),
        by_id=by_id(node_devices, meanings.aliases, listed_aliases),
        listed_aliases=listed_aliases,
        polled=polled(inventory.groups, node_devices, leaving),
        in_use=frozenset([group for group, use in observed.items() if use.in_use]),
        owners=held.owners,
        given=held.given,
        unlisted=held.unlisted,
        unresolved=unresolved(held.unknown, resources),
        possible_owners=possible_owners,
        owned=owned(possible_owners, inventory.group_of),
        relatives_owned=relatives_owned(
            held.owners, inventory.present, inventory.parts, ancestors, inventory.group_of
        ),
        ancestors=ancestors,
    )


def _resources(
    inventory: Inventory,
    resolved: Iterable[Named],
    served: Set[ResourceName],
    device_lists: Iterable[ResourceName],
) -> frozenset[ResourceName]:
    """Derive `Index.resources`."""
    resources = {*inventory.models, *device_lists}
    if unlisted := served - resources:
        resources |= {resource for resource, _ in resolved if resource in unlisted}
    return frozenset(resources)


@memoized
def _aliases(device_lists: Mapping[ResourceName, DeviceList]) -> Mapping[Named, DeviceKey]:
    """Derive `Index.listed_aliases`."""
    return {
        (resource, entry.id): entry.key
        for resource, device_list in device_lists.items()
        for entry in device_list
        if entry.id != DeviceId(entry.key)
    }
