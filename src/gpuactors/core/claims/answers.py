"""The answers to kubelet's calls about claims, and when they can be given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec.structs import replace

from gpuactors import limits
from gpuactors.core.claims import cdi
from gpuactors.core.claims.transitions import refusal
from gpuactors.core.state.claims import ClaimCall, ClaimRecord, Claims, domain_of
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.claim import Prepared, PreparedDevice, Unprepared
from gpuactors.core.values.claim_states import ClaimState
from gpuactors.core.values.effects import Effect, Elsewhere, Field, Level, Log, Refused, Reply
from gpuactors.core.values.model import Token
from gpuactors.core.values.quote import quoted, quoted_id
from gpuactors.core.values.status import Reason


def answer_of(claims: Claims, call: ClaimCall, at: float) -> Prepared | Unprepared | Refused | None:
    entry = claims.entries.get(call.uid)
    if not call.prepares:
        if entry is None or entry.state is ClaimState.TOMBSTONE:
            return Unprepared()
        # What waits in the kernel may wait for ever, and an error would keep the pod from ending (kubernetes 129402).
        # The devices stay the claim's until they are returned.
        return Unprepared() if call.deadline <= at else None
    if entry is not None and entry.broken:
        return refusal(Cause.SET_ASIDE, entry.broken)
    if entry is not None and (entry.state is ClaimState.STOPPED or not entry.acts):
        if entry.state is ClaimState.TAKEN_OVER:
            return Prepared(entry.given)
        if entry.state is ClaimState.PREPARED:
            return _refusal(entry.why) if entry.why is not None else prepared(claims, entry)
        is_stuck = entry.state is ClaimState.STOPPED or entry.is_unread
        if is_stuck and entry.name.uid not in claims.reads and entry.why is not None:
            return _refusal(entry.why)
    return _late(claims, entry) if call.deadline <= at else None


def _refusal(why: Reason) -> Refused:
    return refusal(why.cause, why.message)


_LATE: Final = {
    ClaimState.FETCHING: Cause.API_SERVER_FAILED,
    ClaimState.WAITING: Cause.INSPECTION_LATE,
    ClaimState.RESERVED: Cause.CHECKPOINT_UNWRITTEN,
    ClaimState.BINDING: Cause.WRITE_HANGS,
    ClaimState.WRITING: Cause.FILES_UNWRITTEN,
    ClaimState.COMMITTING: Cause.CHECKPOINT_UNWRITTEN,
    ClaimState.PREPARED: Cause.FILES_UNWRITTEN,
    ClaimState.VERIFYING: Cause.INSPECTION_LATE,
    ClaimState.DRIFTED: Cause.FILES_UNWRITTEN,
    ClaimState.TAKEN_OVER: Cause.FILES_UNWRITTEN,
    ClaimState.STOPPED: Cause.API_SERVER_FAILED,
    ClaimState.RELEASING: Cause.WRITE_HANGS,
    ClaimState.CLEARING: Cause.FILES_UNWRITTEN,
    ClaimState.TOMBSTONE: Cause.API_SERVER_FAILED,
}
"""The party that has not answered, for a prepare that times out in a state with no better reason."""


def _late(claims: Claims, entry: ClaimRecord | None) -> Refused:
    """Return why a prepare could not be answered in time."""
    if entry is None:
        return refusal(Cause.CLAIM_NOT_FOUND, "the claim is not known")
    if claims.unwritten:
        return refusal(Cause.CHECKPOINT_UNWRITTEN, claims.unwritten)
    why = f": {entry.problem}" if entry.problem else ""
    cause = entry.why.cause if entry.why is not None else _LATE[entry.state]
    return refusal(
        cause,
        f"not ready within {limits.CLAIM_ANSWER_S:g} s, the claim is {entry.state}{why}; kubelet asks again",
    )


def prepared(claims: Claims, entry: ClaimRecord) -> Prepared:
    """Return the answer for a prepared claim: the same devices in the same order, each time."""
    assert claims.settings is not None
    assert entry.claim is not None
    results = entry.claim.results or ()
    ids = list(cdi.cdi_ids(claims.settings.driver, entry.name.uid, results))
    if (own := domain_of(entry).domain) is not None and own.cdi_ids:
        ids[0] += own.cdi_ids
    return Prepared(
        tuple(
            PreparedDevice((r.base_request,), r.pool, r.device, of_result, r.share_id)
            for r, of_result in zip(results, ids, strict=True)
        )
    )


def answered(
    claims: Claims, answers: Mapping[Token, Prepared | Unprepared | Refused | Elsewhere]
) -> tuple[Claims, list[Effect]]:
    if not answers:
        return claims, []
    effects: list[Effect] = []
    for token, answer in answers.items():
        if isinstance(answer, Refused | Elsewhere):
            call = claims.calls[token]
            entry = claims.entries.get(call.uid)
            effects += declined(token, call.uid, str(entry.name) if entry is not None else "", answer)
        else:
            effects.append(Reply(token, answer))
    return replace(claims, calls={t: c for t, c in claims.calls.items() if t not in answers}), effects


def declined(token: Token, uid: str, claim: str, answer: Refused | Elsewhere) -> list[Effect]:
    """Return the reply to a call about a claim that is not carried out here, and its line in the log. `claim` is its
    name; empty if that is not known."""
    fields: dict[str, Field] = {"uid": quoted_id(uid)}
    if claim:
        fields["claim"] = quoted(claim)
    if isinstance(answer, Elsewhere):
        return [Reply(token, answer), Log(Level.INFO, "claim.passed_on", fields)]
    fields |= {"causes": tuple(map(str, answer.causes)), "reason": answer.reason}
    return [Reply(token, answer), Log(Level.WARNING, "claim.refused", fields)]
