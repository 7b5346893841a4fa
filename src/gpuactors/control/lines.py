"""The lines of JSON that a trio stream carries. Must not know what they say."""

from __future__ import annotations

from typing import final

import trio

from gpuactors.control.messages import BEGIN, END


class NoLineError(Exception):
    """The peer sends no line of JSON; the text says why. `received`: the bytes that it sent."""

    def __init__(self, text: str, received: bytes) -> None:
        super().__init__(text)
        self.received = received


@final
class Lines:
    """Reads a stream line by line. `received`: the bytes that were read of it before."""

    def __init__(self, stream: trio.abc.ReceiveStream, received: bytes = b"") -> None:
        self._stream = stream
        self._received = bytearray(received)

    async def next(self, max_bytes: int) -> bytes:
        """Return the next line, without its end. Raises NoLineError, and what the stream raises."""
        searched = 0
        while True:
            if self._received and not self._received.startswith(BEGIN):
                raise NoLineError("it does not speak JSON", bytes(self._received))
            if (end := self._received.find(END, searched)) >= 0:
                break
            searched = len(self._received)
            if searched > max_bytes:
                raise NoLineError(f"its line is longer than {max_bytes} bytes", b"")
            if not (chunk := await self._stream.receive_some()):
                raise NoLineError("it closed the connection", bytes(self._received))
            self._received += chunk
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        return line
