"""What is derived of the node's functions, devices and owners, from the parts of the state that it follows from.

Each part is made as a whole by a function of `inventory.py`, `holdings.py` or `others.py`, of which the arguments are
all that it follows from. Those that cost most remember their last results (`values/memo.py`). `NodeState.index` is that
of its state.

Must not judge: owner and status of a device are decided in `assessment/`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

from msgspec import Struct

from gpuactors.core.devices.holdings import holdings, owned, unresolved
from gpuactors.core.devices.inventory import Inventory, by_id, devices, inventory, meanings, polled
from gpuactors.core.devices.others import doubted, of_ids, others
from gpuactors.core.values.cdi import CdiSpecs
from gpuactors.core.values.group import GroupKey, Owned
from gpuactors.core.values.inventory import Device
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


class Index(Struct, frozen=True, gc=False):
    """All of it, flat."""

    groups: Mapping[int, tuple[PciFunction, ...]]
    """See `Inventory`, as for the others of its fields here."""
    present: Mapping[DeviceKey, Device]
    group_of: Mapping[DeviceKey, GroupKey]
    switches: frozenset[PciAddress]
    names: Mapping[DeviceKey, ResourceName]
    models: Mapping[ResourceName, frozenset[str]]
    uuids: Mapping[str, DeviceKey]

    resolved_by: Mapping[DeviceKey, tuple[Named, ...]]
    """See `Meanings.names`."""
    aliases: Mapping[Named, DeviceKey]
    """See `Meanings`, as for the others of its fields here."""
    inspected_always: frozenset[PciAddress]

    resources: frozenset[ResourceName]
    """The resources that are served here: of the selected functions, of the lists, and those that an earlier daemon
    served, as long as a pod has a device of them by one of our IDs."""
    devices: Mapping[DeviceKey, Device]
    """See `inventory.devices`."""
    unbinding: frozenset[DeviceKey]
    """The devices that may be being unbound."""
    by_id: Mapping[ResourceName, Mapping[DeviceId, Device]]
    """The devices of each resource by the IDs that kubelet may use: the listed and allocated IDs, and the PCI
    address."""
    listed_aliases: Mapping[Named, DeviceKey]
    """The devices that are listed by another ID than their PCI address."""
    polled: Mapping[int, tuple[PciAddress, ...]]
    """The groups with a device that is on a vfio driver, or may be leaving one, sorted, with the functions that a
    virtual machine can have open: those on a vfio driver, and those that are leaving one; none of a group that has no
    function of the host."""
    in_use: frozenset[int]
    """The groups that were in use when they were last polled."""

    owners: Mapping[DeviceKey, Owner]
    """See `Holdings`, as for the others of its fields here."""
    given: Mapping[ResourceName, frozenset[DeviceId]]
    unlisted: frozenset[Named]
    unresolved: frozenset[Named]
    """The names in kubelet's ledger that mean no known device, and may come to mean one: a PCI address, an ID of a
    resource that is served here, or one of NVIDIA's device plugin for containers. Of all others, which may be
    thousands, no device is ever looked for."""
    having: Mapping[DeviceKey, Owner]
    """The owners, and those who may be one."""
    owned: Mapping[GroupKey, Owned]
    """Who has each group, or may have it, by the word of kubelet, and by ours."""

    def group_number(self, device: DeviceKey) -> int | None:
        """The number of a device's IOMMU group; None: it is in none, or not there."""
        group = self.group_of.get(device)
        return group if isinstance(group, int) else None

    def group_numbers(self, devices: Iterable[DeviceKey]) -> frozenset[int]:
        """Those of all of these devices."""
        return frozenset(g for device in devices if isinstance(g := self.group_of.get(device), int))


@memoized
def index(
    functions: Functions,
    selectors: tuple[Selector, ...],
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
) -> Index:
    """The index of these parts of the state; see `Polls`, `Kubelet`, `Ledger`, `Gpus` and `Published`."""
    known, meant = inventory(functions, selectors), meanings(resolved)
    resources = _resources(known, resolved, served, device_lists)
    of_node = devices(known, meant, resolved, resources)
    listed_aliases = _aliases(device_lists)
    of_others = others(known, unplaced, specs, own)
    held = holdings(meant.names, entries, claims, reserved, admin, ended, of_others.has)
    doubts = (*of_others.doubts, *(of_ids(known, held.vague, entries) if held.vague else ()))
    having = {**held.owners, **doubted(doubts, held.owners)} if doubts else held.owners
    return Index(
        groups=known.groups,
        present=known.present,
        group_of=known.group_of,
        switches=known.switches,
        names=known.names,
        models=known.models,
        uuids=known.uuids,
        resolved_by=meant.names,
        aliases=meant.aliases,
        inspected_always=meant.inspected_always,
        resources=resources,
        devices=of_node,
        unbinding=frozenset([key for key, device in of_node.items() if device.may_be_unbinding]),
        by_id=by_id(of_node, meant.aliases, listed_aliases),
        listed_aliases=listed_aliases,
        polled=polled(known.groups, of_node, leaving),
        in_use=frozenset([group for group, use in observed.items() if use.in_use]),
        owners=held.owners,
        given=held.given,
        unlisted=held.unlisted,
        unresolved=unresolved(held.unknown, resources),
        having=having,
        owned=owned(having, known.group_of),
    )


def _resources(
    known: Inventory,
    resolved: Iterable[Named],
    served: Set[ResourceName],
    device_lists: Iterable[ResourceName],
) -> frozenset[ResourceName]:
    """Derive `Index.resources`."""
    resources = {*known.models, *device_lists}
    if others := served - resources:
        resources |= {resource for resource, _ in resolved if resource in others}
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
