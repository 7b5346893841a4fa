"""Supervision: restart what was unlucky, give up on what is broken, let cancellation pass."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from gpuactors.concurrency.supervise import ActorBrokenError, RestartPolicy, supervise

POLICY = RestartPolicy(max_failures=3, within_s=60.0, backoff_initial_s=1.0, backoff_max_s=4.0, jitter=0.0)


class Actor:
    """Fails a given number of times, then runs until it is cancelled."""

    def __init__(self, failures: int, lasts_s: float = 0.0) -> None:
        self.failures = failures
        self.lasts_s = lasts_s
        self.starts: list[float] = []

    async def __call__(self) -> None:
        self.starts.append(trio.current_time())
        await trio.sleep(self.lasts_s)
        if len(self.starts) <= self.failures:
            raise ValueError(f"failure {len(self.starts)}")
        await trio.sleep_forever()


async def test_failures_are_told_and_followed_by_growing_waits(autojump_clock: MockClock) -> None:
    actor, told = Actor(3), []
    begun = trio.current_time()
    with trio.move_on_after(30):
        await supervise(
            "watcher", actor, POLICY, lambda name, exc, wait_s: told.append((name, str(exc), wait_s))
        )
    assert told == [("watcher", f"failure {n}", wait_s) for n, wait_s in ((1, 1.0), (2, 2.0), (3, 4.0))]
    assert [at - begun for at in actor.starts] == pytest.approx([0, 1, 3, 7])


async def test_an_actor_that_fails_too_often_is_given_up(autojump_clock: MockClock) -> None:
    with pytest.raises(ActorBrokenError, match="watcher failed 4 times within 60 s, last: ValueError"):
        await supervise("watcher", Actor(99), POLICY, lambda *_: None)


async def test_failures_long_ago_do_not_count(autojump_clock: MockClock) -> None:
    actor = Actor(20, lasts_s=50.0)
    with trio.move_on_after(2000):
        await supervise("watcher", actor, POLICY, lambda *_: None)
    assert len(actor.starts) == 21


async def test_an_actor_that_returns_has_failed(autojump_clock: MockClock) -> None:
    async def returns() -> None:
        await trio.lowlevel.checkpoint()

    told: list[Exception] = []
    with trio.move_on_after(0.5):
        await supervise("watcher", returns, POLICY, lambda _name, exc, _wait_s: told.append(exc))
    assert "watcher returned" in str(told[0])


async def test_a_bug_that_is_no_exception_is_not_swallowed() -> None:
    async def dies() -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        await supervise("watcher", dies, POLICY, lambda *_: None)


async def test_what_fails_while_the_actor_is_cancelled_is_told_and_ends_nothing() -> None:
    """The daemon stops just when one task of an actor fails: else its process would end as by a bug."""

    async def fails_on_the_way_out() -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise ValueError("too late")

    async def actor() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fails_on_the_way_out)
            nursery.start_soon(trio.sleep_forever)

    told: list[Exception] = []
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(supervise, "inspector", actor, POLICY, lambda _n, exc, _s: told.append(exc))
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
    (failure,) = told
    assert isinstance(failure, ExceptionGroup)
    assert "too late" in str(failure.exceptions[0])


def test_waits_are_bounded_and_jittered_downwards() -> None:
    policy = RestartPolicy(max_failures=5, within_s=60.0, backoff_initial_s=0.1, backoff_max_s=10.0)
    waits = [policy.wait_s(failures) for failures in range(1, 2000)]
    assert all(0 < wait <= 10.0 for wait in waits)
    assert len(set(waits[100:])) > 1


async def test_a_shortage_is_waited_out_and_never_counts(autojump_clock: trio.testing.MockClock) -> None:
    """Issue 10, 4: with no descriptors left for some seconds an actor failed six times and took the process with it."""
    told: list[float] = []
    lives = trio.Event()

    async def actor() -> None:
        if len(told) < 20:
            raise OSError(24, "Too many open files")
        lives.set()
        await trio.sleep_forever()

    policy = RestartPolicy(max_failures=5, within_s=60, backoff_initial_s=0.1, backoff_max_s=10)
    with trio.fail_after(1000):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(
                supervise, "a", actor, policy, lambda _n, _e, wait_s: told.append(wait_s), lambda _: True
            )
            await lives.wait()
            nursery.cancel_scope.cancel()
    assert told == [10] * 20
