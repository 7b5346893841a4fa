"""The client: what it says on the wire, and how its calls end when the other side does."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import NoReturn

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.settings
import pytest
import trio
import trio.testing
from grpclib import GRPCError, Status
from grpclib.metadata import Deadline

from gpuactors.grpc_trio import Channel, Server, open_channel
from gpuactors.grpc_trio.limits import GRPC_CLOSE_S, MESSAGE_MAX_BYTES
from gpuactors.kubelet.pb.deviceplugin.v1beta1 import (
    AllocateResponse,
    Device,
    DevicePluginStub,
    Empty,
    ListAndWatchResponse,
)

from .support import (
    DRAIN_S,
    LIST_AND_WATCH,
    TEST_DEADLINE_S,
    Plugin,
    allocate_request,
    bounded,
    connected,
    frame,
)

OK_HEADERS = [(":status", "200"), ("content-type", "application/grpc")]
OK_TRAILERS = [("grpc-status", "0")]


class RawServer:
    """A server made of h2 and a stream: the test decides every frame."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.stream = stream
        self.h2 = h2.connection.H2Connection(
            h2.config.H2Configuration(client_side=False, header_encoding="utf-8")
        )
        self.h2.initiate_connection()
        self.events: list[h2.events.Event] = []

    async def until(self, kind: type[h2.events.Event]) -> h2.events.Event:
        """The next event of that kind; those before it are dropped."""
        with trio.fail_after(TEST_DEADLINE_S):
            while True:
                while self.events:
                    event = self.events.pop(0)
                    if isinstance(event, kind):
                        return event
                await self.flush()
                data = await self.stream.receive_some(65536)
                assert data, f"the client disconnected before {kind.__name__}"
                self.events += self.h2.receive_data(bytes(data))

    async def flush(self) -> None:
        with suppress(trio.BrokenResourceError):  # the client is gone; what it has said can still be read
            await self.stream.send_all(self.h2.data_to_send())

    async def request(self) -> int:
        """A call's whole request."""
        event = await self.until(h2.events.RequestReceived)
        assert isinstance(event, h2.events.RequestReceived)
        await self.until(h2.events.StreamEnded)
        assert event.stream_id is not None
        return event.stream_id


@asynccontextmanager
async def raw_server() -> AsyncIterator[tuple[Channel, RawServer]]:
    ours, theirs = trio.testing.memory_stream_pair()
    with bounded() as bound:
        async with open_channel(ours) as channel:
            yield channel, RawServer(theirs)
    assert not bound.cancelled_caught, "the test hung"


async def outcome_of_allocate(
    answer: Callable[[RawServer, int], None], *, timeout_s: float | None = None
) -> GRPCError | AllocateResponse:
    """Allocate against a server that answers by `answer`, all in one write."""
    result: list[GRPCError | AllocateResponse] = []

    async def call(channel: Channel) -> None:
        try:
            result.append(await DevicePluginStub(channel).allocate(allocate_request("a"), timeout=timeout_s))
        except GRPCError as error:
            result.append(error)

    with trio.fail_after(TEST_DEADLINE_S):
        async with raw_server() as (channel, server), trio.open_nursery() as nursery:
            nursery.start_soon(call, channel)
            answer(server, await server.request())
            await server.flush()
    return result[0]


# --- what it says -------------------------------------------------------------------------------------------


@pytest.mark.trio
async def test_request_headers() -> None:
    async with raw_server() as (channel, server), trio.open_nursery() as nursery:
        stub = DevicePluginStub(channel)
        nursery.start_soon(lambda: stub.allocate(allocate_request("a"), timeout=8, metadata={"x-who": "me"}))
        event = await server.until(h2.events.RequestReceived)
        assert isinstance(event, h2.events.RequestReceived)
        headers = {str(key): str(value) for key, value in event.headers or ()}
        nursery.cancel_scope.cancel()
    assert headers[":authority"] == "localhost"
    assert headers[":path"] == "/v1beta1.DevicePlugin/Allocate"
    assert headers["te"] == "trailers"
    assert headers["content-type"] == "application/grpc"
    assert headers["x-who"] == "me"
    assert 7000 <= int(headers["grpc-timeout"].removesuffix("m")) <= 8000


@pytest.mark.trio
async def test_cancelled_call_is_reset_with_cancel() -> None:
    async with raw_server() as (channel, server):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(DevicePluginStub(channel).allocate, allocate_request("a"))
            stream_id = await server.request()
            nursery.cancel_scope.cancel()
        event = await server.until(h2.events.StreamReset)
        assert isinstance(event, h2.events.StreamReset)
        assert (event.stream_id, event.error_code) == (stream_id, h2.errors.ErrorCodes.CANCEL)


