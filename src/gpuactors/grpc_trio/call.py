"""One call on the server: from its request headers to its trailers.

A call is one task with one cancel scope. The scope is cancelled at the caller's deadline, when the peer resets the
stream, when the connection ends, and on shutdown; in the first and last cases the caller can still be answered, with
DEADLINE_EXCEEDED or UNAVAILABLE. Must not know what the handlers do.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import trio
from grpclib import GRPCError, Status, server
from grpclib.const import Handler
from grpclib.encoding.proto import ProtoCodec
from grpclib.events import _DispatchServerEvents
from grpclib.exceptions import ProtocolError as GrpcProtocolError
from grpclib.exceptions import StreamTerminatedError
from grpclib.metadata import decode_metadata, decode_timeout, encode_grpc_message
from h2.exceptions import ProtocolError as Http2ProtocolError
from msgspec import Struct

from .http2 import INITIAL, OK, Http2Stream
from .limits import (
    GRPC_ECHO_MAX_CHARS,
    GRPC_REQUEST_DEADLINE_S,
    GRPC_REQUEST_FIELDS_MAX,
    GRPC_STATUS_TEXT_MAX_CHARS,
)
from .messages import frame_message, read_message
from .primitives import Event

log = logging.getLogger(__name__)

RawHeaders = list[tuple[bytes, bytes]]

SHUTTING_DOWN: Final = "server shutting down"

_CODEC: Final = ProtoCodec()
_DISPATCH: Final = _DispatchServerEvents()
_CONTENT_TYPES: Final = frozenset({"application/grpc", "application/grpc+proto"})
_TIMEOUT_MAX_CHARS: Final = 9  # gRPC over HTTP/2: at most 8 digits and a unit
_PEER_GONE: Final = (Http2ProtocolError, StreamTerminatedError)


class ServerStream(server.Stream[Any, Any]):
    """grpclib's server stream with bounded messages; used without its `async with`, which swallows cancellation."""

    _stream: Http2Stream
    _answer = b""

    async def recv_message(self) -> Any:
        """Return the next request message; None when a client stream has ended.

        Raises GRPCError as `read_message`, INTERNAL if a unary call carries no message, DEADLINE_EXCEEDED if it does
        not arrive within GRPC_REQUEST_DEADLINE_S.
        """
        if self._cardinality.client_streaming:
            return await self._read()
        if self._stream.ended:  # all of it is here: nothing to wait for
            return self._needed(await self._read())
        with trio.move_on_after(GRPC_REQUEST_DEADLINE_S):
            return self._needed(await self._read())
        raise GRPCError(
            Status.DEADLINE_EXCEEDED, f"no whole request message within {GRPC_REQUEST_DEADLINE_S:g} s"
        )

    async def _read(self) -> Any:
        return await read_message(self._stream, self._recv_type, fields_max=GRPC_REQUEST_FIELDS_MAX)

    def _needed(self, message: Any) -> Any:
        if message is None:
            raise GRPCError(Status.INTERNAL, "the call ended without a request message")
        return message

    async def send_message(self, message: Any) -> None:
        """Send a message of a stream, waiting while the peer does not read; keep a unary answer for `send_ok`. Raises
        as `frame_message`."""
        if self._cardinality.server_streaming:
            frame = frame_message(message, self._send_type)
            if not self._send_initial_metadata_done:
                await self._stream.send_headers(INITIAL)
                self._send_initial_metadata_done = True
            await self._stream.send_data(frame)
        elif self._send_message_done:
            raise GrpcProtocolError("a unary call has one answer")
        else:
            self._answer = frame_message(message, self._send_type)
        self._send_message_done = True

    async def send_ok(self) -> None:
        """Send the unsent part of a good answer. As grpclib's, without the metadata that no handler here has."""
        if not self._send_initial_metadata_done:
            if await self._stream.send_answer(self._answer):
                self._send_initial_metadata_done = self._send_trailing_metadata_done = True
                return
            await self._stream.send_headers(INITIAL)
            self._send_initial_metadata_done = True
            await self._stream.send_data(self._answer)
        await self._stream.send_headers(OK, end_stream=True)
        self._send_trailing_metadata_done = True


class Request(Struct, frozen=True):
    """The part of a call's headers that the server uses."""

    path: str
    method: Handler | None
    timeout_s: float
    """Infinite if the caller sets none; kubelet does not."""
    refusal: tuple[Status, str, int] | None
    """gRPC status, text and HTTP status for a request that cannot be served."""


def read_headers(headers: RawHeaders, methods: Mapping[str, Handler]) -> Request:
    """Decode a call's headers; a fault becomes the `refusal`."""
    texts = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]
    fields = dict(texts)
    path = fields.get(":path", "")
    method = methods.get(path)
    timeout_s, refusal = math.inf, None
    if fields.get(":method") != "POST":
        refusal = Status.INTERNAL, "gRPC calls are POST requests", 405
    elif fields.get("content-type", "").partition(";")[0] not in _CONTENT_TYPES:
        refusal = Status.UNKNOWN, "content-type must be application/grpc or application/grpc+proto", 415
    elif method is None:
        refusal = Status.UNIMPLEMENTED, f"unknown method: {_echo(path) or '(none)'}", 200
    else:
        try:
            timeout_s = _timeout_s(fields.get("grpc-timeout"))
            decode_metadata(texts)  # which no handler reads
        except ValueError as error:
            refusal = Status.INTERNAL, f"malformed header: {_echo(str(error))}", 200
    return Request(path, method, timeout_s, refusal)


