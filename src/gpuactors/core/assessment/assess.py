"""The status of each device of a group, from the group's inputs alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec.structs import replace

from gpuactors.core.assessment.blockers import blocker_of, is_unbinding, unbinding_under
from gpuactors.core.assessment.holding import holding_of
from gpuactors.core.kinds.table import kind_of
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.group import GroupInputs
from gpuactors.core.values.inventory import Device
from gpuactors.core.values.model import DeviceKey, Health
from gpuactors.core.values.status import Assessment, DeviceStatus, Holding, Reason

_FREE: Final = Reason(Cause.FREE, "free")


def assess(inputs: GroupInputs) -> Mapping[DeviceKey, Assessment]:
    """Return the assessment of each device of the group.

    A shortage of this process changes only the message: it is no device's fault, and Allocate waits for an inspection.
    """
    short, by_key = dict(inputs.short), dict[DeviceKey, Assessment]()
    for device in inputs.devices:
        holding = holding_of(device.key, device.resource, inputs)
        blocker = blocker_of(device, holding, inputs.use)
        status = status_of(device, holding, blocker, inputs)
        if (why := short.get(device.key)) is not None:
            message = f"{status.message}; last known state, it cannot be inspected now: {why}"
            status = replace(status, message=message)
        by_key[device.key] = Assessment(holding, blocker, status)
    return by_key


def status_of(
    device: Device, holding: Holding | None, blocker: Reason | None, inputs: GroupInputs
) -> DeviceStatus:
    """Return the status of a device of the group with this holder and this blocker, if any."""
    health, why = _decided(device, holding, blocker, inputs)
    owner = next((owner for key, owner in inputs.owners if key == device.key), None)
    holders = inputs.use.holders if inputs.use is not None else ()
    return DeviceStatus(health, why.cause, why.message, owner, holders)


def _decided(
    device: Device, holding: Holding | None, blocker: Reason | None, inputs: GroupInputs
) -> tuple[Health, Reason]:
    if holding is not None and holding.is_allocated:
        # Kubelet counts it in `allocated`; Unhealthy would subtract it twice. Only a lost device is Unhealthy.
        if device.has_backing:
            return Health.HEALTHY, holding.reason
        if is_unbinding(device, inputs.use):
            return Health.UNHEALTHY, unbinding_under(device, holding)
        not_backed = kind_of(device).not_backed(device)
        return Health.UNHEALTHY, replace(
            not_backed, message=f"{holding.reason.message}, but {not_backed.message}"
        )
    if blocker is not None:
        return Health.UNHEALTHY, blocker
    if holding is None:
        return Health.HEALTHY, _FREE
    if holding.reason.cause is Cause.HOLDER_UNKNOWN and inputs.unowned is not None:
        # Undecided: if kubelet has given it to a pod, Unhealthy would subtract it twice. It is not allocated meanwhile:
        # Allocate inspects and polls again.
        return dict(inputs.unowned.listed).get(device.key, Health.HEALTHY), holding.reason
    return Health.UNHEALTHY, holding.reason
