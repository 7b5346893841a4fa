"""The requests of a transition of a claim: the number of a read, of a checkpoint, or of acts.

Every change of an entry's state goes through `transition`, and so through the table. An act gets its number only in a
transition that follows the checkpoint with its intent (ADR 0009).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import count

from msgspec.structs import replace

from gpuactors.core.claims.driver import Claiming
from gpuactors.core.claims.view import DriverView, Stepped
from gpuactors.core.state.claims import FILES, ClaimRecord, Claims, with_entry
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.claim import ClaimUid
from gpuactors.core.values.claim_states import ENDED, ClaimTrigger, NoTransitionError, Request, follow
from gpuactors.core.values.effects import Field, Level, Log, Refusal, Refused


def transition(view: DriverView, entry: ClaimRecord, on: ClaimTrigger) -> DriverView:
    """Make a transition of one claim, and request what that needs. Raises `NoTransitionError`."""
    return view.with_claims(_transition(view.driver.claiming, view.claims, entry, on))


def _transition(claiming: Claiming, claims: Claims, entry: ClaimRecord, on: ClaimTrigger) -> Claims:
    try:
        after, request = follow(entry.state, on)
    except NoTransitionError as error:
        error.uid = entry.name.uid
        raise
    if after in ENDED and after is not entry.state:
        entry, claims = replace(blank(entry), retry_at=math.inf), read_over(claims, entry.name.uid)
    entry = replace(entry, state=after, broken="")
    match request:
        case Request.NOTHING:
            return with_entry(claims, entry)
        case Request.FETCH:
            entry = replace(blank(entry), retry_at=math.inf)
            return with_read(with_entry(claims, entry), entry.name.uid)
        case Request.CHECKPOINT | Request.FORGET:
            number = claims.last + 1
            entry = replace(entry, intent=number, acts={}, retry_at=math.inf, collect_at=math.inf, why=None)
            claims = read_over(claims, entry.name.uid)
            return with_entry(replace(claims, last=number, checkpoint=number), entry)
        case Request.BIND:
            acts = claiming.binding(entry)
            # Why the last try failed stays known until it is done: it is the error if the wait lasts too long.
            entry = replace(entry, retry_at=math.inf)
            return (
                with_acts(claims, entry, acts)
                if acts
                else _transition(claiming, claims, entry, ClaimTrigger.DONE)
            )
        case Request.WRITE:
            entry = replace(entry, why=None, has_files=True, retry_at=math.inf)
            return with_acts(claims, entry, [FILES])
        case Request.CLEAR:
            return with_acts(claims, replace(entry, retry_at=math.inf), [FILES])
        case Request.UNDO:  # which devices are returned follows from the whole state: `Claiming.undoing`
            return with_entry(claims, entry)


def quarantine(view: DriverView, error: NoTransitionError) -> Stepped:
    """Set the claim aside for which the table lacks a row. It keeps what it has, none of its acts stands, it makes
    no transition by itself, and a call about it is another try. The other claims are served. Under tests and
    simulation raises `error`."""
    if view.state.daemon.settings.strict:
        raise error
    sentence = f"{error}, which is a bug in gpuactors: report it with the journal. The claim stays as it is"
    claims = view.claims
    entry = claims.entries.get(ClaimUid(error.uid))
    fields: dict[str, Field] = {"uid": error.uid, "reason": sentence}
    if entry is not None:
        fields["claim"] = str(entry.name)
        claims = with_entry(claims, replace(entry, broken=sentence, acts={}, retry_at=math.inf))
    return view.with_claims(claims), [Log(Level.ERROR, "claim.broken", fields)]


def try_transition(view: DriverView, entry: ClaimRecord, on: ClaimTrigger) -> Stepped:
    """Make a transition of one claim, or quarantine the claim. Raises as `quarantine`."""
    try:
        return transition(view, entry, on), []
    except NoTransitionError as error:
        return quarantine(view.with_record(entry), error)


def blank(entry: ClaimRecord) -> ClaimRecord:
    """Return the record of a claim that has nothing here (any more)."""
    return ClaimRecord(entry.name, entry.state, entry.order)


def with_read(claims: Claims, uid: ClaimUid) -> Claims:
    number = claims.last + 1
    return replace(claims, last=number, reads={**claims.reads, uid: number})


def read_over(claims: Claims, uid: ClaimUid) -> Claims:
    return replace(claims, reads={u: n for u, n in claims.reads.items() if u != uid})


def with_acts(claims: Claims, entry: ClaimRecord, keys: Iterable[str]) -> Claims:
    acts = dict(zip(keys, count(claims.last + 1), strict=False))
    return with_entry(replace(claims, last=claims.last + len(acts)), replace(entry, acts=acts))


def refusal(cause: Cause, reason: str) -> Refused:
    """Return the error of a claim. Kubelet gets its sentence: the call itself succeeds, and has no gRPC status of
    its own."""
    return Refused(Refusal.FAILED_PRECONDITION, reason, (cause,))
