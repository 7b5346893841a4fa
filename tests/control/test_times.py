"""Since when a device is as it is, and when it was last looked at, allocated or refused: by the clock of the events."""

from __future__ import annotations

from gpuactors.control.node_view import AGELESS, view_of
from gpuactors.control.view import LastCallView
from gpuactors.core.values.model import Holder
from tests.control.test_view import GPU, QEMU, device, held, received
from tests.core.builders import Core, allocate_call, gpu, pre_start_call


def allocate(core: Core, token: int, address: str = GPU) -> None:
    core.called(allocate_call(address, token=token), gpu(address))


def test_since_is_the_change_of_the_cause_and_not_of_its_words() -> None:
    core = Core(gpu("23:00.0"))
    held(core, QEMU)
    began = device(core).since_s
    assert began is not None
    core.pass_time(60)
    held(core, QEMU, Holder(4712, "another", None))
    view = device(core)
    assert "4712" in view.reason
    assert view.since_s == began + 70


def test_what_is_not_listed_is_so_since_it_was_found_so() -> None:
    core = Core(gpu("23:00.0", driver="nvidia"))
    core.pass_time(30)
    assert device(core).since_s == 30
    core.inspect(GPU, gpu(GPU, driver=None))
    assert device(core).since_s == 0


def test_an_inspection_that_finds_the_same_is_younger_and_changes_no_since() -> None:
    core = Core(gpu("23:00.0"))
    core.pass_time(30)
    before = device(core)
    core.inspect(GPU, gpu("23:00.0"))
    after = device(core)
    assert (before.inspected_s, after.inspected_s) == (30, 0)
    assert (before.since_s, after.since_s) == (30, 30)
    assert after.polled_s is not None
    assert after.polled_s <= 2


def test_the_last_calls_are_remembered_one_of_each_kind() -> None:
    core = Core(gpu("23:00.0"))
    assert device(core).calls == ()
    allocate(core, 1)
    core.pass_time(5)
    core.called(pre_start_call(GPU, token=2), gpu(GPU))
    core.pass_time(5)
    assert device(core).calls == (
        LastCallView("Allocate", 10, "", ()),
        LastCallView("PreStartContainer", 5, "", ()),
    )


def test_a_refusal_is_remembered_with_its_cause() -> None:
    core = Core(gpu("23:00.0"))
    held(core, QEMU)
    allocate(core, 1)
    (call,) = device(core).calls
    assert call.causes == ("HeldByOther",)
    assert "held by process 4711" in call.refused


def test_the_calls_about_a_function_that_is_gone_are_forgotten_with_the_next_one() -> None:
    core = Core(gpu("23:00.0"), gpu("24:00.0"))
    allocate(core, 1)
    core.inspect(GPU)
    allocate(core, 2, "0000:24:00.0")
    assert core.state.calls.last.keys() == {"0000:24:00.0"}


def test_views_of_the_same_facts_are_equal_but_for_their_ages() -> None:
    core = Core(gpu("23:00.0"), gpu("24:00.0", driver="nvidia"))
    allocate(core, 1)
    core.pass_time(60)
    before, ageless = view_of(core.state, core.at), view_of(core.state, AGELESS)
    core.pass_time(60)
    assert view_of(core.state, core.at) != before
    assert view_of(core.state, AGELESS) == ageless
    held(core, QEMU)
    assert view_of(core.state, AGELESS) != ageless


def test_the_wire_changes_nothing_of_times() -> None:
    core = Core(gpu("23:00.0"))
    held(core, QEMU)
    allocate(core, 1)
    view = view_of(core.state, core.at)
    assert received(view).view == view
