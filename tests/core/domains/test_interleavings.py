"""Every interleaving of NVIDIA issue 641: the old claim's unprepare, the new claim's prepare, the daemon's prepare, the
patches of the label, conflicts of these, and restarts of the daemon, at any moment between the steps of what is under
way: a claim, a domain or the label is read, the checkpoint is written, files are done. Enumerated, not sampled.

What must hold after each step the step checks itself (`small_world.check_always`). Time passes only when nothing else
can happen. Kubelet repeats what failed with the daemon.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable

import pytest
from msgspec import Struct
from msgspec.structs import replace

from gpuactors.core.step import next_deadline
from tests.core import orders
from tests.core.domains import small_world
from tests.core.domains.domain_core import DAEMON, RED, channel, daemon, name
from tests.core.domains.small_world import (
    ANSWERS,
    Node,
    all_answered,
    asked,
    conflicted,
    patched_there,
    restarted,
    start,
    with_,
    world_of,
)
from tests.core.orders import WrongError

OLD, NEW = name("old"), name("new")
CHANNELS = frozenset({OLD.uid, NEW.uid})
WORLD = world_of(channel(OLD), channel(NEW), daemon(DAEMON))


class At(Struct, frozen=True):
    """A node, and how often the daemon may still restart and a patch meet another label."""

    node: Node
    restarts: int
    conflicts: int


Step = Callable[[At], At]


def begin(*, with_daemon: bool) -> Node:
    """OLD has the channel; the daemon's claim is prepared, or is to be prepared again."""
    node = settled(asked(settled(start(WORLD)), DAEMON, prepares=True))
    node = settled(asked(node, OLD, prepares=True))
    assert node.outside.kubelet.prepared == {OLD.uid, DAEMON.uid}
    if not with_daemon:
        node = settled(asked(node, DAEMON, prepares=False))
        while DAEMON.uid in node.entries:
            node = settled(passed(node))
    assert node.outside.held == {RED}
    return with_(node, kubelet=replace(node.outside.kubelet, unprepared=frozenset()))


def passed(node: Node) -> Node:
    """Time passes until something is due."""
    return small_world.passed(node, max(0.0, next_deadline(node.state) - node.at))


def settled(node: Node) -> Node:
    """The node when nothing is under way any more, and 20 s later."""
    until = node.at + 20.0
    node = all_answered(node)
    while next_deadline(node.state) <= until:
        node = all_answered(passed(node))
    return node


# --- the steps --------------------------------------------------------------------------------------------------


def steps(at: At) -> dict[str, Step]:
    """What can come next."""
    found = {**_kubelet_s(at.node), **_under_way(at.node)}
    if not found and at.node.outside.kubelet.calls:
        return {"time passes": _same(passed)}
    lingers_s = at.node.state.domains.label.lingers_until - at.node.at
    if 0.0 < lingers_s < math.inf:
        found["the label's time is over"] = _same(lambda n: small_world.passed(n, lingers_s))
    is_patched = at.node.wanted.label_patch is not None
    if at.restarts:
        found["restart"] = lambda a: At(restarted(a.node), a.restarts - 1, a.conflicts)
    if at.restarts and is_patched:
        found["restart after the patch"] = lambda a: At(
            restarted(patched_there(a.node)), a.restarts - 1, a.conflicts
        )
    if at.conflicts and is_patched:
        found["conflict"] = lambda a: At(conflicted(a.node), a.restarts, a.conflicts - 1)
    return found


def _same(happens: Callable[[Node], Node]) -> Step:
    return lambda at: replace(at, node=happens(at.node))


def _under_way(node: Node) -> dict[str, Step]:
    """What can happen without kubelet."""
    return {answer.name: _same(answer.happens) for answer in ANSWERS if answer.enabled(node)}


def _kubelet_s(node: Node) -> dict[str, Step]:
    """Each call once, and again after a restart that it got no answer from."""
    kubelet, found = node.outside.kubelet, dict[str, Step]()
    is_asked = {call.uid for call in kubelet.calls.values()}
    if OLD.uid not in is_asked | kubelet.unprepared:
        found["the old claim is unprepared"] = _same(lambda n: asked(n, OLD, prepares=False))
    if NEW.uid not in is_asked | kubelet.prepared and not kubelet.refused:
        found["the new claim is prepared"] = _same(lambda n: asked(n, NEW, prepares=True))
    if DAEMON.uid not in is_asked | kubelet.prepared:
        found["the daemon is prepared"] = _same(lambda n: asked(n, DAEMON, prepares=True))
    return found


def is_end(at: At) -> bool:
    """Nothing can happen any more but restarts: the new claim has the channel, or was refused with the old one's
    name."""
    node, o = at.node, at.node.outside
    if _kubelet_s(node) or _under_way(node) or o.kubelet.calls:
        return False
    refused = o.kubelet.refused.get(NEW.uid, "")
    if NEW.uid not in o.kubelet.prepared and str(OLD) not in refused:
        raise WrongError(f"the new claim is neither prepared nor refused for the old one: {refused!r}")
    if OLD.uid in o.files or OLD.uid not in o.kubelet.unprepared or o.label != RED:
        raise WrongError(f"something of the old claim is left, or the label is not there: {o}")
    last = settled(asked(node, NEW, prepares=False))
    if last.outside.label is not None or last.outside.files & CHANNELS:
        raise WrongError(f"after the last claim the label is {last.outside.label}")
    return True


def canonical(at: At) -> object:
    refused = bool(at.node.outside.kubelet.refused)
    return small_world.canonical(at.node), refused, at.restarts, at.conflicts


# --- all of them ------------------------------------------------------------------------------------------------


COUNTS = {
    (True, 0, 0): 83,
    (True, 1, 1): 582_013,
    (False, 0, 0): 167_749,
}
"""The interleavings, by whether the daemon is prepared at the begin, the number of restarts, and that of conflicts."""

ALL = {(True, 2, 0): 313_001_194, (False, 0, 3): 10_536_032}
"""With `DOMAIN_INTERLEAVINGS=all`, as in `just small-worlds`, as well: 25 s."""

MORE = {(False, 1, 1): 45_400_273_451}
"""With `DOMAIN_INTERLEAVINGS=more` as well: minutes."""

match os.environ.get("DOMAIN_INTERLEAVINGS"):
    case "all":
        COUNTS |= ALL
    case "more":
        COUNTS |= ALL | MORE


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("with_daemon", "restarts", "conflicts"), COUNTS)
def test_after_every_interleaving_the_new_claim_has_the_channel_and_the_label_was_never_gone(
    with_daemon: bool, restarts: int, conflicts: int
) -> None:
    first = At(begin(with_daemon=with_daemon), restarts, conflicts)
    count = orders.every_interleaving(first, steps, is_end, canonical)
    print(
        f"{restarts} restarts, {conflicts} conflicts: {count.orders} interleavings, {count.nodes} different nodes"
    )
    assert count.orders == COUNTS[with_daemon, restarts, conflicts]
