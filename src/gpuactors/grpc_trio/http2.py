"""grpclib's HTTP/2 objects, made to run without asyncio, and with fixes for bugs that ended a process, hung or leaked
memory; each override names its bug.

All synchronous: bytes in by `Protocol.data_received`, bytes out by `transport.write`, events to an `AbstractHandler`.
Must not carry bytes itself (`connection.py` does), and must not know about gRPC calls.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sized
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final, cast

from grpclib import GRPCError, Status, protocol
from grpclib.config import Configuration
from grpclib.exceptions import StreamTerminatedError
from h2.config import H2Configuration
from h2.connection import ConnectionInputs, H2Connection
from h2.errors import ErrorCodes
from h2.events import Event as H2Event
from h2.events import RemoteSettingsChanged, StreamReset
from h2.exceptions import FrameTooLargeError, ProtocolError, StreamClosedError
from h2.stream import StreamInputs
from hpack import Decoder, Encoder, HeaderTuple, NeverIndexedHeaderTuple

from .limits import GRPC_CONNECTION_WINDOW_BYTES
from .primitives import Event
from .transport import Transport

if TYPE_CHECKING:
    import asyncio

    from grpclib.utils import Wrapper

log = logging.getLogger(__name__)

Headers = list[tuple[str, str]]

INITIAL: Final = [(":status", "200"), ("content-type", "application/grpc+proto")]
"""The headers of every answer that has a message."""
OK: Final = [("grpc-status", "0")]
"""The trailers of every answer that has a message."""

_FRAME_MAX_BYTES: Final = 16_384  # HTTP/2's default. grpcio allows 4 MiB, which would wait here in one piece
_FRAME_LENGTH_BYTES: Final = 3  # a frame begins with its length (RFC 9113 4.1)
_FEW_CALLS: Final = 2  # kubelet's stream and one call: of more, the answers of a turn share a write
_HEADERS_KEPT_MAX: Final = 32  # a block of more headers is decoded each time
_BLOCKS_KEPT_MAX: Final = 8  # kubelet calls four methods of an endpoint; an answer has two blocks
_STREAM_WINDOW_BYTES: Final = 65_535  # HTTP/2's default: no SETTINGS needed

# Keepalive off: grpclib's uses loop.call_later, and on a unix socket the peer's death is an end of file at once.
_CONFIGURATION: Final = Configuration(
    _keepalive_time=None,
    http2_connection_window_size=GRPC_CONNECTION_WINDOW_BYTES,
    http2_stream_window_size=_STREAM_WINDOW_BYTES,
)


def _h2_configuration(*, client_side: bool) -> H2Configuration:
    """Return grpclib's configuration, but without validation: one odd header must not cost the connection. Latin-1
    decodes every byte of an answer's headers; a request's stay bytes (`read_headers` of `call.py`)."""
    return H2Configuration(
        client_side=client_side,
        header_encoding="latin-1" if client_side else None,
        validate_inbound_headers=False,
        validate_outbound_headers=False,
        normalize_inbound_headers=False,
        normalize_outbound_headers=False,
    )


class ReceiveBuffer:
    """The bytes of a stream's body that have arrived and are not read yet.

    Bytes are acknowledged when the buffer is empty, or when their reader needs more: a peer may have one stream window
    in here, beside the message that is being read.
    """

    __slots__ = ("_ack", "_arrived", "_data", "_ended", "_unacked_bytes")

    def __init__(self, ack: Callable[[int], None]) -> None:
        self._ack = ack
        self._data = bytearray()
        self._unacked_bytes = 0
        self._ended = False
        self._arrived = Event()

    def add(self, data: bytes, ack_size: int) -> None:
        """Add bytes. `ack_size`: their size with the padding, which counts for flow control."""
        self._data += data
        self._unacked_bytes += ack_size
        self._arrived.set()

    def eof(self) -> None:
        self._ended = True
        self._arrived.set()

    async def read(self, size_bytes: int) -> bytes:
        """Return so many bytes; fewer only if the stream ends before them. No checkpoint if they have arrived."""
        while len(self._data) < size_bytes and not self._ended:
            self._ack(self.unacked_size())
            self._arrived.clear()
            await self._arrived.wait()
        data = bytes(self._data[:size_bytes])
        del self._data[:size_bytes]
        if not self._data:
            self._ack(self.unacked_size())
        return data

    def unacked_size(self) -> int:
        """Return the number of bytes to acknowledge, which the caller does."""
        size_bytes, self._unacked_bytes = self._unacked_bytes, 0
        return size_bytes


class Http2Stream(protocol.Stream):
    """grpclib's HTTP/2 stream with trio events; what has arrived before the end stays readable after it."""

    connection: Connection
    _h2_connection: _H2Connection
    _transport: Transport  # type: ignore[assignment]  # grpclib's is asyncio's
    buffer: ReceiveBuffer  # type: ignore[assignment]  # grpclib's makes an asyncio queue

    def __init__(
        self,
        connection: Connection,
        h2_connection: _H2Connection,
        transport: Transport,
        *,
        stream_id: int | None = None,
        wrapper: Wrapper | None = None,
    ) -> None:  # not super().__init__: it makes asyncio's events
        self.connection = connection
        self._h2_connection = h2_connection
        self._transport = transport
        self.wrapper = wrapper
        self.window_updated = cast("asyncio.Event", Event())
        self.headers = None
        self.headers_received = cast("asyncio.Event", Event())
        self.trailers = None
        self.trailers_received = cast("asyncio.Event", Event())
        self.ended = False
        """True if the peer has ended its side in good order."""
        self._nobody_reads = False
        self.reset_code: int | None = None
        """HTTP/2 error code of the peer's RST_STREAM."""
        if stream_id is not None:
            self.init_stream(stream_id, connection)

    def init_stream(self, stream_id: int, connection: protocol.Connection) -> None:
        self.id = stream_id
        self.buffer = ReceiveBuffer(partial(connection.ack, stream_id))

    def reset_nowait(self, error_code: ErrorCodes = ErrorCodes.NO_ERROR) -> None:
        """As grpclib's, but a client that gives up sends CANCEL, not "no error"."""
        if self._h2_connection.config.client_side and error_code is ErrorCodes.NO_ERROR:
            error_code = ErrorCodes.CANCEL
        super().reset_nowait(error_code)

    async def recv_trailers(self) -> list[tuple[str, str]]:
        """As grpclib's, but a stream that ends without trailers is an error, not a wait for ever."""
        if self.trailers is None:
            await self.trailers_received.wait()
        if self.trailers is None:
            raise GRPCError(Status.INTERNAL, "the server ended the stream without sending a grpc-status")
        return self.trailers

    async def send_data(self, data: bytes, end_stream: bool = False) -> None:
        """Send; wait for the peer's window and our own buffer. Raises StreamClosedError if the peer will not read on.

        Unlike grpclib's own loop it does not wait for ever for the window of a server that has answered without
        reading its whole request, and sends no frame over HTTP/2's default size.
        """
        assert self.id is not None
        unsent = memoryview(data)
        while True:
            await self.connection.write_ready.wait()
            if self._nobody_reads:
                raise StreamClosedError(self.id)
            room_bytes = self._h2_connection.local_flow_control_window(self.id)
            if room_bytes <= 0:  # a new SETTINGS may make it negative (RFC 9113 6.9.2)
                self.window_updated.clear()
                await self.window_updated.wait()
                continue
            piece = unsent[: min(room_bytes, _FRAME_MAX_BYTES)]
            unsent = unsent[len(piece) :]
            self._h2_connection.send_data(self.id, bytes(piece), end_stream=end_stream and not unsent)
            self._transport.write(self._h2_connection.data_to_send())
            if not unsent:
                return

    async def send_answer(self, message: bytes) -> bool:
        """Send INITIAL, one message, OK. Send nothing and return False if it does not fit now.

        Raises as `send_data`.
        """
        assert self.id is not None
        await self.connection.write_ready.wait()
        frames = self._h2_connection.answer(self.id, message)
        if frames is None:
            return False
        if len(self.connection.calls) <= _FEW_CALLS:
            self._transport.write_now(frames)
        else:
            self._transport.write(frames)
        return True

    def __ended__(self) -> None:
        super().__ended__()
        self.ended = True
        self.trailers_received.set()
        if self._h2_connection.config.client_side:  # the server has answered: it wants no more of the request
            self._nobody_reads = True
            self.window_updated.set()

    def __terminated__(self, reason: str) -> None:
        """Interrupt the reader, as the connection is gone or the peer has reset the stream; not if the answer is
        complete (an answer and the end of the connection often arrive in one read).
        """
        if not self.ended and self.wrapper is not None:
            self.wrapper.cancel(StreamTerminatedError(reason))


