"""One HTTP/2 connection over one trio stream: the two tasks that carry its bytes, and its end.

Theory of operation. grpclib's protocol objects (`http2.py`) are synchronous. One task reads the stream and feeds them,
one pumps what they write; both under a shield of their own, so that a cancelled connection can still end with whole
frames. `close()` ends them within a bound. Must not know about gRPC calls: `server.py` and `client.py` do.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Final, cast

import trio
from grpclib.protocol import AbstractHandler
from h2.exceptions import ProtocolError

from .http2 import make_protocol
from .limits import GRPC_CLOSE_S, GRPC_HANDSHAKE_DEADLINE_S, GRPC_OUTGOING_MAX_BYTES
from .transport import STREAM_GONE, Transport

if TYPE_CHECKING:
    import asyncio

log = logging.getLogger(__name__)

_READ_BYTES: Final = 64 * 1024


class Http2Connection:
    """One connection. The owner runs `run_io()` in a task, waits for `ended`, and calls `close()` in any case;
    the stream stays the owner's to close, after `run_io()` has returned."""

    def __init__(self, stream: trio.abc.Stream, handler: AbstractHandler, *, client_side: bool) -> None:
        self._stream = stream
        self.protocol = make_protocol(handler, client_side=client_side)
        self.transport = Transport(
            stream, on_pause=self.protocol.pause_writing, on_resume=self.protocol.resume_writing
        )
        self.protocol.connection_made(cast("asyncio.BaseTransport", self.transport))
        self.ended = trio.Event()
        """Set when no more calls are possible: end of file, GOAWAY, an error, or `close()`."""
        self._handshake_over = trio.Event()
        self._all_sent = trio.Event()
        self._io_scope = trio.CancelScope(shield=True)

    async def handshake(self) -> bool:
        """Wait for the peer's SETTINGS, which show that it uses HTTP/2. False if the connection ends first."""
        await self._handshake_over.wait()
        return self.protocol.processor.peer_ready

    async def run_io(self) -> None:
        """Carry the bytes until either side ends. Not cancelled from outside, only by `close()`. Raises nothing."""
        with self._io_scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._receive)
                await self.transport.pump()
                self._all_sent.set()
                # The peer may have gone while we wrote, and its last bytes still wait to be read.
                with trio.move_on_after(GRPC_CLOSE_S):
                    await self.ended.wait()
                nursery.cancel_scope.cancel()

    async def close(self, within_s: float) -> None:
        """Send GOAWAY and what still waits, for at most `within_s`, even if the caller is cancelled; then end.

        A peer that does not read cannot delay this further, and gets no partial frame.
        """
        with trio.move_on_after(within_s, shield=True):
            if not self.protocol.connection.is_closed():
                self.protocol.connection._connection.close_connection()
                self.protocol.connection.flush()
                self.protocol.processor.close("this side is closing the connection")
            await self._all_sent.wait()
        self._io_scope.cancel()

    async def _receive(self) -> None:
        reason = "the connection was closed"
        try:
            with trio.CancelScope(deadline=trio.current_time() + GRPC_HANDSHAKE_DEADLINE_S) as handshake:
                while not self.protocol.connection.is_closed():
                    data = await self._stream.receive_some(_READ_BYTES)
                    if self.protocol.connection.is_closed():  # meanwhile, by us: grpclib has taken h2 apart
                        break
                    if not data:
                        reason = "the peer closed the connection"
                        break
                    self.protocol.data_received(bytes(data))
                    self._refuse_flood()
                    if self.protocol.processor.peer_ready and not self._handshake_over.is_set():
                        handshake.deadline = math.inf
                        self._handshake_over.set()
            if handshake.cancelled_caught:
                reason = f"no HTTP/2 preface and SETTINGS within {GRPC_HANDSHAKE_DEADLINE_S:g} s"
                log.info("connection closed: %s", reason)
        except STREAM_GONE as error:
            reason = f"the connection broke: {error}"
        except ProtocolError as error:
            reason = f"the connection was dropped: {error}"
            log.warning("connection dropped: %s", error)
        except Exception as error:  # no bytes of a peer may end the process
            reason = f"the connection was dropped: {error!r}"
            log.exception("connection dropped, its bytes broke the HTTP/2 layer")
        finally:
            self.protocol.processor.close(reason)
            self._handshake_over.set()
            self.ended.set()

    def _refuse_flood(self) -> None:
        if self.transport.unsent_bytes > GRPC_OUTGOING_MAX_BYTES:
            raise ProtocolError(
                f"the peer floods this side and reads no answers ({self.transport.unsent_bytes} bytes wait)"
            )
