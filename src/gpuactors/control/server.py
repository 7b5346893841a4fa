"""The daemon's side of the control socket: connections, requests, and the sockets themselves.

A connection is one request. A daemon or a command of the release before speaks gRPC, and is answered so
(`grpc_control.py`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from contextlib import aclosing, suppress
from functools import partial
from typing import TYPE_CHECKING, Final, final

import trio

from gpuactors import VERSION, limits
from gpuactors.control import messages
from gpuactors.control.lines import Lines, NoLineError
from gpuactors.control.messages import REQUEST_MAX_BYTES, UNKNOWN, Answer, line_of, request_of
from gpuactors.control.service import ControlService
from gpuactors.grpc_trio import BoundListener, accept
from gpuactors.ports.errors import ControlError, ControlTakenError
from gpuactors.process.logger import get_logger

if TYPE_CHECKING:
    from gpuactors.control.grpc_control import GrpcControl

CONNECTIONS_MAX: Final = 64
"""The maximum of connections to the control socket, which only the daemon's own user may dial. An operator has a few
commands that watch; a successor has one more."""

REQUEST_S: Final = 10.0
"""From a connection to its whole request: a client asks as soon as it is connected."""

SEND_S: Final = 10.0
"""The deadline for sending one answer, of at most some 100 KB: a command that hangs must not keep its connection."""

_ENDED: Final = (OSError, trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError, NoLineError)
"""Raised by a peer that has ended, is too slow or sends no line."""

_log = get_logger(__name__)


@final
class ControlServer:
    """Serves the connections of any number of listeners."""

    def __init__(self, service: ControlService) -> None:
        self._service = service
        self._connections: dict[trio.CancelScope, None] = {}
        self._unsent: dict[trio.Event, None] = {}
        """One for each hand-over, set when its answer is sent or cannot be."""
        self._grpc: GrpcControl | None = None

    async def serve(
        self, listener: BoundListener, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Accept connections until the listener is closed, then wait until they have ended."""
        async with trio.open_nursery() as nursery, listener:
            task_status.started()
            try:
                while True:
                    nursery.start_soon(self._connection, await accept(listener))
            except trio.ClosedResourceError:
                pass

    async def drain(self, grace_s: float) -> None:
        """End every connection, those of successors when they are answered, or after `grace_s`."""
        with trio.move_on_after(grace_s):
            if self._grpc is not None:
                await self._grpc.drain(grace_s)
            for sent in list(self._unsent):
                await sent.wait()
        for scope in list(self._connections):
            scope.cancel()

    async def _connection(self, stream: trio.abc.Stream) -> None:
        """Serve one request. A fault of it ends this connection only."""
        scope = trio.CancelScope()
        try:
            if len(self._connections) < CONNECTIONS_MAX:
                self._connections[scope] = None
                with scope:
                    await self._request(stream)
        except _ENDED:
            pass
        except Exception as exc:
            _log.error("actor.failed", actor="control", exc_info=exc)
        finally:
            self._connections.pop(scope, None)
            await trio.aclose_forcefully(stream)

    async def _request(self, stream: trio.abc.Stream) -> None:
        with trio.fail_after(REQUEST_S):
            received = bytes(await stream.receive_some())
            speaks_grpc = received.startswith(b"P")  # of HTTP/2's preface; a line begins with a brace
            line = b"" if speaks_grpc else await Lines(stream, received).next(REQUEST_MAX_BYTES)
        if speaks_grpc:
            await self._speaks_grpc(stream, received)
            return
        match request_of(line).ask:
            case messages.STATUS:
                await _send(stream, self._service.status())
            case messages.WATCH:
                await _while_there(stream, partial(self._watch, stream))
            case messages.HAND_OVER:
                await _while_there(stream, partial(self._hand_over, stream))
            case _:
                await _send(stream, Answer(version=VERSION, error=UNKNOWN))

    async def _watch(self, stream: trio.abc.Stream) -> None:
        async with aclosing(self._service.changes()) as answers:
            async for answer in answers:
                await _send(stream, answer)

    async def _hand_over(self, stream: trio.abc.Stream) -> None:
        sent = trio.Event()
        self._unsent[sent] = None
        try:
            await _send(stream, await self._service.hand_over())
        finally:
            del self._unsent[sent]
            sent.set()

    async def _speaks_grpc(self, stream: trio.abc.Stream, received: bytes) -> None:
        from gpuactors.control.grpc_control import GrpcControl  # with the first peer of the release before

        if self._grpc is None:
            self._grpc = GrpcControl(self._service)
        await self._grpc.serve_connection(stream, received)


