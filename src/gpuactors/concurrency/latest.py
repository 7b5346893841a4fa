"""A cell that holds the newest value of something, with any number of readers.

The writer never waits and no reader can slow another down. A reader may skip values in between; it never misses the
last one. A reader holds a read end and cannot write.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar, final

import trio

T = TypeVar("T")


@final
class Latest(Generic[T]):
    """Owns one value. Kept by its writer; readers get `subscribe()`."""

    def __init__(self, value: T, is_news: Callable[[T, T], bool] = lambda *_: True) -> None:
        """`is_news(before, value)`: whether a different value wakes the readers. It replaces the value in any case."""
        self._value = value
        self._is_news = is_news
        self._version = 0
        self._changed = trio.Event()
        self._closed = False

    @property
    def value(self) -> T:
        """The newest value."""
        return self._value

    @property
    def version(self) -> int:
        """The number of values so far that were news."""
        return self._version

    def set(self, value: T) -> None:
        """Replace the value and wake every reader. An equal value wakes no reader, nor does one that is no news."""
        if self._closed:
            raise trio.ClosedResourceError("this cell is closed")
        before = self._value
        if value == before:
            return
        self._value = value
        if self._is_news(before, value):
            self._version += 1
            self._wake()

    @property
    def is_closed(self) -> bool:
        """True if no value will follow the present one."""
        return self._closed

    def close(self) -> None:
        """Close the cell: each reader still gets the last value, then its iteration ends. Closing twice is no error."""
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    def subscribe(self) -> LatestReader[T]:
        """Make a new read end, whose first `receive` returns the present value at once."""
        return LatestReader(self)


@final
class LatestReader(Generic[T]):
    """One reader's place in the sequence of values. An asynchronous iterator that ends when the cell is closed.

    Its holder can read the cell, and create other readers, but cannot write.
    """

    def __init__(self, latest: Latest[T]) -> None:
        self._latest = latest
        self._seen = -1

    @property
    def value(self) -> T:
        """The newest value; reading it does not count as receiving it."""
        return self._latest.value

    @property
    def version(self) -> int:
        """The version of the newest value."""
        return self._latest.version

    @property
    def seen(self) -> int:
        """The version of the value that was received last; -1 before the first one."""
        return self._seen

    def subscribe(self) -> LatestReader[T]:
        """Make another read end of the same cell, as `Latest.subscribe`."""
        return self._latest.subscribe()

    async def receive(self) -> T:
        """Wait for a value that this reader has not received yet, and return the newest.

        Raises `trio.EndOfChannel` if there will be none.
        """
        if self._seen != self._latest._version:
            # No turn for other tasks: the next value needs one of the writer's.
            await trio.lowlevel.checkpoint_if_cancelled()
        while self._seen == self._latest._version:
            if self._latest._closed:
                raise trio.EndOfChannel
            await self._latest._changed.wait()
        self._seen = self._latest._version
        return self._latest._value

    def __aiter__(self) -> LatestReader[T]:
        return self

    async def __anext__(self) -> T:
        try:
            return await self.receive()
        except trio.EndOfChannel:
            raise StopAsyncIteration from None
