"""Calls about claims that are handed over: held until our own core or the successor has an answer."""

from __future__ import annotations

from dataclasses import dataclass, field

import trio
from trio.testing import MockClock

from gpuactors import limits
from gpuactors.actors.relay import RELAY_TRY_S, RelayingCaller
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.claim import ClaimName, ClaimUid, Prepared, Unprepared
from gpuactors.core.values.effects import Elsewhere, Refusal, Refused
from tests.support.successors import FakeSuccessor

ONE = ClaimName("default", "one", ClaimUid("u-one"))
REFUSED = Refused(Refusal.UNAVAILABLE, "the GPU is gone", ())


@dataclass
class FakeCore:
    """Answers in turn what a test has set. Implements `relay.Core`."""

    answers: list[Prepared | Unprepared | Refused | Elsewhere] = field(default_factory=list)
    asked: int = 0

    async def prepare(self, claim: ClaimName) -> Prepared | Refused | Elsewhere:
        await trio.lowlevel.checkpoint()
        self.asked += 1
        answer = self.answers.pop(0)
        assert not isinstance(answer, Unprepared)
        return answer

    async def unprepare(self, claim: ClaimName) -> Unprepared | Refused | Elsewhere:
        await trio.lowlevel.checkpoint()
        self.asked += 1
        answer = self.answers.pop(0)
        assert not isinstance(answer, Prepared)
        return answer


async def test_what_our_core_answers_is_the_answer(autojump_clock: MockClock) -> None:
    successor = FakeSuccessor()
    caller = RelayingCaller(FakeCore([REFUSED, Unprepared()]), successor)
    assert await caller.prepare(ONE) == REFUSED
    assert await caller.unprepare(ONE) == Unprepared()
    assert successor.asked == []


async def test_a_call_that_is_handed_over_waits_for_the_successors_socket(autojump_clock: MockClock) -> None:
    successor = FakeSuccessor(prepared=[None, None, Prepared(())], unprepared=[REFUSED])
    caller = RelayingCaller(FakeCore([Elsewhere(), Elsewhere()]), successor)
    began = trio.current_time()
    assert await caller.prepare(ONE) == Prepared(())
    assert trio.current_time() - began == 2 * RELAY_TRY_S
    assert await caller.unprepare(ONE) == REFUSED, "its word is passed on as it is"
    assert {claim for _, _, claim in successor.asked} == {ONE}


async def test_without_a_successor_our_core_is_asked_again_as_it_may_serve_again(
    autojump_clock: MockClock,
) -> None:
    core = FakeCore([Elsewhere(), Elsewhere(), Prepared(())])
    assert await RelayingCaller(core, FakeSuccessor()).prepare(ONE) == Prepared(())
    assert core.asked == 3


async def test_a_call_is_answered_in_kubelets_time_though_it_was_held_for_a_part_of_it(
    autojump_clock: MockClock,
) -> None:
    """The successor died, the API server is away: our core's own time for a claim begins when it serves again."""

    class LateCore:
        async def prepare(self, claim: ClaimName) -> Prepared | Refused | Elsewhere:
            if trio.current_time() < 6.0:
                return Elsewhere()
            await trio.sleep(limits.CLAIM_ANSWER_S)
            return REFUSED

        async def unprepare(self, claim: ClaimName) -> Unprepared | Refused | Elsewhere:
            await trio.lowlevel.checkpoint()
            return Elsewhere()

    caller = RelayingCaller(LateCore(), FakeSuccessor())
    for call in (caller.prepare, caller.unprepare):
        began = trio.current_time()
        answer = await call(ONE)
        assert trio.current_time() - began == limits.CLAIM_ANSWER_S
        assert isinstance(answer, Refused)
        assert answer.causes == (Cause.NOT_SERVING,)
        assert "has not answered it within 35 s" in answer.reason


async def test_the_time_that_our_core_took_before_the_hand_over_counts(autojump_clock: MockClock) -> None:
    """Kubelet's 45 s began when it called: a call that our core had for 20 s has the rest of 35 s at the successor."""

    class HandsOverLate:
        async def prepare(self, claim: ClaimName) -> Prepared | Refused | Elsewhere:
            await trio.sleep(20.0 if trio.current_time() < 20.0 else 0.0)
            return Elsewhere()

        async def unprepare(self, claim: ClaimName) -> Unprepared | Refused | Elsewhere:
            await trio.lowlevel.checkpoint()
            return Elsewhere()

    began = trio.current_time()
    answer = await RelayingCaller(HandsOverLate(), FakeSuccessor()).prepare(ONE)
    assert isinstance(answer, Refused)
    assert trio.current_time() - began == limits.CLAIM_ANSWER_S
