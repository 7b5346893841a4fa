"""The gate: may these devices be had, right now?

Theory of operation. Allocate and PreStartContainer are answered from facts that were looked up *after* the call came
in. A call that arrives asks for a look at each of its devices and waits; every look that comes back may complete it.
A device that is unknown, has changed since kubelet was told of it, or cannot be opened is refused with its reason, and
never swapped for another: kubelet's ledger would disagree with reality for the pod's life.

GetPreferredAllocation is answered at once and never refused: kubelet fails the pod on its error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gpuactors import limits
from gpuactors.core import looks
from gpuactors.core.allocation import grant, prefer
from gpuactors.core.effects import (
    Answer,
    Effect,
    Field,
    Granted,
    Level,
    Preferred,
    Ready,
    Refusal,
    Refused,
    Reply,
    Say,
)
from gpuactors.core.events import AllocateAsked, PreferenceAsked, PreStartAsked
from gpuactors.core.health import not_offered, verdict
from gpuactors.core.inventory import Device, devices_of, is_offered
from gpuactors.core.model import (
    Call,
    CallKind,
    DeviceId,
    Health,
    NodeState,
    PciAddress,
    PciFunction,
    ResourceName,
    Token,
)

Answered = list[Effect]
"""The replies to calls, each with its one line in the log."""


def asked(state: NodeState, event: AllocateAsked | PreStartAsked, at: float) -> tuple[NodeState, Answered]:
    """A call came in: refuse what cannot be, else ask for fresh looks and wait."""
    match event:
        case AllocateAsked():
            kind, requests = CallKind.ALLOCATE, event.requests
        case PreStartAsked():
            kind, requests = CallKind.PRE_START, (event.devices,)
    known = devices_by_id(state, event.resource)
    ids = [i for request in requests for i in request]
    refused = _refused_at_once(state, event.resource, ids, known)
    if refused is not None:
        return state, _answered(event.token, kind, event.resource, requests, refused)
    wanted = looks.ask_looks(state.looks, sorted({known[i].function.address for i in ids}))
    call = Call(
        kind=kind,
        resource=event.resource,
        requests=requests,
        seen={known[i].function.address: known[i].function for i in ids},
        since=state.looks.last,
        deadline=at + limits.CALL_DEADLINE_S,
    )
    return completed(replace(state, looks=wanted, calls={**state.calls, event.token: call}))


def completed(state: NodeState) -> tuple[NodeState, Answered]:
    """Answers every waiting call whose looks have all come back."""
    done = {token: call for token, call in state.calls.items() if _looked(state, call)}
    if not done:
        return state, []
    answered: Answered = []
    for token, call in done.items():
        answered += _answered(token, call.kind, call.resource, call.requests, _decide(state, call))
    return replace(state, calls={t: c for t, c in state.calls.items() if t not in done}), answered


def expired(state: NodeState, at: float) -> tuple[NodeState, Answered]:
    """Refuses the calls whose looks did not come back in time."""
    late = {token: call for token, call in state.calls.items() if call.deadline <= at}
    answered: Answered = []
    for token, call in late.items():
        refused = Refused(Refusal.UNAVAILABLE, _late(state, call))
        answered += _answered(token, call.kind, call.resource, call.requests, refused)
    return replace(state, calls={t: c for t, c in state.calls.items() if t not in late}), answered


def abandoned(state: NodeState, token: Token) -> NodeState:
    """Nobody waits for this answer any more."""
    return replace(state, calls={t: c for t, c in state.calls.items() if t != token})


def preferred(state: NodeState, event: PreferenceAsked) -> Reply:
    """The answer to GetPreferredAllocation, from what is known."""
    known = devices_by_id(state, event.resource)
    return Reply(event.token, Preferred(tuple(prefer(request, known) for request in event.requests)))


def devices_by_id(state: NodeState, resource: ResourceName) -> dict[DeviceId, Device]:
    """The selected devices of a resource by the ID that kubelet knows them by."""
    devices = devices_of(state.facts, state.settings.selectors)
    return {device_id(d): d for d in devices if d.resource == resource}


def device_id(device: Device) -> DeviceId:
    """Kubelet's ledger is by ID string; ours is the PCI address, which outlives rebinds and reboots."""
    return DeviceId(device.function.address)


