"""gRPC client on trio: one channel is one connection; it does not reconnect.

`open_channel` works over any trio stream, `open_unix_channel` dials a path. A `Channel` can be given to betterproto2's
generated stubs. Every failure of a call is a `GRPCError`, as with other gRPC libraries:

- UNAVAILABLE: the connection was lost, or the server is going away (GOAWAY ends the connection's calls at once: h2
  takes nothing in after it)
- DEADLINE_EXCEEDED: the call's `timeout` or `deadline` has passed, on trio's clock
- otherwise the server's status; a reset stream is mapped as in "gRPC over HTTP/2"
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Final, TypeVar, cast

import trio
from grpclib import GRPCError, Status, client
from grpclib.const import Cardinality
from grpclib.encoding.proto import ProtoCodec
from grpclib.events import _DispatchChannelEvents
from grpclib.metadata import Deadline
from grpclib.protocol import H2Protocol
from grpclib.utils import Wrapper
from h2.errors import ErrorCodes
from h2.exceptions import ProtocolError as Http2ProtocolError
from multidict import MultiDict

from .connection import Http2Connection
from .http2 import Http2Stream
from .limits import GRPC_CLOSE_S
from .messages import frame_message, read_message, read_payload
from .unix import ConnectError, Dial, connect_unix

RequestT = TypeVar("RequestT")
AnswerT = TypeVar("AnswerT")

# "gRPC over HTTP/2", section Errors.
_STATUS_OF_RESET: Final = {
    int(ErrorCodes.REFUSED_STREAM): Status.UNAVAILABLE,
    int(ErrorCodes.CANCEL): Status.CANCELLED,
    int(ErrorCodes.ENHANCE_YOUR_CALM): Status.RESOURCE_EXHAUSTED,
    int(ErrorCodes.INADEQUATE_SECURITY): Status.PERMISSION_DENIED,
}


class TrioDeadline(Deadline):
    """grpclib's deadline on trio's clock, so that a simulation's clock counts."""

    def __init__(self, at_s: float) -> None:
        super().__init__(_timestamp=at_s)
        self.at_s = at_s

    def time_remaining(self) -> float:
        return max(0.0, self.at_s - trio.current_time())


class _CallScope(Wrapper):
    """grpclib's `Wrapper` with cancel scopes: each `with` is one awaited step of a call; `cancel()` fails the call.

    A step after the end of the answer waits for nothing, and needs no scope.
    """

    def __init__(self, deadline: TrioDeadline | None) -> None:
        self._deadline_s = math.inf if deadline is None else deadline.at_s
        self._failure: Exception | None = None
        self._scopes: list[trio.CancelScope | None] = []
        self.stream: Http2Stream | None = None

    def __enter__(self) -> None:
        if self._failure is not None:
            raise self._as_grpc_error()
        if self.stream is not None and self.stream.ended:
            self._scopes.append(None)
            return
        scope = trio.CancelScope(deadline=self._deadline_s)
        scope.__enter__()
        self._scopes.append(scope)

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        scope = self._scopes.pop()
        if scope is None:
            return
        scope.__exit__(
            exc_type, exc_val, exc_tb
        )  # swallows its own cancellation only, which is raised as an error
        if scope.cancelled_caught:
            raise self._as_grpc_error() from self._failure

    def cancel(self, error: Exception) -> None:
        if self._failure is None:  # the first reason is the true one
            self._failure = error
        for scope in self._scopes:
            if scope is not None:
                scope.cancel()

    def _as_grpc_error(self) -> GRPCError:
        if self._failure is None:
            return GRPCError(Status.DEADLINE_EXCEEDED, "no answer within the call's deadline")
        code = None if self.stream is None else self.stream.reset_code
        status = Status.UNAVAILABLE if code is None else _STATUS_OF_RESET.get(code, Status.INTERNAL)
        return GRPCError(status, str(self._failure))


class ClientStream(client.Stream[Any, Any]):
    """grpclib's client stream with trio deadlines and bounded messages."""

    _stream: Http2Stream
    _wrapper: _CallScope
    _exhausted = False

    async def __aenter__(self) -> ClientStream:
        self._wrapper = _CallScope(cast("TrioDeadline | None", self._deadline))
        return self

    async def send_request(self, *, end: bool = False) -> None:
        try:
            await super().send_request(end=end)
        except Http2ProtocolError as error:  # the connection ended while this call waited for its turn
            raise _lost(error) from error
        self._wrapper.stream = self._stream

    async def send_message(self, message: Any, *, end: bool = False) -> None:
        """Send as grpclib does; if the server has answered before it has the whole request, its answer counts."""
        frame = frame_message(message, self._send_type)
        if not self._send_request_done:
            await self.send_request()
        end = end or not self._cardinality.client_streaming
        with self._wrapper:
            try:
                await self._stream.send_data(frame, end_stream=end)
            except Http2ProtocolError as error:
                if not self._stream.ended:
                    raise _lost(error) from error
            self._send_message_done = True
            self._end_done = end

    async def recv_message(self) -> Any:
        """Return the next message; None at the end of a stream whose status is OK.

        Raises GRPCError: the call's status, and as in the module docstring and `read_message`.
        """
        if not self._recv_initial_metadata_done:
            await self.recv_initial_metadata()
        with self._wrapper:
            if self._recv_type is bytes:
                message = await read_payload(self._stream)
            else:
                message = await read_message(self._stream, self._recv_type)
        if message is None:
            self._exhausted = True
            if not self._recv_trailing_metadata_done:
                await self.recv_trailing_metadata()
            if not self._cardinality.server_streaming:
                raise GRPCError(Status.INTERNAL, "the server sent OK but no answer")
        return message

    def give_up(self) -> None:
        """Reset the stream unless it has been read to its end; leaving the call's block then waits for nothing."""
        if self._send_request_done and not self._exhausted:
            self._cancel_done = True
            if self._stream.closable:
                self._stream.reset_nowait()

    async def _maybe_finish(self) -> None:
        """As grpclib's, but a call whose connection is lost fails."""
        if not self._cancel_done:
            if not self._recv_initial_metadata_done:
                await self.recv_initial_metadata()
            if not self._recv_trailing_metadata_done:
                await self.recv_trailing_metadata()


