"""The gate: whether these devices may be allocated now.

Theory of operation. Allocate and PreStartContainer are answered from facts read *after* the call came in: a call
requests an inspection of each of its devices, a poll of the groups' use and a read of kubelet's ledger, and waits for
their results. After a uevent of a device, and after uevents were missed, it waits for the inspection that follows: an
earlier one may have read a group number that another device has now. A read of the ledger that was requested just
before the call counts as well. No call is refused because of an owner before kubelet was asked for that pod, after the
call came (Get, or List where its name is not known): kubelet allocates what its ledger has free *now*, so the owner may
have just left. If the ledger cannot be read, its last known contents count.

Kubelet may ask for a device that a pod has already: an init container's is reused by the pod's next container. It does
so by mistake as well, when List has made it forget an Allocate in flight (`host/asking.py`). The pod's cgroup tells the
two apart: kubelet makes it when all containers have their devices. So a device of a pod that has one, and lives, is
refused, which also makes kubelet's set right again; one that has just been given is waited for, until its pod's cgroup
is there or would be.

A device that is unknown, has changed since it was listed, cannot be opened or is held by an external process is refused
with its reason. It is never replaced by another: kubelet's ledger would disagree with reality for the pod's life.

A device that is still held by a pod that is gone is allocated all the same where PreStartContainer will be called,
because that is the one call that kubelet repeats: it waits until the old process has released the device, and is
refused only if its time runs out. With `--wait-in allocate` Allocate itself waits so: Kata starts the virtual machine
with the pod's sandbox, before PreStartContainer.

Where gpuactors activates partitions of an NVLink fabric, the call that waits for a release also waits until the
partition of its devices is active. An earlier Allocate only has it activated.

With `--allocate-as cdi` Allocate also waits until the CDI file on disk has the device with its nodes as they are now.

GetPreferredAllocation is answered at once and never refused: kubelet fails the pod on its error.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter, itemgetter
from types import MappingProxyType
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from gpuactors import limits
from gpuactors.core.deviceplugin import specs
from gpuactors.core.deviceplugin.allocation import prefer
from gpuactors.core.deviceplugin.choice import Search
from gpuactors.core.events.deviceplugin import AllocateAsked, PreferenceAsked, PreStartAsked
from gpuactors.core.host import asking, inspections, schedule
from gpuactors.core.host.sets import sets_unknown
from gpuactors.core.host.usage import last_poll, use_of
from gpuactors.core.kinds.container import node_order
from gpuactors.core.kinds.presence import changed
from gpuactors.core.kinds.sets import DeviceSet, egm_nodes, not_a_set, without_devices
from gpuactors.core.kinds.table import is_key, kind_of
from gpuactors.core.ledger.books import admitted_by, has_kept
from gpuactors.core.ledger.identity import address_of, not_listed
from gpuactors.core.partitions.outputs import call_owner, unready
from gpuactors.core.state import NodeState, with_inspections, with_ledger, with_waiting
from gpuactors.core.values.cause import OF_A_PART, Cause
from gpuactors.core.values.device_spec import cdi_id
from gpuactors.core.values.effects import (
    Answer,
    Effect,
    Field,
    Grant,
    Granted,
    Level,
    Log,
    Preferred,
    Ready,
    Refusal,
    Refused,
    Reply,
)
from gpuactors.core.values.inventory import Device, inspected_keys, orphans_of
from gpuactors.core.values.model import (
    Call,
    CallKind,
    Changes,
    DeviceId,
    DeviceKey,
    Difference,
    Health,
    InspectedKey,
    LastCall,
    LedgerEntry,
    PciFunction,
    Pod,
    PodLife,
    ResourceName,
    Role,
    Token,
    device_key,
)
from gpuactors.core.values.naming import env_name
from gpuactors.core.values.owner import NO_RESOURCE, Allocation, Named, Owner
from gpuactors.core.values.quote import first_of, quoted_id, quoted_ids
from gpuactors.core.values.status import Conflict, Holding, Reason, causes_of

ADMISSION_READ_S: Final = 0.1
"""How often kubelet's ledger is read while an Allocate waits for a device that a pod has just been given
(`ledger.books.ADMISSION_S`)."""

PRE_START_WAIT_S: Final = 25.0
"""How long PreStartContainer waits for the previous holder to close the device: under kubelet's 30 s. A wait ends at
once, after a refusal kubelet retries in 12 to 15 s."""

ALLOCATE_WAIT_S: Final = 25.0
"""The same for Allocate with `--wait-in allocate`. Kubelet has no deadline for it, but admits no other pod meanwhile,
and takes a refusal as final: so as long as PreStartContainer, and no longer."""

_NONE: Final[Mapping[DeviceId, Device]] = MappingProxyType({})

_FORGOTTEN: Final = (
    "kubelet had forgotten that, as a program has called PodResources List during an Allocate (kubernetes pull request "
    "137534), and knows it again by this refusal"
)

Answered = list[Effect]
"""The replies to calls, each with its one line in the log."""


def asked(state: NodeState, event: AllocateAsked | PreStartAsked, at: float) -> tuple[NodeState, Answered]:
    """Handle a call: refuse it if it can be granted in no case; otherwise request fresh inspections, and let it
    wait."""
    match event:
        case AllocateAsked():
            is_late = state.daemon.role is Role.HANDED_OVER
            wait_s = limits.LATE_CALL_S if is_late else limits.CALL_DEADLINE_S
            kind, requests = CallKind.ALLOCATE, event.requests
        case PreStartAsked():
            kind, requests, wait_s = CallKind.PRE_START, (event.devices,), PRE_START_WAIT_S
    by_id = devices_by_id(state, event.resource)
    ids = [i for request in requests for i in request]
    refused = _unserved(state, kind) or _refused_at_once(state, event.resource, ids, by_id)
    if refused is None and kind is CallKind.ALLOCATE:
        refused = _not_sets(state, event.resource, requests, by_id)
    if refused is not None:
        devices = [by_id[i].key for i in ids if i in by_id]
        state = _noted(state, devices, kind, refused, at)
        return state, _answered(event.token, kind, event.resource, requests, refused)
    call = Call(
        kind=kind,
        resource=event.resource,
        requests=requests,
        seen={by_id[i].key: by_id[i].units for i in ids},
        since=state.host.inspections.last,
        deadline=at + wait_s,
        came_at=at,
    )
    requested = inspections.ask_inspections(state.host.inspections, sorted({*_inspected_keys(call)}))
    state = with_inspections(state, requested)
    state = _with_poll(with_waiting(state, {**state.calls.waiting, event.token: call}), call)
    return _with_read(state, call, at), []


def completed(state: NodeState, at: float) -> tuple[NodeState, Answered]:
    """Answer every waiting call that can be answered now."""
    answered: Answered = []
    for token, call in state.calls.waiting.items():
        if _is_unread(state, call):
            state = _with_read(state, call, at)
            continue
        if _is_missing(state, call):
            continue
        answer = _decide(state, token, call)
        if isinstance(answer, _Doubted):
            doubting = replace(call, doubted=state.host.inspections.last)
            state = with_waiting(state, {**state.calls.waiting, token: doubting})
            state = _with_read(state, doubting, at)
            continue
        if isinstance(answer, _Awaited):
            state = _with_next_look(state, token, call, at)
            continue
        if isinstance(answer, _Held):
            state = _with_release(state, token, call)
            continue
        if answer is None:  # the previous holder has not released it yet
            continue
        answered += _answered(token, call.kind, call.resource, call.requests, answer)
        state = _noted(state, call.seen, call.kind, answer, at)
        if isinstance(answer, Granted):
            state = _with_pending(state, call, at)
    return _without(state, answered), answered


def after_lists(answered: Answered, waiting: Mapping[Token, Call], changed: Changes) -> Answered:
    """Add to each grant the lists that it has changed for other devices. `waiting`: the calls that are answered."""
    if not changed or not any(isinstance(e, Reply) and isinstance(e.answer, Granted) for e in answered):
        return answered

    def ordered(effect: Effect) -> Effect:
        if not (isinstance(effect, Reply) and isinstance(effect.answer, Granted)):
            return effect
        call = waiting[effect.token]
        own = {(call.resource, i) for request in call.requests for i in request}
        others = tuple(sorted(r for r, differences in changed.items() if _is_others(r, differences, own)))
        return replace(effect, answer=replace(effect.answer, lists=others)) if others else effect

    return [ordered(effect) for effect in answered]


def _is_others(
    resource: ResourceName, differences: Iterable[Difference], own: Collection[tuple[ResourceName, DeviceId]]
) -> bool:
    """Return whether the health of a listed entry changed that is none of these devices."""
    return any(
        was is not None and now is not None and was.health is not now.health and (resource, was.id) not in own
        for was, now in differences
    )


def expired(state: NodeState, at: float) -> tuple[NodeState, Answered]:
    """Refuse the calls whose deadline has passed."""
    answered: Answered = []
    for token, call in state.calls.waiting.items():
        if call.deadline <= at:
            refused = _late(state, token, call)
            answered += _answered(token, call.kind, call.resource, call.requests, refused)
            state = _noted(state, call.seen, call.kind, refused, at)
    return _without(state, answered), answered


def handed_over(state: NodeState, at: float) -> tuple[NodeState, Answered]:
    """Let a waiting Allocate wait LATE_CALL_S longer at most, like one that comes now, because a successor will serve.
    Refuse every other call; kubelet repeats a PreStartContainer there."""
    refused = _refused(
        Refusal.UNAVAILABLE,
        Reason(Cause.NOT_SERVING, "gpuactors is handing over to its successor: ask again"),
    )
    answered: Answered = []
    allocating: dict[Token, Call] = {}
    for token, call in state.calls.waiting.items():
        if call.kind is CallKind.ALLOCATE:
            allocating[token] = replace(call, deadline=min(call.deadline, at + limits.LATE_CALL_S))
        else:
            answered += _answered(token, call.kind, call.resource, call.requests, refused)
    return with_waiting(state, allocating), answered


def stopping(state: NodeState, at: float) -> NodeState:
    """Let a waiting call wait so long only that its answer goes out before the streams end: kubelet gets a reason, and
    no broken connection."""
    latest = at + limits.DRAIN_S - limits.LATE_CALL_S
    waiting = {t: replace(c, deadline=min(c.deadline, latest)) for t, c in state.calls.waiting.items()}
    return with_waiting(state, waiting)


def abandoned(state: NodeState, token: Token) -> NodeState:
    """Drop a call whose caller has gone."""
    return with_waiting(state, {t: c for t, c in state.calls.waiting.items() if t != token})


def preferred(state: NodeState, event: PreferenceAsked) -> Reply:
    """Answer GetPreferredAllocation from known facts: first the devices that could really be opened; last those in a
    group with a device that kubelet does not offer although it has an owner or is listed as Healthy, and the relatives
    of such a device. Kubelet has not received the last list yet, or has allocated that device without this daemon, as
    through its predecessor. Where sets are required a set comes before both: Allocate reads again who has what."""
    by_id = devices_by_id(state, event.resource)
    owned = state.index.possible_owners
    busy = {
        i
        for i, d in by_id.items()
        if d.key in owned or ((use := use_of(state, d)) is not None and use.in_use)
    }
    listed = state.published.device_lists.get(event.resource, ())
    allocatable = owned.keys() | {entry.key for entry in listed if entry.health is Health.HEALTHY}
    search = Search()
    sets, required = _sets_of(state, event.resource), state.daemon.settings.sets_required
    chosen = []
    for request in event.requests:
        offered = {by_id[i].key for i in (*request.available, *request.must_include) if i in by_id}
        elsewhere = allocatable - offered
        groups = state.index.group_numbers(elsewhere)
        taken = {
            i
            for i, d in by_id.items()
            if d.group in groups or not elsewhere.isdisjoint(state.index.relatives(d.key))
        }
        chosen.append(prefer(request, by_id, busy, search, taken, sets, required))
    return Reply(event.token, Preferred(tuple(chosen)))


def inspections_waited_for(state: NodeState) -> Iterator[InspectedKey]:
    """Return the devices that waiting calls request, and their functions."""
    return chain.from_iterable(_inspected_keys(call) for call in state.calls.waiting.values())


def waits_for_poll(state: NodeState) -> bool:
    """Return whether a call has its inspections and waits for a poll: for the holders of its devices, or for their
    release."""
    return any(
        not any(_is_unseen(state, call, key) for key in _inspected_keys(call))
        and (any(_is_unpolled(state, call, device) for device in call.seen) or not _is_unread(state, call))
        for call in state.calls.waiting.values()
    )


def devices_by_id(state: NodeState, resource: ResourceName) -> Mapping[DeviceId, Device]:
    """Return the devices of a resource (`Index.by_id`); empty if it has none."""
    return state.index.by_id.get(resource, _NONE)


def _without(state: NodeState, answered: Answered) -> NodeState:
    tokens = {effect.token for effect in answered if isinstance(effect, Reply)}
    if not tokens:
        return state
    return with_waiting(state, {t: c for t, c in state.calls.waiting.items() if t not in tokens})


def _noted(
    state: NodeState, devices: Iterable[DeviceKey], kind: CallKind, answer: Answer, at: float
) -> NodeState:
    """Record this as the last call of its kind about these devices; forget devices that are gone for good."""
    refused = (answer.reason, answer.causes) if isinstance(answer, Refused) else ("", ())
    last_call = LastCall(kind, at, *refused)
    last = dict(state.calls.last)
    for device in inspections.never_seen(state.host, last.keys() - state.index.present.keys()):
        del last[device]
    for device in devices:
        last[device] = (*(c for c in last.get(device, ()) if c.kind is not kind), last_call)
    return replace(state, calls=replace(state.calls, last=last))


def _with_pending(state: NodeState, call: Call, at: float) -> NodeState:
    """Make the call's devices pending allocations: they count as allocated until kubelet's ledger lists them.
    `schedule.due` requests the read for that. Pods that had them, and have been seen to end, lose them."""
    ids = [(call.resource, device) for request in call.requests for device in request]
    until = dict.fromkeys(ids, at + limits.GRANT_GRACE_S)
    # The answer that kubelet kept of an earlier Allocate is another pod's, and its file may not be readable soon.
    kubelet = state.kubelet
    ledger, pending = kubelet.ledger, {**kubelet.pending_allocations, **until}
    if not ledger.cached.keys().isdisjoint(until):
        cached = {name: nodes for name, nodes in ledger.cached.items() if name not in until}
        ledger = replace(ledger, cached=cached)
    books = ledger.books
    over = {
        LedgerEntry(*name, Pod("", "", uid))
        for name in ids
        if (uid := books.uids.get(name)) is not None and has_kept(books, name) is False
    }
    granted = {**books.granted, **dict.fromkeys(ids, at)}
    ledger = replace(ledger, books=replace(books, ended=books.ended | over, granted=granted))
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
        line = Log(Level.WARNING, "call.refused", fields)
    else:
        line = Log(Level.INFO, "call.granted", fields)
    return [Reply(token, answer), line]


def _refused(status: Refusal, *why: Reason, owners: tuple[Allocation, ...] = ()) -> Refused:
    """Refuse for all of these reasons; the sentence has the first of them. `owners`: the owners that are a reason."""
    return Refused(status, "; ".join(first_of([r.message for r in why])), causes_of(why), owners)


def _unserved(state: NodeState, kind: CallKind) -> Refused | None:
    """Return why this daemon does not answer such a call at all.

    One that has handed over still answers Allocate until its streams have ended: kubelet would fail the pod for good.
    Its successor gives nothing before that end, and then reads what kubelet has given. Kubelet repeats
    PreStartContainer.
    """
    daemon = state.daemon
    is_late_allocate = daemon.role is Role.HANDED_OVER and kind is CallKind.ALLOCATE
    if daemon.stopping or not (daemon.role is Role.SERVING or is_late_allocate):
        return _refused(Refusal.UNAVAILABLE, Reason(Cause.NOT_SERVING, "gpuactors is stopping"))
    return None


def _refused_at_once(
    state: NodeState, resource: ResourceName, ids: list[DeviceId], by_id: Mapping[DeviceId, Device]
) -> Refused | None:
    if not ids:
        nothing = Reason(Cause.INVALID_REQUEST, f"no device of {resource} was requested")
        return _refused(Refusal.INVALID_ARGUMENT, nothing)
    if len({by_id[i].key if i in by_id else i for i in ids}) != len(ids):
        twice = sorted(i for i, times in Counter(ids).items() if times > 1) or sorted(ids)
        message = f"requested twice in one call: {', '.join(quoted_ids(twice))}"
        return _refused(Refusal.INVALID_ARGUMENT, Reason(Cause.INVALID_REQUEST, message))
    unknown = [i for i in ids if i not in by_id]
    if not unknown:
        return None
    # The rest is only counted: each reason takes a search of the resource's whole list.
    why = {i: _why_unknown(state, resource, i) for i in unknown[: limits.QUOTED_ITEMS_MAX]}
    named = [f"{quoted_id(i)}: {blocker.message}" for i, blocker in why.items()]
    reason = "; ".join(first_of([*named, *unknown[len(named) :]]))
    return Refused(Refusal.NOT_FOUND, reason, causes_of(why.values()))


def _not_sets(
    state: NodeState,
    resource: ResourceName,
    requests: Iterable[Iterable[DeviceId]],
    by_id: Mapping[DeviceId, Device],
) -> Refused | None:
    """Return why a container must not have the devices of its request together; None if each may, and where sets are
    only preferred."""
    if not state.daemon.settings.sets_required:
        return None
    if (unknown := sets_unknown(state)) is not None:
        return _refused(Refusal.UNAVAILABLE, unknown)
    sets = _sets_of(state, resource)
    reasons = [why for ids in requests if (why := not_a_set([by_id[i].key for i in ids], sets)) is not None]
    return _refused(Refusal.FAILED_PRECONDITION, *reasons) if reasons else None


def _sets_of(state: NodeState, resource: ResourceName) -> tuple[DeviceSet, ...]:
    """Return the sets as far as their devices are of this resource: by their names, or as a pod has one under a name
    that it had before."""
    if not state.sets:
        return ()
    listed = {entry.key for entry in state.published.device_lists.get(resource, ())}
    names = state.index.names.items()
    return without_devices(state.sets, {key for key, name in names if name != resource and key not in listed})


def _why_unknown(state: NodeState, resource: ResourceName, device: DeviceId) -> Reason:
    address = address_of(state, resource, device)
    present = state.index.present.get(address) if address is not None else None
    if present is not None and present.fault is not None:
        return Reason(Cause.UNREADABLE, present.fault)
    listed = {a.id: a for a in state.published.device_lists.get(resource, ())}
    if device not in listed:
        return Reason(Cause.UNKNOWN_ID, f"no such device of {resource} on this node")
    if address is None or not is_key(address):
        return Reason(Cause.UNKNOWN_ID, f"no device of {resource} on this node is known by this ID")
    # Not the listed reason, which may name a pod: kubelet has allocated it to the pod of this call.
    return not_listed(state, resource, address)


def _is_missing(state: NodeState, call: Call) -> bool:
    """Return whether a device of the call has not been inspected, or its group not polled, since the call came; or
    whether the claims' devices are not known."""
    # Asked of every call that waits, after each event with a fact: sixteen at once wait for one another's.
    for device in call.seen:
        if _is_device_unseen(state, call, device) or _is_unpolled(state, call, device):
            return True
    return not state.gpus.claims.is_known


