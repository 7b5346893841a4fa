"""asyncio's Event and Queue, as far as grpclib uses them, over trio.

grpclib creates these two itself; `http2.py` replaces them by the ones here right after. Must not grow: only what
grpclib 0.4.9 calls is here.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

import trio

T = TypeVar("T")


class Event:
    """`asyncio.Event`: like `trio.Event`, but it can be cleared.

    A waiter looks again when it wakes: if another task has cleared the event meanwhile, it goes on waiting. With
    asyncio it would go on. The difference matters for `write_ready`: of a hundred handlers that wait for a slow
    peer only as many go on as there is room for.
    """

    def __init__(self) -> None:
        self._event = trio.Event()

    def is_set(self) -> bool:
        return self._event.is_set()

    def set(self) -> None:
        self._event.set()

    def clear(self) -> None:
        if self._event.is_set():
            self._event = trio.Event()

    async def wait(self) -> bool:
        """Like asyncio's: no checkpoint if the event is set (grpclib relies on it between two HTTP/2 frames)."""
        while not self._event.is_set():
            await self._event.wait()
        return True


class Queue(Generic[T]):
    """The part of `asyncio.Queue` that `grpclib.protocol.Buffer` uses; unbounded, one reader.

    HTTP/2's flow control bounds it: a peer may have no more than one stream window in here.
    """

    __slots__ = ("_arrived", "_items")

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._arrived = Event()

    def put_nowait(self, item: T) -> None:
        self._items.append(item)
        self._arrived.set()

    def get_nowait(self) -> T:
        return self._items.popleft()

    def empty(self) -> bool:
        return not self._items

    def qsize(self) -> int:
        return len(self._items)

    async def get(self) -> T:
        while not self._items:
            self._arrived.clear()
            await self._arrived.wait()
        return self._items.popleft()
