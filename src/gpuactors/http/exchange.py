"""One request and its answer, by h11.

Imported with the first connection (`serve.py`). Must not know the routes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from ipaddress import ip_address
from typing import Final, Protocol, TypeAlias

import h11
import trio

from gpuactors.ports.http import Answering, HttpAnswer, HttpRequest
from gpuactors.process.logger import get_logger

_log = get_logger(__name__)

_CHUNK_BYTES: Final = 4096

_READS: Final = (b"GET", b"HEAD")


class Waits(Protocol):
    """Called when the client begins to wait for us, and when we begin to wait for it."""

    def __call__(self, *, for_us: bool) -> None: ...


Exchange: TypeAlias = Callable[[Answering, trio.abc.Stream, str, Waits], Awaitable[None]]
"""The type of `exchange`."""


async def exchange(answering: Answering, stream: trio.abc.Stream, address: str, waits: Waits) -> None:
    """Read one request, and send the answer. `address`: the client's, empty on a unix socket. Raises what the stream
    raises."""
    http = h11.Connection(h11.SERVER)
    try:
        request = await _head(http, stream)
        if request is None:
            return
        waits(for_us=True)
        answer, has_body = await _answer(answering, request, address), request.method != b"HEAD"
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
    waits(for_us=False)
    await stream.send_all(b"".join(http.send(part) or b"" for part in [*parts, h11.EndOfMessage()]))


async def _head(http: h11.Connection, stream: trio.abc.Stream) -> h11.Request | None:
    """Read the head of the request; None if the client sent none. The body, which may be endless, is not read."""
    while (event := http.next_event()) is h11.NEED_DATA:
        data = bytes(await stream.receive_some(_CHUNK_BYTES))
        if not data:
            return None
        http.receive_data(data)
    return event if isinstance(event, h11.Request) else None


async def _answer(answering: Answering, request: h11.Request, address: str) -> HttpAnswer:
    if request.method not in _READS:
        return HttpAnswer(405, b"nothing can be changed here: GET and HEAD only\n")
    path = request.target.decode("ascii", "replace").partition("?")[0]
    try:
        return await answering(HttpRequest(path, _is_from_here(request, address)))
    except Exception as exc:  # ends the request, and not the server of all others
        _log.error("actor.failed", actor="http", exc_info=exc)
        return HttpAnswer(500, b"internal error: please report it, with the traceback in the daemon's log\n")


def _is_from_here(request: h11.Request, address: str) -> bool:
    if not address:
        return True
    hosts = [value.decode("ascii", "replace") for name, value in request.headers if name == b"host"]
    return _is_loopback(address) and len(hosts) == 1 and _is_loopback(_without_port(hosts[0]))


def _without_port(host: str) -> str:
    """Cut the port off `[::1]:80` or `localhost:80`."""
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