def _is_unread(state: NodeState, call: Call) -> bool:
    """Return whether no read of kubelet's ledger that counts for the call has come back: one requested after the call
    came, or just before."""
    if state.kubelet.ledger.done > _read_since(call):
        return False
    return call.doubted is not None or not _is_fresh(state, state.kubelet.ledger.read_at, call)


def _read_since(call: Call) -> int:
    """Return the number after which a read of the ledger counts for the call."""
    return call.since if call.doubted is None else call.doubted


def _is_fresh(state: NodeState, asked_at: float, call: Call) -> bool:
    """Return whether a read of the ledger requested at `asked_at` is new enough for the call, and no device of it was
    granted since."""
    granted = state.kubelet.ledger.books.granted
    is_since = all(granted.get(name, -math.inf) < asked_at for name in _names(call))
    return is_since and asked_at >= call.came_at - limits.LEDGER_FRESH_S


def _with_read(state: NodeState, call: Call, at: float) -> NodeState:
    """Request a read of the ledger for the call, if it needs one and none that counts is outstanding."""
    ledger = state.kubelet.ledger
    if not _is_unread(state, call):
        return state
    if ledger.refresh.outstanding is not None:
        is_fresh = call.doubted is None and _is_fresh(state, ledger.asked_at, call)
        enough = ledger.refresh.outstanding > _read_since(call) or is_fresh
        if enough or ledger.refresh.again:
            return state
    return schedule.ask_ledger(state, at)


