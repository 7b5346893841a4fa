"""The connection to the API server that is kept for the next read: how long, for what, and what ends it."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpcore
import pytest
import trio
import trustme
from trio.testing import MockClock, wait_all_tasks_blocked

from gpuactors.core.values.claim import ClaimAbsent, ClaimName, ClaimUid
from gpuactors.kube.client import API_CONNECT_S, API_KEPT_S, ApiClient, Call
from gpuactors.kube.config import FileAccess, Server
from gpuactors.ports.kube import ApiAway, ApiRefused
from gpuactors_simulation.kube.http import serve_stream
from gpuactors_simulation.kube.server import ApiFault, FakeApiServer
from tests.kube.cluster import Cluster, cluster, spec
from tests.support.patience import patient

NOBODY = ClaimName("default", "nope", ClaimUid("x"))
GROUP = Call("read the group", "GET", "/apis/resource.k8s.io")


@pytest.fixture
async def at() -> AsyncIterator[Cluster]:
    """A cluster whose client keeps a connection."""
    async with cluster() as found, trio.open_nursery() as nursery:
        nursery.start_soon(found.client.keep)
        await wait_all_tasks_blocked()
        yield found
        nursery.cancel_scope.cancel()
    assert found.api.connections == 0


async def test_reads_one_after_the_other_have_one_connection(at: Cluster, autojump_clock: MockClock) -> None:
    for _ in range(20):
        assert await at.claims.read(NOBODY) == ClaimAbsent()
        await trio.sleep(API_KEPT_S - 1.0)
    assert (at.api.dialled, at.api.connections) == (1, 1)


async def test_reads_at_the_same_time_have_their_own_and_one_is_kept(
    at: Cluster, autojump_clock: MockClock
) -> None:
    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(at.claims.read, NOBODY)
    assert (at.api.dialled, at.api.connections) == (5, 1)


async def test_an_idle_one_is_closed(at: Cluster, autojump_clock: MockClock) -> None:
    await at.node.read()
    await trio.sleep(API_KEPT_S + 1.0)
    assert (at.api.dialled, at.api.connections) == (1, 0)
    await at.node.read()
    assert at.api.dialled == 2


async def test_a_watch_has_the_connection_of_its_list(at: Cluster, autojump_clock: MockClock) -> None:
    async with at.slices.follow() as events:
        await anext(events)
        await at.slices.create(spec("gpu-a"), 0, at.node_uid)
        await anext(events)
        assert (at.api.dialled, at.api.connections) == (2, 1), "the write had another one"
        await at.node.read()
        assert (at.api.dialled, at.api.connections) == (3, 2)
    assert at.api.connections == 1, "a watch that is left ends its connection"


async def test_a_write_has_one_of_its_own(at: Cluster, autojump_clock: MockClock) -> None:
    """Whether it was carried out could not be known where the kept one was dead, and it is not tried twice."""
    await at.node.read()
    await at.slices.create(spec("gpu-a"), 0, at.node_uid)
    assert at.api.dialled == 2


async def test_a_refusal_is_an_answer_and_the_connection_is_kept(
    at: Cluster, autojump_clock: MockClock
) -> None:
    at.server.order(ApiFault.FORBIDDEN)
    with pytest.raises(ApiRefused):
        await at.node.read()
    await at.node.read()
    assert at.api.dialled == 1


@pytest.mark.parametrize("is_back", [True, False])
async def test_one_that_broke_meanwhile_fails_no_read(
    at: Cluster, is_back: bool, autojump_clock: MockClock
) -> None:
    await at.node.read()
    at.server.go_away()
    at.server.away = not is_back
    if is_back:
        await at.node.read()
        assert at.api.dialled == 2
    else:
        with pytest.raises(ApiAway):
            await at.node.read()


async def test_one_that_breaks_under_a_read_is_tried_once_again(
    at: Cluster, autojump_clock: MockClock
) -> None:
    await at.node.read()
    asked = len(at.server.requests)
    at.server.order(ApiFault.ANSWER_LOST)
    await at.node.read()
    assert (at.api.dialled, len(at.server.requests) - asked) == (2, 2)
    await trio.sleep(API_KEPT_S + 1.0)
    at.server.order(ApiFault.ANSWER_LOST)
    with pytest.raises(ApiAway):
        await at.node.read()
    assert at.api.dialled == 3, "a new one that breaks is the server's failure"


async def test_one_that_does_not_answer_is_given_up_for_a_new_one(
    at: Cluster, autojump_clock: MockClock
) -> None:
    """As where the server's machine is gone without a word, and another one has its address."""
    await at.node.read()
    at.server.order(ApiFault.HANGS)
    began = trio.current_time()
    await at.node.read()
    assert trio.current_time() - began == pytest.approx(API_CONNECT_S)
    assert (at.api.dialled, at.api.connections) == (2, 1)


async def test_a_new_one_that_does_not_answer_ends_at_the_deadline_and_is_not_kept(
    at: Cluster, autojump_clock: MockClock
) -> None:
    at.server.order(ApiFault.HANGS)
    with pytest.raises(ApiAway, match="did not answer in 10 s"):
        await at.node.read()
    assert at.api.connections == 0


