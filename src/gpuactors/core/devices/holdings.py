"""The owners of each device by kubelet's word or ours: pods, grants and claims.

Plain loops over what its arguments name, as in `inventory.py`. Must not judge what that means for a device: that is
decided in `assessment/`.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from itertools import chain
from operator import itemgetter, ne
from typing import Any, Final

from msgspec import Struct, field

from gpuactors.core.values.group import GroupKey, Owned
from gpuactors.core.values.model import (
    AdminAccess,
    ClaimedDevice,
    DeviceId,
    PciAddress,
    Pod,
    ResourceName,
    is_pci_address,
)
from gpuactors.core.values.owner import Allocation, Named, Owner, gpu_uuid, owner_of
from gpuactors.core.values.remade import grouped, remade

_EMPTY: Final[frozenset[Any]] = frozenset()


class Holdings(Struct, frozen=True):
    """The owners of each device by the word of kubelet, and by ours."""

    names: Mapping[PciAddress, tuple[Named, ...]] = field(default_factory=dict)
    """See `Meanings.names`."""
    entries: Mapping[Named, Pod] = field(default_factory=dict)
    claims: Mapping[PciAddress, tuple[ClaimedDevice, ...]] = field(default_factory=dict)
    """As kubelet lists them."""
    reserved: Mapping[PciAddress, ClaimedDevice] = field(default_factory=dict)
    """See `Gpus.reserved`: our own claims' devices, which kubelet does not list yet, or not any more."""
    admin: frozenset[AdminAccess] = _EMPTY
    """See `Gpus.admin`: those of the claims that own nothing."""
    ended: frozenset[tuple[str, str]] = _EMPTY
    """See `Gpus.ended`: those of the claims that own nothing any more, though kubelet still lists them."""

    pods: Mapping[Named, Pod | None] = field(default_factory=dict)
    """The pod of each name that means a device, by kubelet's ledger."""
    by_name: Mapping[Named, Allocation] = field(default_factory=dict)
    """The entry of each of these names."""
    by_claim: Mapping[PciAddress, list[Allocation]] = field(default_factory=dict)
    """The claims that have a device for themselves."""
    by_address: Mapping[PciAddress, tuple[Allocation, ...]] = field(default_factory=dict)
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


NO_HOLDINGS: Final = Holdings()


def holdings(
    before: Holdings,
    names: Mapping[PciAddress, tuple[Named, ...]],
    entries: Mapping[Named, Pod],
    claims: Mapping[PciAddress, tuple[ClaimedDevice, ...]],
    reserved: Mapping[PciAddress, ClaimedDevice],
    admin: frozenset[AdminAccess],
    ended: frozenset[tuple[str, str]],
) -> Holdings:
    """The owners of each device by the entries of kubelet's ledger, by its claims, and by our own; see `Holdings` for
    what each is. `names` are those that mean a device."""
    same_claims = (
        before.claims is claims
        and before.reserved is reserved
        and before.admin == admin
        and before.ended == ended
    )
    if before.names is names and before.entries is entries and same_claims:
        return before
    known = [*chain.from_iterable(names.values())]
    pods = dict(zip(known, map(entries.get, known), strict=True))
    by_name = remade(before.by_name, before.pods, pods, lambda name, pod: Allocation(*name, pod))
    by_claim = before.by_claim if same_claims else _by_claim(claims, reserved, admin, ended)
    by_address = {a: tuple(map(by_name.__getitem__, of_it)) for a, of_it in names.items()}
    for address, given in by_claim.items():
        by_address[address] = (*by_address.get(address, ()), *given)
    same_names = before.entries.keys() == entries.keys()
    return Holdings(
        names=names,
        entries=entries,
        claims=claims,
        reserved=reserved,
        admin=admin,
        ended=ended,
        pods=pods,
        by_name=by_name,
        by_claim=by_claim,
        by_address=by_address,
        owners=remade(before.owners, before.by_address, by_address, _owner, ne),
        given=before.given if same_names else _given(entries),
        may_mean=_may_mean(entries.keys() - pods.keys(), before.may_mean),
        unlisted=frozenset(pods.keys() - entries.keys()),
    )


def _owner(_: PciAddress, given: tuple[Allocation, ...]) -> Owner:
    return owner_of(given)


def _by_claim(
    claims: Mapping[PciAddress, tuple[ClaimedDevice, ...]],
    reserved: Mapping[PciAddress, ClaimedDevice],
    admin: frozenset[AdminAccess],
    ended: frozenset[tuple[str, str]],
) -> dict[PciAddress, list[Allocation]]:
    """Kubelet's list without our claims that own nothing, and with our claims that it does not list."""
    owning = {
        a: [c for c in listed if (c.name, a) not in admin and c.name not in ended]
        for a, listed in claims.items()
    }
    for address, own in reserved.items():
        if own.name not in {c.name for c in owning.get(address, ())}:
            owning.setdefault(address, []).append(own)
    return {a: [Allocation(None, c.claim, c) for c in of_it] for a, of_it in owning.items() if of_it}


def _given(entries: Mapping[Named, Pod]) -> dict[ResourceName, frozenset[DeviceId]]:
    """Derive `Holdings.given`."""
    given: dict[ResourceName, set[DeviceId]] = {}
    for resource, device_id in entries:
        given.setdefault(resource, set()).add(device_id)
    return {resource: frozenset(ids) for resource, ids in given.items()}


def _may_mean(names: Set[Named], before: Mapping[Named, bool]) -> dict[Named, bool]:
    """Derive `Holdings.may_mean`; each ID is read once, as another plugin may have thousands."""
    return {
        n: before[n] if n in before else is_pci_address(n[1]) or gpu_uuid(n[1]) is not None for n in names
    }


def unresolved(may_mean: Mapping[Named, bool], resources: Set[ResourceName]) -> frozenset[Named]:
    """Derive `Index.unresolved`."""
    return frozenset([n for n, may in may_mean.items() if may or n[0] in resources])


def owned(
    owners: Mapping[PciAddress, Owner], group_of: Mapping[PciAddress, GroupKey]
) -> Mapping[GroupKey, Owned]:
    """The owners of each group's functions, without those of functions that are gone."""
    if not owners.keys() <= group_of.keys():
        owners = {address: owner for address, owner in owners.items() if address in group_of}
    found = grouped([*map(group_of.__getitem__, owners)], owners.items())
    if len(found) == len(owners):
        return found
    return {key: tuple(sorted(of_it, key=itemgetter(0))) for key, of_it in found.items()}
