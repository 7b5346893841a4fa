"""The latest-value cell: a writer that never waits, readers that never miss the last value."""

from __future__ import annotations

import pytest
import trio
import trio._core._run
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from gpuactors.concurrency.latest import Latest


async def test_a_new_reader_gets_the_present_value_at_once() -> None:
    cell = Latest(1)
    cell.set(2)
    with trio.fail_after(1):
        assert await cell.subscribe().receive() == 2


async def test_a_reader_gives_others_a_place_of_their_own() -> None:
    cell = Latest("first")
    reader = cell.subscribe()
    assert await reader.receive() == "first"
    with trio.fail_after(1):
        assert await reader.subscribe().receive() == "first", "not had by this one"
    cell.set("second")
    assert reader.version == cell.version > reader.seen
    with trio.fail_after(1):
        assert await reader.receive() == "second", "nothing was had in its place"


async def test_every_reader_gets_each_value_that_it_waits_for(autojump_clock: MockClock) -> None:
    cell = Latest(0)
    got: list[list[int]] = [[], []]

    async def read(which: int) -> None:
        async for value in cell.subscribe():
            got[which].append(value)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read, 0)
        nursery.start_soon(read, 1)
        for value in (1, 2, 3):
            await wait_all_tasks_blocked()
            cell.set(value)
        await wait_all_tasks_blocked()
        cell.close()
    assert got == [[0, 1, 2, 3], [0, 1, 2, 3]]


async def test_an_equal_value_wakes_nobody() -> None:
    cell = Latest((1, 2))
    reader = cell.subscribe()
    await reader.receive()
    cell.set((1, 2))
    with trio.move_on_after(0) as scope:
        await reader.receive()
    assert scope.cancelled_caught


async def test_what_is_no_news_wakes_nobody_and_is_the_value() -> None:
    cell = Latest(2, lambda before, now: now > before)
    reader = cell.subscribe()
    assert await reader.receive() == 2
    with trio.move_on_after(0.01) as waiting:
        cell.set(1)
        await reader.receive()
    assert waiting.cancelled_caught
    assert (cell.value, reader.value) == (1, 1)
    with trio.fail_after(1):
        cell.set(2)
        assert await reader.receive() == 2, "more than the one before"


async def test_a_cancelled_receive_loses_nothing() -> None:
    cell = Latest(0)
    reader = cell.subscribe()
    await reader.receive()
    with trio.move_on_after(0):
        await reader.receive()
    cell.set(1)
    with trio.fail_after(1):
        assert await reader.receive() == 1


async def test_a_closed_cell_gives_its_last_value_and_then_ends() -> None:
    cell = Latest(0)
    reader = cell.subscribe()
    await reader.receive()
    cell.set(7)
    cell.close()
    assert [value async for value in reader] == [7]
    with pytest.raises(trio.EndOfChannel):
        await reader.receive()
    with pytest.raises(trio.ClosedResourceError):
        cell.set(8)
    assert cell.subscribe().value == 7


def test_under_any_schedule_the_last_value_arrives_and_values_only_go_forward() -> None:
    @settings(max_examples=200, deadline=None, database=None)
    @given(st.integers(0, 2**32 - 1), st.lists(st.integers(0, 3), max_size=20))
    def check(seed: int, pauses: list[int]) -> None:
        trio._core._run._r.seed(seed)
        trio.run(_race, pauses, clock=MockClock(autojump_threshold=0))

    check()


async def _race(pauses: list[int]) -> None:
    cell = Latest(0)
    got: list[list[int]] = [[], [], []]

    async def read(which: int) -> None:
        async for value in cell.subscribe():
            got[which].append(value)
            for _ in range(which):
                await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        for which in range(len(got)):
            nursery.start_soon(read, which)
        for number, pause in enumerate(pauses, start=1):
            cell.set(number)
            for _ in range(pause):
                await trio.lowlevel.checkpoint()
        cell.close()
    for values in got:
        assert values[-1] == len(pauses)
        assert values == sorted(set(values))