def _with_next_look(state: NodeState, token: Token, call: Call, at: float) -> NodeState:
    """Have kubelet's ledger read again soon, for a call that waits until a pod has its cgroup. Where the call's time is
    over before the read that decides could be requested, as the machine slept, that read gets LATE_CALL_S."""
    ledger = state.kubelet.ledger
    decides_from = max(admitted_by(ledger.books, name) for name in _names(call))
    if ledger.refresh.outstanding is not None and ledger.asked_at >= max(decides_from, call.deadline):
        longer = replace(call, deadline=ledger.asked_at + limits.LATE_CALL_S)
        state = with_waiting(state, {**state.calls.waiting, token: longer})
    return with_ledger(state, replace(ledger, refresh=ledger.refresh.due_by(at + ADMISSION_READ_S)))


def _with_release(state: NodeState, token: Token, call: Call) -> NodeState:
    """Give an Allocate the time of a release. It has none after a hand-over, as the successor serves, nor while the
    daemon stops."""
    deadline = max(call.deadline, call.came_at + ALLOCATE_WAIT_S)
    if deadline == call.deadline or state.daemon.role is not Role.SERVING or state.daemon.stopping:
        return state
    return with_waiting(state, {**state.calls.waiting, token: replace(call, deadline=deadline)})


def _with_poll(state: NodeState, call: Call) -> NodeState:
    """Request a poll of the groups of the call's devices, whether they were polled so far or not."""
    groups = state.index.group_numbers(call.seen)
    return schedule.ask_poll(state, groups) if groups else state


