"""HTTP/1.1 on trio by h11, for a few GET routes: one request a connection, with deadlines and a bound on connections.

A probe or a scrape is one short request. A connection that stays open would cost a place that a slow or hostile client
could hold, so each is closed after its answer. Must not know the routes.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Final, cast, final

import h11
import trio

from gpuactors import limits
from gpuactors.grpc_trio import SocketError, SocketInUseError, bind_unix
from gpuactors.ports_http import Answering, HttpAnswer, HttpError

_CHUNK_BYTES: Final = 4096


@final
@dataclass(frozen=True, slots=True)
class TcpServer:
    """Serves at one address of this machine, or with `host` None at every one. Implements `ports_http.HttpServer`."""

    host: str | None
    port: int

    @property
    def is_local(self) -> bool:
        """As `ports_http.HttpServer.is_local`."""
        return self.host in ("localhost", "::1") or (self.host or "").startswith("127.")

    def __str__(self) -> str:
        host = self.host or ""
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    async def serve(self, answering: Answering, listening: Callable[[str], None]) -> None:
        """As `ports_http.HttpServer.serve`."""
        try:
            listeners = await trio.open_tcp_listeners(self.port, host=self.host)
        except OSError as exc:
            raise HttpError(f"cannot listen on {self}: {_why(exc)}") from None
        listening(str(self))
        await _serve(listeners, answering)


@final
@dataclass(frozen=True, slots=True)
class UnixServer:
    """Serves at a unix socket. Implements `ports_http.HttpServer`."""

    path: str

    @property
    def is_local(self) -> bool:
        """As `ports_http.HttpServer.is_local`."""
        return True

    async def serve(self, answering: Answering, listening: Callable[[str], None]) -> None:
        """As `ports_http.HttpServer.serve`. Only our own user may dial it."""
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
        await _serve([listener], answering)


async def _serve(listeners: Sequence[trio.abc.Listener[trio.abc.Stream]], answering: Answering) -> None:
    at_once = trio.CapacityLimiter(limits.HTTP_CONNECTIONS_MAX)
    await trio.serve_listeners(partial(_connection, answering, at_once), [*listeners])


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


async def _connection(answering: Answering, at_once: trio.CapacityLimiter, stream: trio.abc.Stream) -> None:
    """One request. A client that breaks the rules, is too slow, or is one too many costs only itself."""
    try:
        at_once.acquire_nowait()
    except trio.WouldBlock:
        await trio.aclose_forcefully(stream)
        return
    try:
        with trio.move_on_after(limits.HTTP_REQUEST_S):
            await _exchange(answering, stream)
    except (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
        pass
    finally:
        at_once.release()
        await trio.aclose_forcefully(stream)


async def _exchange(answering: Answering, stream: trio.abc.Stream) -> None:
    http = h11.Connection(h11.SERVER)
    try:
        request = await _request(http, stream)
        if request is None:
            return
        answer, has_body = await _answer(answering, request), request.method != b"HEAD"
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
    await stream.send_all(b"".join(http.send(part) or b"" for part in [*parts, h11.EndOfMessage()]))


async def _request(http: h11.Connection, stream: trio.abc.Stream) -> h11.Request | None:
    """The head of the request, its body read and forgotten; None if the client sent none."""
    found: h11.Request | None = None
    while True:
        event = http.next_event()
        match event:
            case h11.NEED_DATA:
                data = bytes(await stream.receive_some(_CHUNK_BYTES))
                if not data and found is None:
                    return None
                http.receive_data(data)
            case h11.Request():
                found = event
                if event.method not in (b"GET", b"HEAD"):
                    return found  # its body is not waited for
            case h11.EndOfMessage():
                return found
            case h11.ConnectionClosed():
                return None
            case _:
                cast("h11.Data", event)


async def _answer(answering: Answering, request: h11.Request) -> HttpAnswer:
    if request.method not in (b"GET", b"HEAD"):
        return HttpAnswer(405, b"nothing can be changed here: GET and HEAD only\n")
    path = request.target.decode("ascii", "replace").partition("?")[0]
    return await answering(path)
