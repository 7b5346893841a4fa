"""Histories of nodes whose daemons answer by CDI names: what pods get, and bugs that these histories find."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import pytest
from msgspec.structs import replace

from gpuactors.actors import spec_keeper
from gpuactors.core.deviceplugin import calls, entries, specs
from gpuactors.core.events.deviceplugin import SpecsWritten
from gpuactors.core.state import NodeState
from gpuactors.core.values.device_spec import DeviceSpec, SpecsWanted
from gpuactors.core.values.effects import Grant
from gpuactors.core.values.model import DeviceId, DeviceKey, DeviceList, ResourceName
from gpuactors_simulation.kubelet.values import Phase
from tests.histories.events import DRAWN, KINDS, Serves, serves
from tests.histories.found import FOUND_WITH_KATA
from tests.histories.kata import GIVEN_UNSAFE, KATA, Kata
from tests.histories.kata_events import (
    BESIDE,
    DAMAGES,
    EMPTIES,
    FULL,
    KATA_KINDS,
    LEAVES,
    REMOVES,
    SLOW,
    SPOILS,
    STAYS,
    TAKES,
    WRITABLE,
)
from tests.histories.play import play
from tests.histories.script import Step, parse_script
from tests.histories.world import World

PROC: Final = 1
"""The daemon reads processes."""

UNOFFERED: Final = "a device is Healthy without its CDI file"
UNSETTLED: Final = "kubelet's view does not settle"

HISTORIES: Final = {
    "a pod gets its card": ("a pod comes+3", [Phase.RUNNING], 3),
    "files that are removed are written again": (f"{REMOVES}+3; a pod comes+3", [Phase.RUNNING], 3),
    "damaged files as well": (f"{DAMAGES}+3; a pod comes+3", [Phase.RUNNING], 3),
    "and the whole directory": (f"{EMPTIES}+11; a pod comes+3", [Phase.RUNNING], 3),
    "nothing is offered while the disk is full": (f"{FULL}; {EMPTIES}+11; a pod comes+3", [Phase.PENDING], 0),
    "what is there is offered while the disk is full": (f"{FULL}+3; a pod comes+3", [Phase.RUNNING], 3),
    "what has come is not offered while no file can be replaced": (
        f"{STAYS}+3; a card comes back in another group@4+3; pods come in a burst+3",
        [Phase.PENDING],
        0,
    ),
    "it is offered when that is over": (
        f"{STAYS}+3; a card comes back in another group@4+3; {WRITABLE}+11; pods come in a burst+3",
        [Phase.RUNNING] * 4,
        4,
    ),
    "a name that another program has is not offered": (f"{TAKES}@7+70", [], 2),
    "no sandbox is made while another program's file is none": (
        f"{SPOILS}+3; a pod comes+3",
        [Phase.STARTING],
        3,
    ),
    "it is made when that file is gone": (f"{SPOILS}+3; a pod comes+3; {LEAVES}+20", [Phase.RUNNING], 3),
    "a daemon that starts heals the files": (
        f"the daemon is told to stop+3; {REMOVES}; a daemon starts+3; a pod comes+3",
        [Phase.RUNNING],
        3,
    ),
    "after a reboot the files are made anew": ("a pod comes+3; the node reboots+70", [Phase.RUNNING], 3),
    "a model whose name is no kind is not offered": (
        "unplug@0+3; plug a never-seen model@0+3; a pod for another model comes@1+3",
        [Phase.PENDING],
        2,
    ),
}
"""By what happens: the script, the phases of the pods then, and how many cards kubelet has as Healthy."""


def seen(script: str) -> tuple[list[Phase], int]:
    """The phases of the pods at the last step, and how many devices are Healthy."""
    last: list[tuple[list[Phase], int]] = []

    def look(world: World, step: Step | None) -> None:
        if step is not None:
            view = world.kubelet.view
            healthy = [row for row in view.devices if row.health == "Healthy"]
            last.append((sorted(pod.phase for pod in view.pods.values()), len(healthy)))

    played = play(parse_script(script), KATA | PROC, on_step=look)
    assert played.failure is None, played.failure
    assert played.script == parse_script(script), "a step of it could not happen"
    return last[-1]


@pytest.mark.parametrize("name", HISTORIES)
def test_a_pod_gets_its_card_where_kata_finds_its_name(name: str) -> None:
    script, phases, healthy = HISTORIES[name]
    assert seen(script) == (phases, healthy)


@pytest.mark.parametrize("name", sorted(FOUND_WITH_KATA))
def test_a_history_that_was_found_passes(name: str) -> None:
    seed, script = FOUND_WITH_KATA[name]
    played = play(script, seed)
    assert played.failure is None, played.failure
    assert played.script == script, "a step of it could not happen"


# --- planted bugs -----------------------------------------------------------------------------------------


def _offers_unwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entries, "lacking", lambda *_: None)


def _forgets_pods(monkeypatch: pytest.MonkeyPatch) -> None:
    """The files have only the cards that are there."""
    of_one = specs._spec

    def spec(
        device_list: DeviceList,
        present: Mapping[DeviceKey, tuple[str, ...]],
        behind: Mapping[str, set[DeviceKey]],
        _before: DeviceSpec,
    ) -> DeviceSpec:
        return of_one(device_list, present, behind, {})

    monkeypatch.setattr(specs, "_spec", spec)


def _leads_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of a card that is gone stays, whosever its node is now."""
    monkeypatch.setattr(specs, "_devices_behind", lambda _state: {})


