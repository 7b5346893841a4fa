"""The list entry of each device that is offered, or allocated to a pod.

Must not decide what else is listed (a device that is gone while a pod has it, an entry that a call holds): that is
`device_lists.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

from gpuactors.core.assessment.blockers import is_unbinding
from gpuactors.core.host.usage import use_of
from gpuactors.core.state import NodeState
from gpuactors.core.values.inventory import Device
from gpuactors.core.values.model import AdvertisedDevice, DeviceId, DeviceKey, ResourceName
from gpuactors.core.values.status import DeviceStatus


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
        if is_there or key in offered or (held is not None and held.is_allocated):
            entry = _advertised(ids.get(key) or DeviceId(key), device, assessment.status)
            by_resource.setdefault(device.resource, {})[entry.id] = entry
    return by_resource


def _advertised(device_id: DeviceId, device: Device, status: DeviceStatus) -> AdvertisedDevice:
    return AdvertisedDevice(
        device_id, device.key, status.health, device.numa_node, status.message, status.cause
    )


def is_offered(state: NodeState, device: Device) -> bool:
    """Return whether the device is advertised at all: bound to a vfio driver (or not readable now, but bound before),
    or being unbound or unplugged while a process has it open.

    A device that has lost its driver stays in the list until a poll has seen that no process has it open
    (`Polls.leaving`): polls may come back without its group.
    """
    if device.has_backing or is_unbinding(device, use_of(state, device)):
        return True
    leaving, listed = state.host.polls.leaving, state.published.device_lists.get(device.resource, ())
    is_leaving = device.may_be_unbinding and any(unit.address in leaving for unit in device.units)
    return is_leaving and any(entry.key == device.key for entry in listed)
