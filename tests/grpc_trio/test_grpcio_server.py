"""Our client against grpcio's server over real unix sockets."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
import trio
from grpclib import GRPCError, Status

from gpuactors.grpc_trio import open_unix_channel
from gpuactors.grpc_trio.limits import MESSAGE_MAX_BYTES
from gpuactors.kubelet.pb.deviceplugin.v1beta1 import (
    DevicePluginStub,
    Empty,
    ListAndWatchResponse,
)

from .support import LIST_AND_WATCH, TEST_DEADLINE_S, IndependentStubs, allocate_request


class Served:
    """A grpcio server at `path`; `cancelled` is set when a client has cancelled a stream."""

    def __init__(self, path: str, independent: IndependentStubs) -> None:
        messages = independent.messages
        cancelled = self.cancelled = threading.Event()

        class Plugin(independent.calls.DevicePluginServicer):  # type: ignore[misc,name-defined]
            def Allocate(self, request: Any, context: grpc.ServicerContext) -> Any:
                ids = list(request.container_requests[0].devices_ids)
                if ids == ["refuse"]:
                    context.abort(grpc.StatusCode.FAILED_PRECONDITION, "belegt: 100 % – déjà pris")
                response = messages.ContainerAllocateResponse(envs={"IDS": ",".join(ids)})
                return messages.AllocateResponse(container_responses=[response])

            def ListAndWatch(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
                context.add_callback(cancelled.set)
                for number in range(3):
                    yield messages.ListAndWatchResponse(devices=[messages.Device(ID=str(number))])
                if dict(context.invocation_metadata()).get("x-then") == "fail":
                    context.abort(grpc.StatusCode.UNAVAILABLE, "kubelet goes")
                elif dict(context.invocation_metadata()).get("x-then") != "end":
                    cancelled.wait(TEST_DEADLINE_S)

        limits = [("grpc.max_receive_message_length", MESSAGE_MAX_BYTES)]
        self.server = grpc.server(ThreadPoolExecutor(8), options=limits)
        independent.calls.add_DevicePluginServicer_to_server(Plugin(), self.server)
        self.server.add_insecure_port(f"unix:{path}")
        self.server.start()


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "s")


@pytest.fixture
def served(path: str, independent: IndependentStubs) -> Iterator[Served]:
    served = Served(path, independent)
    yield served
    served.cancelled.set()
    served.server.stop(None).wait(TEST_DEADLINE_S)


@pytest.mark.trio
async def test_unary_error_and_deadline(served: Served, path: str) -> None:
    with trio.fail_after(TEST_DEADLINE_S):
        async with open_unix_channel(path, connect_deadline_s=5) as channel:
            stub = DevicePluginStub(channel, timeout=5)
            answer = await stub.allocate(allocate_request("a", "b"))
            assert answer.container_responses[0].envs == {"IDS": "a,b"}
            with pytest.raises(GRPCError) as refused:
                await stub.allocate(allocate_request("refuse"))
            assert refused.value.status is Status.FAILED_PRECONDITION
            assert refused.value.message == "belegt: 100 % – déjà pris"
            with pytest.raises(GRPCError) as unknown:
                await stub.get_device_plugin_options(Empty())
            assert unknown.value.status is Status.UNIMPLEMENTED
            with pytest.raises(GRPCError) as late:
                async for _ in stub.list_and_watch(Empty(), timeout=0.2):
                    pass
            assert late.value.status is Status.DEADLINE_EXCEEDED


@pytest.mark.trio
async def test_stream(served: Served, path: str) -> None:
    with trio.fail_after(TEST_DEADLINE_S):
        async with open_unix_channel(path, connect_deadline_s=5) as channel:
            stub = DevicePluginStub(channel)
            frames = [frame async for frame in stub.list_and_watch(Empty(), metadata={"x-then": "end"})]
            assert [frame.devices[0].id for frame in frames] == ["0", "1", "2"]
            ids = []
            with pytest.raises(GRPCError, match="kubelet goes"):  # noqa: PT012
                async for frame in stub.list_and_watch(Empty(), metadata={"x-then": "fail"}):
                    ids.append(frame.devices[0].id)  # noqa: PERF401
            assert ids == ["0", "1", "2"]


@pytest.mark.trio
async def test_cancelled_stream_is_noticed_by_the_server(served: Served, path: str) -> None:
    with trio.fail_after(TEST_DEADLINE_S):
        async with open_unix_channel(path, connect_deadline_s=5) as channel:
            async with channel.server_stream(LIST_AND_WATCH, Empty(), ListAndWatchResponse) as frames:
                async for _ in frames:
                    break
            assert await trio.to_thread.run_sync(served.cancelled.wait, TEST_DEADLINE_S)
            await DevicePluginStub(channel).allocate(allocate_request("the connection lives"))


@pytest.mark.trio
async def test_many_calls_and_large_messages(served: Served, path: str) -> None:
    big = "x" * (MESSAGE_MAX_BYTES - 100)
    with trio.fail_after(TEST_DEADLINE_S):
        async with open_unix_channel(path, connect_deadline_s=5) as channel:
            stub = DevicePluginStub(channel)

            async def allocate(number: int) -> None:
                answer = await stub.allocate(allocate_request(str(number)))
                assert answer.container_responses[0].envs == {"IDS": str(number)}

            async with trio.open_nursery() as nursery:
                for number in range(200):
                    nursery.start_soon(allocate, number)
            answer = await stub.allocate(allocate_request(big))
            assert len(answer.container_responses[0].envs["IDS"]) == len(big)


@pytest.mark.trio
async def test_server_stops_with_calls_in_flight(served: Served, path: str) -> None:
    with trio.fail_after(TEST_DEADLINE_S):
        async with open_unix_channel(path, connect_deadline_s=5) as channel:
            async with channel.server_stream(LIST_AND_WATCH, Empty(), ListAndWatchResponse) as frames:
                with pytest.raises(GRPCError) as ended:  # noqa: PT012
                    async for _ in frames:
                        served.server.stop(None)
            assert ended.value.status in {Status.UNAVAILABLE, Status.CANCELLED}
            with pytest.raises(GRPCError) as refused:
                await DevicePluginStub(channel).allocate(allocate_request("a"))
            assert refused.value.status is Status.UNAVAILABLE


SERVE_AND_HANG = """
import sys, time, grpc
from concurrent.futures import ThreadPoolExecutor

