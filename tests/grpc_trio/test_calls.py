"""One call, right and wrong: every fault costs that call only, and its status says what was wrong."""

from __future__ import annotations

import gzip
import logging

import h2.events
import pytest
import trio
import trio.testing
from grpclib import GRPCError, Status

from gpuactors.grpc_trio import Server
from gpuactors.grpc_trio.limits import GRPC_REQUEST_DEADLINE_S, GRPC_STATUS_TEXT_MAX_CHARS, MESSAGE_MAX_BYTES
from gpuactors.kubelet.pb.deviceplugin.v1beta1 import (
    AllocateRequest,
    AllocateResponse,
    ContainerAllocateResponse,
    DevicePluginStub,
    Empty,
)

from .support import (
    ALLOCATE,
    DRAIN_S,
    LIST_AND_WATCH,
    OPTIONS,
    TEST_DEADLINE_S,
    Plugin,
    allocate_request,
    assert_alive,
    connected,
    raw_peer,
)


@pytest.fixture
def plugin() -> Plugin:
    return Plugin()


@pytest.fixture
def server(plugin: Plugin) -> Server:
    return Server([plugin], drain_s=DRAIN_S)


@pytest.mark.trio
async def test_unary_round_trip(server: Server) -> None:
    await assert_alive(server)
    assert server.calls == server.connections == 0


@pytest.mark.trio
async def test_empty_messages_both_ways(server: Server) -> None:
    async with connected(server) as channel:
        answer = await DevicePluginStub(channel).allocate(AllocateRequest())
    assert answer.container_responses == []


# --- errors that handlers raise -----------------------------------------------------------------------------


@pytest.mark.parametrize("wraps", [0, 1, 3], ids=["bare", "in a group", "in nested groups"])
@pytest.mark.trio
async def test_grpc_error_of_a_handler_goes_out_as_it_is(plugin: Plugin, server: Server, wraps: int) -> None:
    async def fail(_: AllocateRequest) -> None:
        error: Exception = GRPCError(Status.FAILED_PRECONDITION, "Gruppe 51:\n100 % belegt – déjà pris \n")
        for _i in range(wraps):
            error = ExceptionGroup("a nursery", [error])
        raise error

    plugin.allocate_hook = fail
    async with connected(server) as channel:
        with pytest.raises(GRPCError) as caught:
            await DevicePluginStub(channel).allocate(allocate_request("a"))
    assert caught.value.status is Status.FAILED_PRECONDITION
    assert caught.value.message == "Gruppe 51:\n100 % belegt – déjà pris"


@pytest.mark.trio
async def test_grpc_error_out_of_a_real_nursery(plugin: Plugin, server: Server) -> None:
    async def refuse() -> None:
        raise GRPCError(Status.NOT_FOUND, "no such device")

    async def fail(_: AllocateRequest) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(refuse)
            nursery.start_soon(trio.sleep_forever)

    plugin.allocate_hook = fail
    async with connected(server) as channel:
        with pytest.raises(GRPCError, match="no such device"):
            await DevicePluginStub(channel).allocate(allocate_request("a"))


