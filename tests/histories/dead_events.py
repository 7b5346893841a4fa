"""Events of cards that die, in each way that the simulated host has, and of the one repair: the kernel enumerates them
again.

Only on a node whose cards can die (`World.deaths`). Beside these and `BESIDE` nothing is drawn there. What a daemon
must know of it, and whether it keeps to that, is in `dead.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tests.histories.claim_events import FIRST_OF_CLAIMS
from tests.histories.dead import Deaths
from tests.histories.kinds import Kind, KindsOn, card_of, detail_of
from tests.histories.move_events import can_be_pulled
from tests.histories.world import SECOND, World

_OF_ANY: Final = (
    "the next uevents are lost",
    "the next uevents are late",
    "late uevents come",
    "inspections and scans take long",
    "inspections fail",
    "polls take long",
    "an external process opens a card",
    "an external process is killed",
    "a pod comes",
    "a pod ends",
    "a pod is force-deleted and dies late",
    "a virtual machine ends by itself",
    "kubelet stops",
    "kubelet starts",
    "the daemon is told to stop",
    "a daemon starts",
    "a successor starts",
    "a daemon crashes",
    "the clock jumps",
    "the node reboots",
)

BESIDE: Final = (
    *_OF_ANY,
    "bind to vfio-pci",
    "unbind slowly",
    "unplug",
    "plug a companion",
    "unplug the companion",
    "plug a second card into the group",
    "the uevent socket overflows",
    "an inspection hangs",
    "scans fail",
    "the predecessor is told to stop",
)
"""The kinds that are drawn beside those of cards that die."""

BESIDE_WITH_CLAIMS: Final = (
    *_OF_ANY,
    FIRST_OF_CLAIMS,
    "a pod with a claim ends",
    "a pod with a claim is force-deleted, has a successor and dies late",
    "a claim is deleted at the API server",
    "a pod and a claim race for a card",
    "the checkpoint is lost",
    "a write to sysfs hangs",
    "writes that hang go on",
)
"""The same where the daemons serve claims as well."""

_kind: Final[KindsOn[Deaths]] = KindsOn(lambda world: world.deaths)


def _functions(world: World, slot: int) -> list[str]:
    """Those of the card's place that something can happen to: the card, a companion, a second card."""
    functions = (function for function in (0, 1, SECOND) if world.is_plugged(slot, function))
    return [world.address(slot, function) for function in functions]


def _one(world: World, slot: int) -> str:
    functions = _functions(world, slot)
    return functions[detail_of(slot) % len(functions)]


def _can_die(world: World, _deaths: Deaths, slot: int) -> bool:
    return bool(_functions(world, slot))


def _counts(world: World, deaths: Deaths, slot: int) -> None:
    world.tell(deaths.count(_one(world, slot)))


def _port_counts(world: World, deaths: Deaths, slot: int) -> None:
    states = [(d.name, d.handle.state.value) for d in world.daemons if d.handle is not None]
    world.tell(deaths.count_at_port(_one(world, slot), states))


def _falls_silent(world: World, deaths: Deaths, slot: int) -> None:
    """Every other time the kernel has cut off its link, and says so."""
    address = _one(world, slot)
    deaths.fall_silent(address)
    if _is_told(slot):
        world.tell([world.tree.recovery_begins(address)])


def _is_told(slot: int) -> bool:
    return detail_of(slot) % 4 >= 2


def _silent(world: World, deaths: Deaths, slot: int) -> list[str]:
    return [a for a in _functions(world, slot) if deaths.is_silent(a)]


def _answers(world: World, deaths: Deaths, slot: int) -> None:
    for address in _silent(world, deaths, slot):
        world.tree.answer_again(address)
        if _is_told(slot):
            world.tell([world.tree.recovery_succeeds(address)])


def _can_come_again(world: World, deaths: Deaths, slot: int) -> bool:
    """It may be dead, and no process has it: on a node with claims a virtual machine lets go of it."""
    if not world.is_plugged(slot) or not deaths.may_be_dead(world.address(slot)):
        return False
    if world.claims is not None:
        return can_be_pulled(world, world.claims, slot)
    return world.can_be_enumerated(slot) and card_of(slot) not in world.changing


def _act(enumerates: Callable[[World, int], None]) -> Callable[[World, Deaths, int], None]:
    return lambda world, _deaths, slot: enumerates(world, slot)


COUNTS: Final = "a card counts a fatal error"
PORT_COUNTS: Final = "only the port above counts the fatal error of a card"
SILENT: Final = "a card falls silent"
ANSWERS: Final = "a silent card answers again"
COMES_AGAIN: Final = "a dead card is unplugged and plugged again"

DIES: Final = (COUNTS, PORT_COUNTS, SILENT)

DEAD_KINDS: Final[tuple[Kind, ...]] = (
    _kind(COUNTS, _counts, _can_die),
    _kind(PORT_COUNTS, _port_counts, _can_die),
    _kind(SILENT, _falls_silent, _can_die),
    _kind(ANSWERS, _answers, lambda w, d, s: bool(_silent(w, d, s))),
    _kind(COMES_AGAIN, _act(World.enumerate_again), _can_come_again),
)
"""Every kind of event of cards that die."""
