"""An actor of compute domains that runs against a fake API server, by the daemon's own client: its orders, and what it
posts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import trio
from trio.testing import wait_all_tasks_blocked

from gpuactors.concurrency.latest import Latest
from gpuactors.core.domains.outputs import NO_DOMAINS_WANTED, DomainsWanted
from gpuactors.core.events import Event
from gpuactors.core.events.domains import DomainsTouched, NodeTouched
from tests.kube.cluster import Cluster, cluster


@dataclass
class DomainActor:
    """One that runs, and its server."""

    at: Cluster
    inbox: trio.MemoryReceiveChannel[Event]
    wanted: Latest[DomainsWanted] = field(default_factory=lambda: Latest(NO_DOMAINS_WANTED))
    unwatched: list[str] = field(default_factory=list)

    async def posted(self) -> list[Event]:
        """What came since the last time, when nothing runs any more."""
        await wait_all_tasks_blocked(0.001)
        found = []
        while self.inbox.statistics().current_buffer_used:
            found.append(self.inbox.receive_nowait())
        return found

    async def answers(self, wanted: DomainsWanted) -> list[Event]:
        """What is posted for an order; hints left out."""
        self.wanted.set(wanted)
        return without_hints(await self.posted())


A = TypeVar("A", bound=DomainActor)


@asynccontextmanager
async def running(
    kind: Callable[[Cluster, trio.MemoryReceiveChannel[Event]], A],
    run: Callable[[A, trio.MemorySendChannel[Event]], Awaitable[None]],
) -> AsyncIterator[A]:
    """The actor, while it runs."""
    send, receive = trio.open_memory_channel[Event](100)
    async with cluster() as at, trio.open_nursery() as nursery:
        found = kind(at, receive)
        nursery.start_soon(run, found, send)
        yield found
        nursery.cancel_scope.cancel()


def without_hints(events: list[Event]) -> list[Event]:
    """Those that answer an order."""
    return [event for event in events if not isinstance(event, DomainsTouched | NodeTouched)]
