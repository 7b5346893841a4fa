"""The functions that an act of gpuactors has bound to a driver, and the returns to their original drivers that are
owed.

A function is ours from its reservation until an act has returned it, or it is seen on a driver that no act of gpuactors
has bound it to: somebody else has decided about it then. A driver that is not loaded when a claim ends does not hold
the claim: the device stays on vfio, may be claimed again, and its return is tried until the driver is there. It is not
begun while somebody has the device, and given up when somebody else has bound it.

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
"""15 s. A return that is owed as the driver is not loaded is tried again: some readlinks, and no process."""

UNSEEN: Final = -1
"""In `Gpus.settled`: since the checkpoint was read the function has not been looked for."""

_UNDER_WAY: Final = frozenset(
    {ClaimState.RESERVED, ClaimState.BINDING, ClaimState.STOPPED, ClaimState.RELEASING}
)
"""The states of a claim whose functions an act may have moved anywhere."""


# --- whose decision a function's driver is ----------------------------------------------------------------------------


def on_state_changed(before: NodeState, state: NodeState) -> Gpus:
    """`state.gpus` with what its functions are found on; the same object if nothing follows."""
    gpus, functions, seen = state.gpus, state.host.functions, state.host.seen
    was = before.host.functions
    inputs = (functions, gpus.original_drivers, gpus.acted)
    if inputs == (was, before.gpus.original_drivers, before.gpus.acted) and not gpus.settled:
        return gpus
    gone = was.keys() - functions.keys()
    settled = {
        a: n for a, n in gpus.settled.items() if (last := seen.get(a)) is not None and last.inspection <= n
    }
    known = gpus.original_drivers
    if not gone.isdisjoint(known):
        known = {a: first for a, first in known.items() if a not in gone}
    acted = gpus.acted - gone - _decided_by_others(state, gpus.acted - settled.keys())
    known = prebound.noted(known, (f for a, f in functions.items() if a not in settled), acted)
    owed = {a: o for a, o in gpus.owed.items() if not acted.isdisjoint(f.address for f in o.gpu.functions)}
    if acted == gpus.acted and settled == gpus.settled and owed == gpus.owed:
        return gpus if known is gpus.original_drivers else replace(gpus, original_drivers=known)
    after = replace(gpus, original_drivers=known, acted=acted, settled=settled, owed=owed)
    # It would be taken for ours again by a daemon that starts now.
    return after if acted == gpus.acted else _to_disk(after)


def _decided_by_others(state: NodeState, acted: Set[PciAddress]) -> frozenset[PciAddress]:
    """Those that are on another driver than a vfio driver, or are others than those that we have bound."""
    gpus, functions = state.gpus, state.host.functions
    under_way = {
        f.address
        for entry in gpus.claims.entries.values()
        if entry.state in _UNDER_WAY
        for gpu in gpus_of(entry).gpus
        for f in gpu.functions
    }
    under_way |= {f.address for owed in gpus.owed.values() if owed.act for f in owed.gpu.functions}
    found: set[PciAddress] = set()
    for address in acted:
        now, first = functions.get(address), gpus.original_drivers.get(address)
        if now is None:
            continue
        is_elsewhere = now.driver is not None and not now.vfio_bound and address not in under_way
        if is_elsewhere or (first is not None and prebound.is_another(first, now)):
            found.add(address)
    return frozenset(found)


def settled_by(state: NodeState, bound: Iterable[BoundFunction], *, returned: bool) -> Gpus:
    """`gpus` after an act: only later inspections say where its functions are. One that was `returned` is ours no
    more; another one is, also if it was plugged in while the act was under way."""
    gpus, since = state.gpus, state.host.inspections.last
    met = {b.address: b for b in bound}
    settled = {**gpus.settled, **dict.fromkeys(met, since)}
    if returned:
        return replace(gpus, settled=settled, acted=gpus.acted - frozenset(met))
    known = {**gpus.original_drivers}
    if not met.keys() <= known.keys():
        # One that was unplugged, and seen to be gone, before the act met the next one is noted with its claim only.
        noted = (f for e in gpus.claims.entries.values() for g in gpus_of(e).gpus for f in g.functions)
        known |= {f.address: f for f in noted if f.address in met.keys() - known.keys()}
    for a in met.keys() & known.keys():
        known[a] = replace(known[a], presence=met[a].presence or known[a].presence)
    return replace(gpus, settled=settled, acted=gpus.acted | frozenset(met), original_drivers=known)


def half_done(state: NodeState, moved: Iterable[BoundFunction]) -> Gpus:
    """`gpus` after an act that failed when it had moved these functions: they are ours, also where the kernel has
    left them without a driver."""
    return _to_disk(settled_by(state, moved, returned=False))


def ours(gpus: Gpus, gpu: ClaimedGpu) -> ClaimedGpu:
    """The device with those of its functions that are to be returned; with all if that is none."""
    functions = tuple(f for f in gpu.functions if f.address in gpus.acted)
    return replace(gpu, functions=functions or gpu.functions)


def is_to_be_returned(gpus: Gpus, gpu: ClaimedGpu) -> bool:
    """Any of its functions is ours and was found on another driver than a vfio driver: also a companion of a pre-bound
    GPU."""
    return any(not f.vfio and f.address in gpus.acted for f in gpu.functions)


# --- returns that are owed --------------------------------------------------------------------------------------------


def as_returned(entry: ClaimRecord, first: OriginalDriver) -> OriginalDriver:
    """Prepare the return of a function: add what the acts that bound it for its claim know."""
    bound = gpus_of(entry).bound.get(first.address)
    if bound is None:
        return first
    # The presence that our own act has met: it may have come after the reservation.
    presence = bound.presence or first.presence
    return replace(first, presence=presence, was_bound=bound.vfio, persistence=bound.persistence)


def owed_by(gpus: Gpus, entry: ClaimRecord, number: int, reason: str, at: float) -> Gpus:
    """`gpus` after an act of a claim that ends found that the driver is not loaded."""
    addresses, again_at = {a for a, n in entry.acts.items() if n == number}, at + RETURN_RETRY_S
    owed = {
        gpu.key: OwedReturn(_owed(gpus, entry, gpu), entry.name, reason, retry_at=again_at)
        for gpu in one_of_each_group(gpus_of(entry).gpus)
        if gpu.key in addresses
    }
    return replace(gpus, owed={**gpus.owed, **owed})


def _owed(gpus: Gpus, entry: ClaimRecord, gpu: ClaimedGpu) -> ClaimedGpu:
    functions = ours(gpus, gpu).functions
    return replace(gpu, functions=tuple(as_returned(entry, f) for f in functions))


def without_owed(gpus: Gpus, functions: Set[PciAddress]) -> Gpus:
    """`gpus` without the returns of these functions: a claim has them now, and is to return them itself."""
    left = {a: o for a, o in gpus.owed.items() if functions.isdisjoint(f.address for f in o.gpu.functions)}
    return replace(gpus, owed=left) if len(left) < len(gpus.owed) else gpus


def begun(gpus: Gpus, device: DeviceKey) -> Gpus:
    """`gpus` with the act that returns the device."""
    number = gpus.claims.last + 1
    owed = replace(gpus.owed[device], act=number, retry_at=math.inf)
    claims = replace(gpus.claims, last=number)
    return replace(gpus, claims=claims, owed={**gpus.owed, device: owed})


def put_off(gpus: Gpus, device: DeviceKey, at: float, reason: str = "") -> Gpus:
    """`gpus` with the next try of the return later."""
    owed = gpus.owed[device]
    owed = replace(owed, act=0, retry_at=at + RETURN_RETRY_S, reason=reason or owed.reason)
    return replace(gpus, owed={**gpus.owed, device: owed})


def over(gpus: Gpus, device: DeviceKey) -> Gpus:
    """`gpus` when the return is not owed any more."""
    owned = {
        f.address
        for entry in gpus.claims.entries.values()
        if entry.state in OWNING
        for gpu in gpus_of(entry).gpus
        for f in gpu.functions
    }
    gone = {f.address for f in gpus.owed[device].gpu.functions} - owned
    left = {a: o for a, o in gpus.owed.items() if a != device}
    return _to_disk(replace(gpus, owed=left, acted=gpus.acted - gone))


def of_act(gpus: Gpus, number: int) -> DeviceKey | None:
    """The device whose return this act is; None if it is none's."""
    return next((a for a, o in gpus.owed.items() if o.act == number), None)


