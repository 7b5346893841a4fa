"""Hand-overs under a stream of pods with claims: no prepare and no unprepare of kubelet's is refused (issue 24, 17).

The real daemons and the fake kubelet over memory streams, on trio's mock clock. Kubelet's plugin watcher takes its own
time for each registration socket, and registers those that it finds at once in no fixed order.
"""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from gpuactors.core.values.model import Role
from gpuactors_simulation.kubelet.values import KubeletView, Phase
from tests.histories.claims import CLAIMS, ClaimsNode
from tests.histories.trace import Trace
from tests.histories.world import World, open_world

HAND_OVERS = 3
CARDS = 3
BETWEEN_PODS_S = 0.3
"""From a pod's end to the next one on its GPU, at most."""
REGISTERED_S = 1.0
"""Kubelet's plugin watcher has found the successor by then."""


@pytest.mark.trio
async def test_no_call_is_refused_in_hand_overs_under_a_stream_of_pods(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    rng = random.Random(0)
    async with open_world(tmp_path, CLAIMS, Trace()) as world:
        for _ in range(HAND_OVERS):
            (old,) = world.daemons
            await hand_over_under_pods(world, rng)
            assert old.handle is not None
            old.stop()
            await old.ended.wait()
        calls = world.kubelet.dra_calls
        assert [call.error for call in calls if call.error] == []
        assert len(dict.fromkeys(call.endpoint for call in calls)) == HAND_OVERS + 1
        assert world.problems == []


async def hand_over_under_pods(world: World, rng: random.Random) -> None:
    """A successor starts while pods with claims come and go, until kubelet knows it."""
    node, over = world.claims, trio.Event()
    assert node is not None
    async with trio.open_nursery() as nursery:
        for card in node.cards[-CARDS:]:
            nursery.start_soon(pods_in_a_row, world, node, card, rng, over)
        await trio.sleep(rng.uniform(0.0, 1.0))
        await world.start_daemon()
        handle = world.daemons[-1].handle
        assert handle is not None
        async for state in handle.state.subscribe():
            if state.daemon.role is Role.SERVING:
                break
        await trio.sleep(REGISTERED_S)
        over.set()


async def pods_in_a_row(
    world: World, node: ClaimsNode, card: str, rng: random.Random, over: trio.Event
) -> None:
    """Pods, each with a claim for this GPU: one is deleted as soon as it runs, and the next comes when it is gone."""
    while not over.is_set():
        world.pods += 1
        name = f"vm-{world.pods}"
        node.allocate(name, [card])
        world.kubelet.submit(name, {}, uses=(name,))
        await world.kubelet.until(partial(is_running, name))
        world.kubelet.delete(name)
        await world.kubelet.until(partial(is_gone, name))
        await trio.sleep(rng.uniform(0.0, BETWEEN_PODS_S))


def is_running(name: str, view: KubeletView) -> bool:
    return view.pods[name].phase is Phase.RUNNING


def is_gone(name: str, view: KubeletView) -> bool:
    return name not in view.pods
