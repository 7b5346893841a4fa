"""Whether a claim could bind a GPU that is on its host's driver, looked at before one is allocated.

A driver that is not loaded, a process of the host that has the GPU, virtual functions: what is found is a reason not to
offer it, and goes away when a later look does not find it any more. A look does nothing to the GPU. One that a claim
has is not looked at: its acts say what is in their way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from gpuactors import limits
from gpuactors.core.assessment.cause import Cause
from gpuactors.core.assessment.status import Obstacle
from gpuactors.core.dra.claim import ActFault
from gpuactors.core.dra.entries import Claims, Look
from gpuactors.core.effects import Effect, Field, Level, Log
from gpuactors.core.index import index_of

if TYPE_CHECKING:
    from gpuactors.core.events import ActDone, ActFailed
    from gpuactors.core.model import PciAddress
    from gpuactors.core.state import NodeState

_REASONS: Final[Mapping[ActFault | None, Cause]] = {
    ActFault.IN_USE: Cause.IN_USE_ON_HOST,
    ActFault.NO_DRIVER: Cause.DRIVER_NOT_LOADED,
    ActFault.VIRTUAL_FUNCTIONS: Cause.VIRTUAL_FUNCTIONS,
}
"""What a later claim would meet as well. Other faults are of one act."""

_NEW: Final = Look()


def followed(before: NodeState, state: NodeState) -> Claims:
    """The claims of `state` with the looks at what is there now; the same object if they are the same."""
    claims, devices, was = state.claims, index_of(state).devices, index_of(before).devices
    if not claims.loaded or (was is devices and before.claims.loaded):
        return claims
    is_new = not before.claims.loaded  # a look of before may never come back
    looks = {
        address: _again(claims.looks[address], now=is_new or devices[address] is not was.get(address))
        if address in claims.looks
        else _NEW
        for address, device in devices.items()
        if not device.function.vfio_bound or address in claims.reserved
        if device.function.iommu_group is not None
    }
    return replace(claims, looks=looks) if looks != claims.looks else claims


def _again(look: Look, *, now: bool) -> Look:
    return replace(look, number=0, due_at=0.0) if now else look


def due(claims: Claims, at: float) -> Claims:
    """The claims with the next look that is due. One after the other: each is a pass over all processes."""
    if deadline(claims) > at:
        return claims
    address = min(_waiting(claims), key=lambda a: claims.looks[a].due_at)
    number = claims.last + 1
    begun = replace(claims.looks[address], number=number, due_at=math.inf)
    return replace(claims, last=number, looks={**claims.looks, address: begun})


def deadline(claims: Claims) -> float:
    """When a look is due; infinite if none is before the one that is outstanding has come back."""
    if any(look.number for look in claims.looks.values()):
        return math.inf
    return min((claims.looks[a].due_at for a in _waiting(claims)), default=math.inf)


def _waiting(claims: Claims) -> list[PciAddress]:
    return [a for a in claims.looks if a not in claims.reserved]


def of_look(claims: Claims, number: int) -> PciAddress | None:
    """The device of a look; None if it is none."""
    return next((a for a, k in claims.looks.items() if k.number == number), None)


def looked(
    claims: Claims, address: PciAddress, event: ActDone | ActFailed, at: float
) -> tuple[Claims, list[Effect]]:
    """The claims after a look at the device, or an act of a claim on it, and what the log says."""
    before = claims.looks.get(address)
    if before is None:
        return claims, []
    found, reason = before.found, getattr(event, "reason", "")
    if not reason:
        found = None
    elif (cause := _REASONS.get(getattr(event, "fault", None))) is not None:
        found = Obstacle(cause, reason)
    again_s = limits.UNFIT_LOOK_S if found is not None else limits.FIT_LOOK_S
    look = Look(0, at + again_s, found)
    return replace(claims, looks={**claims.looks, address: look}), _logged(address, before.found, found)


def _logged(address: PciAddress, before: Obstacle | None, found: Obstacle | None) -> list[Effect]:
    if before == found:
        return []
    if found is None:
        return [Log(Level.INFO, "device.claimable", {"address": address})]
    level = Level.DEBUG if before is not None and before.cause is found.cause else Level.WARNING
    fields: dict[str, Field] = {"address": address, "cause": str(found.cause), "reason": found.message}
    return [Log(level, "device.unclaimable", fields)]
