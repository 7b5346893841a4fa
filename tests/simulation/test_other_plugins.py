"""Another plugin on our resource, and a monitor's stream that is taken for kubelet's: the whole daemon beside them, on
trio's mock clock. Every time is simulated."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from gpuactors import limits
from gpuactors.control.node_view import view_of
from gpuactors.core.deviceplugin.registration import KUBELET_LIST_TAKEN_S
from gpuactors.core.values.model import ResourceName
from gpuactors.kubelet.kubelet import socket_name
from gpuactors.replay.counts import Counts
from gpuactors_simulation.kubelet.values import Phase
from gpuactors_simulation.other_plugins import Bystander, OtherPlugin
from tests.histories.trace import Trace
from tests.histories.world import MODEL, MODELS, World, open_world

GPU = MODELS[MODEL]
ENDPOINT = socket_name(ResourceName(GPU), "")
THEIRS = ("51", "52")

SEEN_S = limits.ODD_SIGHT_S + KUBELET_LIST_TAKEN_S + limits.KUBELET_LIST_AGAIN_S + 1
"""From another socket's appearing until the log and inspect have it that kubelet's list is not ours."""

HEALED_S = limits.LEDGER_QUIET_S + limits.KUBELET_LIST_AGAIN_S + limits.CONTEND_BACKOFF_S[0] + 1
"""From a cause that nothing hints at until kubelet has our list again."""


@asynccontextmanager
async def node(tmp_path: Path) -> AsyncIterator[World]:
    async with open_world(tmp_path, 1, Trace()) as world:
        yield world
        assert world.problems == []
        assert world.kubelet.panics == []


async def figures(world: World, capacity: int, allocatable: int, within_s: float) -> None:
    wanted = Counts(capacity, allocatable, 0)
    with trio.fail_after(within_s):
        await world.kubelet.until(lambda view: view.resources.get(GPU) == wanted)


def registration(world: World) -> tuple[bool, str]:
    """What `inspect` shows of the resource."""
    (daemon,) = world.daemons
    assert daemon.handle is not None
    (found,) = view_of(daemon.handle.state.value, trio.current_time()).resources
    return found.registered, found.problem


async def until_contested(world: World, within_s: float) -> str:
    (daemon,) = world.daemons
    assert daemon.handle is not None
    with trio.fail_after(within_s):
        async for _ in daemon.handle.state:
            registered, problem = registration(world)
            if not registered and "another plugin" in problem:
                return problem
    raise AssertionError("unreachable")


async def works(world: World, name: str) -> None:
    """A pod gets one of our GPUs from us."""
    with trio.fail_after(30):
        pod = await world.kubelet.admit(name, {GPU: 1})
    assert pod.phase is Phase.RUNNING, pod.message
    (given,) = world.kubelet.view.holdings[name, GPU].devices
    assert given in world.tree.functions


@pytest.mark.trio
async def test_a_plugin_that_takes_our_resource_is_named_and_it_is_taken_back(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with node(tmp_path) as world:
        await trio.sleep(60)
        other = OtherPlugin(world.transport, GPU, THEIRS)
        await world.nursery.start(other.run)
        await figures(world, 2, 2, 1)
        problem = await until_contested(world, SEEN_S)
        assert "'kubevirt-gpu.sock'" in problem
        assert "switch it off" in problem
        await figures(world, 3, 3, limits.CONTEND_BACKOFF_S[0] + 1)
        await trio.sleep(600)
        assert registration(world) == (True, "")
        assert len(other.registrations) == 1
        await works(world, "vm")
        assert other.allocated == []


@pytest.mark.trio
async def test_a_plugin_that_takes_our_resource_and_leaves_does_not_leave_the_node_at_0(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with node(tmp_path) as world:
        await trio.sleep(60)
        other = OtherPlugin(world.transport, GPU, THEIRS)
        await world.nursery.start(other.run)
        await figures(world, 2, 2, 1)
        other.leave()
        await figures(world, 2, 0, 1)
        await figures(world, 3, 3, HEALED_S)
        await trio.sleep(60)
        assert registration(world) == (True, "")
        await works(world, "vm")


@pytest.mark.trio
async def test_with_the_other_plugin_there_first_we_have_the_resource_and_lose_it_with_its_next_list(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with node(tmp_path) as world:
        (daemon,) = world.daemons
        await world.kill_daemon(daemon)
        other = OtherPlugin(world.transport, GPU, THEIRS)
        await world.nursery.start(other.run)
        await figures(world, 2, 2, 5)
        await world.start_daemon()
        await figures(world, 3, 3, 20)
        await trio.sleep(60)
        other.list(("51", "52", "53", "54"))
        await figures(world, 4, 4, 1)
        await until_contested(world, HEALED_S)
        await figures(world, 3, 3, HEALED_S)
        await works(world, "vm")


@pytest.mark.trio
async def test_with_the_other_plugin_there_first_its_end_cuts_us_off_and_we_register_at_once(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with node(tmp_path) as world:
        (daemon,) = world.daemons
        await world.kill_daemon(daemon)
        other = OtherPlugin(world.transport, GPU, THEIRS)
        await world.nursery.start(other.run)
        await world.start_daemon()
        await figures(world, 3, 3, 20)
        await trio.sleep(60)
        registrations = world.kubelet.view.registrations
        other.leave()
        await figures(world, 3, 3, 1)
        await trio.sleep(600)
        assert registration(world) == (True, "")
        assert world.kubelet.view.registrations <= registrations + 1
        await works(world, "vm")


@pytest.mark.trio
async def test_a_bystander_that_dials_first_after_a_kubelet_restart_hides_no_lost_stream(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with node(tmp_path) as world:
        watcher = Bystander(world.transport, ENDPOINT)
        await world.nursery.start(watcher.run)
        await trio.sleep(60)
        await world.kubelet.stop()
        await trio.sleep(1)
        world.kubelet.slow_registers_s = 0.5
        await world.kubelet.start()
        await figures(world, 3, 3, 5)
        await trio.sleep(60)
        assert registration(world) == (True, "")
        registrations = world.kubelet.view.registrations
        world.kubelet.lose_stream(GPU)
        await figures(world, 3, 0, 1)
        await figures(world, 3, 3, HEALED_S)
        assert world.kubelet.view.registrations == registrations + 1
        await works(world, "vm")


@pytest.mark.trio
async def test_a_bystander_alone_is_no_reason_to_register_again(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with node(tmp_path) as world:
        await trio.sleep(60)
        registrations = world.kubelet.view.registrations
        for _ in range(5):
            async with trio.open_nursery() as nursery:
                await nursery.start(Bystander(world.transport, ENDPOINT).run)
                await trio.sleep(20)
                nursery.cancel_scope.cancel()
        await trio.sleep(600)
        assert world.kubelet.view.registrations == registrations
        assert registration(world) == (True, "")