def _answered(
    token: Token,
    kind: CallKind,
    resource: ResourceName,
    requests: tuple[tuple[DeviceId, ...], ...],
    answer: Answer,
) -> Answered:
    fields: dict[str, Field] = {
        "call": str(kind),
        "resource": resource,
        "devices": tuple(i for ids in requests for i in ids),
    }
    if isinstance(answer, Refused):
        line = Say(
            Level.WARNING, "call.refused", fields | {"status": str(answer.status), "reason": answer.reason}
        )
    else:
        line = Say(Level.INFO, "call.granted", fields)
    return [Reply(token, answer), line]


def _refused_at_once(
    state: NodeState, resource: ResourceName, ids: list[DeviceId], known: Mapping[DeviceId, Device]
) -> Refused | None:
    if state.stopping:
        return Refused(Refusal.UNAVAILABLE, "gpuactors is stopping")
    if not ids:
        return Refused(Refusal.INVALID_ARGUMENT, f"no device of {resource} was asked for")
    if len(set(ids)) != len(ids):
        twice = sorted({i for i in ids if ids.count(i) > 1})
        return Refused(Refusal.INVALID_ARGUMENT, f"asked for twice in one call: {', '.join(twice)}")
    unknown = [i for i in ids if i not in known]
    if not unknown:
        return None
    listed = {a.id: a.reason for a in state.frames.get(resource, ())}
    reasons = (f"{i}: {listed.get(i, f'no such device of {resource} on this node')}" for i in unknown)
    return Refused(Refusal.NOT_FOUND, "; ".join(reasons))


def _looked(state: NodeState, call: Call) -> bool:
    return not _missing(state, call)


def _missing(state: NodeState, call: Call) -> list[PciAddress]:
    """The call's devices whose look, asked for after the call came, is not back yet."""
    return sorted(a for a in call.seen if a in state.looks.functions and _number(state, a) <= call.since)


def _number(state: NodeState, address: PciAddress) -> int:
    fact = state.facts.get(address)
    return 0 if fact is None else fact.look


def _decide(state: NodeState, call: Call) -> Answer:
    known = devices_by_id(state, call.resource)
    obstacles = [o for address, seen in call.seen.items() if (o := _obstacle(state, known, address, seen))]
    if obstacles:
        return Refused(Refusal.FAILED_PRECONDITION, "; ".join(sorted(obstacles)))
    match call.kind:
        case CallKind.PRE_START:
            return Ready()
        case CallKind.ALLOCATE:
            return Granted(tuple(grant(call.resource, [known[i] for i in ids]) for ids in call.requests))


def _obstacle(
    state: NodeState, known: Mapping[DeviceId, Device], address: PciAddress, seen: PciFunction
) -> str | None:
    """Why this device cannot be had, in one sentence; None if it can."""
    fact = state.facts.get(address)
    now = fact.function if fact is not None else None
    if now is None:
        return f"{address}: the PCI function is gone from this node"
    if (now.vendor, now.device) != (seen.vendor, seen.device):
        return f"{address}: another device is there now ({now.vendor}:{now.device}, not {seen.vendor}:{seen.device})"
    if now.iommu_group != seen.iommu_group:
        return f"{address}: its IOMMU group changed from {seen.iommu_group} to {now.iommu_group}; ask again"
    device = known.get(DeviceId(address))
    if device is None or not is_offered(device):
        return f"{address}: {not_offered(now)}"
    health, reason = verdict(device)
    return None if health is Health.HEALTHY else f"{address}: {reason}"


def _late(state: NodeState, call: Call) -> str:
    return (
        f"sysfs did not answer within {limits.CALL_DEADLINE_S:.0f} s for {', '.join(_missing(state, call))}; "
        "a driver may be stuck there, see dmesg"
    )
