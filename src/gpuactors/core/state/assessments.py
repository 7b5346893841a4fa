"""The assessment of each device, as the state carries it: data only. `core/assessment/` derives it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from gpuactors.core.values.inventory import Device
from gpuactors.core.values.model import DeviceList, Observed, Orphan, PciAddress, ResourceName
from gpuactors.core.values.owner import Owner
from gpuactors.core.values.status import Assessment


@dataclass(frozen=True, slots=True)
class Assessments:
    """The assessments, preceded by the values that they are derived from."""

    devices: Mapping[PciAddress, Device]
    owners: Mapping[PciAddress, Owner]
    short: Mapping[PciAddress, str]
    uses: Mapping[int, Observed]
    orphans: Mapping[PciAddress, Orphan]
    read: int
    problem: str | None
    device_lists: Mapping[ResourceName, DeviceList]

    of: Mapping[PciAddress, Assessment]
    """By the device's address."""
    unknown: frozenset[PciAddress]
    """The devices whose health is as it is listed."""


_NOTHING: Final[Mapping[Any, Any]] = MappingProxyType({})

NO_ASSESSMENTS: Final = Assessments(
    devices=_NOTHING,
    owners=_NOTHING,
    short=_NOTHING,
    uses=_NOTHING,
    orphans=_NOTHING,
    read=0,
    problem=None,
    device_lists=_NOTHING,
    of=_NOTHING,
    unknown=frozenset(),
)
"""Of a state in which nothing is known."""
