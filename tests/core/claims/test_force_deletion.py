"""Every interleaving of a forced deletion (kubernetes issue 141471, NVIDIA issue 641; seen on a real node: the new
claim's prepare 0.11 s after it, the old claim's unprepare seconds later).

The old claim is prepared and its pod was deleted by force. Its unprepare, the new claim's prepare and a restart of the
daemon come at any moment between the steps of the release and of the new prepare: the claim is read, the checkpoint is
written, files and devices are done, the one or the other first. Enumerated, not sampled. Kubelet repeats what failed
with the daemon.
"""

from __future__ import annotations

import pytest

from gpuactors.core.values.claim_states import ClaimState
from tests.core import orders
from tests.core.builders import audio, gpu
from tests.core.claims.small_world import At, calls_once, within
from tests.core.gpus.small_world import (
    CLAIMS,
    GPU,
    HAPPENINGS,
    Node,
    World,
    canonical,
    check_settled,
    restarted,
    seen,
    start,
)
from tests.core.orders import Count, Happening

OLD, NEW = CLAIMS
ON_HOST = gpu(GPU, 1, driver="nvidia")
PRE_BOUND = gpu(GPU, 1)
AUDIO = audio("0000:01:00.1", 1, driver="snd_hda_intel")

BEGINS = ("one is to be prepared", "all that is asked for is done", "one is deleted by force")

STEPS = (
    *calls_once(OLD, NEW),
    *(
        happening
        for happening in HAPPENINGS
        if happening.name
        in ("the claim is read", "the checkpoint is written", "the act is done", "the last act is done")
    ),
)


def every_interleaving(world: World, restarts: int) -> Count:
    """Follow every order of the steps with that many restarts to its end, and check what is there then. What must hold
    after each step the step checks itself (`small_world.check_always`)."""
    return orders.every_interleaving(
        At(start(world), restarts), COMING, _is_end, lambda at: (canonical(at.node), at.restarts)
    )


def _seen(step: Happening[Node]) -> Happening[Node]:
    """The node is seen after the step."""
    return Happening(step.name, step.enabled, lambda node: seen(step.happens(node)))


COMING = (
    Happening(
        "restart", lambda at: at.restarts > 0, lambda at: At(seen(restarted(at.node)), at.restarts - 1)
    ),
    *(within(_seen(step)) for step in STEPS),
)
"""What can come next."""


def _is_end(at: At[Node]) -> bool:
    """Nothing can happen any more: what must hold then."""
    if any(coming.enabled(at) for coming in COMING):
        return False
    o, entries = at.node.outside, at.node.entries
    assert o.kubelet.prepared == {NEW.uid}
    assert entries[NEW.uid].state is ClaimState.PREPARED
    assert OLD.uid not in entries or entries[OLD.uid].state is ClaimState.TOMBSTONE
    assert o.files.keys() == {NEW.uid}
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
