"""Apply each event to the claims of this node. `DriverView.driver` answers the questions that differ between kinds of
device.

`progress.py` has the consequences of the state after each event, the answers included; `transitions.py` the requests of
a transition; `values/claim_states.py` the transitions themselves. Must not touch anything: the actors do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from gpuactors import limits
from gpuactors.core.claims import takeover
from gpuactors.core.claims.answers import answered, declined
from gpuactors.core.claims.progress import act_over, not_prepared
from gpuactors.core.claims.restoration import CHECKPOINT_LOST
from gpuactors.core.claims.transitions import read_over, refusal, transition, try_transition, with_read
from gpuactors.core.claims.view import DriverView, Stepped
from gpuactors.core.events.claims import (
    ActDone,
    ActFailed,
    CheckpointRead,
    CheckpointRefused,
    CheckpointWritten,
    ClaimRead,
    FilesTouched,
    PrepareAsked,
    UnprepareAsked,
)
from gpuactors.core.requests import Failure
from gpuactors.core.state.claims import (
    ClaimCall,
    ClaimRecord,
    Claims,
    StoredEntry,
    load_of,
    with_entry,
)
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.claim import ActFault, Claim, ClaimName
from gpuactors.core.values.claim_states import OWNING, ClaimState, ClaimTrigger
from gpuactors.core.values.effects import Effect, Elsewhere, Field, Level, Log, Refused
from gpuactors.core.values.model import LedgerSource, Role, Token
from gpuactors.core.values.names import is_subdomain, is_uid
from gpuactors.core.values.quote import quoted_id
from gpuactors.core.values.slices import Publication
from gpuactors.core.values.status import Reason

CLAIM_FOUND_S: Final = 600.0
"""How often a prepared claim that kubelet lists for no pod is looked for at the API server after an answer that it
exists, in seconds: kubelet lists no claim that no container uses."""

_COLLECTED: Final = OWNING - {ClaimState.RELEASING}
"""The states in which a claim has its devices until its unprepare: also one that is never prepared, because a
process has its GPU open or the disk is full."""


_TRIED_AGAIN: Final = (
    ClaimState.RELEASING,
    ClaimState.CLEARING,
    ClaimState.PREPARED,
    ClaimState.VERIFYING,
    ClaimState.DRIFTED,
)
"""The states in which a failed act is tried again, whatever its fault."""


_GOING_ON: Final = (ClaimState.BINDING, ClaimState.STOPPED)
"""The states in which the acts on a claim's other devices go on after one has failed."""


_PASSING: Final = (ActFault.BLOCKED, ActFault.HANGS, ActFault.IN_USE)
"""The faults that may pass by themselves."""


_FAULTS: Final[Mapping[ActFault | None, Cause]] = {
    None: Cause.FILES_UNWRITTEN,
    ActFault.BLOCKED: Cause.WRITE_HANGS,
    ActFault.HANGS: Cause.WRITE_HANGS,
    ActFault.IN_USE: Cause.IN_USE_ON_HOST,
    ActFault.VIRTUAL_FUNCTIONS: Cause.VIRTUAL_FUNCTIONS,
    ActFault.NO_DRIVER: Cause.DRIVER_NOT_LOADED,
    ActFault.UNKNOWN_FUNCTION: Cause.GROUP_CHANGED,
    ActFault.NOT_VIABLE: Cause.GROUP_NOT_VIABLE,
    ActFault.GONE: Cause.GONE,
    ActFault.REFUSED: Cause.WRITE_REFUSED,
    ActFault.DIRECTORY_LEFT: Cause.DIRECTORY_LEFT,
}
"""The cause that each fault of an act has in logs and errors; None is the act on a claim's files, which has no fault
of a device."""


