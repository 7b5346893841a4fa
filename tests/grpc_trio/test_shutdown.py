"""The end of streams, calls and servers: generators are closed, peers are told, nothing waits for ever."""

from __future__ import annotations

from collections.abc import AsyncIterator

import h2.settings
import pytest
import trio
import trio.testing
from grpclib import GRPCError, Status

from gpuactors.grpc_trio import Channel, Server, TrioService, open_channel
from gpuactors.kubelet.pb.deviceplugin.v1beta1 import (
    AllocateRequest,
    Device,
    DevicePluginBase,
    DevicePluginStub,
    Empty,
    ListAndWatchResponse,
)

from .support import (
    ALLOCATE,
    DRAIN_S,
    LIST_AND_WATCH,
    TEST_DEADLINE_S,
    Plugin,
    RawPeer,
    allocate_request,
    connected,
    raw_peer,
)

SHUTTING_DOWN = {"grpc-status": str(Status.UNAVAILABLE.value), "grpc-message": "server shutting down"}


@pytest.fixture
def plugin() -> Plugin:
    return Plugin()


@pytest.fixture
def server(plugin: Plugin) -> Server:
    return Server([plugin], drain_s=DRAIN_S)


async def watch(channel: Channel, errors: list[GRPCError]) -> None:
    """Read ListAndWatch to its end and keep the error that ends it."""
    try:
        async with channel.server_stream(LIST_AND_WATCH, Empty(), ListAndWatchResponse) as frames:
            async for _ in frames:
                pass
    except GRPCError as error:
        errors.append(error)


# --- the generator behind a stream --------------------------------------------------------------------------


class Recorder(TrioService, DevicePluginBase):
    """Notes how its generator ends; `send` says whether it is suspended in a `yield` or in an `await` then."""

    def __init__(self, *, endless_sends: bool) -> None:
        self.endless_sends = endless_sends
        self.entered = trio.Event()
        self.closed = trio.Event()
        self.closed_in_task: str | None = None

    async def list_and_watch(self, message: Empty) -> AsyncIterator[ListAndWatchResponse]:
        try:
            yield ListAndWatchResponse()
            self.entered.set()
            while self.endless_sends:
                yield ListAndWatchResponse(devices=[Device(id="x" * 10_000)])
            await trio.sleep_forever()
        finally:
            self.closed_in_task = trio.lowlevel.current_task().name
            self.closed.set()


@pytest.mark.trio
@pytest.mark.parametrize("endless_sends", [False, True], ids=["waiting", "sending"])
@pytest.mark.parametrize("how", ["disconnect", "reset", "goaway", "cancel", "drain"])
async def test_generator_is_closed_at_once_and_in_its_own_task(how: str, endless_sends: bool) -> None:
    """Not by the garbage collector: in the call's task, and before the call is over."""
    recorder = Recorder(endless_sends=endless_sends)
    server = Server([recorder], drain_s=DRAIN_S)
    async with raw_peer(server) as peer:
        stream_id = await peer.call(LIST_AND_WATCH)
        with trio.fail_after(TEST_DEADLINE_S):
            await recorder.entered.wait()
        await trio.testing.wait_all_tasks_blocked()
        match how:
            case "disconnect":
                await peer.stream.aclose()
            case "reset":
                peer.h2.reset_stream(stream_id)
                await peer.flush()
            case "goaway":
                peer.h2.close_connection()
                await peer.flush()
            case "drain":
                await server.drain(0)
            case _:
                (call,) = server._calls
                call.cancel()
        await trio.testing.wait_all_tasks_blocked()
        assert recorder.closed.is_set()
        assert server.calls == 0
    assert recorder.closed_in_task is not None
    assert "_run_call" in recorder.closed_in_task


# --- cancelling the task that serves ------------------------------------------------------------------------


