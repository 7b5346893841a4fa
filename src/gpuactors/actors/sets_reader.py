"""The sets reader: reads again, for ever, which sets of devices the operator names, and posts each change.

Must not decide anything: that the sets cannot be read is an answer, too.
"""

from __future__ import annotations

from typing import Final

import trio

from gpuactors.actors.raises_only import raises_only
from gpuactors.core.events import Event
from gpuactors.core.events.host import SetsObserved
from gpuactors.ports.errors import HostError
from gpuactors.ports.node import SetsReader

SETS_REREAD_S: Final = 10.0
"""The interval between two reads of the sets, in seconds: after it a changed file counts."""


async def run(reader: SetsReader, first: SetsObserved, inbox: trio.MemorySendChannel[Event]) -> None:
    """Run for ever. `first`: what was read last before."""
    last = first
    while True:
        await trio.sleep(SETS_REREAD_S)
        if (now := await observed(reader)) != last:
            last = now
            await inbox.send(now)


async def observed(reader: SetsReader) -> SetsObserved:
    """Read the sets once."""
    try:
        with raises_only(HostError, "sets_reader"):
            return SetsObserved(await reader.read())
    except HostError as exc:
        return SetsObserved(str(exc))