def hang(request, context):
    print("called", flush=True)
    time.sleep(100)

handler = grpc.method_handlers_generic_handler(
    "v1beta1.DevicePlugin", {"Allocate": grpc.unary_unary_rpc_method_handler(hang)})
server = grpc.server(ThreadPoolExecutor(2))
server.add_generic_rpc_handlers((handler,))
server.add_insecure_port("unix:" + sys.argv[1])
server.start()
print("ready", flush=True)
time.sleep(100)
"""


async def said(process: trio.Process, word: bytes) -> None:
    assert process.stdout is not None
    heard = b""
    while word not in heard:
        heard += await process.stdout.receive_some()


@pytest.mark.trio
async def test_server_killed_in_the_middle_of_a_call(path: str) -> None:
    """SIGKILL: the call fails at once, with the truth."""
    errors: list[GRPCError] = []

    async def allocate() -> None:
        async with open_unix_channel(path, connect_deadline_s=5) as channel:
            try:
                await DevicePluginStub(channel).allocate(allocate_request("a"))
            except GRPCError as error:
                errors.append(error)

    with trio.fail_after(TEST_DEADLINE_S):
        async with trio.open_nursery() as nursery:
            serve = partial(
                trio.run_process,
                [sys.executable, "-c", SERVE_AND_HANG, path],
                stdout=subprocess.PIPE,
                check=False,
            )
            process: trio.Process = await nursery.start(serve)
            await said(process, b"ready")
            nursery.start_soon(allocate)
            await said(process, b"called")
            process.kill()
    (error,) = errors
    assert error.status is Status.UNAVAILABLE
