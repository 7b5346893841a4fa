"""Events of the EGMs of a node of Grace superchips: they come, go and are renumbered, and their lists grow.

Only on a node with EGMs (`World.egms`). Beside these and `BESIDE` nothing is drawn there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from gpuactors_simulation.host.uevents import Uevent
from tests.histories.egm import PLACES, Egms
from tests.histories.kinds import Flag, Kind, KindsOn, detail_of
from tests.histories.kubelet_events import FOR_TWO
from tests.histories.world import World

BESIDE: Final = (
    "bind to vfio-pci",
    "unbind",
    "the next uevents are lost",
    "the next uevents are late",
    "late uevents come",
    "inspections and scans take long",
    "an external process opens a card",
    "a pod comes",
    FOR_TWO,
    "pods come in a burst",
    "a pod ends",
    "a pod is force-deleted and dies late",
    "kubelet stops",
    "kubelet starts",
    "the daemon is told to stop",
    "a daemon starts",
    "a successor starts",
    "the predecessor is told to stop",
    "a daemon crashes",
    "the node reboots",
)
"""The kinds that are drawn beside those of EGMs."""

_kind: Final[KindsOn[Egms]] = KindsOn(lambda world: world.egms)

ADDED: Final = "the EGM of a superchip is added"
REMOVED: Final = "the EGM of a superchip is removed"
RENUMBERED: Final = "the EGM of a superchip comes back by another name"
GROWS: Final = "the kernel lists the last GPU of an EGM"
SHRINKS: Final = "the kernel lists the last GPU of an EGM no more"
NODE_GOES: Final = "the device node of an EGM goes"
NODE_COMES: Final = "the device node of an EGM comes"
UNREADABLE: Final = "the EGMs cannot be read"
READABLE: Final = "the EGMs can be read again"


def _chip(slot: int) -> int:
    return detail_of(slot) % len(PLACES)


def _tell(world: World, action: str, name: str) -> None:
    path = f"/devices/virtual/egm/{name}"
    world.tell([Uevent(action, path, "egm", (("DEVNAME", f"/dev/{name}"), ("SEQNUM", "1")))])


def _adds(world: World, egms: Egms, slot: int) -> None:
    _tell(world, "add", egms.add(_chip(slot)))


def _removes(world: World, egms: Egms, slot: int) -> None:
    _tell(world, "remove", egms.remove(_chip(slot)))


def _renumbers(world: World, egms: Egms, slot: int) -> None:
    _removes(world, egms, slot)
    _adds(world, egms, slot)


def _lists(*, last: bool) -> Callable[[World, Egms, int], None]:
    """No uevent tells of it."""

    def act(_world: World, egms: Egms, slot: int) -> None:
        egms.lacks_last[_chip(slot)] = not last
        egms.changed()

    return act


def _node(*, there: bool) -> Callable[[World, Egms, int], None]:
    def act(_world: World, egms: Egms, slot: int) -> None:
        egms.has_node[_chip(slot)] = there
        egms.changed()

    return act


def _readable(*, is_readable: bool) -> Callable[[World, Egms, int], None]:
    def act(_world: World, egms: Egms, _slot: int) -> None:
        egms.is_unreadable = not is_readable

    return act


def _is_there(_world: World, egms: Egms, slot: int) -> bool:
    return egms.names[_chip(slot)] is not None


_WORKS: Final = {Flag.EGMS_ARE_UNREADABLE: False}
_FAILS: Final = {Flag.EGMS_ARE_UNREADABLE: True}

EGM_KINDS: Final[tuple[Kind, ...]] = (
    _kind(ADDED, _adds, lambda w, e, s: not _is_there(w, e, s)),
    _kind(REMOVED, _removes, _is_there),
    _kind(RENUMBERED, _renumbers, _is_there),
    _kind(GROWS, _lists(last=True), lambda _w, e, s: e.lacks_last[_chip(s)]),
    _kind(SHRINKS, _lists(last=False), lambda _w, e, s: not e.lacks_last[_chip(s)]),
    _kind(NODE_GOES, _node(there=False), lambda _w, e, s: e.has_node[_chip(s)]),
    _kind(NODE_COMES, _node(there=True), lambda _w, e, s: not e.has_node[_chip(s)]),
    _kind(
        UNREADABLE,
        _readable(is_readable=False),
        lambda _w, e, _s: not e.is_unreadable,
        needs=_WORKS,
        leaves=_FAILS,
    ),
    _kind(
        READABLE, _readable(is_readable=True), lambda _w, e, _s: e.is_unreadable, needs=_FAILS, leaves=_WORKS
    ),
)
"""Every kind of event of EGMs."""