class Channel(client.Channel):
    """One connection's calls; made by `open_channel`.

    A subclass only so that generated stubs accept it: nothing of grpclib's own channel is run (it asks for a loop).
    """

    # read or counted by grpclib.client.Stream
    _scheme = "http"
    _authority = "localhost"  # as kubelet sends it (grpc-go on a unix socket)
    _calls_started = 0
    _calls_succeeded = 0
    _calls_failed = 0

    def __init__(self, connection: Http2Connection) -> None:  # not super().__init__: it makes an asyncio loop
        self._connection = connection
        self._codec = ProtoCodec()
        self._dispatch = _DispatchChannelEvents()

    @property
    def lost(self) -> trio.Event:
        """Set when the connection has ended, on either side."""
        return self._connection.ended

    def request(
        self,
        name: str,
        cardinality: Cardinality,
        request_type: type[RequestT],
        reply_type: type[AnswerT],
        *,
        timeout: float | None = None,
        deadline: Deadline | None = None,
        metadata: Any = None,
    ) -> ClientStream:
        """Make a call, to be entered with `async with`. `timeout` in seconds; the earlier of both limits counts."""
        return ClientStream(
            self,
            name,
            cast(Any, MultiDict(metadata or ())),
            cardinality,
            request_type,
            reply_type,
            codec=self._codec,
            status_details_codec=None,
            dispatch=self._dispatch,
            deadline=_trio_deadline(timeout, deadline),
        )

    async def encoded(self, name: str, request: Any) -> bytes:
        """Make a unary call, and return its answer undecoded, for a caller that may know most of it already."""
        call = self.request(name, Cardinality.UNARY_UNARY, type(request), bytes)
        async with call:
            await call.send_message(request, end=True)
            answer: bytes = await call.recv_message()
        return answer

    @asynccontextmanager
    async def server_stream(
        self, name: str, request: Any, reply_type: type[AnswerT], *, timeout: float | None = None
    ) -> AsyncIterator[AsyncIterator[AnswerT]]:
        """Make a server-streaming call whose stream is reset as soon as the block is left.

        A generated stub's generator does that too, but only when the garbage collector finds its inner generator.
        """
        call = self.request(name, Cardinality.UNARY_STREAM, type(request), reply_type, timeout=timeout)
        async with call:
            await call.send_message(request, end=True)
            yield call
            call.give_up()

    def close(self) -> None:
        """Raise: the connection ends with the block of `open_channel`."""
        raise NotImplementedError("leave the block of open_channel() instead")

    async def __connect__(self) -> H2Protocol:
        if self._connection.transport.is_closing():
            raise GRPCError(Status.UNAVAILABLE, "the connection is closed")
        return self._connection.protocol


@asynccontextmanager
async def open_channel(stream: trio.abc.Stream) -> AsyncIterator[Channel]:
    """Open a channel over a connected stream, which it closes at the end of the block.

    An exception of the block leaves it as it is, not in a group. When the connection is lost, calls fail; the block
    itself is not cancelled (see `Channel.lost`).
    """
    connection = Http2Connection(stream, client.Handler(), client_side=True)
    async with _running(connection, stream):
        yield Channel(connection)


@asynccontextmanager
async def open_unix_channel(
    path: str, *, connect_deadline_s: float, dial: Dial = connect_unix
) -> AsyncIterator[Channel]:
    """Dial a unix socket; yield a channel once the other side has shown that it speaks HTTP/2.

    Raises ConnectError: no process listens, no permission, or no HTTP/2 SETTINGS within `connect_deadline_s` (a process
    that hangs still has the kernel accept connections for it). `dial` is another way to `path`, in a simulation.
    """
    deadline_s = trio.current_time() + connect_deadline_s
    stream = await dial(path, deadline_s=deadline_s)
    connection = Http2Connection(stream, client.Handler(), client_side=True)
    async with _running(connection, stream):
        with trio.move_on_at(deadline_s) as waiting:
            if not await connection.handshake():
                raise ConnectError(f"the process that listens on {path} closed the connection at once")
        if waiting.cancelled_caught:
            raise ConnectError(
                f"the process that listens on {path} did not speak HTTP/2 within {connect_deadline_s:g} s; does it "
                "hang?"
            )
        yield Channel(connection)


@asynccontextmanager
async def _running(connection: Http2Connection, stream: trio.abc.Stream) -> AsyncIterator[None]:
    failure: Exception | None = None
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(connection.run_io)
            try:
                yield
            except Exception as error:  # past the nursery, which would put it into a group
                failure = error
            finally:
                await connection.close(GRPC_CLOSE_S)
    finally:
        await trio.aclose_forcefully(stream)
    if failure is not None:
        raise failure


def _trio_deadline(timeout_s: float | None, deadline: Deadline | None) -> TrioDeadline | None:
    remaining_s = min(
        math.inf if timeout_s is None else timeout_s,
        math.inf if deadline is None else deadline.time_remaining(),
    )
    return None if remaining_s == math.inf else TrioDeadline(trio.current_time() + remaining_s)


def _lost(error: Exception) -> GRPCError:
    return GRPCError(Status.UNAVAILABLE, f"the connection is closed: {error}")
