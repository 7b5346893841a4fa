"""The CDI watcher: posts that somebody has touched the CDI files of our claims. What is to be done is the core's."""

from __future__ import annotations

from contextlib import aclosing
from typing import Final

import trio

from gpuactors.core.events import Event
from gpuactors.core.events.claims import FilesTouched
from gpuactors.core.values.claim import ClaimsOf
from gpuactors.ports.claims import TouchedFiles

CDI_TOUCH_REST_S: Final = 1.0
"""The minimum interval between two touches of CDI files that are posted, in seconds: a program that removes them again
and again must cost no more than a check a second, and must not delay the answer to a prepare, which waits for one of
milliseconds."""


async def run(files: TouchedFiles, inbox: trio.MemorySendChannel[Event], driver_kind: ClaimsOf) -> None:
    """Run for ever. `driver_kind`: the DRA driver whose claims they are."""
    async with aclosing(files.touches()) as touches:
        async for claims in touches:
            await inbox.send(FilesTouched(driver_kind, None if claims is None else tuple(sorted(claims))))
            await trio.sleep(CDI_TOUCH_REST_S)
