"""An administrator beside the claims: binds, unbinds, unplugs and modules that are not ours count as decisions."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gpuactors import limits
from gpuactors.core.events.claims import ActDone, ActFailed
from gpuactors.core.events.host import FunctionInspected
from gpuactors.core.gpus.returns import RETURN_RETRY_S
from gpuactors.core.values.claim import ActFault, ClaimsOf, Prepared, Target, Unprepared
from gpuactors.core.values.effects import Granted, Refused
from gpuactors.core.values.model import DeviceKey, PciFunction
from tests.core.builders import A, B, audio, gpu
from tests.core.gpus.claim_core import ON_HOST, ClaimCore, as_bound, core_with, name, on_driver

ONE, TWO = name("one"), name("two")
AUDIO = "0000:01:00.1"
COMPANION = "0000:02:00.1"
BOUND = on_driver(ON_HOST, "vfio-pci")


def claimed_and_released(core: ClaimCore) -> None:
    assert isinstance(core.answer(core.prepare(ONE)), Prepared)
    assert isinstance(core.answer(core.unprepare(ONE)), Unprepared)


def test_a_gpu_that_is_bound_to_vfio_by_hand_after_a_claim_stays_there_after_the_next_one() -> None:
    core = core_with(ON_HOST, one=(A,), two=(A,))
    claimed_and_released(core)
    assert core.driver(A) == "nvidia"
    core.changed(BOUND)
    core.prepare(TWO)
    core.unprepare(TWO)
    assert core.driver(A) == "vfio-pci"


def test_it_stays_as_well_where_the_bind_is_first_seen_at_the_reservation() -> None:
    """Its uevent was lost."""
    core = core_with(ON_HOST, one=(A,), two=(A,))
    claimed_and_released(core)
    core.functions[BOUND.address] = BOUND
    core.prepare(TWO)
    core.unprepare(TWO)
    assert core.driver(A) == "vfio-pci"


def test_it_stays_as_well_where_the_daemon_was_away_meanwhile() -> None:
    core = core_with(ON_HOST, one=(A,), two=(A,))
    claimed_and_released(core)
    core.functions[BOUND.address] = BOUND
    core = core.restarted()
    core.prepare(TWO)
    core.unprepare(TWO)
    assert core.driver(A) == "vfio-pci"


def test_it_stays_as_well_where_the_daemon_ended_right_after_the_return() -> None:
    """It has not inspected the GPU again."""
    core = core_with(replace(ON_HOST, presence=7), one=(A,), two=(A,))
    core.prepare(ONE)
    core.held_back = {"inspection"}
    core.unprepare(ONE)
    core.functions[BOUND.address] = replace(BOUND, presence=7)
    core = core.restarted()
    core.prepare(TWO)
    core.unprepare(TWO)
    assert core.driver(A) == "vfio-pci"


def test_an_inspection_of_before_the_bind_is_nobodys_decision() -> None:
    core = core_with(ON_HOST, one=(A,))
    core.held_back = {"device"}
    core.prepare(ONE)
    core.held_back = {"device", "inspection"}
    core.changed(ON_HOST)
    number = core.state.host.inspections.functions[ON_HOST.address]
    (act,) = core.wanted.devices.values()
    core.feed(core.act_event(act))
    core.feed(FunctionInspected(number, ON_HOST.address, (ON_HOST,)))
    core.release("inspection", "device")
    core.unprepare(ONE)
    assert core.driver(A) == "nvidia"


def test_an_inspection_of_before_the_return_makes_no_gpu_pre_bound() -> None:
    core = core_with(ON_HOST, one=(A,), two=(A,))
    core.prepare(ONE)
    core.held_back = {"inspection"}
    core.changed(*core.functions.values())
    core.unprepare(ONE)
    assert core.driver(A) == "nvidia"
    core.functions, now = {BOUND.address: BOUND}, core.functions
    core.held_back = {"inspection"}
    number = core.state.host.inspections.functions[BOUND.address]
    core.feed(FunctionInspected(number, BOUND.address, (BOUND,)))
    core.functions = now
    core.release("inspection")
    core.prepare(TWO)
    core.unprepare(TWO)
    assert core.driver(A) == "nvidia"


def test_a_gpu_that_is_bound_to_vfio_by_hand_under_its_claim_stays_there() -> None:
    """It was on the host's driver meanwhile: our bind has ended with that."""
    core = core_with(ON_HOST, one=(A,), two=(A,))
    core.prepare(ONE)
    core.changed(ON_HOST)
    core.changed(BOUND)
    core.unprepare(ONE)
    assert core.driver(A) == "vfio-pci"


