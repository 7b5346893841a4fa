"""The one status of a device, from its ownership and its blocker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from gpuactors.core.assessment.blockers import blocker_of, is_unbinding, unbinding
from gpuactors.core.assessment.ownership import observed_use, ownership_of
from gpuactors.core.devices.presence import not_offered
from gpuactors.core.state import NodeState
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.inventory import Device
from gpuactors.core.values.model import Health, Observed
from gpuactors.core.values.status import Assessment, Blocker, DeviceStatus, Ownership


def assessment_of(state: NodeState, device: Device, listed: Callable[[Device], Health | None]) -> Assessment:
    """The assessment of `device`. `listed` returns the last advertised health of a device, None if there is none.

    A shortage of ours changes only the message: it is no device's fault, and Allocate waits for an inspection.
    """
    use = observed_use(state, device)
    ownership = ownership_of(state, device)
    blocker = blocker_of(device, ownership, use)
    status = assess(device, ownership, blocker, use, listed)
    if short := state.host.short.get(device.function.address):
        message = f"{status.message}; last known state, it cannot be inspected now: {short}"
        status = replace(status, message=message)
    return Assessment(ownership, blocker, status)


def assess(
    device: Device,
    ownership: Ownership,
    blocker: Blocker | None,
    use: Observed | None,
    listed: Callable[[Device], Health | None],
) -> DeviceStatus:
    """The status of a device with this ownership and this blocker, if any."""
    health, cause, message = _decided(device, ownership, blocker, use, listed)
    holders = use.holders if use is not None else ()
    return DeviceStatus(health, cause, message, ownership.owner, holders)


def _decided(
    device: Device,
    ownership: Ownership,
    blocker: Blocker | None,
    use: Observed | None,
    listed: Callable[[Device], Health | None],
) -> tuple[Health, Cause, str]:
    if ownership.is_allocated:
        # It is counted in `allocated` already; Unhealthy would subtract it twice. Only a lost one is Unhealthy.
        if device.function.vfio_bound:
            return Health.HEALTHY, ownership.cause, ownership.message
        if is_unbinding(device.function, use):
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
            health = listed(device) or Health.HEALTHY
        case _:
            health = Health.UNHEALTHY
    return health, ownership.cause, ownership.message