@pytest.mark.parametrize(
    "error",
    [
        ZeroDivisionError("secret"),
        ExceptionGroup("two", [GRPCError(Status.NOT_FOUND, "secret"), ValueError("secret")]),
        TimeoutError("secret"),
    ],
    ids=["exception", "group of two", "timeout"],
)
@pytest.mark.trio
async def test_other_errors_are_logged_and_answered_without_details(
    plugin: Plugin, server: Server, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    async def fail(_: AllocateRequest) -> None:
        raise error

    plugin.allocate_hook = fail
    async with connected(server) as channel:
        stub = DevicePluginStub(channel)
        with caplog.at_level(logging.ERROR), pytest.raises(GRPCError) as caught:
            await stub.allocate(allocate_request("a"))
        plugin.allocate_hook = None
        await stub.allocate(allocate_request("the connection lives"))
    assert caught.value.status is Status.UNKNOWN
    assert "secret" not in (caught.value.message or "")
    assert ALLOCATE in (caught.value.message or "")
    assert "secret" in caplog.text


@pytest.mark.trio
async def test_a_very_long_error_text_is_cut(plugin: Plugin, server: Server) -> None:
    async def fail(_: AllocateRequest) -> None:
        raise GRPCError(Status.INTERNAL, "x" * 100_000)

    plugin.allocate_hook = fail
    async with connected(server) as channel:
        with pytest.raises(GRPCError) as caught:
            await DevicePluginStub(channel).allocate(allocate_request("a"))
    assert len(caught.value.message or "") == GRPC_STATUS_TEXT_MAX_CHARS


@pytest.mark.trio
async def test_handler_that_answers_nonsense(plugin: Plugin, server: Server) -> None:
    async def nonsense(_: object) -> int:
        return 42

    plugin.allocate = nonsense  # type: ignore[assignment,method-assign]
    async with connected(server) as channel:
        with pytest.raises(GRPCError) as caught:
            await DevicePluginStub(channel).allocate(allocate_request("a"))
    assert caught.value.status is Status.UNKNOWN


@pytest.mark.trio
async def test_error_after_two_frames_ends_the_stream_with_its_status(plugin: Plugin, server: Server) -> None:
    async def fail(message: Empty):  # type: ignore[no-untyped-def]
        yield plugin.frames[0]
        yield plugin.frames[0]
        raise GRPCError(Status.DATA_LOSS, "the tree is gone")

    plugin.list_and_watch = fail  # type: ignore[method-assign]
    got = []
    async with connected(server) as channel:
        with pytest.raises(GRPCError, match="the tree is gone"):  # noqa: PT012  the error comes from the third step
            async for frame in DevicePluginStub(channel).list_and_watch(Empty()):
                got.append(frame)  # noqa: PERF401  what came before the error is compared
    assert got == [plugin.frames[0]] * 2


@pytest.mark.trio
async def test_stream_method_that_never_yields(plugin: Plugin, server: Server) -> None:
    async def refuse(message: Empty) -> None:
        raise GRPCError(Status.UNIMPLEMENTED, "not here")

    plugin.list_and_watch = refuse  # type: ignore[assignment,method-assign]
    async with connected(server) as channel:
        with pytest.raises(GRPCError, match="not here"):
            async for _ in DevicePluginStub(channel).list_and_watch(Empty()):
                pass


# --- what the request headers may say -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "replace", "http_status", "status"),
    [
        ("/v1beta1.DevicePlugin/Nothing", {}, "200", Status.UNIMPLEMENTED),
        ("", {":path": ""}, "200", Status.UNIMPLEMENTED),
        (ALLOCATE, {":method": "GET"}, "405", Status.INTERNAL),
        (ALLOCATE, {"content-type": "text/html"}, "415", Status.UNKNOWN),
        (ALLOCATE, {"content-type": "application/grpc+json"}, "415", Status.UNKNOWN),
        (ALLOCATE, {"content-type": ""}, "415", Status.UNKNOWN),
        (ALLOCATE, {"grpc-timeout": "soon"}, "200", Status.INTERNAL),
        (ALLOCATE, {"grpc-timeout": "9" * 4000 + "S"}, "200", Status.INTERNAL),
        (ALLOCATE, {"x-odd-bin": "é€"}, "200", Status.INTERNAL),
    ],
)
@pytest.mark.trio
async def test_malformed_headers(
    server: Server, path: str, replace: dict[str, str], http_status: str, status: Status
) -> None:
    async with raw_peer(server) as peer:
        outcome = await peer.outcome(await peer.call(path, replace=replace))
        assert outcome[":status"] == http_status
        assert outcome["grpc-status"] == str(status.value)
        assert outcome["content-type"] == "application/grpc+proto"  # grpc-go reads no status without
        good = await peer.outcome(await peer.call())
        assert good["grpc-status"] == "0"


@pytest.mark.parametrize("content_type", ["application/grpc+proto", "application/grpc;charset=utf-8"])
@pytest.mark.trio
async def test_accepted_headers(server: Server, content_type: str) -> None:
    replace = {"content-type": content_type, "te": "", ":authority": "", "x-odd": "naïve"}
    async with raw_peer(server) as peer:
        outcome = await peer.outcome(await peer.call(replace=replace))
    assert outcome["grpc-status"] == "0"


