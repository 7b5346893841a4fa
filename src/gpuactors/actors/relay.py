"""Calls about claims that this daemon has handed over: they are put to its successor, and its answers passed on.

Kubelet repeats a failed prepare only after 60 to 90 s, and calls the old instance until its plugin watcher knows the
new one. The successor's ledger is the only one from the hand-over on, and a repeated call joins what is under way
there: so asking it is all that is left to do (ADR 0015). Must not decide anything about a claim.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, Protocol, TypeVar, final

import trio

from gpuactors import limits
from gpuactors.core.claims.transitions import refusal
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.claim import ClaimName, Prepared, Unprepared
from gpuactors.core.values.effects import Elsewhere, Refused
from gpuactors.ports.claims import Successor

RELAY_TRY_S: Final = 0.05
"""The interval between two tries of the successor's socket while it is missing, 50 ms: it comes within milliseconds."""

RELAY_OWN_S: Final = 1.0
"""The interval between two questions to our own core while no successor answers, 1 s: it may serve again."""

Done = TypeVar("Done", Prepared, Unprepared)


class Core(Protocol):
    """Our own core's answers, as of `ports.claims.ClaimCaller`."""

    async def prepare(self, claim: ClaimName) -> Prepared | Refused | Elsewhere: ...

    async def unprepare(self, claim: ClaimName) -> Unprepared | Refused | Elsewhere: ...


@final
class RelayingCaller:
    """Implements `ports.claims.ClaimCaller`. A call that is not our core's is held until our core or the successor
    answers it, and refused when it is CLAIM_ANSWER_S old: neither of them counts from when it came to us."""

    def __init__(self, core: Core, successor: Successor) -> None:
        self._core = core
        self._successor = successor

    async def prepare(self, claim: ClaimName) -> Prepared | Refused:
        return await _answer("prepare", claim, self._core.prepare, self._successor.prepare)

    async def unprepare(self, claim: ClaimName) -> Unprepared | Refused:
        return await _answer("unprepare", claim, self._core.unprepare, self._successor.unprepare)


async def _answer(
    call: str,
    claim: ClaimName,
    ours: Callable[[ClaimName], Awaitable[Done | Refused | Elsewhere]],
    theirs: Callable[[ClaimName], Awaitable[Done | Refused | None]],
) -> Done | Refused:
    late_at = trio.current_time() + limits.CLAIM_ANSWER_S
    answer = await ours(claim)
    with trio.move_on_at(late_at):
        while isinstance(answer, Elsewhere):
            until = trio.current_time() + RELAY_OWN_S
            while trio.current_time() < until:
                if (passed_on := await theirs(claim)) is not None:
                    return passed_on
                await trio.sleep(RELAY_TRY_S)
            answer = await ours(claim)
        return answer
    return refusal(
        Cause.NOT_SERVING,
        f"the {call} of claim {claim} was handed over to the daemon's successor, which has not answered it within "
        f"{limits.CLAIM_ANSWER_S:g} s: look at its log; kubelet asks again",
    )
