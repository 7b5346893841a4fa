"""The CDI watcher: posts that somebody has touched the CDI files of our claims. What is to be done is the core's."""

from __future__ import annotations

from contextlib import aclosing

import trio

from gpuactors import limits
from gpuactors.core.events import Event, FilesTouched
from gpuactors.ports import TouchedFiles


async def run(files: TouchedFiles, inbox: trio.MemorySendChannel[Event]) -> None:
    """Runs for ever."""
    async with aclosing(files.touches()) as touches:
        async for _ in touches:
            await inbox.send(FilesTouched())
            await trio.sleep(limits.CDI_TOUCH_REST_S)
