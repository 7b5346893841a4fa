"""The CDI watcher: posts that somebody has touched the CDI files of our claims. What is to be done is the core's."""

from __future__ import annotations

from contextlib import aclosing

import trio

from gpuactors import limits
from gpuactors.core.events import Event
from gpuactors.core.events.claims import FilesTouched
from gpuactors.core.values.claim import ClaimsOf
from gpuactors.ports.claims import TouchedFiles


async def run(files: TouchedFiles, inbox: trio.MemorySendChannel[Event], of: ClaimsOf) -> None:
    """Runs for ever. `of`: whose claims they are."""
    async with aclosing(files.touches()) as touches:
        async for claims in touches:
            await inbox.send(FilesTouched(of, None if claims is None else tuple(sorted(claims))))
            await trio.sleep(limits.CDI_TOUCH_REST_S)
