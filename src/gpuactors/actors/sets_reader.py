"""The sets reader: reads again, for ever, which sets of devices one source names, and posts each change.

Must not decide anything: that the sets cannot be read is an answer, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import trio

from gpuactors.actors.raises_only import raises_only
from gpuactors.core.events import Event
from gpuactors.core.events.host import SetsObserved
from gpuactors.core.kinds.sets import SetSource
from gpuactors.ports.errors import HostError
from gpuactors.ports.node import SetsReader

SETS_REREAD_S: Final[Mapping[SetSource, float]] = {SetSource.OPERATOR: 10.0, SetSource.FABRIC_MANAGER: 60.0}
"""The interval between two reads of a source, in seconds: after it a change counts. A read of the fabric manager starts
a program."""


async def run(reader: SetsReader, first: SetsObserved, inbox: trio.MemorySendChannel[Event]) -> None:
    """Run for ever. `first`: what was read last before."""
    last = first
    while True:
        await trio.sleep(SETS_REREAD_S[first.source])
        if (now := await observed(first.source, reader)) != last:
            last = now
            await inbox.send(now)


async def observed(source: SetSource, reader: SetsReader) -> SetsObserved:
    """Read the sets once."""
    try:
        with raises_only(HostError, "sets_reader"):
            return SetsObserved(source, await reader.read())
    except HostError as exc:
        return SetsObserved(source, str(exc))
