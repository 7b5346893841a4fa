"""The partition worker: reads and writes the file of intents, and runs the operator's command, one thing at a time.

Each number is done once. The worker tries a read or write of the file that failed again by itself, and so has a loop of
its own instead of `each_once`. Must not decide anything: whether an act may be done is in the order, and what it has
done is shown by the next query (ADR 0025).
"""

from __future__ import annotations

from typing import Final

import trio

from gpuactors.actors.raises_only import raises_only
from gpuactors.concurrency.latest import LatestReader
from gpuactors.core.events import Event
from gpuactors.core.events.partitions import (
    PartitionActDone,
    PartitionEvent,
    PartitionIntentsRead,
    PartitionIntentsUnwritten,
    PartitionIntentsWritten,
    PartitionQueryFailed,
    PartitionsQueried,
)
from gpuactors.core.partitions.outputs import IntentsWanted, PartitionAct, PartitionsWanted
from gpuactors.ports.errors import HostError, StateFileError
from gpuactors.ports.partitions import FabricManager, PartitionIntentsFile

INTENTS_RETRY_S: Final = 5.0
"""The pause before a read or write of the file of intents is tried again."""

_NAME: Final = "partition_worker"


async def run(
    wanted: LatestReader[PartitionsWanted],
    file: PartitionIntentsFile,
    manager: FabricManager,
    inbox: trio.MemorySendChannel[Event],
) -> None:
    """Run for ever."""
    loaded, written, acted, queried = False, 0, 0, 0
    while True:
        now = wanted.value
        loaded = loaded and now.load
        event: PartitionEvent
        if now.load and not loaded:
            event = await _read(file)
            loaded = isinstance(event, PartitionIntentsRead)
        elif (content := now.file) is not None and content.number > written:
            event = await _written(file, content)
            written = content.number if isinstance(event, PartitionIntentsWritten) else written
        elif (act := now.act) is not None and act.number > acted:
            event, acted = await _acted(manager, act), act.number
        elif now.query is not None and now.query > queried:
            event, queried = await _queried(manager, now.query), now.query
        else:
            await wanted.receive()
            continue
        await inbox.send(event)
        if isinstance(event, PartitionIntentsUnwritten):
            await trio.sleep(INTENTS_RETRY_S)


async def _read(file: PartitionIntentsFile) -> PartitionIntentsRead | PartitionIntentsUnwritten:
    try:
        with raises_only(StateFileError, _NAME):
            return PartitionIntentsRead(await file.read())
    except StateFileError as exc:
        return PartitionIntentsUnwritten(str(exc))


async def _written(
    file: PartitionIntentsFile, content: IntentsWanted
) -> PartitionIntentsWritten | PartitionIntentsUnwritten:
    try:
        with raises_only(StateFileError, _NAME):
            await file.write(content.intents)
    except StateFileError as exc:
        return PartitionIntentsUnwritten(str(exc))
    return PartitionIntentsWritten(content.number)


async def _acted(manager: FabricManager, act: PartitionAct) -> PartitionActDone:
    try:
        with raises_only(HostError, _NAME):
            await manager.act(act.goal, act.id)
    except HostError as exc:
        return PartitionActDone(act.number, str(exc))
    return PartitionActDone(act.number, "")


async def _queried(manager: FabricManager, query: int) -> PartitionsQueried | PartitionQueryFailed:
    try:
        with raises_only(HostError, _NAME):
            return PartitionsQueried(query, await manager.read())
    except HostError as exc:
        return PartitionQueryFailed(query, str(exc))
