"""A deadline that a late loop does not end."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from gpuactors.concurrency.patience import Patience


async def test_what_does_not_end_is_given_up_in_time(autojump_clock: MockClock) -> None:
    began = trio.current_time()
    assert not await Patience(5.0).ends(trio.Event())
    assert trio.current_time() - began == pytest.approx(5.0)


async def test_several_waits_have_one_patience(autojump_clock: MockClock) -> None:
    began, patience, first = trio.current_time(), Patience(5.0), trio.Event()

    async def end_first() -> None:
        await trio.sleep(2.0)
        first.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(end_first)
        assert await patience.ends(first)
    assert not await patience.ends(trio.Event())
    assert trio.current_time() - began == pytest.approx(5.0, abs=0.5)
    assert not await patience.ends(trio.Event())
    assert await patience.ends(first), "what is over needs none"


async def test_a_loop_that_is_late_costs_one_step(mock_clock: MockClock) -> None:
    over, ended = trio.Event(), list[bool]()

    async def wait() -> None:
        ended.append(await Patience(5.0).ends(over))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        mock_clock.jump(1000.0)
        await trio.testing.wait_all_tasks_blocked()
        assert ended == []
        over.set()
    assert ended == [True]
