"""The list entry of each device that is offered, or allocated to a pod.

Must not decide what else is listed (a device that is gone while a pod has it, an entry that a call holds): that is
`device_lists.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from msgspec.structs import replace

from gpuactors.core.assessment.blockers import is_unbinding
from gpuactors.core.deviceplugin.specs import lacking
from gpuactors.core.host.usage import use_of
from gpuactors.core.state import NodeState
from gpuactors.core.values.inventory import Device
from gpuactors.core.values.model import AdvertisedDevice, DeviceId, DeviceKey, Health, ResourceName
from gpuactors.core.values.status import DeviceStatus, Reason


def entries(
    state: NodeState, ids: Mapping[DeviceKey, DeviceId]
) -> dict[ResourceName, dict[DeviceId, AdvertisedDevice]]:
    """Return the entries by resource and the ID that a device is listed by, in no order. `ids`: see
    `identity.alias_ids`."""
    devices, assessed = state.index.devices, state.assessments
    # Whether a device is offered is in question only while it may be being unbound.
    offered = {key for key in state.index.unbinding if is_offered(state, devices[key])}
    by_resource: dict[ResourceName, dict[DeviceId, AdvertisedDevice]] = {}
    for key, device in devices.items():
        assessment = assessed[key]
        held = assessment.holding
        is_there = device.has_backing and not device.unnamed
        is_allocated = held is not None and held.is_allocated
        if is_there or key in offered or is_allocated:
            entry = _advertised(ids.get(key) or DeviceId(key), device, assessment.status)
            if not is_allocated and (why := lacking(state, device.resource, entry.id, device)) is not None:
                entry = _withheld(entry, why)
            by_resource.setdefault(device.resource, {})[entry.id] = entry
    return by_resource


def leaving(
    state: NodeState, ids: Mapping[DeviceKey, DeviceId]
) -> Iterator[tuple[ResourceName, AdvertisedDevice]]:
    """Yield the entries that stay in the list of another resource than the device's own, as `is_offered` has it: the
    driver that a vGPU has lost gave it its type, and so its resource. `ids`: see `entries`."""
    unbinding = {
        key: device for key in state.index.unbinding if _is_leaving(state, device := state.index.devices[key])
    }
    for resource, listed in state.published.device_lists.items() if unbinding else ():
        for device in [unbinding[entry.key] for entry in listed if entry.key in unbinding]:
            if device.resource != resource and not is_unbinding(device, use_of(state, device)):
                status = state.assessments[device.key].status
                yield resource, _advertised(ids.get(device.key) or DeviceId(device.key), device, status)


def _advertised(device_id: DeviceId, device: Device, status: DeviceStatus) -> AdvertisedDevice:
    return AdvertisedDevice(
        device_id, device.key, status.health, device.numa_node, status.message, status.cause
    )


def _withheld(entry: AdvertisedDevice, why: Reason) -> AdvertisedDevice:
    """Return the entry of a device that no runtime could resolve. One that cannot be opened keeps its reason."""
    if entry.health is not Health.HEALTHY:
        return entry
    return replace(entry, health=Health.UNHEALTHY, reason=why.message, cause=why.cause)


def is_offered(state: NodeState, device: Device) -> bool:
    """Return whether the device is advertised at all: bound to a vfio driver (or not readable now, but bound before),
    or being unbound or unplugged while a process has it open.

    A device that has lost its driver stays in the list until a poll has seen that no process has it open
    (`Polls.leaving`): polls may come back without its group.
    """
    if device.has_backing or is_unbinding(device, use_of(state, device)):
        return True
    listed = state.published.device_lists.get(device.resource, ())
    return _is_leaving(state, device) and any(entry.key == device.key for entry in listed)


def _is_leaving(state: NodeState, device: Device) -> bool:
    return device.may_be_unbinding and any(unit.address in state.host.polls.leaving for unit in device.units)
