"""grpcio as client, over real unix sockets: an implementation that shares nothing with ours."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import grpc
import pytest
import trio
import trio.testing
from grpclib import GRPCError, Status

from gpuactors.grpc_trio import Server, bind_unix
from gpuactors.grpc_trio.limits import MESSAGE_MAX_BYTES
from gpuactors.kubelet.pb.deviceplugin.v1beta1 import AllocateRequest, Device, ListAndWatchResponse

from .support import DRAIN_S, TEST_DEADLINE_S, IndependentStubs, Plugin

T = TypeVar("T")


@pytest.fixture
def plugin() -> Plugin:
    return Plugin()


@pytest.fixture
def server(plugin: Plugin) -> Server:
    return Server([plugin], drain_s=DRAIN_S)


@asynccontextmanager
async def serving(server: Server, path: str) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        await nursery.start(server.serve, bind_unix(path))
        yield
        nursery.cancel_scope.cancel()


async def in_thread(work: Callable[[], T]) -> T:
    with trio.fail_after(TEST_DEADLINE_S):
        return await trio.to_thread.run_sync(work, abandon_on_cancel=True)


async def eventually(condition: Callable[[], bool]) -> None:
    """Real time: the peer is another implementation's threads."""
    with trio.fail_after(TEST_DEADLINE_S):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.002)


def dial(path: str) -> grpc.Channel:
    return grpc.insecure_channel(f"unix:{path}")


def allocation(independent: IndependentStubs, *ids: str) -> Any:
    messages = independent.messages
    return messages.AllocateRequest(
        container_requests=[messages.ContainerAllocateRequest(devices_ids=list(ids))]
    )


def ids_of(answer: Any) -> str:
    return str(answer.container_responses[0].envs["IDS"])


@pytest.mark.trio
async def test_unary_and_errors(
    plugin: Plugin, server: Server, independent: IndependentStubs, tmp_path: Path
) -> None:
    path = str(tmp_path / "s")

    async def refuse_b(request: AllocateRequest) -> None:
        match request.container_requests[0].devices_ids[0]:
            case "b":
                raise GRPCError(Status.FAILED_PRECONDITION, "belegt: GPU 0000:01:00.0 – 100 %")
            case "c":
                raise ZeroDivisionError
            case _:
                pass

    def work() -> None:
        with dial(path) as channel:
            stub = independent.calls.DevicePluginStub(channel)
            assert ids_of(stub.Allocate(allocation(independent, "a", "d"), timeout=5)) == "a,d"
            with pytest.raises(grpc.RpcError) as refused:
                stub.Allocate(allocation(independent, "b"), timeout=5)
            assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert refused.value.details() == "belegt: GPU 0000:01:00.0 – 100 %"
            with pytest.raises(grpc.RpcError) as crashed:
                stub.Allocate(allocation(independent, "c"), timeout=5)
            assert crashed.value.code() is grpc.StatusCode.UNKNOWN
            with pytest.raises(grpc.RpcError) as unknown:
                stub.PreStartContainer(independent.messages.PreStartContainerRequest(), timeout=5)
            assert unknown.value.code() is grpc.StatusCode.UNIMPLEMENTED
            nothing: Callable[..., Any] = channel.unary_unary("/v1beta1.DevicePlugin/Nothing")
            with pytest.raises(grpc.RpcError) as missing:
                nothing(b"", timeout=5)
            assert missing.value.code() is grpc.StatusCode.UNIMPLEMENTED
            assert missing.value.details() == "unknown method: /v1beta1.DevicePlugin/Nothing"
            longer: Callable[..., Any] = channel.unary_unary("/v1beta1.DevicePlugin/" + "x" * 5000)
            with pytest.raises(grpc.RpcError) as missing:
                longer(b"", timeout=5)
            assert (missing.value.details() or "").endswith("… (5,022 characters)"), "not all of it is echoed"
            assert stub.GetDevicePluginOptions(independent.messages.Empty(), timeout=5).pre_start_required

    plugin.allocate_hook = refuse_b
    async with serving(server, path):
        await in_thread(work)
        await eventually(lambda: server.connections == 0)


