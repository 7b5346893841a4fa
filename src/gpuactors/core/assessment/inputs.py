"""The inputs of each IOMMU group's assessment, from what is known of the whole node.

Plain loops, as in `devices/inventory.py`. Must not judge what any of it means.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set

from gpuactors.core.devices.index import Index
from gpuactors.core.values.group import GroupInputs, GroupKey, UnownedUse
from gpuactors.core.values.inventory import Device, orphans_of
from gpuactors.core.values.memo import memoized
from gpuactors.core.values.model import (
    DeviceKey,
    DeviceList,
    Health,
    LastPoll,
    Observed,
    Orphan,
    Polls,
    ResourceName,
    listed_by_key,
)


@memoized
def by_group(
    devices: Mapping[DeviceKey, Device], group_of: Mapping[DeviceKey, GroupKey]
) -> Mapping[GroupKey, tuple[Device, ...]]:
    """The devices of each group, as `devices` sorted by key."""
    found: dict[GroupKey, list[Device]] = {}
    for key, device in devices.items():
        found.setdefault(group_of[key], []).append(device)
    return {group: tuple(of_group) for group, of_group in found.items()}


def holder_inputs(
    key: DeviceKey,
    index: Index,
    polls: Polls,
    orphans: Mapping[DeviceKey, Orphan],
    ledger: tuple[int, str | None],
) -> GroupInputs:
    """The inputs of the group of the device that show its holders: its use also where kubelet has given
    it to somebody. `ledger`: see `assessments`."""
    group = index.group_of.get(key, key)
    devices = by_group(index.devices, index.group_of).get(group, ())
    owners = index.owned.get(group, ())
    if not (isinstance(group, int) and group in index.in_use and devices):
        return GroupInputs(group, devices, owners)
    found = unowned({group: devices}, {group}, polls.groups, polls.seen, orphans, *ledger, {})
    return GroupInputs(group, devices, owners, polls.groups[group], found[group])


def unowned(
    groups: Mapping[GroupKey, tuple[Device, ...]],
    used: Set[int],
    uses: Mapping[int, Observed],
    seen: Mapping[int, LastPoll],
    orphans: Mapping[DeviceKey, Orphan],
    read: int,
    problem: str | None,
    device_lists: Mapping[ResourceName, DeviceList],
) -> Mapping[GroupKey, UnownedUse]:
    """`GroupInputs.unowned` of the groups that are `used` and nobody's: few, on most nodes none. `read`: the number of
    the read that kubelet's ledger is from; `problem`: why it cannot be read now."""
    found: dict[GroupKey, UnownedUse] = {}
    listed: dict[tuple[ResourceName, DeviceKey], Health] = {}
    for group in sorted(used & groups.keys()):
        devices, last = groups[group], seen.get(group)
        left = orphans_of(devices[0], orphans)
        if left:
            is_settled = last is not None and last.poll >= max(orphan.read for orphan in left)
        else:
            is_settled = read > uses[group].since
        if not is_settled and not listed:
            listed = {name: entry.health for name, entry in listed_by_key(device_lists).items()}
        found[group] = UnownedUse(
            left[0].pod if left else None,
            is_settled,
            problem,
            () if is_settled else tuple(_listed(devices, listed)),
        )
    return found


def _listed(
    devices: Iterable[Device], listed: Mapping[tuple[ResourceName, DeviceKey], Health]
) -> Iterator[tuple[DeviceKey, Health]]:
    for device in devices:
        if (health := listed.get((device.resource, device.key))) is not None:
            yield device.key, health
