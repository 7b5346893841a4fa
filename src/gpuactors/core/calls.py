"""The gate: may these devices be had, right now?

Theory of operation. Allocate and PreStartContainer are answered from facts that were found *after* the call came in: it
asks for an inspection of each of its devices, for a poll of the groups' use and for a read of kubelet's ledger, and
waits; what comes back may complete it. Of the ledger a read counts as well that was asked for just before; but nobody
is refused for what that one says, as kubelet gives away what its ledger has free *now*: whoever ours still name may
have just left. A ledger that cannot be read is taken as it was read last.

A device that is unknown, has changed since kubelet was told of it, cannot be opened or is in foreign hands is refused
with its reason, and never swapped for another: kubelet's ledger would disagree with reality for the pod's life.

A device that a pod which is gone still holds is handed out all the same where PreStartContainer will be called, because
that is the one call that kubelet repeats: it waits there for the old process to let go, and is refused only then.

GetPreferredAllocation is answered at once and never refused: kubelet fails the pod on its error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from types import MappingProxyType
from typing import Final

from gpuactors import limits
from gpuactors.core import inspections, schedule
from gpuactors.core.allocation import grant, prefer
from gpuactors.core.assessment.assess import Assessment
from gpuactors.core.assessment.assessments import assessments_of
from gpuactors.core.assessment.cause import Cause
from gpuactors.core.assessment.ownership import may_be_a_pods, observed_use, orphans_pod
from gpuactors.core.assessment.presence import changed, function_at, not_listed, not_offered
from gpuactors.core.assessment.status import Blocker, causes_of
from gpuactors.core.choice import Search
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
from gpuactors.core.identity import address_of
from gpuactors.core.index import index_of
from gpuactors.core.inventory import Device
from gpuactors.core.model import (
    Call,
    CallKind,
    DeviceId,
    PciAddress,
    PciFunction,
    ResourceName,
    Role,
    Token,
    is_pci_address,
)
from gpuactors.core.quote import first_of, quoted_id, quoted_ids
from gpuactors.core.state import NodeState, with_inspections, with_waiting

_NONE: Final[Mapping[DeviceId, Device]] = MappingProxyType({})

Answered = list[Effect]
"""The replies to calls, each with its one line in the log."""


def asked(state: NodeState, event: AllocateAsked | PreStartAsked, at: float) -> tuple[NodeState, Answered]:
    """A call came in: refuse what cannot be, else ask for fresh inspections and wait."""
    match event:
        case AllocateAsked():
            kind, requests, wait_s = CallKind.ALLOCATE, event.requests, limits.CALL_DEADLINE_S
        case PreStartAsked():
            kind, requests, wait_s = CallKind.PRE_START, (event.devices,), limits.PRE_START_WAIT_S
    known = devices_by_id(state, event.resource)
    ids = [i for request in requests for i in request]
    refused = _refused_at_once(state, event.resource, ids, known)
    if refused is not None:
        return state, _answered(event.token, kind, event.resource, requests, refused)
    call = Call(
        kind=kind,
        resource=event.resource,
        requests=requests,
        seen={known[i].function.address: known[i].function for i in ids},
        since=state.host.inspections.last,
        deadline=at + wait_s,
        came_at=at,
    )
    state = with_inspections(state, inspections.ask_inspections(state.host.inspections, sorted(call.seen)))
    state = _with_poll(with_waiting(state, {**state.calls.waiting, event.token: call}), call)
    return _with_read(state, call, at), []


def completed(state: NodeState, at: float) -> tuple[NodeState, Answered]:
    """Answers every waiting call that can be answered now."""
    answered: Answered = []
    for token, call in state.calls.waiting.items():
        if _missing(state, call):
            state = _with_read(state, call, at)
            continue
        answer = _decide(state, call)
        if isinstance(answer, _Doubted):
            doubting = replace(call, doubts=True)
            state = with_waiting(state, {**state.calls.waiting, token: doubting})
            state = _with_read(state, doubting, at)
            continue
        if answer is None:  # the previous holder has not let go yet
            continue
        answered += _answered(token, call.kind, call.resource, call.requests, answer)
        if isinstance(answer, Granted):
            state = _handed_out(state, call, at)
    return _without(state, answered), answered


def expired(state: NodeState, at: float) -> tuple[NodeState, Answered]:
    """Refuses the calls that cannot be answered in time."""
    answered: Answered = []
    for token, call in state.calls.waiting.items():
        if call.deadline <= at:
            answered += _answered(token, call.kind, call.resource, call.requests, _late(state, call))
    return _without(state, answered), answered


def given_up(state: NodeState) -> tuple[NodeState, Answered]:
    """Refuses every call that still waits: a successor is to serve. Kubelet asks it for a PreStartContainer again."""
    refused = _refused(
        Refusal.UNAVAILABLE,
        Blocker(Cause.NOT_SERVING, "gpuactors is handing over to its successor: ask again"),
    )
    answered: Answered = []
    for token, call in state.calls.waiting.items():
        answered += _answered(token, call.kind, call.resource, call.requests, refused)
    return _without(state, answered), answered


def abandoned(state: NodeState, token: Token) -> NodeState:
    """Nobody waits for this answer any more."""
    return with_waiting(state, {t: c for t, c in state.calls.waiting.items() if t != token})


def preferred(state: NodeState, event: PreferenceAsked) -> Reply:
    """The answer to GetPreferredAllocation, from what is known: what could really be opened comes first, and last what
    is in a group with a device that somebody has and that kubelet does not offer (it has not had our last list yet)."""
    known = devices_by_id(state, event.resource)
    owned = index_of(state).owners
    busy = {
        i
        for i, d in known.items()
        if d.function.address in owned or ((use := observed_use(state, d)) is not None and use.in_use)
    }
    search = Search()
    chosen = []
    for request in event.requests:
        offered = {
            known[i].function.address for i in (*request.available, *request.must_include) if i in known
        }
        facts = (state.host.facts[a].function for a in owned.keys() - offered if a in state.host.facts)
        groups = {function.iommu_group for function in facts if function is not None} - {None}
        taken = {i for i, d in known.items() if d.function.iommu_group in groups}
        chosen.append(prefer(request, known, busy, search, taken))
    return Reply(event.token, Preferred(tuple(chosen)))


def waits_for_poll(state: NodeState) -> bool:
    """A call has its inspections and waits for what a poll tells: who has its devices, or that he lets go."""
    return any(
        not _unseen(state, call) and (bool(_unpolled(state, call)) or not _is_unread(state, call))
        for call in state.calls.waiting.values()
    )


def devices_by_id(state: NodeState, resource: ResourceName) -> Mapping[DeviceId, Device]:
    """As `Index.by_id`; empty if there are none of that resource."""
    return index_of(state).by_id.get(resource, _NONE)


def _without(state: NodeState, answered: Answered) -> NodeState:
    tokens = {effect.token for effect in answered if isinstance(effect, Reply)}
    if not tokens:
        return state
    return with_waiting(state, {t: c for t, c in state.calls.waiting.items() if t not in tokens})


def _handed_out(state: NodeState, call: Call, at: float) -> NodeState:
    """What was handed out counts as allocated until kubelet's ledger lists it: `schedule.due` has it read for that."""
    ids = [(call.resource, device) for request in call.requests for device in request]
    until = dict.fromkeys(ids, at + limits.GRANT_GRACE_S)
    # What kubelet kept of an Allocate before is another pod's, and its file may not be readable soon.
    kubelet = state.kubelet
    cached = {name: nodes for name, nodes in kubelet.ledger.cached.items() if name not in until}
    ledger, pending = replace(kubelet.ledger, cached=cached), {**kubelet.pending_allocations, **until}
    return replace(state, kubelet=replace(kubelet, pending_allocations=pending, ledger=ledger))


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
        "devices": quoted_ids([i for ids in requests for i in ids]),
    }
    if isinstance(answer, Refused):
        fields |= {
            "status": str(answer.status),
            "causes": tuple(map(str, answer.causes)),
            "reason": answer.reason,
        }
        line = Say(Level.WARNING, "call.refused", fields)
    else:
        line = Say(Level.INFO, "call.granted", fields)
    return [Reply(token, answer), line]