class _EventOrEnd(Event):
    """An event whose waiters are also woken by the connection's end, which they then raise (h2's ProtocolError).

    grpclib's senders would wait on, for room in a buffer that is no longer emptied.
    """

    def __init__(self, is_closing: Callable[[], bool]) -> None:
        super().__init__()
        self._is_closing = is_closing

    async def wait(self) -> bool:
        if not self._is_closing():
            await super().wait()
        if self._is_closing():
            raise ProtocolError("the connection has ended")
        return True


class Connection(protocol.Connection):
    """grpclib's connection state with trio events; usable, as a no-op, after its end."""

    _connection: _H2Connection
    _transport: Transport  # type: ignore[assignment]  # grpclib's is asyncio's

    def __init__(self, connection: _H2Connection, transport: Transport, *, config: Configuration) -> None:
        super().__init__(connection, cast("asyncio.Transport", transport), config=config)
        self.calls: Sized = ()
        """The calls in flight."""
        self._closed = False
        self.write_ready = cast("asyncio.Event", _EventOrEnd(self.is_closing))
        self.write_ready.set()
        self.stream_close_waiter = cast("asyncio.Event", _EventOrEnd(self.is_closing))

    def create_stream(self, *, stream_id: int | None = None, wrapper: Wrapper | None = None) -> Http2Stream:
        return Http2Stream(self, self._connection, self._transport, stream_id=stream_id, wrapper=wrapper)

    def ack(self, stream_id: int, size: int) -> None:
        """Acknowledge bytes, unless the connection has ended: grpclib would raise in the reader of the rest."""
        if not self.is_closing():
            super().ack(stream_id, size)

    def is_closed(self) -> bool:
        """Return whether `close()` was called. (`is_closing()`: or nothing can be sent any more.)"""
        return self._closed

    def close(self) -> None:
        """As grpclib's, and wakes the waiting senders."""
        self._closed = True
        super().close()
        self.write_ready.set()
        self.stream_close_waiter.set()


