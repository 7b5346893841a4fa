"""The owners of each device by kubelet's word or ours: pods, grants and claims.

Plain loops over what its arguments name, as in `inventory.py`. Must not judge what that means for a device: that is
decided in `assessment/`.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any, Final

from msgspec import Struct, field

from gpuactors.core.devices.inventory import Inventory, Meanings
from gpuactors.core.kinds.table import is_key
from gpuactors.core.values.group import GroupKey, Owned
from gpuactors.core.values.model import (
    AdminAccess,
    ClaimedDevice,
    DeviceId,
    DeviceKey,
    Pod,
    Resolved,
    ResourceName,
    device_key,
)
from gpuactors.core.values.owner import Allocation, Named, Owner, gpu_uuid, is_mig_device, owner_of
from gpuactors.core.values.remade import amended, changed_keys, replaced

_EMPTY: Final[frozenset[Any]] = frozenset()


class Holdings(Struct, frozen=True, gc=False):
    """The owners of each device by the word of kubelet, and by ours."""

    names: Mapping[DeviceKey, tuple[Named, ...]] = field(default_factory=dict)
    """See `Meanings.names`."""
    entries: Mapping[Named, Pod] = field(default_factory=dict)
    claims: Mapping[DeviceKey, tuple[ClaimedDevice, ...]] = field(default_factory=dict)
    """As kubelet lists them."""
    reserved: Mapping[DeviceKey, ClaimedDevice] = field(default_factory=dict)
    """See `Gpus.reserved`: our own claims' devices, which kubelet does not list yet, or not any more."""
    admin: frozenset[AdminAccess] = _EMPTY
    """See `Gpus.admin`: those of the claims that own nothing."""
    ended: frozenset[tuple[str, str]] = _EMPTY
    """See `Gpus.ended`: those of the claims that own nothing any more, though kubelet still lists them."""

    others: Mapping[DeviceKey, tuple[Allocation, ...]] = field(default_factory=dict)
    """See `Others.has`."""

    by_name: Mapping[Named, Allocation] = field(default_factory=dict)
    """The entry of each name that means a device."""
    by_claim: Mapping[DeviceKey, list[Allocation]] = field(default_factory=dict)
    """The claims that have a device for themselves."""
    owners: Mapping[DeviceKey, Owner] = field(default_factory=dict)
    """Every device that kubelet has given to a pod or claim, under whatever ID and API."""
    given: Mapping[ResourceName, frozenset[DeviceId]] = field(default_factory=dict)
    """The IDs that kubelet's ledger gives to pods, by resource, those of other plugins included."""
    may_mean: Mapping[Named, bool] = field(default_factory=dict)
    """The names in kubelet's ledger that mean no device, and whether they may come to mean one whatever their resource:
    a PCI address, or an ID of NVIDIA's device plugin for containers."""
    vague: frozenset[Named] = _EMPTY
    """The names in kubelet's ledger that mean some GPU on its host's driver: a part of it, or it by a UUID that no GPU
    is known to have."""
    unlisted: frozenset[Named] = _EMPTY
    """The names that mean a device and are not in kubelet's ledger."""


NO_HOLDINGS: Final = Holdings()


def holdings(
    before: Holdings,
    meant: Meanings,
    entries: Mapping[Named, Pod],
    claims: Mapping[DeviceKey, tuple[ClaimedDevice, ...]],
    reserved: Mapping[DeviceKey, ClaimedDevice],
    admin: frozenset[AdminAccess],
    ended: frozenset[tuple[str, str]],
    others: Mapping[DeviceKey, tuple[Allocation, ...]],
) -> Holdings:
    """The owners of each device by the entries of kubelet's ledger, by its claims, by our own, and by those of other
    programs; see `Holdings` for what each is. Only those of a device of which one of these changed are made anew."""
    names, resolved = meant.names, meant.resolved
    same_claims = (
        before.claims is claims
        and before.reserved is reserved
        and before.admin == admin
        and before.ended == ended
        and before.others is others
    )
    if before.names is names and before.entries is entries and same_claims:
        return before
    addresses = changed_keys(before.names, names)
    listed = changed_keys(before.entries, entries)
    other = listed.union(*(of.get(a, ()) for a in addresses for of in (before.names, names)))
    addresses |= {resolved[name].address for name in listed if name in resolved}
    by_name = amended(before.by_name, {name: _entry(name, resolved, entries) for name in other})
    by_claim = before.by_claim
    if not same_claims:
        by_claim = _by_claim(claims, reserved, admin, ended, others)
        addresses |= changed_keys(before.by_claim, by_claim)
    by_address = {a: (*map(by_name.__getitem__, names.get(a, ())), *by_claim.get(a, ())) for a in addresses}
    return Holdings(
        names=names,
        entries=entries,
        claims=claims,
        reserved=reserved,
        admin=admin,
        ended=ended,
        others=others,
        by_name=by_name,
        by_claim=by_claim,
        owners=amended(
            before.owners, {a: owner_of(of_it) if of_it else None for a, of_it in by_address.items()}
        ),
        given=before.given if not listed or before.entries.keys() == entries.keys() else _given(entries),
        may_mean=amended(
            before.may_mean, {n: _may_mean(n) if n in entries and n not in by_name else None for n in other}
        ),
        vague=replaced(before.vague, other, [n for n in other if n in entries and _is_vague(n, by_name)]),
        unlisted=replaced(before.unlisted, other, [n for n in other if n in by_name and n not in entries]),
    )