def _refused(status: Refusal, *why: Blocker) -> Refused:
    """For all of these; the first of them in words."""
    owners = tuple(given for b in why if b.owner is not None for given in b.owner.entries)
    return Refused(status, "; ".join(first_of([b.message for b in why])), causes_of(why), owners)


def _refused_at_once(
    state: NodeState, resource: ResourceName, ids: list[DeviceId], known: Mapping[DeviceId, Device]
) -> Refused | None:
    if state.daemon.stopping or state.daemon.role is not Role.SERVING:
        return _refused(Refusal.UNAVAILABLE, Blocker(Cause.NOT_SERVING, "gpuactors is stopping"))
    if not ids:
        nothing = Blocker(Cause.INVALID_REQUEST, f"no device of {resource} was asked for")
        return _refused(Refusal.INVALID_ARGUMENT, nothing)
    if len({known[i].function.address if i in known else i for i in ids}) != len(ids):
        twice = sorted(i for i, times in Counter(ids).items() if times > 1) or sorted(ids)
        said = f"asked for twice in one call: {', '.join(quoted_ids(twice))}"
        return _refused(Refusal.INVALID_ARGUMENT, Blocker(Cause.INVALID_REQUEST, said))
    unknown = [i for i in ids if i not in known]
    if not unknown:
        return None
    # The rest is only counted: why it is unknown takes a look at every list.
    why = {i: _why_unknown(state, resource, i) for i in unknown[: limits.QUOTED_ITEMS_MAX]}
    named = [f"{quoted_id(i)}: {blocker.message}" for i, blocker in why.items()]
    reason = "; ".join(first_of([*named, *unknown[len(named) :]]))
    return Refused(Refusal.NOT_FOUND, reason, causes_of(why.values()))


