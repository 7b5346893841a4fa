"""Posting: a value goes in at once while there is room, and waits for room otherwise."""

from __future__ import annotations

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from gpuactors.concurrency.post import post


async def test_other_tasks_get_no_turn_while_there_is_room() -> None:
    send, receive = trio.open_memory_channel[int](2)
    turns: list[int] = []

    async def other() -> None:
        turns.append(1)
        await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(other)
        await post(send, 1)
        await post(send, 2)
        assert turns == []
    assert (receive.receive_nowait(), receive.receive_nowait()) == (1, 2)


async def test_a_full_channel_is_waited_for() -> None:
    send, receive = trio.open_memory_channel[int](1)
    with trio.fail_after(1):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(post, send, 1)
            nursery.start_soon(post, send, 2)
            await wait_all_tasks_blocked()
            assert {await receive.receive(), await receive.receive()} == {1, 2}


async def test_a_cancelled_task_posts_nothing() -> None:
    send, receive = trio.open_memory_channel[int](1)
    with trio.CancelScope() as scope:
        scope.cancel()
        await post(send, 1)
    with pytest.raises(trio.WouldBlock):
        receive.receive_nowait()
