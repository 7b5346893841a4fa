"""The list entry of each device that is offered, or allocated to a pod: made for a publication when something of it has
changed, and carried in the state with what it is made of.

Must not decide what else is listed (a device that is gone while a pod has it, an entry that a call holds): that is
`device_lists.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import ne

from gpuactors.core.assessment.blockers import is_unbinding
from gpuactors.core.host.usage import use_of
from gpuactors.core.ledger.identity import alias_ids
from gpuactors.core.state import NodeState
from gpuactors.core.state.entries import Entries, EntryRow, ListEntry
from gpuactors.core.values.inventory import Device
from gpuactors.core.values.model import AdvertisedDevice, DeviceId, DeviceKey, ResourceName
from gpuactors.core.values.remade import amended, changed_keys, other_keys
from gpuactors.core.values.status import DeviceStatus


def entries(state: NodeState) -> Entries:
    """The entries of exactly this state; `state.entries` are those of the last publication."""
    before, devices, ids = state.entries, state.index.devices, alias_ids(state)
    # Whether a device is offered is in question only while it may be being unbound.
    offered = {address: is_offered(state, devices[address]) for address in state.index.unbinding}
    assessed = state.assessments
    other = {
        *changed_keys(before.devices, devices),
        *other_keys(before.assessed, assessed),
        *other_keys(before.ids, ids, ne),
        *(before.ids.keys() - ids.keys()),
        *other_keys(before.offered, offered),
        *(before.offered.keys() - offered.keys()),
    }
    made: dict[DeviceKey, ListEntry | None] = {}
    for address in other:
        device = devices.get(address)
        row = None if device is None else (device, assessed[address], ids.get(address), offered.get(address))
        made[address] = None if row is None else _entry(address, row)
    of_devices = amended(before.of_devices, made)
    of = before.of if of_devices is before.of_devices else _by_resource(before, of_devices, made)
    return Entries(devices, assessed, ids, offered, of_devices, of)


def _by_resource(
    before: Entries, of_devices: Mapping[DeviceKey, ListEntry], made: Iterable[DeviceKey]
) -> Mapping[ResourceName, Mapping[DeviceId, AdvertisedDevice]]:
    """`Entries.of` with the entries of the devices that were `made` anew."""
    other: dict[ResourceName, dict[DeviceId, AdvertisedDevice | None]] = {}
    for resource, entry in filter(None, map(before.of_devices.get, made)):
        other.setdefault(resource, {})[entry.id] = None
    for resource, entry in filter(None, map(of_devices.get, made)):
        other.setdefault(resource, {})[entry.id] = entry
    return amended(before.of, {r: _sorted(before.of.get(r, {}), of_r) or None for r, of_r in other.items()})


def _sorted(
    before: Mapping[DeviceId, AdvertisedDevice], changes: Mapping[DeviceId, AdvertisedDevice | None]
) -> Mapping[DeviceId, AdvertisedDevice]:
    """`before`, which is sorted, with these changes."""
    now = amended(before, changes)
    return now if changes.keys() <= before.keys() else dict(sorted(now.items()))


def _entry(address: DeviceKey, row: EntryRow) -> ListEntry | None:
    device, assessment, device_id, offered = row
    held = assessment.holding
    if not (device.has_backing or offered or (held is not None and held.is_allocated)):
        return None
    return device.resource, _advertised(device_id or DeviceId(address), device, assessment.status)


def _advertised(device_id: DeviceId, device: Device, status: DeviceStatus) -> AdvertisedDevice:
    return AdvertisedDevice(
        device_id, device.key, status.health, device.numa_node, status.message, status.cause
    )


def is_offered(state: NodeState, device: Device) -> bool:
    """Whether it is advertised at all: bound to a vfio driver (or not readable now, but bound before), or being unbound
    or unplugged while a process has it open.

    A device that has lost its driver stays in the list until a poll has seen that nobody has it open (`Polls.leaving`):
    polls may come back without its group.
    """
    if device.has_backing or is_unbinding(device, use_of(state, device)):
        return True
    leaving = state.host.polls.leaving
    is_leaving = device.may_be_unbinding and any(unit.address in leaving for unit in device.units)
    return is_leaving and _is_listed(state, device)


def _is_listed(state: NodeState, device: Device) -> bool:
    return any(a.address == device.key for a in state.published.device_lists.get(device.resource, ()))
