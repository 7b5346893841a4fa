"""The busy poller: polls which IOMMU groups are in use when the core requests it, and posts the result.

The core decides when to poll, and which groups; each number is polled once. One poll at a time: it has a deadline of
its own, and the core requests no other before its result.
"""

from __future__ import annotations

from contextlib import suppress

import trio

from gpuactors.actors.raises_only import raises_only
from gpuactors.concurrency.latest import LatestReader
from gpuactors.core.events import Event, GroupsObserved, SomeGroupsObserved
from gpuactors.core.reports.snapshot import PollWanted
from gpuactors.core.values.model import GroupUse
from gpuactors.ports.node import HostError, UseReader


async def run(wanted: LatestReader[PollWanted], use: UseReader, inbox: trio.MemorySendChannel[Event]) -> None:
    """Runs until the cell is closed."""
    done = 0
    async for now in wanted:
        if now.poll is None or now.poll <= done:
            continue
        done = now.poll
        uses: tuple[GroupUse, ...] = ()
        with suppress(HostError), raises_only(HostError, "busy_poller"):
            uses = await use.observe(now.targets, whole=now.whole)
        await inbox.send((GroupsObserved if now.whole else SomeGroupsObserved)(now.poll, uses))