@pytest.mark.trio
async def test_leaving_a_stream_early_resets_it_at_once(autojump_clock: trio.testing.MockClock) -> None:
    plugin = Plugin()
    server = Server([plugin], drain_s=DRAIN_S)
    async with connected(server) as channel:
        async with channel.server_stream(LIST_AND_WATCH, Empty(), ListAndWatchResponse) as frames:
            async for _ in frames:
                break
        await trio.testing.wait_all_tasks_blocked()
        assert plugin.streams_open == server.calls == 0
        await DevicePluginStub(channel).allocate(allocate_request("the connection lives"))


@pytest.mark.trio
async def test_stream_read_to_its_end() -> None:
    plugin = Plugin()
    plugin.endless = False
    plugin.frames *= 3
    async with connected(Server([plugin], drain_s=DRAIN_S)) as channel:
        async with channel.server_stream(LIST_AND_WATCH, Empty(), ListAndWatchResponse) as frames:
            assert [frame async for frame in frames] == plugin.frames
        stub = DevicePluginStub(channel)
        assert [frame async for frame in stub.list_and_watch(Empty())] == plugin.frames


@pytest.mark.trio
async def test_goodbye_and_its_bound(autojump_clock: trio.testing.MockClock) -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    server = RawServer(theirs)
    async with open_channel(ours):
        pass
    await server.until(h2.events.ConnectionTerminated)

    deaf, _peer = trio.testing.lockstep_stream_pair()  # a peer that reads nothing
    started_s = trio.current_time()
    async with open_channel(deaf):
        pass
    assert trio.current_time() - started_s == pytest.approx(GRPC_CLOSE_S)


# --- how calls end ------------------------------------------------------------------------------------------


@pytest.mark.trio
async def test_good_answer_though_the_connection_ends_in_the_same_breath() -> None:
    """Answer, trailers and GOAWAY in one read: the answer counts."""

    def answer(server: RawServer, stream_id: int) -> None:
        server.h2.send_headers(stream_id, OK_HEADERS)
        server.h2.send_data(stream_id, b"\0\0\0\0\0")
        server.h2.send_headers(stream_id, OK_TRAILERS, end_stream=True)
        server.h2.close_connection()

    assert await outcome_of_allocate(answer) == AllocateResponse()


def reset(code: h2.errors.ErrorCodes) -> Callable[[RawServer, int], None]:
    return lambda server, stream_id: server.h2.reset_stream(stream_id, code)


def goaway(server: RawServer, stream_id: int) -> None:
    server.h2.close_connection()


def trailers_only(*extra: tuple[str, str]) -> Callable[[RawServer, int], None]:
    return lambda server, stream_id: server.h2.send_headers(stream_id, [*OK_HEADERS, *extra], end_stream=True)


def http_error(server: RawServer, stream_id: int) -> None:
    server.h2.send_headers(stream_id, [(":status", "503")], end_stream=True)


def wrong_content(server: RawServer, stream_id: int) -> None:
    server.h2.send_headers(stream_id, [(":status", "200"), ("content-type", "text/html")])
    server.h2.send_data(stream_id, b"<html>", end_stream=True)


def end_without_trailers(server: RawServer, stream_id: int) -> None:
    server.h2.send_headers(stream_id, OK_HEADERS)
    server.h2.send_data(stream_id, b"\0\0\0\0\0", end_stream=True)


def ok_without_answer(server: RawServer, stream_id: int) -> None:
    server.h2.send_headers(stream_id, OK_HEADERS)
    server.h2.send_headers(stream_id, OK_TRAILERS, end_stream=True)


def error_after_answer(server: RawServer, stream_id: int) -> None:
    server.h2.send_headers(stream_id, OK_HEADERS)
    server.h2.send_data(stream_id, b"\0\0\0\0\0")
    server.h2.send_headers(stream_id, [("grpc-status", "8"), ("grpc-message", "no%20more")], end_stream=True)
    server.h2.close_connection()


def body(data: bytes) -> Callable[[RawServer, int], None]:
    def answer(server: RawServer, stream_id: int) -> None:
        server.h2.send_headers(stream_id, OK_HEADERS)
        server.h2.send_data(stream_id, data)
        server.h2.send_headers(stream_id, OK_TRAILERS, end_stream=True)

    return answer