def _why_unknown(state: NodeState, resource: ResourceName, device: DeviceId) -> Blocker:
    address = address_of(state, resource, device)
    function = function_at(state, address) if address is not None else None
    if function is not None and function.fault is not None:
        return Blocker(Cause.UNREADABLE, function.fault)
    listed = {a.id: a for a in state.published.device_lists.get(resource, ())}
    if device not in listed:
        return Blocker(Cause.UNKNOWN_ID, f"no such device of {resource} on this node")
    if address is None or not is_pci_address(address):
        return Blocker(Cause.UNKNOWN_ID, f"no device of {resource} on this node is known by this ID")
    # Not the listed reason, which may name a pod: kubelet has given it to the one that it asks for.
    return not_listed(state, resource, address)


def _missing(state: NodeState, call: Call) -> bool:
    """Something that the call is decided by has not been looked at, polled or read since the call came."""
    return bool(_unseen(state, call) or _unpolled(state, call)) or _is_unread(state, call)


def _is_unread(state: NodeState, call: Call) -> bool:
    """Kubelet's ledger has not been asked since the call came, nor just before that."""
    if state.kubelet.ledger.done > call.since:
        return False
    return call.doubts or not _is_fresh(state.kubelet.ledger.read_at, call)


def _is_fresh(asked_at: float, call: Call) -> bool:
    """A read of the ledger that was asked for then is new enough for the call."""
    return asked_at >= call.came_at - limits.LEDGER_FRESH_S


def _with_read(state: NodeState, call: Call, at: float) -> NodeState:
    """A read of the ledger that counts for the call is outstanding, or will be, if it needs one."""
    ledger = state.kubelet.ledger
    if not _is_unread(state, call):
        return state
    if ledger.outstanding is not None:
        enough = ledger.outstanding > call.since or (not call.doubts and _is_fresh(ledger.asked_at, call))
        if enough or ledger.refresh.again:
            return state
    return schedule.ask_ledger(state, at)


def _with_poll(state: NodeState, call: Call) -> NodeState:
    """A poll of its devices' groups, whether there is reason to poll them yet or not, is outstanding or will be."""
    groups = {f.iommu_group for f in call.seen.values() if f.iommu_group is not None}
    return schedule.ask_poll(state, frozenset(groups)) if groups else state


def _unseen(state: NodeState, call: Call) -> list[PciAddress]:
    """Its devices that have not been looked at since it came: the inspection is out, or there was a shortage."""
    return sorted(
        a
        for a in call.seen
        if _shortage(state, a) or (a in state.host.inspections.functions and _number(state, a) <= call.since)
    )


def _shortage(state: NodeState, address: PciAddress) -> str:
    fact = state.host.facts.get(address)
    return fact.short if fact is not None else ""


def _unpolled(state: NodeState, call: Call) -> list[PciAddress]:
    """Its devices whose group has not been polled since it came: a poll may have to leave a group out, and what an
    earlier one saw of it does not count. Of a group only the device itself counts: what is gone, in no group or on no
    vfio driver is not waited for, whatever a companion of it is on."""
    index, unpolled = index_of(state), []
    for address in sorted(call.seen):
        function = index.functions.get(address)
        group = function.iommu_group if function is not None else None
        if group is None or address not in index.polled.get(group, ()):
            continue
        use = state.host.polls.groups.get(group)
        if use is None or use.poll <= call.since:
            unpolled.append(address)
    return unpolled


def _number(state: NodeState, address: PciAddress) -> int:
    fact = state.host.facts.get(address)
    return 0 if fact is None else fact.inspection