@pytest.mark.trio
async def test_cancelled_server_ends_streams_with_unavailable(server: Server) -> None:
    errors: list[GRPCError] = []
    ours, theirs = trio.testing.memory_stream_pair()
    async with trio.open_nursery() as nursery:
        serving = trio.CancelScope()

        async def serve() -> None:
            with serving:
                await server.serve_connection(theirs)

        nursery.start_soon(serve)
        async with open_channel(ours) as channel, trio.open_nursery() as watchers:
            for _ in range(3):
                watchers.start_soon(watch, channel, errors)
            await trio.testing.wait_all_tasks_blocked()
            serving.cancel()
    assert [(error.status, error.message) for error in errors] == [
        (Status.UNAVAILABLE, "server shutting down")
    ] * 3
    assert server.connections == server.calls == 0


@pytest.mark.trio
async def test_cancelled_server_ends_unary_calls_with_unavailable(plugin: Plugin, server: Server) -> None:
    async def wait(_: AllocateRequest) -> None:
        await trio.sleep_forever()

    plugin.allocate_hook = wait
    ours, theirs = trio.testing.memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.serve_connection, theirs)
        peer = RawPeer(ours)
        await peer.handshake()
        stream_id = await peer.call()
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    outcome = await peer.outcome(stream_id)
    assert SHUTTING_DOWN.items() <= outcome.items()
    assert peer.goaway == 0  # no error
    assert await peer.read_to_end() == b""


@pytest.mark.trio
async def test_handler_that_fails_while_it_is_cancelled(
    plugin: Plugin, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """Its error is logged; it neither replaces the cancellation nor costs the connection."""

    async def fail_late(_: AllocateRequest) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            try:
                await trio.sleep_forever()
            finally:
                raise ZeroDivisionError("late")

    plugin.allocate_hook = fail_late
    with trio.fail_after(TEST_DEADLINE_S):
        async with raw_peer(server) as peer:
            stream_id = await peer.call()
            await trio.testing.wait_all_tasks_blocked()
            peer.h2.reset_stream(stream_id)
            await peer.flush()
            await trio.testing.wait_all_tasks_blocked()
            assert "late" in caplog.text
            assert server.calls == 0
            plugin.allocate_hook = None
            assert (await peer.outcome(await peer.call()))["grpc-status"] == "0"


@pytest.mark.trio
async def test_peer_that_does_not_read_does_not_hold_up_shutdown(
    plugin: Plugin, server: Server, autojump_clock: trio.testing.MockClock
) -> None:
    plugin.frames = [ListAndWatchResponse(devices=[Device(id="x" * 10_000)])] * 100
    ours, theirs = trio.testing.lockstep_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.serve_connection, theirs)
        peer = RawPeer(ours)
        await peer.handshake()
        for _ in range(5):
            await peer.call(LIST_AND_WATCH)
        await trio.testing.wait_all_tasks_blocked()
        assert server.calls == 5
        started_s = trio.current_time()
        nursery.cancel_scope.cancel()
    assert trio.current_time() - started_s <= 2 * DRAIN_S + 0.01
    assert server.connections == server.calls == 0


@pytest.mark.trio
async def test_peer_that_reads_late_still_gets_its_trailers(
    plugin: Plugin, server: Server, autojump_clock: trio.testing.MockClock
) -> None:
    """Everything is stuck when the server is cancelled; the peer reads on within the bound, which a machine that stands
    still for a moment does not reach."""
    plugin.frames = [ListAndWatchResponse(devices=[Device(id="x" * 1_000_000)])]
    ours, theirs = trio.testing.lockstep_stream_pair()
    outcome: dict[str, str] = {}

    async def read(peer: RawPeer, stream_id: int) -> None:
        outcome.update(await peer.outcome(stream_id))
        await peer.read_to_end()

    with trio.fail_after(TEST_DEADLINE_S):
        async with trio.open_nursery() as readers, trio.open_nursery() as nursery:
            nursery.start_soon(server.serve_connection, theirs)
            peer = RawPeer(ours)
            peer.h2.initiate_connection()
            peer.h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 2**30})
            peer.h2.increment_flow_control_window(2**30)
            stream_id = await peer.call(LIST_AND_WATCH)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
            readers.start_soon(read, peer, stream_id)
    assert SHUTTING_DOWN.items() <= outcome.items()
    assert 0 < len(peer.data) < 1_000_000


