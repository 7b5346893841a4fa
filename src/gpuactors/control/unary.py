"""One call of gRPC over a unix socket without an event loop, for a command that asks once and ends.

h2 speaks HTTP/2 here as it does below `grpc_trio/`. What that needs besides (trio, grpclib, betterproto2) takes three
times as long to import as the whole rest of a command takes. Must not know what is called.
"""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from typing import Final
from urllib.parse import unquote

from grpclib import GRPCError, Status
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    RemoteSettingsChanged,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
)
from h2.exceptions import ProtocolError

CONTROL_ANSWER_MAX_BYTES: Final = 4 * 1024 * 1024
"""Of the running daemon's state. The daemon sends no longer message (MESSAGE_MAX_BYTES in `grpc_trio/limits.py`)."""

_READ_BYTES: Final = 65_536
_PREFIX_BYTES: Final = 5
"""Of a message of gRPC: whether it is compressed (1), its length (4, big endian)."""

_EMPTY: Final = bytes(_PREFIX_BYTES)
"""The request: a message without fields."""


_HEADERS: Final = ((":authority", "localhost"), ("te", "trailers"), ("content-type", "application/grpc"))
_STATUSES: Final = {str(status.value).encode(): status for status in Status}

_DIAL_RETRY_S: Final = 0.01
"""A listener whose queue is full has so long to accept some."""


class NoHttp2Error(Exception):
    """A process listens at the path and does not speak HTTP/2; the text says what it does, as a sentence."""


def call(path: str, method: str, *, connect_s: float, call_s: float) -> bytes:
    """The message that `method` answers an empty request with.

    Raises OSError where nobody listens at `path` or it may not be connected to, `NoHttp2Error` unless the other side
    speaks HTTP/2 within `connect_s`, TimeoutError unless the answer is whole within `call_s` more, and GRPCError with
    the call's status, or UNAVAILABLE where the connection was lost.
    """
    until = time.monotonic() + connect_s
    with _connected(path, until) as sock:
        http2 = H2Connection(H2Configuration(client_side=True))
        http2.initiate_connection()
        http2.send_headers(1, [(":method", "POST"), (":scheme", "http"), (":path", method), *_HEADERS])
        http2.send_data(1, _EMPTY, end_stream=True)
        answer = _Answer(http2)
        try:
            while not answer.speaks_http2:
                answer.read(sock, until)
        except (ProtocolError, OSError) as exc:
            is_late = isinstance(exc, TimeoutError)
            did = (
                f"did not speak HTTP/2 within {connect_s:g} s"
                if is_late
                else f"does not speak HTTP/2 ({exc})"
            )
            raise NoHttp2Error(f"the process that listens on {path} {did}") from exc
        until = time.monotonic() + call_s
        try:
            while not answer.is_whole:
                answer.read(sock, until)
        except ProtocolError as exc:
            raise GRPCError(Status.INTERNAL, f"HTTP/2 protocol error: {exc}") from exc
        except ConnectionError as exc:
            raise GRPCError(Status.UNAVAILABLE, f"the connection was lost: {exc}") from exc
        return answer.message()


def _connected(path: str, until: float) -> socket.socket:
    """A connection to `path`. Raises OSError; BlockingIOError where its listener's queue is full until then."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        while True:
            try:
                sock.connect(path)
            except BlockingIOError:  # on AF_UNIX: the queue is full, and no connection is under way
                if time.monotonic() > until:
                    raise
                time.sleep(_DIAL_RETRY_S)
            else:
                return sock
    except BaseException:
        sock.close()
        raise


class _Answer:
    """The answer to the one call of a connection, as far as it has come."""

    def __init__(self, http2: H2Connection) -> None:
        self._http2 = http2
        self._headers: dict[bytes, bytes] = {}
        self._body = b""
        self.speaks_http2 = False
        self.is_whole = False

    def read(self, sock: socket.socket, until: float) -> None:
        """Says what is to be said, and takes what comes next. Raises OSError, TimeoutError after `until`,
        ProtocolError, and GRPCError where the call has ended without a status."""
        if (left_s := until - time.monotonic()) <= 0:
            raise TimeoutError
        sock.settimeout(left_s)
        with suppress(
            BrokenPipeError, ConnectionResetError
        ):  # it has closed: its answer may be here all the same
            sock.sendall(self._http2.data_to_send())
        received = sock.recv(_READ_BYTES)
        if not received:
            raise ConnectionResetError("the other side has closed it")
        for event in self._http2.receive_data(received):
            self._add(event)

    def _add(self, event: Event) -> None:
        match event:
            case RemoteSettingsChanged():
                self.speaks_http2 = True
            case ResponseReceived() | TrailersReceived():
                self._headers.update(event.headers or ())
            case DataReceived():
                self._body += event.data or b""
                self._http2.acknowledge_received_data(event.flow_controlled_length or 0, 1)
                if len(self._body) > CONTROL_ANSWER_MAX_BYTES:
                    raise GRPCError(Status.RESOURCE_EXHAUSTED, "the answer is too long")
            case StreamEnded():
                self.is_whole = True
            case StreamReset() | ConnectionTerminated() if self.is_whole:
                pass
            case StreamReset():
                raise GRPCError(Status.UNAVAILABLE, "the call was reset")
            case ConnectionTerminated():
                raise GRPCError(Status.UNAVAILABLE, "the connection is being closed")
            case _:
                pass

    def message(self) -> bytes:
        """Raises GRPCError unless the status is OK and there is a whole message."""
        status = self._headers.get(b"grpc-status", b"")
        if status != b"0":
            said = unquote(self._headers.get(b"grpc-message", b"").decode(errors="replace"))
            raise GRPCError(_STATUSES.get(status, Status.UNKNOWN), said)
        message = self._body[_PREFIX_BYTES:]
        if self._body[:_PREFIX_BYTES] != b"\0" + len(message).to_bytes(4, "big"):
            raise GRPCError(Status.INTERNAL, "the message was cut short, or is compressed")
        return message
