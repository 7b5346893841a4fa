"""The HTTP server over real sockets: who breaks the rules, is slow or is one too many costs only itself."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from gpuactors import limits
from gpuactors.http.serve import TcpServer, UnixServer
from gpuactors.ports_http import HttpAnswer, HttpError, HttpServer

ASKED = b"GET /x?y=1 HTTP/1.1\r\nHost: a\r\n\r\n"


async def echo(path: str) -> HttpAnswer:
    return HttpAnswer(200, path.encode())


@asynccontextmanager
async def served(directory: Path) -> AsyncIterator[Path]:
    async with serving(UnixServer(str(directory / "s"))):
        yield directory / "s"


@asynccontextmanager
async def serving(server: HttpServer) -> AsyncIterator[str]:
    listening, names = trio.Event(), list[str]()

    def noted(name: str) -> None:
        names.append(name)
        listening.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.serve, echo, noted)
        await listening.wait()
        yield names[0]
        nursery.cancel_scope.cancel()


async def dial(path: Path) -> trio.SocketStream:
    return await trio.open_unix_socket(str(path))


async def everything(stream: trio.SocketStream) -> bytes:
    found = b""
    async with stream:
        try:
            while data := await stream.receive_some():
                found += data
        except trio.BrokenResourceError:
            pass
    return found


async def answer(path: Path, request: bytes) -> bytes:
    stream = await dial(path)
    await stream.send_all(request)
    return await everything(stream)


async def test_a_request_is_answered_by_its_path_and_the_connection_is_closed(tmp_path: Path) -> None:
    async with served(tmp_path) as path:
        found = await answer(path, ASKED)
    head, _, body = found.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"Connection: close" in head
    assert body == b"/x"


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"garbage\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\n\r\n", b"400"),  # no Host
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 100_000 + b"\r\n\r\n", b"431"),
        (b"DELETE / HTTP/1.1\r\nHost: a\r\n\r\n", b"405"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc", b"200"),
        (b"GET / HTTP/1.0\r\n\r\n", b"200"),
        (b"HEAD / HTTP/1.1\r\nHost: a\r\n\r\n", b"200"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"400"),  # a TLS client
    ],
)
async def test_what_is_no_request_gets_its_status_and_harms_nobody(
    tmp_path: Path, request_: bytes, status: bytes
) -> None:
    async with served(tmp_path) as path:
        found = await answer(path, request_)
        assert found.split(b" ")[1] == status
        if request_.startswith(b"HEAD"):
            assert found.endswith(b"\r\n\r\n")
        assert (await answer(path, ASKED)).endswith(b"/x")


async def test_a_client_that_leaves_at_once_or_in_its_head_is_forgotten(tmp_path: Path) -> None:
    async with served(tmp_path) as path:
        for part in (b"", b"GET / HT", ASKED):
            stream = await dial(path)
            if part:
                await stream.send_all(part)
            await stream.aclose()
        assert (await answer(path, ASKED)).endswith(b"/x")


async def test_a_slow_client_loses_its_place_after_the_deadline(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with served(tmp_path) as path:
        stream = await dial(path)
        await stream.send_all(b"GET / HTTP/1.1\r\n")
        began = trio.current_time()
        assert await everything(stream) == b""
        assert trio.current_time() - began == pytest.approx(limits.HTTP_REQUEST_S)


async def test_one_connection_too_many_is_closed_and_the_others_go_on(tmp_path: Path) -> None:
    async with served(tmp_path) as path:
        held = [await dial(path) for _ in range(limits.HTTP_CONNECTIONS_MAX)]
        for stream in held:
            await stream.send_all(ASKED[:10])
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert await everything(await dial(path)) == b""
        await held[0].send_all(ASKED[10:])
        assert (await everything(held[0])).endswith(b"/x")
        assert (await answer(path, ASKED)).endswith(b"/x")
        for stream in held[1:]:
            await stream.aclose()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


async def test_every_address_is_both_families() -> None:
    port = free_port()
    async with serving(TcpServer(None, port)) as name:
        assert name == f":{port}"
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(ASKED)
            assert b"200 OK" in await stream.receive_some()


@pytest.mark.parametrize(
    ("server", "local"),
    [
        (UnixServer("/x"), True),
        (TcpServer("127.0.0.1", 1), True),
        (TcpServer("::1", 1), True),
        (TcpServer("localhost", 1), True),
        (TcpServer("10.0.0.1", 1), False),
        (TcpServer(None, 1), False),
    ],
)
def test_who_reaches_an_address(server: HttpServer, local: bool) -> None:
    assert server.is_local is local


def taken_port() -> tuple[HttpServer, str]:
    other = socket.socket()
    other.bind(("127.0.0.1", 0))
    other.listen()
    HELD.append(other)
    return TcpServer("127.0.0.1", other.getsockname()[1]), "another process listens there: end that one"


HELD: list[socket.socket] = []


@pytest.mark.parametrize(
    "case",
    [
        taken_port,
        lambda: (TcpServer("192.0.2.1", free_port()), "this machine does not have that address"),
        lambda: (TcpServer("no.such.name.invalid", 1), "there is no such address"),
        lambda: (UnixServer("/nowhere/s"), "the directory /nowhere does not exist"),
    ],
)
async def test_an_address_that_cannot_be_had_is_a_sentence(
    case: Callable[[], tuple[HttpServer, str]],
) -> None:
    server, sentence = case()
    with pytest.raises(HttpError, match=sentence):
        await server.serve(echo, lambda _: None)
    while HELD:
        HELD.pop().close()
