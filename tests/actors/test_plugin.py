"""The plugin of one resource: when it calls Register."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest
import trio
from trio.testing import MockClock

from gpuactors import limits
from gpuactors.actors import plugin
from gpuactors.actors.registry import PluginReaders
from gpuactors.concurrency.latest import Latest, LatestReader
from gpuactors.core.deviceplugin.registration import PluginOrder
from gpuactors.core.events import Event
from gpuactors.core.events.deviceplugin import RegisterAnswered
from gpuactors.core.values.model import DeviceList, ResourceName
from gpuactors.ports.node import Caller

RESOURCE = ResourceName("nvidia.com/H100")
PATIENCE_S = 30.0


class OldConnection:
    """An endpoint to which kubelet is still connected. Implements `ports.node.Endpoint`."""

    name = "h100.sock"

    def __init__(self) -> None:
        self.closed = trio.Event()

    def still_there(self) -> bool:
        return True

    async def wait_disconnected(self) -> None:
        await self.closed.wait()

    async def drain(self, grace_s: float) -> None:
        await trio.lowlevel.checkpoint()


class FakeKubelet:
    """Serves one endpoint and counts Register calls. Implements `ports.node.Kubelet`."""

    absence = ""

    def __init__(self) -> None:
        self.endpoint = OldConnection()
        self.registered_at: list[float] = []

    def sockets(self) -> AbstractAsyncContextManager[AsyncIterator[str | None]]:
        raise NotImplementedError

    @asynccontextmanager
    async def serve(
        self,
        resource: ResourceName,
        device_lists: LatestReader[DeviceList],
        caller: Caller,
        *,
        pre_start: bool,
    ) -> AsyncIterator[OldConnection]:
        yield self.endpoint

    async def register(self, resource: ResourceName, endpoint: str, *, pre_start: bool) -> None:
        await trio.lowlevel.checkpoint()
        self.registered_at.append(trio.current_time())


class NoCaller:
    """Nobody calls."""


@asynccontextmanager
async def plugin_told_to_register() -> AsyncIterator[tuple[FakeKubelet, trio.MemoryReceiveChannel[Event]]]:
    kubelet = FakeKubelet()
    order = Latest(PluginOrder(bind=1, register=1, renew=False))
    reads = PluginReaders(Latest[DeviceList](()).subscribe(), order.subscribe())
    post, inbox = trio.open_memory_channel[Event](8)
    ports = plugin.PluginPorts(kubelet, NoCaller(), post, True, lambda _name, error: pytest.fail(repr(error)))  # type: ignore[arg-type]
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(plugin.Plugin(RESOURCE, reads, ports, trio.Event()).run)
            yield kubelet, inbox
            nursery.cancel_scope.cancel()


async def _registered(inbox: trio.MemoryReceiveChannel[Event]) -> None:
    while not isinstance(await inbox.receive(), RegisterAnswered):
        pass


async def test_register_waits_until_kubelet_has_hung_up(autojump_clock: MockClock) -> None:
    """Else kubelet sees the old stream's end after it, and cuts off the new one (the re-registration race)."""
    async with plugin_told_to_register() as (kubelet, inbox):
        await trio.sleep(limits.DISCONNECT_WAIT_S / 2)
        assert not kubelet.registered_at
        kubelet.endpoint.closed.set()
        at = trio.current_time()
        await _registered(inbox)
        assert kubelet.registered_at == [at]


async def test_register_does_not_wait_for_ever_for_whoever_stays(autojump_clock: MockClock) -> None:
    async with plugin_told_to_register() as (kubelet, inbox):
        began = trio.current_time()
        await _registered(inbox)
        assert kubelet.registered_at == [began + limits.DISCONNECT_WAIT_S]