def checkpoint_read(view: DriverView, event: CheckpointRead, at: float) -> Stepped:
    """Restore the claims from the checkpoint: at the daemon's start, and again when a predecessor has handed over.
    How far an interrupted act came is unknown: it is requested again, and goes on from what it finds."""
    if view.claims.settings is None or event.load < load_of(view.state.daemon.role):
        return view, []
    before, lines = view.state, list[Effect]()
    lost_since = view.state.host.inspections.last if event.is_lost else None
    claims = replace(view.claims, loaded=True, lost_since=lost_since, unserved="", entries={}, reads={})
    claims = replace(claims, earlier_models=event.earlier_models)
    view, entries = _restored(view.with_claims(claims), event)
    for stored in entries:
        claims = replace(view.claims, last=view.claims.last + 1)
        entry = ClaimRecord(
            stored.name,
            stored.state,
            order=claims.last,
            reservation=stored.reservation,
        )
        entry = replace(entry, given=stored.given, unplaced=stored.unplaced, has_files=True)
        if stored.claim is not None:
            entry = view.driver.claiming.with_claim(entry, stored.claim)
        if stored.claim is None and stored.state is not ClaimState.RELEASING:
            # The checkpoint is lost, and it was found out from its files.
            stopped = replace(entry, state=ClaimState.STOPPED, why=CHECKPOINT_LOST)
            view = view.with_claims(with_read(with_entry(claims, stopped), entry.name.uid))
        else:
            view, broken = try_transition(view.with_claims(claims), entry, ClaimTrigger.RESTORED)
            lines += broken
    if event.is_lost and view.state.daemon.role is Role.SERVING:
        # One that was asked for before shows what a predecessor may have ended since.
        view = view.ask_ledger(at, lists=True)
    level = Level.WARNING if event.warning else Level.INFO
    fields: dict[str, Field] = {"claims": len(event.entries)}
    if event.warning:
        fields["reason"] = event.warning
    return view.on_state_changed(before), [Log(level, "checkpoint.read", fields), *lines]


def _restored(view: DriverView, event: CheckpointRead) -> tuple[DriverView, Sequence[StoredEntry]]:
    if (acts := view.driver.acts) is None:
        return view, event.entries
    state, entries = acts.restored(view.state, event)
    return view.with_state(state), entries


def checkpoint_refused(view: DriverView, event: CheckpointRefused) -> Stepped:
    """Stop serving claims, and touch nothing. The devices of claims are known from their files and from kubelet's
    ledger."""
    claims = view.claims
    level = Level.DEBUG if claims.unserved == event.reason else Level.ERROR
    why = Reason(Cause.CLAIMS_UNSERVED, event.reason)
    stopped = {
        stored.name.uid: ClaimRecord(
            stored.name, ClaimState.STOPPED, claims.last, reservation=stored.reservation, why=why
        )
        for stored in event.entries
    }
    # What was read from the checkpoint before is more than the files say.
    claims = replace(claims, loaded=True, unserved=event.reason, entries={**stopped, **claims.entries})
    after = view.with_claims(claims).on_state_changed(view.state)
    return after, [Log(level, "claims.unserved", {"reason": event.reason})]


# --- calls ------------------------------------------------------------------------------------------------


def prepare_asked(view: DriverView, event: PrepareAsked, at: float) -> Stepped:
    """Handle NodePrepareResources for one claim. A repeated call joins the work in progress."""
    if (answer := _answered_at_once(view, event.claim)) is not None:
        return view, declined(event.token, event.claim.uid, str(event.claim), answer)
    claims = _with_call(
        view.claims, event.token, ClaimCall(event.claim.uid, True, at + limits.CLAIM_ANSWER_S)
    )
    entry = _entry_of(claims, event.claim)
    if entry.is_unread:
        is_under_way = entry.intent > 0 or entry.name.uid in claims.reads
        return view.with_claims(claims if is_under_way else with_read(claims, entry.name.uid)), []
    view = view.with_claims(claims)
    if entry.state in (ClaimState.PREPARED, ClaimState.DRIFTED):
        view, entry = view.request_reads(entry, at)
    return transition(view, entry, ClaimTrigger.PREPARE), []


def unprepare_asked(view: DriverView, event: UnprepareAsked, at: float) -> Stepped:
    """Handle NodeUnprepareResources for one claim: cancel its pending prepares, then release it."""
    if (answer := _answered_at_once(view, event.claim)) is not None:
        return view, declined(event.token, event.claim.uid, str(event.claim), answer)
    over = refusal(Cause.UNPREPARED, "it was unprepared while it was being prepared")
    claims = view.claims
    waiting = {t: c for t, c in claims.calls.items() if c.uid == event.claim.uid and c.prepares}
    claims = replace(claims, calls={t: c for t, c in claims.calls.items() if t not in waiting})
    claims = _with_call(claims, event.token, ClaimCall(event.claim.uid, False, at + limits.CLAIM_ANSWER_S))
    view = transition(view.with_claims(claims), _entry_of(claims, event.claim), ClaimTrigger.UNPREPARE)
    return view, [
        line for token in waiting for line in declined(token, event.claim.uid, str(event.claim), over)
    ]


def abandoned(view: DriverView, token: Token) -> DriverView:
    """Drop a call whose caller has gone. Work in progress continues."""
    if token not in view.claims.calls:
        return view
    calls = {t: c for t, c in view.claims.calls.items() if t != token}
    return view.with_claims(replace(view.claims, calls=calls))


