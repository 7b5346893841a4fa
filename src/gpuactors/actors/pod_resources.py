"""The pod resources actor: reads kubelet's ledger when a read is outstanding, and posts the result.

The core decides when to read. A read has its own deadline; requests that come meanwhile conflate to the last number,
which one read answers.
"""

from __future__ import annotations

import trio
from msgspec.structs import asdict, replace

from gpuactors.actors.raises_only import raises_only
from gpuactors.concurrency.each_once import each_once, only
from gpuactors.concurrency.latest import LatestReader
from gpuactors.core.events import Event
from gpuactors.core.events.kubelet import LedgerEvent, LedgerRead, LedgerUnreadable
from gpuactors.core.reports.snapshot import LedgerWanted
from gpuactors.ports.errors import HostError
from gpuactors.ports.node import CdiReader, LedgerError, LedgerQuestion, LedgerReader


async def run(
    wanted: LatestReader[LedgerWanted],
    ledger: LedgerReader,
    inbox: trio.MemorySendChannel[Event],
    cdi: CdiReader | None = None,
) -> None:
    """Run for ever. `cdi`: None where no claim has a GPU by a file."""

    async def once(_: None, number: int) -> Event:
        return await read(number, wanted.value, ledger, cdi)

    await each_once(wanted, lambda now: only(now.read), once, inbox)


async def read(
    number: int, wanted: LedgerWanted, ledger: LedgerReader, cdi: CdiReader | None = None
) -> LedgerEvent:
    """Read once; return the event. The CDI files are read last: a claim that kubelet lists has its file by then."""
    event = await _read(number, wanted, ledger)
    if cdi is None:
        return event
    try:
        with raises_only(HostError, "pod_resources"):
            specs = await cdi.read()
    except HostError:
        return event  # those of the last read are in effect
    return event if specs is None else replace(event, cdi=specs)


async def _read(number: int, wanted: LedgerWanted, ledger: LedgerReader) -> LedgerEvent:
    question = LedgerQuestion(wanted.resources, wanted.pods, wanted.lists)
    try:
        with raises_only(LedgerError, "pod_resources"):
            contents = await ledger.read(question)
    except LedgerError as exc:
        return LedgerUnreadable(number, str(exc), exc.file, exc.pods)
    return LedgerRead(number, **asdict(contents))
