"""Events of sets of devices: the operator draws others, and the file cannot be read for a while.

Only on a node with sets (`World.sets`). Beside these and `BESIDE` nothing is drawn there. What a daemon knows of the
file, and whether it keeps to that, is in `sets.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tests.histories.kinds import Kind, KindsOn, detail_of
from tests.histories.kubelet_events import FOR_TWO
from tests.histories.sets import LAYOUTS, Sets
from tests.histories.world import World

BESIDE: Final = (
    "bind to vfio-pci",
    "bind slowly",
    "unbind",
    "unbind slowly",
    "unplug",
    "plug a card without driver",
    "the next uevents are lost",
    "the next uevents are late",
    "late uevents come",
    "inspections and scans take long",
    "inspections fail",
    "scans fail",
    "polls take long",
    "polls can read nothing",
    "an external process opens a card",
    "an external process is killed",
    "a pod comes",
    FOR_TWO,
    "pods come in a burst",
    "a pod ends",
    "a pod ends slowly",
    "a pod is force-deleted",
    "a pod is force-deleted and dies late",
    "a virtual machine ends by itself",
    "kubelet stops",
    "kubelet starts",
    "the daemon is told to stop",
    "a daemon starts",
    "a successor starts",
    "the predecessor is told to stop",
    "a daemon crashes",
    "reads of the ledger take long",
    "a stream is lost",
    "the clock jumps",
    "the node reboots",
    "the configuration file chooses other cards",
    "the configuration file gives models other names",
)
"""The kinds that are drawn beside those of sets."""

_kind: Final[KindsOn[Sets]] = KindsOn(lambda world: world.sets)


def _draws(_world: World, sets: Sets, slot: int) -> None:
    sets.layout = detail_of(slot) % len(LAYOUTS)


def _readable(*, is_readable: bool) -> Callable[[World, Sets, int], None]:
    def act(_world: World, sets: Sets, _slot: int) -> None:
        sets.is_unreadable = not is_readable

    return act


DRAWS: Final = "the operator draws other sets"
UNREADABLE: Final = "the file of sets cannot be read"
READABLE: Final = "the file of sets can be read again"

SET_KINDS: Final[tuple[Kind, ...]] = (
    _kind(
        DRAWS,
        _draws,
        lambda _w, sets, slot: detail_of(slot) % len(LAYOUTS) != sets.layout,
    ),
    _kind(
        UNREADABLE,
        _readable(is_readable=False),
        lambda _w, sets, _s: not sets.is_unreadable,
    ),
    _kind(
        READABLE,
        _readable(is_readable=True),
        lambda _w, sets, _s: sets.is_unreadable,
    ),
)
"""Every kind of event of sets."""
