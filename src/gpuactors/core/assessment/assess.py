"""The one status of a device, out of whose it is and what of its files forbids it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gpuactors.core.assessment.blockers import blocker_of, is_unbinding, unbinding
from gpuactors.core.assessment.cause import Cause
from gpuactors.core.assessment.ownership import Ownership, observed_use, ownership_of
from gpuactors.core.assessment.presence import not_offered
from gpuactors.core.assessment.status import Blocker, DeviceStatus
from gpuactors.core.index import index_of
from gpuactors.core.model import Health

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuactors.core.inventory import Device
    from gpuactors.core.model import Observed
    from gpuactors.core.state import NodeState


@dataclass(frozen=True, slots=True)
class Assessment:
    """All that is decided of a device."""

    ownership: Ownership
    blocker: Blocker | None
    """What forbids that it is handed out, whosever it is."""
    status: DeviceStatus


def assessment_of(state: NodeState, device: Device, listed: Callable[[Device], Health | None]) -> Assessment:
    """How `device` is. `listed` tells what kubelet was told of a device last, None if nothing.

    A shortage of ours changes nothing but the words: it is no device's fault, and Allocate waits for a look.
    """
    use = observed_use(state, device)
    ownership = ownership_of(state, device)
    blocker = blocker_of(device, ownership, use)
    status = assess(device, ownership, blocker, use, listed)
    if short := index_of(state).short.get(device.function.address):
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
    """The status of a device that is one of somebody, or of nobody, and has a blocker, or none."""
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
            # Never guessed away: if kubelet has given it to a pod, Unhealthy would subtract it twice. It is not handed
            # out either, because Allocate looks again.
            health = listed(device) or Health.HEALTHY
        case _:
            health = Health.UNHEALTHY
    return health, ownership.cause, ownership.message
