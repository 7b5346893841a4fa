"""Since when a claim is pending: one time, however often its prepare is tried, and none while nothing is to be done."""

from __future__ import annotations

import math

from gpuactors import limits
from gpuactors.core.events.claims import ActFailed
from gpuactors.core.values.claim import ActFault, ClaimsOf, Prepared
from gpuactors.core.values.claim_states import ClaimState
from tests.core.builders import A, B, gpu
from tests.core.domains.test_takeover import OLD, taken_over, theirs
from tests.core.gpus.claim_core import ON_HOST, ClaimCore, core_with, name

ONE, TWO = name("one"), name("two")
AGAIN_S = 70.0
"""After this kubelet repeats a failed prepare."""


def since(core: ClaimCore) -> float:
    """Since when the claim is pending."""
    entry = core.entry(ONE)
    assert entry is not None
    return entry.pending_since


def refused_by_the_kernel(core: ClaimCore) -> None:
    (act,) = core.wanted.devices.values()
    core.feed(ActFailed(act.number, "the kernel refused it", ActFault.REFUSED, driver_kind=ClaimsOf.GPUS))


def test_a_claim_whose_prepare_fails_again_and_again_is_pending_since_the_first() -> None:
    """It is Stopped, then Binding, then Stopped: no state of it is old."""
    core = core_with(ON_HOST, one=(A,))
    core.held_back = {"device"}
    began = core.at
    for _ in range(15):
        core.prepare(ONE)
        assert core.claim_state(ONE) is ClaimState.BINDING
        refused_by_the_kernel(core)
        assert core.claim_state(ONE) is ClaimState.STOPPED
        core.pass_time(AGAIN_S)
        assert since(core) == began
    token = core.prepare(ONE)
    core.release("device")
    assert isinstance(core.answer(token), Prepared)
    assert since(core) == math.inf


def test_a_claim_that_is_to_be_released_is_pending_since_its_unprepare() -> None:
    core = core_with(ON_HOST, one=(A,))
    core.prepare(ONE)
    core.pass_time(1000)
    assert since(core) == math.inf
    core.held_back = {"device"}
    core.unprepare(ONE)
    began = core.at
    core.pass_time(1000)
    assert (core.claim_state(ONE), since(core)) == (ClaimState.RELEASING, began)
    core.release("device")
    assert (core.claim_state(ONE), since(core)) == (ClaimState.TOMBSTONE, math.inf)


def test_a_claim_that_was_under_way_is_pending_since_the_daemons_start() -> None:
    """How long it was before, nobody has written down."""
    core = core_with(ON_HOST, one=(A,))
    core.held_back = {"device"}
    core.prepare(ONE)
    core.pass_time(300)
    core = core.restarted("device")
    assert (core.claim_state(ONE), since(core)) == (ClaimState.BINDING, core.at)


def test_a_claim_that_waits_for_its_gpu_is_pending_for_one_call_only() -> None:
    """Then its prepare is refused, and nothing is known of it until the next one."""
    core = core_with(ON_HOST, gpu(B, 2, driver="nvidia"), two=(A,), one=(A, B))
    core.prepare(TWO)
    for _ in range(3):
        began = core.at
        token = core.prepare(ONE)
        assert (core.claim_state(ONE), since(core)) == (ClaimState.WAITING, began)
        core.pass_time(limits.CLAIM_ANSWER_S)
        assert "belongs to the claim default/two" in core.refusal(token)
        assert core.claim_state(ONE) is ClaimState.ABSENT
        core.pass_time(AGAIN_S)


def test_a_claim_of_nvidias_driver_is_not_pending() -> None:
    core = taken_over(theirs(OLD))
    core.pass_time(1000)
    entry = core.entry(OLD)
    assert entry is not None
    assert (entry.state, entry.pending_since) == (ClaimState.TAKEN_OVER, math.inf)
