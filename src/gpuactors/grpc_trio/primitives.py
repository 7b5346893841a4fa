"""asyncio's Event, as far as grpclib uses it, over trio.

grpclib creates its own; `http2.py` puts the ones from here in their place. Must not grow: only what grpclib 0.4.9 calls
is here.
"""

from __future__ import annotations

import trio


class Event:
    """`asyncio.Event`: like `trio.Event`, but it can be cleared.

    A waiter looks again when it wakes: if another task has cleared the event meanwhile, it goes on waiting. With
    asyncio it would go on. The difference matters for `write_ready`: of a hundred handlers that wait for a slow
    peer only as many go on as there is room for.
    """

    __slots__ = ("_is_set", "_waiters")

    def __init__(self) -> None:
        self._is_set = False
        self._waiters: trio.Event | None = None
        """Made by the first waiter: a call has four events and rarely waits for one."""

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        if self._waiters is not None:
            self._waiters.set()
            self._waiters = None

    def clear(self) -> None:
        self._is_set = False

    async def wait(self) -> bool:
        """Like asyncio's: no checkpoint if the event is set (grpclib relies on it between two HTTP/2 frames)."""
        while not self._is_set:
            if self._waiters is None:
                self._waiters = trio.Event()
            await self._waiters.wait()
        return True