@dataclass(frozen=True, slots=True)
class _Doubted:
    """It would be refused for what the ledger said before the call came."""


def _decide(state: NodeState, call: Call) -> Answer | _Doubted | None:
    """The answer; None if it is worth waiting: for a holder to let go, or to know whose holder it is."""
    known = devices_by_id(state, call.resource)
    blockers = [b for address, seen in call.seen.items() if (b := _blocker(known, state, address, seen))]
    if blockers:
        return _refused(Refusal.FAILED_PRECONDITION, *sorted(blockers, key=attrgetter("message")))
    match call.kind:
        case CallKind.PRE_START:
            if stale := _stale(state, call, known):
                if state.kubelet.ledger.done <= call.since:
                    return _Doubted()
                return _refused(Refusal.FAILED_PRECONDITION, Blocker(Cause.STALE_NODES, stale))
            return None if _held(state, call) else Ready()
        case CallKind.ALLOCATE:
            if _is_undecided(state, known, call):
                return None
            if taken := _taken(state, call):
                if state.kubelet.ledger.done <= call.since:
                    return _Doubted()
                if _may_be_back(state, known, call):
                    return None
                return _refused(Refusal.FAILED_PRECONDITION, *taken)
            return Granted(tuple(grant(call.resource, [known[i] for i in ids]) for ids in call.requests))


def _blocker(
    known: Mapping[DeviceId, Device], state: NodeState, address: PciAddress, seen: PciFunction
) -> Blocker | None:
    """What of its files forbids handing it out, named by its address; None if nothing."""
    now = function_at(state, address)
    found = changed(seen, now)
    if found is None and now is not None:
        device = known.get(DeviceId(address))
        found = not_offered(now) if device is None else _assessed(state, device).blocker
    return _of(address, found) if found is not None else None


def _assessed(state: NodeState, device: Device) -> Assessment:
    return assessments_of(state).of[device.function.address]


def _of(address: PciAddress, blocker: Blocker) -> Blocker:
    return replace(blocker, message=f"{address}: {blocker.message}")


def _is_undecided(state: NodeState, known: Mapping[DeviceId, Device], call: Call) -> bool:
    """Somebody uses a group, and what tells whether it is a stranger, or a pod that has just left, is on its way."""
    for address in call.seen:
        device = known[DeviceId(address)]
        use = observed_use(state, device)
        if use is None or not use.in_use:
            continue
        ledger, orphans = state.kubelet.ledger, state.kubelet.orphans
        left = [orphans[m.address].read for m in device.group if m.address in orphans]
        read_comes = use.since > ledger.read and ledger.outstanding is not None
        group = device.function.iommu_group
        poll_comes = any(use.poll <= read for read in left) and state.host.polls.is_to_see(group)
        if read_comes or poll_comes:
            return True
    return False


def _may_be_back(state: NodeState, known: Mapping[DeviceId, Device], call: Call) -> bool:
    """Another device of a group was handed out so lately that kubelet's ledger cannot tell yet whether a pod has it, or
    has had it."""
    if state.kubelet.ledger.problem is not None:
        return False
    late = {
        address_of(state, *given)
        for given, until in state.kubelet.pending_allocations.items()
        if state.kubelet.ledger.read_at < schedule.listed_at(until)
    }
    mates = {m.address for a in call.seen for m in known[DeviceId(a)].group} - call.seen.keys()
    return not mates.isdisjoint(late)


def _stale(state: NodeState, call: Call, known: Mapping[DeviceId, Device]) -> str:
    """Why the container would not get its devices but what else is now behind the nodes of the answer that kubelet
    keeps: groups may have other numbers after a restart of the node. Empty if it gets them, or if kubelet keeps no
    answer with nodes for these devices."""
    ids = [i for request in call.requests for i in request]
    made = {n for i in ids for n in state.kubelet.ledger.cached.get((call.resource, i), ()) if _is_of_one(n)}
    if not made:
        return ""
    due = {i: {n for m in known[i].group for n in m.nodes if _is_of_one(n)} for i in ids}
    wrong = sorted(made - set().union(*due.values()))
    lacking = [i for i in ids if made.isdisjoint(due[i])]
    if not wrong and not lacking:
        return ""
    whose = "; ".join(first_of([_whose_node(state, call, node) for node in wrong]))
    needs = "; ".join(
        first_of(
            [
                f"{known[i].function.address} is behind {' and '.join(sorted(due[i])) or 'no node'} now"
                for i in lacking or ids
            ]
        )
    )
    return (
        f"the container would get {', '.join(quoted_ids(sorted(made)))}: kubelet has kept that from an Allocate before "
        f"the node's restart, or before the device was bound anew; {whose + '; ' if whose else ''}{needs}: "
        "delete the pod, so that its devices are allocated anew"
    )


