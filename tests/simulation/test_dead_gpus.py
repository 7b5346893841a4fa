"""Dead GPUs on a whole node: no pod gets one, none is counted twice, and one that is enumerated again is back.

The real daemon, its readers and a tree of sysfs, and the fake kubelet, on trio's mock clock.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from msgspec.structs import replace
from trio.testing import MockClock

from gpuactors.replay.counts import Counts
from gpuactors_simulation.kubelet.values import Phase
from tests.histories.trace import Trace
from tests.histories.world import MODEL, MODELS, World, open_world
from tests.support.patience import patient

GPU = MODELS[MODEL]
WITHIN_S = patient(30.0)
DEAD_WITHIN_S = 2.0
"""On the mock clock: from a fatal error to kubelet."""


async def counted(world: World, counts: Counts, within_s: float = WITHIN_S) -> None:
    with trio.fail_after(within_s):
        await world.kubelet.until(lambda view: view.resources.get(GPU) == counts)


async def admitted(world: World, count: int) -> list[Phase]:
    """Submit so many pods of one GPU each, and return their phases a minute later."""
    for number in range(count):
        world.kubelet.submit(f"vm-{number}", {GPU: 1})
    await trio.sleep(60.0)
    return sorted((pod.phase for pod in world.kubelet.view.pods.values()), reverse=True)


@pytest.mark.trio
async def test_a_gpu_with_a_fatal_error_is_out_in_two_seconds_and_back_when_it_is_enumerated_again(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path, 1, Trace()) as world:
        await counted(world, Counts(3, 3, 0))
        dead = world.address(0)
        world.tell(world.tree.fail_fatally(dead))
        await counted(world, Counts(3, 2, 0), DEAD_WITHIN_S)
        for name in ("vm-1", "vm-2", "vm-3"):
            world.kubelet.submit(name, {GPU: 1})
        await counted(world, Counts(3, 2, 2))
        await trio.sleep(60.0)
        assert sorted(pod.phase for pod in world.kubelet.view.pods.values()) == sorted(
            [Phase.RUNNING, Phase.RUNNING, Phase.PENDING]
        )
        world.tell(world.tree.unplug(dead))
        world.tell(world.tree.plug(world.card(0, MODEL, "vfio-pci")))
        await counted(world, Counts(3, 3, 3))
        assert world.kubelet.double_handouts == []


@pytest.mark.trio
async def test_a_gpu_whose_fatal_error_only_the_port_above_counts_is_out_in_two_seconds(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path, 1, Trace()) as world:
        await counted(world, Counts(3, 3, 0))
        dead = world.address(0)
        world.tell(world.tree.unplug(dead))
        await counted(world, Counts(2, 2, 0))
        below_port = replace(world.card(0, MODEL, "vfio-pci"), bridges=("0000:20:01.0",))
        world.tell(world.tree.plug(below_port))
        await counted(world, Counts(3, 3, 0))
        world.tell(world.tree.fail_fatally(dead, by_port=True))
        await counted(world, Counts(3, 2, 0), DEAD_WITHIN_S)
        await trio.sleep(600.0)
        assert world.kubelet.view.resources[GPU] == Counts(3, 2, 0), "it is not back by itself"


@pytest.mark.trio
async def test_a_restarted_daemon_does_not_offer_a_dead_gpu(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path, 1, Trace()) as world:
        await counted(world, Counts(3, 3, 0))
        world.tell(world.tree.fail_fatally(world.address(0)))
        await counted(world, Counts(3, 2, 0), DEAD_WITHIN_S)
        await world.kill_daemon(world.daemons[0], 0)
        await world.start_daemon()
        assert await admitted(world, 3) == [Phase.RUNNING, Phase.RUNNING, Phase.PENDING]
        assert world.kubelet.view.resources[GPU] == Counts(3, 2, 2)


@pytest.mark.trio
async def test_a_gpu_that_falls_silent_without_any_event_is_refused_and_then_unhealthy(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path, 1, Trace()) as world:
        await counted(world, Counts(3, 3, 0))
        for slot in range(3):
            world.tree.fall_silent(world.address(slot))
        pod = await world.kubelet.admit("vm-1", {GPU: 1})
        assert pod.phase is Phase.FAILED
        assert "does not answer" in pod.message
        await counted(world, Counts(3, 2, 0))


@pytest.mark.trio
async def test_an_allocated_gpu_that_dies_is_subtracted_once_before_and_after_its_pod_ends(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path, 1, Trace()) as world:
        await counted(world, Counts(3, 3, 0))
        assert (await world.kubelet.admit("vm-1", {GPU: 1})).phase is Phase.RUNNING
        await counted(world, Counts(3, 3, 1))
        (dead,) = (row.id for row in world.kubelet.view.devices if row.pod is not None)
        world.tell(world.tree.fail_fatally(dead))
        await trio.sleep(60.0)
        assert world.kubelet.view.resources[GPU] == Counts(3, 3, 1)
        world.kubelet.delete("vm-1")
        await counted(world, Counts(3, 2, 0))


@pytest.mark.trio
@pytest.mark.parametrize("state", ["D3hot", "D3cold"])
async def test_a_suspended_gpu_is_well(state: str, tmp_path: Path, autojump_clock: MockClock) -> None:
    async with open_world(tmp_path, 1, Trace()) as world:
        await counted(world, Counts(3, 3, 0))
        for slot in range(3):
            world.tree.suspend(world.address(slot), state)
        assert (await world.kubelet.admit("vm-1", {GPU: 3})).phase is Phase.RUNNING
        await trio.sleep(600.0)
        assert world.kubelet.view.resources[GPU] == Counts(3, 3, 3)
