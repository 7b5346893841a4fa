"""The domain reader: reads compute domains from the API server, and what the host says of IMEX, as they are wanted,
and posts that somebody has touched a ComputeDomain, as long as that is of interest: on an idle node nothing is watched.

Must not decide anything: that there is no such domain is an answer, and so is a server or a host that does not answer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import trio

from gpuactors.actors.api_retry import SharedReads, for_ever
from gpuactors.actors.raises_only import raises_only
from gpuactors.concurrency.each_once import each_once, only
from gpuactors.concurrency.latest import Latest, LatestReader
from gpuactors.core.domains.outputs import DomainReadWanted, DomainsWanted
from gpuactors.core.events import Event
from gpuactors.core.events.domains import DomainRead, DomainsTouched, ImexRead
from gpuactors.core.values.domain import Clique, ComputeDomain, DomainUid
from gpuactors.ports.claims import ImexReader
from gpuactors.ports.errors import HostError
from gpuactors.ports.kube import ApiError, DomainApi

DOMAINS_TOUCH_REST_S: Final = 0.5
"""The minimum interval between two hints that a ComputeDomain has changed, 0.5 s: while a claim waits, each leads to a
list of all of them."""


async def run(
    wanted: LatestReader[DomainsWanted],
    api: DomainApi,
    imex: ImexReader,
    inbox: trio.MemorySendChannel[Event],
    unwatched: Callable[[str], None],
) -> None:
    """Run for ever. `unwatched` gets the reason each time a ComputeDomain cannot be watched; it must not raise."""
    read = partial(_read, api=api, reads=SharedReads())
    look = partial(_look, imex=imex)
    async with trio.open_nursery() as nursery:
        changes = Latest(0)
        nursery.start_soon(_watch_all, wanted.subscribe(), api, changes, unwatched)
        nursery.start_soon(_post, changes.subscribe(), inbox)
        nursery.start_soon(
            each_once, wanted.subscribe(), lambda now: {r.number: r for r in now.domains}, read, inbox
        )
        nursery.start_soon(each_once, wanted.subscribe(), lambda now: only(now.imex), look, inbox)


async def _read(_: int, read: DomainReadWanted, api: DomainApi, reads: SharedReads) -> Event:
    async def both() -> tuple[ComputeDomain | None, Clique | None]:
        domain = await api.find_domain(read.uid)
        # A domain that is gone may have left its clique.
        has_clique = domain is not None and read.clique_id
        return domain, await api.read_clique(read.uid, read.clique_id, read.namespace) if has_clique else None

    try:
        with raises_only(ApiError, "domain_reader"):
            domain, clique = await reads.ask(both)
    except ApiError as exc:
        return DomainRead(read.number, read.uid, str(exc))
    return DomainRead(read.number, read.uid, domain, clique)


async def _look(_: None, number: int, imex: ImexReader) -> Event:
    try:
        with raises_only(HostError, "domain_reader"):
            facts = await imex.read()
    except HostError as exc:
        return ImexRead(number, str(exc))
    return ImexRead(number, facts)


async def _watch_all(
    wanted: LatestReader[DomainsWanted],
    api: DomainApi,
    changes: Latest[int],
    unwatched: Callable[[str], None],
) -> None:
    """Watch each domain as long as that is wanted, for ever."""
    watching: dict[DomainUid, trio.CancelScope] = {}

    async def watch(uid: DomainUid, scope: trio.CancelScope) -> None:
        with scope:
            await _watch(uid, api, changes, unwatched)

    async with trio.open_nursery() as nursery:
        async for now in wanted:
            for uid in watching.keys() - set(now.watched):
                watching.pop(uid).cancel()
            for uid in now.watched:
                if uid not in watching:
                    watching[uid] = trio.CancelScope()
                    nursery.start_soon(watch, uid, watching[uid])


async def _watch(
    uid: DomainUid, api: DomainApi, changes: Latest[int], unwatched: Callable[[str], None]
) -> None:
    """Count the changes that the watch shows, for ever."""

    async def follow() -> None:
        async with api.watch_domain(uid) as changed:
            async for _ in changed:
                changes.set(changes.value + 1)

    async def failed(error: ApiError) -> None:
        unwatched(str(error))

    await for_ever("domain_reader", follow, failed)


async def _post(changes: LatestReader[int], inbox: trio.MemorySendChannel[Event]) -> None:
    """Post one event per burst; each re-reads every domain that is waited for."""
    async for count in changes:
        if count:
            await inbox.send(DomainsTouched())
            await trio.sleep(DOMAINS_TOUCH_REST_S)
