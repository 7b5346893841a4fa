"""Every interleaving of a forced deletion (kubernetes issue 141471, NVIDIA issue 641; seen on a real node: the new
claim's prepare 0.11 s after it, the old claim's unprepare seconds later).

The old claim is prepared and its pod was deleted by force. Its unprepare, the new claim's prepare and a restart of the
daemon come at any moment between the steps of the release and of the new prepare: the claim is read, the checkpoint is
written, files and devices are done, the one or the other first. Enumerated, not sampled. Kubelet repeats what failed
with the daemon.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from gpuactors.core.values.claim_states import ClaimState
from tests.core import orders
from tests.core.builders import audio, gpu
from tests.core.gpus.small_world import (
    CLAIMS,
    GPU,
    HAPPENINGS,
    Node,
    World,
    asked,
    canonical,
    check_settled,
    restarted,
    seen,
    start,
)
from tests.core.orders import Count

OLD, NEW = CLAIMS
ON_HOST = gpu(GPU, 1, driver="nvidia")
PRE_BOUND = gpu(GPU, 1)
AUDIO = audio("0000:01:00.1", 1, driver="snd_hda_intel")

BEGINS = ("one is to be prepared", "all that is asked for is done", "one is deleted by force")

STEPS = {
    happening.name: happening
    for happening in HAPPENINGS
    if happening.name
    in ("the claim is read", "the checkpoint is written", "the act is done", "the last act is done")
}


@dataclass(frozen=True, slots=True)
class At:
    """A node, and how often the daemon is still to restart."""

    node: Node
    restarts: int


def every_interleaving(world: World, restarts: int) -> Count:
    """Follows every order of the steps with that many restarts to its end, and checks what is there then. What must
    hold after each step the step checks itself (`small_world.check_always`)."""
    begin = At(start(world), restarts)
    return orders.every_interleaving(begin, _steps, _is_end, lambda at: (canonical(at.node), at.restarts))


def _steps(at: At) -> dict[str, Callable[[At], At]]:
    """What can come next: each call once, and again after a restart that it got no answer from."""
    kubelet, found = at.node.outside.kubelet, dict[str, Callable[[At], At]]()
    is_asked = {call.uid for call in kubelet.calls.values()}
    if at.restarts:
        found["restart"] = lambda at: At(seen(restarted(at.node)), at.restarts - 1)
    if OLD.uid not in is_asked | kubelet.unprepared:
        found["the old claim is unprepared"] = _seen(lambda n: asked(n, OLD, prepares=False))
    if NEW.uid not in is_asked | kubelet.prepared:
        found["the new claim is prepared"] = _seen(lambda n: asked(n, NEW, prepares=True))
    for name, happening in STEPS.items():
        if happening.enabled(at.node):
            found[name] = _seen(happening.happens)
    return found


def _seen(step: Callable[[Node], Node]) -> Callable[[At], At]:
    return lambda at: At(seen(step(at.node)), at.restarts)


def _is_end(at: At) -> bool:
    """Nothing can happen any more: what must hold then."""
    if _steps(at):
        return False
    o, entries = at.node.outside, at.node.state.gpus.claims.entries
    assert o.kubelet.prepared == {NEW.uid}
    assert entries[NEW.uid].state is ClaimState.PREPARED
    assert OLD.uid not in entries or entries[OLD.uid].state is ClaimState.TOMBSTONE
    assert {uid for uid, _ in o.files} == {NEW.uid}
    assert o.disk is not None
    assert [e.name for e in o.disk.entries] == [NEW]
    assert all(f.vfio_bound for f in o.functions)
    check_settled(at.node, set())
    return True


WORLDS = {
    "on its host driver": World((ON_HOST,), BEGINS),
    "pre-bound": World((PRE_BOUND,), BEGINS),
    "with an audio function": World((ON_HOST, AUDIO), BEGINS),
}

COUNTS = {
    ("on its host driver", 0): 42,
    ("on its host driver", 1): 9_814,
    ("on its host driver", 2): 1_207_384,
    ("pre-bound", 0): 15,
    ("pre-bound", 1): 1_130,
    ("pre-bound", 2): 58_578,
    ("with an audio function", 0): 42,
    ("with an audio function", 1): 9_814,
}
"""The interleavings of each world, by the number of restarts in them."""


@pytest.mark.parametrize(("world", "restarts"), COUNTS)
def test_after_every_interleaving_the_new_claim_has_the_gpu_and_nothing_is_left_of_the_old_one(
    world: str, restarts: int
) -> None:
    count = every_interleaving(WORLDS[world], restarts)
    print(f"{world}, {restarts} restarts: {count.orders} interleavings, {count.nodes} different nodes")
    assert count.orders == COUNTS[world, restarts]
