"""Histories of nodes of Grace superchips: who gets the nodes of the EGMs, and bugs that these histories find."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Final

import pytest
import trio

from gpuactors.actors.sets_reader import EGM_REREAD_S, EgmReads
from gpuactors.core.deviceplugin import calls
from gpuactors.core.kinds.sets import DeviceSet
from gpuactors.core.values.model import DeviceKey
from tests.histories.egm import EGM, WRONG
from tests.histories.egm_events import (
    ADDED,
    BESIDE,
    EGM_KINDS,
    GROWS,
    NODE_COMES,
    NODE_GOES,
    READABLE,
    REMOVED,
    RENUMBERED,
    SHRINKS,
    UNREADABLE,
)
from tests.histories.events import DRAWN, KINDS, Serves, serves
from tests.histories.kubelet_events import FOR_TWO
from tests.histories.play import play
from tests.histories.script import Step, parse_script
from tests.histories.world import World

PROC: Final = 1
"""The daemon reads processes."""

HISTORIES: Final = {
    "both GPUs of one, and the GPU of another": (f"{FOR_TWO}+3; a pod comes+3", ["/dev/egm0", "/dev/egm1"]),
    "one of two GPUs": ("pods come in a burst+3", ["/dev/egm1"]),
    "it is removed": (f"{REMOVED}; {FOR_TWO}+3", []),
    "it has another name": (f"{RENUMBERED}; {FOR_TWO}+3", ["/dev/egm2"]),
    "it is added again": (f"{REMOVED}+3; {ADDED}; {FOR_TWO}+3", ["/dev/egm2"]),
    "the kernel lists one of its GPUs only, and a pod gets both": (f"{SHRINKS}; {FOR_TWO}+3", ["/dev/egm0"]),
    "and then the other one": (f"{SHRINKS}+3; {GROWS}; {FOR_TWO}+3", ["/dev/egm0"]),
    "its device node is missing": (f"{NODE_GOES}; {FOR_TWO}+3", []),
    "its device node is there again": (f"{NODE_GOES}+3; {NODE_COMES}; {FOR_TWO}+3", ["/dev/egm0"]),
    "what was read last counts": (f"{UNREADABLE}; {REMOVED}; {FOR_TWO}+3", ["/dev/egm0"]),
    "until it can be read": (f"{UNREADABLE}; {REMOVED}; {READABLE}; {FOR_TWO}+3", []),
    "a daemon that has never read one": (
        f"{UNREADABLE}; a daemon crashes; a daemon starts+3; {FOR_TWO}+3",
        [],
    ),
}
"""By what happens: the script, and the nodes of EGMs that pods have then."""


def given(script: str) -> list[str]:
    """The nodes of EGMs that pods have at the last step."""
    seen: list[list[str]] = []

    def look(world: World, step: Step | None) -> None:
        if step is not None:
            nodes = [node for entry in world.kubelet.view.holdings.values() for node in entry.nodes]
            seen.append(sorted(node for node in nodes if node.startswith("/dev/egm")))

    played = play(parse_script(script), EGM | PROC, on_step=look)
    assert played.failure is None, played.failure
    assert played.script == parse_script(script), "a step of it could not happen"
    return seen[-1]


@pytest.mark.parametrize("name", HISTORIES)
def test_a_pod_gets_the_egm_of_which_it_has_every_gpu(name: str) -> None:
    script, nodes = HISTORIES[name]
    assert given(script) == nodes


# --- planted bugs -----------------------------------------------------------------------------------------


def _gives_to_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    def nodes(devices: Collection[DeviceKey], sets: Iterable[DeviceSet]) -> tuple[str, ...]:
        return tuple(sorted(s.node for s in sets if s.node and not {*devices}.isdisjoint(s.devices)))

    monkeypatch.setattr(calls, "egm_nodes", nodes)


def _gives_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "egm_nodes", lambda *_: ())


def _gives_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The node by the EGM's name, whether it is there or not."""

    def nodes(devices: Collection[DeviceKey], sets: Iterable[DeviceSet]) -> tuple[str, ...]:
        return tuple(sorted(f"/dev/{s.name}" for s in sets if {*devices}.issuperset(s.devices)))

    monkeypatch.setattr(calls, "egm_nodes", nodes)


def _reads_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was read first counts for ever."""
    read, have_read = EgmReads.read, set[EgmReads]()

    async def once(self: EgmReads) -> None:
        if self not in have_read:
            have_read.add(self)
            await read(self)

    monkeypatch.setattr(EgmReads, "read", once)


def _reads_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not before an inspection: only at uevents and every 10 s."""
    read = EgmReads.read

    async def skip(_self: EgmReads) -> None:
        return

    async def run(self: EgmReads) -> None:
        while True:
            await read(self)
            with trio.move_on_after(EGM_REREAD_S):
                await self._changed.wait()
            self._changed = trio.Event()

    monkeypatch.setattr(EgmReads, "read", skip)
    monkeypatch.setattr(EgmReads, "run", run)


@pytest.mark.parametrize(
    ("plant", "script"),
    [
        (_gives_to_a_part, "pods come in a burst"),
        (_gives_none, FOR_TWO),
        (_gives_what_is_missing, f"{NODE_GOES}; {FOR_TWO}"),
        (_reads_once, f"{RENUMBERED}+11; {FOR_TWO}"),
        (_reads_seldom, f"{SHRINKS}+0.3; an external process opens a card@1+3; a pod comes"),
    ],
)
def test_a_planted_bug_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert play(parse_script(script), EGM | PROC).failure is None
    plant(monkeypatch)
    failure = play(parse_script(script), EGM | PROC).failure
    assert failure is not None
    assert failure.check == WRONG, failure


# --- the table --------------------------------------------------------------------------------------------


def test_every_kind_of_egms_is_drawn_where_they_are_and_nowhere_else() -> None:
    theirs = {kind.name for kind in EGM_KINDS}
    assert theirs | set(BESIDE) == Serves.EGMS.kinds.keys()
    assert theirs <= KINDS.keys()
    assert theirs.isdisjoint(DRAWN)


def test_a_seed_says_whether_there_are_egms() -> None:
    assert serves(Serves.EGMS.bit | 5) is Serves.EGMS
    assert serves(5) is Serves.PLUGIN