def _is_of_one(node: str) -> bool:
    """A device node of one group or function, unlike the container's and iommufd's."""
    return node.startswith("/dev/vfio/") and node != "/dev/vfio/vfio"


def _whose_node(state: NodeState, call: Call, node: str) -> str:
    """Whose a device node is now, in words."""
    index = index_of(state)
    for address, function in index.functions.items():
        if node in function.nodes:
            owner = index.owners.get(address)
            said = f" ({owner.said(call.resource)})" if owner is not None else ""
            return f"{node} is {address}'s now{said}"
    return f"{quoted_id(node)} is no GPU's any more"


def _taken(state: NodeState, call: Call) -> list[Blocker]:
    """Why Allocate must refuse although the files are in order: whose hands the devices are in."""
    known = devices_by_id(state, call.resource)
    asked = {known[i].function.address: i for request in call.requests for i in request}
    found = ((a, _taken_by(state, call, known[DeviceId(a)], asked[a])) for a in sorted(call.seen))
    return [_of(address, blocker) for address, blocker in found if blocker is not None]


def _taken_by(state: NodeState, call: Call, device: Device, asked_as: DeviceId) -> Blocker | None:
    owned, group = index_of(state).owners, f"IOMMU group {device.function.iommu_group}"
    owner = owned.get(device.function.address)
    if owner is not None and (others := owner.besides(call.resource, asked_as)) is not None:
        return Blocker(others.cause(call.resource), others.said(), others)
    mates = [m.address for m in device.group if m.address not in call.seen and m.address in owned]
    if mates:
        owner = owned[mates[0]]
        return Blocker(Cause.GROUP_IN_USE, f"{group} is in use: {mates[0]} is {owner.said()}", owner)
    use = observed_use(state, device)
    if use is None or not use.in_use:
        return None
    # Kubelet gives away what its ledger has free: whoever we still know as its owner has just left.
    left = orphans_pod(state, device) is not None or (owner is not None and may_be_a_pods(use))
    if left and state.daemon.settings.pre_start_gate:
        return None
    return Blocker(_held_by(state, device, left=left), f"{group} is {use.evidence}")


def _held_by(state: NodeState, device: Device, *, left: bool) -> Cause:
    """Who holds its group, which the pod that asks for it is not."""
    if left:
        return Cause.ORPHANED
    cause = _assessed(state, device).ownership.cause
    return cause if cause is Cause.HOLDER_UNKNOWN else Cause.HELD_BY_OTHER


def _held(state: NodeState, call: Call) -> list[Blocker]:
    """The call's devices whose group somebody holds, each with who does."""
    known = devices_by_id(state, call.resource)
    held = []
    for address in sorted(call.seen):
        device = known.get(DeviceId(address))
        use = observed_use(state, device) if device is not None else None
        if device is not None and use is not None and use.in_use:
            pod = orphans_pod(state, device)
            gone = f", by pod {pod} that is gone from kubelet's ledger" if pod is not None else ""
            said = f"{address}: IOMMU group {device.function.iommu_group} is still {use.evidence}{gone}"
            held.append(Blocker(_held_by(state, device, left=pod is not None), said))
    return held


def _late(state: NodeState, call: Call) -> Refused:
    """Why a call could not be answered in time."""
    if short := [
        Blocker(Cause.SHORTAGE, f"{a}: {why}") for a in sorted(call.seen) if (why := _shortage(state, a))
    ]:
        return _refused(Refusal.UNAVAILABLE, *short)
    if unseen := ", ".join(quoted_ids(_unseen(state, call))):
        said = f"sysfs did not answer in time for {unseen}; a driver may be stuck there, see dmesg"
        return _refused(Refusal.UNAVAILABLE, Blocker(Cause.INSPECTION_LATE, said))
    if unpolled := ", ".join(quoted_ids(_unpolled(state, call))):
        said = f"it could not be found out in time who uses {unpolled}; can its `enable` be read in sysfs?"
        return _refused(Refusal.UNAVAILABLE, Blocker(Cause.USE_LATE, said))
    if _is_unread(state, call):
        said = "kubelet did not return its ledger (PodResources List) in time; check whether kubelet hangs"
        return _refused(Refusal.UNAVAILABLE, Blocker(Cause.LEDGER_LATE, said))
    return _refused(Refusal.UNAVAILABLE, *(_held(state, call) or _taken(state, call)))