@pytest.mark.trio
@pytest.mark.parametrize(
    ("answer", "status", "text"),
    [
        (reset(h2.errors.ErrorCodes.REFUSED_STREAM), Status.UNAVAILABLE, "error_code: 7"),
        (reset(h2.errors.ErrorCodes.CANCEL), Status.CANCELLED, "error_code: 8"),
        (reset(h2.errors.ErrorCodes.ENHANCE_YOUR_CALM), Status.RESOURCE_EXHAUSTED, "error_code: 11"),
        (reset(h2.errors.ErrorCodes.INTERNAL_ERROR), Status.INTERNAL, "error_code: 2"),
        (goaway, Status.UNAVAILABLE, "GOAWAY"),
        (trailers_only(("grpc-status", "14"), ("grpc-message", "go%20away")), Status.UNAVAILABLE, "go away"),
        (trailers_only(("grpc-status", "99")), Status.UNKNOWN, "99"),
        (trailers_only(), Status.INTERNAL, "without sending a grpc-status"),
        (http_error, Status.UNAVAILABLE, "503"),
        (wrong_content, Status.UNKNOWN, "text/html"),
        (end_without_trailers, Status.INTERNAL, "without sending a grpc-status"),
        (ok_without_answer, Status.INTERNAL, "sent OK but no answer"),
        (error_after_answer, Status.RESOURCE_EXHAUSTED, "no more"),
        (body(b"\1\0\0\0\0"), Status.UNIMPLEMENTED, "compressed"),
        (body(b"\0\xff\xff\xff\xff"), Status.RESOURCE_EXHAUSTED, str(MESSAGE_MAX_BYTES)),
        (body(b"\0\0\0\0\x09abc"), Status.INTERNAL, "cut short"),
        (body(b"\0\0\0\0\2\xff\xff"), Status.INTERNAL, "not a valid AllocateResponse"),
    ],
)
async def test_bad_answers(answer: Callable[[RawServer, int], None], status: Status, text: str) -> None:
    outcome = await outcome_of_allocate(answer)
    assert isinstance(outcome, GRPCError)
    assert outcome.status is status
    assert text in (outcome.message or "")


@pytest.mark.trio
async def test_server_that_never_answers(autojump_clock: trio.testing.MockClock) -> None:
    outcome = await outcome_of_allocate(lambda server, stream_id: None, timeout_s=3)
    assert isinstance(outcome, GRPCError)
    assert outcome.status is Status.DEADLINE_EXCEEDED


@pytest.mark.trio
@pytest.mark.parametrize("how", ["disconnect", "garbage", "half a frame"])
async def test_calls_in_flight_fail_when_the_connection_dies(how: str) -> None:
    """Unary calls, streams, and calls that come after; the block of the channel goes on."""
    errors: list[GRPCError] = []

    async def allocate(channel: Channel) -> None:
        try:
            await DevicePluginStub(channel).allocate(allocate_request("a"))
        except GRPCError as error:
            errors.append(error)

    async def watch(channel: Channel) -> None:
        try:
            async for _ in DevicePluginStub(channel).list_and_watch(Empty()):
                pass
        except GRPCError as error:
            errors.append(error)

    with trio.fail_after(TEST_DEADLINE_S):
        async with raw_server() as (channel, server):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(allocate, channel)
                nursery.start_soon(watch, channel)
                await server.request()
                await server.request()
                match how:
                    case "garbage":
                        await server.stream.send_all(b"\0" * 100)
                    case "half a frame":
                        await server.stream.send_all(frame(0, 0, 1, b"x" * 100)[:50])
                        await server.stream.aclose()
                    case _:
                        await server.stream.aclose()
            await channel.lost.wait()
            await allocate(channel)
    assert [error.status for error in errors] == [Status.UNAVAILABLE] * 3


@pytest.mark.trio
@pytest.mark.parametrize("end", ["disconnect", "answer", "answer and reset"])
async def test_sender_blocked_on_the_window_is_woken_by_the_end(end: str) -> None:
    """The request is larger than the server's window, and the server never reads it all."""
    errors: list[GRPCError] = []

    async def allocate(channel: Channel) -> None:
        try:
            await DevicePluginStub(channel).allocate(allocate_request("x" * 200_000))
        except GRPCError as error:
            errors.append(error)

    with trio.fail_after(TEST_DEADLINE_S):
        async with raw_server() as (channel, server), trio.open_nursery() as nursery:
            nursery.start_soon(allocate, channel)
            event = await server.until(h2.events.RequestReceived)
            assert isinstance(event, h2.events.RequestReceived)
            assert event.stream_id is not None
            await trio.testing.wait_all_tasks_blocked()
            if end == "disconnect":
                await server.stream.aclose()
            else:
                trailers = [*OK_HEADERS, ("grpc-status", "8"), ("grpc-message", "too much")]
                server.h2.send_headers(event.stream_id, trailers, end_stream=True)
                if end == "answer and reset":
                    server.h2.reset_stream(event.stream_id, h2.errors.ErrorCodes.NO_ERROR)
                await server.flush()
    (error,) = errors
    if end == "disconnect":
        assert error.status is Status.UNAVAILABLE
    else:
        assert (error.status, error.message) == (Status.RESOURCE_EXHAUSTED, "too much")


