"""Keeping one actor running: restart with backoff, give up when it fails too often."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable

import trio
from msgspec import Struct

from gpuactors.concurrency.jitter import shorter


class ActorReturnedError(Exception):
    """A long-lived actor returned; that is a failure like any other."""


class ActorBrokenError(Exception):
    """An actor failed more often than its policy allows. The process should end and be restarted."""


class RestartPolicy(Struct, frozen=True):
    """How often an actor may fail, and how long to wait before each restart."""

    max_failures: int | None
    """The number of failures allowed within `within_s`; None: any number."""
    within_s: float
    backoff_initial_s: float
    backoff_max_s: float
    jitter: float = 0.2
    """The random share of each wait, so that actors that failed together do not restart together."""

    def wait_s(self, failures: int) -> float:
        """Return the wait before the restart after `failures` failures in a row (1, 2, …)."""
        plain_s = min(self.backoff_max_s, self.backoff_initial_s * 2.0 ** min(failures - 1, 30))
        return shorter(plain_s, self.jitter)


async def supervise(
    name: str,
    actor: Callable[[], Awaitable[None]],
    policy: RestartPolicy,
    on_failure: Callable[[str, Exception, float], None],
    passes: Callable[[Exception], bool] = lambda _: False,
) -> None:
    """Run `actor` for ever; call `on_failure` with the name, the exception and the wait in seconds.

    Raises `ActorBrokenError` after more than `policy.max_failures` failures within `policy.within_s` seconds. A failure
    that `passes` (a shortage of descriptors) is retried after `backoff_max_s` and not counted. Only `Exception` is a
    failure; one while the actor is being cancelled is reported, and the cancellation goes on.
    """
    failed_at: deque[float] = deque()
    while True:
        try:
            await actor()
            raise ActorReturnedError(f"{name} returned; it should run for ever")
        except Exception as exc:
            if passes(exc):
                wait_s = policy.backoff_max_s
                on_failure(name, exc, wait_s)
                await trio.sleep(wait_s)
                continue
            now = trio.current_time()
            failed_at.append(now)
            while failed_at[0] < now - policy.within_s:
                failed_at.popleft()
            if policy.max_failures is not None and len(failed_at) > policy.max_failures:
                raise ActorBrokenError(
                    f"{name} failed {len(failed_at)} times within {policy.within_s:.0f} s, last: {exc!r}"
                ) from exc
            wait_s = policy.wait_s(len(failed_at))
            on_failure(name, exc, wait_s)
        except BaseExceptionGroup as group:
            cancelled, failed = group.split(trio.Cancelled)
            if cancelled is None or not isinstance(failed, ExceptionGroup):
                raise
            on_failure(name, failed, 0.0)
            raise cancelled from None
        await trio.sleep(wait_s)
