"""Which groups are polled: all of them in turn, and at once those that somebody waits for, alone."""

from __future__ import annotations

import math

import pytest

from gpuactors.core.events.daemon import Ticked
from gpuactors.core.events.deviceplugin import CallAbandoned
from gpuactors.core.events.host import (
    GroupsObserved,
    HostScanned,
    SomeGroupsObserved,
)
from gpuactors.core.host.usage import POLL_S
from gpuactors.core.reports.snapshot import project
from gpuactors.core.values.effects import Granted
from gpuactors.core.values.model import Holder, PciFunction, Token
from tests.core.builders import A, B, C, Core, allocate_call, gpu

"""Each in the group with its bus's number."""
QEMU = Holder(4711, "qemu-system-x86", None)


def node(*functions: PciFunction) -> Core:
    """A node at rest between two polls, whose answers are the test's from now on."""
    core = Core(*(functions or (gpu(A), gpu(B), gpu(C))))
    core.pass_time(1.0)
    assert core.state.host.polls.refresh.outstanding is None
    core.silent = True
    return core


def polled(core: Core) -> set[int]:
    """The groups that the outstanding poll is of."""
    return {target.group for target in project(core.state).inspections.poll.targets}


def answer(core: Core) -> None:
    """To the outstanding poll, of what it is of."""
    whole, number = project(core.state).inspections.poll.whole, core.state.host.polls.refresh.outstanding
    assert number is not None
    event = core.poll_event(number)
    assert isinstance(event, GroupsObserved)
    core.feed(event if whole else SomeGroupsObserved(event.poll, event.uses))


def test_an_allocate_has_the_groups_of_its_own_devices_polled_alone() -> None:
    core = node()
    core.feed(allocate_call(A, C))
    assert polled(core) == {1, 3}
    assert not project(core.state).inspections.poll.whole


def test_an_allocate_of_all_that_is_there_is_answered_after_one_poll() -> None:
    core = node()
    core.silent = False
    core.feed(allocate_call(A, B, C))
    for address in (A, B, C):
        assert core.state.host.polls.refresh.outstanding is None
        answers = core.answers(core.inspected(address, gpu(address)))
    assert isinstance(answers[0], Granted)


def test_a_poll_of_some_groups_changes_nothing_that_is_known_of_the_others() -> None:
    core = node()
    core.silent, core.holders = False, {2: (QEMU,)}
    core.pass_time(POLL_S)
    assert core.device_list()[B] == "Unhealthy"
    core.silent = True
    before = core.state
    core.feed(allocate_call(A))
    answer(core)
    now = core.state
    assert now.host.polls.seen[1].poll > before.host.polls.seen[1].poll
    assert [now.host.polls.groups[g] is before.host.polls.groups[g] for g in (2, 3)] == [True, True]
    assert now.kubelet.orphans is before.kubelet.orphans
    assert core.device_list()[B] == "Unhealthy"


def test_a_group_that_such_a_poll_was_not_of_is_still_polled_in_its_turn() -> None:
    core = node()
    due_at = core.state.host.polls.refresh.due_at
    assert due_at < math.inf
    core.feed(allocate_call(A))
    core.at += 0.5
    answer(core)
    assert core.state.host.polls.refresh.due_at == due_at
    core.feed(Ticked(), after_s=due_at - core.at)
    assert polled(core) == {1, 2, 3}


def test_callers_without_end_do_not_put_off_the_poll_of_all_groups() -> None:
    core = node()
    due_at, number = core.state.host.polls.refresh.due_at, 0
    while core.at < due_at:
        core.feed(allocate_call(A, token=(number := number + 1)))
        core.feed(
            allocate_call(A, token=(number := number + 1))
        )  # so that one more is wanted when the first is back
        assert polled(core) == {1}
        core.at += 0.3
        if core.at < due_at:
            answer(core)
    core.feed(Ticked())
    core.feed(allocate_call(A, token=number + 1))
    answer(core)
    assert polled(core) == {1, 2, 3}
    assert project(core.state).inspections.poll.whole


def test_calls_that_come_during_a_poll_share_the_next_one() -> None:
    core = node()
    core.feed(allocate_call(A, token=1))
    core.feed(allocate_call(B, token=2))
    core.feed(allocate_call(C, token=3))
    assert polled(core) == {1}
    answer(core)
    assert polled(core) == {2, 3}
    answer(core)
    assert core.state.host.polls.refresh.outstanding is None


def test_whose_driver_has_gone_stays_listed_until_a_poll_has_seen_its_own_group() -> None:
    core = node()
    core.feed(allocate_call(A))
    core.feed(CallAbandoned(Token(1)))  # which would hold the list
    core.inspect(B, gpu(B, driver=None, has_node=True))
    assert polled(core) == {1}, "the call's"
    answer(core)
    assert B in core.device_list(), "whether it is open is not known yet"
    assert polled(core) == {2}
    answer(core)
    assert B not in core.device_list()


def test_a_gpu_that_appears_has_its_own_group_polled_alone() -> None:
    core = node(gpu(A), gpu(B))
    core.inspect(C, gpu(C))
    assert polled(core) == {3}


def test_the_first_poll_of_a_node_is_of_all_groups() -> None:
    core = Core()
    core.silent = True
    core.feed(HostScanned(1, (gpu(A), gpu(B))))
    assert polled(core) == {1, 2}
    assert project(core.state).inspections.poll.whole


@pytest.mark.parametrize("seen", [False, True])
def test_a_group_that_comes_back_while_a_poll_is_under_way_goes_on_being_polled(seen: bool) -> None:
    """What that poll saw of it, there was no reason to poll any more; and nothing else was to be polled."""
    core = node(gpu(A))
    core.feed(Ticked(), after_s=POLL_S)
    under_way = core.poll_event(core.state.host.polls.refresh.outstanding or 0)
    core.inspect(A)
    core.feed(under_way if seen else GroupsObserved(core.state.host.polls.refresh.outstanding or 0, ()))
    core.inspect(A, gpu(A))
    assert polled(core) == {1}
