"""How claims go on: after each event every transition that nothing stands in the way of any more; by the clock what is
tried again, asked for, or forgotten."""

from __future__ import annotations

import math
from collections.abc import Collection, Container
from typing import Final

from msgspec.structs import replace

from gpuactors import limits
from gpuactors.core.claims import takeover
from gpuactors.core.claims.answers import answer_of, answered
from gpuactors.core.claims.transitions import (
    blank,
    quarantine,
    read_over,
    refusal,
    transition,
    try_transition,
    with_acts,
    with_read,
)
from gpuactors.core.claims.view import DriverView, Stepped, claims_of
from gpuactors.core.state import NodeState
from gpuactors.core.state.claims import (
    AWAITED,
    FILES,
    ClaimCall,
    ClaimRecord,
    Claims,
    gpus_of,
    with_entry,
)
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.claim import ClaimUid
from gpuactors.core.values.claim_states import (
    REMOVING,
    RESTING,
    ClaimState,
    ClaimTrigger,
    NoTransitionError,
)
from gpuactors.core.values.effects import Effect, Level, Log
from gpuactors.core.values.model import Role
from gpuactors.core.values.status import Conflict, Reason

CLAIM_TOMBSTONE_S: Final = 90.0
"""How long an unprepared claim is remembered, in seconds: kubelet repeats a prepare that was under way after 60 to 90
s."""


def advanced(view: DriverView, before: NodeState, at: float) -> Stepped:
    """Make every transition that can be made, and answer the calls that can be answered. Runs after each event."""
    if view.claims.settings is None:
        return view, []
    view = view.on_state_changed(before)
    view, effects = _files_withdrawn(view, before, at)
    while (further := _one_further(view, at) or _all_answered(view, at)) is not None:
        view, lines = further
        view = view.on_state_changed(before)
        effects += lines
    return view.with_claims(_dated(claims_of(before, view.driver.kind), view.claims, at)), effects


def _files_withdrawn(view: DriverView, before: NodeState, at: float) -> Stepped:
    """Remove the files of every claim that has drifted: all at once, as they may be a whole node's. A daemon that
    takes over removes none, and finds the drift when it has read the checkpoint again."""
    effects: list[Effect] = []
    if view.state.daemon.role is not Role.SERVING or not view.claims.loaded:
        return view, effects
    acts = view.driver.acts
    for prepared, why in acts.drifted(before, view.state) if acts is not None else ():
        # What has changed is read anew, and may be outdated again when the devices are back.
        view, entry = view.request_reads(replace(prepared, why=why, is_outdated=True), at)
        view, broken = try_transition(view, entry, ClaimTrigger.DRIFT)
        effects += [*_astray(entry, why), *broken]
    return (view.on_state_changed(before), effects) if effects else (view, [])


def _astray(entry: ClaimRecord, why: Reason) -> list[Effect]:
    return _logged("claim.astray", entry, cause=why.cause, reason=why.message, level=Level.WARNING)


def _dated(before: Claims, claims: Claims, at: float) -> Claims:
    """Note when each claim came to its state, and since when it is pending; returns the same object if no state
    changed."""
    if claims.entries == before.entries:
        return claims
    dated: dict[ClaimUid, ClaimRecord] = {}
    for uid, entry in claims.entries.items():
        earlier = before.entries.get(uid)
        date = earlier.changed_at if earlier is not None and earlier.state is entry.state else at
        since = math.inf
        if entry.state not in RESTING:
            since = min(earlier.pending_since, at) if earlier is not None else at
        if (entry.changed_at, entry.pending_since) != (date, since):
            dated[uid] = replace(entry, changed_at=date, pending_since=since)
    return replace(claims, entries={**claims.entries, **dated}) if dated else claims


def _all_answered(view: DriverView, at: float) -> Stepped | None:
    """Answer every call that can be answered now; None if there is none."""
    claims = view.claims
    answers = {t: a for t, c in claims.calls.items() if (a := answer_of(claims, c, at)) is not None}
    if not answers:
        return None
    claims, replies = answered(claims, answers)
    return view.with_claims(claims), replies


