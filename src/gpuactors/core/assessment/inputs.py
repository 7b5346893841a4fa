"""The inputs of each IOMMU group's assessment, from what is known of the whole node.

Must not judge what any of it means.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set

from gpuactors.core.devices.index import Index
from gpuactors.core.values.group import GroupInputs, GroupKey, UnownedUse
from gpuactors.core.values.inventory import Device, orphans_of
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


def holder_inputs(
    key: DeviceKey,
    index: Index,
    polls: Polls,
    orphans: Mapping[DeviceKey, Orphan],
    ledger: tuple[int, str | None],
) -> GroupInputs:
    """Return the inputs of the device's group that show its holders: its use as well where kubelet has given it to a
    pod. `ledger`: see `assessments`."""
    group = index.group_of.get(key, key)
    devices, owners = index.devices_by_group.get(group, ()), index.owned.get(group, ())
    relatives = index.relatives_owned.get(group, ())
    if not (isinstance(group, int) and group in index.in_use and devices):
        return GroupInputs(group, devices, owners, relatives=relatives)
    uses = unowned({group: devices}, {group}, polls.groups, polls.seen, orphans, *ledger, {})
    return GroupInputs(group, devices, owners, polls.groups[group], uses[group], relatives=relatives)


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
    """Return `GroupInputs.unowned` of the groups that are `used` and have no owner: few, on most nodes none. `read`:
    the number of the read that kubelet's ledger is from; `problem`: why it cannot be read now."""
    unowned_uses: dict[GroupKey, UnownedUse] = {}
    listed: dict[tuple[ResourceName, DeviceKey], Health] = {}
    for group in sorted(used & groups.keys()):
        devices, last = groups[group], seen.get(group)
        departed = orphans_of(devices[0], orphans)
        if departed:
            is_settled = last is not None and last.poll >= max(orphan.read for orphan in departed)
        else:
            is_settled = read > uses[group].since
        if not is_settled and not listed:
            listed = {name: entry.health for name, entry in listed_by_key(device_lists).items()}
        unowned_uses[group] = UnownedUse(
            departed[0].pod if departed else None,
            is_settled,
            problem,
            () if is_settled else tuple(_listed(devices, listed)),
        )
    return unowned_uses


def _listed(
    devices: Iterable[Device], listed: Mapping[tuple[ResourceName, DeviceKey], Health]
) -> Iterator[tuple[DeviceKey, Health]]:
    for device in devices:
        if (health := listed.get((device.resource, device.key))) is not None:
            yield device.key, health
