"""The domain reader against a fake API server, by the daemon's own client, and a host of files."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

import trio
from trio.testing import MockClock

from gpuactors.actors import domain_reader
from gpuactors.actors.api_retry import API_LOST_S
from gpuactors.actors.domain_reader import DOMAINS_TOUCH_REST_S
from gpuactors.core.domains.outputs import DomainReadWanted, DomainsWanted
from gpuactors.core.events import Event
from gpuactors.core.events.domains import (
    DomainRead,
    DomainsTouched,
    ImexRead,
)
from gpuactors.core.values.domain import Clique, ComputeDomain, DomainUid, ImexFacts
from gpuactors.kube.client import API_REQUEST_S
from gpuactors.ports.errors import HostError
from gpuactors_simulation.kube.server import ApiFault
from tests.actors.domain_actor import DomainActor, running, without_hints
from tests.kube.cluster import NAMESPACE, NODE

CLIQUE = "3f1c2a10-0000-4000-8000-00000000000a.7"
NOBODYS = DomainUid("11111111-2222-4333-8444-555555555555")


class Imex:
    """Implements `ports.claims.ImexReader`: says what it is told to."""

    def __init__(self) -> None:
        self.facts = ImexFacts(channel_major=236, clique_id=CLIQUE)
        self.broken = ""
        self.reads = 0

    async def read(self) -> ImexFacts:
        """As `ports.claims.ImexReader.read`."""
        await trio.lowlevel.checkpoint()
        self.reads += 1
        if self.broken:
            raise HostError(self.broken)
        return self.facts


@dataclass
class Reader(DomainActor):
    """A domain reader that runs, its server and its host."""

    imex: Imex = field(default_factory=Imex)

    def domain(self, namespace: str, name: str = "training") -> DomainUid:
        return DomainUid(self.at.server.add_domain(namespace, name)["metadata"]["uid"])


def reader() -> AbstractAsyncContextManager[Reader]:
    async def run(at: Reader, inbox: trio.MemorySendChannel[Event]) -> None:
        await domain_reader.run(at.wanted.subscribe(), at.at.domains, at.imex, inbox, at.unwatched.append)

    return running(Reader, run)


def of(*reads: DomainReadWanted, imex: int = 0) -> DomainsWanted:
    return DomainsWanted(domains=reads, imex=imex)


def watching(*uids: DomainUid) -> DomainsWanted:
    return DomainsWanted(watched=uids)


# --- orders -----------------------------------------------------------------------------------------------


async def test_a_domain_and_its_clique_are_read_once_for_each_number(autojump_clock: MockClock) -> None:
    async with reader() as at:
        uid = at.domain("team-a")
        at.at.server.set_domain_nodes("team-a", "training", {"node-2": "Ready"})
        at.at.server.set_clique(NAMESPACE, uid, CLIQUE, {NODE: "Ready"})
        domain = ComputeDomain(uid, "training", "team-a", frozenset({"node-2"}))
        wanted = DomainReadWanted(1, uid, CLIQUE, NAMESPACE)
        assert await at.answers(of(wanted)) == [DomainRead(1, uid, domain, Clique(frozenset({NODE})))]
        assert await at.answers(of(wanted, imex=2)) == [ImexRead(2, at.imex.facts)]
        assert await at.answers(of(DomainReadWanted(3, uid, CLIQUE, NAMESPACE))) == [
            DomainRead(3, uid, domain, Clique(frozenset({NODE})))
        ]


async def test_without_a_fabric_or_a_domain_no_clique_is_asked_for(autojump_clock: MockClock) -> None:
    async with reader() as at:
        uid = at.domain("team-a")
        at.at.server.set_clique(NAMESPACE, NOBODYS, CLIQUE, {NODE: "Ready"})
        domain = ComputeDomain(uid, "training", "team-a")
        await at.posted()
        at.at.asked()
        assert await at.answers(of(DomainReadWanted(1, uid, ""))) == [DomainRead(1, uid, domain)]
        assert await at.answers(of(DomainReadWanted(2, NOBODYS, CLIQUE))) == [DomainRead(2, NOBODYS, None)]
        assert at.at.asked() == ["GET computedomains"] * 3, "looked for and read, and looked for in vain"


async def test_two_domains_are_read_beside_each_other(autojump_clock: MockClock) -> None:
    async with reader() as at:
        one, two = at.domain("team-a"), at.domain("team-b")
        await at.posted()
        at.at.server.order(ApiFault.HANGS, method="GET")
        found = await at.answers(of(DomainReadWanted(1, one, ""), DomainReadWanted(2, two, "")))
        assert len(found) == 1, "one read hangs, and the other one is answered"
        await trio.sleep(API_REQUEST_S)
        (late,) = without_hints(await at.posted())
        assert isinstance(late, DomainRead)
        assert "did not answer in 10 s" in str(late.domain)
        assert {event.uid for event in (*found, late) if isinstance(event, DomainRead)} == {
            one,
            two,
        }


async def test_a_server_or_a_host_that_does_not_say_is_told_with_its_reason(
    autojump_clock: MockClock,
) -> None:
    async with reader() as at:
        uid = at.domain("team-a")
        await at.posted()
        at.at.server.order(ApiFault.FORBIDDEN, method="GET")
        (failed,) = await at.answers(of(DomainReadWanted(1, uid, CLIQUE)))
        assert isinstance(failed, DomainRead)
        assert (failed.number, failed.uid, "RBAC" in str(failed.domain)) == (1, uid, True)
        at.imex.broken = "a read hangs"
        assert await at.answers(of(imex=2)) == [ImexRead(2, "a read hangs")]
        at.imex.broken = ""
        assert await at.answers(of(imex=3)) == [ImexRead(3, at.imex.facts)]
        assert at.imex.reads == 2


async def test_a_clique_that_cannot_be_read_is_no_domain_without_one(autojump_clock: MockClock) -> None:
    async with reader() as at:
        uid = at.domain("team-a")
        at.at.server.set_clique(NAMESPACE, uid, CLIQUE, {NODE: "Ready"})
        (kinds,) = [at.at.server.kinds]
        at.at.server.kinds = tuple(kind for kind in kinds if kind.plural != "computedomaincliques")
        (failed,) = await at.answers(of(DomainReadWanted(1, uid, CLIQUE)))
        assert isinstance(failed, DomainRead)
        assert "could not read the ComputeDomainClique" in str(failed.domain)


# --- the watch --------------------------------------------------------------------------------------------


async def test_many_changes_at_once_are_one_hint_and_the_last_one_is_not_missed(
    autojump_clock: MockClock,
) -> None:
    async with reader() as at:
        uids = [at.domain("team-a", f"d-{number}") for number in range(20)]
        at.wanted.set(watching(*uids))
        first = await at.posted()
        assert first == [DomainsTouched()]
        at.at.server.set_domain_nodes("team-a", "d-0", {NODE: "Ready"})
        at.at.server.delete_domain("team-a", "d-1")
        await trio.sleep(DOMAINS_TOUCH_REST_S)
        assert await at.posted() == [DomainsTouched()]
        await trio.sleep(3600.0)
        assert await at.posted() == []


async def test_a_domain_that_changes_all_the_time_is_a_hint_twice_a_second(
    autojump_clock: MockClock,
) -> None:
    async with reader() as at:
        at.wanted.set(watching(at.domain("team-a")))
        await at.posted()
        began = trio.current_time()
        hints = 0
        while trio.current_time() < began + 10.0:
            at.at.server.set_domain_nodes("team-a", "training", {NODE: f"{trio.current_time()}"})
            hints += len(await at.posted())
            await trio.sleep(0.01)
        assert 15 <= hints <= 10.0 / DOMAINS_TOUCH_REST_S + 1


async def test_a_watch_that_fails_is_told_and_begun_again_with_a_hint(autojump_clock: MockClock) -> None:
    async with reader() as at:
        at.wanted.set(watching(uid := at.domain("team-a")))
        await at.posted()
        at.at.server.go_away()
        at.at.server.set_domain_nodes("team-a", "training", {NODE: "Ready"})
        await at.posted()
        assert [reason.partition(":")[0] for reason in at.unwatched] == [
            f"could not watch the ComputeDomain with UID {uid}"
        ]
        at.at.server.away = False
        await trio.sleep(API_LOST_S)
        assert await at.posted() == [DomainsTouched()]


async def test_only_a_domain_that_something_waits_for_is_watched(autojump_clock: MockClock) -> None:
    """An idle node asks for nothing, whatever the domains of other nodes do."""
    async with reader() as at:
        ours, theirs = at.domain("team-a"), at.domain("team-b")
        await trio.sleep(3600.0)
        assert (at.at.asked(), await at.posted()) == ([], [])
        at.wanted.set(watching(ours))
        assert await at.posted() == [DomainsTouched()]
        assert at.at.asked() == ["GET computedomains", "WATCH computedomains"]
        at.at.server.set_domain_nodes("team-b", "training", {NODE: "Ready"})
        await trio.sleep(1.0)
        assert await at.posted() == []
        at.wanted.set(watching(ours, theirs))
        assert await at.posted() == [DomainsTouched()]
        at.wanted.set(watching(theirs))
        await at.posted()
        at.at.server.set_domain_nodes("team-a", "training", {NODE: "Ready"})
        await trio.sleep(1.0)
        assert await at.posted() == [], "nothing waits for it any more"
        at.wanted.set(watching())
        await at.posted()
        assert at.at.api.connections == 0