@pytest.mark.trio
async def test_frames_that_arrived_before_the_end_can_still_be_read() -> None:
    """Sixty kilobytes of a stream, its status and GOAWAY in one read: first the frames, then the status."""
    messages = [ListAndWatchResponse(devices=[Device(id=str(n) * 6000)]) for n in range(10)]
    got = []
    with trio.fail_after(TEST_DEADLINE_S):
        async with (
            raw_server() as (channel, server),
            channel.server_stream(LIST_AND_WATCH, Empty(), ListAndWatchResponse) as frames,
        ):
            stream_id = await server.request()
            server.h2.send_headers(stream_id, OK_HEADERS)
            for message in messages:
                data = bytes(message)
                server.h2.send_data(stream_id, b"\0" + len(data).to_bytes(4, "big") + data)
            server.h2.send_headers(stream_id, [("grpc-status", "14")], end_stream=True)
            server.h2.close_connection()
            await server.flush()
            await server.stream.aclose()
            await channel.lost.wait()
            with pytest.raises(GRPCError) as ended:  # noqa: PT012
                async for message in frames:
                    got.append(message)  # noqa: PERF401
    assert got == messages
    assert ended.value.status is Status.UNAVAILABLE


class HangingUp(trio.abc.Stream):
    """A peer that has closed while its last words are still on their way: sending fails, receiving goes on."""

    def __init__(self, incoming: trio.abc.ReceiveStream, outgoing: trio.abc.SendStream) -> None:
        self._incoming = incoming
        self._outgoing = outgoing
        self.gone = False

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        if self.gone:
            await trio.lowlevel.checkpoint()
            raise trio.BrokenResourceError("the peer is gone")
        await self._outgoing.send_all(data)

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        return await self._incoming.receive_some(max_bytes)

    async def wait_send_all_might_not_block(self) -> None:
        raise NotImplementedError

    async def aclose(self) -> None:
        await self._incoming.aclose()
        await self._outgoing.aclose()


@pytest.mark.trio
async def test_last_words_are_read_though_our_own_fail(autojump_clock: trio.testing.MockClock) -> None:
    """Kubelet answers and closes; our acknowledgement of its SETTINGS fails; its answer counts all the same."""
    to_server, server_in = trio.testing.memory_stream_one_way_pair()
    server_out, from_server = trio.testing.memory_stream_one_way_pair()
    stream = HangingUp(from_server, to_server)
    server = RawServer(trio.StapledStream(server_out, server_in))
    outcome: list[AllocateResponse] = []

    async def allocate(channel: Channel) -> None:
        outcome.append(await DevicePluginStub(channel).allocate(allocate_request("a")))

    with trio.fail_after(TEST_DEADLINE_S):
        async with open_channel(stream) as channel, trio.open_nursery() as nursery:
            nursery.start_soon(allocate, channel)
            stream_id = await server.request()
            stream.gone = True
            server.h2.ping(b"12345678")
            await server.flush()
            await trio.testing.wait_all_tasks_blocked()  # the answer to the PING could not be sent
            server.h2.send_headers(stream_id, OK_HEADERS)
            server.h2.send_data(stream_id, b"\0\0\0\0\0")
            server.h2.send_headers(stream_id, OK_TRAILERS, end_stream=True)
            await server.flush()
            await server_out.aclose()
    assert outcome == [AllocateResponse()]


@pytest.mark.trio
async def test_acknowledging_after_the_end_is_harmless() -> None:
    """What was received before the end is read after it, and its reader acknowledges it."""
    ours, _theirs = trio.testing.memory_stream_pair()
    async with open_channel(ours) as channel:
        connection = channel._connection.protocol.connection
        channel._connection.protocol.processor.close("for the test")
        connection.ack(1, 2**20)


