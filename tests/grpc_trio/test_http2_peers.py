"""Peers that break HTTP/2, or merely stretch it: none costs more than its own connection, none costs memory."""

from __future__ import annotations

import random
import tracemalloc
from typing import NoReturn

import h2.connection
import h2.events
import h2.settings
import hpack
import pytest
import trio
import trio.abc
import trio.testing
from grpclib import Status

from gpuactors.grpc_trio import Server
from gpuactors.grpc_trio.connection import Http2Connection
from gpuactors.grpc_trio.limits import (
    GRPC_CONNECTIONS_MAX,
    GRPC_HANDSHAKE_DEADLINE_S,
    GRPC_OUTGOING_HIGH_BYTES,
    GRPC_OUTGOING_MAX_BYTES,
)
from gpuactors.grpc_trio.server import _ServerConnection
from gpuactors.kubelet.pb.deviceplugin.v1beta1 import AllocateRequest, Device, ListAndWatchResponse

from .support import (
    DRAIN_S,
    LIST_AND_WATCH,
    TEST_DEADLINE_S,
    Plugin,
    RawPeer,
    assert_alive,
    frame,
    raw_peer,
)

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
ALTSVC, UNKNOWN = 0x0A, 0xBE
END_STREAM, ACK, END_HEADERS = 1, 1, 4


@pytest.fixture
def plugin() -> Plugin:
    return Plugin()


@pytest.fixture
def server(plugin: Plugin) -> Server:
    return Server([plugin], drain_s=DRAIN_S)


def the_connection(server: Server) -> Http2Connection:
    """The server's side of its only connection."""
    (connection,) = server._connections
    assert isinstance(connection, _ServerConnection)
    return connection._http2


def request_headers(path: str = "/v1beta1.DevicePlugin/Allocate") -> bytes:
    return hpack.Encoder().encode(
        [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", path),
            (":authority", "localhost"),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
        ]
    )


def good_session() -> bytes:
    """Preface, SETTINGS, one Allocate."""
    return (
        PREFACE
        + frame(SETTINGS, 0, 0)
        + frame(HEADERS, END_HEADERS, 1, request_headers())
        + frame(DATA, END_STREAM, 1, b"\0\0\0\0\0")
    )


# --- what RFC 9113 says to ignore ---------------------------------------------------------------------------


@pytest.mark.trio
@pytest.mark.parametrize(
    "odd",
    [
        frame(UNKNOWN, 0xFF, 0, b"whatever"),
        frame(UNKNOWN, 0, 1, b""),
        frame(ALTSVC, 0, 0, b'\0\x09localhosth2=":1"'),
        frame(2, 0, 1, b"\0\0\0\0\x10"),
        frame(PING, ACK, 0, b"12345678"),
        frame(WINDOW_UPDATE, 0, 0, b"\0\0\0\x01"),
        frame(SETTINGS, 0, 0, b"\xba\xbe\0\0\0\1"),
    ],
    ids=[
        "unknown on 0",
        "unknown on 1",
        "ALTSVC",
        "PRIORITY",
        "unasked PING ack",
        "window",
        "unknown setting",
    ],
)
async def test_odd_frames_are_ignored(server: Server, odd: bytes) -> None:
    async with raw_peer(server) as peer:
        await peer.stream.send_all(odd)
        assert (await peer.outcome(await peer.call()))["grpc-status"] == "0"
        await peer.stream.send_all(odd)
        assert (await peer.outcome(await peer.call()))["grpc-status"] == "0"


# --- what is simply wrong -----------------------------------------------------------------------------------


