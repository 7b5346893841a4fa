"""One request to the API server, or one stream of lines from it, over httpcore.

A connection is kept for a while after an answer, and the next read has it: of a burst of claims, or a list and the
watch after it, the server makes one connection with TLS. A write always has a connection of its own: whether it was
carried out cannot be known where a kept one turns out to be dead. Must not try anything twice but that read, and must
not know what the objects are.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace
from typing import Any, Final, TypeVar, final
from urllib.parse import urlencode

import httpcore
import trio
from msgspec import Struct, field

from gpuactors import VERSION
from gpuactors.kube import errors
from gpuactors.kube.config import Credentials, FileAccess
from gpuactors.kube.tls import tls_context

API_REQUEST_S: Final = 10.0
"""Deadline of a request to the API server, from the connection to the last byte, in seconds. A prepare reads each of
its claims and answers within 35 s; a server that is well takes milliseconds."""

API_CONNECT_S: Final = 5.0
"""The part of API_REQUEST_S for the connection, with TLS."""

API_BODY_MAX_BYTES: Final = 16 * 1024 * 1024
"""Limit on an answer of the API server. A slice with 128 devices has 60 KB; etcd stores no object above 1.5 MiB."""

API_LINE_MAX_BYTES: Final = 4 * 1024 * 1024
"""Limit on an event of a watch: one object, as above."""

API_KEPT_S: Final = 30.0
"""How long a connection to the API server is kept after an answer for the next read, in seconds: the claims of pods
that start together. The server closes one that is idle after 90 s (k8s.io/apiserver, pkg/server/secure_serving.go)."""

API_KEEPALIVE_IDLE_S: Final = 30
API_KEEPALIVE_INTERVAL_S: Final = 10
API_KEEPALIVE_PROBES: Final = 3
"""TCP's own probes of a silent connection: a watch whose server or path is gone without a word ends after a minute, and
the process is not woken for it."""

JSON: Final = "application/json"
JSON_PATCH: Final = "application/json-patch+json"
MERGE_PATCH: Final = "application/merge-patch+json"
METADATA_ONLY: Final = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
"""The server leaves spec and status out: a Node's status is tens of kilobytes. Of one object, and of a watch."""
METADATA_OF_LIST: Final = METADATA_ONLY.replace("Metadata;", "MetadataList;")
"""The same of a list: by the other name a server refuses it (406)."""

_AGENT: Final = f"gpuactors/{VERSION}"

_KEEPALIVE: Final = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, API_KEEPALIVE_IDLE_S),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, API_KEEPALIVE_INTERVAL_S),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, API_KEEPALIVE_PROBES),
)

_FAILURES: Final = (
    httpcore.TimeoutException,
    httpcore.NetworkError,
    httpcore.ProtocolError,
    httpcore.UnsupportedProtocol,
    OSError,
    trio.BrokenResourceError,
    trio.ClosedResourceError,
)
"""The errors of a connection."""

T = TypeVar("T")


class Call(Struct, frozen=True):
    """One request."""

    what: str
    """The act, for the sentence of an error: `read the claim default/vm`."""
    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    content_type: str = JSON
    accept: str = JSON


class _Answer(Struct, frozen=True):
    status: int
    retry_after: bytes
    """The header `Retry-After`; empty if there is none."""
    chunks: AsyncIterator[bytes]


@final
class _Stream(httpcore.AsyncNetworkStream):
    """The stream of a connection, which knows how often it was read: httpcore goes on with what it has read beyond the
    end of an answer, and does not say so."""

    def __init__(self, stream: httpcore.AsyncNetworkStream) -> None:
        self._stream = stream
        self.reads = 0

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        self.reads += 1
        return await self._stream.read(max_bytes, timeout)

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        await self._stream.write(buffer, timeout)

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.AsyncNetworkStream:
        return _Stream(await self._stream.start_tls(ssl_context, server_hostname, timeout))

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


@final
class _Network(httpcore.AsyncNetworkBackend):
    """Makes connections of which each is a `_Stream`."""

    def __init__(self, backend: httpcore.AsyncNetworkBackend) -> None:
        self._backend = backend

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        return _Stream(await self._backend.connect_tcp(host, port, timeout, local_address, socket_options))


class _Kept(Struct, frozen=True):
    """An idle connection."""

    connection: httpcore.AsyncHTTPConnection
    tls: ssl.SSLContext | None
    until: float
    """When it is closed, by trio's clock."""
    reads: int
    """The number of reads of its stream by then: see `_Stream`."""


