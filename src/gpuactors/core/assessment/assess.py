"""The status of each device of a group, from the group's inputs alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gpuactors.core.assessment.blockers import blocker_of, is_unbinding, unbinding
from gpuactors.core.assessment.ownership import ownership_of
from gpuactors.core.devices.presence import not_offered
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.group import GroupInputs
from gpuactors.core.values.inventory import Device
from gpuactors.core.values.model import Health, PciAddress
from gpuactors.core.values.status import Assessment, DeviceStatus, Ownership, Reason


def assess(inputs: GroupInputs) -> Mapping[PciAddress, Assessment]:
    """The assessment of each device of the group.

    A shortage of this process changes only the message: it is no device's fault, and Allocate waits for an inspection.
    """
    short, found = dict(inputs.short), dict[PciAddress, Assessment]()
    for device in inputs.devices:
        address, ownership = device.function.address, ownership_of(device, inputs)
        blocker = blocker_of(device, ownership, inputs.use)
        status = status_of(device, ownership, blocker, inputs)
        if (why := short.get(address)) is not None:
            message = f"{status.message}; last known state, it cannot be inspected now: {why}"
            status = replace(status, message=message)
        found[address] = Assessment(ownership, blocker, status)
    return found


def status_of(
    device: Device, ownership: Ownership, blocker: Reason | None, inputs: GroupInputs
) -> DeviceStatus:
    """The status of a device of the group with this ownership and this blocker, if any."""
    health, cause, message = _decided(device, ownership, blocker, inputs)
    holders = inputs.use.holders if inputs.use is not None else ()
    return DeviceStatus(health, cause, message, ownership.owner, holders)


def _decided(
    device: Device, ownership: Ownership, blocker: Reason | None, inputs: GroupInputs
) -> tuple[Health, Cause, str]:
    if ownership.is_allocated:
        # It is counted in `allocated` already; Unhealthy would subtract it twice. Only a lost one is Unhealthy.
        if device.function.vfio_bound:
            return Health.HEALTHY, ownership.cause, ownership.message
        if is_unbinding(device.function, inputs.use):
            waits = unbinding(device.function, ownership)
            return Health.UNHEALTHY, waits.cause, waits.message
        lost = not_offered(device.function)
        return Health.UNHEALTHY, lost.cause, f"{ownership.message}, but {lost.message}"
    if blocker is not None:
        return Health.UNHEALTHY, blocker.cause, blocker.message
    match ownership.cause:
        case Cause.FREE:
            health = Health.HEALTHY
        case Cause.HOLDER_UNKNOWN:
            # Not guessed: if kubelet has given it to a pod, Unhealthy would subtract it twice. It is not allocated
            # either, because Allocate inspects and polls again.
            listed = dict(inputs.unowned.listed) if inputs.unowned is not None else {}
            health = listed.get(device.function.address, Health.HEALTHY)
        case _:
            health = Health.UNHEALTHY
    return health, ownership.cause, ownership.message