def owed_acts(gpus: Gpus) -> dict[DeviceKey, DeviceAct]:
    """The acts that return them, of those that were begun."""
    return {
        a: DeviceAct(o.act, Target.ORIGINAL_DRIVER, o.gpu.functions) for a, o in gpus.owed.items() if o.act
    }


def log_owed(owed: OwedReturn, reason: str, *, known: bool = False) -> Log:
    """The log line for a return that cannot be made now. `known`: it was logged before."""
    level = Level.DEBUG if known else Level.WARNING
    fields: dict[str, Field] = {
        "claim": str(owed.claim),
        "uid": owed.claim.uid,
        "devices": (owed.gpu.key,),
        "reason": reason,
    }
    return Log(level, "claim.return_owed", fields)


def log_done(owed: OwedReturn) -> Log:
    """The line of the log for a return that was made."""
    fields: dict[str, Field] = {
        "claim": str(owed.claim),
        "uid": owed.claim.uid,
        "devices": (owed.gpu.key,),
    }
    return Log(Level.INFO, "claim.return_done", fields)


def _to_disk(gpus: Gpus) -> Gpus:
    """`gpus`, wanted on disk as they are now."""
    claims = gpus.claims
    if not claims.loaded or claims.unserved:
        return gpus
    number = claims.last + 1
    return replace(gpus, claims=replace(claims, last=number, checkpoint=number))
