"""The pod resources actor: reads kubelet's ledger when a read is outstanding, and says what it found.

When to read is the core's decision; here each number is read once, one after another. A read has its own deadline, and
what is asked for meanwhile conflates to the last number: a read begun after it was asked for answers it.
"""

from __future__ import annotations

import trio

from gpuactors.concurrency.latest import LatestReader
from gpuactors.core.events import Event, LedgerRead, LedgerUnreadable
from gpuactors.ports import KubeletError, LedgerReader


async def run(
    wanted: LatestReader[int | None], ledger: LedgerReader, inbox: trio.MemorySendChannel[Event]
) -> None:
    """Runs for ever."""
    done = 0
    async for number in wanted:
        if number is not None and number > done:
            await _read(number, ledger, inbox)
            done = number


async def _read(number: int, ledger: LedgerReader, inbox: trio.MemorySendChannel[Event]) -> None:
    try:
        contents = await ledger.read()
    except KubeletError as exc:
        await inbox.send(LedgerUnreadable(number, str(exc)))
    else:
        await inbox.send(
            LedgerRead(number, contents.source, contents.entries, contents.claims, contents.settling)
        )
