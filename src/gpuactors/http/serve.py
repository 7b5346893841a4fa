"""HTTP/1.1 on trio by h11, for a few GET routes: one request a connection, with deadlines and a bound on connections.

A probe or a scrape is one short request. A connection that stays open would cost a place that a slow or hostile client
could hold, so each is closed after its answer. When all places are taken, who lets us wait makes room for a newcomer:
so kubelet's probe, whose head comes with its connection, is answered whoever holds the places.

Must not know the routes.
"""

from __future__ import annotations

import errno
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from ipaddress import ip_address
from typing import Final, final

import h11
import trio
from msgspec import Struct

from gpuactors import limits
from gpuactors.grpc_trio import SocketError, SocketInUseError, bind_unix
from gpuactors.ports.http import Answering, HttpAnswer, HttpError, HttpRequest
from gpuactors.process.logger import get_logger

_log = get_logger(__name__)

_CHUNK_BYTES: Final = 4096

_READS: Final = (b"GET", b"HEAD")


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
    stream: trio.abc.Stream
    address: str
    """Nothing at a unix socket."""
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    lets_us_wait: bool = True
    """Its head is not whole, or it does not take its answer."""


@final
class _Places:
    """The connections, HTTP_CONNECTIONS_MAX at most, in the order in which they came."""

    def __init__(self, turned_away: Callable[[], None]) -> None:
        self._turned_away = turned_away
        self._taken: dict[_Client, None] = {}

    def take(self, client: _Client) -> bool:
        """Whether there is a place: one is made by closing the oldest connection that lets us wait, of the address that
        has most of them. So a single host takes places from itself only, and many take them from each other first."""
        if len(self._taken) >= limits.HTTP_CONNECTIONS_MAX:
            self._turned_away()
            slow = [other for other in self._taken if other.lets_us_wait]
            if not slow:
                return False
            held = Counter(other.address for other in slow)
            closed = max(slow, key=lambda other: held[other.address])
            closed.scope.cancel()
            self.leave(closed)
        self._taken[client] = None
        return True

    def leave(self, client: _Client) -> None:
        """Its place is free, also if it was before."""
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
    """One request. A client that breaks the rules, is too slow, or is one too many costs only itself."""
    client = _Client(stream, _address(stream))
    try:
        if places.take(client):
            with client.scope, trio.move_on_after(limits.HTTP_REQUEST_S):
                await _exchange(answering, client)
    except (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
        pass
    finally:
        places.leave(client)
        await trio.aclose_forcefully(stream)


def _address(stream: trio.abc.Stream) -> str:
    assert isinstance(stream, trio.SocketStream), "a listener of sockets makes nothing else"
    if stream.socket.family == socket.AF_UNIX:
        return ""
    try:
        host: str = stream.socket.getpeername()[0]
    except OSError:  # it has gone already
        return "gone"
    return host


async def _exchange(answering: Answering, client: _Client) -> None:
    http = h11.Connection(h11.SERVER)
    try:
        request = await _head(http, client.stream)
        if request is None:
            return
        client.lets_us_wait = False
        answer, has_body = await _answer(answering, request, client), request.method != b"HEAD"
    except h11.RemoteProtocolError as exc:
        if http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        answer, has_body = HttpAnswer(exc.error_status_hint, f"{exc}\n".encode()), True
    headers = [
        ("Content-Type", answer.content_type),
        ("Content-Length", str(len(answer.body))),
        ("Cache-Control", "no-store"),
        ("X-Content-Type-Options", "nosniff"),
        ("Connection", "close"),
    ]
    if answer.status == 405:
        headers.append(("Allow", "GET, HEAD"))
    parts: list[h11.Event] = [
        h11.Response(status_code=answer.status, headers=headers, reason=HTTPStatus(answer.status).phrase)
    ]
    parts += [h11.Data(data=answer.body)] if has_body else []
    client.lets_us_wait = True
    await client.stream.send_all(b"".join(http.send(part) or b"" for part in [*parts, h11.EndOfMessage()]))


async def _head(http: h11.Connection, stream: trio.abc.Stream) -> h11.Request | None:
    """The head of the request; None if the client sent none. A body is not waited for: it means nothing here, and one
    without an end would cost the daemon as much as the client cares to send."""
    while (event := http.next_event()) is h11.NEED_DATA:
        data = bytes(await stream.receive_some(_CHUNK_BYTES))
        if not data:
            return None
        http.receive_data(data)
    return event if isinstance(event, h11.Request) else None


async def _answer(answering: Answering, request: h11.Request, client: _Client) -> HttpAnswer:
    if request.method not in _READS:
        return HttpAnswer(405, b"nothing can be changed here: GET and HEAD only\n")
    path = request.target.decode("ascii", "replace").partition("?")[0]
    try:
        return await answering(HttpRequest(path, _is_from_here(request, client)))
    except Exception as exc:  # ends the request, and not the server of all others
        _log.error("actor.failed", actor="http", exc_info=exc)
        return HttpAnswer(500, b"internal error: please report it, with the traceback in the daemon's log\n")


def _is_from_here(request: h11.Request, client: _Client) -> bool:
    if not client.address:
        return True
    hosts = [value.decode("ascii", "replace") for name, value in request.headers if name == b"host"]
    return _is_loopback(client.address) and len(hosts) == 1 and _is_loopback(_without_port(hosts[0]))


def _without_port(host: str) -> str:
    """`[::1]:80` and `localhost:80` without the port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