def handed_over(view: DriverView, at: float) -> Stepped:
    """Hand the claims over to a successor. Pass on the waiting calls, and those that come until kubelet knows it;
    refuse them where the two cannot have sockets side by side."""
    claims = view.claims
    over: Refused | Elsewhere = refusal(
        Cause.NOT_SERVING, "gpuactors is handing over to its successor: ask again"
    )
    if claims.settings is not None and claims.settings.side_by_side:
        over, claims = Elsewhere(), replace(claims, relays_until=at + limits.RELAY_S)
    claims, replies = answered(claims, dict.fromkeys(claims.calls, over))
    return view.with_claims(claims), replies


def _answered_at_once(view: DriverView, claim: ClaimName) -> Refused | Elsewhere | None:
    settings, role = view.claims.settings, view.state.daemon.role
    if settings is None:
        return refusal(Cause.CLAIMS_UNSERVED, "this daemon serves no claims (--dra off)")
    if settings.side_by_side and (role is not Role.SERVING or not view.claims.loaded):
        return Elsewhere()
    if view.claims.unserved:
        return refusal(Cause.CLAIMS_UNSERVED, view.claims.unserved)
    if view.state.daemon.stopping or role is not Role.SERVING:
        return refusal(Cause.NOT_SERVING, "gpuactors is stopping: ask again")
    if not view.claims.loaded:
        return refusal(Cause.CHECKPOINT_LATE, "the checkpoint of the claims is being read: ask again")
    if not (is_uid(claim.uid) and is_subdomain(claim.name) and is_subdomain(claim.namespace)):
        return refusal(
            Cause.INVALID_REQUEST,
            f"no claim is named {quoted_id(claim.namespace)}/{quoted_id(claim.name)}, UID {quoted_id(claim.uid)}: "
            "no path can be made of that",
        )
    return None


def _entry_of(claims: Claims, name: ClaimName) -> ClaimRecord:
    entry = claims.entries.get(name.uid)
    if entry is not None and not entry.name.is_known:
        return replace(entry, name=name)
    return entry if entry is not None else ClaimRecord(name, ClaimState.ABSENT, order=claims.last + 1)


def _with_call(claims: Claims, token: Token, call: ClaimCall) -> Claims:
    return replace(claims, calls={**claims.calls, token: call})


# --- what the API server says -------------------------------------------------------------------------------


def read(view: DriverView, event: ClaimRead, at: float) -> Stepped:
    """Handle the API server's answer about a claim: it has the claim of this UID, it has not, or it could not say."""
    if (entry := _of_read(view.claims, event.number)) is None:
        return view, []
    view = view.with_claims(read_over(view.claims, entry.name.uid))
    if isinstance(event.claim, Failure):
        if event.missing:
            return _missing(view, entry, event.claim, at)
        return _unreadable(view, entry, event.claim, at, at + event.retry_in_s)
    if entry.is_unread:
        return _found_again(view, entry, event.claim), []
    if entry.state in _COLLECTED and not event.claim.results:
        reason = Failure("the API server has the claim, and it is not allocated here any more")
        return _missing(view, entry, reason, at)
    if entry.state is not ClaimState.FETCHING:  # whether it still exists was asked
        again = replace(entry, missing=0, collect_at=at + CLAIM_FOUND_S)
        return view.with_record(again), []
    if (invalid := _refused_by_content(view, event.claim)) is not None:
        return not_prepared(view, entry, invalid)
    entry = view.driver.claiming.with_claim(replace(entry, why=None), event.claim)
    view, entry = view.request_reads(entry, at)
    return transition(view, entry, ClaimTrigger.FETCHED), []


def _found_again(view: DriverView, entry: ClaimRecord, claim: Claim) -> DriverView:
    """Handle a claim whose record was restored from its files."""
    invalid = _refused_by_content(view, claim)
    comes_back = entry.has_unplaced_files or entry.state is ClaimState.DRIFTED
    if invalid is not None and not (invalid.cause is Cause.GONE and comes_back):
        return view.with_record(replace(entry, why=invalid))  # the next prepare reads it again
    found = view.driver.claiming.found_again(view.state, entry, claim)
    if invalid is not None or entry.state is ClaimState.DRIFTED:
        return view.with_record(replace(found, why=invalid))  # its files come back with the device
    return transition(view, found, ClaimTrigger.FETCHED)


