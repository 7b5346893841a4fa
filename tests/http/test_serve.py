"""The HTTP server over real sockets: who breaks the rules, is slow or is one too many costs only itself."""

from __future__ import annotations

import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from gpuactors.concurrency.first_use import FirstUse
from gpuactors.http import serve
from gpuactors.http.exchange import Exchange, exchange
from gpuactors.http.serve import HTTP_ANSWER_S, HTTP_CLIENT_S, HTTP_CONNECTIONS_MAX, TcpServer, UnixServer
from gpuactors.ports.http import Answering, HttpAnswer, HttpError, HttpRequest, HttpServer
from tests.support.log_lines import logged

ASKED = b"GET /x?y=1 HTTP/1.1\r\nHost: a\r\n\r\n"


async def echo(request: HttpRequest) -> HttpAnswer:
    return HttpAnswer(200, request.path.encode())


async def where_from(request: HttpRequest) -> HttpAnswer:
    return HttpAnswer(200, b"here" if request.is_from_here else b"elsewhere")


async def large(_: HttpRequest) -> HttpAnswer:
    return HttpAnswer(200, bytes(8 << 20))


def count_nothing() -> None: ...


@asynccontextmanager
async def served(directory: Path) -> AsyncIterator[Path]:
    async with serving(UnixServer(str(directory / "s"))):
        yield directory / "s"


@asynccontextmanager
async def serving(
    server: HttpServer, answering: Answering = echo, turned_away: Callable[[], None] = count_nothing
) -> AsyncIterator[str]:
    listening, names = trio.Event(), list[str]()

    def noted(name: str) -> None:
        names.append(name)
        listening.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.serve, answering, noted, turned_away)
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


async def test_an_import_that_fails_costs_the_request_that_meets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times: list[int] = []

    def load() -> Exchange:
        times.append(1)
        if len(times) == 1:
            raise ImportError("the file is gone")
        return exchange

    monkeypatch.setattr(serve, "EXCHANGE", FirstUse(load))
    with logged() as lines:
        async with served(tmp_path) as path:
            assert await answer(path, ASKED) == b""
            assert (await answer(path, ASKED)).endswith(b"/x")
    assert [line.event for line in lines] == ["actor.failed"]


async def test_a_bug_costs_the_request_that_meets_it(tmp_path: Path) -> None:
    """Issue 24, 1."""

    async def deep_at_x(request: HttpRequest) -> HttpAnswer:
        if request.path == "/x":
            raise RecursionError("too deep")
        return await echo(request)

    with logged() as lines:
        async with serving(UnixServer(str(tmp_path / "s")), deep_at_x):
            for _ in range(2):
                assert (await answer(tmp_path / "s", ASKED)).startswith(b"HTTP/1.1 500 ")
                assert (await answer(tmp_path / "s", ASKED.replace(b"/x", b"/y"))).endswith(b"/y")
    assert [line.event for line in lines] == ["actor.failed"] * 2


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


@pytest.fixture
def imported() -> None:
    """A clock that jumps does not wait for the thread of the import: it is done before."""
    trio.run(serve.EXCHANGE.get)


