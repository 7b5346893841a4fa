"""The health stream: complete lists, at once and again, and a stream that stays open to the end."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Final, cast

import grpc
import pytest
import trio
from trio.testing import MockClock

from gpuactors import limits
from gpuactors.concurrency.latest import Latest
from gpuactors.core.values.claim import DeviceHealth, DraHealth
from gpuactors.kubelet.dra.health import HEALTH_AGAIN_S, Health, HealthReader
from gpuactors.kubelet.pb.dra_health_v1 import v1
from tests.kubelet.dra.serving import WITHIN_S, Plugin, serving, short_directory
from tests.support.dra_grpcio import HEALTH, health

VERSIONS: Final = ("v1", "v1alpha1")
KUBELETS_DEFAULT_S: Final = 30.0
"""Without a timeout of its own a device is Unknown so long after the last message (cm/dra, healthinfo.go)."""

GOOD: Final = DeviceHealth("node-1", "gpu-0000-01-00-0", DraHealth.HEALTHY, "")
BAD: Final = DeviceHealth("node-1", "gpu-0000-02-00-0", DraHealth.UNHEALTHY, "held by process 7")
ODD: Final = DeviceHealth("node-1", "gpu-0000-03-00-0", DraHealth.UNKNOWN, "not inspected yet")


def stream_of(reader: HealthReader) -> AsyncGenerator[Any, None]:
    service = Health(reader, trio.current_time)
    return cast(AsyncGenerator[Any, None], service.node_watch_resources(v1.NodeWatchResourcesRequest()))


def watch(served: Plugin, channel: grpc.Channel, version: str) -> Any:
    return health(channel, version)["NodeWatchResources"](
        HEALTH[version].message("NodeWatchResourcesRequest")(), timeout=WITHIN_S
    )


async def following(stream: Any) -> Any:
    with trio.fail_after(WITHIN_S):
        return await trio.to_thread.run_sync(next, stream, abandon_on_cancel=True)


@pytest.mark.parametrize("version", VERSIONS)
async def test_the_complete_list_comes_at_once_and_after_each_change(version: str) -> None:
    with short_directory() as directory:
        async with serving(directory, health=(GOOD, BAD, ODD)) as served:
            with served.dialled() as channel:
                stream = watch(served, channel, version)
                first = await following(stream)
                assert [
                    (d.device.pool_name, d.device.device_name, d.health, d.message) for d in first.devices
                ] == [
                    ("node-1", GOOD.device, 1, ""),
                    ("node-1", BAD.device, 2, "held by process 7"),
                    ("node-1", ODD.device, 0, "not inspected yet"),
                ]
                assert {d.health_check_timeout_seconds for d in first.devices} == {60}
                served.health.set((GOOD,))
                assert [d.device.device_name for d in (await following(stream)).devices] == [GOOD.device]
                served.health.set(())
                assert not (await following(stream)).devices, "an empty list is sent as well"


async def test_every_stream_gets_every_list() -> None:
    """Two instances of kubelet's client, or one that dials again: none takes a list from the other."""
    with short_directory() as directory:
        async with serving(directory, health=(GOOD,)) as served:
            with served.dialled() as channel, served.dialled() as second:
                streams = [watch(served, channel, "v1"), watch(served, second, "v1alpha1")]
                for stream in streams:
                    assert len((await following(stream)).devices) == 1
                served.health.set((GOOD, BAD))
                for stream in streams:
                    assert len((await following(stream)).devices) == 2


async def test_a_quiet_list_is_sent_again_before_kubelet_takes_it_for_unknown(
    autojump_clock: MockClock,
) -> None:
    cell = Latest[tuple[DeviceHealth, ...]]((GOOD,))
    with trio.fail_after(1000):
        async with aclosing(stream_of(cell.subscribe())) as stream:
            sent = [(trio.current_time(), await anext(stream))]
            for _ in range(3):
                message = await anext(stream)
                sent.append((trio.current_time(), message))
            for (before, _), (at, message) in itertools.pairwise(sent):
                assert at - before == HEALTH_AGAIN_S < KUBELETS_DEFAULT_S
                assert [d.last_updated_time for d in message.devices] == [int(at)], "kubelet counts from it"


async def test_a_change_is_sent_at_once_and_resets_the_time_to_the_next(autojump_clock: MockClock) -> None:
    cell = Latest[tuple[DeviceHealth, ...]]((GOOD,))
    with trio.fail_after(1000):
        async with (
            aclosing(stream_of(cell.subscribe())) as stream,
            trio.open_nursery() as nursery,
        ):
            await anext(stream)

            async def change() -> None:
                await trio.sleep(7)
                cell.set((BAD,))

            began = trio.current_time()
            nursery.start_soon(change)
            message = await anext(stream)
            assert (trio.current_time() - began, message.devices[0].message) == (7, BAD.message)
            await anext(stream)
            assert trio.current_time() - began == 7 + HEALTH_AGAIN_S


async def test_the_stream_outlives_the_last_list(autojump_clock: MockClock) -> None:
    """Its end makes kubelet forget the devices at once: the last list is repeated until the plugin ends."""
    cell = Latest[tuple[DeviceHealth, ...]]((GOOD,))
    with trio.fail_after(1000):
        async with aclosing(stream_of(cell.subscribe())) as stream:
            await anext(stream)
            cell.close()
            for _ in range(3):
                began = trio.current_time()
                assert [d.device.device_name for d in (await anext(stream)).devices] == [GOOD.device]
                assert trio.current_time() - began == HEALTH_AGAIN_S


@pytest.mark.parametrize("text", ["x" * 5000, "é" * 1000, "\udcff" * 600])
async def test_a_reason_is_cut_to_kubelets_1024_characters(text: str) -> None:
    cell = Latest[tuple[DeviceHealth, ...]]((DeviceHealth("node-1", "gpu", DraHealth.UNHEALTHY, text),))
    async with aclosing(stream_of(cell.subscribe())) as stream:
        (device,) = (await anext(stream)).devices
    assert 1000 < len(device.message.encode()) <= 1024
    assert device.message.endswith("…")
    assert bytes(device), "it can be sent"


async def test_a_stream_that_nobody_reads_any_more_is_gone() -> None:
    with short_directory() as directory:
        async with serving(directory, health=(GOOD,)) as served:
            with served.dialled() as channel:
                await following(watch(served, channel, "v1"))
            with trio.fail_after(WITHIN_S):
                await served.endpoint.withdraw(limits.DRAIN_S)