# --- drain --------------------------------------------------------------------------------------------------


@pytest.mark.trio
async def test_drain_lets_unary_calls_finish_then_ends_streams(plugin: Plugin, server: Server) -> None:
    order: list[str] = []
    may_finish = trio.Event()

    async def wait(_: AllocateRequest) -> None:
        await may_finish.wait()

    async def allocate(channel: Channel) -> None:
        await DevicePluginStub(channel).allocate(allocate_request("a"))
        order.append("allocated")

    async def drain() -> None:
        assert await server.drain(TEST_DEADLINE_S)
        order.append("drained")

    async def read(channel: Channel) -> None:
        errors: list[GRPCError] = []
        await watch(channel, errors)
        assert [error.status for error in errors] == [Status.UNAVAILABLE]
        order.append("stream ended")

    plugin.allocate_hook = wait
    with trio.fail_after(TEST_DEADLINE_S):
        async with connected(server) as channel:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(read, channel)
                nursery.start_soon(allocate, channel)
                await trio.testing.wait_all_tasks_blocked()
                nursery.start_soon(drain)
                await trio.testing.wait_all_tasks_blocked()
                assert order == []
                with pytest.raises(GRPCError, match="server shutting down") as caught:
                    await DevicePluginStub(channel).allocate(allocate_request("too late"))
                assert caught.value.status is Status.UNAVAILABLE
                assert plugin.streams_open == 1
                may_finish.set()
            assert sorted(order) == ["allocated", "drained", "stream ended"]
            assert order.index("allocated") < order.index("stream ended")
            assert server.connections == 1  # the connection stays: its end is the peer's sign
        await server.wait_disconnected()


@pytest.mark.trio
async def test_drain_is_bounded_by_the_grace(
    plugin: Plugin, server: Server, autojump_clock: trio.testing.MockClock
) -> None:
    async def wait(_: AllocateRequest) -> None:
        await trio.sleep_forever()

    plugin.allocate_hook = wait
    async with raw_peer(server) as peer:
        stream_id = await peer.call(ALLOCATE)
        await trio.testing.wait_all_tasks_blocked()
        started_s = trio.current_time()
        assert not await server.drain(3)
        assert trio.current_time() - started_s == pytest.approx(3)
        assert SHUTTING_DOWN.items() <= (await peer.outcome(stream_id)).items()


@pytest.mark.trio
async def test_drain_is_bounded_even_for_handlers_that_will_not_end(
    plugin: Plugin, server: Server, autojump_clock: trio.testing.MockClock
) -> None:
    async def wait(_: AllocateRequest) -> None:
        with trio.CancelScope(shield=True):
            await trio.sleep(1000)

    plugin.allocate_hook = wait
    async with raw_peer(server) as peer:
        await peer.call(ALLOCATE)
        await trio.testing.wait_all_tasks_blocked()
        started_s = trio.current_time()
        assert not await server.drain(3)
        assert trio.current_time() - started_s == pytest.approx(3 + DRAIN_S)


@pytest.mark.trio
async def test_wait_disconnected_is_the_peers_sign(server: Server) -> None:
    """Kubelet closes its connection 0.6 ms after it has noticed the stream's end."""
    disconnected = trio.Event()

    async def wait() -> None:
        await server.wait_disconnected()
        disconnected.set()

    async with trio.open_nursery() as nursery:
        async with raw_peer(server) as peer, raw_peer(server) as other:
            await peer.call(LIST_AND_WATCH)
            await server.drain(0)
            nursery.start_soon(wait)
            await peer.stream.aclose()
            await trio.testing.wait_all_tasks_blocked()
            assert server.connections == 1
            assert not disconnected.is_set()
            await other.stream.aclose()
            await trio.testing.wait_all_tasks_blocked()
        with trio.fail_after(TEST_DEADLINE_S):
            await disconnected.wait()