@pytest.mark.trio
async def test_deadline_of_the_client(
    plugin: Plugin, server: Server, independent: IndependentStubs, tmp_path: Path
) -> None:
    path = str(tmp_path / "s")
    cancelled = trio.Event()

    async def dawdle(_: AllocateRequest) -> None:
        try:
            await trio.sleep_forever()
        finally:
            cancelled.set()

    def work() -> None:
        with dial(path) as channel, pytest.raises(grpc.RpcError) as late:
            independent.calls.DevicePluginStub(channel).Allocate(allocation(independent, "a"), timeout=0.1)
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED

    plugin.allocate_hook = dawdle
    async with serving(server, path):
        await in_thread(work)
        with trio.fail_after(TEST_DEADLINE_S):
            await cancelled.wait()


@pytest.mark.trio
async def test_stream_and_its_cancellation_by_the_client(
    plugin: Plugin, server: Server, independent: IndependentStubs, tmp_path: Path
) -> None:
    path = str(tmp_path / "s")
    plugin.frames = [ListAndWatchResponse(devices=[Device(id=str(n), health="Healthy")]) for n in range(5)]

    def work() -> None:
        with dial(path) as channel:
            stub = independent.calls.DevicePluginStub(channel)
            for _ in range(3):
                stream = stub.ListAndWatch(independent.messages.Empty(), timeout=5)
                assert [next(stream).devices[0].ID for _ in range(5)] == list("01234")
                stream.cancel()
            assert ids_of(stub.Allocate(allocation(independent, "a"), timeout=5)) == "a"

    async with serving(server, path):
        await in_thread(work)
        await eventually(lambda: plugin.streams_open == server.calls == 0)


@pytest.mark.trio
async def test_client_that_dies_with_its_stream_open(
    plugin: Plugin, server: Server, independent: IndependentStubs, tmp_path: Path
) -> None:
    path = str(tmp_path / "s")

    def work() -> None:
        channel = dial(path)
        next(independent.calls.DevicePluginStub(channel).ListAndWatch(independent.messages.Empty()))
        channel.close()

    async with serving(server, path):
        await in_thread(work)
        with trio.fail_after(TEST_DEADLINE_S):
            await plugin.streams_closed.wait()
            await server.wait_disconnected()


@pytest.mark.trio
async def test_shutdown_is_seen_as_unavailable_and_reconnect_works(
    server: Server, plugin: Plugin, independent: IndependentStubs, tmp_path: Path
) -> None:
    """The same grpcio channel, across an end of the server and a new one at the same path."""
    path = str(tmp_path / "s")
    first_frame, stream_ended = threading.Event(), threading.Event()
    channel = dial(path)
    stub = independent.calls.DevicePluginStub(channel)
    codes = []

    def watch() -> None:
        try:
            for _ in stub.ListAndWatch(independent.messages.Empty()):
                first_frame.set()
        except grpc.RpcError as error:
            codes.append((error.code(), error.details()))
        stream_ended.set()

    async with serving(server, path):
        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        await eventually(first_frame.is_set)
    await eventually(stream_ended.is_set)
    assert codes == [(grpc.StatusCode.UNAVAILABLE, "server shutting down")]

    def allocate_again() -> str:
        while True:
            try:
                return ids_of(stub.Allocate(allocation(independent, "again"), timeout=5, wait_for_ready=True))
            except grpc.RpcError as error:  # it may not have noticed yet that the old connection is gone
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise

    async with serving(Server([plugin], drain_s=DRAIN_S), path):
        assert await in_thread(allocate_again) == "again"
        channel.close()
    thread.join(TEST_DEADLINE_S)