# --- messages -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"\1\0\0\0\4" + gzip.compress(b"")[:4], Status.UNIMPLEMENTED),
        (b"\xff\0\0\0\0", Status.UNIMPLEMENTED),
        (b"\0\xff\xff\xff\xff", Status.RESOURCE_EXHAUSTED),
        (b"\0" + (MESSAGE_MAX_BYTES + 1).to_bytes(4, "big"), Status.RESOURCE_EXHAUSTED),
        (b"", Status.INTERNAL),
        (b"\0\0", Status.INTERNAL),
        (b"\0\0\0\0\5abc", Status.INTERNAL),
        (b"\0\0\0\0\5", Status.INTERNAL),
        (b"\0\0\0\0\4\xff\xff\xff\xff", Status.INTERNAL),
        (b"\0\0\0\0\2\x0a\x7f", Status.INTERNAL),
    ],
    ids=[
        "compressed", "odd flag", "4 GiB announced", "one byte over the limit", "no message", "prefix cut",
        "message cut", "message missing", "no protobuf", "protobuf overruns",
    ],
)  # fmt: skip
@pytest.mark.trio
async def test_malformed_messages(server: Server, body: bytes, status: Status) -> None:
    async with raw_peer(server) as peer:
        outcome = await peer.outcome(await peer.call(body=body))
        assert outcome["grpc-status"] == str(status.value)
        good = await peer.outcome(await peer.call())
        assert good["grpc-status"] == "0"
    assert server.calls == 0


@pytest.mark.trio
async def test_oversized_message_is_refused_from_its_length_alone(server: Server) -> None:
    """The announced 4 GiB never arrive; the refusal does, though the request has not ended."""
    async with raw_peer(server) as peer:
        stream_id = await peer.call(body=b"\0\xff\xff\xff\xff" + b"x" * 1000, end=False)
        outcome = await peer.outcome(stream_id)
        assert outcome["grpc-status"] == str(Status.RESOURCE_EXHAUSTED.value)
        assert str(MESSAGE_MAX_BYTES) in outcome["grpc-message"]


@pytest.mark.trio
async def test_largest_message_in_both_directions(server: Server) -> None:
    """Many times the HTTP/2 windows; one byte more is refused on our own side, by name."""
    overhead = len(bytes(allocate_request("x" * 4_000_000))) - 4_000_000
    big = "x" * (MESSAGE_MAX_BYTES - overhead)
    request = allocate_request(big)
    assert len(bytes(request)) == MESSAGE_MAX_BYTES
    with trio.fail_after(TEST_DEADLINE_S):
        async with connected(server) as channel:
            stub = DevicePluginStub(channel)
            with pytest.raises(GRPCError) as caught:  # the answer wraps the same id in a few bytes more
                await stub.allocate(request)
            assert caught.value.status is Status.RESOURCE_EXHAUSTED
            answer = await stub.allocate(allocate_request(big[:-100]))
            assert len(answer.container_responses[0].envs["IDS"]) == len(big) - 100
            with pytest.raises(GRPCError, match=str(MESSAGE_MAX_BYTES + 1)):
                await stub.allocate(allocate_request(big + "x"))


@pytest.mark.trio
async def test_empty_data_frames_inside_a_message(server: Server) -> None:
    """RFC 9113 6.1 allows them; grpclib takes them for the end."""
    async with raw_peer(server) as peer:
        stream_id = await peer.call(body=b"\0\0", end=False)
        for piece in (b"", b"\0\0", b"", b"\4\x0a\2", b"", b"\x0a\0", b""):
            peer.h2.send_data(stream_id, piece)
            await peer.flush()
            await trio.testing.wait_all_tasks_blocked()
        peer.h2.end_stream(stream_id)
        await peer.flush()
        assert (await peer.outcome(stream_id))["grpc-status"] == "0"


@pytest.mark.trio
async def test_answered_call_whose_request_never_ends_is_reset(server: Server) -> None:
    """Otherwise it would take up one of the hundred streams for ever."""
    async with raw_peer(server) as peer:
        stream_id = await peer.call(end=False)
        assert (await peer.outcome(stream_id))["grpc-status"] == "0"
        await trio.testing.wait_all_tasks_blocked()
        (connection,) = server._connections
        assert connection._http2.protocol.connection._connection.open_inbound_streams == 0


# --- time ---------------------------------------------------------------------------------------------------


