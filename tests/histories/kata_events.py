"""Events of the CDI directory of a node for Kata: it cannot be written, and an administrator or another program writes
in it.

Only on a node whose daemons answer by CDI names (`World.kata`). Beside these and `BESIDE` nothing is drawn there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tests.histories.kata import ANOTHERS, CDI_DIR, Kata, another_file
from tests.histories.kinds import Flag, Kind, KindsOn, card_of, detail_of
from tests.histories.kubelet_events import FOR_TWO
from tests.histories.world import MODEL, World

BESIDE: Final = (
    "bind to vfio-pci",
    "unbind",
    "unplug",
    "plug a second card into the group",
    "plug another model",
    "plug a never-seen model",
    "a card comes back in another group",
    "the next uevents are late",
    "late uevents come",
    "a pod comes",
    FOR_TWO,
    "a pod for another model comes",
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
    "reads of the ledger fail",
    "the clock jumps",
    "the node reboots",
    "the next daemon has another pci.ids",
)
"""The kinds that are drawn beside those of the CDI directory."""

_kind: Final[KindsOn[Kata]] = KindsOn(lambda world: world.kata)

FULL: Final = "the disk of the CDI directory is full"
STAYS: Final = "no CDI file of a device can be replaced or removed"
WRITABLE: Final = "the CDI directory can be written again"
SLOW: Final = "writes of CDI files take long"
REMOVES: Final = "an administrator removes the CDI file of a resource"
DAMAGES: Final = "an administrator damages the CDI file of a resource"
EMPTIES: Final = "an administrator removes the CDI files of all resources"
TAKES: Final = "a CDI file of another program has our names"
SPOILS: Final = "another program leaves a file that is no CDI file"
LEAVES: Final = "another program removes its CDI file"

UNWRITTEN: Final = (FULL, STAYS, SLOW)
"""After these a file may not be written in time."""


def _is_writable(kata: Kata) -> bool:
    return not (kata.disk.full or kata.disk.keeps)


def _path(kata: Kata, slot: int) -> str:
    """The path of one of the daemons' files."""
    ours = kata.ours()
    return f"{CDI_DIR}/{ours[detail_of(slot) % len(ours)]}"


def _fills(_world: World, kata: Kata, _slot: int) -> None:
    kata.disk.full = True


def _stays(_world: World, kata: Kata, _slot: int) -> None:
    kata.disk.keeps = CDI_DIR


def _removes(_world: World, kata: Kata, slot: int) -> None:
    kata.disk.lose(_path(kata, slot))
    kata.touch()


def _damages(world: World, kata: Kata, slot: int) -> None:
    """It is torn, is empty, is another one's, or leads to another card."""
    path = _path(kata, slot)
    content = kata.disk.files[path]
    group = world.group(card_of(slot))
    other = f"/dev/vfio/{group}".encode()
    kata.disk.put(
        path,
        (
            content[: len(content) // 2],
            b"",
            content.replace(f"/dev/vfio/{world.group(slot + 1)}".encode(), other),
            b'{"cdiVersion": "0.6.0", "kind": "vendor.example/other", "devices": []}',
        )[detail_of(slot) // 4 % 4],
    )
    kata.disk.put(f"{CDI_DIR}/.gpuactors-nvidia.com_H100.json.new", content[:10])
    kata.touch()


def _empties(_world: World, kata: Kata, _slot: int) -> None:
    kata.disk.lose_directory(CDI_DIR)
    kata.touch()


def _takes(world: World, kata: Kata, slot: int) -> None:
    """The kind of our resource, with the name of one card or of all."""
    slots = (slot,) if detail_of(slot) % 3 else range(3)
    resource = world.resource(MODEL)
    kata.disk.put(
        ANOTHERS, another_file([f"{resource}={world.address(s)}" for s in slots], world.group(slot))
    )
    kata.touch()


def _spoils(_world: World, kata: Kata, slot: int) -> None:
    kata.disk.put(ANOTHERS, (b"", b"kind: nvidia.com/H100\n", b'{"kind": 1}')[detail_of(slot) % 3])
    kata.touch()


def _leaves(_world: World, kata: Kata, _slot: int) -> None:
    kata.disk.lose(ANOTHERS)
    kata.touch()


def _has_ours(_world: World, kata: Kata, _slot: int) -> bool:
    return bool(kata.ours())


def _has_no_other(*, there: bool) -> Callable[[World, Kata, int], bool]:
    return lambda _w, kata, _s: (ANOTHERS in kata.disk.files) is there


def _slow(_world: World, kata: Kata, _slot: int) -> None:
    kata.slow_writes = 3


_FAILS: Final = {Flag.SPECS_ARE_UNWRITABLE: True}
_WORKS: Final = {Flag.SPECS_ARE_UNWRITABLE: False}
_OTHER: Final = {Flag.ANOTHER_HAS_A_SPEC: True}
_NO_OTHER: Final = {Flag.ANOTHER_HAS_A_SPEC: False}

KATA_KINDS: Final[tuple[Kind, ...]] = (
    _kind(FULL, _fills, lambda _w, kata, _s: _is_writable(kata), needs=_WORKS, leaves=_FAILS),
    _kind(STAYS, _stays, lambda _w, kata, _s: _is_writable(kata), needs=_WORKS, leaves=_FAILS),
    _kind(
        WRITABLE,
        lambda _w, kata, _s: kata.end_faults(),
        lambda _w, kata, _s: not _is_writable(kata),
        needs=_FAILS,
        leaves=_WORKS,
    ),
    _kind(SLOW, _slow, lambda _w, kata, _s: not kata.slow_writes),
    _kind(REMOVES, _removes, _has_ours),
    _kind(DAMAGES, _damages, _has_ours),
    _kind(EMPTIES, _empties, _has_ours),
    _kind(TAKES, _takes, _has_no_other(there=False), needs=_NO_OTHER, leaves=_OTHER),
    _kind(SPOILS, _spoils, _has_no_other(there=False), needs=_NO_OTHER, leaves=_OTHER),
    _kind(LEAVES, _leaves, _has_no_other(there=True), needs=_OTHER, leaves=_NO_OTHER),
)
"""Every kind of event of the CDI directory."""
