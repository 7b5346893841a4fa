"""The retries after a failed request to the API server: an actor waits, longer each time, and tries again.

A file of its own: five actors retry by it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from gpuactors import limits
from gpuactors.actors.raises_only import raises_only
from gpuactors.concurrency.jitter import shorter
from gpuactors.ports.kube import ApiError, ApiRefused


async def for_ever(
    actor: str, follow: Callable[[], Awaitable[None]], failed: Callable[[ApiError], Awaitable[None]]
) -> None:
    """Follows something at the API server for ever: `follow` again after each failure, which `failed` gets before the
    wait. A watch that breaks is most often one of all that its server had: the first wait is spread further."""
    failures = 0
    while True:
        began = trio.current_time()
        try:
            with raises_only(ApiError, actor):
                await follow()
        except ApiError as exc:
            if trio.current_time() - began > limits.API_CALM_S:
                failures = 0
            failures += 1
            await failed(exc)
            spread_s = shorter(limits.API_LOST_S, 1.0) if failures == 1 else 0.0
            await trio.sleep(max(spread_s, backoff_s(failures, exc)))


def backoff_s(failures: int, error: ApiError) -> float:
    """The wait after so many failures in a row (1, 2, …); longer if the server asks for it, within reason. No two nodes
    that failed together wait for the same time."""
    plain_s = limits.API_BACKOFF_S[min(failures, len(limits.API_BACKOFF_S)) - 1]
    asked_s = error.refusal.retry_after_s if isinstance(error, ApiRefused) else None
    jitter, longest_s = limits.API_BACKOFF_JITTER, limits.API_BACKOFF_S[-1]
    later_s = min(asked_s or 0.0, longest_s) * (1 + jitter)
    return max(shorter(plain_s, jitter), shorter(later_s, jitter / (1 + jitter)))