def test_so_it_does_after_a_restart() -> None:
    core = core_with(ON_HOST, one=(A,))
    core.prepare(ONE)
    core.changed(ON_HOST)
    core.changed(BOUND)
    core = core.restarted()
    core.unprepare(ONE)
    assert core.driver(A) == "vfio-pci"


def test_a_gpu_that_is_bound_to_another_driver_by_hand_is_returned_to_that_one() -> None:
    core = core_with(ON_HOST, one=(A,), two=(A,))
    claimed_and_released(core)
    core.changed(on_driver(ON_HOST, "nouveau"))
    core.prepare(TWO)
    core.unprepare(TWO)
    assert core.driver(A) == "nouveau"


def test_a_gpu_that_is_plugged_in_again_under_its_claim_is_found_anew() -> None:
    """vfio-pci has its id, and takes it at once: nobody has seen it gone."""
    core = core_with(replace(ON_HOST, presence=7), one=(A,))
    core.prepare(ONE)
    core.changed(replace(BOUND, presence=9))
    core.unprepare(ONE)
    assert core.driver(A) == "vfio-pci"


def test_a_gpu_that_was_seen_gone_is_found_anew() -> None:
    core = core_with(ON_HOST, one=(A,), two=(A,))
    core.prepare(ONE)
    core.unplugged(A)
    core.changed(BOUND)
    core.unprepare(ONE)
    core.prepare(TWO)
    core.unprepare(TWO)
    assert core.driver(A) == "vfio-pci"


@pytest.mark.parametrize("seen_gone", [True, False])
@pytest.mark.parametrize("restart", [False, True])
def test_one_that_is_plugged_in_during_the_bind_and_left_without_a_driver_is_returned(
    seen_gone: bool, restart: bool
) -> None:
    """The kernel has refused the second half of the bind: that it has no driver is of our making."""
    core = core_with(replace(ON_HOST, presence=7), one=(A,))
    core.held_back = {"device"}
    core.prepare(ONE)
    if seen_gone:
        core.unplugged(A)
    left = on_driver(replace(ON_HOST, presence=9), None)
    core.functions[left.address] = left
    (act,) = core.wanted.devices.values()
    core.feed(
        ActFailed(
            act.number,
            "the kernel refused it",
            ActFault.REFUSED,
            moved=(as_bound(left),),
            driver_kind=ClaimsOf.GPUS,
        )
    )
    core.held_back = set()
    core = core.restarted() if restart else core
    core.unprepare(ONE)
    assert core.driver(A) == "nvidia"


@pytest.mark.parametrize("fails_too", [False, True])
def test_what_another_act_of_a_stopped_claim_goes_on_to_bind_is_returned(fails_too: bool) -> None:
    """The daemon before may have written its files, so they are removed when a device is seen elsewhere: not while an
    act still moves it."""
    other, companion = gpu(B, group=2, driver="nvidia"), audio(COMPANION, group=2, driver="snd_hda_intel")
    core = core_with(ON_HOST, other, companion, one=(A, B))
    core.held_back = {"device"}
    core.prepare(ONE)
    core = core.restarted("device")
    token = core.prepare(ONE)
    acts = core.wanted.devices
    core.feed(
        ActFailed(
            acts[DeviceKey(A)].number, "the kernel refused it", ActFault.REFUSED, driver_kind=ClaimsOf.GPUS
        )
    )
    assert isinstance(core.answer(token), Refused), "without a wait for the other act"
    core.changed(on_driver(other, "vfio-pci"))
    done = core.act_event(acts[DeviceKey(B)])
    assert isinstance(done, ActDone)
    failed = ActFailed(
        done.number, "its companion is gone", ActFault.GONE, moved=done.bound, driver_kind=ClaimsOf.GPUS
    )
    core.feed(failed if fails_too else done)
    core.held_back = set()
    core.changed(*core.functions.values())
    assert core.driver(COMPANION) == "vfio-pci"
    core.unprepare(ONE)
    assert [core.driver(a) for a in (A, B, COMPANION)] == ["nvidia", "nvidia", "snd_hda_intel"]


# --- a driver that is not loaded when the claim ends ------------------------------------------------------------------