def _refused_by_content(view: DriverView, claim: Claim) -> Reason | None:
    """Return why a claim can never be prepared here; None if it can."""
    if claim.results is None:
        return Reason(Cause.CLAIM_NOT_ALLOCATED, "the claim is not allocated")
    if not claim.results:
        return Reason(Cause.CLAIM_NOT_ALLOCATED, "the claim has no device of this driver on this node")
    return view.driver.claiming.validate(view.state, claim)


def _missing(view: DriverView, entry: ClaimRecord, reason: Failure, at: float) -> Stepped:
    """Handle a claim that the API server does not have, or has replaced by another one of that name."""
    if entry.state is ClaimState.FETCHING:
        return not_prepared(view, entry, Reason(Cause.CLAIM_NOT_FOUND, reason))
    if entry.state not in _COLLECTED:
        return view, []
    if entry.has_unplaced_files:
        entry = replace(entry, why=Reason(Cause.CLAIM_NOT_FOUND, reason))
    if entry.missing == 0 or not _is_unlisted(view, entry):
        counted = int(_is_unlisted(view, entry))
        again = replace(entry, missing=counted, collect_at=at + limits.CLAIM_COLLECT_S)
        return view.with_record(again).ask_ledger(at, lists=True), []
    line = Log(
        Level.WARNING,
        "claim.collected",
        {
            "claim": str(entry.name),
            "uid": entry.name.uid,
            "reason": f"{reason}, twice, and kubelet lists it for no pod; its unprepare never came",
        },
    )
    return transition(view, entry, ClaimTrigger.UNPREPARE), [line]


def _unreadable(view: DriverView, entry: ClaimRecord, reason: Failure, at: float, retry_at: float) -> Stepped:
    """Handle a read that failed: nothing follows from it but another try."""
    if entry.claim is None:
        why = Reason(Cause.API_SERVER_FAILED, reason)
        entry = replace(entry, why=why, retry_at=retry_at)
    else:
        entry = replace(entry, collect_at=at + limits.CLAIM_COLLECT_S)
    return view.with_record(entry), []


def _of_read(claims: Claims, number: int) -> ClaimRecord | None:
    uid = next((u for u, n in claims.reads.items() if n == number), None)
    return claims.entries.get(uid) if uid is not None else None


# --- the disk and the acts ----------------------------------------------------------------------------------


def checkpoint_written(view: DriverView, event: CheckpointWritten) -> Stepped:
    """Record that every checkpoint up to this number is on disk. If it could not be written, all that depends on it
    waits, and the actor tries again."""
    claims = view.claims
    if event.failure is not None:
        level = Level.DEBUG if event.failure == claims.unwritten else Level.ERROR
        line = Log(level, "checkpoint.unwritten", {"reason": event.failure})
        return view.with_claims(replace(claims, unwritten=event.failure)), [line]
    if event.number <= claims.durable:
        return view, []
    lines: list[Effect] = [Log(Level.INFO, "checkpoint.written", {})] if claims.unwritten else []
    return view.with_claims(replace(claims, durable=event.number, unwritten="")), lines


def act_done(view: DriverView, event: ActDone, at: float) -> Stepped:
    """Handle an act that reached its goal."""
    entry = _of_act(view.claims, event.number)
    if entry is None:  # another one has been requested since, or it is no claim's
        return _other_act_over(view, event, at)
    lines: list[Effect] = []
    if (acts := view.driver.acts) is not None:
        state, entry, lines = acts.acted(view.state, entry, event, at)
        view = view.with_state(state)
    return act_over(view, entry, event.number), lines


def act_failed(view: DriverView, event: ActFailed, at: float) -> Stepped:
    """Handle an act that failed. The devices stay as they are."""
    entry = _of_act(view.claims, event.number)
    if entry is None:
        return _other_act_over(view, event, at)
    if entry.state is ClaimState.RELEASING and event.fault is ActFault.GONE:
        return act_over(view, entry, event.number), []  # nothing is left to be returned
    if entry.state is ClaimState.RELEASING and (owes := _owes(view, entry, event, at)) is not None:
        return act_over(owes[0], entry, event.number), owes[1]
    failed, lines = entry, list[Effect]()
    if (acts := view.driver.acts) is not None:
        state, failed, lines = acts.failed(view.state, entry, event, at)
        view = view.with_state(state)
    delayed = entry.state is ClaimState.BINDING and event.fault in _PASSING
    by_itself = delayed or entry.state in _TRIED_AGAIN
    again_at = at + limits.CLAIM_RETRY_S if by_itself else math.inf
    level = Level.DEBUG if entry.problem == event.reason else Level.WARNING
    line = Log(
        level,
        "claim.act_failed",
        {"claim": str(entry.name), "uid": entry.name.uid, "state": str(entry.state), "reason": event.reason},
    )
    why = Reason(_FAULTS[event.fault], event.reason)
    # Those of its other devices go on, and what they do is still to be noted.
    is_stopped = entry.state in _GOING_ON and not delayed
    others = {key: n for key, n in entry.acts.items() if n != event.number} if is_stopped else {}
    stopped = replace(failed, acts=others, why=why, retry_at=again_at)
    on = ClaimTrigger.DELAYED if delayed else ClaimTrigger.FAILED
    return transition(view, stopped, on), [*lines, line]