async def _send(stream: trio.abc.Stream, answer: Answer) -> None:
    with trio.fail_after(SEND_S):
        await stream.send_all(line_of(answer))


async def _while_there(stream: trio.abc.Stream, answering: Callable[[], Awaitable[None]]) -> None:
    """Run `answering` until it ends or the peer has closed its end; ignore what the peer sends meanwhile."""
    async with trio.open_nursery() as nursery:

        async def until_gone() -> None:
            with suppress(*_ENDED):
                while await stream.receive_some():
                    pass
            nursery.cancel_scope.cancel()

        nursery.start_soon(until_gone)
        with suppress(*_ENDED):
            await answering()
        nursery.cancel_scope.cancel()


@final
class UnixHeldControl:
    """The control socket while it is ours, at each of its places. Implements `ports.node.HeldControl`.

    `bind` makes the socket at a path. Raises `ControlTakenError`, `ControlError`.
    """

    def __init__(
        self, service: ControlService, paths: Iterable[str], bind: Callable[[str], BoundListener]
    ) -> None:
        self._service = service
        self._bind = bind
        self._listeners: dict[str, BoundListener | None] = dict.fromkeys(paths)
        self._server = ControlServer(service)
        self._nursery: trio.Nursery | None = None
        self._is_taken = False

    def bind(self) -> str:
        """Make the sockets that are missing. Return why one cannot be made; empty if all are there. Raises
        `ControlTakenError`."""
        problems: list[str] = []
        for path in [path for path, listener in self._listeners.items() if listener is None]:
            try:
                self._listeners[path] = self._bind(path)
            except ControlTakenError:
                raise
            except ControlError as exc:
                problems.append(str(exc))
        return "; ".join(problems)

    def has_any(self) -> bool:
        """Return whether there is a socket at one of its places."""
        return any(listener is not None for listener in self._listeners.values())

    async def serve(self, nursery: trio.Nursery) -> None:
        """Serve the socket at each of its places, in this nursery."""
        self._nursery = nursery
        for listener in self._listeners.values():
            if listener is not None:
                await nursery.start(self._server.serve, listener)

    async def complete(self) -> str:
        """Implement `ports.node.HeldControl.complete`."""
        missing = [path for path, listener in self._listeners.items() if listener is None]
        if not missing or self._nursery is None:
            return ""
        try:
            problem = self.bind()
        except ControlTakenError as exc:
            self._is_taken, problem = True, str(exc)
        for path in missing:
            if (listener := self._listeners[path]) is not None:
                await self._nursery.start(self._server.serve, listener)
        return problem

    def still_ours(self) -> bool:
        """Implement `ports.node.HeldControl.still_ours`."""
        made = [listener for listener in self._listeners.values() if listener is not None]
        return not self._is_taken and all(listener.still_there() for listener in made)

    async def asked(self) -> None:
        """Implement `ports.node.HeldControl.asked`."""
        await self._service.asked.wait()

    async def give_up(self) -> None:
        """Implement `ports.node.HeldControl.give_up`. After the answer the successor takes the socket's place."""
        for listener in self._listeners.values():
            if listener is not None:
                await listener.aclose()
        self._service.released.set()
        await self._server.drain(limits.DRAIN_S)
