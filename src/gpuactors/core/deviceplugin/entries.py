"""The list entry of each device that is offered, or allocated to a pod: made for a publication when something of it has
changed, and carried in the state with what it is made of.

Must not decide what else is listed (a device that is gone while a pod has it, an entry that a call holds): that is
`device_lists.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gpuactors.core.assessment.blockers import is_unbinding
from gpuactors.core.host.usage import last_poll, use_of
from gpuactors.core.ledger.identity import alias_ids
from gpuactors.core.state import NodeState
from gpuactors.core.state.entries import Entries
from gpuactors.core.values.inventory import Device, may_be_unbinding
from gpuactors.core.values.model import AdvertisedDevice, DeviceId, PciAddress, ResourceName
from gpuactors.core.values.remade import changed_keys
from gpuactors.core.values.status import DeviceStatus


def entries(state: NodeState) -> Entries:
    """The entries of exactly this state. Whether an unbind waits does not follow from the assessments only, so devices
    that may be being unbound are derived each time."""
    carried, index, ids = state.entries, state.index, alias_ids(state)
    assessments = state.assessments
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
    of = {resource: dict(listed) for resource, listed in carried.of.items()}
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
        of={resource: listed for resource, listed in of.items() if listed},
    )


def is_offered(state: NodeState, device: Device) -> bool:
    """Whether it is advertised at all: bound to a vfio driver (or not readable now, but bound before), or being unbound
    or unplugged while a process has it open.

    A device that has lost its driver stays in the list until a poll has seen whether it is open, and as long as it is.
    """
    if device.function.vfio_bound or is_unbinding(device.function, use_of(state, device)):
        return True
    return may_be_unbinding(device.function) and _is_listed(state, device) and not _is_polled(state, device)


def _is_listed(state: NodeState, device: Device) -> bool:
    address = device.function.address
    return any(a.address == address for a in state.published.device_lists.get(device.resource, ()))


def _is_polled(state: NodeState, device: Device) -> bool:
    """The last poll saw its group, and none is under way that may see something else."""
    last = last_poll(state, device)
    return (
        last is not None
        and last.poll >= state.host.polls.done
        and not state.host.polls.is_to_see(device.function.iommu_group)
    )


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
