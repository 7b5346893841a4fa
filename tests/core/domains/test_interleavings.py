"""Every interleaving of NVIDIA issue 641: the old claim's unprepare, the new claim's prepare, the daemon's prepare, the
patches of the label, conflicts of these, and restarts of the daemon, at any moment between the steps of what is under
way: a claim, a domain or the label is read, the checkpoint is written, files are done. Enumerated, not sampled.

What must hold after each step the step checks itself (`small_world.check_always`). Time passes only when nothing else
can happen. Kubelet repeats what failed with the daemon.
"""

from __future__ import annotations

import math
import os

import pytest
from msgspec.structs import replace

from gpuactors.core.domains.label import LABEL_LINGERS_S
from gpuactors.core.step import next_deadline
from tests.core import orders
from tests.core.claims.small_world import At, calls_once, within
from tests.core.domains import small_world
from tests.core.domains.domain_core import DAEMON, RED, channel, daemon, name
from tests.core.domains.small_world import (
    ANSWERS,
    Node,
    all_done,
    conflicted,
    patched_there,
    restarted,
    start,
    world_of,
)
from tests.core.orders import Happening, WrongError

OLD, NEW = name("old"), name("new")
CHANNELS = frozenset({OLD.uid, NEW.uid})
WORLD = world_of(channel(OLD), channel(NEW), daemon(DAEMON))


def begin(*, with_daemon: bool) -> Node:
    """OLD has the channel; the daemon's claim is prepared, or is to be prepared again."""
    node = settled(settled(start(WORLD)).asked(DAEMON, prepares=True))
    node = settled(node.asked(OLD, prepares=True))
    assert node.outside.kubelet.prepared == {OLD.uid, DAEMON.uid}
    if not with_daemon:
        node = settled(node.asked(DAEMON, prepares=False))
        while DAEMON.uid in node.entries:
            node = settled(passed(node))
    assert node.outside.held == {RED}
    return node.with_(kubelet=replace(node.outside.kubelet, unprepared=frozenset()))


def passed(node: Node) -> Node:
    """Time passes until something is due."""
    return small_world.passed(node, max(0.0, next_deadline(node.state) - node.at))


def settled(node: Node, after_s: float = 20.0) -> Node:
    """The node when nothing is under way any more, and `after_s` later."""
    until = node.at + after_s
    node = all_done(node)
    while next_deadline(node.state) <= until:
        node = all_done(passed(node))
    return node


# --- the steps --------------------------------------------------------------------------------------------------


STEPS: tuple[Happening[Node], ...] = (*calls_once(OLD, NEW, DAEMON), *ANSWERS)
"""What comes without a disturbance, while time stands still."""


def _is_patched(at: At[Node]) -> bool:
    return at.node.wanted.label_patch is not None


def _has_step(at: At[Node]) -> bool:
    return any(step.enabled(at.node) for step in STEPS)


def _only_waits(at: At[Node]) -> bool:
    return bool(at.node.outside.kubelet.calls) and not _has_step(at)


def _lingers_s(node: Node) -> float:
    return node.state.domains.label.lingers_until - node.at


COMING: tuple[Happening[At[Node]], ...] = (
    *(within(step) for step in STEPS),
    Happening("time passes", _only_waits, lambda at: replace(at, node=passed(at.node))),
    Happening(
        "the label's time is over",
        lambda at: 0.0 < _lingers_s(at.node) < math.inf and not at.node.outside.kubelet.calls,
        lambda at: replace(at, node=small_world.passed(at.node, _lingers_s(at.node))),
    ),
    Happening(
        "restart",
        lambda at: at.restarts > 0 and not _only_waits(at),
        lambda at: replace(at, node=restarted(at.node), restarts=at.restarts - 1),
    ),
    Happening(
        "restart after the patch",
        lambda at: at.restarts > 0 and _is_patched(at),
        lambda at: replace(at, node=restarted(patched_there(at.node)), restarts=at.restarts - 1),
    ),
    Happening(
        "conflict",
        lambda at: at.conflicts > 0 and _is_patched(at),
        lambda at: replace(at, node=conflicted(at.node), conflicts=at.conflicts - 1),
    ),
)


def is_end(at: At[Node]) -> bool:
    """Nothing can happen any more but restarts: the new claim has the channel, or was refused with the old one's
    name."""
    node, o = at.node, at.node.outside
    if _has_step(at) or o.kubelet.calls:
        return False
    refused = o.kubelet.refused.get(NEW.uid, "")
    if NEW.uid not in o.kubelet.prepared and str(OLD) not in refused:
        raise WrongError(f"the new claim is neither prepared nor refused for the old one: {refused!r}")
    if OLD.uid in o.files or OLD.uid not in o.kubelet.unprepared or o.label != RED:
        raise WrongError(f"something of the old claim is left, or the label is not there: {o}")
    last = settled(node.asked(NEW, prepares=False), LABEL_LINGERS_S + 20.0)
    if last.outside.label is not None or last.outside.files.keys() & CHANNELS:
        raise WrongError(f"after the last claim the label is {last.outside.label}")
    return True


def canonical(at: At[Node]) -> object:
    refused = bool(at.node.outside.kubelet.refused)
    return small_world.canonical(at.node), refused, at.restarts, at.conflicts


# --- all of them ------------------------------------------------------------------------------------------------


COUNTS = {
    (True, 0, 0): 133,
    (True, 1, 1): 3_018_369,
    (False, 0, 0): 76_743,
}
"""The interleavings, by whether the daemon is prepared at the begin, the number of restarts, and that of conflicts."""

ALL = {(True, 2, 0): 1_493_015_826, (False, 0, 3): 12_932_735}
"""With `DOMAIN_INTERLEAVINGS=all`, as in `just small-worlds`, as well: a minute."""

if os.environ.get("DOMAIN_INTERLEAVINGS") == "all":
    COUNTS |= ALL


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("with_daemon", "restarts", "conflicts"), COUNTS)
def test_after_every_interleaving_the_new_claim_has_the_channel_and_the_label_was_never_gone(
    with_daemon: bool, restarts: int, conflicts: int
) -> None:
    first = At(begin(with_daemon=with_daemon), restarts, conflicts)
    count = orders.every_interleaving(first, COMING, is_end, canonical)
    print(
        f"{restarts} restarts, {conflicts} conflicts: {count.orders} interleavings, {count.nodes} different nodes"
    )
    assert count.orders == COUNTS[with_daemon, restarts, conflicts]
