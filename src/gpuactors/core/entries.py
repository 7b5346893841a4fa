"""The list entry of each device that is offered, or allocated to a pod: derived when something of it changes, and
carried in the state with the objects that it is derived from, as an index is (`index.py`).

Must not decide what else is listed (a device that is gone while a pod has it, an entry that a call holds): that is
`device_lists.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from gpuactors.core.assessment.assess import Assessment
from gpuactors.core.assessment.assessments import assessments_of
from gpuactors.core.assessment.ownership import is_offered
from gpuactors.core.assessment.status import DeviceStatus
from gpuactors.core.identity import alias_ids
from gpuactors.core.index import changed_keys, index_of
from gpuactors.core.inventory import Device
from gpuactors.core.model import AdvertisedDevice, DeviceId, PciAddress, ResourceName

if TYPE_CHECKING:
    from gpuactors.core.state import NodeState


@dataclass(frozen=True, slots=True)
class Entries:
    """The entries, preceded by the values that they are derived from."""

    devices: Mapping[PciAddress, Device]
    assessments: Mapping[PciAddress, Assessment]
    ids: Mapping[PciAddress, DeviceId]
    """As `identity.alias_ids`."""

    of: Mapping[ResourceName, Mapping[DeviceId, AdvertisedDevice]]
    """By resource and the ID that a device is listed by; no resource without any."""


_NOTHING: Final[Mapping[Any, Any]] = MappingProxyType({})

NO_ENTRIES: Final = Entries(devices=_NOTHING, assessments=_NOTHING, ids=_NOTHING, of=_NOTHING)
"""Of a state in which nothing is known."""


def entries_of(state: NodeState) -> Entries:
    """The entries of exactly this state. Whether an unbind waits does not follow from the assessments only, so devices
    that may be being unbound are derived each time."""
    carried, index, ids = state.entries, index_of(state), alias_ids(state)
    assessments = assessments_of(state).of
    if (
        carried.devices is index.devices
        and carried.assessments is assessments
        and carried.ids == ids
        and not index.unbinding
    ):
        return carried
    touched = (
        changed_keys(carried.devices, index.devices)
        | changed_keys(carried.assessments, assessments)
        | changed_keys(carried.ids, ids)
        | index.unbinding
    )
    of = {resource: dict(entries) for resource, entries in carried.of.items()}
    old = {a: _taken_out(carried, of, a) for a in touched}
    for address in touched & index.devices.keys():
        device, found = index.devices[address], assessments[address]
        if not (is_offered(state, device) or found.ownership.is_allocated):
            continue
        device_id = ids.get(address, DeviceId(address))
        made, was = _advertised(device_id, device, found.status), old[address]
        of.setdefault(device.resource, {})[device_id] = made if was is None or made != was else was
    return replace(
        carried,
        devices=index.devices,
        assessments=assessments,
        ids=ids,
        of={resource: entries for resource, entries in of.items() if entries},
    )


def check_entries(state: NodeState) -> None:
    """Raises AssertionError if the carried entries differ from those of a full derivation: a bug. Tests and simulation
    check this at every publication."""
    fresh = entries_of(replace(state, entries=NO_ENTRIES)).of
    stale = sorted(
        r for r in state.entries.of.keys() | fresh.keys() if state.entries.of.get(r) != fresh.get(r)
    )
    assert not stale, f"the entries of {', '.join(stale)} are stale"


def _taken_out(
    carried: Entries, of: Mapping[ResourceName, dict[DeviceId, AdvertisedDevice]], address: PciAddress
) -> AdvertisedDevice | None:
    device = carried.devices.get(address)
    if device is None:
        return None
    return of.get(device.resource, {}).pop(carried.ids.get(address, DeviceId(address)), None)


def _advertised(device_id: DeviceId, device: Device, status: DeviceStatus) -> AdvertisedDevice:
    function = device.function
    return AdvertisedDevice(
        device_id, function.address, status.health, function.numa_node, status.message, status.cause
    )
