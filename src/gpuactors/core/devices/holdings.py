"""Who has each device by kubelet's word or ours: pods, grants and claims.

Plain loops over what its arguments name, as in `inventory.py`. Must not judge what that means for a device: that is
decided in `assessment/`.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from itertools import chain
from operator import ne

from gpuactors.core.state.index import Holdings
from gpuactors.core.values.model import (
    AdminAccess,
    ClaimedDevice,
    DeviceId,
    PciAddress,
    Pod,
    ResourceName,
    is_pci_address,
)
from gpuactors.core.values.owner import Given, Named, Owner, gpu_uuid, owner_of
from gpuactors.core.values.remade import remade


def holdings(
    before: Holdings,
    names: Mapping[PciAddress, tuple[Named, ...]],
    entries: Mapping[Named, Pod],
    claims: Mapping[PciAddress, tuple[ClaimedDevice, ...]],
    reserved: Mapping[PciAddress, ClaimedDevice],
    admin: frozenset[AdminAccess],
    ended: frozenset[tuple[str, str]],
) -> Holdings:
    """Who has each device by the entries of kubelet's ledger, by its claims, and by our own; see `Holdings` for what
    each is. `names` are those that mean a device."""
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
    by_name = remade(before.by_name, before.pods, pods, lambda name, pod: Given(*name, pod))
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


def _owner(_: PciAddress, given: tuple[Given, ...]) -> Owner:
    return owner_of(given)


def _by_claim(
    claims: Mapping[PciAddress, tuple[ClaimedDevice, ...]],
    reserved: Mapping[PciAddress, ClaimedDevice],
    admin: frozenset[AdminAccess],
    ended: frozenset[tuple[str, str]],
) -> dict[PciAddress, list[Given]]:
    """By kubelet's list without those of ours that own nothing, and by our own claims that it does not list."""
    owning = {
        a: [c for c in listed if (c.name, a) not in admin and c.name not in ended]
        for a, listed in claims.items()
    }
    for address, own in reserved.items():
        if own.name not in {c.name for c in owning.get(address, ())}:
            owning.setdefault(address, []).append(own)
    return {a: [Given(None, c.claim, c) for c in of_it] for a, of_it in owning.items() if of_it}


def _given(entries: Mapping[Named, Pod]) -> dict[ResourceName, frozenset[DeviceId]]:
    """As `Holdings.given`."""
    given: dict[ResourceName, set[DeviceId]] = {}
    for resource, device_id in entries:
        given.setdefault(resource, set()).add(device_id)
    return {resource: frozenset(ids) for resource, ids in given.items()}


def _may_mean(names: Set[Named], before: Mapping[Named, bool]) -> dict[Named, bool]:
    """As `Holdings.may_mean`; each ID is read once, as another plugin may have thousands."""
    return {
        n: before[n] if n in before else is_pci_address(n[1]) or gpu_uuid(n[1]) is not None for n in names
    }


def unresolved(may_mean: Mapping[Named, bool], resources: Set[ResourceName]) -> frozenset[Named]:
    """As `Index.unresolved`."""
    return frozenset([n for n, may in may_mean.items() if may or n[0] in resources])
