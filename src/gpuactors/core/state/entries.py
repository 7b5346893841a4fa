"""The list entry of each device, as the state carries it: data only. `core/deviceplugin/entries.py` derives it.

A file of its own: the state carries this data, and must not import what derives it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from msgspec import Struct

from gpuactors.core.values.inventory import Device
from gpuactors.core.values.model import AdvertisedDevice, DeviceId, DeviceKey, ResourceName
from gpuactors.core.values.status import Assessment

EntryRow = tuple[Device, Assessment, DeviceId | None, bool | None]
"""The inputs of a device's entry: the device, its assessment, the ID that it is listed by if that is not its PCI
address, and whether it is offered although it is on no driver; None if that is no question."""


ListEntry = tuple[ResourceName, AdvertisedDevice]


class Entries(Struct, frozen=True, gc=False):
    """The entries, preceded by the values that they are derived from."""

    devices: Mapping[DeviceKey, Device]
    assessed: Mapping[DeviceKey, Assessment]
    ids: Mapping[DeviceKey, DeviceId]
    """See `identity.alias_ids`."""
    offered: Mapping[DeviceKey, bool]
    """Of the devices that may be being unbound, whether they are offered."""

    of_devices: Mapping[DeviceKey, ListEntry]
    """The entry of each device that is advertised, and the resource that it is of."""
    of: Mapping[ResourceName, Mapping[DeviceId, AdvertisedDevice]]
    """By resource and the ID that a device is listed by, sorted by ID; no resource without any."""


_NOTHING: Final[Mapping[Any, Any]] = MappingProxyType({})

NO_ENTRIES: Final = Entries(
    devices=_NOTHING, assessed=_NOTHING, ids=_NOTHING, offered=_NOTHING, of_devices=_NOTHING, of=_NOTHING
)
"""Of a state in which nothing is known."""