class Call:
    """One call. `run()` is its task, and raises nothing but a cancellation from outside."""

    def __init__(
        self,
        stream: Http2Stream,
        request: Request,
        release_stream: Callable[[], None],
        *,
        accepting: bool,
        drain_s: float,
    ) -> None:
        self._stream = stream
        self._request = request
        self._release_stream = release_stream
        self._accepting = accepting
        self._drain_s = drain_s
        self.path = request.path
        self.streams_answers = request.method is not None and request.method.cardinality.server_streaming
        self.finished = Event()
        self._scope = trio.CancelScope(deadline=trio.current_time() + request.timeout_s)
        self._cancelled = False

    def cancel(self) -> None:
        """End the call: the peer no longer waits, or this side is shutting down."""
        self._cancelled = True
        self._scope.cancel()

    async def run(self) -> None:
        try:
            with self._scope:
                await self._answer()
        except* _PEER_GONE:
            log.debug("%s: the peer is gone", self.path, exc_info=True)
        except* Exception:
            log.exception("%s failed", self.path)
        finally:
            self._let_go()
            self.finished.set()

    def _let_go(self) -> None:
        try:
            if self._stream.closable:
                self._stream.reset_nowait()
            self._release_stream()
        except Http2ProtocolError:
            log.debug("%s: the connection is gone", self.path, exc_info=True)

    # --- request headers ----------------------------------------------------------------------------------

    async def _answer(self) -> None:
        if not self._stream.closable:  # reset or disconnected before this task began
            return None
        if self._request.refusal is not None:
            return await self._refuse(*self._request.refusal)
        if not self._accepting:
            return await self._refuse(Status.UNAVAILABLE, SHUTTING_DOWN, 200)
        method = self._request.method
        assert method is not None, "or there is a refusal"
        return await self._serve(self._open_reply(method), method)

    def _open_reply(self, method: Handler) -> ServerStream:
        return ServerStream(
            self._stream,
            self.path,
            method.cardinality,
            method.request_type,
            method.reply_type,
            codec=_CODEC,
            status_details_codec=None,
            dispatch=_DISPATCH,
        )

    async def _refuse(self, status: Status, text: str, http_status: int) -> None:
        """Send a trailers-only answer, with a content type: grpc-go maps an answer without one to UNKNOWN."""
        headers = [
            (":status", str(http_status)),
            ("content-type", "application/grpc+proto"),
            ("grpc-status", str(status.value)),
            ("grpc-message", encode_grpc_message(_status_text(text))),
        ]
        await self._stream.send_headers(headers, end_stream=True)

    # --- handler and trailers -----------------------------------------------------------------------------

    async def _serve(self, reply: ServerStream, method: Handler) -> None:
        try:
            status, text = await self._outcome(reply, method)
            if not self._stream.closable:
                return
            if status is Status.OK and reply._send_message_done:
                await reply.send_ok()
            else:
                await reply.send_trailing_metadata(status=status, status_message=text)
        except BaseException as error:
            cancelled = not isinstance(error, Exception)  # by itself, or in a group with others
            if cancelled and self._stream.closable and not reply._send_trailing_metadata_done:
                await self._say_why(reply)
            raise

    async def _say_why(self, reply: ServerStream) -> None:
        """Send why the call is cancelled. Shielded and bounded: a peer that does not read holds nothing up."""
        if self._scope.cancel_called and not self._cancelled:
            status = Status.DEADLINE_EXCEEDED
            text = f"not done within the caller's {self._request.timeout_s:g} s"
        else:
            status, text = Status.UNAVAILABLE, SHUTTING_DOWN
        with trio.move_on_after(self._drain_s, shield=True):
            try:
                await reply.send_trailing_metadata(status=status, status_message=text)
            except _PEER_GONE:
                log.debug("%s: the peer is gone", self.path, exc_info=True)

    async def _outcome(self, reply: ServerStream, method: Handler) -> tuple[Status, str | None]:
        try:
            await method.func(reply)
        except Exception as error:
            return self._status_of(error)
        if not self.streams_answers and not reply._send_message_done:
            log.error("%s: the handler returned without an answer", self.path)
            return Status.UNKNOWN, f"internal error in {self.path}: no answer"
        return Status.OK, None

    def _status_of(self, error: Exception) -> tuple[Status, str | None]:
        cause = _unwrapped(error)
        if isinstance(cause, GRPCError):
            return cause.status, None if cause.message is None else _status_text(cause.message)
        if isinstance(cause, _PEER_GONE) and not self._stream.closable:
            log.debug("%s: the peer is gone", self.path, exc_info=error)
        else:
            log.error("%s failed", self.path, exc_info=error)
        return Status.UNKNOWN, f"internal error in {self.path}; the reason is in the log of this process"


def _unwrapped(error: BaseException) -> BaseException:
    """Take a lone exception out of the groups that trio's nurseries wrap it in."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def _timeout_s(value: str | None) -> float:
    """Decode the caller's grpc-timeout. Raises ValueError; grpclib accepts any number of digits, and overflows."""
    if value is None:
        return math.inf
    if len(value) > _TIMEOUT_MAX_CHARS:
        raise ValueError("grpc-timeout has more than 8 digits")
    return decode_timeout(value)


def _echo(text: str) -> str:
    """Quote the peer's text in a sentence: printable, and at most GRPC_ECHO_MAX_CHARS of it."""
    shown = "".join(
        c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode()
        for c in text[: GRPC_ECHO_MAX_CHARS + 1]
    )
    if len(shown) <= GRPC_ECHO_MAX_CHARS:
        return shown
    return f"{shown[:GRPC_ECHO_MAX_CHARS]}… ({len(text):,} characters)"


def _status_text(text: str) -> str:
    """Make the text fit for a header: bounded, without white space at its ends (RFC 9113 8.2.1)."""
    text = text.strip()
    if len(text) <= GRPC_STATUS_TEXT_MAX_CHARS:
        return text
    return text[: GRPC_STATUS_TEXT_MAX_CHARS - 1] + "…"