class _Processors(dict[type[H2Event], Callable[[Any], None]]):
    """Ignores unknown events (frame types, ALTSVC, 1xx, pushes), as RFC 9113 5.5 requires; grpclib would raise
    NotImplementedError."""

    def __missing__(self, key: type[H2Event]) -> Callable[[Any], None]:
        return _ignore


def _ignore(event: H2Event) -> None:
    log.debug("ignored: %r", event)


class _EventsProcessor(protocol.EventsProcessor):
    def __init__(self, handler: protocol.AbstractHandler, connection: Connection) -> None:
        super().__init__(handler, connection)
        connection.calls = self.streams
        self.processors = cast(Any, _Processors(cast(Any, self.processors)))
        self.peer_ready = False
        """True if the peer's SETTINGS have arrived: it uses HTTP/2."""

    def process_remote_settings_changed(self, event: RemoteSettingsChanged) -> None:
        self.peer_ready = True
        super().process_remote_settings_changed(event)

    def process_stream_reset(self, event: StreamReset) -> None:
        stream = self.streams.get(event.stream_id)
        if isinstance(stream, Http2Stream) and event.error_code is not None:
            stream.reset_code = int(event.error_code)
        super().process_stream_reset(event)


class _Decoder(Decoder):
    """hpack's decoder, which caches blocks that only refer to the table: kubelet's calls of a method have the same nine
    headers."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[bytes, Iterable[HeaderTuple]] = {}

    def decode(self, data: bytes, raw: bool = False) -> Iterable[HeaderTuple]:
        if raw and data in self._known:
            return self._known[data]
        headers = super().decode(data, raw)
        if not (
            data and min(data) >= 0x80 and max(data) < 0xFF
        ):  # not indices of one byte alone (RFC 7541 6.1)
            self._known.clear()  # the table may be another now
        elif raw and len(data) <= _HEADERS_KEPT_MAX and len(self._known) < _BLOCKS_KEPT_MAX:
            self._known[data] = headers
        return headers


class _Encoder(Encoder):
    """hpack's encoder, without entries in the table (RFC 7541 6.2.3): so a header is always the same bytes, and is
    encoded once."""

    def encode(self, headers: Any, huffman: bool = True) -> bytes:
        if self.header_table.resized:  # that is sent first
            return super().encode([NeverIndexedHeaderTuple(*header) for header in headers], huffman)
        return b"".join([_encoded(name, value) for name, value in headers])


_STATELESS: Final = Encoder()


@lru_cache(maxsize=64)
def _encoded(name: bytes, value: bytes) -> bytes:
    return _STATELESS.encode([NeverIndexedHeaderTuple(name, value)])


_ENCODED_INITIAL: Final = _Encoder().encode([(name.encode(), value.encode()) for name, value in INITIAL])
_ENCODED_OK: Final = _Encoder().encode([(name.encode(), value.encode()) for name, value in OK])

# The first bytes of their HEADERS frames: length, type, END_HEADERS, END_STREAM (RFC 9113 4.1, 6.2).
_INITIAL_FRAME: Final = len(_ENCODED_INITIAL).to_bytes(3, "big") + b"\x01\x04"
_OK_FRAME: Final = len(_ENCODED_OK).to_bytes(3, "big") + b"\x01\x05"

_ANSWERED: Final = (
    StreamInputs.SEND_HEADERS,
    StreamInputs.SEND_DATA,
    StreamInputs.SEND_HEADERS,
    StreamInputs.SEND_END_STREAM,
)


class _H2Connection(H2Connection):
    """h2's connection, which remembers fewer closed streams: by default 65,536 of them (16 MiB)."""

    MAX_CLOSED_STREAMS = 1024

    def __init__(self, config: H2Configuration) -> None:
        super().__init__(config)
        self.encoder = _Encoder()
        self.decoder = _Decoder()
        self.decoder.max_header_list_size = self.DEFAULT_MAX_HEADER_LIST_SIZE

    def answer(self, stream_id: int, message: bytes) -> bytes | None:
        """Return the frames of a whole good answer, to be sent now; None if it needs more than three frames, or more
        room than there is. h2's `send_headers` and `send_data` make the same frames in five times the time.

        Raises h2.exceptions.ProtocolError if the stream or the connection is closed.
        """
        room_bytes = min(self.local_flow_control_window(stream_id), _FRAME_MAX_BYTES)
        if len(message) > room_bytes or self.encoder.header_table.resized:
            return None
        self.state_machine.process_input(ConnectionInputs.SEND_HEADERS)
        stream = self.streams[stream_id]
        for sent in _ANSWERED:
            stream.state_machine.process_input(sent)
        stream.outbound_flow_control_window -= len(message)
        self.outbound_flow_control_window -= len(message)
        at = stream_id.to_bytes(4, "big")
        data_frame = len(message).to_bytes(3, "big") + b"\x00\x00"
        return b"".join(
            (
                self.data_to_send(),
                *(_INITIAL_FRAME, at, _ENCODED_INITIAL),
                *(data_frame, at, message),
                *(_OK_FRAME, at, _ENCODED_OK),
            )
        )