@pytest.mark.trio
@pytest.mark.parametrize(
    "wrong",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\0" * 100,
        PREFACE + b"\xff" * 100,
        PREFACE + frame(SETTINGS, 0, 0, b"12345"),
        PREFACE + frame(SETTINGS, 0, 0) + frame(DATA, 0, 1, b"x"),
        PREFACE + frame(SETTINGS, 0, 0) + frame(HEADERS, END_HEADERS, 2, request_headers()),
        PREFACE + frame(SETTINGS, 0, 0) + frame(HEADERS, END_HEADERS, 1, b"\xff\xff\xff\xff\xff"),
        PREFACE + frame(SETTINGS, 0, 0) + frame(CONTINUATION, END_HEADERS, 1, b""),
        PREFACE + frame(SETTINGS, 0, 0) + frame(WINDOW_UPDATE, 0, 0, b"\0\0\0\0"),
        PREFACE + frame(SETTINGS, 0, 0) + frame(DATA, 0, 0, b"x" * 16_385)[:20],
    ],
)
async def test_wrong_bytes_cost_the_connection_only(server: Server, wrong: bytes) -> None:
    async with raw_peer(server, handshake=False) as peer:
        await peer.stream.send_all(wrong)
        await peer.read_to_end()
        await assert_alive(server)
    assert server.calls == 0


@pytest.mark.trio
async def test_the_peer_is_told_why(server: Server) -> None:
    async with raw_peer(server) as peer:
        await peer.stream.send_all(frame(DATA, 0, 1, b"x"))
        assert frame(GOAWAY, 0, 0, b"\0\0\0\0\0\0\0\1") in await peer.read_to_end()


@pytest.mark.trio
async def test_garbage_fuzz(server: Server) -> None:
    """300 seeded sessions: garbage, good sessions cut anywhere, good sessions with bytes changed, random frames."""
    dice = random.Random(20261120)
    good = good_session()
    for number in range(300):
        match number % 4:
            case 0:
                session = dice.randbytes(dice.randrange(1, 400))
            case 1:
                session = good[: dice.randrange(len(good))]
            case 2:
                damaged = bytearray(good)
                for _ in range(dice.randrange(1, 6)):
                    damaged[dice.randrange(len(damaged))] = dice.randrange(256)
                session = bytes(damaged)
            case _:
                session = PREFACE + frame(SETTINGS, 0, 0)
                for _ in range(dice.randrange(1, 8)):
                    kind, flags, stream_id = dice.randrange(12), dice.randrange(256), dice.randrange(6)
                    session += frame(kind, flags, stream_id, dice.randbytes(dice.randrange(40)))
        async with raw_peer(server, handshake=False) as peer:
            await peer.stream.send_all(session)
            await trio.testing.wait_all_tasks_blocked()
        assert (server.connections, server.calls) == (0, 0), f"session {number} left something behind"
    await assert_alive(server)


@pytest.mark.trio
async def test_session_cut_at_every_byte(server: Server) -> None:
    good = good_session()
    for length in range(len(good)):
        async with raw_peer(server, handshake=False) as peer:
            await peer.stream.send_all(good[:length])
            await trio.testing.wait_all_tasks_blocked()
        assert (server.connections, server.calls) == (0, 0)
    await assert_alive(server)