def _inspected_keys(call: Call) -> Iterator[InspectedKey]:
    """Return what is inspected for the call: its devices by their keys, and the functions that their facts depend on.
    A whole function is both."""
    return chain.from_iterable(inspected_keys(device, units) for device, units in call.seen.items())


def _unseen(state: NodeState, call: Call) -> list[DeviceKey]:
    """Return the call's devices that were not inspected since it came, or since a uevent of them came or was missed:
    the inspection is outstanding, or the daemon lacked resources for it."""
    return sorted(device for device in call.seen if _is_device_unseen(state, call, device))


def _is_device_unseen(state: NodeState, call: Call, device: DeviceKey) -> bool:
    """Return whether the device, or a function that its facts depend on, is still to be inspected for the call."""
    return any(_is_unseen(state, call, key) for key in inspected_keys(device, call.seen[device]))


def _is_unseen(state: NodeState, call: Call, key: InspectedKey) -> bool:
    """Return whether a newer inspection of the function or mediated device than the last one is to come back: the call
    has requested it, or a uevent that may have outdated the last one."""
    return inspections.is_unseen(state.host, key, call.since, call.came_at)


def _unpolled(state: NodeState, call: Call) -> list[DeviceKey]:
    """Return the call's devices whose group has not been polled since it came."""
    return sorted(device for device in call.seen if _is_unpolled(state, call, device))


