"""The busy poller: each number once, the answer to the number."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from gpuactors.actors import busy_poller
from gpuactors.concurrency.latest import Latest
from gpuactors.core.events import Event
from gpuactors.core.events.host import GroupsObserved, SomeGroupsObserved
from gpuactors.core.reports.snapshot import PollTarget, PollWanted
from gpuactors.core.values.model import GroupUse, PciAddress
from gpuactors.ports.node import Observation
from tests.support.patience import patient

TARGETS = (PollTarget(51, (PciAddress("0000:23:00.0"),), may_open=False),)
USES = (GroupUse(51, {PciAddress("0000:23:00.0"): 0}, frozenset(), None, None),)
PATIENCE_S = patient(10.0)


class FakeUse:
    """A use reader that answers when it may."""

    def __init__(self) -> None:
        self.asked: list[tuple[PollTarget, ...]] = []
        self.may_answer = trio.Event()
        self.may_answer.set()
        self.failure: Exception | None = None

    async def observe(self, targets: tuple[PollTarget, ...], *, whole: bool) -> tuple[GroupUse, ...]:
        self.asked.append(targets)
        await self.may_answer.wait()
        if self.failure is not None:
            raise self.failure
        return USES if targets else ()

    def begin(self, targets: tuple[PollTarget, ...]) -> Observation:
        raise NotImplementedError

    async def result(self, observation: Observation) -> tuple[GroupUse, ...]:
        raise NotImplementedError


@asynccontextmanager
async def polling(
    first: PollWanted,
) -> AsyncIterator[tuple[Latest[PollWanted], FakeUse, trio.MemoryReceiveChannel[Event]]]:
    wanted = Latest(first)
    use = FakeUse()
    post, inbox = trio.open_memory_channel[Event](8)
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(busy_poller.run, wanted.subscribe(), use, post)
            yield wanted, use, inbox
            nursery.cancel_scope.cancel()


def all_in(inbox: trio.MemoryReceiveChannel[Event]) -> list[Event]:
    events = []
    while True:
        try:
            events.append(inbox.receive_nowait())
        except trio.WouldBlock:
            return events


@pytest.mark.trio
async def test_nothing_wanted_nothing_done() -> None:
    async with polling(PollWanted(None, ())) as (wanted, use, inbox):
        await trio.testing.wait_all_tasks_blocked()
        wanted.set(PollWanted(None, TARGETS))
        await trio.testing.wait_all_tasks_blocked()
        assert (use.asked, all_in(inbox)) == ([], [])


@pytest.mark.trio
async def test_each_number_is_polled_once() -> None:
    async with polling(PollWanted(3, TARGETS)) as (wanted, use, inbox):
        assert await inbox.receive() == GroupsObserved(3, USES)
        wanted.set(PollWanted(3, ()))
        await trio.testing.wait_all_tasks_blocked()
        wanted.set(PollWanted(7, ()))
        assert await inbox.receive() == GroupsObserved(7, ())
        assert use.asked == [TARGETS, ()]


@pytest.mark.trio
async def test_a_poll_of_some_groups_says_that_it_is_one() -> None:
    async with polling(PollWanted(3, TARGETS, whole=False)) as (_, _, inbox):
        assert await inbox.receive() == SomeGroupsObserved(3, USES)


@pytest.mark.trio
async def test_one_poll_at_a_time_and_the_newest_wish_next() -> None:
    async with polling(PollWanted(None, ())) as (wanted, use, inbox):
        use.may_answer = trio.Event()
        for number in (1, 2, 5):
            wanted.set(PollWanted(number, TARGETS))
            await trio.testing.wait_all_tasks_blocked()
        assert len(use.asked) == 1
        use.may_answer.set()
        await trio.testing.wait_all_tasks_blocked()
        assert all_in(inbox) == [GroupsObserved(1, USES), GroupsObserved(5, USES)]


@pytest.mark.trio
async def test_it_ends_when_there_will_be_no_other_poll() -> None:
    wanted = Latest(PollWanted(1, TARGETS))
    post, inbox = trio.open_memory_channel[Event](8)
    wanted.close()
    with trio.fail_after(PATIENCE_S):
        await busy_poller.run(wanted.subscribe(), FakeUse(), post)
    assert all_in(inbox) == [GroupsObserved(1, USES)]


@pytest.mark.trio
@pytest.mark.parametrize("bug", [RuntimeError("a bug"), RecursionError(), OSError(5, "Input/output error")])
async def test_a_bug_costs_one_poll_which_has_seen_nothing(bug: Exception) -> None:
    async with polling(PollWanted(None, ())) as (wanted, use, inbox):
        use.failure = bug
        wanted.set(PollWanted(4, TARGETS))
        assert await inbox.receive() == GroupsObserved(4, ())
        wanted.set(PollWanted(5, TARGETS, whole=False))
        assert await inbox.receive() == SomeGroupsObserved(5, ())
        use.failure = None
        wanted.set(PollWanted(6, TARGETS))
        assert await inbox.receive() == GroupsObserved(6, USES)
