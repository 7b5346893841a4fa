"""The retries after a failed request to the API server: an actor waits, longer each time, and tries again; and many
reads of one actor share that wait.

A file of its own: five actors retry by it.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar, final

import trio

from gpuactors import limits
from gpuactors.actors.raises_only import raises_only
from gpuactors.concurrency.jitter import about, shorter
from gpuactors.ports.kube import ApiAway, ApiError, ApiRefused

API_BACKOFF_S: Final = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0)
"""The waits after requests that failed in a row, in seconds; the last one repeats. An API server that restarts is away
for some seconds, and all nodes of a cluster come back to it at once: hence API_BACKOFF_JITTER."""

API_BACKOFF_JITTER: Final = 0.5
"""The share of such a wait that is random: 5,000 nodes come back over 15 s after an outage of minutes. A wait that the
server asks for (Retry-After) is longer by up to this share: it asks all that it refuses in one second for the same."""

API_READS_AT_ONCE: Final = 8
"""Limit on the reads of claims, or of domains, at one time: each may have a connection of its own, and 200 claims may
wait."""

API_READ_FAILURES_MAX: Final = 5
"""The wait between two reads of an actor while the server refuses all of them grows up to that of API_BACKOFF_S after
so many failures, unless the server asks for more: a prepare waits 35 s in its call."""

assert 2 * API_BACKOFF_S[API_READ_FAILURES_MAX - 1] < 35

API_LOST_S: Final = 5.0
"""A watch that broke begins again within this time, at a random moment: a server that stops, or a balancer before it,
breaks those of all nodes at once, and they ask the next server. 1,000 of 5,000 nodes a second do so."""

API_CALM_S: Final = 60.0
"""The time without a failure, in seconds, after which the next failure begins with the first wait of API_BACKOFF_S
again."""

T = TypeVar("T")


async def for_ever(
    actor: str, follow: Callable[[], Awaitable[None]], failed: Callable[[ApiError], Awaitable[None]]
) -> None:
    """Follow something at the API server for ever: call `follow` again after each failure; `failed` gets the failure
    before the wait. A watch that breaks is most often one of all that its server had: the first wait is spread
    further."""
    failures = 0
    while True:
        began = trio.current_time()
        try:
            with raises_only(ApiError, actor):
                await follow()
        except ApiError as exc:
            if trio.current_time() - began > API_CALM_S:
                failures = 0
            failures += 1
            await failed(exc)
            spread_s = shorter(API_LOST_S, 1.0) if failures == 1 else 0.0
            await trio.sleep(max(spread_s, backoff_s(failures, exc)))


def backoff_s(failures: int, error: ApiError) -> float:
    """Return the wait after so many failures in a row (1, 2, …); longer if the server asks for it, within reason. No
    two nodes that failed together wait for the same time."""
    plain_s = API_BACKOFF_S[min(failures, len(API_BACKOFF_S)) - 1]
    asked_s = error.refusal.retry_after_s if isinstance(error, ApiRefused) else None
    jitter, longest_s = API_BACKOFF_JITTER, API_BACKOFF_S[-1]
    later_s = min(asked_s or 0.0, longest_s) * (1 + jitter)
    return max(shorter(plain_s, jitter), shorter(later_s, jitter / (1 + jitter)))


@final
class SharedReads:
    """The reads of one actor, of which there may be hundreds at once: a few at a time, in order.

    When the server is away, or refuses as it is overloaded, one read asks it after each wait, and all others fail
    without a request. So a node asks no more for 200 claims than for one. What the server says of one object only
    (that it must not be read, or makes no sense) holds up no other.
    """

    def __init__(self) -> None:
        self._slots = trio.CapacityLimiter(API_READS_AT_ONCE)
        self._asks_again = trio.Lock()
        self._failures = 0
        self._closed_at = self._closed_until = -math.inf
        self._error = ""

    async def ask(self, read: Callable[[], Awaitable[T]]) -> T:
        """Return what `read` does. Raises `ApiError`, also without a request."""
        async with self._slots:
            if not self._failures:
                return await self._counted(read)
            async with self._asks_again:
                left_s = self._closed_until - trio.current_time()
                if self._failures and left_s > 0:
                    raise ApiAway(f"the API server is asked again later: {self._error}")
                return await self._counted(read)

    async def _counted(self, read: Callable[[], Awaitable[T]]) -> T:
        began = trio.current_time()
        try:
            answer = await read()
        except ApiError as exc:
            # Those that were under way together have failed once.
            if _is_of_server(exc) and began >= self._closed_at:
                self._failures += 1
                self._closed_at, self._error = trio.current_time(), str(exc)
                self._closed_until = self._closed_at + backoff_s(
                    min(self._failures, API_READ_FAILURES_MAX), exc
                )
            raise
        self._failures = 0
        return answer

    def retry_in_s(self) -> float:
        """Return the wait before a failed read is tried again, in seconds: no two at the same time."""
        left_s = self._closed_until - trio.current_time() if self._failures else 0.0
        return max(left_s, 0.0) + about(limits.CLAIM_READ_RETRY_S, API_BACKOFF_JITTER)


def _is_of_server(error: ApiError) -> bool:
    """Return whether the error is about the server, and not about the request."""
    if isinstance(error, ApiRefused):
        return error.code == 429 or error.code >= 500
    return isinstance(error, ApiAway)
