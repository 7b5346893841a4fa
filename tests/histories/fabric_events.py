"""Events of the partitions of an NVLink fabric: its manager restarts, a command fails, hangs or lies, another program
has one.

Only on a node that activates partitions (`World.fabric`). Beside these and `BESIDE` nothing is drawn there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tests.histories.claim_events import CLAIM_POD, FIRST_OF_CLAIMS
from tests.histories.fabric import PAIRS, Fabric
from tests.histories.kinds import Kind, KindsOn, detail_of
from tests.histories.kubelet_events import FOR_TWO, PODS_MAX
from tests.histories.world import World

_OF_DAEMONS: Final = (
    "the daemon is told to stop",
    "a daemon starts",
    "a successor starts",
    "a daemon crashes",
    "kubelet stops",
    "kubelet starts",
    "the node reboots",
)

BESIDE: Final = (
    *_OF_DAEMONS,
    "bind to vfio-pci",
    "unbind slowly",
    "an external process opens a card",
    "an external process is killed",
    "a pod comes",
    FOR_TWO,
    "a pod ends",
    "a pod is force-deleted and dies late",
    "a virtual machine ends by itself",
    "the clock jumps",
)
"""The kinds that are drawn beside those of partitions. No card goes: a list with a partition that has it shows nothing
of that."""

BESIDE_WITH_CLAIMS: Final = (
    *_OF_DAEMONS,
    FIRST_OF_CLAIMS,
    "a pod with a claim ends",
    "a pod with a claim is force-deleted, has a successor and dies late",
    "a claim is deleted at the API server",
    "the checkpoint is lost",
)
"""The same where the daemons serve claims: any two cards would be no partition."""

_kind: Final[KindsOn[Fabric]] = KindsOn(lambda world: world.fabric)


def _key(fabric: Fabric, slot: int) -> str:
    """The partition that a step is about."""
    return list(fabric.partitions)[detail_of(slot) % len(fabric.partitions)]


def _moment(slot: int) -> str:
    return ("before", "after")[slot % 2]


def _fails(_world: World, fabric: Fabric, slot: int) -> None:
    fabric.failing = _moment(slot)


def _hangs(_world: World, fabric: Fabric, slot: int) -> None:
    fabric.hanging = _moment(slot)


def _query_hangs(_world: World, fabric: Fabric, _slot: int) -> None:
    fabric.query_hangs = True


def _wrong(_world: World, fabric: Fabric, slot: int) -> None:
    fabric.wrong_about = _key(fabric, slot)


def _pretends(_world: World, fabric: Fabric, _slot: int) -> None:
    fabric.pretends = True


def _full(*, is_full: bool) -> Callable[[World, Fabric, int], None]:
    def act(_world: World, fabric: Fabric, _slot: int) -> None:
        fabric.intents.is_full = is_full

    return act


def _is_unknown(world: World, fabric: Fabric, slot: int) -> bool:
    """The partition is free, and no daemon has begun to look at one that has its cards: it could not tell whose an
    activation after its last look is (ADR 0025)."""
    key = _key(fabric, slot)
    records = (
        record.devices
        for daemon in world.daemons
        if daemon.handle is not None and (known := daemon.handle.state.value.partitions) is not None
        for record in known.records.values()
    )
    return fabric.is_free(key) and all(fabric.partitions[key].isdisjoint(map(str, d)) for d in records)


def _free_pair(world: World, fabric: Fabric, slot: int) -> list[str]:
    """The cards of a partition of two that the scheduler may give to a claim; none if it may not."""
    node, cards = world.claims, sorted(fabric.partitions[PAIRS[slot % len(PAIRS)]])
    if node is None or world.pods >= PODS_MAX or any(card not in node.home for card in cards):
        return []
    return [] if node.allocated().intersection(cards) else cards


def _pair_comes(world: World, fabric: Fabric, slot: int) -> None:
    node = world.claims
    assert node is not None
    cards = _free_pair(world, fabric, slot)
    world.pods += 1
    name = f"{CLAIM_POD}{world.pods}"
    node.allocate(name, cards)
    world.kubelet.submit(name, {}, uses=(name,))


RESTARTS: Final = "the fabric manager restarts"
FAILS: Final = "the next partition command fails"
HANGS: Final = "the next act on a partition hangs"
QUERY_HANGS: Final = "the next query of partitions hangs"
GO_ON: Final = "partition commands that hang go on"
WRONG: Final = "the next query is wrong about a partition"
PRETENDS: Final = "the next act on a partition changes nothing"
ACTIVATES: Final = "another program activates a partition"
DEACTIVATES: Final = "another program deactivates a partition"
FULL: Final = "the intents cannot be written"
WRITABLE: Final = "the intents can be written again"

FABRIC_KINDS: Final[tuple[Kind, ...]] = (
    _kind(RESTARTS, lambda _w, fabric, _s: fabric.restart()),
    _kind(FAILS, _fails),
    _kind(HANGS, _hangs),
    _kind(QUERY_HANGS, _query_hangs),
    _kind(GO_ON, lambda _w, fabric, _s: fabric.go_on(), lambda _w, fabric, _s: fabric.is_hanging),
    _kind(WRONG, _wrong, lambda _w, fabric, _s: fabric.can_be_wrong),
    _kind(PRETENDS, _pretends, lambda _w, fabric, _s: fabric.can_be_wrong),
    _kind(ACTIVATES, lambda _w, fabric, s: fabric.activate(_key(fabric, s)), _is_unknown),
    _kind(
        DEACTIVATES,
        lambda _w, fabric, s: fabric.deactivate(_key(fabric, s)),
        lambda _w, fabric, s: _key(fabric, s) in fabric.active,
    ),
    _kind(FULL, _full(is_full=True), lambda _w, fabric, _s: not fabric.intents.is_full),
    _kind(WRITABLE, _full(is_full=False), lambda _w, fabric, _s: fabric.intents.is_full),
)
"""Every kind of event of partitions."""

PAIR_CLAIMED: Final = _kind(
    "a pod with a claim for a partition of two comes",
    _pair_comes,
    lambda w, fabric, s: bool(_free_pair(w, fabric, s)),
)
"""Only where the daemons serve claims."""

LATE: Final = (RESTARTS, FAILS, HANGS, QUERY_HANGS, WRONG, PRETENDS, DEACTIVATES, FULL)
"""After these a partition may not be active in time."""
