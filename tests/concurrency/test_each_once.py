"""The loop of an actor that carries out numbered requests."""

from __future__ import annotations

import gc
import weakref
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import trio
from trio.testing import wait_all_tasks_blocked

from gpuactors.concurrency.each_once import each_once, only
from gpuactors.concurrency.latest import Latest
from tests.support.patience import patient

PATIENCE_S = patient(10.0)
Wanted = Mapping[str, int]


class Worker:
    """Carries out what is let through, and tells what it has begun."""

    def __init__(self, inbox: trio.MemoryReceiveChannel[tuple[str, int]]) -> None:
        self.wanted: Latest[Wanted] = Latest({})
        self.begun: list[tuple[str, int]] = []
        self._inbox = inbox
        self._gates: dict[str, trio.Event] = {}

    async def carry_out(self, key: str, number: int) -> tuple[str, int]:
        self.begun.append((key, number))
        if (gate := self._gates.get(key)) is not None:
            await gate.wait()
        return key, number

    def hang(self, key: str) -> None:
        self._gates[key] = trio.Event()

    def go_on(self, key: str) -> None:
        self._gates.pop(key).set()

    async def answers(self, **wanted: int) -> list[tuple[str, int]]:
        """What is answered when this is wanted, until nothing runs any more."""
        self.wanted.set(wanted)
        return await self.answered()

    async def answered(self) -> list[tuple[str, int]]:
        await wait_all_tasks_blocked()
        found = []
        while self._inbox.statistics().current_buffer_used:
            found.append(self._inbox.receive_nowait())
        return found


@asynccontextmanager
async def working() -> AsyncIterator[Worker]:
    send, receive = trio.open_memory_channel[tuple[str, int]](8)
    worker = Worker(receive)
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(each_once, worker.wanted.subscribe(), lambda now: now, worker.carry_out, send)
            yield worker
            nursery.cancel_scope.cancel()


async def test_a_number_is_carried_out_once_whatever_else_is_wanted() -> None:
    async with working() as worker:
        assert await worker.answers(a=1) == [("a", 1)]
        assert await worker.answers(a=1, b=2) == [("b", 2)]
        assert await worker.answers(a=3, b=2) == [("a", 3)]


async def test_one_that_hangs_delays_those_of_its_key_only_and_the_newest_follows() -> None:
    async with working() as worker:
        worker.hang("a")
        assert await worker.answers(a=1) == []
        assert await worker.answers(a=2, b=3) == [("b", 3)]
        assert await worker.answers(a=4, b=5) == [("b", 5)]
        worker.go_on("a")
        assert sorted(await worker.answered()) == [("a", 1), ("a", 4)]


async def test_one_that_is_no_longer_wanted_is_not_begun_and_one_that_has_begun_is_answered() -> None:
    async with working() as worker:
        worker.hang("a")
        assert await worker.answers(a=1) == []
        assert await worker.answers(a=2) == []
        assert await worker.answers() == []
        worker.go_on("a")
        assert await worker.answered() == [("a", 1)]
        assert worker.begun == [("a", 1)]


async def test_it_ends_with_the_cell_when_the_last_one_is_answered() -> None:
    wanted = Latest(7)
    send, receive = trio.open_memory_channel[int](8)

    async def carry_out(_: None, number: int) -> int:
        await trio.lowlevel.checkpoint()
        return number

    wanted.close()
    with trio.fail_after(PATIENCE_S):
        await each_once(wanted.subscribe(), only, carry_out, send)
    assert receive.receive_nowait() == 7


class Key:
    """A key that shows whether anybody still has it."""


async def test_a_key_that_is_not_wanted_any_more_is_forgotten() -> None:
    """Each claim is a key, and a daemon serves for months."""
    wanted: Latest[Mapping[object, int]] = Latest({})
    send, receive = trio.open_memory_channel[int](100)

    async def carry_out(key: object, number: int) -> int:
        await trio.lowlevel.checkpoint()
        return number

    keys, known = [Key() for _ in range(3)], list[weakref.ref[Key]]()
    known += map(weakref.ref, keys)
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(each_once, wanted.subscribe(), lambda now: now, carry_out, send)
            wanted.set(dict.fromkeys(keys, 1))
            await wait_all_tasks_blocked()
            assert receive.statistics().current_buffer_used == len(known)
            keys.clear()
            for last in ("another", "one more"):  # the loop itself has the last one that it looked at
                wanted.set({last: 1})
                await wait_all_tasks_blocked()
            gc.collect()
            assert [key() for key in known] == [None] * len(known)
            nursery.cancel_scope.cancel()