def released_without_driver(*functions: PciFunction) -> ClaimCore:
    """The claim `one` has ended, and `nvidia` is not loaded."""
    core = core_with(*functions or (ON_HOST,), one=(A,), two=(A,))
    core.prepare(ONE)
    core.held_back = {"device"}
    token = core.unprepare(ONE)
    not_loaded(core)
    assert isinstance(core.answer(token), Unprepared), "its pod may end"
    return core


def not_loaded(core: ClaimCore) -> None:
    (act,) = core.wanted.devices.values()
    assert act.target is Target.ORIGINAL_DRIVER
    core.feed(ActFailed(act.number, "nvidia is not loaded", ActFault.NO_DRIVER, driver_kind=ClaimsOf.GPUS))


def loaded(core: ClaimCore) -> None:
    core.held_back = set()
    core.pass_time(RETURN_RETRY_S)


def test_the_return_is_owed_until_the_driver_is_there() -> None:
    core = released_without_driver()
    assert core.wanted.devices == {}
    core.pass_time(RETURN_RETRY_S)
    not_loaded(core)
    assert core.driver(A) == "vfio-pci"
    loaded(core)
    assert core.driver(A) == "nvidia"
    assert core.disk is not None
    assert core.disk.owed == ()


def test_it_is_owed_by_the_next_daemon_as_well() -> None:
    core = released_without_driver()
    core = core.restarted()
    loaded(core)
    assert core.driver(A) == "nvidia"


def test_the_next_claim_gets_the_gpu_and_returns_it() -> None:
    core = released_without_driver()
    core.held_back = set()
    assert isinstance(core.answer(core.prepare(TWO)), Prepared)
    core.pass_time(RETURN_RETRY_S)
    assert core.driver(A) == "vfio-pci", "it has it now"
    core.unprepare(TWO)
    assert core.driver(A) == "nvidia"


def test_a_claim_that_comes_during_the_return_waits_for_it() -> None:
    core = released_without_driver()
    core.pass_time(RETURN_RETRY_S)
    (act,) = core.wanted.devices.values()
    token = core.prepare(TWO)
    assert core.answer(token) is None
    assert [a.number for a in core.wanted.devices.values()] == [act.number]
    core.release("device")
    assert isinstance(core.answer(token), Prepared)
    core.unprepare(TWO)
    assert core.driver(A) == "nvidia"


def test_it_is_not_begun_while_a_pod_has_the_gpu() -> None:
    core = released_without_driver()
    core.pass_time(1)
    assert isinstance(core.allocation(core.allocate(A)), Granted)
    core.ledger[A] = "vm"
    core.held_back = set()
    core.pass_time(RETURN_RETRY_S)
    core.pass_time(RETURN_RETRY_S)
    assert core.driver(A) == "vfio-pci"
    del core.ledger[A]
    core.pass_time(limits.LEDGER_S)
    core.pass_time(RETURN_RETRY_S)
    assert core.driver(A) == "nvidia"


def test_it_is_given_up_when_somebody_else_has_bound_the_gpu() -> None:
    core = released_without_driver()
    core.changed(on_driver(ON_HOST, "nouveau"))
    core.changed(BOUND)
    loaded(core)
    assert core.driver(A) == "vfio-pci"
    core.prepare(TWO)
    core.unprepare(TWO)
    assert core.driver(A) == "vfio-pci"


def test_it_is_tried_again_while_a_process_has_the_gpu() -> None:
    core = released_without_driver()
    core.pass_time(RETURN_RETRY_S)
    (act,) = core.wanted.devices.values()
    core.feed(ActFailed(act.number, "process 77 has it open", ActFault.IN_USE, driver_kind=ClaimsOf.GPUS))
    loaded(core)
    assert core.driver(A) == "nvidia"


@pytest.mark.parametrize("restart", [False, True])
def test_a_companion_is_returned_along(restart: bool) -> None:
    core = released_without_driver(ON_HOST, audio(AUDIO, 1, driver="snd_hda_intel"))
    core = core.restarted() if restart else core
    loaded(core)
    assert (core.driver(A), core.driver(AUDIO)) == ("nvidia", "snd_hda_intel")


def test_the_gpu_that_is_unplugged_is_owed_no_more() -> None:
    core = released_without_driver()
    core.unplugged(A)
    core.changed(gpu(A, 1))
    loaded(core)
    assert core.driver(A) == "vfio-pci"