@pytest.mark.trio
async def test_grpc_timeout_is_honoured(
    plugin: Plugin, server: Server, autojump_clock: trio.testing.MockClock
) -> None:
    async def dawdle(_: AllocateRequest) -> None:
        await trio.sleep(3600)

    plugin.allocate_hook = dawdle
    async with raw_peer(server) as peer:
        started_s = trio.current_time()
        stream_id = await peer.call(headers=[("grpc-timeout", "1500m")])
        while "grpc-status" not in (outcome := await peer.outcome(stream_id)):
            pass
        assert trio.current_time() - started_s == pytest.approx(1.5)
    assert outcome["grpc-status"] == str(Status.DEADLINE_EXCEEDED.value)


@pytest.mark.parametrize(
    ("at_the_end", "status"), [("deadline", Status.DEADLINE_EXCEEDED), ("drain", Status.UNAVAILABLE)]
)
@pytest.mark.trio
async def test_an_answer_that_is_sent_in_part_ends_with_trailers_alone(
    plugin: Plugin,
    server: Server,
    autojump_clock: trio.testing.MockClock,
    monkeypatch: pytest.MonkeyPatch,
    at_the_end: str,
    status: Status,
) -> None:
    """The rest waits for room in the peer's window, which the peer never makes."""

    async def allocate(_: AllocateRequest) -> AllocateResponse:
        return AllocateResponse(container_responses=[ContainerAllocateResponse(envs={"IDS": "x" * 100_000})])

    monkeypatch.setattr(plugin, "allocate", allocate)
    async with raw_peer(server) as peer:
        await peer.call(headers=[("grpc-timeout", "1S")])
        await trio.testing.wait_all_tasks_blocked()
        if at_the_end == "drain":
            await server.drain(0)
        ends: list[dict[str, str]] = []
        while not ends or "grpc-status" not in ends[-1]:
            ends += [
                {str(k): str(v) for k, v in event.headers or ()}
                for event in await peer.events() or ()
                if isinstance(event, h2.events.ResponseReceived | h2.events.TrailersReceived)
            ]
    assert ends[0] == {":status": "200", "content-type": "application/grpc+proto"}
    assert [":status" in end for end in ends] == [True, False]
    assert ends[1]["grpc-status"] == str(status.value)


@pytest.mark.trio
async def test_expired_grpc_timeout(plugin: Plugin, server: Server) -> None:
    async with raw_peer(server) as peer:
        outcome = await peer.outcome(await peer.call(headers=[("grpc-timeout", "0n")]))
    assert outcome["grpc-status"] in {"0", str(Status.DEADLINE_EXCEEDED.value)}


@pytest.mark.trio
async def test_client_timeout_runs_on_trios_clock(
    plugin: Plugin, server: Server, autojump_clock: trio.testing.MockClock
) -> None:
    async def dawdle(_: AllocateRequest) -> None:
        with trio.CancelScope(shield=True):  # the server does not answer in time
            await trio.sleep(100)

    plugin.allocate_hook = dawdle
    async with connected(server) as channel:
        started_s = trio.current_time()
        with pytest.raises(GRPCError) as caught:
            await DevicePluginStub(channel).allocate(allocate_request("a"), timeout=30)
        assert caught.value.status is Status.DEADLINE_EXCEEDED
        assert trio.current_time() - started_s == pytest.approx(30, abs=0.01)


@pytest.mark.trio
async def test_request_that_never_completes_is_given_up(
    server: Server, autojump_clock: trio.testing.MockClock
) -> None:
    """Slow loris inside a call: the message is announced and trickles in."""
    async with raw_peer(server) as peer:
        started_s = trio.current_time()
        stream_id = await peer.call(body=b"\0\0\0\1\0", end=False)
        for _ in range(5):
            await trio.sleep(1)
            peer.h2.send_data(stream_id, b"x")
            await peer.flush()
        outcome = await peer.outcome(stream_id)
        assert outcome["grpc-status"] == str(Status.DEADLINE_EXCEEDED.value)
        assert trio.current_time() - started_s == pytest.approx(GRPC_REQUEST_DEADLINE_S)
        assert server.calls == 0


# --- the server's own construction --------------------------------------------------------------------------


def test_two_services_with_one_method() -> None:
    with pytest.raises(ValueError, match=OPTIONS):
        Server([Plugin(), Plugin()], drain_s=DRAIN_S)


def test_streaming_service_must_close_its_generators() -> None:
    from gpuactors.kubelet.pb.deviceplugin.v1beta1 import DevicePluginBase

    with pytest.raises(TypeError, match=LIST_AND_WATCH):
        Server([DevicePluginBase()], drain_s=DRAIN_S)
