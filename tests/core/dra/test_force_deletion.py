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

from gpuactors.core.dra.table import ClaimState
from tests.core.builders import audio, gpu
from tests.core.dra.small_world import (
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
from tests.core.small_world import WrongError

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

Step = Callable[[Node], Node]


@dataclass(slots=True)
class Count:
    """What was covered."""

    interleavings: int = 0
    nodes: int = 0
    """Different nodes, of which each was checked."""


def every_interleaving(world: World, restarts: int) -> Count:
    """Follows every order of the steps with that many restarts to its end, and checks what is there then. What must
    hold after each step the step checks itself (`small_world.check_always`). Two orders that lead to the same node go
    on in the same way, so a node is followed once, and counted for each of them."""
    met: dict[object, int] = {}
    interleavings = _follow(start(world), (), restarts, met)
    return Count(interleavings, len(met))


def _follow(node: Node, path: tuple[str, ...], restarts: int, met: dict[object, int]) -> int:
    key = canonical(node), restarts
    if (known := met.get(key)) is not None:
        return known
    steps, found = _steps(node), 0
    if restarts:
        found += _follow(seen(restarted(node)), (*path, "restart"), restarts - 1, met)
    elif not steps:
        _check(node, path)
        found += 1
    for name, step in steps.items():
        try:
            after = seen(step(node))
        except WrongError as error:
            raise WrongError(f"{error}; after: {'; '.join((*path, name))}") from error
        found += _follow(after, (*path, name), restarts, met)
    met[key] = found
    return found


def _steps(node: Node) -> dict[str, Step]:
    """What can come next: each call once, and again after a restart that it got no answer from."""
    o, found = node.outside, dict[str, Step]()
    is_asked = {uid for uid, _ in o.calls.values()}
    if OLD.uid not in is_asked | o.unprepared:
        found["the old claim is unprepared"] = lambda n: asked(n, OLD, prepares=False)
    if NEW.uid not in is_asked | o.prepared:
        found["the new claim is prepared"] = lambda n: asked(n, NEW, prepares=True)
    for name, happening in STEPS.items():
        if happening.enabled(node):
            found[name] = happening.happens
    return found


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
    ("with an audio function", 2): 1_207_384,
}
"""The interleavings of each world, by the number of restarts in them."""


@pytest.mark.parametrize(("world", "restarts"), COUNTS)
def test_after_every_interleaving_the_new_claim_has_the_gpu_and_nothing_is_left_of_the_old_one(
    world: str, restarts: int
) -> None:
    count = every_interleaving(WORLDS[world], restarts)
    print(f"{world}, {restarts} restarts: {count.interleavings} interleavings, {count.nodes} different nodes")
    assert count.interleavings == COUNTS[world, restarts]


def _check(node: Node, path: tuple[str, ...]) -> None:
    o, entries = node.outside, node.state.claims.entries
    where = "; ".join(path)
    assert o.prepared == {NEW.uid}, where
    assert entries[NEW.uid].state is ClaimState.PREPARED, where
    assert OLD.uid not in entries or entries[OLD.uid].state is ClaimState.TOMBSTONE, where
    assert o.files == {NEW.uid}, where
    assert o.disk is not None, where
    assert [e.name for e in o.disk.entries] == [NEW], where
    assert all(f.vfio_bound for f in o.functions), where
    check_settled(node, set())