@final
class ApiClient:
    """The client of one API server."""

    def __init__(self, access: FileAccess, backend: httpcore.AsyncNetworkBackend | None = None) -> None:
        """`backend` makes the connections; the simulation brings its own."""
        self.server: Final = str(access.server)
        """The server's address, for sentences."""
        self._access = access
        self._backend = _Network(backend or httpcore.TrioBackend())
        self._tls: tuple[Credentials, ssl.SSLContext] | None = None
        self._keeps = False
        self._kept: _Kept | None = None
        self._was_kept = trio.Event()

    async def ask(self, call: Call) -> bytes:
        """Make the request; return the body of the answer. Raises `ApiError`, and `AccessError` if our credentials
        cannot be read."""
        try:
            with trio.fail_after(API_REQUEST_S):
                async with self._answer(call, API_REQUEST_S) as answer:
                    return await self._whole(answer, call)
        except trio.TooSlowError as exc:
            raise errors.late(call.what, self.server, API_REQUEST_S) from exc

    async def decoded(self, call: Call, kind: type[T]) -> T:
        """Make the request; return the object in the answer. Raises as `ask`, and `ApiMalformed`."""
        return errors.answered(call.what, self.server, await self.ask(call), kind)

    @asynccontextmanager
    async def lines(self, call: Call, silent_s: float) -> AsyncIterator[AsyncGenerator[bytes]]:
        """Yield the lines of an answer that goes on: a watch. The iteration ends when the server ends it, and raises
        `ApiAway` if the connection breaks or says nothing for `silent_s`; else as `ask`."""
        async with self._answer(call, silent_s) as answer:
            if answer.status >= 300:
                await self._whole(answer, call)
            async with aclosing(self._split(answer, call)) as lines:
                yield lines

    @asynccontextmanager
    async def _answer(self, call: Call, silent_s: float) -> AsyncIterator[_Answer]:
        """Yield the beginning of the answer, within API_REQUEST_S; the connection is closed with the context."""
        connection: httpcore.AsyncHTTPConnection | None = None
        response: httpcore.Response | None = None
        chunks: AsyncIterator[bytes] | None = None
        tls: ssl.SSLContext | None = None
        try:
            try:
                with trio.fail_after(API_REQUEST_S):
                    credentials = await self._access.credentials()
                    request = self._request(call, credentials, silent_s)
                    tls = self._context(credentials) if self._access.server.scheme == "https" else None
                    if call.method == "GET" and (kept := await self._take_kept(tls)) is not None:
                        connection = kept.connection
                        # The server has closed it meanwhile, or is gone without a word.
                        with trio.move_on_after(API_CONNECT_S), suppress(*_FAILURES):
                            response = await connection.handle_async_request(request)
                        if response is not None and _reads(response) == kept.reads:
                            response = None  # what was there before the request is no answer to it
                    if response is None:
                        await _close(connection)
                        connection = self._connection(request, tls)
                        response = await connection.handle_async_request(request)
            except trio.TooSlowError as exc:
                raise errors.late(call.what, self.server, API_REQUEST_S) from exc
            except _FAILURES as exc:
                raise errors.away(call.what, self.server, exc) from exc
            chunks = aiter(response.stream)  # type: ignore[arg-type]  # an asynchronous one, as the connection is
            yield _Answer(response.status, _header(response, b"retry-after"), chunks)
        finally:
            with trio.CancelScope(shield=True):
                if response is not None:
                    # It is idle now, or closed where the answer was not read to its end.
                    with suppress(*_FAILURES):
                        await response.aclose()
                await self._keep_or_close(connection, tls, 0 if response is None else _reads(response))
            if chunks is not None:
                # httpcore's generators end by an error of the closed connection, and not at some time by themselves.
                with suppress(Exception):
                    async for _ in chunks:
                        pass

    # --- the kept connection ------------------------------------------------------------------------------

    async def keep(self) -> None:
        """Keep the connection of an answer for the next read, at most for API_KEPT_S. Runs for ever; while it does not,
        each request has a connection of its own."""
        self._keeps = True
        try:
            while True:
                await self._was_kept.wait()
                self._was_kept = trio.Event()
                while (kept := self._kept) is not None:
                    await trio.sleep_until(kept.until)
                    if self._kept is kept:
                        self._kept = None
                        await _close(kept.connection)
        finally:
            self._keeps = False
            if (kept := self._kept) is not None:
                self._kept = None
                await _close(kept.connection)

    async def _take_kept(self, tls: ssl.SSLContext | None) -> _Kept | None:
        """Return the kept connection, if it still leads to the server and has the present authorities and identity."""
        if (kept := self._kept) is None:
            return None
        self._kept = None
        if kept.tls is tls and not kept.connection.has_expired():
            return kept
        await _close(kept.connection)
        return None

    async def _keep_or_close(
        self, connection: httpcore.AsyncHTTPConnection | None, tls: ssl.SSLContext | None, reads: int
    ) -> None:
        """Keep a connection that is idle now, if none is kept; close it otherwise."""
        if connection is None or not self._keeps or self._kept is not None or not connection.is_available():
            await _close(connection)
            return
        self._kept = _Kept(connection, tls, trio.current_time() + API_KEPT_S, reads)
        self._was_kept.set()

    # --- requests -----------------------------------------------------------------------------------------

    def _request(self, call: Call, credentials: Credentials, silent_s: float) -> httpcore.Request:
        server = self._access.server
        query = f"?{urlencode(call.query)}" if call.query else ""
        url = httpcore.URL(
            scheme=server.scheme,
            host=server.host,
            port=server.port,
            target=f"{server.base}{call.path}{query}",
        )
        host = f"[{server.host}]" if ":" in server.host else server.host
        headers = [("Host", f"{host}:{server.port}"), ("Accept", call.accept), ("User-Agent", _AGENT)]
        if call.body is not None:
            headers += [("Content-Type", call.content_type), ("Content-Length", str(len(call.body)))]
        if credentials.token is not None:
            headers.append(("Authorization", f"Bearer {credentials.token}"))
        extensions: dict[str, object] = {
            "timeout": {"connect": API_CONNECT_S, "write": API_REQUEST_S, "read": silent_s}
        }
        if server.tls_name is not None:
            extensions["sni_hostname"] = server.tls_name
        return httpcore.Request(call.method, url, headers=headers, content=call.body, extensions=extensions)

    def _connection(
        self, request: httpcore.Request, tls: ssl.SSLContext | None
    ) -> httpcore.AsyncHTTPConnection:
        return httpcore.AsyncHTTPConnection(
            request.url.origin,
            ssl_context=tls,
            network_backend=self._backend,
            socket_options=_KEEPALIVE,
        )

    def _context(self, credentials: Credentials) -> ssl.SSLContext:
        """Return the TLS context, made anew when a certificate or key has changed."""
        trusted = replace(credentials, token=None)
        if self._tls is None or self._tls[0] != trusted:
            self._tls = trusted, tls_context(trusted)
        return self._tls[1]

    async def _whole(self, answer: _Answer, call: Call) -> bytes:
        """Return the body of an answer. Raises `ApiRefused` with it where the answer is one of an error."""
        body = bytearray()
        try:
            async for chunk in answer.chunks:
                body += chunk
                if len(body) > API_BODY_MAX_BYTES:
                    raise errors.malformed(
                        call.what, self.server, f"it has more than {API_BODY_MAX_BYTES} bytes"
                    )
        except _FAILURES as exc:
            raise errors.away(call.what, self.server, exc) from exc
        if answer.status >= 300:
            refusal = errors.refusal(answer.status, bytes(body), answer.retry_after)
            raise errors.refused(call.what, self.server, refusal)
        return bytes(body)

    async def _split(self, answer: _Answer, call: Call) -> AsyncGenerator[bytes]:
        rest = bytearray()
        try:
            async for chunk in answer.chunks:
                rest += chunk
                *lines, last = rest.split(b"\n")
                rest = bytearray(last)
                for line in filter(None, lines):
                    yield bytes(line)
                if len(rest) > API_LINE_MAX_BYTES:
                    raise errors.malformed(
                        call.what,
                        self.server,
                        f"a line of it has more than {API_LINE_MAX_BYTES} bytes",
                    )
        except _FAILURES as exc:
            raise errors.away(call.what, self.server, exc) from exc


async def _close(connection: httpcore.AsyncHTTPConnection | None) -> None:
    if connection is not None:
        with trio.CancelScope(shield=True), suppress(*_FAILURES):
            await connection.aclose()


def _reads(response: httpcore.Response) -> int:
    stream = response.extensions["network_stream"]
    assert isinstance(stream, _Stream), "`_Network` has made it"
    return stream.reads


def _header(response: httpcore.Response, name: bytes) -> bytes:
    return next((value for key, value in response.headers if key.lower() == name), b"")