@pytest.mark.usefixtures("imported")
async def test_a_slow_client_loses_its_place_after_the_deadline(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async with served(tmp_path) as path:
        stream = await dial(path)
        await stream.send_all(b"GET / HTTP/1.1\r\n")
        began = trio.current_time()
        assert await everything(stream) == b""
        assert trio.current_time() - began == pytest.approx(HTTP_CLIENT_S)


@pytest.mark.usefixtures("imported")
async def test_an_answer_that_takes_us_longer_than_a_client_may_take_is_sent(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    async def slowly(request: HttpRequest) -> HttpAnswer:
        await trio.sleep(3 * HTTP_CLIENT_S)
        return await echo(request)

    async with serving(UnixServer(str(tmp_path / "s")), slowly):
        assert (await answer(tmp_path / "s", ASKED)).endswith(b"/x")


@pytest.mark.usefixtures("imported")
async def test_an_answer_that_never_comes_holds_its_place_until_the_deadline(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """A page whose library is on a disk that hangs."""

    async def never(_: HttpRequest) -> HttpAnswer:
        return await trio.sleep_forever()

    async with serving(UnixServer(str(tmp_path / "s")), never):
        began = trio.current_time()
        with trio.move_on_after(2 * HTTP_ANSWER_S):
            assert await answer(tmp_path / "s", ASKED) == b""
        assert trio.current_time() - began == pytest.approx(HTTP_ANSWER_S)


async def test_an_import_that_never_ends_holds_a_place_until_the_deadline(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    readable = threading.Event()

    def hangs() -> Exchange:
        readable.wait()
        return exchange

    monkeypatch.setattr(serve, "EXCHANGE", FirstUse(hangs))
    async with served(tmp_path) as path:
        began = trio.current_time()
        with trio.move_on_after(2 * HTTP_ANSWER_S):
            assert await answer(path, ASKED) == b""
        readable.set()
        assert trio.current_time() - began == pytest.approx(HTTP_ANSWER_S)


@pytest.mark.usefixtures("imported")
async def test_a_client_that_does_not_take_its_answer_loses_its_place_after_the_deadline(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    answered_at = list[float]()

    async def slowly(request: HttpRequest) -> HttpAnswer:
        await trio.sleep(3 * HTTP_CLIENT_S)
        answered_at.append(trio.current_time())
        return await large(request)

    async with serving(UnixServer(str(tmp_path / "s")), slowly):
        stream = await dial(tmp_path / "s")
        await stream.send_all(ASKED)
        await trio.sleep(3.5 * HTTP_CLIENT_S)
        assert trio.current_time() - answered_at[0] == pytest.approx(HTTP_CLIENT_S / 2)
        await trio.sleep(HTTP_CLIENT_S)
        found = await everything(stream)
        assert b"\r\n\r\n" in found
        assert len(found) < 8 << 20


async def dial_many(path: Path, first: bytes, count: int = HTTP_CONNECTIONS_MAX) -> list[trio.SocketStream]:
    held = [await dial(path) for _ in range(count)]
    for stream in held:
        await stream.send_all(first)
    await trio.testing.wait_all_tasks_blocked(0.05)
    return held


async def close_all(streams: Iterable[trio.SocketStream]) -> None:
    for stream in streams:
        await stream.aclose()


async def test_a_client_that_was_answered_leaves_its_place(tmp_path: Path) -> None:
    """Else every scrape closes a connection after the first hour."""
    turned_away = list[int]()
    server = UnixServer(str(tmp_path / "s"))
    async with serving(server, turned_away=lambda: turned_away.append(1)):
        for _ in range(HTTP_CONNECTIONS_MAX + 3):
            assert (await answer(tmp_path / "s", ASKED)).endswith(b"/x")
    assert turned_away == []


async def test_the_oldest_slow_client_makes_room_for_a_newcomer(tmp_path: Path) -> None:
    closed = list[None]()
    server = UnixServer(str(tmp_path / "s"))
    async with serving(server, turned_away=lambda: closed.append(None)):
        path = tmp_path / "s"
        held = await dial_many(path, ASKED[:10])
        assert closed == []
        assert (await answer(path, ASKED)).endswith(b"/x")
        assert len(closed) == 1
        for kept in (held[-1], held[1]):  # first, as in the end each loses its place by the clock
            await kept.send_all(ASKED[10:])
            assert (await everything(kept)).endswith(b"/x")
        assert await everything(held[0]) == b""
        await close_all(held)


async def test_a_client_that_does_not_take_its_answer_makes_room_as_well(tmp_path: Path) -> None:
    async with serving(UnixServer(str(tmp_path / "s")), large):
        held = await dial_many(tmp_path / "s", ASKED)
        assert (await answer(tmp_path / "s", ASKED)).startswith(b"HTTP/1.1 200")
        await close_all(held)


async def test_who_waits_for_us_keeps_the_place(tmp_path: Path) -> None:
    """A liveness probe takes 0.8 s where a socket hangs: nobody who comes then may cost it its answer."""
    closed, asked, go_on = list[None](), list[HttpRequest](), trio.Event()

    async def slowly(request: HttpRequest) -> HttpAnswer:
        asked.append(request)
        await go_on.wait()
        return HttpAnswer(200, b"done")

    async with serving(UnixServer(str(tmp_path / "s")), slowly, lambda: closed.append(None)):
        held = await dial_many(tmp_path / "s", ASKED)
        assert len(asked) == HTTP_CONNECTIONS_MAX
        assert await everything(await dial(tmp_path / "s")) == b""
        go_on.set()
        for stream in held:
            assert (await everything(stream)).endswith(b"done")
    assert len(closed) == 1


async def test_one_host_takes_no_place_of_another_hosts() -> None:
    port, other = free_port(), "127.0.0.2"
    async with serving(TcpServer("127.0.0.1", port)):
        probe = trio.socket.socket()
        await probe.bind((other, 0))
        await probe.connect(("127.0.0.1", port))
        await probe.send(ASKED[:10])
        held = [await trio.open_tcp_stream("127.0.0.1", port) for _ in range(3 * HTTP_CONNECTIONS_MAX)]
        await probe.send(ASKED[10:])
        assert (await everything(trio.SocketStream(probe))).endswith(b"/x")
        await close_all(held)


async def test_the_body_of_a_get_is_not_read(tmp_path: Path) -> None:
    """One client that sent for ever made kubelet's Allocate ten times as slow."""
    async with served(tmp_path) as path:
        stream = await dial(path)
        await stream.send_all(ASKED[:-2] + b"Transfer-Encoding: chunked\r\n\r\n10000\r\n")
        assert (await everything(stream)).endswith(b"/x")


@pytest.mark.parametrize(
    ("host", "said"),
    [
        (b"127.0.0.1:9400", b"here"),
        (b"localhost", b"here"),
        (b"[::1]:9400", b"here"),
        (b"gpu-node.example:9400", b"elsewhere"),  # a page whose name was made to mean this machine
        (b"localhost.example", b"elsewhere"),
        (b"10.0.0.1", b"elsewhere"),
    ],
)
async def test_a_name_that_is_not_this_machines_is_from_elsewhere(host: bytes, said: bytes) -> None:
    port = free_port()
    async with serving(TcpServer("127.0.0.1", port), where_from):
        stream = await trio.open_tcp_stream("127.0.0.1", port)
        await stream.send_all(b"GET / HTTP/1.1\r\nHost: " + host + b"\r\n\r\n")
        assert (await everything(stream)).endswith(b"\r\n\r\n" + said)


async def test_an_address_of_this_machine_that_is_not_loopback_is_from_elsewhere() -> None:
    """With `route_localnet`, and at a server of every address, a packet comes to loopback from another host."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as found:
        try:
            found.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no address but loopback")
        own: str = found.getsockname()[0]
    port = free_port()
    async with serving(TcpServer(None, port), where_from):
        stream = await trio.open_tcp_stream(own, port)
        await stream.send_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await everything(stream)).endswith(b"elsewhere")


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
        await server.serve(echo, lambda _: None, count_nothing)
    while HELD:
        HELD.pop().close()