def due(view: DriverView, at: float) -> Stepped:
    """Retry, ask or forget what is due at this time."""
    effects: list[Effect] = []
    if view.claims.relays_until <= at:
        view = view.with_claims(replace(view.claims, relays_until=-math.inf))
    for record in view.claims.entries.values():
        if record.collect_at <= at:
            view, lines = _looked_for(view, record, at)
            effects += lines
    for waiting in view.claims.entries.values():
        if waiting.retry_at > at:
            continue
        entry, lines = replace(waiting, retry_at=math.inf), list[Effect]()
        match entry.state:
            case ClaimState.TOMBSTONE:
                view, lines = try_transition(view, entry, ClaimTrigger.FORGOTTEN)
            case ClaimState.FETCHING | ClaimState.STOPPED:
                view = view.with_claims(with_read(with_entry(view.claims, entry), entry.name.uid))
            case ClaimState.BINDING | ClaimState.CLEARING | ClaimState.DRIFTED:
                view, lines = try_transition(view, entry, ClaimTrigger.RETRY)
            case ClaimState.PREPARED if entry.why is not None:
                view, lines = try_transition(view, replace(entry, why=None), ClaimTrigger.RETRY)
            case _:
                view = view.with_record(entry)
        effects += lines
    if (acts := view.driver.acts) is not None:
        state, lines = acts.due(view.state, at)
        view, effects = view.with_state(state), effects + lines
    return view, effects


def _looked_for(view: DriverView, entry: ClaimRecord, at: float) -> Stepped:
    """Check whether a prepared claim that kubelet did not list still exists: by kubelet's list if that is an old
    one, then by the API server."""
    claims = view.claims
    if view.state.kubelet.ledger.asking.listed_at < at - limits.CLAIM_COLLECT_S:
        later = with_entry(claims, replace(entry, collect_at=at + limits.LEDGER_RETRY_S))
        return view.with_claims(later).ask_ledger(at, lists=True), []
    if not entry.name.is_known:
        return takeover.unlisted(view, entry, at)
    asked = with_entry(claims, replace(entry, collect_at=math.inf))
    return view.with_claims(with_read(asked, entry.name.uid)), []


def deadline(view: DriverView) -> float:
    """Return when `due` or an answer is next due; infinite if never."""
    claims, acts = view.claims, view.driver.acts
    return min(
        acts.deadline(view.state) if acts is not None else math.inf,
        min((e.retry_at for e in claims.entries.values()), default=math.inf),
        min((e.collect_at for e in claims.entries.values()), default=math.inf),
        min((c.deadline for c in claims.calls.values()), default=math.inf),
        claims.relays_until if claims.relays_until > -math.inf else math.inf,
    )


def _one_further(view: DriverView, at: float) -> Stepped | None:
    """Make the first transition that a claim can make by itself; None if there is none. A transition that the table
    lacks quarantines its claim."""
    claims = view.claims
    calls: dict[ClaimUid, list[ClaimCall]] = {}
    for call in claims.calls.values():
        calls.setdefault(call.uid, []).append(call)
    steps = (
        _further(view, entry, at, calls.get(entry.name.uid, ()))
        for entry in claims.entries.values()
        if not entry.broken and not _rests(entry, calls)
    )
    try:
        return next((step for step in steps if step is not None), None)
    except NoTransitionError as error:
        return quarantine(view, error)


def _rests(entry: ClaimRecord, called: Container[ClaimUid]) -> bool:
    """Return whether only an event or a timer can change the claim: most claims of a node are prepared or
    remembered."""
    return entry.state is ClaimState.PREPARED or (
        entry.state is ClaimState.TOMBSTONE and entry.retry_at < math.inf and entry.name.uid not in called
    )


