"""The assessment of each device, as the state carries it: data only. `core/assessment/` derives it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from gpuactors.core.values.group import GroupKey, Owned, Short, UnownedUse
from gpuactors.core.values.inventory import Device
from gpuactors.core.values.model import DeviceList, LastPoll, Observed, Orphan, PciAddress, ResourceName
from gpuactors.core.values.owner import Owner
from gpuactors.core.values.status import Assessment


@dataclass(frozen=True, slots=True)
class Assessments:
    """The assessments, preceded by the values that they are derived from."""

    devices: Mapping[PciAddress, Device]
    owners: Mapping[PciAddress, Owner]
    group_of: Mapping[PciAddress, GroupKey]
    short: Mapping[PciAddress, str]
    uses: Mapping[int, Observed]
    seen: Mapping[int, LastPoll]
    orphans: Mapping[PciAddress, Orphan]
    ledger: tuple[int, str | None]
    """`Ledger.read` and `Ledger.problem`."""
    device_lists: Mapping[ResourceName, DeviceList]

    groups: Mapping[GroupKey, tuple[Device, ...]]
    """The devices by their group, each sorted by address."""
    owned: Mapping[GroupKey, Owned]
    shortages: Mapping[GroupKey, Short]
    unowned: Mapping[GroupKey, UnownedUse]

    of: Mapping[PciAddress, Assessment]
    """By the device's address."""


_NOTHING: Final[Mapping[Any, Any]] = MappingProxyType({})

NO_ASSESSMENTS: Final = Assessments(
    devices=_NOTHING,
    owners=_NOTHING,
    group_of=_NOTHING,
    short=_NOTHING,
    uses=_NOTHING,
    seen=_NOTHING,
    orphans=_NOTHING,
    ledger=(0, None),
    device_lists=_NOTHING,
    groups=_NOTHING,
    owned=_NOTHING,
    shortages=_NOTHING,
    unowned=_NOTHING,
    of=_NOTHING,
)
"""Of a state in which nothing is known."""
