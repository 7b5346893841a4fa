"""The functions that an act of gpuactors has bound to a driver, and the returns to their original drivers that are
owed.

gpuactors has acted on a function from its reservation until an act has returned it, or it is seen on a driver that no
act has bound it to: an operator decided about it then. A claim ends also if the original driver is not loaded: the
device stays on vfio, may be claimed again, and its return is tried until the driver is there. A return does not begin
while the device has an owner, and is given up when an operator has bound the device.

Must not decide to which driver a function is returned: that is `values/prebound.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Set
from typing import Final

from msgspec.structs import replace

from gpuactors.core.claims.driver import DeviceAct
from gpuactors.core.state import NodeState
from gpuactors.core.state.claims import ClaimedGpu, ClaimRecord, OwedReturn, gpus_of, one_of_each_group
from gpuactors.core.state.gpus import Gpus
from gpuactors.core.values import prebound
from gpuactors.core.values.claim import BoundFunction, OriginalDriver, Target
from gpuactors.core.values.claim_states import OWNING, ClaimState
from gpuactors.core.values.effects import Field, Level, Log
from gpuactors.core.values.model import DeviceKey, PciAddress

RETURN_RETRY_S: Final = 15.0
"""15 s. The time between two tries of an owed return while the driver is not loaded: some readlinks, and no process."""

UNSEEN: Final = -1
"""The value in `Gpus.settled` of a function that has not been looked for since the checkpoint was read."""

_UNDER_WAY: Final = frozenset(
    {ClaimState.RESERVED, ClaimState.BINDING, ClaimState.STOPPED, ClaimState.RELEASING}
)
"""The states of a claim whose functions an act may have moved anywhere."""


# --- whose decision a function's driver is ----------------------------------------------------------------------------


def on_state_changed(before: NodeState, state: NodeState) -> Gpus:
    """Follow the drivers on which functions are seen. Returns the same object if nothing changes."""
    gpus, functions, seen = state.gpus, state.host.functions, state.host.seen
    functions_before = before.host.functions
    inputs = (functions, gpus.original_drivers, gpus.acted)
    if inputs == (functions_before, before.gpus.original_drivers, before.gpus.acted) and not gpus.settled:
        return gpus
    gone = functions_before.keys() - functions.keys()
    settled = {
        a: n
        for a, n in gpus.settled.items()
        if (last := seen.get(a)) is not None and (last.inspection <= n or last.has_failed)
    }
    drivers = gpus.original_drivers
    if not gone.isdisjoint(drivers):
        drivers = {a: driver for a, driver in drivers.items() if a not in gone}
    acted = gpus.acted - gone - _decided_by_others(state, gpus.acted - settled.keys())
    drivers = prebound.noted(drivers, [f for a, f in functions.items() if a not in settled], acted)
    owed = {a: o for a, o in gpus.owed.items() if not acted.isdisjoint(f.address for f in o.gpu.functions)}
    if acted == gpus.acted and settled == gpus.settled and owed == gpus.owed:
        return gpus if drivers is gpus.original_drivers else replace(gpus, original_drivers=drivers)
    after = replace(gpus, original_drivers=drivers, acted=acted, settled=settled, owed=owed)
    # A daemon that starts now would treat it as acted on again.
    return after if acted == gpus.acted else _to_disk(after)


def _decided_by_others(state: NodeState, acted: Set[PciAddress]) -> frozenset[PciAddress]:
    """Return the functions that an operator has bound to a driver, and those whose card was replaced."""
    gpus, functions = state.gpus, state.host.functions
    under_way = {
        f.address
        for entry in gpus.claims.entries.values()
        if entry.state in _UNDER_WAY
        for gpu in gpus_of(entry).gpus
        for f in gpu.functions
    }
    under_way |= {f.address for owed in gpus.owed.values() if owed.act for f in owed.gpu.functions}
    decided: set[PciAddress] = set()
    for address in acted:
        now, original = functions.get(address), gpus.original_drivers.get(address)
        if now is None:
            continue
        is_elsewhere = now.driver is not None and not now.vfio_bound and address not in under_way
        if is_elsewhere or (original is not None and prebound.is_another(original, now)):
            decided.add(address)
    return frozenset(decided)


def settled_by(state: NodeState, bound: Iterable[BoundFunction], *, returned: bool) -> Gpus:
    """Record that an act has bound these functions: only later inspections show where they are. `returned` functions
    are not acted on any more; others are, also one that was plugged in while the act was under way."""
    gpus, since = state.gpus, state.host.inspections.last
    by_address = {b.address: b for b in bound}
    settled = {**gpus.settled, **dict.fromkeys(by_address, since)}
    if returned:
        return replace(gpus, settled=settled, acted=gpus.acted - frozenset(by_address))
    drivers = {**gpus.original_drivers}
    if not by_address.keys() <= drivers.keys():
        # Of a function that was seen to be gone before the act found the next one, only its claim has the driver.
        reserved = (f for e in gpus.claims.entries.values() for g in gpus_of(e).gpus for f in g.functions)
        drivers |= {f.address: f for f in reserved if f.address in by_address.keys() - drivers.keys()}
    for a in by_address.keys() & drivers.keys():
        drivers[a] = replace(drivers[a], presence=by_address[a].presence or drivers[a].presence)
    return replace(gpus, settled=settled, acted=gpus.acted | frozenset(by_address), original_drivers=drivers)


def half_done(state: NodeState, moved: Iterable[BoundFunction]) -> Gpus:
    """Record that an act failed after it had moved these functions: they are acted on, also where the kernel has left
    them without a driver."""
    return _to_disk(settled_by(state, moved, returned=False))


def with_acted_functions(gpus: Gpus, gpu: ClaimedGpu) -> ClaimedGpu:
    """Reduce the device to its functions that are to be returned; keep all if there are none."""
    functions = tuple(f for f in gpu.functions if f.address in gpus.acted)
    return replace(gpu, functions=functions or gpu.functions)


def is_to_be_returned(gpus: Gpus, gpu: ClaimedGpu) -> bool:
    """Return whether gpuactors has acted on any function of the device that was not on a vfio driver before: also on a
    companion of a pre-bound GPU."""
    return any(not f.vfio and f.address in gpus.acted for f in gpu.functions)


# --- returns that are owed --------------------------------------------------------------------------------------------


def as_returned(entry: ClaimRecord, original: OriginalDriver) -> OriginalDriver:
    """Prepare the return of a function: add what the acts that bound it for its claim know."""
    bound = gpus_of(entry).bound.get(original.address)
    if bound is None:
        return original
    # The presence that the act has found may be newer than the reservation.
    presence = bound.presence or original.presence
    return replace(original, presence=presence, was_bound=bound.vfio, persistence=bound.persistence)


def owed_by(gpus: Gpus, entry: ClaimRecord, number: int, reason: str, at: float) -> Gpus:
    """Record the returns that an act of an ending claim could not make, as the driver is not loaded."""
    addresses, again_at = {a for a, n in entry.acts.items() if n == number}, at + RETURN_RETRY_S
    owed = {
        gpu.key: OwedReturn(_owed(gpus, entry, gpu), entry.name, reason, retry_at=again_at)
        for gpu in one_of_each_group(gpus_of(entry).gpus)
        if gpu.key in addresses
    }
    return replace(gpus, owed={**gpus.owed, **owed})


def _owed(gpus: Gpus, entry: ClaimRecord, gpu: ClaimedGpu) -> ClaimedGpu:
    functions = with_acted_functions(gpus, gpu).functions
    return replace(gpu, functions=tuple(as_returned(entry, f) for f in functions))


def without_owed(gpus: Gpus, functions: Set[PciAddress]) -> Gpus:
    """Remove the owed returns of these functions: a claim has them now, and returns them itself."""
    remaining = {
        a: o for a, o in gpus.owed.items() if functions.isdisjoint(f.address for f in o.gpu.functions)
    }
    return replace(gpus, owed=remaining) if len(remaining) < len(gpus.owed) else gpus


def begun(gpus: Gpus, device: DeviceKey) -> Gpus:
    """Begin the act that returns the device."""
    number = gpus.claims.last + 1
    owed = replace(gpus.owed[device], act=number, retry_at=math.inf)
    claims = replace(gpus.claims, last=number)
    return replace(gpus, claims=claims, owed={**gpus.owed, device: owed})


def put_off(gpus: Gpus, device: DeviceKey, at: float, reason: str = "") -> Gpus:
    """Put the next try of the return off. `reason` replaces the last one, unless it is empty."""
    owed = gpus.owed[device]
    owed = replace(owed, act=0, retry_at=at + RETURN_RETRY_S, reason=reason or owed.reason)
    return replace(gpus, owed={**gpus.owed, device: owed})


def over(gpus: Gpus, device: DeviceKey) -> Gpus:
    """Remove the return of the device, which is made or was given up."""
    owned = {
        f.address
        for entry in gpus.claims.entries.values()
        if entry.state in OWNING
        for gpu in gpus_of(entry).gpus
        for f in gpu.functions
    }
    freed = {f.address for f in gpus.owed[device].gpu.functions} - owned
    remaining = {a: o for a, o in gpus.owed.items() if a != device}
    return _to_disk(replace(gpus, owed=remaining, acted=gpus.acted - freed))


def device_returned_by(gpus: Gpus, number: int) -> DeviceKey | None:
    """Return the device that this act returns; None if it returns none."""
    return next((a for a, o in gpus.owed.items() if o.act == number), None)


def owed_acts(gpus: Gpus) -> dict[DeviceKey, DeviceAct]:
    """Return the acts of the owed returns that were begun."""
    return {
        a: DeviceAct(o.act, Target.ORIGINAL_DRIVER, o.gpu.functions) for a, o in gpus.owed.items() if o.act
    }


def log_owed(owed: OwedReturn, reason: str, *, is_repeated: bool = False) -> Log:
    """Return the log line for a return that cannot be made now. `is_repeated`: it was logged before."""
    level = Level.DEBUG if is_repeated else Level.WARNING
    fields: dict[str, Field] = {
        "claim": str(owed.claim),
        "uid": owed.claim.uid,
        "devices": (owed.gpu.key,),
        "reason": reason,
    }
    return Log(level, "claim.return_owed", fields)


def log_done(owed: OwedReturn) -> Log:
    """Return the log line for a return that was made."""
    fields: dict[str, Field] = {
        "claim": str(owed.claim),
        "uid": owed.claim.uid,
        "devices": (owed.gpu.key,),
    }
    return Log(Level.INFO, "claim.return_done", fields)


def _to_disk(gpus: Gpus) -> Gpus:
    """Request a checkpoint with `gpus` as they are now."""
    claims = gpus.claims
    if not claims.loaded or claims.unserved:
        return gpus
    number = claims.last + 1
    return replace(gpus, claims=replace(claims, last=number, checkpoint=number))
