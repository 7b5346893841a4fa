"""Pods on IOMMU groups of two GPUs, as fast as kubelet can admit them: no pod is refused a GPU that kubelet took for
free.

The real daemon and the fake kubelet over memory streams, on trio's mock clock (issue 10, items 7 and 8).
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from gpuactors.replay.counts import Counts
from gpuactors_simulation.host.tree import PciSpec
from gpuactors_simulation.kubelet.values import Phase
from tests.histories.trace import Trace
from tests.histories.world import GPU_CLASS, MODEL, MODELS, SECOND, World, open_world
from tests.support.patience import patient

GPU = MODELS[MODEL]
ROUNDS = 8
WITHIN_S = patient(30.0)


@asynccontextmanager
async def groups_of_two(root: Path, groups: int) -> AsyncIterator[World]:
    """A node with so many groups of two GPUs, which kubelet knows of."""
    async with open_world(root, 1, Trace()) as world:
        for slot in range(max(3, groups)):
            if slot >= groups:
                world.tell(world.tree.unplug(world.address(slot)))
                continue
            if slot >= 3:
                world.tell(world.tree.plug(world.card(slot, MODEL, "vfio-pci")))
            second = PciSpec(
                world.address(slot, SECOND), "10de", MODEL, GPU_CLASS, world.group(slot), driver="vfio-pci"
            )
            world.tell(world.tree.plug(second))
        await free(world, 2 * groups)
        yield world


async def free(world: World, gpus: int) -> None:
    """Kubelet knows the GPUs of the node, these and no other, all of them free.

    Their count alone may come by before: three single cards at the start are, with one unplugged, two as well.
    """
    there = {world.address(slot, function) for slot in range(gpus // 2) for function in (0, SECOND)}
    with trio.fail_after(WITHIN_S):
        await world.kubelet.until(
            lambda view: (
                view.resources.get(GPU) == Counts(gpus, gpus, 0)
                and {row.id for row in view.devices if row.resource == GPU} == there
            )
        )


def refused(world: World) -> list[str]:
    return [f"{p.name}: {p.message}" for p in world.kubelet.view.pods.values() if p.phase is Phase.FAILED]


@pytest.mark.trio
@pytest.mark.parametrize(("late_s", "rounds"), [(0.0, ROUNDS), (0.04, ROUNDS // 2)])
async def test_one_gpu_pods_in_a_row_on_groups_of_two_are_never_refused(
    late_s: float, rounds: int, tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Also where kubelet handles each list later than the answer behind it (issue 24, 20)."""
    async with groups_of_two(tmp_path, 4) as world:
        world.kubelet.late_lists_s = late_s
        for n in range(rounds):
            names = [f"vm-{n}-{i}" for i in range(8)]
            for name in names:
                world.kubelet.submit(name, {GPU: 1})
            await trio.sleep(0.5)
            assert refused(world) == []
            phases = [world.kubelet.view.pods[name].phase for name in names]
            assert sorted(phases) == sorted([Phase.RUNNING] * 4 + [Phase.PENDING] * 4)
            assert world.kubelet.double_handouts == []
            for name in reversed(names):
                world.kubelet.delete(name)
            await free(world, 8)


@pytest.mark.trio
@pytest.mark.parametrize("longest_s", [0.0, 6.0])
async def test_the_next_pod_gets_half_of_a_group_whose_pod_has_just_ended(
    longest_s: float, tmp_path: Path, autojump_clock: MockClock
) -> None:
    """At once, and some time later: whatever our last read of the ledger had."""
    rng = random.Random(7)
    async with groups_of_two(tmp_path, 1) as world:
        for n in range(ROUNDS):
            with trio.fail_after(WITHIN_S):
                assert (await world.kubelet.admit(f"two-{n}", {GPU: 2})).phase is Phase.RUNNING
                await trio.sleep(rng.uniform(0.0, 8.0))
                world.kubelet.delete(f"two-{n}")
                await world.kubelet.until(lambda view: not view.pods)
                await trio.sleep(rng.uniform(min(0.1, longest_s), longest_s))
                world.kubelet.submit(f"one-{n}", {GPU: 1})
                await world.kubelet.until(
                    lambda view: all(p.phase is not Phase.PENDING for p in view.pods.values())
                )
                pod = await world.kubelet.settled(f"one-{n}")
            assert (pod.phase, pod.message) == (Phase.RUNNING, "")
            world.kubelet.delete(f"one-{n}")
            await free(world, 2)