class Protocol(protocol.H2Protocol):
    connection: Connection
    processor: _EventsProcessor

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """As grpclib's, with our classes and without `connection.initialize()` (keepalive)."""
        h2_connection = _H2Connection(config=self.h2_config)
        h2_connection.initiate_connection()
        window = h2_connection.local_settings.initial_window_size
        h2_connection.increment_flow_control_window(self.config.http2_connection_window_size - window)
        self.connection = Connection(h2_connection, cast("Transport", transport), config=self.config)
        self.connection.flush()
        self.processor = _EventsProcessor(self.handler, self.connection)

    def data_received(self, data: bytes) -> None:
        """As grpclib's, but the peer is notified of its error (GOAWAY) before the connection closes."""
        try:
            events = self.connection.feed(data)
            self._refuse_overlong_frame()
        except ProtocolError as error:
            log.info("connection closed, the peer breaks HTTP/2: %s", error or type(error).__name__)
            self.connection.flush()
            self.processor.close(f"HTTP/2 protocol error: {error}")
            return
        self.connection.flush()
        for event in events:
            self.processor.process(event)
        if not self.connection.is_closing():
            self.connection.flush()

    def _refuse_overlong_frame(self) -> None:
        """Raise for a frame over the limit by its announced length; h2 would first take in the whole frame (16 MiB)."""
        h2_connection = self.connection._connection
        announced_bytes = int.from_bytes(h2_connection.incoming_buffer._data[:_FRAME_LENGTH_BYTES], "big")
        if announced_bytes > h2_connection.max_inbound_frame_size:
            h2_connection.close_connection(ErrorCodes.FRAME_SIZE_ERROR)
            raise FrameTooLargeError(
                f"a frame of {announced_bytes} bytes; the limit is {h2_connection.max_inbound_frame_size}"
            )


def make_protocol(handler: protocol.AbstractHandler, *, client_side: bool) -> Protocol:
    """Make the protocol; `connection_made()` gives it its transport."""
    return Protocol(handler, _CONFIGURATION, _h2_configuration(client_side=client_side))
