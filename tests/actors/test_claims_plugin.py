"""The actor of the DRA plugin: it serves, makes sockets again, tries again for ever, and ends in order."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import trio
from trio.testing import MockClock

from gpuactors import limits
from gpuactors.actors import claims_plugin
from gpuactors.concurrency.latest import Latest, LatestReader
from gpuactors.core.values.claim import DeviceHealth
from gpuactors.ports.claims import ClaimCaller, PluginStatus
from gpuactors.ports.errors import KubeletError
from tests.support.successors import FakeSuccessor

PATIENCE_S = 3600.0
NAMES = ("dra.sock", "reg.sock")


@dataclass
class FakeKubelet:
    """Serves, and notes what is done in which order. Implements `ports.claims.ClaimsKubelet` and
    `ports.claims.ClaimsEndpoint`."""

    async def unreachable(self) -> tuple[str, ...]:
        return ()

    successor: FakeSuccessor = field(default_factory=FakeSuccessor)
    names: tuple[str, ...] = NAMES
    done: list[str] = field(default_factory=list)
    serve_errors: list[Exception] = field(default_factory=list)
    mend_errors: list[Exception] = field(default_factory=list)
    gone: trio.Event = field(default_factory=trio.Event)
    grace_s: list[float] = field(default_factory=list)

    @asynccontextmanager
    async def serve_claims(
        self,
        caller: ClaimCaller,
        health: LatestReader[tuple[DeviceHealth, ...]],
        told: Callable[[PluginStatus], None],
    ) -> AsyncIterator[FakeKubelet]:
        if self.serve_errors:
            raise self.serve_errors.pop(0)
        self.done.append("serve")
        try:
            yield self
        finally:
            self.done.append("close")

    async def lost(self) -> None:
        await self.gone.wait()

    async def mend(self) -> None:
        if self.mend_errors:
            raise self.mend_errors.pop(0)
        self.gone = trio.Event()
        self.done.append("mend")

    async def withdraw(self, grace_s: float) -> None:
        await trio.lowlevel.checkpoint()
        self.done.append("withdraw")
        self.grace_s.append(grace_s)

    async def drain(self, grace_s: float) -> None:
        await trio.lowlevel.checkpoint()
        self.done.append("drain")


@dataclass
class Running:
    """The actor, and what it has said."""

    kubelet: FakeKubelet
    stop: trio.Event = field(default_factory=trio.Event)
    serving: list[tuple[str, ...]] = field(default_factory=list)
    problems: list[tuple[float, str]] = field(default_factory=list)
    failures: list[Exception] = field(default_factory=list)
    ended_at: float | None = None


@asynccontextmanager
async def running(kubelet: FakeKubelet) -> AsyncIterator[Running]:
    found = Running(kubelet)
    ports = claims_plugin.ClaimsPorts(
        kubelet=kubelet,
        caller=None,  # type: ignore[arg-type]  # nobody calls
        health=Latest[tuple[DeviceHealth, ...]](()).subscribe(),
        on_status=lambda _status: pytest.fail("nobody tells"),
        drain_s=lambda: 7.0,
        on_serving=found.serving.append,
        on_problem=lambda reason: found.problems.append((trio.current_time(), reason)),
        on_failure=lambda _name, exc: found.failures.append(exc),
    )

    async def run() -> None:
        await claims_plugin.run(ports, found.stop)
        found.ended_at = trio.current_time()

    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            yield found
            nursery.cancel_scope.cancel()


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 the mock clock jumps to what is next
            await trio.sleep(0.05)


async def test_it_serves_and_ends_in_order(autojump_clock: MockClock) -> None:
    """Deregistered first; then calls in flight may finish; then the sockets go."""
    kubelet = FakeKubelet()
    async with running(kubelet) as actor:
        await until(lambda: actor.serving == [NAMES])
        actor.stop.set()
        await until(lambda: "close" in kubelet.done)
        await trio.sleep(100)
    assert kubelet.done == ["serve", "withdraw", "drain", "close"], "and it is not served again"
    assert kubelet.grace_s == [7.0]


async def test_a_socket_that_is_gone_is_made_again(autojump_clock: MockClock) -> None:
    kubelet = FakeKubelet()
    async with running(kubelet) as actor:
        for times in (1, 2, 3):
            await until(lambda times=times: len(actor.serving) == times)  # type: ignore[misc]
            kubelet.gone.set()
        await until(lambda: kubelet.done == ["serve", "mend", "mend", "mend"])


async def test_what_cannot_be_made_is_said_and_tried_again_for_ever(autojump_clock: MockClock) -> None:
    kubelet = FakeKubelet(serve_errors=[KubeletError(f"no room {n}") for n in range(30)])
    async with running(kubelet) as actor:
        await until(lambda: actor.serving == [NAMES])
        assert [reason for _, reason in actor.problems] == [f"no room {n}" for n in range(30)]
        waits = [b - a for (a, _), (b, _) in zip(actor.problems, actor.problems[1:], strict=False)]
        assert waits[: len(limits.SERVE_BACKOFF_S)] == pytest.approx(limits.SERVE_BACKOFF_S)
        assert max(waits) == pytest.approx(limits.SERVE_BACKOFF_S[-1])


async def test_a_socket_that_cannot_be_made_again_leads_to_both_anew(autojump_clock: MockClock) -> None:
    kubelet = FakeKubelet(mend_errors=[KubeletError("taken")])
    async with running(kubelet) as actor:
        await until(lambda: len(actor.serving) == 1)
        kubelet.gone.set()
        await until(lambda: len(actor.problems) == 1)
        kubelet.gone = trio.Event()
        await until(lambda: len(actor.serving) == 2)
        assert kubelet.done == ["serve", "close", "serve"]


async def test_a_bug_is_reported_and_the_plugin_lives_on(autojump_clock: MockClock) -> None:
    kubelet = FakeKubelet(serve_errors=[RuntimeError("planted")])
    async with running(kubelet) as actor:
        await until(lambda: actor.serving == [NAMES])
        assert [str(failure) for failure in actor.failures] == ["planted"]
        assert not actor.problems


async def test_it_ends_while_it_waits_to_try_again(autojump_clock: MockClock) -> None:
    kubelet = FakeKubelet(serve_errors=[KubeletError("no room")] * 1000)
    async with running(kubelet) as actor:
        await until(lambda: len(actor.problems) == 10)
        stopped_at = trio.current_time()
        actor.stop.set()
        await trio.sleep(100)
        assert actor.ended_at == stopped_at, "at once"
        assert len(actor.problems) == 10
