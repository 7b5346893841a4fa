"""Connections in memory: two ends, bytes in order, and what can happen to a unix socket's bytes on their way.

A connection has a name and an owner at each end, so that a process can be killed with all that it has open. Must not
know what the bytes mean. The buffers have no bound: only a test's fake and the daemon's own HTTP/2 write here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, final

import trio

Tap = Callable[[str, bytes], None]
"""Called with the connection's name and direction, and the bytes, whenever some arrive."""


class _Direction:
    """The bytes from one end to the other."""

    def __init__(self, label: str) -> None:
        self.label: Final = label
        self.waiting = bytearray()
        self.ended = False
        self.changed = trio.Event()

    def wake(self) -> None:
        self.changed.set()
        self.changed = trio.Event()


@final
class Connection:
    """Both ends of one connection."""

    def __init__(self, name: str, owners: frozenset[str], tap: Tap | None = None) -> None:
        self.name: Final = name
        self.owners: Final = owners
        """The processes at its ends."""
        self._tap = tap
        self._broken = False
        self._left_bytes: int | None = None
        forth, back = _Direction(f"{name} >"), _Direction(f"{name} <")
        self._directions: Final = (forth, back)
        self.dialler: Final = MemoryStream(self, incoming=back, outgoing=forth)
        self.listener: Final = MemoryStream(self, incoming=forth, outgoing=back)

    @property
    def is_broken(self) -> bool:
        """It was cut, or an end has closed it."""
        return self._broken

    def cut(self, after_bytes: int = 0) -> None:
        """Break when so many more bytes have passed, in either direction: the last message may be half."""
        if after_bytes > 0:
            self._left_bytes = after_bytes
            return
        self._broken = True
        for direction in self._directions:
            direction.ended = True
            direction.wake()

    def carry(self, direction: _Direction, data: bytes | bytearray | memoryview) -> None:
        """Raise `trio.BrokenResourceError` as a write to a broken pipe would."""
        if self._broken or direction.ended:
            raise trio.BrokenResourceError(f"{self.name}: the other side is gone")
        passed = bytes(data) if self._left_bytes is None else bytes(data)[: self._left_bytes]
        direction.waiting += passed
        if self._tap is not None:
            self._tap(direction.label, passed)
        direction.wake()
        if self._left_bytes is not None:
            self._left_bytes -= len(passed)
            if self._left_bytes <= 0:
                self.cut()


@final
class MemoryStream(trio.abc.Stream):
    """One end. Closing it ends both directions, as closing a socket does."""

    def __init__(self, connection: Connection, *, incoming: _Direction, outgoing: _Direction) -> None:
        self._connection = connection
        self._incoming = incoming
        self._outgoing = outgoing
        self._closed = False

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await trio.lowlevel.checkpoint()
        if self._closed:
            raise trio.ClosedResourceError("this end is closed")
        self._connection.carry(self._outgoing, data)

    async def wait_send_all_might_not_block(self) -> None:
        await trio.lowlevel.checkpoint()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        await trio.lowlevel.checkpoint()
        incoming = self._incoming
        while not incoming.waiting and not incoming.ended and not self._closed:
            await incoming.changed.wait()
        if self._closed:
            raise trio.ClosedResourceError("this end is closed")
        data = bytes(incoming.waiting[:max_bytes])
        del incoming.waiting[: len(data)]
        return data

    def close(self) -> None:
        """The peer reads what is on its way, then the end; what it writes from now on is an error to it."""
        if self._closed:
            return
        self._closed = True
        self._connection.cut()

    async def aclose(self) -> None:
        self.close()
        await trio.lowlevel.checkpoint()
