"""Which calls of kubelet about claims can be answered, and how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gpuactors import limits
from gpuactors.core.dra import cdi
from gpuactors.core.dra.claim import Prepared, PreparedDevice, Unprepared
from gpuactors.core.dra.entries import ClaimCall, Claims, Entry
from gpuactors.core.dra.table import ClaimState
from gpuactors.core.dra.transitions import refusal
from gpuactors.core.effects import Effect, Level, Log, Refused, Reply
from gpuactors.core.model import Token


def answer_of(claims: Claims, call: ClaimCall, at: float) -> Prepared | Unprepared | Refused | None:
    entry = claims.entries.get(call.uid)
    if not call.prepares:
        if entry is None or entry.state is ClaimState.TOMBSTONE:
            return Unprepared()
        # What waits in the kernel may wait for ever, and an error would keep the pod from ending (kubernetes 129402).
        # The devices stay the claim's until they are returned.
        return Unprepared() if call.deadline <= at else None
    if entry is not None and entry.broken:
        return refusal(entry.broken)
    if entry is not None and not entry.acts:
        if entry.state is ClaimState.PREPARED:
            return refusal(entry.problem) if entry.problem else prepared(claims, entry)
        if entry.state is ClaimState.STOPPED and entry.name.uid not in claims.reads:
            return refusal(entry.problem)
    return refusal(_late(claims, entry)) if call.deadline <= at else None


def _late(claims: Claims, entry: Entry | None) -> str:
    """Why a prepare could not be answered in time."""
    if entry is None:
        return "the claim is not known"
    if claims.unwritten:
        return claims.unwritten
    why = f": {entry.problem}" if entry.problem else ""
    return (
        f"not ready within {limits.CLAIM_ANSWER_S:g} s, the claim is {entry.state}{why}; kubelet asks again"
    )


def prepared(claims: Claims, entry: Entry) -> Prepared:
    """The answer for a prepared claim: the same devices in the same order, each time."""
    assert claims.settings is not None
    assert entry.claim is not None
    results = entry.claim.results or ()
    ids = cdi.cdi_ids(claims.settings.driver, entry.name.uid, results)
    return Prepared(
        tuple(
            PreparedDevice((r.base_request,), r.pool, r.device, of_result, r.share_id)
            for r, of_result in zip(results, ids, strict=True)
        )
    )


def answered(
    claims: Claims, answers: Mapping[Token, Prepared | Unprepared | Refused]
) -> tuple[Claims, list[Effect]]:
    if not answers:
        return claims, []
    effects: list[Effect] = []
    for token, answer in answers.items():
        effects.append(Reply(token, answer))
        call = claims.calls[token]
        entry = claims.entries.get(call.uid)
        if isinstance(answer, Refused):
            fields: dict[str, str | tuple[str, ...]] = {"uid": call.uid, "reason": answer.reason}
            if entry is not None:
                fields["claim"] = str(entry.name)
            effects.append(Log(Level.WARNING, "claim.refused", {**fields}))
    return replace(claims, calls={t: c for t, c in claims.calls.items() if t not in answers}), effects