@pytest.mark.trio
@pytest.mark.parametrize("waits_for", ["a stream of its own", "room to write"])
async def test_call_that_waits_for_its_turn_is_woken_by_the_end(waits_for: str) -> None:
    """It has no HTTP/2 stream yet, so nobody resets it."""
    errors: list[GRPCError] = []

    async def allocate(channel: Channel, size_chars: int) -> None:
        try:
            await DevicePluginStub(channel).allocate(allocate_request("x" * size_chars))
        except GRPCError as error:
            errors.append(error)

    ours, theirs = trio.testing.lockstep_stream_pair()
    server = RawServer(theirs)
    settings = h2.settings.SettingCodes
    match waits_for:
        case "room to write":
            server.h2.update_settings({settings.INITIAL_WINDOW_SIZE: 2**30})
            server.h2.increment_flow_control_window(2**30)
        case _:
            server.h2.update_settings({settings.MAX_CONCURRENT_STREAMS: 1})
    with trio.fail_after(TEST_DEADLINE_S):
        async with open_channel(ours) as channel, trio.open_nursery() as nursery:
            await server.until(h2.events.SettingsAcknowledged)
            await server.until(h2.events.SettingsAcknowledged)
            nursery.start_soon(allocate, channel, 1_000_000 if waits_for == "room to write" else 1)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(allocate, channel, 1)
            await trio.testing.wait_all_tasks_blocked()
            await theirs.aclose()
    assert [error.status for error in errors] == [Status.UNAVAILABLE] * 2


@pytest.mark.trio
async def test_fault_in_the_http2_layer_is_a_lost_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever h2 or grpclib raises: the call fails, the block goes on."""

    def broken(*_: object) -> NoReturn:
        raise KeyError("a bug in the HTTP/2 layer")

    with trio.fail_after(TEST_DEADLINE_S):
        async with raw_server() as (channel, server):
            await server.flush()
            monkeypatch.setattr(h2.connection.H2Connection, "receive_data", broken)
            await server.stream.send_all(b"whatever")
            with pytest.raises(GRPCError) as caught:
                await DevicePluginStub(channel).allocate(allocate_request("a"))
            assert caught.value.status is Status.UNAVAILABLE


@pytest.mark.trio
async def test_odd_frames_of_the_server_are_ignored() -> None:
    """Unknown frames, ALTSVC and 1xx headers; grpclib takes each of them for a reason to die."""

    def answer(server: RawServer, stream_id: int) -> None:
        server.h2.send_headers(stream_id, [(":status", "103"), ("link", "x")])
        server.h2.advertise_alternative_service(b'h2=":1"', origin=b"localhost")
        server.h2._data_to_send += frame(0xBE, 0xFF, 0, b"whatever") + frame(0xBE, 0, stream_id, b"")
        server.h2.send_headers(stream_id, OK_HEADERS)
        server.h2.send_data(stream_id, b"")
        server.h2.send_data(stream_id, b"\0\0\0")
        server.h2.send_data(stream_id, b"")
        server.h2.send_data(stream_id, b"\0\0")
        server.h2.send_headers(stream_id, OK_TRAILERS, end_stream=True)

    assert await outcome_of_allocate(answer) == AllocateResponse()


@pytest.mark.trio
async def test_more_calls_than_the_server_takes_at_once_wait_their_turn() -> None:
    plugin = Plugin()
    done: list[int] = []
    async with connected(Server([plugin], drain_s=DRAIN_S)) as channel:
        stub = DevicePluginStub(channel)
        await stub.allocate(allocate_request("so that SETTINGS are in"))

        async def allocate(number: int) -> None:
            answer = await stub.allocate(allocate_request(str(number)))
            assert answer.container_responses[0].envs == {"IDS": str(number)}
            done.append(number)

        with trio.fail_after(TEST_DEADLINE_S):
            async with trio.open_nursery() as nursery:
                for number in range(300):
                    nursery.start_soon(allocate, number)
    assert sorted(done) == list(range(300))


@pytest.mark.trio
async def test_deadline_and_timeout_together(autojump_clock: trio.testing.MockClock) -> None:
    """The earlier one counts; grpclib's own Deadline, on the real clock, is taken over."""
    async with raw_server() as (channel, server):
        await server.flush()  # its SETTINGS
        stub = DevicePluginStub(channel)
        started_s = trio.current_time()
        with pytest.raises(GRPCError):
            await stub.allocate(allocate_request("a"), timeout=50, deadline=Deadline.from_timeout(20))
        assert trio.current_time() - started_s == pytest.approx(20, abs=0.5)


@pytest.mark.trio
async def test_exceptions_of_the_block_are_not_wrapped() -> None:
    ours, _theirs = trio.testing.memory_stream_pair()
    with pytest.raises(ZeroDivisionError):
        async with open_channel(ours):
            raise ZeroDivisionError
    with pytest.raises(trio.ClosedResourceError):
        await ours.send_all(b"the stream is closed")