@pytest.mark.trio
async def test_fault_in_the_http2_layer_costs_the_connection_only(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Should some bytes break h2 or grpclib itself: logged with its traceback, no GOAWAY from a broken state."""

    def broken(*_: object) -> NoReturn:
        raise KeyError("a bug in the HTTP/2 layer")

    async with raw_peer(server) as peer:
        stream_id = await peer.call(LIST_AND_WATCH)
        await trio.testing.wait_all_tasks_blocked()
        with monkeypatch.context() as patch:
            patch.setattr(h2.connection.H2Connection, "receive_data", broken)
            await peer.stream.send_all(b"whatever")
            await trio.testing.wait_all_tasks_blocked()
        assert server.connections == server.calls == 0
        await peer.outcome(stream_id)
        assert peer.goaway is None
    assert "a bug in the HTTP/2 layer" in caplog.text
    await assert_alive(server)


# --- peers that cost memory ---------------------------------------------------------------------------------


@pytest.mark.trio
async def test_peer_that_never_acknowledges_stops_the_handler(plugin: Plugin, server: Server) -> None:
    """HTTP/2's window is 65,535 bytes; then the handler waits, and nothing piles up on our side."""
    big = ListAndWatchResponse(devices=[Device(id="x" * 10_000)])
    plugin.frames = [big] * 1000
    async with raw_peer(server) as peer:
        await peer.call(LIST_AND_WATCH)
        await trio.testing.wait_all_tasks_blocked()
        sent = plugin.frames_sent
        assert sent < 8
        with trio.fail_after(TEST_DEADLINE_S):
            while len(peer.data) < 65_535:  # reads, but acknowledges nothing
                for event in await peer.events() or ():
                    if isinstance(event, h2.events.DataReceived):
                        peer.data += event.data
        await trio.testing.wait_all_tasks_blocked()
        assert plugin.frames_sent == sent
        assert the_connection(server).transport.unsent_bytes == 0
        assert server.calls == 1


@pytest.mark.trio
async def test_peer_that_never_reads_stops_the_handlers(plugin: Plugin, server: Server) -> None:
    """Huge windows, huge frames allowed (grpcio allows 4 MiB), nothing read: what waits on our side is bounded by the
    high mark, for all handlers together."""
    ours, theirs = trio.testing.lockstep_stream_pair()  # send_all waits until the peer reads
    plugin.frames = [ListAndWatchResponse(devices=[Device(id="x" * 1_000_000)])] * 10
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.serve_connection, theirs)
        peer = RawPeer(ours)
        peer.h2.initiate_connection()
        settings = h2.settings.SettingCodes
        peer.h2.update_settings({settings.INITIAL_WINDOW_SIZE: 2**30, settings.MAX_FRAME_SIZE: 2**24 - 1})
        peer.h2.increment_flow_control_window(2**30)
        await peer.flush()
        for _ in range(50):
            await peer.call(LIST_AND_WATCH)
        await trio.testing.wait_all_tasks_blocked()
        assert plugin.streams_open == 50
        frame_bytes = 16_384 + 9
        unsent_bytes = the_connection(server).transport.unsent_bytes
        assert unsent_bytes <= 2 * GRPC_OUTGOING_HIGH_BYTES + 2 * frame_bytes
        nursery.cancel_scope.cancel()


@pytest.mark.trio
@pytest.mark.parametrize(
    "flood", [frame(PING, 0, 0, b"12345678"), frame(SETTINGS, 0, 0)], ids=["PING", "SETTINGS"]
)
async def test_flood_without_reading_answers_drops_the_connection(server: Server, flood: bytes) -> None:
    ours, theirs = trio.testing.lockstep_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.serve_connection, theirs)
        peer = RawPeer(ours)
        await peer.handshake()
        most_bytes = 0
        with trio.fail_after(TEST_DEADLINE_S), pytest.raises(trio.BrokenResourceError):  # noqa: PT012
            while True:
                await peer.stream.send_all(flood * 1000)
                if server.connections:
                    most_bytes = max(most_bytes, the_connection(server).transport.unsent_bytes)
        assert GRPC_OUTGOING_MAX_BYTES / 2 < most_bytes < GRPC_OUTGOING_MAX_BYTES * 1.2
    assert server.connections == 0


@pytest.mark.trio
async def test_frame_of_16_mib_is_not_collected(server: Server) -> None:
    """h2 checks a frame's length only when it has all of it."""
    async with raw_peer(server) as peer:
        await peer.stream.send_all(b"\xff\xff\xff" + frame(DATA, 0, 1)[3:])
        sent_bytes = 0
        with trio.fail_after(TEST_DEADLINE_S), pytest.raises(trio.BrokenResourceError):  # noqa: PT012
            while True:
                await peer.stream.send_all(b"x" * 4096)
                sent_bytes += 4096
                await trio.testing.wait_all_tasks_blocked()
        assert sent_bytes < 64 * 1024


@pytest.mark.trio
async def test_announced_4_gib_allocate_nothing(server: Server) -> None:
    async with raw_peer(server) as peer:
        await peer.outcome(await peer.call())
        tracemalloc.start()
        try:
            outcome = await peer.outcome(await peer.call(body=b"\0\xff\xff\xff\xff", end=False))
            _now, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert outcome["grpc-status"] == str(Status.RESOURCE_EXHAUSTED.value)
        assert peak_bytes < 1024 * 1024


