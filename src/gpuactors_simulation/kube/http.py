"""The API server over HTTP/1.1, by h11, on any stream: a socket of loopback, or one in memory."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Final, cast, final

import h11
import trio

from gpuactors_simulation.kube.server import ApiAnswer, ApiRequest, ConnectionLost, FakeApiServer
from gpuactors_simulation.kube.status import Object

_CHUNK_BYTES: Final = 65536
_VERSIONS: Final = (b"1.0", b"1.1")
_NO_HOST: Final = "Missing mandatory Host"
"""How h11 begins to say it."""


@asynccontextmanager
async def serve_loopback(server: FakeApiServer) -> AsyncIterator[int]:
    """Serves on a free port of 127.0.0.1, which is the value, as long as the context is open."""
    async with trio.open_nursery() as nursery:

        async def handle(stream: trio.abc.Stream) -> None:
            await serve_stream(server, stream)

        listeners = await nursery.start(partial(trio.serve_tcp, handle, 0, host="127.0.0.1"))
        yield listeners[0].socket.getsockname()[1]
        nursery.cancel_scope.cancel()


async def serve_stream(server: FakeApiServer, stream: trio.abc.Stream) -> None:
    """One connection, until the client closes it, or it breaks."""
    if server.away:
        await trio.aclose_forcefully(stream)
        return
    with trio.CancelScope() as scope:
        ended = server.on_break(scope.cancel)
        try:
            await _Peer(server, stream).serve()
        except* (trio.BrokenResourceError, trio.ClosedResourceError, h11.RemoteProtocolError, ConnectionLost):
            pass
        finally:
            ended()
            await trio.aclose_forcefully(stream)


@final
class _Peer:
    """The server's side of one connection."""

    def __init__(self, server: FakeApiServer, stream: trio.abc.Stream) -> None:
        self._server = server
        self._stream = stream
        self._http = h11.Connection(h11.SERVER)

    async def serve(self) -> None:
        while True:
            try:
                request = await self._request()
            except h11.RemoteProtocolError as exc:
                missing = ": missing required Host header" if str(exc).startswith(_NO_HOST) else ""
                await self._refuse(f"400 Bad Request{missing}")
                return
            if request is None:
                return
            answer = await self._answer(request)
            if answer is None:
                return
            await self._send(answer)
            if (self._http.our_state, self._http.their_state) != (h11.DONE, h11.DONE):
                return
            self._http.start_next_cycle()

    async def _event(self) -> h11.Event:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._http.receive_data(bytes(await self._stream.receive_some(_CHUNK_BYTES)))
        return cast("h11.Event", event)

    async def _request(self) -> ApiRequest | None:
        head = await self._event()
        if not isinstance(head, h11.Request):
            return None
        if head.http_version not in _VERSIONS:
            await self._refuse("505 HTTP Version Not Supported: unsupported protocol version")
            return None
        body = bytearray()
        while isinstance(part := await self._event(), h11.Data):
            body += part.data
        headers = {name.decode(): value.decode("latin-1") for name, value in head.headers}
        return ApiRequest(head.method.decode(), head.target.decode(), headers, bytes(body))

    async def _refuse(self, words: str) -> None:
        """Answer what is not HTTP as Go's server does (net/http, conn.serve): in words, and with the end."""
        headers = "Content-Type: text/plain; charset=utf-8\r\nConnection: close"
        await self._stream.send_all(f"HTTP/1.1 {words}\r\n{headers}\r\n\r\n{words}".encode())

    async def _answer(self, request: ApiRequest) -> ApiAnswer | None:
        """None if the client has gone while it waited."""
        answers: list[ApiAnswer] = []
        lost = False
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._until_gone, nursery.cancel_scope)
            try:
                answers.append(await self._server.answer(request))
            except ConnectionLost:
                lost = True
            nursery.cancel_scope.cancel()
        if lost:
            raise ConnectionLost
        return answers[0] if answers else None

    async def _send(self, answer: ApiAnswer) -> None:
        headers = [("Content-Type", answer.content_type), *answer.headers]
        if answer.lines is None:
            headers.append(("Content-Length", str(len(answer.body))))
        await self._put(h11.Response(status_code=answer.status, headers=headers))
        if answer.lines is None:
            await self._put(h11.Data(data=answer.body))
            await self._put(h11.EndOfMessage())
            return
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._until_gone, nursery.cancel_scope)
            await self._send_lines(answer.lines)
            nursery.cancel_scope.cancel()
        await self._put(h11.EndOfMessage())  # its client may ask again as soon as it has that

    async def _send_lines(self, lines: AsyncIterator[Object]) -> None:
        async with aclosing(lines) as events:  # type: ignore[type-var]  # the server's are generators
            async for event in events:
                await self._put(h11.Data(data=json.dumps(event).encode() + b"\n"))

    async def _put(self, event: h11.Event) -> None:
        data = self._http.send(event)
        if data:
            await self._stream.send_all(data)

    async def _until_gone(self, scope: trio.CancelScope) -> None:
        """End the wait when the client closes the connection; a client sends nothing before it has its answer."""
        try:
            while await self._stream.receive_some(_CHUNK_BYTES):
                pass
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        scope.cancel()
