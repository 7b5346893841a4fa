"""gRPC server on trio: connections in, calls out, a graceful end.

Per connection: a task that carries bytes (shielded, see `connection.py`) and a nursery of calls. Cancelling the task
that serves ends every call with UNAVAILABLE trailers, sends GOAWAY, and is done within twice `drain_s`. Must not know
which services it serves, nor where the streams come from.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterable
from typing import Protocol, cast

import trio
from grpclib.const import Handler
from grpclib.protocol import AbstractHandler
from grpclib.protocol import Stream as GrpclibStream
from h2.errors import ErrorCodes

from .call import Call, RawHeaders, Request, read_headers
from .connection import Http2Connection
from .http2 import Headers, Http2Stream
from .limits import ACCEPT_RETRY_S, GRPC_CONNECTIONS_MAX
from .service import TrioService

log = logging.getLogger(__name__)

# What accept() reports when the process or the machine has run out of something.
_OUT_OF_RESOURCES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})


class Servable(Protocol):
    """The interface of betterproto2's generated bases."""

    def __mapping__(self) -> dict[str, Handler]: ...


class Server:
    """Serves `services` on any number of streams and listeners.

    `drain_s`: how long trailers, and then the last bytes of a connection, may take on shutdown.
    Raises ValueError if two services have a method in common, TypeError if a service streams answers without
    deriving from `TrioService` (its generators would not be closed).
    """

    def __init__(self, services: Iterable[Servable], *, drain_s: float) -> None:
        self._methods = _methods_of(services)
        self._drain_s = drain_s
        self._accepting = True
        self._last_request: tuple[RawHeaders, Request] | None = None
        """The last headers and their request: kubelet's calls of a method have the same headers each time."""
        # Dictionaries, because a set's order changes from run to run: a simulation must play the same twice.
        self._calls: dict[Call, None] = {}
        self._connections: dict[_ServerConnection, None] = {}

    @property
    def connections(self) -> int:
        """The number of connected peers. Kubelet closes its connection when it has noticed a stream's end."""
        return len(self._connections)

    @property
    def calls(self) -> int:
        """The number of calls in flight, streams included."""
        return len(self._calls)

    async def serve(
        self,
        listener: trio.abc.Listener[trio.abc.Stream],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Accept until cancelled; one task per connection. Closes the listener.

        Lives through a want of descriptors (tries again every ACCEPT_RETRY_S) and through any peer. If other code
        closes the listener, continues until the connections have ended, then returns.
        """
        async with trio.open_nursery() as nursery, listener:
            task_status.started()
            try:
                while True:
                    nursery.start_soon(self.serve_connection, await accept(listener))
            except trio.ClosedResourceError:
                log.debug("the listener was closed")

    async def serve_connection(self, stream: trio.abc.Stream) -> None:
        """Serve one peer until it disconnects. Closes the stream; raises nothing but cancellation."""
        if len(self._connections) >= GRPC_CONNECTIONS_MAX:
            log.warning("connection refused: %d are open already", len(self._connections))
            await trio.aclose_forcefully(stream)
            return
        connection = _ServerConnection(stream, self._open_call, self._calls.pop)
        self._connections[connection] = None
        try:
            await connection.run(self._drain_s)
        except* Exception:
            log.exception("connection failed")
        finally:
            del self._connections[connection]
            connection.disconnected.set()

    def stop_accepting_calls(self) -> None:
        """From now on new calls get UNAVAILABLE; those in flight go on. Not to be undone."""
        self._accepting = False

    async def drain(self, grace_s: float) -> bool:
        """End every call: unary ones may finish within `grace_s`; then the streams end with UNAVAILABLE trailers.

        Kubelet fails a pod whose Allocate is in flight when the stream ends, so the stream ends last. Connections stay
        open: see `wait_disconnected()`. Returns whether every unary call has finished by itself.
        """
        self.stop_accepting_calls()
        with trio.move_on_after(grace_s) as grace:
            await _all_finished(call for call in self._calls if not call.streams_answers)
        for call in list(self._calls):
            call.cancel()
        with trio.move_on_after(self._drain_s):
            await _all_finished(self._calls)
        return not grace.cancelled_caught

    async def wait_idle(self) -> None:
        """Wait until no unary call is in flight, those that come meanwhile included. Has no bound of its own."""
        while unary := [call for call in self._calls if not call.streams_answers]:
            await _all_finished(unary)

    async def wait_disconnected(self) -> None:
        """Wait until no peer is connected. Has no bound of its own: a peer may stay for ever."""
        while self._connections:
            await next(iter(self._connections)).disconnected.wait()

    def _open_call(
        self, stream: Http2Stream, headers: RawHeaders, release_stream: Callable[[], None]
    ) -> Call:
        if self._last_request is None or headers != self._last_request[0]:
            self._last_request = headers, read_headers(headers, self._methods)
        call = Call(
            stream,
            self._last_request[1],
            release_stream,
            accepting=self._accepting,
            drain_s=self._drain_s,
        )
        self._calls[call] = None
        return call


class _ServerConnection(AbstractHandler):
    """One peer: grpclib's handler interface on one side, a nursery of calls on the other."""

    def __init__(
        self,
        stream: trio.abc.Stream,
        open_call: Callable[[Http2Stream, RawHeaders, Callable[[], None]], Call],
        close_call: Callable[[Call], object],
    ) -> None:
        self._stream = stream
        self._open_call = open_call
        self._close_call = close_call
        self._calls: dict[Http2Stream, Call] = {}
        self._nursery: trio.Nursery | None = None
        self._http2 = Http2Connection(stream, self, client_side=False)
        self.disconnected = trio.Event()

    async def run(self, drain_s: float) -> None:
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._http2.run_io)
                try:
                    await self._run_calls()
                finally:
                    await self._http2.close(drain_s)
        finally:
            await trio.aclose_forcefully(self._stream)

    async def _run_calls(self) -> None:
        """Run the calls until the connection has ended and every call has returned."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            try:
                await self._http2.ended.wait()
            finally:
                self._nursery = None

    async def _run_call(self, stream: Http2Stream, call: Call) -> None:
        try:
            await call.run()
        finally:
            del self._calls[stream]
            self._close_call(call)

    # --- grpclib's AbstractHandler: synchronous, called while bytes are taken in ---------------------------

    def accept(self, stream: GrpclibStream, headers: Headers, release_stream: Callable[[], None]) -> None:
        stream = cast("Http2Stream", stream)  # `Connection.create_stream` makes no other
        if self._nursery is None:  # on the way out: the caller may safely try elsewhere (RFC 9113 8.7)
            stream.reset_nowait(ErrorCodes.REFUSED_STREAM)
            release_stream()
            return
        call = self._calls[stream] = self._open_call(stream, cast("RawHeaders", headers), release_stream)
        self._nursery.start_soon(self._run_call, stream, call)

    def cancel(self, stream: GrpclibStream) -> None:
        """End the call whose stream the peer has reset."""
        if (call := self._calls.get(cast("Http2Stream", stream))) is not None:
            call.cancel()

    def close(self) -> None:
        """End all calls, as the connection has ended."""
        for call in self._calls.values():
            call.cancel()


async def accept(listener: trio.abc.Listener[trio.abc.Stream]) -> trio.abc.Stream:
    """Accept the next connection; wait while descriptors or memory are short, and log it once."""
    is_logged = False
    while True:
        try:
            return await listener.accept()
        except OSError as error:
            if error.errno not in _OUT_OF_RESOURCES:
                raise
            if not is_logged:
                log.warning("cannot accept connections, trying again every %g s: %s", ACCEPT_RETRY_S, error)
                is_logged = True
        await trio.sleep(ACCEPT_RETRY_S)


async def _all_finished(calls: Iterable[Call]) -> None:
    for call in list(calls):
        await call.finished.wait()


def _methods_of(services: Iterable[Servable]) -> dict[str, Handler]:
    methods: dict[str, Handler] = {}
    for service in services:
        for path, method in service.__mapping__().items():
            if path in methods:
                raise ValueError(f"two services have the method {path}")
            if method.cardinality.server_streaming and not isinstance(service, TrioService):
                raise TypeError(
                    f"{type(service).__name__} streams answers ({path}); derive it from TrioService as well, first"
                )
            methods[path] = method
    return methods
