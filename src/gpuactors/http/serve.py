"""HTTP/1.1 on trio, for a few GET routes: one request a connection, with deadlines and a bound on connections.

A probe or a scrape is one short request, so each connection is closed after its answer. When all places are taken, a
new connection replaces the oldest one that makes us wait: so kubelet's probe, whose head comes with its connection, is
answered whoever holds the places.

Must not know the routes.
"""

from __future__ import annotations

import errno
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, final

import trio
from msgspec import Struct

from gpuactors.concurrency.first_use import FirstUse
from gpuactors.grpc_trio import SocketError, SocketInUseError, bind_unix
from gpuactors.ports.http import Answering, HttpError
from gpuactors.process.logger import get_logger

if TYPE_CHECKING:
    from gpuactors.http.exchange import Exchange

HTTP_CONNECTIONS_MAX: Final = 32
"""Connections to the HTTP endpoints at a time: two probes and a scrape are three. For one more than this, the oldest
that makes us wait is closed (`_Places.take`)."""

HTTP_CLIENT_S: Final = 5.0
"""The deadline for a client to send its head, and again to take its answer."""

HTTP_ANSWER_S: Final = 30.0
"""The deadline for our work between them. The first scrape on a busy node imports a library for seconds, and Prometheus
waits 10 s. If the disk with that library hangs, each scrape holds a place for so long, and the probes keep theirs."""

_log = get_logger(__name__)


def _exchange() -> Exchange:
    from gpuactors.http.exchange import exchange  # with h11

    return exchange


EXCHANGE: Final = FirstUse(_exchange)
"""Imported with the first connection: kubelet's registration does not wait for it."""


@final
class TcpServer(Struct, frozen=True):
    """Serves at one address of this machine, or with `host` None at every one. Implements `ports.http.HttpServer`."""

    host: str | None
    port: int

    @property
    def is_local(self) -> bool:
        """Implement `ports.http.HttpServer.is_local`."""
        return self.host in ("localhost", "::1") or (self.host or "").startswith("127.")

    def __str__(self) -> str:
        host = self.host or ""
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    async def serve(
        self, answering: Answering, listening: Callable[[str], None], turned_away: Callable[[], None]
    ) -> None:
        """Implement `ports.http.HttpServer.serve`."""
        try:
            listeners = await trio.open_tcp_listeners(self.port, host=self.host)
        except OSError as exc:
            raise HttpError(f"cannot listen on {self}: {_why(exc)}") from None
        listening(str(self))
        await _serve(listeners, answering, turned_away)


@final
class UnixServer(Struct, frozen=True):
    """Serves at a unix socket. Implements `ports.http.HttpServer`."""

    path: str

    @property
    def is_local(self) -> bool:
        """Implement `ports.http.HttpServer.is_local`."""
        return True

    async def serve(
        self, answering: Answering, listening: Callable[[str], None], turned_away: Callable[[], None]
    ) -> None:
        """Implement `ports.http.HttpServer.serve`. Only our own user may dial it."""
        try:
            listener = bind_unix(self.path, mode=0o600)
        except SocketInUseError:
            raise HttpError(
                f"cannot listen on {self.path}: another process listens there: end that one, or choose another "
                "--http-address"
            ) from None
        except SocketError as exc:
            raise HttpError(str(exc)) from None
        listening(f"unix:{self.path}")
        await _serve([listener], answering, turned_away)


async def _serve(
    listeners: Sequence[trio.abc.Listener[trio.abc.Stream]],
    answering: Answering,
    turned_away: Callable[[], None],
) -> None:
    places = _Places(turned_away)
    await trio.serve_listeners(partial(_connection, answering, places), [*listeners])


@final
@dataclass(eq=False, slots=True)
class _Client:
    address: str
    """The peer's address; empty on a unix socket."""
    scope: trio.CancelScope = field(default_factory=lambda: trio.move_on_after(HTTP_ANSWER_S))
    """Ends the connection. It begins with work of ours: the import of `exchange`."""
    lets_us_wait: bool = True
    """True if its head is incomplete, or it does not take its answer."""

    def now_waits(self, *, for_us: bool) -> None:
        """Implement `exchange.Waits`."""
        self.lets_us_wait = not for_us
        self.scope.deadline = trio.current_time() + (HTTP_ANSWER_S if for_us else HTTP_CLIENT_S)


@final
class _Places:
    """The connections, HTTP_CONNECTIONS_MAX at most, in the order in which they came."""

    def __init__(self, turned_away: Callable[[], None]) -> None:
        self._turned_away = turned_away
        self._taken: dict[_Client, None] = {}

    def take(self, client: _Client) -> bool:
        """Take a place; False if there is none. If all are taken, close the oldest connection that makes us wait, of
        the address with most of them: so one host takes places only from itself."""
        if len(self._taken) >= HTTP_CONNECTIONS_MAX:
            self._turned_away()
            slow = [holder for holder in self._taken if holder.lets_us_wait]
            if not slow:
                return False
            held = Counter(holder.address for holder in slow)
            closed = max(slow, key=lambda holder: held[holder.address])
            closed.scope.cancel()
            self.leave(closed)
        self._taken[client] = None
        return True

    def leave(self, client: _Client) -> None:
        """Free its place, if it has one."""
        self._taken.pop(client, None)


def _why(exc: OSError) -> str:
    match exc:
        case socket.gaierror():
            return "there is no such address: correct --http-address"
        case OSError(errno=errno.EADDRINUSE):
            return "another process listens there: end that one, or choose another --http-address"
        case OSError(errno=errno.EACCES):
            return "this user may not listen on a port below 1024: choose a larger one by --http-address"
        case OSError(errno=errno.EADDRNOTAVAIL):
            return "this machine does not have that address: correct --http-address"
        case _:
            return exc.strerror or str(exc)


async def _connection(answering: Answering, places: _Places, stream: trio.abc.Stream) -> None:
    """Answer one request. A client that breaks the rules, is too slow, or is one too many loses its own connection."""
    client = _Client(_address(stream))
    try:
        if places.take(client):
            with client.scope:
                try:
                    exchange = await EXCHANGE.get()
                except Exception as exc:  # ends the request, and not the server of all others
                    _log.error("actor.failed", actor="http", exc_info=exc)
                    return
                client.now_waits(for_us=False)
                await exchange(answering, stream, client.address, client.now_waits)
    except (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
        pass
    finally:
        places.leave(client)
        await trio.aclose_forcefully(stream)


def _address(stream: trio.abc.Stream) -> str:
    if not isinstance(stream, trio.SocketStream):  # of a unix socket
        return ""
    try:
        host: str = stream.socket.getpeername()[0]
    except OSError:  # it has gone already
        return "gone"
    return host
