"""No asyncio loop, timer or task anywhere on our path: neither made, nor asked for."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import NoReturn

import pytest
import trio

from gpuactors.grpc_trio import Server, bind_unix, open_unix_channel
from gpuactors.kubelet.pb.deviceplugin.v1beta1 import DevicePluginStub, Empty, ListAndWatchResponse

from .support import DRAIN_S, LIST_AND_WATCH, TEST_DEADLINE_S, Plugin, allocate_request

FORBIDDEN = {
    asyncio: ("new_event_loop", "get_event_loop", "get_running_loop", "run", "create_task", "ensure_future"),
    asyncio.events: ("new_event_loop", "get_event_loop", "get_running_loop", "_get_running_loop"),
    asyncio.tasks: ("create_task", "ensure_future"),
    asyncio.base_events.BaseEventLoop: ("__init__", "call_later", "call_at", "call_soon", "create_task"),
    asyncio.Event: ("set", "clear", "wait", "is_set"),
    asyncio.Queue: ("get", "put_nowait"),
    asyncio.mixins._LoopBoundMixin: ("_get_loop",),
}


@pytest.mark.trio
async def test_asyncio_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Calls, streams, timeouts, a drain and a reset, server and client, with every door to asyncio walled up.

    The one thing grpclib still does is to *make* asyncio.Event and Queue objects, which are thrown away; making one
    asks for no loop.
    """

    def forbid(name: str) -> None:
        for owner, names in FORBIDDEN.items():
            if name in names:

                def used(*_: object, **__: object) -> NoReturn:
                    raise AssertionError(f"asyncio: {name} was used")

                monkeypatch.setattr(owner, name, used)

    for names in FORBIDDEN.values():
        for name in names:
            if name == "set":
                continue  # grpclib's Connection.__init__ sets the event that we then replace
            forbid(name)
    with pytest.raises(AssertionError, match="asyncio"):
        asyncio.new_event_loop()

    server = Server([Plugin()], drain_s=DRAIN_S)
    with trio.fail_after(TEST_DEADLINE_S):
        async with trio.open_nursery() as nursery:
            listener = bind_unix(str(tmp_path / "s"))
            await nursery.start(server.serve, listener)
            async with open_unix_channel(listener.path, connect_deadline_s=1) as channel:
                stub = DevicePluginStub(channel, timeout=5)
                await stub.allocate(allocate_request("x" * 200_000))
                async with channel.server_stream(LIST_AND_WATCH, Empty(), ListAndWatchResponse) as frames:
                    async for _ in frames:
                        break
                await server.drain(0.1)
            nursery.cancel_scope.cancel()
    assert server.calls == server.connections == 0


def test_keepalive_is_off() -> None:
    """grpclib's keepalive would call loop.call_later on the first connection."""
    from gpuactors.grpc_trio.http2 import _CONFIGURATION

    assert _CONFIGURATION._keepalive_time is None
    assert _CONFIGURATION.__for_server__()._keepalive_time is None
