"""The assessment of every device: made anew for the groups of which an input is another, and for these alone.

The inputs of a group (`GroupInputs`) are all that its assessment is made of, and each is compared with that of before;
so it cannot be stale. Must not decide: that is `assess.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from gpuactors.core.assessment.assess import assess
from gpuactors.core.assessment.inputs import by_group, shortages, unowned
from gpuactors.core.devices.index import Index
from gpuactors.core.values.group import GroupInputs, GroupKey, Owned, Short, UnownedUse
from gpuactors.core.values.inventory import Device
from gpuactors.core.values.model import (
    DeviceKey,
    DeviceList,
    LastPoll,
    Observed,
    Orphan,
    PciAddress,
    Polls,
    ResourceName,
)
from gpuactors.core.values.remade import changed_keys, same_if_equal
from gpuactors.core.values.status import Assessment


class Assessments(Struct, frozen=True, gc=False):
    """The assessments, preceded by the values that they are derived from."""

    devices: Mapping[DeviceKey, Device]
    owned: Mapping[GroupKey, Owned]
    group_of: Mapping[DeviceKey, GroupKey]
    short: Mapping[PciAddress, str]
    uses: Mapping[int, Observed]
    seen: Mapping[int, LastPoll]
    orphans: Mapping[DeviceKey, Orphan]
    ledger: tuple[int, str | None]
    """`Ledger.read` and `Ledger.problem`."""
    device_lists: Mapping[ResourceName, DeviceList]

    groups: Mapping[GroupKey, tuple[Device, ...]]
    """The devices by their group, each sorted by key."""
    shortages: Mapping[GroupKey, Short]
    unowned: Mapping[GroupKey, UnownedUse]

    of: Mapping[DeviceKey, Assessment]
    """By the device's key."""


_NOTHING: Final[Mapping[Any, Any]] = MappingProxyType({})

NO_ASSESSMENTS: Final = Assessments(
    devices=_NOTHING,
    owned=_NOTHING,
    group_of=_NOTHING,
    short=_NOTHING,
    uses=_NOTHING,
    seen=_NOTHING,
    orphans=_NOTHING,
    ledger=(0, None),
    device_lists=_NOTHING,
    groups=_NOTHING,
    shortages=_NOTHING,
    unowned=_NOTHING,
    of=_NOTHING,
)
"""Where nothing is known."""


def assessments(
    before: Assessments,
    index: Index,
    short: Mapping[PciAddress, str],
    polls: Polls,
    orphans: Mapping[DeviceKey, Orphan],
    ledger: tuple[int, str | None],
    device_lists: Mapping[ResourceName, DeviceList],
) -> Assessments:
    """The assessments of these devices. `ledger`: the number of the read that kubelet's ledger is from, and why it
    cannot be read now."""
    devices, owned, group_of = index.devices, index.owned, index.known.group_of
    uses, seen = polls.groups, polls.seen
    same_devices, same_short = before.devices is devices, before.short is short
    same_groups = before.group_of is group_of
    if (
        same_devices
        and same_groups
        and before.owned is owned
        and same_short
        and before.uses is uses
        and before.seen is seen
        and before.orphans is orphans
        and before.ledger == ledger
        and before.device_lists is device_lists
    ):
        return before
    groups = before.groups if same_devices and same_groups else by_group(devices, group_of)
    used = index.in_use - owned.keys() if index.in_use else index.in_use
    found = unowned(groups, used, uses, seen, orphans, *ledger, device_lists) if used else {}
    now = replace(
        before,
        devices=devices,
        owned=owned,
        group_of=group_of,
        short=short,
        uses=uses,
        seen=seen,
        orphans=orphans,
        ledger=ledger,
        device_lists=device_lists,
        groups=groups,
        shortages=before.shortages if same_short and same_groups else shortages(short, group_of),
        unowned=same_if_equal(before.unowned, found),
    )
    other = {
        *changed_keys(before.groups, groups),
        *changed_keys(before.owned, owned),
        *changed_keys(before.uses, uses),
        *changed_keys(before.unowned, now.unowned),
        *changed_keys(before.shortages, now.shortages),
    }
    if not other:
        return now
    of, is_same = dict(before.of), True
    for group in other & groups.keys():
        inputs = GroupInputs(
            group,
            groups[group],
            owned.get(group, ()),
            uses.get(group) if isinstance(group, int) else None,
            now.unowned.get(group),
            now.shortages.get(group, ()),
        )
        for address, assessment in assess(inputs).items():
            of[address] = same_if_equal(before.of.get(address), assessment)
            is_same = is_same and of[address] is before.of.get(address)
    for address in of.keys() - devices.keys():
        del of[address]
    return now if is_same and len(of) == len(before.of) else replace(now, of=of)
