"""The owners of each device by kubelet's word or ours: pods, grants and claims.

Plain loops over what its arguments name, as in `inventory.py`. Must not judge what that means for a device: that is
decided in `assessment/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from msgspec import Struct

from gpuactors.core.kinds.table import is_key
from gpuactors.core.values.group import GroupKey, Owned
from gpuactors.core.values.memo import memoized, memoized_each
from gpuactors.core.values.model import (
    AdminAccess,
    ClaimedDevice,
    DeviceId,
    DeviceKey,
    Pod,
    ResourceName,
)
from gpuactors.core.values.owner import Allocation, Named, Owner, gpu_uuid, is_mig_device, owner_of

_IDS_KEPT: Final = 8_192
"""Of how many IDs it is remembered what they may be: a node's other plugins may have thousands in kubelet's ledger."""


class Holdings(Struct, frozen=True, gc=False):
    """The owners of each device by the word of kubelet, and by ours."""

    owners: Mapping[DeviceKey, Owner]
    """Every device that kubelet has given to a pod or claim, under whatever ID and API."""
    given: Mapping[ResourceName, frozenset[DeviceId]]
    """The IDs that kubelet's ledger gives to pods, by resource, those of other plugins included."""
    unknown: frozenset[Named]
    """The names in kubelet's ledger that mean no device."""
    vague: frozenset[Named]
    """The names in kubelet's ledger that mean some GPU on its host's driver: a part of it, or it by a UUID that no GPU
    is known to have."""
    unlisted: frozenset[Named]
    """The names that mean a device and are not in kubelet's ledger."""


@memoized
def holdings(
    names: Mapping[DeviceKey, tuple[Named, ...]],
    entries: Mapping[Named, Pod],
    claims: Mapping[DeviceKey, tuple[ClaimedDevice, ...]],
    reserved: Mapping[DeviceKey, ClaimedDevice],
    admin: frozenset[AdminAccess],
    ended: frozenset[tuple[str, str]],
    others: Mapping[DeviceKey, tuple[Allocation, ...]],
) -> Holdings:
    """The owners of each device by the entries of kubelet's ledger, by its claims, by our own, and by those of other
    programs.

    `names`: see `Meanings.names`. `claims`: as kubelet lists them. `reserved`: see `Gpus.reserved`, our own claims'
    devices, which kubelet does not list yet, or not any more. `admin`, `ended`: see `Gpus`, those of the claims that
    own nothing, or nothing any more, though kubelet still lists them. `others`: see `Others.has`.
    """
    having = _by_claim(claims, reserved, admin, ended, others)
    for key, of_device in names.items():
        by_name = [Allocation(*name, entries.get(name)) for name in of_device]
        having[key] = [*by_name, *having.get(key, ())]
    known = {name for of_device in names.values() for name in of_device}
    unknown = entries.keys() - known
    return Holdings(
        owners={key: owner_of(of_device) for key, of_device in having.items()},
        given=_given(entries),
        unknown=frozenset(unknown),
        vague=frozenset([n for n in entries if _is_vague(n[1], is_known=n in known)]),
        unlisted=frozenset(known - entries.keys()),
    )


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


@memoized
def unresolved(unknown: frozenset[Named], resources: frozenset[ResourceName]) -> frozenset[Named]:
    """Derive `Index.unresolved`."""
    may_mean = _may_mean({device_id: device_id for _, device_id in unknown})
    return frozenset([name for name in unknown if name[0] in resources or may_mean[name[1]]])


@memoized_each
def _may_mean(device_id: DeviceId) -> bool:
    """It may come to mean a device whatever its resource: a key, or an ID of NVIDIA's device plugin for containers."""
    return is_key(device_id) or gpu_uuid(device_id) is not None


@lru_cache(maxsize=_IDS_KEPT)
def _is_vague(device_id: str, *, is_known: bool) -> bool:
    return is_mig_device(device_id) or (not is_known and gpu_uuid(device_id) is not None)


@memoized
def owned(
    having: Mapping[DeviceKey, Owner], group_of: Mapping[DeviceKey, GroupKey]
) -> Mapping[GroupKey, Owned]:
    """The owners of each group's functions, without those of functions that are gone."""
    found: dict[GroupKey, list[tuple[DeviceKey, Owner]]] = {}
    for key in sorted(having):
        if (group := group_of.get(key)) is not None:
            found.setdefault(group, []).append((key, having[key]))
    return {group: tuple(of_group) for group, of_group in found.items()}
