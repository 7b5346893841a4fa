"""The owners of each device: pods, grants and claims, by kubelet's ledger and by this daemon's own records.

Must not judge what an owner means for a device: that is decided in `assessment/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from msgspec import Struct

from gpuactors.core.kinds.table import is_key
from gpuactors.core.values.group import GroupKey, Owned, RelativeOwner
from gpuactors.core.values.inventory import Device
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
"""The number of IDs whose meaning is cached: a node's other plugins may have thousands in kubelet's ledger."""


class Holdings(Struct, frozen=True, gc=False):
    """The owners of each device, and the names in kubelet's ledger by what they mean."""

    owners: Mapping[DeviceKey, Owner]
    """The owner of every device that a pod or claim has, under whatever ID and API."""
    given: Mapping[ResourceName, frozenset[DeviceId]]
    """The IDs that kubelet's ledger gives to pods, by resource, those of other plugins included."""
    unknown: frozenset[Named]
    """The names in kubelet's ledger that mean no device."""
    vague: frozenset[Named]
    """The names in kubelet's ledger that mean an unknown GPU on its host's driver: a part of one, or one by a UUID that
    no GPU is known to have."""
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
    """Derive the owners from kubelet's ledger (`entries`, `claims`), the claims of gpuactors and those of other
    programs.

    `names` is `Meanings.names`, `others` is `Others.allocations`. The rest is of `Gpus`: kubelet does not list
    `reserved` devices yet, or not any more; it still lists `admin` and `ended` claims, which own nothing.
    """
    allocations = _by_claim(claims, reserved, admin, ended, others)
    for key, of_device in names.items():
        by_name = [Allocation(*name, entries.get(name)) for name in of_device]
        allocations[key] = [*by_name, *allocations.get(key, ())]
    resolved_names = {name for of_device in names.values() for name in of_device}
    unknown = entries.keys() - resolved_names
    return Holdings(
        owners={key: owner_of(of_device) for key, of_device in allocations.items()},
        given=_given(entries),
        unknown=frozenset(unknown),
        vague=frozenset([n for n in entries if _is_vague(n[1], is_known=n in resolved_names)]),
        unlisted=frozenset(resolved_names - entries.keys()),
    )


def _by_claim(
    claims: Mapping[DeviceKey, tuple[ClaimedDevice, ...]],
    reserved: Mapping[DeviceKey, ClaimedDevice],
    admin: frozenset[AdminAccess],
    ended: frozenset[tuple[str, str]],
    others: Mapping[DeviceKey, tuple[Allocation, ...]],
) -> dict[DeviceKey, list[Allocation]]:
    """Return the allocations by claims: those that kubelet lists and that own a device, those of gpuactors that it does
    not list, and those of other programs whose devices it lists by other names."""
    owning = {
        a: [c for c in listed if (c.name, a) not in admin and c.name not in ended]
        for a, listed in claims.items()
    }
    for address, claimed in reserved.items():
        if claimed.name not in {c.name for c in owning.get(address, ())}:
            owning.setdefault(address, []).append(claimed)
    allocations = {
        a: [Allocation(None, c.claim, c) for c in owners] for a, owners in owning.items() if owners
    }
    for address, of_others in others.items():
        allocations.setdefault(address, []).extend(of_others)
    return allocations


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
    """Return whether an ID may come to mean a device whatever its resource: it is a key, or an ID of NVIDIA's device
    plugin for containers."""
    return is_key(device_id) or gpu_uuid(device_id) is not None


@lru_cache(maxsize=_IDS_KEPT)
def _is_vague(device_id: str, *, is_known: bool) -> bool:
    return is_mig_device(device_id) or (not is_known and gpu_uuid(device_id) is not None)


@memoized
def relatives_owned(
    owners: Mapping[DeviceKey, Owner],
    present: Mapping[DeviceKey, Device],
    parts: Mapping[DeviceKey, tuple[DeviceKey, ...]],
    ancestors: Mapping[DeviceKey, tuple[DeviceKey, ...]],
    group_of: Mapping[DeviceKey, GroupKey],
) -> Mapping[GroupKey, tuple[RelativeOwner, ...]]:
    """Derive `Index.relatives_owned`. Only `owners` without a doubt: a container that may have any GPU has none whose
    parts are given away.

    `parts` is `Inventory.parts`, `ancestors` is `Kubelet.ancestors`."""
    if not (parts or ancestors):
        return {}
    by_group: dict[GroupKey, list[RelativeOwner]] = {}
    for key in sorted(owners):
        device = present.get(key)
        above = ancestors.get(key, ()) if device is None else device.ancestors
        excluded = [(other, True) for other in above] + [(other, False) for other in parts.get(key, ())]
        for other, is_part in excluded:
            if (group := group_of.get(other)) is not None:
                by_group.setdefault(group, []).append(RelativeOwner(other, key, is_part, owners[key]))
    return {group: tuple(of_group) for group, of_group in by_group.items()}


@memoized
def owned(
    owners: Mapping[DeviceKey, Owner], group_of: Mapping[DeviceKey, GroupKey]
) -> Mapping[GroupKey, Owned]:
    """Derive `Index.owned`: the owners of each group's functions, without those of functions that are gone."""
    by_group: dict[GroupKey, list[tuple[DeviceKey, Owner]]] = {}
    for key in sorted(owners):
        if (group := group_of.get(key)) is not None:
            by_group.setdefault(group, []).append((key, owners[key]))
    return {group: tuple(of_group) for group, of_group in by_group.items()}
