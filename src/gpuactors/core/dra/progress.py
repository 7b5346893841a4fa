"""How claims go on: after each event every transition that nothing stands in the way of any more; by the clock what is
tried again, asked for, or forgotten."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from gpuactors import limits
from gpuactors.core import schedule
from gpuactors.core.dra import prebound
from gpuactors.core.dra.answers import answer_of, answered
from gpuactors.core.dra.claim import ClaimUid, FirstDriver
from gpuactors.core.dra.entries import FILES, ClaimedGpu, Claims, Entry, one_of_each_group, with_entry
from gpuactors.core.dra.exclusion import exclusive_devices, has_another_owner, in_the_way, with_companions
from gpuactors.core.dra.placement import astray, is_seen
from gpuactors.core.dra.table import ClaimState, NoTransitionError, On
from gpuactors.core.dra.transitions import (
    attempted,
    blank,
    moved,
    read_over,
    refusal,
    set_aside,
    with_acts,
    with_claims,
    with_read,
    with_reserved,
)
from gpuactors.core.effects import Effect, Level, Log
from gpuactors.core.identity import claimed_address
from gpuactors.core.index import index_of
from gpuactors.core.model import PciAddress, PciFunction
from gpuactors.core.state import NodeState

Stepped = tuple[NodeState, list[Effect]]


def advanced(before: NodeState, state: NodeState, at: float) -> Stepped:
    """After each event: every transition that nothing stands in the way of any more, and the answers."""
    if state.claims.settings is None:
        return state, []
    if index_of(before).functions is not index_of(state).functions or (
        before.claims.first_drivers is not state.claims.first_drivers
    ):
        state = with_claims(state, _first_drivers_noted(state))
    state = with_claims(state, with_reserved(_seen_again(state)))
    effects: list[Effect] = []
    while (further := _one_further(state, at) or _all_answered(state, at)) is not None:
        state, lines = further
        state = with_claims(state, with_reserved(state.claims))
        effects += lines
    return with_claims(state, _dated(before.claims, state.claims, at)), effects


def _dated(before: Claims, claims: Claims, at: float) -> Claims:
    """`claims` with the time at which each entry came to its state; the same object if no state changed."""
    if claims.entries is before.entries:
        return claims
    dates = {
        uid: known.changed_at if known is not None and known.state is entry.state else at
        for uid, entry in claims.entries.items()
        for known in (before.entries.get(uid),)
    }
    if all(entry.changed_at == dates[uid] for uid, entry in claims.entries.items()):
        return claims
    return replace(
        claims, entries={uid: replace(entry, changed_at=dates[uid]) for uid, entry in claims.entries.items()}
    )


def _seen_again(state: NodeState) -> Claims:
    """The claims without the returned devices that an inspection has seen since."""
    claims, facts = state.claims, state.host.facts
    unseen = {
        a: r
        for a, r in claims.returned.items()
        if (fact := facts.get(a)) is not None and fact.inspection <= r.since
    }
    return replace(claims, returned=unseen) if len(unseen) < len(claims.returned) else claims


def _all_answered(state: NodeState, at: float) -> Stepped | None:
    """Every call that can be answered now; None if there is none."""
    claims = state.claims
    answers = {t: a for t, c in claims.calls.items() if (a := answer_of(claims, c, at)) is not None}
    if not answers:
        return None
    claims, replies = answered(claims, answers)
    return with_claims(state, claims), replies


def due(state: NodeState, at: float) -> Stepped:
    """What is tried again, asked, or forgotten at this time."""
    effects: list[Effect] = []
    for known in state.claims.entries.values():
        if known.collect_at <= at:
            asked = with_entry(state.claims, replace(known, collect_at=math.inf))
            state = with_claims(state, with_read(asked, known.name.uid))
    for waiting in state.claims.entries.values():
        if waiting.retry_at > at:
            continue
        entry, lines = replace(waiting, retry_at=math.inf), list[Effect]()
        match entry.state:
            case ClaimState.TOMBSTONE:
                state, lines = attempted(state, entry, On.FORGOTTEN)
            case ClaimState.FETCHING | ClaimState.STOPPED:
                state = with_claims(state, with_read(with_entry(state.claims, entry), entry.name.uid))
            case ClaimState.BINDING | ClaimState.CLEARING:
                state, lines = attempted(state, entry, On.RETRY)
            case ClaimState.PREPARED if entry.problem:
                state, lines = attempted(state, replace(entry, problem=""), On.RETRY)
            case _:
                state = with_claims(state, with_entry(state.claims, entry))
        effects += lines
    return state, effects


def deadline(claims: Claims) -> float:
    """When `due` or an answer is next due; infinite if never."""
    return min(
        min((e.retry_at for e in claims.entries.values()), default=math.inf),
        min((e.collect_at for e in claims.entries.values()), default=math.inf),
        min((c.deadline for c in claims.calls.values()), default=math.inf),
    )


def _first_drivers_noted(state: NodeState) -> Claims:
    claims, functions = state.claims, index_of(state).functions
    found = prebound.noted(claims.first_drivers, functions.values(), claims.acted)
    return replace(claims, first_drivers=found) if found is not claims.first_drivers else claims


def _one_further(state: NodeState, at: float) -> Stepped | None:
    """The first transition that an entry can make by itself; None if there is none. One that the table lacks sets its
    entry aside."""
    steps = (_further(state, entry, at) for entry in state.claims.entries.values() if not entry.broken)
    try:
        return next((step for step in steps if step is not None), None)
    except NoTransitionError as error:
        return set_aside(state, error)


def _further(state: NodeState, entry: Entry, at: float) -> Stepped | None:
    claims, uid = state.claims, entry.name.uid
    calls = [c for c in claims.calls.values() if c.uid == uid]
    match entry.state:
        case ClaimState.FETCHING if not calls:
            return with_claims(state, moved(read_over(claims, uid), entry, On.ABANDONED)), []
        case ClaimState.WAITING if not calls:
            return with_claims(state, moved(claims, entry, On.ABANDONED)), []
        case ClaimState.WAITING:
            return _waited(state, entry)
        case ClaimState.VERIFYING if not calls:
            return with_claims(state, moved(claims, entry, On.ABANDONED)), []
        case ClaimState.VERIFYING:
            return _verified(state, entry)
        case ClaimState.RESERVED if claims.durable >= entry.intent:
            return with_claims(state, moved(claims, entry, On.DURABLE)), []
        case ClaimState.COMMITTING if claims.durable >= entry.intent:
            return with_claims(state, moved(claims, entry, On.DURABLE)), _logged("claim.prepared", entry)
        case ClaimState.RELEASING if _is_to_be_undone(state, entry):
            undoing = moved(claims, entry, On.DURABLE)
            return with_claims(state, _undone(state, undoing, uid)), []
        case ClaimState.TOMBSTONE if entry.retry_at == math.inf:
            remembered = replace(entry, retry_at=at + limits.CLAIM_TOMBSTONE_S)
            after = with_claims(state, with_entry(claims, remembered))
            return schedule.ask_ledger(after, at), _logged("claim.unprepared", entry)
        case ClaimState.TOMBSTONE if any(call.prepares for call in calls):
            return with_claims(state, moved(claims, blank(entry), On.PREPARE)), []
    return None


def _is_to_be_undone(state: NodeState, entry: Entry) -> bool:
    """Its intent is on disk, no act is under way or waits for its next try, and who else has its devices is known."""
    return (
        state.claims.durable >= entry.intent
        and not entry.acts
        and entry.retry_at == math.inf
        and state.host.scanned
        and state.kubelet.ledger.tried
    )


def _verified(state: NodeState, entry: Entry) -> Stepped | None:
    """A prepare of a prepared claim is answered if its devices are where its files say; else they are bound again, if
    nobody else has them. None if it waits on."""
    if entry.acts or not is_seen(state, entry):
        return None
    if not (reason := astray(state, entry)):
        return with_claims(state, moved(state.claims, entry, On.IN_PLACE)), []
    if (further := _waited(state, entry)) is None:
        return None
    if further[0].claims.entries[entry.name.uid].state is not ClaimState.RESERVED:
        return further
    return further[0], [*_logged("claim.astray", entry, reason=reason, level=Level.WARNING), *further[1]]


def _waited(state: NodeState, entry: Entry) -> Stepped | None:
    """A claim that waits gets its devices, or is refused for good; None if it waits on. A changed reason is kept, as it
    is the error if the wait lasts too long."""
    obstacle = in_the_way(state, entry)
    if obstacle is None:
        return with_claims(state, _reserved(state, entry)), _logged("claim.reserved", entry)
    if obstacle.is_final:
        return not_prepared(state, entry, obstacle.sentence)
    if obstacle.sentence != entry.problem:
        waits = replace(entry, problem=obstacle.sentence)
        return with_claims(state, with_entry(state.claims, waits)), _logged(
            "claim.waiting",
            entry,
            reason=obstacle.sentence,
            level=Level.INFO if obstacle.is_owner else Level.DEBUG,
        )
    return None


def _logged(name: str, entry: Entry, *, reason: str = "", level: Level = Level.INFO) -> list[Effect]:
    fields: dict[str, str | tuple[str, ...]] = {"claim": str(entry.name), "uid": entry.name.uid}
    if entry.gpus:
        fields["devices"] = tuple(gpu.address for gpu in entry.gpus)
    if reason:
        fields["reason"] = reason
    return [Log(level, name, {**fields})]


def _reserved(state: NodeState, entry: Entry) -> Claims:
    """The claim owns its devices from now on. Their first drivers are in the same checkpoint."""
    assert entry.claim is not None
    addresses = [a for n in exclusive_devices(entry.claim) if (a := claimed_address(n)) is not None]
    gpus = _with_whole_groups(_claimed_gpu(state, address) for address in addresses)
    acted = state.claims.acted | {f.address for gpu in gpus for f in gpu.functions}
    claims = replace(state.claims, acted=acted)
    return moved(claims, replace(entry, gpus=gpus, problem=""), On.FREE)


def _with_whole_groups(gpus: Iterable[ClaimedGpu]) -> tuple[ClaimedGpu, ...]:
    """Devices of one IOMMU group have the same functions."""
    found: list[ClaimedGpu] = []
    for gpu in gpus:
        functions = {f.address: f for f in gpu.functions}
        same = [g for g in found if not functions.keys().isdisjoint(f.address for f in g.functions)]
        functions |= {f.address: f for g in same for f in g.functions}
        whole = tuple(functions[a] for a in sorted(functions))
        found = [replace(g, functions=whole) if g in same else g for g in [*found, gpu]]
        found[-1] = replace(gpu, functions=whole)
    return tuple(found)


def _claimed_gpu(state: NodeState, address: PciAddress) -> ClaimedGpu:
    settings, known = state.claims.settings, state.claims.first_drivers
    assert settings is not None
    functions = with_companions(state, address)
    decided = {
        f.address: prebound.decide(
            f.address, known.get(f.address), operator=settings.operator, hints=settings.hints, function=f
        )
        for f in functions
    }
    return ClaimedGpu(
        address,
        tuple(_first_driver(known, f, stays=decided[f.address].is_prebound) for f in functions),
        stays=decided[address].sentence if decided[address].is_prebound else "",
    )


def _first_driver(
    known: Mapping[PciAddress, FirstDriver], function: PciFunction, *, stays: bool
) -> FirstDriver:
    """What an act is to return it to. One that is pre-bound by the operator's word counts as first seen on vfio."""
    present = FirstDriver(function.address, function.driver, vfio=function.vfio_bound)
    return replace(known.get(function.address, present), vfio=stays)


def _undone(state: NodeState, claims: Claims, uid: ClaimUid) -> Claims:
    """The acts of a release: the files are removed, and each device is returned that is to be, and that nobody else
    has."""
    entry = claims.entries[uid]
    keys = [
        FILES,
        *(
            str(g.address)
            for g in one_of_each_group(entry.gpus)
            if _is_returned(g) and not has_another_owner(state, entry, g.address)
        ),
    ]
    return with_acts(claims, entry, keys)


def _is_returned(gpu: ClaimedGpu) -> bool:
    """Any of its functions is returned to its first driver when the claim ends: also a companion of a pre-bound GPU
    that was not on vfio."""
    return not all(f.vfio for f in gpu.functions)


def not_prepared(state: NodeState, entry: Entry, reason: str) -> Stepped:
    """The claim is refused: its calls are answered. Nothing of it is kept, unless it was prepared before."""
    claims = moved(state.claims, entry, On.REFUSED)
    refused = {t: refusal(reason) for t, c in claims.calls.items() if c.uid == entry.name.uid}
    claims, effects = answered(claims, refused)
    return with_claims(state, claims), effects
