"""The partition worker does each thing that is wanted once, one at a time, and says what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from gpuactors.actors import partition_worker
from gpuactors.actors.partition_worker import INTENTS_RETRY_S
from gpuactors.concurrency.latest import Latest
from gpuactors.core.events import Event
from gpuactors.core.events.partitions import (
    PartitionActDone,
    PartitionIntentsRead,
    PartitionIntentsUnwritten,
    PartitionIntentsWritten,
    PartitionQueryFailed,
    PartitionsQueried,
)
from gpuactors.core.kinds.sets import KnownSets
from gpuactors.core.partitions.outputs import IntentsWanted, PartitionAct, PartitionsWanted
from gpuactors.core.values.model import DeviceKey
from gpuactors.core.values.partition import Goal, Intent, PartitionId
from gpuactors.ports.errors import HostError, StateFileError

P7: Final = PartitionId("7")
INTENT: Final = Intent(P7, frozenset({DeviceKey("0000:3b:00.0")}), Goal.ACTIVATE)
ACT: Final = PartitionAct(1, P7, Goal.ACTIVATE)


class Fake:
    """Implements `PartitionIntentsFile` and `FabricManager`, and notes what is done."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.error: Exception | None = None
        self.goes_on = trio.Event()
        self.goes_on.set()

    async def _do(self, what: str) -> None:
        self.done.append(what)
        await self.goes_on.wait()
        if self.error is not None:
            raise self.error

    async def write(self, intents: Sequence[Intent]) -> None:
        await self._do(f"write {len(intents)}")

    async def act(self, goal: Goal, partition: PartitionId) -> None:
        await self._do(f"{goal} {partition}")


class FakeFile(Fake):
    async def read(self) -> tuple[Intent, ...]:
        await self._do("read")
        return (INTENT,)


class FakeManager(Fake):
    async def read(self) -> KnownSets:
        await self._do("query")
        return KnownSets()


class Worker:
    """The worker with its outside."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.wanted: Latest[PartitionsWanted] = Latest(PartitionsWanted())
        self.file, self.manager = FakeFile(), FakeManager()
        post, self._inbox = trio.open_memory_channel[Event](100)
        nursery.start_soon(partition_worker.run, self.wanted.subscribe(), self.file, self.manager, post)

    async def events(self, **wanted: object) -> list[Event]:
        """What it says after these orders."""
        if wanted:
            self.wanted.set(PartitionsWanted(**wanted))  # type: ignore[arg-type]
        await trio.testing.wait_all_tasks_blocked()
        found = []
        while self._inbox.statistics().current_buffer_used:
            found.append(self._inbox.receive_nowait())
        return found


async def test_each_number_is_done_once(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        worker = Worker(nursery)
        assert await worker.events(load=True) == [PartitionIntentsRead((INTENT,))]
        content = IntentsWanted(1, (INTENT,))
        assert await worker.events(file=content) == [PartitionIntentsWritten(1)]
        assert await worker.events(act=ACT, query=1) == [
            PartitionActDone(1, ""),
            PartitionsQueried(1, KnownSets()),
        ]
        assert await worker.events(file=content, act=ACT, query=1) == []
        assert await worker.events(query=2) == [PartitionsQueried(2, KnownSets())]
        assert (worker.file.done, worker.manager.done) == (
            ["read", "write 1"],
            ["activate 7", "query", "query"],
        )
        assert await worker.events(load=True) == [PartitionIntentsRead((INTENT,))], "it serves again"
        nursery.cancel_scope.cancel()


async def test_one_thing_is_done_at_a_time(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        worker = Worker(nursery)
        worker.manager.goes_on = trio.Event()
        assert await worker.events(act=ACT, query=1) == []
        assert worker.manager.done == ["activate 7"], "no query before its end"
        worker.manager.goes_on.set()
        assert len(await worker.events()) == 2
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("error", [HostError("it hangs"), KeyError("a bug")])
async def test_a_command_that_fails_is_said_and_not_repeated(
    autojump_clock: MockClock, error: Exception
) -> None:
    async with trio.open_nursery() as nursery:
        worker = Worker(nursery)
        worker.manager.error = error
        done, queried = await worker.events(act=ACT, query=1)
        assert isinstance(done, PartitionActDone)
        assert done.problem
        assert isinstance(queried, PartitionQueryFailed)
        assert queried.reason == done.problem
        await trio.sleep(600)
        assert await worker.events() == [], "what follows is decided elsewhere"
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("error", [StateFileError("no space left"), KeyError("a bug")])
@pytest.mark.parametrize(
    "wanted", [{"load": True}, {"file": IntentsWanted(1, (INTENT,))}], ids=["read", "write"]
)
async def test_the_file_is_tried_again_and_nothing_else_is_done_before(
    autojump_clock: MockClock, wanted: dict[str, object], error: Exception
) -> None:
    async with trio.open_nursery() as nursery:
        worker = Worker(nursery)
        worker.file.error = error
        (failed,) = await worker.events(query=1, **wanted)
        assert isinstance(failed, PartitionIntentsUnwritten)
        assert worker.manager.done == []
        worker.file.error = None
        await trio.sleep(INTENTS_RETRY_S + 0.1)
        done = await worker.events()
        assert [type(event) for event in done] == [
            PartitionIntentsRead if "load" in wanted else PartitionIntentsWritten,
            PartitionsQueried,
        ]
        nursery.cancel_scope.cancel()