@pytest.mark.trio
async def test_refused_message_goes_on_arriving(server: Server) -> None:
    """A peer that sends a refused message to its end uses up no window: the next call works."""
    async with raw_peer(server) as peer:
        for _ in range(3):
            stream_id = await peer.call(body=b"\0\xff\xff\xff\xff", end=False)
            for _ in range(3):
                await peer.stream.send_all(frame(DATA, 0, stream_id, b"x" * 16_384))
            outcome = await peer.outcome(stream_id)
            assert outcome["grpc-status"] == str(Status.RESOURCE_EXHAUSTED.value)
        await peer.outcome(await peer.call())
        h2_connection = the_connection(server).protocol.connection._connection
        assert h2_connection.inbound_flow_control_window > 512 * 1024


# --- peers that cost time or slots --------------------------------------------------------------------------


@pytest.mark.trio
async def test_too_many_concurrent_streams_cost_the_connection(server: Server) -> None:
    """A peer is told the limit (100) in SETTINGS; one that does not keep it has no business here."""
    async with raw_peer(server) as peer:
        await peer.events()
        limit = peer.h2.remote_settings.max_concurrent_streams
        assert limit == 100
        for _ in range(limit):
            await peer.call(LIST_AND_WATCH)
        await trio.testing.wait_all_tasks_blocked()
        assert server.calls == limit
        one_more = peer.h2.get_next_available_stream_id()
        await peer.stream.send_all(frame(HEADERS, END_HEADERS, one_more, request_headers()))
        await peer.read_to_end()
        await assert_alive(server)
    assert server.calls == 0


@pytest.mark.trio
async def test_rapid_reset(plugin: Plugin, server: Server) -> None:
    """CVE-2023-44487: calls opened and reset at once leave nothing behind."""
    async with raw_peer(server) as peer:
        for _ in range(20):
            burst = bytearray()
            for _ in range(100):
                stream_id = peer.h2.get_next_available_stream_id()
                peer.h2.send_headers(stream_id, [(":method", "POST"), (":path", LIST_AND_WATCH)])
                peer.h2.reset_stream(stream_id)
                burst += peer.h2.data_to_send()
            await peer.stream.send_all(burst)
        await trio.testing.wait_all_tasks_blocked()
        assert server.calls == 0
        assert plugin.streams_open == 0
        h2_connection = the_connection(server).protocol.connection._connection
        assert len(h2_connection._closed_streams) <= 1024  # h2 alone would remember 65,536 of them
        assert (await peer.outcome(await peer.call()))["grpc-status"] == "0"


@pytest.mark.trio
async def test_slow_loris_is_dropped(server: Server, autojump_clock: trio.testing.MockClock) -> None:
    """One byte of the preface a second, and one that says nothing at all."""
    async with raw_peer(server, handshake=False) as mute, raw_peer(server, handshake=False) as slow:
        started_s = trio.current_time()
        with pytest.raises(trio.BrokenResourceError):  # noqa: PT012
            for byte in PREFACE:
                await slow.stream.send_all(bytes((byte,)))
                await trio.sleep(1)
        assert trio.current_time() - started_s == pytest.approx(GRPC_HANDSHAKE_DEADLINE_S, abs=2)
        await mute.read_to_end()
        await assert_alive(server)


@pytest.mark.trio
async def test_handshake_deadline_ends_with_the_handshake(
    server: Server, autojump_clock: trio.testing.MockClock
) -> None:
    async with raw_peer(server) as peer:
        await trio.sleep(100 * GRPC_HANDSHAKE_DEADLINE_S)  # kubelet may well be silent for hours
        assert (await peer.outcome(await peer.call()))["grpc-status"] == "0"


@pytest.mark.trio
async def test_connections_over_the_limit_are_refused_at_once(server: Server) -> None:
    async with trio.open_nursery() as nursery:
        peers = []
        for _ in range(GRPC_CONNECTIONS_MAX):
            ours, theirs = trio.testing.memory_stream_pair()
            nursery.start_soon(server.serve_connection, theirs)
            peers.append(ours)
        await trio.testing.wait_all_tasks_blocked()
        assert server.connections == GRPC_CONNECTIONS_MAX
        ours, theirs = trio.testing.memory_stream_pair()
        await server.serve_connection(theirs)
        assert await RawPeer(ours).read_to_end() == b""
        await peers[0].aclose()
        await trio.testing.wait_all_tasks_blocked()
        await assert_alive(server)
        nursery.cancel_scope.cancel()