def _is_unpolled(state: NodeState, call: Call, device: DeviceKey) -> bool:
    """Return whether the device's group has not been polled since the call came: a poll may have to leave a group out.
    Of a group only the device itself counts: a call does not wait for a device that is gone, in no group or on no vfio
    driver, whatever driver a companion is on."""
    index = state.index
    if (group := index.group_number(device)) is None or (polled := index.polled.get(group)) is None:
        return False
    if polled and not any(unit.address in polled for unit in call.seen[device]):
        return False
    last = state.host.polls.seen.get(group)
    return last is None or last.poll <= call.since


class _Doubted(Struct, frozen=True, gc=False):
    """The call would be refused because of an outdated read of the ledger, or because of an owner that kubelet has not
    been asked about since the call came."""


class _Awaited(Struct, frozen=True, gc=False):
    """The call waits: it will soon be known whether the pod that has just got one of its devices has all of them."""


class _Held(Struct, frozen=True, gc=False):
    """The Allocate waits until the processes of a pod that has left have released its devices, or until the partition
    of these is active."""


def _decide(state: NodeState, token: Token, call: Call) -> Answer | _Doubted | _Awaited | _Held | None:
    """Return the answer; None if the call waits: for a release, a partition or a CDI file, or to learn whether the
    holder belongs to a pod."""
    by_id = devices_by_id(state, call.resource)
    blockers = [
        b
        for device, units in call.seen.items()
        if (b := _blocker(by_id, state, call.resource, device, units))
    ]
    if call.kind is CallKind.PRE_START:
        blockers = [b for b in blockers if b.cause not in OF_A_PART]
    if blockers:
        return _refused(Refusal.FAILED_PRECONDITION, *sorted(blockers, key=attrgetter("message")))
    match call.kind:
        case CallKind.PRE_START:
            if stale := _stale(state, call, by_id):
                if call.doubted is None and _is_before(state, call):
                    return _Doubted()
                return _refused(Refusal.FAILED_PRECONDITION, Reason(Cause.STALE_NODES, stale))
            conflicts = _unready(state, token, call)
            if final := [conflict.why for conflict in conflicts if conflict.is_final]:
                return _refused(Refusal.FAILED_PRECONDITION, *final)
            return None if conflicts or _held(state, call) else Ready()
        case CallKind.ALLOCATE:
            if _is_undecided(state, by_id, call):
                return None
            taken, owners = _taken(state, call)
            if taken:
                if call.doubted is None and (
                    not _is_exact(state, call) if owners else _is_before(state, call)
                ):
                    return _Doubted()
                if _may_be_back(state, by_id, call):
                    return None
                return _refused(Refusal.FAILED_PRECONDITION, *taken, owners=owners)
            if _is_being_admitted(state, call):
                return _Awaited()
            if state.daemon.settings.waits_in_allocate and _held(state, call):
                return _Held()
            if conflicts := _unready(state, token, call):
                final = [conflict.why for conflict in conflicts if conflict.is_final]
                return _refused(Refusal.FAILED_PRECONDITION, *final) if final else _Held()
            if lacking := _lacking(state, call):
                final = [reason for reason in lacking if reason.cause is not Cause.CDI_FILE_UNWRITTEN]
                return _refused(Refusal.FAILED_PRECONDITION, *final) if final else None
            if state.daemon.settings.allocates_by_cdi:
                return Granted(tuple(_grant_by_cdi(state, call.resource, ids) for ids in call.requests))
            return Granted(tuple(_grant(state, [by_id[i] for i in ids]) for ids in call.requests))