def _further(view: DriverView, entry: ClaimRecord, at: float, calls: Collection[ClaimCall]) -> Stepped | None:
    """Make the transition of one claim that nothing holds up any more; None if there is none. `calls` are those
    about it."""
    claims, uid = view.claims, entry.name.uid
    match entry.state:
        case ClaimState.FETCHING if not calls:
            unread = view.with_claims(read_over(claims, uid))
            return transition(unread, entry, ClaimTrigger.ABANDONED), []
        case ClaimState.WAITING if not calls:
            return transition(view, entry, ClaimTrigger.ABANDONED), []
        case ClaimState.WAITING:
            return _waited(view, entry, at)
        case ClaimState.VERIFYING if not calls:
            return transition(view, entry, ClaimTrigger.ABANDONED), []
        case ClaimState.VERIFYING if (unmet := view.driver.files.unmet(view.state, entry)) is not None:
            return not_prepared(view, entry, unmet.why) if unmet.is_final else _unmet(view, entry, unmet)
        case ClaimState.VERIFYING:
            return _verified(view, entry, at)
        case ClaimState.DRIFTED if not (entry.has_files or entry.is_unread):
            return _returned_to_files(view, entry, at, is_asked=bool(calls))
        case ClaimState.RESERVED if claims.durable >= entry.intent:
            return transition(view, entry, ClaimTrigger.DURABLE), []
        case ClaimState.STOPPED if entry.claim is None and 0 < entry.intent <= claims.durable:
            return view.with_claims(with_read(with_entry(claims, replace(entry, intent=0)), uid)), []
        case ClaimState.STOPPED if entry.has_unplaced_files and not (entry.is_unanswered or entry.acts):
            return transition(view, entry, ClaimTrigger.DRIFT), []
        case ClaimState.BINDING if AWAITED in entry.acts:
            return _awaited(view, entry)
        case ClaimState.WRITING:
            return _awaits(view, entry)
        case ClaimState.COMMITTING if claims.durable >= entry.intent:
            return transition(view, entry, ClaimTrigger.DURABLE), _logged("claim.prepared", entry)
        case ClaimState.RELEASING if _is_to_be_undone(view, entry):
            after = transition(view, entry, ClaimTrigger.DURABLE)
            acts = view.driver.claiming.undoing(view.state, after.claims.entries[uid])
            return after.with_claims(with_acts(after.claims, after.claims.entries[uid], acts)), []
        case ClaimState.TOMBSTONE if entry.retry_at == math.inf:
            remembered = replace(entry, retry_at=at + CLAIM_TOMBSTONE_S)
            after = view.with_record(remembered)
            return after.ask_ledger(at), _logged("claim.unprepared", entry)
        case ClaimState.TOMBSTONE if any(call.prepares for call in calls):
            return transition(view, blank(entry), ClaimTrigger.PREPARE), []
    return None


def _awaited(view: DriverView, entry: ClaimRecord) -> Stepped | None:
    """Complete the act that others carry out once no prerequisite is unmet; None if it still waits. The unmet
    prerequisite is the error if the wait takes too long, and at once if waiting does not help."""
    unmet = view.driver.claiming.unmet_prerequisite(view.state, entry)
    if unmet is None:
        view, entry = view.reserve(entry)
        return act_over(view, entry, entry.acts[AWAITED]), []
    return _unmet(view, entry, unmet)


def _awaits(view: DriverView, entry: ClaimRecord) -> Stepped | None:
    """Keep what the files of a claim wait for; None if that is known."""
    if (unmet := view.driver.files.unmet(view.state, entry)) is not None:
        return _unmet(view, entry, unmet)
    return (view.with_record(replace(entry, why=None)), []) if entry.why is not None else None


def _unmet(view: DriverView, entry: ClaimRecord, unmet: Conflict) -> Stepped | None:
    """Keep what a claim waits for, or stop it if waiting does not help; None if that is known."""
    why = unmet.why
    if unmet.is_final:
        stopped = replace(entry, acts={}, why=why)
        return transition(view, stopped, ClaimTrigger.FAILED), []
    if why == entry.why:
        return None
    after = view.with_record(replace(entry, why=why))
    return after, _logged("claim.waiting", entry, cause=why.cause, reason=why.message)


def _is_to_be_undone(view: DriverView, entry: ClaimRecord) -> bool:
    """Return whether its intent is on disk, no act is under way or due again, and every other owner of its devices
    is known."""
    return (
        view.claims.durable >= entry.intent
        and not entry.acts
        and entry.retry_at == math.inf
        and view.state.host.scanned
        and view.state.kubelet.ledger.tried
    )