# --- the connection's end -----------------------------------------------------------------------------------


@pytest.mark.trio
async def test_goaway_of_the_peer_ends_its_calls(plugin: Plugin, server: Server) -> None:
    async with raw_peer(server) as peer:
        await peer.call(LIST_AND_WATCH)
        await trio.testing.wait_all_tasks_blocked()
        peer.h2.close_connection()
        await peer.flush()
        with trio.fail_after(TEST_DEADLINE_S):
            await plugin.streams_closed.wait()
            await server.wait_disconnected()


@pytest.mark.trio
async def test_calls_of_a_lost_connection_are_cancelled_and_awaited(plugin: Plugin, server: Server) -> None:
    cancelled = trio.Event()

    async def wait(_: AllocateRequest) -> None:
        try:
            await trio.sleep_forever()
        finally:
            cancelled.set()

    plugin.allocate_hook = wait
    async with raw_peer(server) as peer:
        await peer.call()
        await trio.testing.wait_all_tasks_blocked()
        await peer.stream.aclose()
        with trio.fail_after(TEST_DEADLINE_S):
            await cancelled.wait()
            await server.wait_disconnected()
    assert server.calls == 0


class TornStream(trio.abc.Stream):
    """Takes half of what it is given once `torn` is set, and then blocks, like a socket whose peer has stopped."""

    def __init__(self, incoming: trio.abc.ReceiveStream) -> None:
        self._incoming = incoming
        self.torn = False
        self.sends_after_cancel: list[bytes] = []
        self.cancelled = False

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        if self.cancelled:
            self.sends_after_cancel.append(bytes(data))
        if self.torn:
            try:
                await trio.sleep_forever()
            finally:
                self.cancelled = True
        await trio.lowlevel.checkpoint()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        return await self._incoming.receive_some(max_bytes)

    async def wait_send_all_might_not_block(self) -> None:
        raise NotImplementedError

    async def aclose(self) -> None:
        await self._incoming.aclose()


@pytest.mark.trio
async def test_bytes_that_arrive_while_we_close_are_ignored(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """Our last bytes are stuck, the bound is running, and the peer still talks: grpclib has taken h2 apart by then."""
    client_end, incoming = trio.testing.memory_stream_one_way_pair()
    stream = TornStream(incoming)
    async with trio.open_nursery() as outer, trio.open_nursery() as nursery:
        nursery.start_soon(server.serve_connection, stream)
        await client_end.send_all(PREFACE + frame(SETTINGS, 0, 0))
        await trio.testing.wait_all_tasks_blocked()
        stream.torn = True
        await client_end.send_all(frame(PING, 0, 0, b"12345678"))
        await trio.testing.wait_all_tasks_blocked()

        async def talk_on() -> None:
            await trio.testing.wait_all_tasks_blocked()
            assert server.connections == 1
            await client_end.send_all(frame(PING, 0, 0, b"12345678"))

        outer.start_soon(talk_on)
        nursery.cancel_scope.cancel()
    assert stream.cancelled
    assert [record for record in caplog.records if record.levelname in {"ERROR", "WARNING"}] == []


@pytest.mark.trio
async def test_no_goaway_after_half_a_frame(server: Server) -> None:
    """A send that was cut off may have left half a frame on the wire: after it, not one byte more."""
    client_end, incoming = trio.testing.memory_stream_one_way_pair()
    stream = TornStream(incoming)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.serve_connection, stream)
        await client_end.send_all(PREFACE + frame(SETTINGS, 0, 0))
        await trio.testing.wait_all_tasks_blocked()
        stream.torn = True
        await client_end.send_all(frame(PING, 0, 0, b"12345678"))  # its answer gets stuck
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert stream.cancelled
    assert stream.sends_after_cancel == []