# --- a server that sends too much ----------------------------------------------------------------------------


class Scripted(httpcore.AsyncNetworkBackend):
    """Connections that answer with these bytes, whatever is asked: those of one read after the other."""

    def __init__(self, *connections: list[bytes]) -> None:
        self.left = [*connections]

    async def connect_tcp(self, *_: object, **__: object) -> httpcore.AsyncNetworkStream:
        return httpcore.AsyncMockStream(self.left.pop(0))


def answer(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n0\r\n\r\n"


@pytest.mark.parametrize("first", [answer(b"first"), CHUNKED], ids=["length", "chunked"])
@pytest.mark.parametrize(
    ("beyond", "connections"),
    [(b"", 1), (answer(b"left"), 2), (b"HTTP/1.1 200 OK\r\n\r\n", 2), (b"left", 2), (b"\0", 2)],
    ids=["nothing", "another answer", "its beginning", "no answer", "a byte"],
)
async def test_what_came_with_an_answer_is_not_the_next_one(
    first: bytes, beyond: bytes, connections: int, autojump_clock: MockClock
) -> None:
    network = Scripted([first + beyond, answer(b"next")], [answer(b"next")])
    client = ApiClient(FileAccess(Server("http", "api", 80)), network)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.keep)
        await wait_all_tasks_blocked()
        assert [await client.ask(GROUP), await client.ask(GROUP)] == [b"first", b"next"]
        assert len(network.left) == 2 - connections
        nursery.cancel_scope.cancel()


# --- over TLS -------------------------------------------------------------------------------------------------


class Handshakes:
    """A fake API server with TLS on a free port of loopback, and how many connections it had."""

    def __init__(self) -> None:
        self.server = FakeApiServer(tokens=frozenset({"first", "second"}))
        self.count = 0

    async def _handle(self, stream: trio.abc.Stream) -> None:
        self.count += 1
        try:
            await serve_stream(self.server, stream)
        except* trio.BrokenResourceError:
            pass

    @asynccontextmanager
    async def keeping(self, ca: trustme.CA, access: Path) -> AsyncIterator[ApiClient]:
        """A client that keeps its connection; its token and CA are the files of this directory."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        ca.issue_cert("127.0.0.1").configure_cert(context)
        with trio.fail_after(patient(20.0)):
            async with trio.open_nursery() as nursery:
                listeners = await nursery.start(trio.serve_ssl_over_tcp, self._handle, 0, context)
                port = listeners[0].transport_listener.socket.getsockname()[1]
                where = Server("https", "127.0.0.1", port)
                client = ApiClient(FileAccess(where, token=access / "token", ca=access / "ca.crt"))
                nursery.start_soon(client.keep)
                await wait_all_tasks_blocked()
                yield client
                nursery.cancel_scope.cancel()


async def test_a_token_that_is_renewed_goes_with_the_next_request(tmp_path: Path) -> None:
    ca, at = trustme.CA(), Handshakes()
    (tmp_path / "ca.crt").write_bytes(ca.cert_pem.bytes())
    async with at.keeping(ca, tmp_path) as client:
        for token in ("first", "second"):
            (tmp_path / "token").write_text(token)
            await client.ask(GROUP)
        (tmp_path / "token").write_text("expired")
        with pytest.raises(ApiRefused, match="401"):
            await client.ask(GROUP)
    assert at.count == 1


async def test_a_ca_that_is_renewed_ends_the_kept_connection(tmp_path: Path) -> None:
    ca, at = trustme.CA(), Handshakes()
    (tmp_path / "token").write_text("first")
    (tmp_path / "ca.crt").write_bytes(ca.cert_pem.bytes())
    async with at.keeping(ca, tmp_path) as client:
        await client.ask(GROUP)
        (tmp_path / "ca.crt").write_bytes(trustme.CA().cert_pem.bytes())
        with pytest.raises(ApiAway, match="certificate that is not valid"):
            await client.ask(GROUP)
    assert at.count == 2


async def test_one_that_has_expired_is_closed_when_it_is_noticed(
    at: Cluster, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its descriptor is this process's until it is closed, whatever the other end did."""
    await at.node.read()
    assert at.client._kept is not None
    expired = at.client._kept.connection
    monkeypatch.setattr(expired, "has_expired", lambda: True)
    await at.node.read()
    assert (at.api.dialled, at.api.connections) == (2, 1)
    assert expired.is_closed()


async def test_a_server_that_closes_it_is_noticed_before_the_next_read(tmp_path: Path) -> None:
    ca, at = trustme.CA(), Handshakes()
    (tmp_path / "token").write_text("first")
    (tmp_path / "ca.crt").write_bytes(ca.cert_pem.bytes())
    async with at.keeping(ca, tmp_path) as client:
        await client.ask(GROUP)
        at.server.break_connections()
        await wait_all_tasks_blocked(0.01)
        asked = len(at.server.requests)
        await client.ask(GROUP)
        assert (at.count, len(at.server.requests) - asked) == (2, 1)
