"""The sets reader: reads again, for ever, which sets of devices one source names, and posts each change.

Must not decide anything: that the sets cannot be read is an answer, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, final

import trio

from gpuactors.actors.raises_only import raises_only
from gpuactors.concurrency.post import post
from gpuactors.core.events import Event
from gpuactors.core.events.host import SetsObserved
from gpuactors.core.kinds.sets import NO_SETS, SetSource
from gpuactors.ports.errors import HostError
from gpuactors.ports.node import SetsReader

SETS_REREAD_S: Final[Mapping[SetSource, float]] = {
    SetSource.OPERATOR: 10.0,
    SetSource.FABRIC_MANAGER: 60.0,
    SetSource.SWITCHES: 60.0,
}
"""The interval between two reads of a source, in seconds: after it a change counts. A read of the fabric manager starts
a program."""

EGM_REREAD_S: Final = 10.0
"""The same interval for the EGMs, of which the reads below miss a change only while uevents are off."""


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


@final
class EgmReads:
    """The reads of the EGMs. Beside the interval they are read again at each uevent of one, and before the result of an
    inspection or an act is posted: the list of an EGM's GPUs grows without a uevent when a GPU is bound, and what
    follows from that result may be the answer to an Allocate, or a claim's files. On a host without EGM nothing is ever
    posted.
    """

    def __init__(self, reader: SetsReader | None, inbox: trio.MemorySendChannel[Event]) -> None:
        """`reader`: None if EGMs are not read."""
        self._reader = reader
        self._inbox = inbox
        self._last = SetsObserved(SetSource.EGM, NO_SETS)
        self._changed = trio.Event()

    async def read(self) -> None:
        """Read them, and post a change."""
        if self._reader is None:
            return
        now = await observed(SetSource.EGM, self._reader)
        if now != self._last:
            self._last = now
            await post(self._inbox, now)

    def changed(self) -> None:
        """Have `run` read them soon."""
        self._changed.set()

    async def run(self) -> None:
        """Run for ever."""
        while True:
            with trio.move_on_after(EGM_REREAD_S):
                await self._changed.wait()
            self._changed = trio.Event()
            await self.read()