def _entry(
    name: Named, resolved: Mapping[Named, Resolved], entries: Mapping[Named, Pod]
) -> Allocation | None:
    """The entry of a name; None if it means no device."""
    return Allocation(*name, entries.get(name)) if name in resolved else None


def _by_claim(
    claims: Mapping[DeviceKey, tuple[ClaimedDevice, ...]],
    reserved: Mapping[DeviceKey, ClaimedDevice],
    admin: frozenset[AdminAccess],
    ended: frozenset[tuple[str, str]],
    others: Mapping[DeviceKey, tuple[Allocation, ...]],
) -> dict[DeviceKey, list[Allocation]]:
    """Kubelet's list without our claims that own nothing, with our claims that it does not list, and with those of
    other programs whose devices it lists by other names."""
    owning = {
        a: [c for c in listed if (c.name, a) not in admin and c.name not in ended]
        for a, listed in claims.items()
    }
    for address, own in reserved.items():
        if own.name not in {c.name for c in owning.get(address, ())}:
            owning.setdefault(address, []).append(own)
    found = {a: [Allocation(None, c.claim, c) for c in of_it] for a, of_it in owning.items() if of_it}
    for address, of_others in others.items():
        found.setdefault(address, []).extend(of_others)
    return found


def _given(entries: Mapping[Named, Pod]) -> dict[ResourceName, frozenset[DeviceId]]:
    """Derive `Holdings.given`."""
    given: dict[ResourceName, set[DeviceId]] = {}
    for resource, device_id in entries:
        given.setdefault(resource, set()).add(device_id)
    return {resource: frozenset(ids) for resource, ids in given.items()}


def _may_mean(name: Named) -> bool:
    return is_key(name[1]) or gpu_uuid(name[1]) is not None


def _is_vague(name: Named, by_name: Mapping[Named, Allocation]) -> bool:
    return is_mig_device(name[1]) or (gpu_uuid(name[1]) is not None and name not in by_name)


def unresolved(may_mean: Mapping[Named, bool], resources: Set[ResourceName]) -> frozenset[Named]:
    """Derive `Index.unresolved`."""
    return frozenset([n for n, may in may_mean.items() if may or n[0] in resources])


def owned(
    before: Mapping[GroupKey, Owned],
    was: tuple[Mapping[DeviceKey, Owner], Inventory],
    owners: Mapping[DeviceKey, Owner],
    known: Inventory,
) -> Mapping[GroupKey, Owned]:
    """The owners of each group's functions, without those of functions that are gone. `was`: the owners and the
    inventory that `before` is of."""
    before_owners, before_known = was
    is_regrouped = before_known.group_of is not known.group_of
    other = before_owners.keys() | owners.keys() if is_regrouped else changed_keys(before_owners, owners)
    group_of = (before_known.group_of, known.group_of)
    groups = {of[address] for address in other for of in group_of if address in of}
    return amended(before, {group: _owned(group, owners, known) or None for group in groups})


def _owned(group: GroupKey, owners: Mapping[DeviceKey, Owner], known: Inventory) -> Owned:
    if not isinstance(group, int):
        return ((group, owners[group]),) if group in owners and known.group_of.get(group) == group else ()
    members = (device_key(f.address) for f in known.groups.get(group, ()))
    return tuple([(key, owners[key]) for key in members if key in owners])
