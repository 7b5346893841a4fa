"""The asyncio look-alikes: what grpclib relies on, and the one difference that is meant."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from gpuactors.grpc_trio.primitives import Event


@pytest.mark.trio
async def test_set_event_does_not_block_nor_yield() -> None:
    event = Event()
    event.set()
    with trio.testing.assert_no_checkpoints():
        assert await event.wait() is True


@pytest.mark.trio
async def test_set_wakes_every_waiter() -> None:
    event, woken = Event(), []

    async def wait(number: int) -> None:
        await event.wait()
        woken.append(number)

    async with trio.open_nursery() as nursery:
        for number in range(3):
            nursery.start_soon(wait, number)
        await trio.testing.wait_all_tasks_blocked()
        event.set()
    assert sorted(woken) == [0, 1, 2]


@pytest.mark.trio
async def test_waiter_looks_again_when_the_event_was_cleared_meanwhile() -> None:
    """Of two that wait for room, the first may use it up: the second must go on waiting."""
    event, woken = Event(), []

    async def wait_and_use_up(number: int) -> None:
        await event.wait()
        event.clear()
        woken.append(number)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait_and_use_up, 1)
        nursery.start_soon(wait_and_use_up, 2)
        await trio.testing.wait_all_tasks_blocked()
        event.set()
        await trio.testing.wait_all_tasks_blocked()
        assert len(woken) == 1
        event.set()
    assert sorted(woken) == [1, 2]
