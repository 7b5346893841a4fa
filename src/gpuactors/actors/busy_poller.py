"""The busy poller: polls which IOMMU groups are in use when the core requests it, and posts the result.

The core decides when to poll, and which groups. One poll at a time: it has a deadline of its own, and the core requests
no other before its result.
"""

from __future__ import annotations

from contextlib import suppress

import trio

from gpuactors.actors.raises_only import raises_only
from gpuactors.concurrency.each_once import each_once, only
from gpuactors.concurrency.latest import LatestReader
from gpuactors.core.events import Event
from gpuactors.core.events.host import GroupsObserved, SomeGroupsObserved
from gpuactors.core.reports.snapshot import PollWanted
from gpuactors.core.values.model import GroupUse
from gpuactors.ports.errors import HostError
from gpuactors.ports.node import UseReader


async def run(wanted: LatestReader[PollWanted], use: UseReader, inbox: trio.MemorySendChannel[Event]) -> None:
    """Runs until the cell is closed."""

    async def poll(_: None, number: int) -> Event:
        now, uses = wanted.value, tuple[GroupUse, ...]()
        with suppress(HostError), raises_only(HostError, "busy_poller"):
            uses = await use.observe(now.targets, whole=now.whole)
        return (GroupsObserved if now.whole else SomeGroupsObserved)(number, uses)

    await each_once(wanted, lambda now: only(now.poll), poll, inbox)