def _unready(state: NodeState, token: Token, call: Call) -> list[Conflict]:
    """Return why the partitions of the call's containers are not active yet, in the last call before a container
    starts; none in an earlier one, which only has them activated."""
    is_last = call.kind is CallKind.PRE_START or not state.daemon.settings.pre_start_gate
    if state.partitions is None or not is_last:
        return []
    found = (unready(state, call_owner(token, number)) for number in range(len(call.requests)))
    conflicts = [conflict for conflict in found if conflict is not None]
    unlisted = sorted(key for key in call.seen if key not in state.index.owners)
    if call.kind is CallKind.PRE_START and unlisted and not conflicts:
        # Who has them after the call is known by the ledger only: nobody would have the partition.
        message = f"kubelet's ledger does not list {', '.join(quoted_ids(unlisted))} yet"
        conflicts.append(Conflict(Reason(Cause.LEDGER_LATE, message)))
    return conflicts


def _lacking(state: NodeState, call: Call) -> list[Reason]:
    """Return why no runtime could resolve the devices of an Allocate by their CDI names now."""
    by_id = devices_by_id(state, call.resource)
    found = ((by_id[i].key, specs.lacking(state, call.resource, i, by_id[i])) for _, i in _names(call))
    return [_about(key, reason) for key, reason in found if reason is not None]


def _grant_by_cdi(state: NodeState, resource: ResourceName, ids: Sequence[DeviceId]) -> Grant:
    """Return the grant of a container by CDI names: kubelet's IDs are the names, and the file has the nodes. With these
    as well the container would get each device twice. The node of an EGM is in no file, as it is of several devices."""
    by_id = devices_by_id(state, resource)
    egms = egm_nodes([by_id[i].key for i in ids], state.known_sets.sets)
    return Grant((), egms, tuple(cdi_id(resource, device) for device in sorted(ids)))


def _grant(state: NodeState, devices: Sequence[Device]) -> Grant:
    """Return the grant of a container with these devices; empty for a container without.

    Its variables have exactly one key per requested unit, sorted: KubeVirt gives the next one to each `gpus[]` entry,
    and its order is the guest's slot order. A profile's name may be that of a mediated device and of a vGPU by vendor
    VFIO: each is in the variable of its kind alone.

    The nodes are those that exist: a missing node would fail the container's creation (kubevirt #18895).
    """
    variables: dict[str, list[DeviceKey]] = {}
    for device in devices:
        name = env_name(device.resource, kind_of(device).env_prefix)
        variables.setdefault(name, []).append(device.key)
    nodes = {node for device in devices for node in device.nodes}
    nodes.update(egm_nodes([device.key for device in devices], state.known_sets.sets))
    return Grant(
        envs=tuple([(name, ",".join(sorted(keys))) for name, keys in variables.items()]),
        nodes=tuple(sorted(nodes, key=node_order)),
    )


def _is_before(state: NodeState, call: Call) -> bool:
    """Return whether the last read of the ledger was requested before the call came."""
    return state.kubelet.ledger.done <= call.since


def _is_exact(state: NodeState, call: Call) -> bool:
    """Return whether it was requested later and has kubelet's own list: there is nothing more to ask for."""
    ledger = state.kubelet.ledger
    return not _is_before(state, call) and ledger.asking.done == ledger.done


