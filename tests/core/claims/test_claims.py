"""A claim from its prepare to its unprepare, and what may come in between."""

from __future__ import annotations

from gpuactors import limits
from gpuactors.core.claims.progress import CLAIM_TOMBSTONE_S
from gpuactors.core.events.claims import ActFailed, FilesTouched
from gpuactors.core.values.claim import ActFault, ClaimsOf, Prepared, Target, Unprepared
from gpuactors.core.values.claim_states import ClaimState
from tests.core.builders import A, B, gpu
from tests.core.gpus.claim_core import ON_HOST, PRE_BOUND, core_with, name


def test_a_gpu_on_its_host_driver_is_bound_prepared_and_returned() -> None:
    core = core_with(ON_HOST, one=(A,))
    answer = core.answer(core.prepare(name("one")))
    assert isinstance(answer, Prepared)
    assert answer.devices[0].device == "gpu-0000-01-00-0"
    assert core.driver(A) == "vfio-pci"
    assert isinstance(core.answer(core.unprepare(name("one"))), Unprepared)
    assert core.driver(A) == "nvidia"
    assert core.claim_state(name("one")) is ClaimState.TOMBSTONE
    core.pass_time(CLAIM_TOMBSTONE_S + 1)
    assert core.claim_state(name("one")) is ClaimState.ABSENT


def test_kubelets_ledger_is_read_as_soon_as_a_claim_has_ended() -> None:
    """It lists the claim still: who has the GPU now is not to be known only after the interval."""
    core = core_with(PRE_BOUND, one=(A,))
    core.prepare(name("one"))
    core.held_back = {"ledger"}
    core.unprepare(name("one"))
    assert core.claim_state(name("one")) is ClaimState.TOMBSTONE
    asked = core.state.kubelet.ledger
    assert asked.refresh.outstanding is not None
    assert asked.asked_at == core.at


def test_a_pre_bound_gpu_stays_on_vfio() -> None:
    core = core_with(PRE_BOUND, one=(A,))
    assert isinstance(core.answer(core.prepare(name("one"))), Prepared)
    core.unprepare(name("one"))
    assert core.driver(A) == "vfio-pci"
    assert (Target.ORIGINAL_DRIVER, A) not in core.acts


def test_no_act_before_its_intent_is_on_disk() -> None:
    core = core_with(ON_HOST, one=(A,))
    core.held_back = {"checkpoint"}
    core.prepare(name("one"))
    assert core.claim_state(name("one")) is ClaimState.RESERVED
    assert core.wanted.devices == {}
    assert core.driver(A) == "nvidia"
    core.release("checkpoint")
    assert core.driver(A) == "vfio-pci"


def test_a_gpu_that_a_process_still_has_open_is_waited_for_in_the_call() -> None:
    core = core_with(ON_HOST, one=(A,))
    core.held_back = {"device"}
    token = core.prepare(name("one"))
    (act,) = core.wanted.devices.values()
    core.feed(
        ActFailed(act.number, f"{A} is open by process 4711", ActFault.IN_USE, driver_kind=ClaimsOf.GPUS)
    )
    assert core.answer(token) is None
    core.held_back = set()
    core.pass_time(limits.CLAIM_RETRY_S + 1)
    assert isinstance(core.answer(token), Prepared)


def test_a_gpu_that_stays_open_is_named_at_the_deadline() -> None:
    core = core_with(ON_HOST, one=(A,))
    core.held_back = {"device"}
    token = core.prepare(name("one"))
    for _ in range(8):
        if act := next(iter(core.wanted.devices.values()), None):
            core.feed(
                ActFailed(
                    act.number, f"{A} is open by process 4711", ActFault.IN_USE, driver_kind=ClaimsOf.GPUS
                )
            )
        core.pass_time(limits.CLAIM_RETRY_S)
    assert f"{A} is open by process 4711" in core.refusal(token)


def test_files_that_were_touched_are_looked_at_for_every_prepared_claim() -> None:
    core = core_with(PRE_BOUND, gpu(B, group=2), one=(A,), two=(B,))
    for claim in ("one", "two"):
        core.prepare(name(claim))
    core.held_back = {"files"}
    core.feed(FilesTouched(ClaimsOf.GPUS))
    assert set(core.wanted.files) == {name("one").uid, name("two").uid}
    numbers = {f.number for f in core.wanted.files.values()}
    core.feed(FilesTouched(ClaimsOf.GPUS))
    assert numbers.isdisjoint(f.number for f in core.wanted.files.values()), "it may have looked before"


def test_files_of_one_claim_that_were_touched_are_looked_at_for_that_claim() -> None:
    """Each prepare and each unprepare touches files: it was a look at the files of every other claim of the node."""
    core = core_with(PRE_BOUND, gpu(B, group=2), one=(A,), two=(B,))
    for claim in ("one", "two"):
        core.prepare(name(claim))
    core.held_back = {"files"}
    core.feed(FilesTouched(ClaimsOf.GPUS, (name("two").uid,)))
    assert set(core.wanted.files) == {name("two").uid}
    core.feed(FilesTouched(ClaimsOf.GPUS, (name("unknown").uid,)))
    assert set(core.wanted.files) == {name("two").uid}
