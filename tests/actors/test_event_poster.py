"""The event poster against a fake API server, by the daemon's own client, on the mock clock."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import trio
from msgspec.structs import replace
from trio.testing import MockClock

from gpuactors import limits
from gpuactors.actors import event_poster
from gpuactors.actors.api_retry import API_BACKOFF_S
from gpuactors.actors.event_poster import EVENT_FORBIDDEN_TRIES, EVENT_LOOK_S
from gpuactors.concurrency.latest import Latest
from gpuactors.core.events.claims import PrepareAsked
from gpuactors.core.events.daemon import Ticked
from gpuactors.core.reports.event_series import EVENT_REFILL_S, Series
from gpuactors.core.reports.kube_events import KubeEvent, OurNode
from gpuactors.core.state import NodeState
from gpuactors.core.step import initial_state
from gpuactors.core.values.claim import ClaimsOf
from gpuactors.core.values.model import Token
from gpuactors.ports.kube import ApiRefused, Refusal
from gpuactors_simulation.kube.server import ApiFault
from tests.core.builders import SETTINGS, Core, gpu
from tests.core.gpus.claim_core import ClaimCore, allocated, name
from tests.kube.cluster import NODE, Cluster, cluster

GPU = "0000:01:00.0"
START = 1_795_348_800.0


@dataclass
class Posted:
    """A poster that runs, and its server."""

    at: Cluster
    state: Latest[NodeState] = field(default_factory=lambda: Latest(initial_state(SETTINGS)))
    problems: list[str] = field(default_factory=list)

    def events(self) -> list[tuple[str, str, int]]:
        """Object, reason and count of each event there is."""
        return [(e["involvedObject"]["name"], e["reason"], e["count"]) for e in self.at.server.events()]

    async def run(self) -> None:
        await event_poster.run(
            self.state.subscribe(),
            event_poster.PosterPorts(
                self.at.events, self.at.claims, self.problems.append, lambda: START + trio.current_time()
            ),
        )


@asynccontextmanager
async def poster(state: NodeState) -> AsyncIterator[Posted]:
    async with cluster() as at, trio.open_nursery() as nursery:
        found = Posted(at, Latest(state))
        nursery.start_soon(found.run)
        yield found
        nursery.cancel_scope.cancel()


def held() -> NodeState:
    """A GPU in the hands of a process that no pod has."""
    core = Core(gpu("01:00.0"))
    core.enabled[GPU] = 1
    core.pass_time(limits.LEDGER_QUIET_S)
    return core.state


async def test_a_fact_that_stands_is_one_event_and_is_repeated_while_it_lasts(
    autojump_clock: MockClock,
) -> None:
    async with poster(held()) as found:
        await trio.sleep(limits.EVENT_SETTLE_S - 1.0)
        assert found.events() == []
        await trio.sleep(2.0)
        assert found.events() == [(NODE, "HeldByOther", 1)]
        await trio.sleep(limits.EVENT_REPEAT_S - 5.0)
        assert found.events() == [(NODE, "HeldByOther", 1)]
        await trio.sleep(10.0)
        assert found.events() == [(NODE, "HeldByOther", 2)]
        (event,) = found.at.server.events()
        assert event["firstTimestamp"] < event["lastTimestamp"]
        assert len(found.at.server.requests) == 2
        assert found.problems == []


async def test_a_change_of_the_state_is_looked_at_and_what_went_is_not_told(
    autojump_clock: MockClock,
) -> None:
    async with poster(initial_state(SETTINGS)) as found:
        await trio.sleep(1000.0)
        found.state.set(held())
        await trio.sleep(limits.EVENT_SETTLE_S / 2)
        found.state.set(initial_state(SETTINGS))
        await trio.sleep(1000.0)
        assert not found.at.server.requests
        found.state.set(held())
        await trio.sleep(limits.EVENT_SETTLE_S + EVENT_LOOK_S + 0.1)
        assert found.events() == [(NODE, "HeldByOther", 1)]


async def test_a_claim_that_waits_is_told_to_each_of_its_pods(autojump_clock: MockClock) -> None:
    core = ClaimCore(gpu("01:00.0"))
    core.feed(Ticked())
    core.enabled[GPU] = 1
    async with poster(initial_state(SETTINGS)) as found:
        made = found.at.server.add_claim({"metadata": {"namespace": "default", "name": "one"}, "spec": {}})
        found.at.server.reserve_claim("default", "one", "vm-a", "vm-b")
        claim = name(uid=made["metadata"]["uid"])
        core.api["default/one"] = allocated(claim, GPU)
        core.feed(PrepareAsked(Token(1), claim, ClaimsOf.GPUS))
        found.state.set(core.state)
        await trio.sleep(limits.EVENT_SETTLE_S + EVENT_LOOK_S + 0.1)
        assert sorted(found.events()) == [
            (NODE, "HeldByOther", 1),
            ("vm-a", "HeldByOther", 1),
            ("vm-b", "HeldByOther", 1),
        ]


async def test_a_server_that_refuses_is_logged_once_and_asked_rarely(autojump_clock: MockClock) -> None:
    async with poster(held()) as found:
        found.at.server.order(ApiFault.FORBIDDEN, times=1000)
        await trio.sleep(limits.EVENT_SETTLE_S + 4 * limits.EVENT_AGAIN_S)
        assert len(found.problems) == 1
        assert "Grant its service account this verb" in found.problems[0]
        tries = len(found.at.server.requests) - EVENT_FORBIDDEN_TRIES
        assert 2 <= tries <= 5
        found.at.server.end_faults()
        await trio.sleep(limits.EVENT_AGAIN_S + API_BACKOFF_S[-1])
        assert found.events() == [(NODE, "HeldByOther", 1)]
        assert len(found.problems) == 1


async def test_a_server_that_has_not_read_its_roles_yet_gets_the_event_when_it_has(
    autojump_clock: MockClock,
) -> None:
    """An API server that has just started answers 403 for a moment: the event came 300 s later."""
    async with poster(held()) as found:
        found.at.server.order(ApiFault.FORBIDDEN, times=EVENT_FORBIDDEN_TRIES - 1)
        await trio.sleep(limits.EVENT_SETTLE_S + limits.EVENT_AGAIN_S / 2)
        assert found.events() == [(NODE, "HeldByOther", 1)]
        assert len(found.problems) == 1


@pytest.mark.parametrize("fault", [ApiFault.OVERLOADED, ApiFault.THROTTLED])
async def test_a_server_that_asks_for_patience_gets_the_event_after_it(
    autojump_clock: MockClock, fault: ApiFault
) -> None:
    """429 is no verdict about the event: it will be taken a moment later."""
    async with poster(held()) as found:
        found.at.server.order(fault)
        await trio.sleep(limits.EVENT_SETTLE_S + limits.EVENT_AGAIN_S / 2)
        assert found.events() == [(NODE, "HeldByOther", 1)]
        assert len(found.at.server.requests) == 2
        assert len(found.problems) == 1


async def test_a_server_that_is_away_gets_the_event_when_it_is_back(autojump_clock: MockClock) -> None:
    async with poster(held()) as found:
        found.at.server.go_away()
        await trio.sleep(600.0)
        assert len(found.problems) == 1
        found.at.server.away = False
        await trio.sleep(EVENT_REFILL_S + API_BACKOFF_S[-1])
        assert found.events() == [(NODE, "HeldByOther", 1)]


async def test_an_answer_that_is_lost_makes_no_second_event(autojump_clock: MockClock) -> None:
    async with poster(held()) as found:
        found.at.server.order(ApiFault.ANSWER_LOST, method="POST")
        await trio.sleep(limits.EVENT_SETTLE_S + 30.0)
        assert found.events() == [(NODE, "HeldByOther", 1)]
        assert [method for method, _ in found.at.server.requests] == ["POST", "POST", "PATCH"]


async def test_a_daemon_that_has_restarted_tells_nothing_twice(autojump_clock: MockClock) -> None:
    async with poster(held()) as found, trio.open_nursery() as nursery:
        await trio.sleep(100.0)
        nursery.start_soon(found.run)
        await trio.sleep(100.0)
        assert found.events() == [(NODE, "HeldByOther", 1)]
        nursery.cancel_scope.cancel()


async def test_what_was_forbidden_is_forgotten_with_its_fact(autojump_clock: MockClock) -> None:
    """Each has the name of a process in it, so there are ever new ones while the API server forbids them."""
    async with cluster() as at:
        ports = event_poster.PosterPorts(at.events, at.claims, lambda _: None, lambda: START)
        one = event_poster._Poster(ports)
        refused = ApiRefused("no", Refusal(403))
        for number in range(100):
            fact = KubeEvent(OurNode(), "HeldByOther", f"process {number}")
            one._told = replace(one._told, series={fact: Series(0.0)})
            one._failed(fact, refused)
        assert len(one._forbidden) <= 2