def _blocker(
    by_id: Mapping[DeviceId, Device],
    state: NodeState,
    resource: ResourceName,
    key: DeviceKey,
    seen: Iterable[PciFunction],
) -> Reason | None:
    """Return what about its files forbids to allocate a device, with the device's key; None if nothing. `seen`: its
    units when the call came."""
    for unit in seen:
        if (change := changed(unit, state.host.functions.get(unit.address))) is not None:
            return _about(key, change)
    if DeviceId(key) not in by_id:
        return _about(key, not_listed(state, resource, key))
    blocker = state.assessments[by_id[DeviceId(key)].key].blocker
    return _about(key, blocker) if blocker is not None else None


def _about(device: DeviceKey, blocker: Reason) -> Reason:
    return replace(blocker, message=f"{device}: {blocker.message}")


def _is_undecided(state: NodeState, by_id: Mapping[DeviceId, Device], call: Call) -> bool:
    """Return whether a group is in use and the result that shows its holder is outstanding: an external process, or a
    pod that has just left."""
    for address in call.seen:
        device = by_id[DeviceId(address)]
        use = use_of(state, device)
        if use is None or not use.in_use:
            continue
        ledger, orphans = state.kubelet.ledger, state.kubelet.orphans
        departed, last = orphans_of(device, orphans), last_poll(state, device)
        read_comes = use.since > ledger.read and ledger.refresh.outstanding is not None
        is_unpolled = any(last is None or last.poll <= orphan.read for orphan in departed)
        if read_comes or (is_unpolled and state.host.polls.is_to_see(device.group)):
            return True
    return False


def _may_be_back(state: NodeState, by_id: Mapping[DeviceId, Device], call: Call) -> bool:
    """Return whether another device of a group, or a relative, was allocated so recently that kubelet's ledger does not
    show yet whether a pod still has it."""
    if state.kubelet.ledger.problem is not None:
        return False
    recent = {
        address_of(state, *name)
        for name, until in state.kubelet.pending_allocations.items()
        if state.kubelet.ledger.read_at < asking.listed_at(until)
    }
    others = {key for a in call.seen for key in by_id[DeviceId(a)].owned_keys} - call.seen.keys()
    others = others.union(*(state.index.relatives(a) for a in call.seen))
    return not others.isdisjoint(recent)


def _stale(state: NodeState, call: Call, by_id: Mapping[DeviceId, Device]) -> str:
    """Return why the container would get other devices than its own, as a sentence: these are now behind the nodes of
    the answer that kubelet keeps, as groups may have other numbers after a restart of the node. Empty if it gets its
    devices, or if kubelet keeps no answer with nodes for them."""
    ids = [i for request in call.requests for i in request]
    cached = {
        n for i in ids for n in state.kubelet.ledger.cached.get((call.resource, i), ()) if _is_of_one(n)
    }
    if not cached:
        return ""
    present_nodes = {i: set(filter(_is_of_one, _nodes_of(by_id[i]))) for i in ids}
    wrong = sorted(cached - set().union(*present_nodes.values()))
    unserved = [i for i in ids if cached.isdisjoint(present_nodes[i])]
    if not wrong and not unserved:
        return ""
    whose = "; ".join(first_of([_whose_node(state, call, node) for node in wrong]))
    needs = "; ".join(
        first_of(
            [
                f"{by_id[i].key} is behind {' and '.join(sorted(present_nodes[i])) or 'no node'} now"
                for i in unserved or ids
            ]
        )
    )
    return (
        f"the container would get {', '.join(quoted_ids(sorted(cached)))}: kubelet has kept that from an Allocate "
        f"before the node's restart, or before the device was bound again; {whose + '; ' if whose else ''}{needs}: "
        "delete the pod, so that its devices are allocated again"
    )


def _nodes_of(device: Device) -> Iterator[str]:
    """Return the nodes of the device and of the functions of its group: a mediated device's has none."""
    yield from device.nodes
    for member in device.members:
        yield from member.nodes


def _is_of_one(node: str) -> bool:
    """Return whether a device node belongs to one group or function, unlike the container's and iommufd's."""
    return node.startswith("/dev/vfio/") and node != "/dev/vfio/vfio"


def _whose_node(state: NodeState, call: Call, node: str) -> str:
    """Return which function or mediated device a device node belongs to now, as a sentence."""
    functions = {device_key(address): f.nodes for address, f in state.host.functions.items()}
    for key, nodes in {**functions, **{k: m.nodes for k, m in state.host.mediated.items()}}.items():
        if node in nodes:
            owner = state.index.owners.get(key)
            allocated = f" ({owner.message(call.resource)})" if owner is not None else ""
            return f"{node} belongs to {key} now{allocated}"
    return f"{quoted_id(node)} belongs to no GPU any more"


def _names(call: Call) -> list[Named]:
    return [(call.resource, device) for request in call.requests for device in request]


def _is_being_admitted(state: NodeState, call: Call) -> bool:
    """Return whether a pod that has just got a device of the call may be about to get its cgroup: it cannot have run
    and stopped."""
    ledger, books = state.kubelet.ledger, state.kubelet.ledger.books
    return any(
        name in ledger.entries
        and name in books.uids
        and books.lives.get(books.uids[name]) in (PodLife.ABSENT, PodLife.STOPPED)
        and books.looked_at < admitted_by(books, name)
        for name in _names(call)
    )


