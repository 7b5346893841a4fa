"""The assessment of every device, derived again for the groups with a changed input, and for these alone.

The inputs of a group (`GroupInputs`) are compared as a whole with the last ones, so its assessment cannot be stale.
Must not decide: that is `assess.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

from gpuactors.core.assessment.assess import assess
from gpuactors.core.assessment.inputs import unowned
from gpuactors.core.devices.index import Index
from gpuactors.core.values.group import GroupInputs, GroupKey, Owned, RelativeOwner, Short, UnownedUse
from gpuactors.core.values.inventory import Device, inspected_keys
from gpuactors.core.values.memo import memoized, memoized_each
from gpuactors.core.values.model import (
    DeviceKey,
    DeviceList,
    InspectedKey,
    Observed,
    Orphan,
    Polls,
    ResourceName,
)
from gpuactors.core.values.status import Assessment


@memoized
def assessments(
    index: Index,
    short: Mapping[InspectedKey, str],
    polls: Polls,
    orphans: Mapping[DeviceKey, Orphan],
    ledger: tuple[int, str | None],
    device_lists: Mapping[ResourceName, DeviceList],
) -> Mapping[DeviceKey, Assessment]:
    """Return the assessment of each device of the index. `short`: see `Host`. `ledger`: the number of the read that
    kubelet's ledger is from, and why it cannot be read now."""
    groups, used = index.devices_by_group, index.in_use - index.owned.keys()
    uses = unowned(groups, used, polls.groups, polls.seen, orphans, *ledger, device_lists) if used else {}
    short_of = _shortages(short, index.devices)
    return _assessed(groups, index.owned, index.relatives_owned, polls.groups, uses, short_of)


def _shortages(
    short: Mapping[InspectedKey, str], devices: Mapping[DeviceKey, Device]
) -> Mapping[GroupKey, Short]:
    """Return the devices of each group that cannot be inspected now, with the reason in `short` (`Host.short`)."""
    by_group: dict[GroupKey, list[tuple[DeviceKey, str]]] = {}
    for key, device in devices.items() if short else ():
        why = [short[k] for k in inspected_keys(key, device.units) if k in short]
        if why:
            by_group.setdefault(key if device.group is None else device.group, []).append((key, why[0]))
    return {group: tuple(of_group) for group, of_group in by_group.items()}


@memoized
def _assessed(
    groups: Mapping[GroupKey, tuple[Device, ...]],
    owned: Mapping[GroupKey, Owned],
    relatives_owned: Mapping[GroupKey, tuple[RelativeOwner, ...]],
    uses: Mapping[int, Observed],
    unowned_uses: Mapping[GroupKey, UnownedUse],
    short: Mapping[GroupKey, Short],
) -> Mapping[DeviceKey, Assessment]:
    inputs = {
        group: GroupInputs(
            group,
            devices,
            owned.get(group, ()),
            uses.get(group) if isinstance(group, int) else None,
            unowned_uses.get(group),
            short.get(group, ()),
            relatives_owned.get(group, ()),
        )
        for group, devices in groups.items()
    }
    return {key: one for of_group in _assess_each(inputs).values() for key, one in of_group.items()}


_assess_each = memoized_each(assess)
