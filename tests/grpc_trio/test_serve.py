"""Accepting: the loop lives through want of descriptors and bad peers, and leaves no descriptor behind."""

from __future__ import annotations

import errno
import logging
import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import trio
import trio.testing
from grpclib import GRPCError

from gpuactors.grpc_trio import (
    ConnectError,
    Server,
    bind_unix,
    connect_unix,
    open_unix_channel,
)
from gpuactors.grpc_trio.limits import ACCEPT_RETRY_S
from gpuactors.kubelet.pb.deviceplugin.v1beta1 import DevicePluginStub, Empty

from .support import DRAIN_S, TEST_DEADLINE_S, Plugin, allocate_request


@pytest.fixture
def plugin() -> Plugin:
    return Plugin()


@pytest.fixture
def server(plugin: Plugin) -> Server:
    return Server([plugin], drain_s=DRAIN_S)


@asynccontextmanager
async def serving(server: Server, path: Path) -> AsyncIterator[str]:
    """`server` on a real unix socket; cancelled at the end of the block."""
    async with trio.open_nursery() as nursery:
        listener = bind_unix(str(path))
        await nursery.start(server.serve, listener)
        yield listener.path
        nursery.cancel_scope.cancel()


async def assert_serves(path: str) -> None:
    with trio.fail_after(TEST_DEADLINE_S):
        async with open_unix_channel(path, connect_deadline_s=TEST_DEADLINE_S) as channel:
            await DevicePluginStub(channel).allocate(allocate_request("a"))


async def watch(path: str) -> None:
    """Dial, and read ListAndWatch until the server is gone."""
    with suppress(ConnectError, GRPCError):
        async with open_unix_channel(path, connect_deadline_s=TEST_DEADLINE_S) as channel:
            async for _ in DevicePluginStub(channel).list_and_watch(Empty()):
                pass


def descriptors() -> list[str]:
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:  # the one that listed the directory
            continue
    return sorted(name for name in found if name.startswith("socket:"))


class ScriptedListener(trio.abc.Listener[trio.abc.Stream]):
    """Yields what it is given: errors are raised, streams returned; then blocks until closed."""

    def __init__(self, *results: OSError | trio.abc.Stream) -> None:
        self._results = list(results)
        self._closed = trio.Event()

    async def accept(self) -> trio.abc.Stream:
        await trio.lowlevel.checkpoint()
        if self._results:
            result = self._results.pop(0)
            if isinstance(result, OSError):
                raise result
            return result
        await self._closed.wait()
        raise trio.ClosedResourceError

    async def aclose(self) -> None:
        self._closed.set()
        await trio.lowlevel.checkpoint()


@pytest.mark.trio
async def test_want_of_descriptors_is_waited_out(
    server: Server, autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """EMFILE five times, complained about once; then the connection is served."""
    ours, theirs = trio.testing.memory_stream_pair()
    listener = ScriptedListener(*(OSError(errno.EMFILE, "Too many open files") for _ in range(5)), theirs)
    with caplog.at_level(logging.WARNING):
        async with trio.open_nursery() as nursery:
            started_s = trio.current_time()
            await nursery.start(server.serve, listener)
            await trio.sleep(4.9 * ACCEPT_RETRY_S)
            assert server.connections == 0
            await trio.sleep(0.2 * ACCEPT_RETRY_S)
            assert server.connections == 1
            assert trio.current_time() - started_s == pytest.approx(5.1 * ACCEPT_RETRY_S)
            nursery.cancel_scope.cancel()
    assert caplog.text.count("Too many open files") == 1
    await ours.aclose()


@pytest.mark.trio
async def test_other_accept_errors_are_not_swallowed(server: Server) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        await server.serve(ScriptedListener(OSError(errno.EINVAL, "Invalid argument")))
    assert caught.group_contains(OSError, match="Invalid argument")


@pytest.mark.trio
async def test_closed_listener_lets_connections_live(plugin: Plugin, server: Server) -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    listener = ScriptedListener(theirs)
    returned = trio.Event()

    async def serve() -> None:
        await server.serve(listener)
        returned.set()

    with trio.fail_after(TEST_DEADLINE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve)
            await trio.testing.wait_all_tasks_blocked()
            await listener.aclose()
            await trio.testing.wait_all_tasks_blocked()
            assert server.connections == 1
            assert not returned.is_set()
            await ours.aclose()
            await returned.wait()


@pytest.mark.trio
async def test_bad_peers_over_a_real_socket(server: Server, tmp_path: Path) -> None:
    dice = random.Random(7)
    async with serving(server, tmp_path / "s") as path:
        for _ in range(50):
            stream = await connect_unix(path, deadline_s=trio.current_time() + TEST_DEADLINE_S)
            with suppress(trio.BrokenResourceError):
                await stream.send_all(dice.randbytes(dice.randrange(1, 200)))
            await stream.aclose()
        await assert_serves(path)
        with trio.fail_after(TEST_DEADLINE_S):
            await server.wait_disconnected()


@pytest.mark.trio
async def test_thirty_cancelled_nurseries_leak_no_descriptor(server: Server, tmp_path: Path) -> None:
    """Cancelled with a stream and a call open, on both sides, at whatever point a handful of steps brings them to."""
    before = descriptors()
    for round_number in range(30):
        with trio.CancelScope() as scope:
            async with serving(server, tmp_path / "s") as path, trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(watch, path)
                for _ in range(round_number):
                    await trio.lowlevel.checkpoint()
                scope.cancel()
        assert server.connections == server.calls == 0
        assert not (tmp_path / "s").exists()
    assert descriptors() == before


@pytest.mark.trio
async def test_server_can_serve_again_after_a_cancellation(server: Server, tmp_path: Path) -> None:
    for _ in range(3):
        async with serving(server, tmp_path / "s") as path:
            await assert_serves(path)
