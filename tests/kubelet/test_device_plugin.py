"""The DevicePlugin service of one resource: which list leaves before which answer (issue 10, item 8)."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from gpuactors.concurrency.latest import Latest
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.effects import Answer, Grant, Granted
from gpuactors.core.values.model import (
    AdvertisedDevice,
    DeviceId,
    DeviceList,
    Health,
    ResourceName,
    device_key,
    pci_address,
)
from gpuactors.kubelet.device_plugin import LIST_FIRST_S, LIST_HANDLED_S, DevicePluginService
from gpuactors.kubelet.pb.deviceplugin import v1beta1 as pb
from tests.core.builders import H100
from tests.kubelet.stub_core import StubCore
from tests.support.patience import patient

A, B = (pci_address(f"0000:0{n}:00.0") for n in (1, 2))


def device_list(**health: Health) -> DeviceList:
    a, b = health.get("a", Health.HEALTHY), health.get("b", Health.HEALTHY)
    return tuple(
        AdvertisedDevice(DeviceId(d), device_key(d), h, None, "", Cause.FREE) for d, h in ((A, a), (B, b))
    )


@dataclass
class Core(StubCore):
    """Allocates, and lists the other GPU of the group as Unhealthy now, as the registry does."""

    lists: Latest[DeviceList]
    next: DeviceList
    changes: tuple[ResourceName, ...] = ()

    async def allocate(self, resource: ResourceName, requests: tuple[tuple[DeviceId, ...], ...]) -> Answer:
        self.lists.set(self.next)
        return Granted((Grant((), ("/dev/vfio/7",)),), self.changes)


def service(next_list: DeviceList) -> DevicePluginService:
    lists = Latest(device_list())
    return DevicePluginService(H100, lists.subscribe(), Core(lists, next_list), pre_start=True)


Stream = AsyncGenerator[pb.ListAndWatchResponse, None]


def listen(plugin: DevicePluginService) -> aclosing[Stream]:
    return aclosing(cast(Stream, plugin.list_and_watch(pb.Empty())))


def healths(message: pb.ListAndWatchResponse) -> list[str]:
    return [device.health for device in pb.ListAndWatchResponse.parse(bytes(message)).devices]


async def allocate(plugin: DevicePluginService, order: list[Any]) -> None:
    request = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=[A])])
    await plugin.allocate(request)
    order.append("answer")


@pytest.mark.trio
async def test_the_list_leaves_before_the_answer_on_every_stream(autojump_clock: MockClock) -> None:
    plugin = service(device_list(b=Health.UNHEALTHY))
    order: list[Any] = []

    async def read(listened: Stream) -> None:
        async for message in listened:
            await trio.sleep(LIST_FIRST_S / 4)  # it is being sent
            order.append(healths(message))

    with trio.fail_after(patient(5)):
        async with listen(plugin) as one, listen(plugin) as two, trio.open_nursery() as nursery:
            nursery.start_soon(read, one)
            nursery.start_soon(read, two)
            await trio.sleep(1)
            order.clear()
            await allocate(plugin, order)
            nursery.cancel_scope.cancel()
    changed = ["Healthy", "Unhealthy"]
    assert order == [changed, changed, "answer"]


@pytest.mark.trio
async def test_the_answer_that_changes_a_list_for_others_follows_the_list_after_a_pause(
    autojump_clock: MockClock,
) -> None:
    """Kubelet has the list before it admits the next pod; of a grant that changes nothing for others nobody waits."""
    lists = Latest(device_list())
    core = Core(lists, device_list(b=Health.UNHEALTHY), (H100,))
    plugin = DevicePluginService(H100, lists.subscribe(), core, pre_start=True)
    sent_at = [0.0]

    async def read(listened: Stream) -> None:
        async for _ in listened:
            sent_at[0] = trio.current_time()

    with trio.fail_after(patient(5)):
        async with listen(plugin) as stream, trio.open_nursery() as nursery:
            nursery.start_soon(read, stream)
            await trio.sleep(1)
            await allocate(plugin, [])
            assert trio.current_time() - sent_at[0] == pytest.approx(LIST_HANDLED_S)
            core.changes = ()
            began_at = trio.current_time()
            await allocate(plugin, [])
            assert trio.current_time() == began_at
            nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_who_does_not_read_his_stream_holds_up_one_answer_and_no_more(
    autojump_clock: MockClock,
) -> None:
    plugin = service(device_list(b=Health.UNHEALTHY))
    with trio.fail_after(patient(5)):
        async with listen(plugin) as stuck:
            await anext(stuck)
            began_at = trio.current_time()
            await allocate(plugin, [])
            assert trio.current_time() - began_at == LIST_FIRST_S
            await allocate(plugin, [])
            assert trio.current_time() - began_at == LIST_FIRST_S
            await anext(stuck)  # it reads again: what it has now is sent
        began_at = trio.current_time()
        await allocate(plugin, [])
        assert trio.current_time() == began_at, "the stream is closed"


@pytest.mark.trio
async def test_a_stream_that_ends_meanwhile_is_not_waited_for(autojump_clock: MockClock) -> None:
    plugin = service(device_list(b=Health.UNHEALTHY))
    order: list[Any] = []
    with trio.fail_after(patient(5)):
        async with trio.open_nursery() as nursery, listen(plugin) as stuck:
            await anext(stuck)
            began_at = trio.current_time()
            nursery.start_soon(allocate, plugin, order)
            await wait_all_tasks_blocked()
        assert order == ["answer"]
        assert trio.current_time() == began_at


@pytest.mark.trio
async def test_a_change_that_kubelet_has_no_field_for_is_not_waited_for(autojump_clock: MockClock) -> None:
    plugin = service(
        tuple(
            AdvertisedDevice(a.id, a.key, a.health, None, "just allocated", Cause.JUST_ALLOCATED)
            for a in device_list()
        )
    )
    sent = []

    async def read(listened: Stream) -> None:
        async for message in listened:
            sent.extend([healths(message)])

    with trio.fail_after(patient(5)):
        async with listen(plugin) as stream, trio.open_nursery() as nursery:
            nursery.start_soon(read, stream)
            await trio.sleep(1)
            began_at = trio.current_time()
            await allocate(plugin, [])
            assert trio.current_time() == began_at
            nursery.cancel_scope.cancel()
    assert sent == [["Healthy", "Healthy"]]