def _taken(state: NodeState, call: Call) -> tuple[list[Reason], tuple[Allocation, ...]]:
    """Return why Allocate must refuse although the files are in order: the first holder of each device that is not the
    pod of the call. Return the owners among these as well."""
    by_id = devices_by_id(state, call.resource)
    asked = {by_id[i].key: i for request in call.requests for i in request}
    reasons, owners = list[Reason](), list[Allocation]()
    for address in sorted(call.seen):
        held = state.holding(address, call.resource, _is_calls(state, call, address, asked[address]))
        if held is None or _is_awaited(state, address, held):
            continue
        reason = held.reason
        if isinstance(held.holder, Owner):
            owners += held.holder.entries
            if (call.resource, asked[address]) in {(e.resource, e.device) for e in held.holder.entries}:
                reason = Reason(Cause.STILL_ALLOCATED, f"{reason.message}, which lives; {_FORGOTTEN}")
        reasons.append(_about(address, reason))
    return reasons, tuple(owners)


def _is_calls(
    state: NodeState, call: Call, address: DeviceKey, asked_as: DeviceId
) -> Callable[[DeviceKey, Allocation], bool]:
    """Return a function that tells whether an owner does not block the device at `address`: it may be the pod of the
    call, has ended, or has another device of the call, for which it is a reason by itself."""
    ledger, pending = state.kubelet.ledger, state.kubelet.pending_allocations

    def is_own(function: DeviceKey, entry: Allocation) -> bool:
        name = (entry.resource or NO_RESOURCE, DeviceId(entry.device))
        if function == address and name == (call.resource, asked_as):
            return entry.to is None or has_kept(ledger.books, name) is not True
        if function != address and function in call.seen:
            return True
        if entry.to is None:  # kubelet is done with that Allocate: its pod has not got the device
            return name in pending and ledger.read_at >= asking.listed_at(pending[name])
        return isinstance(entry.to, Pod) and has_kept(ledger.books, name) is False

    return is_own


def _is_awaited(state: NodeState, address: DeviceKey, held: Holding) -> bool:
    """Return whether a pod that has left holds the device, so that PreStartContainer waits for its release. Kubelet
    allocates what its ledger has free, so the owner of the last read has just left."""
    settings = state.daemon.settings
    if not (settings.pre_start_gate or settings.waits_in_allocate):
        return False
    match held.holder:
        case Owner():
            return False
        case Pod():
            return True
        case holders:
            is_pods = not holders or any(holder.pod_uid is not None for holder in holders)
            return is_pods and address in state.index.owners


def _held(state: NodeState, call: Call) -> list[Reason]:
    """Return the holder of each device of the call whose group is held, whoever kubelet has given it to."""
    held = {a: state.holding(a, call.resource, lambda *_: True) for a in sorted(call.seen)}
    return [_about(address, holding.reason) for address, holding in held.items() if holding is not None]


def _late(state: NodeState, token: Token, call: Call) -> Refused:
    """Return why a call could not be answered in time."""
    if short := [
        Reason(Cause.SHORTAGE, f"{device}: {why}")
        for device, units in sorted(call.seen.items(), key=itemgetter(0))
        for key in inspected_keys(device, units)
        if (why := state.host.short.get(key))
    ]:
        return _refused(Refusal.UNAVAILABLE, *short)
    if unseen := ", ".join(quoted_ids(_unseen(state, call))):
        message = (
            f"the inspection of {unseen} has not come back in time: the daemon is behind, see the load of the node and "
            "its own CPU limit; or a driver is stuck there, see dmesg"
        )
        return _refused(Refusal.UNAVAILABLE, Reason(Cause.INSPECTION_LATE, message))
    if unpolled := ", ".join(quoted_ids(_unpolled(state, call))):
        message = (
            f"the users of {unpolled} could not be determined in time; can its `enable` be read in sysfs?"
        )
        return _refused(Refusal.UNAVAILABLE, Reason(Cause.USE_LATE, message))
    if not state.gpus.claims.is_known:
        message = (
            "the checkpoint of the claims, which may have a device of the call, could not be read in time"
        )
        return _refused(Refusal.UNAVAILABLE, Reason(Cause.CHECKPOINT_LATE, message))
    if _is_unread(state, call):
        message = "kubelet's ledger could not be read in time; check whether kubelet, or the disk of its file, hangs"
        return _refused(Refusal.UNAVAILABLE, Reason(Cause.LEDGER_LATE, message))
    if _is_being_admitted(state, call):
        message = (
            "a pod has just been given a device of this call, and no read of kubelet's ledger has shown in time "
            "whether that pod keeps it"
        )
        return _refused(Refusal.UNAVAILABLE, Reason(Cause.LEDGER_LATE, message))
    if held := _held(state, call):
        return _refused(Refusal.UNAVAILABLE, *held)
    if conflicts := _unready(state, token, call):
        return _refused(Refusal.UNAVAILABLE, *(conflict.why for conflict in conflicts))
    if call.kind is CallKind.ALLOCATE and (lacking := _lacking(state, call)):
        return _refused(Refusal.UNAVAILABLE, *lacking)
    taken, owners = _taken(state, call)
    return _refused(Refusal.UNAVAILABLE, *taken, owners=owners)