@pytest.mark.trio
async def test_drain_seen_from_outside(
    server: Server, plugin: Plugin, independent: IndependentStubs, tmp_path: Path
) -> None:
    """The Allocate in flight is answered, a new one is not, the stream ends, the client hangs up."""
    path = str(tmp_path / "s")
    in_flight, may_finish = trio.Event(), trio.Event()
    channel = dial(path)
    stub = independent.calls.DevicePluginStub(channel)

    async def hold(_: AllocateRequest) -> None:
        in_flight.set()
        await may_finish.wait()

    plugin.allocate_hook = hold
    async with serving(server, path), trio.open_nursery() as nursery:
        stream = stub.ListAndWatch(independent.messages.Empty())
        await in_thread(lambda: next(stream))
        answer = stub.Allocate.future(allocation(independent, "a"), timeout=5)
        with trio.fail_after(TEST_DEADLINE_S):
            await in_flight.wait()
        nursery.start_soon(server.drain, TEST_DEADLINE_S)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(grpc.RpcError) as refused:
            await in_thread(lambda: stub.Allocate(allocation(independent, "b"), timeout=5))
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        may_finish.set()
        assert ids_of(await in_thread(lambda: answer.result(timeout=5))) == "a"
        with pytest.raises(grpc.RpcError) as ended:
            await in_thread(lambda: next(stream))
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        assert server.connections == 1
        channel.close()
        with trio.fail_after(TEST_DEADLINE_S):
            await server.wait_disconnected()


@pytest.mark.trio
async def test_many_calls_at_once(server: Server, independent: IndependentStubs, tmp_path: Path) -> None:
    """More than the stream limit (100), on several connections, beside open streams."""
    path = str(tmp_path / "s")

    def work() -> None:
        # grpcio shares connections between equal channels; an option makes them different
        channels = [grpc.insecure_channel(f"unix:{path}", options=[("test.number", n)]) for n in range(3)]
        stubs = [independent.calls.DevicePluginStub(channel) for channel in channels]
        streams = [stub.ListAndWatch(independent.messages.Empty()) for stub in stubs]
        for stream in streams:
            next(stream)
        futures = [
            (str(n), stubs[n % 3].Allocate.future(allocation(independent, str(n)), timeout=8))
            for n in range(600)
        ]
        for expected, future in futures:
            assert ids_of(future.result()) == expected
        for channel in channels:
            channel.close()

    async with serving(server, path):
        await in_thread(work)
        await eventually(lambda: server.connections == server.calls == 0)


@pytest.mark.trio
async def test_large_messages_both_ways(
    server: Server, plugin: Plugin, independent: IndependentStubs, tmp_path: Path
) -> None:
    path = str(tmp_path / "s")
    big = "x" * (MESSAGE_MAX_BYTES - 100)
    plugin.frames = [ListAndWatchResponse(devices=[Device(id=big)])] * 3

    def work() -> None:
        with dial(path) as channel:
            stub = independent.calls.DevicePluginStub(channel)
            assert ids_of(stub.Allocate(allocation(independent, big), timeout=8)) == big
            stream = stub.ListAndWatch(independent.messages.Empty(), timeout=8)
            assert [len(next(stream).devices[0].ID) for _ in range(3)] == [len(big)] * 3
            with pytest.raises(grpc.RpcError) as refused:
                stub.Allocate(allocation(independent, big + "x" * 200), timeout=8)
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert ids_of(stub.Allocate(allocation(independent, "after"), timeout=5)) == "after"

    async with serving(server, path):
        await in_thread(work)


@pytest.mark.trio
async def test_compression_is_refused_as_unimplemented(
    server: Server, independent: IndependentStubs, tmp_path: Path
) -> None:
    path = str(tmp_path / "s")

    def work() -> None:
        with grpc.insecure_channel(f"unix:{path}", compression=grpc.Compression.Gzip) as channel:
            stub = independent.calls.DevicePluginStub(channel)
            with pytest.raises(grpc.RpcError) as refused:
                stub.Allocate(allocation(independent, "x" * 1000), timeout=5)
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED

    async with serving(server, path):
        await in_thread(work)
