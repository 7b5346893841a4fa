"""The part of `asyncio.Transport` that grpclib needs, over any `trio.abc.Stream`.

grpclib writes synchronously; the bytes wait here and `pump()` sends them. Must not know HTTP/2.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import trio

from .limits import GRPC_OUTGOING_HIGH_BYTES, GRPC_OUTGOING_LOW_BYTES
from .primitives import Event
from .unix import UnixStream

# What a trio stream raises when the other side, or we ourselves, have closed it. OSError: streams that are not
# trio's own.
STREAM_GONE = (trio.BrokenResourceError, trio.ClosedResourceError, OSError)


class Transport:
    """Bytes on their way out. The synchronous half is grpclib's view, `pump()` is the connection's.

    Backpressure: `on_pause()` is called when more than GRPC_OUTGOING_HIGH_BYTES wait, `on_resume()` when no more than
    GRPC_OUTGOING_LOW_BYTES do.
    """

    def __init__(
        self, stream: trio.abc.Stream, *, on_pause: Callable[[], None], on_resume: Callable[[], None]
    ) -> None:
        self._stream = stream
        self._send_now = stream.send_now if isinstance(stream, UnixStream) else _nothing
        self._on_pause = on_pause
        self._on_resume = on_resume
        self._waiting = bytearray()
        self._sending_bytes = 0
        self._work = Event()
        self._closing = False
        self._paused = False

    @property
    def unsent_bytes(self) -> int:
        """The number of bytes that the stream has not taken yet."""
        return len(self._waiting) + self._sending_bytes

    def write(self, data: bytes | bytearray) -> None:
        """Queue bytes; never blocks. After `close()` they are dropped, as asyncio does."""
        if self._closing:
            return
        self._waiting += data
        self._work.set()
        if not self._paused and self.unsent_bytes > GRPC_OUTGOING_HIGH_BYTES:
            self._paused = True
            self._on_pause()

    def write_now(self, data: bytes) -> None:
        """Send what the stream takes at once, and queue the rest; never blocks."""
        sent_bytes = 0
        if not self._closing and self.unsent_bytes == 0:
            with suppress(*STREAM_GONE):  # which `pump()` will notice
                sent_bytes = self._send_now(data)
        if sent_bytes < len(data):
            self.write(data[sent_bytes:])

    def close(self) -> None:
        """Take no more bytes; `pump()` still sends those that wait, and then returns."""
        self._closing = True
        self._work.set()

    def is_closing(self) -> bool:
        return self._closing

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return `default`: there is no socket for grpclib to tune, no peer name, no TLS."""
        return default

    async def pump(self) -> None:
        """Send until closed and empty, or until the stream is gone.

        A cancellation inside `send_all` may leave half an HTTP/2 frame on the wire. After it nothing more may be sent,
        so no other code ever writes to the stream.
        """
        try:
            while True:
                if self._waiting:
                    await self._send_waiting()
                elif self._closing:
                    return
                else:
                    self._work.clear()
                    await self._work.wait()
        except STREAM_GONE:
            self.close()
        finally:
            self._waiting.clear()
            self._sending_bytes = 0

    async def _send_waiting(self) -> None:
        data, self._waiting = self._waiting, bytearray()
        self._sending_bytes = len(data)
        sent_bytes = self._send_now(data)
        if sent_bytes < len(data):
            await self._stream.send_all(memoryview(data)[sent_bytes:])
        self._sending_bytes = 0
        if self._paused and len(self._waiting) <= GRPC_OUTGOING_LOW_BYTES:
            self._paused = False
            self._on_resume()


def _nothing(_: bytes | bytearray) -> int:
    """Stands for `send_now` of a stream that always waits."""
    return 0