def _other_act_over(view: DriverView, event: ActDone | ActFailed, at: float) -> Stepped:
    if (acts := view.driver.acts) is None:
        return view, []
    state, lines = acts.other_act_over(view.state, event, at)
    return view.with_state(state), lines


def _owes(view: DriverView, entry: ClaimRecord, event: ActFailed, at: float) -> Stepped | None:
    acts = view.driver.acts
    owes = acts.owes(view.state, entry, event, at) if acts is not None else None
    return (view.with_state(owes[0]), owes[1]) if owes is not None else None


def files_touched(view: DriverView, event: FilesTouched) -> Stepped:
    """Check the files of prepared claims, and write those that are missing: a container that restarts gets the
    present files without a call to gpuactors. Correct files are not written again. A check in progress may have read
    them before: another one follows it."""
    effects: list[Effect] = []
    for uid, entry in view.claims.entries.items():
        is_touched = event.claims is None or uid in event.claims
        if is_touched and entry.state in (ClaimState.PREPARED, ClaimState.VERIFYING):
            view, lines = try_transition(view, entry, ClaimTrigger.RETRY)
            effects += lines
    return view, effects


def published(view: DriverView, publication: Publication) -> Stepped:
    """Handle a change of the published devices, or a failure to publish them."""
    before = view.claims.publication
    problem = before.problem if before is not None else ""
    after = view.with_claims(replace(view.claims, publication=publication))
    if publication.problem:
        level = Level.DEBUG if publication.problem == problem else Level.WARNING
        return after, [Log(level, "slices.unpublished", {"reason": publication.problem})]
    if not publication.settled:
        return after, []
    fields: dict[str, Field] = {
        "slices": publication.slices,
        "tainted": publication.tainted,
        "withdrawn": publication.withdrawn,
        "keeps_taints": str(publication.keeps_taints),
        "keeps_counters": str(publication.keeps_counters),
    }
    return after, [Log(Level.INFO, "slices.published", fields)]


def _of_act(claims: Claims, number: int) -> ClaimRecord | None:
    return next((e for e in claims.entries.values() if number in e.acts.values()), None)


def ledger_read(view: DriverView, at: float) -> DriverView:
    """Note the claims that kubelet lists for no pod: such a claim may have lost its unprepare, so the API server is
    asked about it later (kubernetes issues 139845, 139876)."""
    claims = view.claims
    if claims.settings is None or not any(e.state in _COLLECTED for e in claims.entries.values()):
        return view
    listed = _listed(view)
    for before in claims.entries.values():
        if before.state not in _COLLECTED:
            continue
        entry = takeover.named(claims, view.state, before)
        if entry is not before:
            claims = with_entry(claims, entry)
        is_listed = str(entry.name) in listed or bool(takeover.listed_as(claims, view.state, entry))
        if is_listed and (entry.missing or entry.collect_at < math.inf):
            claims = with_entry(claims, replace(entry, missing=0, collect_at=math.inf))
        elif not is_listed and entry.collect_at == math.inf and entry.name.uid not in claims.reads:
            claims = with_entry(claims, replace(entry, collect_at=at + limits.CLAIM_COLLECT_S))
    return view.with_claims(claims)


def _listed(view: DriverView) -> set[str]:
    """Return this driver's claims in kubelet's list, by namespace and name."""
    settings = view.claims.settings
    assert settings is not None
    return {claim for name, claim in view.state.kubelet.ledger.claimed if name == settings.driver}


def _is_unlisted(view: DriverView, entry: ClaimRecord) -> bool:
    """Return whether kubelet lists the claim for no pod. Not by an outdated list, nor by one from before kubelet
    knows its pods, nor by its file, which names no claim."""
    ledger, name = view.state.kubelet.ledger, str(entry.name)
    is_its_list = ledger.problem is None and ledger.source is LedgerSource.LIST
    return is_its_list and name not in _listed(view)
