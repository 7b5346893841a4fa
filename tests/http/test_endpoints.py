"""The routes without a socket, and when the address is left to a successor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import trio
from msgspec.structs import replace

from gpuactors import limits
from gpuactors.concurrency.latest import Latest
from gpuactors.core.state import NodeState
from gpuactors.core.step import initial_state
from gpuactors.core.values.effects import Answer
from gpuactors.core.values.model import Role
from gpuactors.http.endpoints import EndpointPorts, Routes, run
from gpuactors.ports.http import Answering, HttpError, HttpRequest
from gpuactors.ports.node import Step
from tests.core.builders import SETTINGS


@dataclass
class FakeServer:
    """Implements `ports.http.HttpServer`: serves nobody, and notes since when and until when."""

    is_local: bool = True
    refuses: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)

    crowd: int = 0
    """How many connections are turned away at once."""

    async def serve(self, answering: Answering, listening: object, turned_away: Callable[[], None]) -> None:
        if self.refuses:
            raise HttpError(self.refuses.pop(0))
        self.log.append("serves")
        for _ in range(self.crowd):
            turned_away()
        try:
            await trio.sleep_forever()
        finally:
            self.log.append("ends")


@dataclass
class FakeMeter:
    """Implements `ports.http.Meter`."""

    steps: int = 0
    closed: int = 0

    def called(self, method: str, seconds: float, answer: Answer | None) -> None: ...

    def stepped(self, step: Step) -> None: ...

    def restarted(self, actor: str) -> None: ...

    def turned_away(self) -> None:
        self.closed += 1


@dataclass
class FakeSockets:
    """Implements `ports.node.Reachable`."""

    silent: tuple[str, ...] = ()

    async def unreachable(self) -> tuple[str, ...]:
        return self.silent


@dataclass
class Found:
    """What the routes are given, and what came of it."""

    server: FakeServer = field(default_factory=FakeServer)
    meter: FakeMeter = field(default_factory=FakeMeter)
    sockets: FakeSockets = field(default_factory=FakeSockets)
    state: Latest[NodeState] = field(default_factory=lambda: Latest(initial_state(SETTINGS)))
    role: Latest[Role] = field(default_factory=lambda: Latest(Role.SERVING))
    waiting: int = 0
    problems: list[str] = field(default_factory=list)
    crowds: list[int] = field(default_factory=list)

    async def page(self, state: NodeState, at: float, inbox: int) -> bytes:
        return f"inbox {inbox}\n".encode()

    @property
    def ports(self) -> EndpointPorts:
        return EndpointPorts(
            server=self.server,
            state=self.state.subscribe(),
            role=self.role.subscribe(),
            meter=self.meter,
            page=self.page,
            reached_by=(self.sockets, FakeSockets()),
            inbox=lambda: self.waiting,
            debug=lambda state, at: b"{}",
            on_listening=lambda _: None,
            on_problem=self.problems.append,
            on_crowd=self.crowds.append,
        )

    async def get(self, path: str, *, is_from_here: bool = True) -> tuple[int, str]:
        answer = await Routes(self.ports).answer(HttpRequest(path, is_from_here))
        return answer.status, answer.body.decode()


async def test_readiness_is_that_of_the_core() -> None:
    status, text = await Found().get("/readyz")
    assert status == 503
    assert text.startswith("not ready:\n- the node's PCI functions have not been read yet\n- ")


async def test_a_deaf_socket_is_not_live() -> None:
    found = Found()
    assert await found.get("/livez") == (200, "live\n")
    found.sockets.silent = ("b hangs", "a is gone")
    assert await found.get("/livez") == (503, "not live:\n- a is gone\n- b hangs\n")


async def test_a_registry_that_takes_nothing_is_not_live_and_one_that_is_busy_is(
    autojump_clock: trio.testing.MockClock,
) -> None:
    found = Found(waiting=3)
    status, text = await found.get("/livez")
    assert (status, text) == (503, "not live:\n- the registry took no event in 0.8 s, and 3 wait for it\n")
    async with trio.open_nursery() as nursery:

        async def steps() -> None:
            await trio.sleep(limits.DIAL_OWN_S / 2)
            found.meter.steps += 1

        nursery.start_soon(steps)
        assert await found.get("/livez") == (200, "live\n")


async def test_the_state_is_shown_to_this_machine_only() -> None:
    found = Found()
    assert await found.get("/debug/state") == (200, "{}")
    assert (await found.get("/debug/state", is_from_here=False))[0] == 403
    assert (await found.get("/livez", is_from_here=False))[0] == 200
    found.server.is_local = False
    status, text = await found.get("/debug/state")
    assert (status, "loopback" in text) == (403, True)
    assert "/debug/state" not in (await found.get("/"))[1]


async def test_an_unknown_page_lists_those_that_there_are() -> None:
    status, text = await Found().get("/health")
    assert status == 404
    assert text.split()[-4:] == ["/metrics", "/livez", "/readyz", "/debug/state"]
    assert await Found(waiting=5).get("/metrics") == (200, "inbox 5\n")


async def test_an_address_that_cannot_be_had_is_told_once_for_each_reason_and_tried_again(
    autojump_clock: trio.testing.MockClock,
) -> None:
    found = Found(server=FakeServer(refuses=["taken", "taken", "other", "taken"]))
    with trio.move_on_after(10):
        await run(found.ports)
    assert found.problems == ["taken", "other", "taken"]
    assert found.server.log == ["serves", "ends"]


async def test_connections_that_are_turned_away_are_counted_each_and_logged_now_and_then(
    autojump_clock: trio.testing.MockClock,
) -> None:
    found = Found(server=FakeServer(crowd=500))
    with trio.move_on_after(1):
        await run(found.ports)
    assert (found.meter.closed, found.crowds) == (500, [1])
    assert found.server.log == ["serves", "ends"]


@pytest.mark.parametrize("is_local", [True, False])
async def test_a_local_address_is_left_to_the_successor_and_a_pods_own_is_not(
    autojump_clock: trio.testing.MockClock, is_local: bool
) -> None:
    found = Found(server=FakeServer(is_local))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run, found.ports)
        await trio.testing.wait_all_tasks_blocked()
        found.role.set(Role.HANDED_OVER)
        await trio.testing.wait_all_tasks_blocked()
        assert found.server.log == (["serves", "ends"] if is_local else ["serves"])
        found.role.set(Role.SERVING)  # the successor was lost
        await trio.testing.wait_all_tasks_blocked()
        assert found.server.log == (["serves", "ends", "serves"] if is_local else ["serves"])
        nursery.cancel_scope.cancel()


class Wakings(trio.abc.Instrument):
    """How often a task went on that is not the test's own."""

    def __init__(self) -> None:
        self.own = trio.lowlevel.current_task()
        self.count = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.count += task is not self.own


async def test_nobody_wakes_for_a_state_in_which_the_role_is_the_same(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """It was one waking for each of the registry's events: 50 here."""
    found, wakings = Found(), Wakings()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run, found.ports)
        await trio.testing.wait_all_tasks_blocked()
        trio.lowlevel.add_instrument(wakings)
        for number in range(50):
            state = found.state.value
            kubelet = replace(state.kubelet, missing=f"{number}")
            found.state.set(replace(state, kubelet=kubelet))
            found.role.set(found.state.value.daemon.role)
            await trio.testing.wait_all_tasks_blocked()
        trio.lowlevel.remove_instrument(wakings)
        assert wakings.count == 0
        nursery.cancel_scope.cancel()