def _verified(view: DriverView, entry: ClaimRecord, at: float) -> Stepped | None:
    """Answer a prepare of a prepared claim if its devices are where its files say; else bind them again, if they are
    free. None if it still waits."""
    if entry.acts or not view.driver.claiming.is_seen(view.state, entry):
        return None
    if (why := view.driver.claiming.drift(view.state, entry)) is None:
        if (unusable := view.driver.claiming.unusable(view.state, entry)) is not None:
            return not_prepared(view, entry, unusable)
        entry = replace(entry, why=None)  # it may have waited until its devices were back
        return transition(view, entry, ClaimTrigger.IN_PLACE), []
    if (further := _waited(view, entry, at)) is None:
        return None
    if further[0].claims.entries[entry.name.uid].state is not ClaimState.RESERVED:
        return further
    return further[0], [*_astray(entry, why), *further[1]]


def _returned_to_files(view: DriverView, entry: ClaimRecord, at: float, *, is_asked: bool) -> Stepped | None:
    """Reserve the devices of a claim again whose files were removed, as for a first prepare: when kubelet asks for
    it, or when all devices are as a prepare leaves them. None if it still waits."""
    why = view.driver.claiming.drift(view.state, entry)
    if is_asked or why is None:
        return _waited(view, entry, at)
    if why == entry.why:
        return None
    after = view.with_record(replace(entry, why=why))
    return after, _astray(entry, why)


def _waited(view: DriverView, entry: ClaimRecord, at: float) -> Stepped | None:
    """Reserve the devices of a waiting claim, or refuse it for good; None if it still waits. A changed reason is
    kept, as it is the error if the wait takes too long."""
    conflict = view.driver.claiming.conflict(view.state, entry)
    if conflict is None and entry.is_outdated:
        view, entry = view.request_reads(replace(entry, why=None, is_outdated=False), at)
        return view.with_record(entry), []
    if conflict is None:
        view, owner = view.reserve(replace(entry, why=None))
        return transition(view, owner, ClaimTrigger.FREE), _logged("claim.reserved", entry)
    if conflict.is_final and any(c.uid == entry.name.uid for c in view.claims.calls.values()):
        return not_prepared(view, entry, conflict.why)
    if conflict.why != entry.why:
        waits = replace(entry, why=conflict.why, is_outdated=entry.is_outdated or conflict.outdates)
        return view.with_record(waits), _logged(
            "claim.waiting",
            entry,
            cause=conflict.why.cause,
            reason=conflict.why.message,
            level=Level.INFO if conflict.is_owner else Level.DEBUG,
        )
    return None


def _logged(
    name: str, entry: ClaimRecord, *, cause: Cause | None = None, reason: str = "", level: Level = Level.INFO
) -> list[Effect]:
    fields: dict[str, str | tuple[str, ...]] = {"claim": str(entry.name), "uid": entry.name.uid}
    if gpus_of(entry).gpus:
        fields["devices"] = tuple(gpu.key for gpu in gpus_of(entry).gpus)
    if cause is not None:
        fields["cause"] = str(cause)
    if reason:
        fields["reason"] = reason
    return [Log(level, name, {**fields})]


def not_prepared(view: DriverView, entry: ClaimRecord, why: Reason) -> Stepped:
    """Refuse a claim: answer its calls. Nothing of it is kept, unless it was prepared before."""
    claims, uid = view.claims, entry.name.uid
    answers = {t: refusal(why.cause, why.message) for t, c in claims.calls.items() if c.uid == uid}
    claims, effects = answered(claims, answers)  # first: the entry may go, and with it the claim's name
    return transition(view.with_claims(claims), entry, ClaimTrigger.REFUSED), effects


def act_over(view: DriverView, entry: ClaimRecord, number: int) -> DriverView:
    """Record that one act of a claim reached its goal: the next transition follows the last one."""
    remaining = {key: n for key, n in entry.acts.items() if n != number}
    is_removal = entry.state in REMOVING and entry.acts.get(FILES) == number
    entry = replace(entry, acts=remaining, has_files=entry.has_files and not is_removal)
    return view.with_record(entry) if remaining else transition(view, entry, ClaimTrigger.DONE)