def _swaps(monkeypatch: pytest.MonkeyPatch) -> None:
    grant = calls._grant_by_cdi

    def swapped(state: NodeState, resource: ResourceName, ids: list[DeviceId]) -> Grant:
        others = sorted(calls.devices_by_id(state, resource).keys() - set(ids))
        return grant(state, resource, [DeviceId(i) for i in others[: len(ids)]] or ids)

    monkeypatch.setattr(calls, "_grant_by_cdi", swapped)


def _knows_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specs, "_others_files", lambda _specs: {})


def _believes_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is to be written is taken for written."""

    async def written(wanted: SpecsWanted, directory: object) -> SpecsWritten:
        await directory.write(wanted.specs)  # type: ignore[attr-defined]
        return SpecsWritten(wanted.specs, {})

    monkeypatch.setattr(spec_keeper, "_written", written)


def _hears_no_touch(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(_kata: Kata) -> object:
        return
        yield

    monkeypatch.setattr(Kata, "touches", never)


def _waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_held", lambda *_: [])


def _keeps_what_it_has_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specs, "still_written", lambda state, _specs: state.published.written)
    monkeypatch.setattr(
        specs,
        "written",
        lambda state, event: replace(
            state,
            published=replace(
                state.published, written=event.specs, unwritten=event.unwritten, specs_are_known=True
            ),
        ),
    )


@pytest.mark.parametrize(
    ("plant", "script", "check"),
    [
        (_offers_unwritten, "a daemon crashes; a daemon starts", UNOFFERED),
        (_forgets_pods, "a pod comes+3; unbind@0+3; polls take long+3", "a pod's CDI name is gone"),
        (
            _leads_to_another,
            "plug a second card into the group@0+3; pods come in a burst+3; a pod ends@0+3; unplug@0+3",
            UNSETTLED,
        ),
        (_swaps, "a pod comes", GIVEN_UNSAFE),
        (_knows_no_other, f"{TAKES}@7+11; pods come in a burst+3", GIVEN_UNSAFE),
        (_believes_itself, f"{FULL}; {EMPTIES}+11", UNSETTLED),
        (_hears_no_touch, f"{REMOVES}@0+3", UNSETTLED),
        (
            _waits_for_nobody,
            "pods come in a burst+3; a pod comes+3; a pod is force-deleted and dies late+3",
            "handed out twice",
        ),
        (
            _keeps_what_it_has_written,
            f"polls take long+3; {SLOW}; unbind@0+0.3; bind to vfio-pci@0+0.4; pods come in a burst+3",
            GIVEN_UNSAFE,
        ),
    ],
)
def test_a_planted_bug_is_found(
    plant: Callable[[pytest.MonkeyPatch], None],
    script: str,
    check: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert play(parse_script(script), KATA | PROC).failure is None
    plant(monkeypatch)
    failure = play(parse_script(script), KATA | PROC).failure
    assert failure is not None
    assert failure.check == check, failure


# --- the table --------------------------------------------------------------------------------------------


def test_every_kind_of_kata_is_drawn_where_it_is_and_nowhere_else() -> None:
    theirs = {kind.name for kind in KATA_KINDS}
    assert theirs | set(BESIDE) == Serves.KATA.kinds.keys()
    assert theirs <= KINDS.keys()
    assert theirs.isdisjoint(DRAWN)


def test_a_seed_says_whether_daemons_answer_by_cdi_names() -> None:
    assert serves(Serves.KATA.bit | 5) is Serves.KATA
    assert serves(5) is Serves.PLUGIN
