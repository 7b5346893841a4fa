"""Histories with sets of devices: what pods for two cards get, what is refused, and bugs that these histories find."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pytest

from gpuactors.core.deviceplugin import calls
from gpuactors.core.host import sets as host_sets
from gpuactors_simulation.kubelet.values import Phase
from tests.histories.events import DRAWN, KINDS, Serves, serves
from tests.histories.kubelet_events import FOR_TWO
from tests.histories.play import play
from tests.histories.script import Step, parse_script
from tests.histories.set_events import BESIDE, DRAWS, READABLE, SET_KINDS, UNREADABLE
from tests.histories.sets import REQUIRED, SETS
from tests.histories.world import World

PROC: Final = 1
"""The daemon reads processes."""

OTHER_PAIR, TWO_PAIRS, NO_PAIR = 6, 12, 18
"""The slots by which the operator draws the second layout, the third, and the last one."""

ANOTHER_HAS_ONE: Final = f"an external process opens a card@0+3; {FOR_TWO}+3"
"""Of the first pair, so that two other cards are left, which are none."""

HISTORIES: Final = {
    "the pair is given away": (f"{FOR_TWO}+3", ["0", "1"]),
    "the operator has drawn another pair": (f"{DRAWS}@{OTHER_PAIR}+11; {FOR_TWO}+3", ["1", "2"]),
    "what was drawn is read after a while": (f"{DRAWS}@{OTHER_PAIR}; {FOR_TWO}+3", ["0", "1"]),
    "the file cannot be read any more": (
        f"{UNREADABLE}; {DRAWS}@{OTHER_PAIR}+11; {FOR_TWO}+3",
        ["0", "1"],
    ),
    "the file can be read again": (
        f"{UNREADABLE}; {DRAWS}@{OTHER_PAIR}+11; {READABLE}+11; {FOR_TWO}+3",
        ["1", "2"],
    ),
    "a successor reads it at once": (
        f"{DRAWS}@{OTHER_PAIR}; a successor starts+3; {FOR_TWO}+3",
        ["1", "2"],
    ),
    "a pair is broken up by a pod for one card, as nothing else is left": (
        f"an external process opens a card@2+3; a pod comes+3; {FOR_TWO}+3",
        [],
    ),
}
"""By what happens: the script, and the places of the cards that the pod for two has then."""


def held(script: str, seed: int) -> tuple[list[str], str]:
    """The places of the cards that pods with two have at the last step, and why a pod has failed."""
    seen: list[tuple[list[str], str]] = []

    def look(world: World, step: Step | None) -> None:
        if step is None:
            return
        view = world.kubelet.view
        pairs = [entry.devices for entry in view.holdings.values() if len(entry.devices) > 1]
        places = {world.address(place): str(place) for place in range(3)}
        failed = [pod.message for pod in view.pods.values() if pod.phase is Phase.FAILED]
        seen.append((sorted(places[device] for pair in pairs for device in pair), "; ".join(failed)))

    played = play(parse_script(script), seed, on_step=look)
    assert played.failure is None, played.failure
    assert played.script == parse_script(script), "a step of it could not happen"
    return seen[-1]


@pytest.mark.parametrize("required", [0, REQUIRED])
@pytest.mark.parametrize("name", HISTORIES)
def test_a_pod_for_two_cards_gets_a_pair(name: str, required: int) -> None:
    script, places = HISTORIES[name]
    assert held(script, SETS | required | PROC)[0] == places


def test_two_cards_that_are_no_pair_are_refused_where_pairs_are_required() -> None:
    assert held(ANOTHER_HAS_ONE, SETS | PROC) == (["1", "2"], "")
    places, why = held(ANOTHER_HAS_ONE, SETS | REQUIRED | PROC)
    assert places == []
    assert "are not exactly one partition" in why


def test_nothing_is_given_away_before_the_file_was_read() -> None:
    script = f"{UNREADABLE}; a daemon crashes; a daemon starts+3; a pod comes+3"
    assert "the sets of devices are not known" in held(script, SETS | REQUIRED | PROC)[1]
    assert held(script, SETS | PROC)[1] == ""


# --- planted bugs -----------------------------------------------------------------------------------------


def _refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "not_a_set", lambda *_: None)


def _prefers_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """GetPreferredAllocation does not know of sets."""
    monkeypatch.setattr(calls, "_sets_of", lambda *_: ())


def _gives_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """No file is as good as one that was read."""
    monkeypatch.setattr(calls, "sets_unknown", lambda *_: None)


def _keeps_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was read first counts for ever."""
    observed = host_sets.observed
    monkeypatch.setattr(
        host_sets, "observed", lambda state, event: (state, []) if state.host.sets else observed(state, event)
    )


@pytest.mark.parametrize(
    ("plant", "script", "required", "check"),
    [
        (_refuses_nothing, ANOTHER_HAS_ONE, REQUIRED, "what is no set was granted"),
        (_prefers_none, f"{DRAWS}@{OTHER_PAIR}+11; {FOR_TWO}+3", 0, "a set was not preferred"),
        (
            _gives_unread,
            f"{UNREADABLE}; a daemon crashes; a daemon starts+3; a pod comes+3",
            REQUIRED,
            "what is no set was granted",
        ),
        (
            _keeps_the_first,
            f"{DRAWS}@{NO_PAIR}+11; {FOR_TWO}+3",
            REQUIRED,
            "what is no set was granted",
        ),
    ],
)
def test_a_planted_bug_is_found(
    plant: Callable[[pytest.MonkeyPatch], None],
    script: str,
    required: int,
    check: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert play(parse_script(script), SETS | required | PROC).failure is None
    plant(monkeypatch)
    failure = play(parse_script(script), SETS | required | PROC).failure
    assert failure is not None
    assert failure.check == check, failure


# --- the table --------------------------------------------------------------------------------------------


def test_every_kind_of_sets_is_drawn_where_they_are_and_nowhere_else() -> None:
    theirs = {kind.name for kind in SET_KINDS}
    assert theirs | set(BESIDE) == Serves.SETS.kinds.keys()
    assert theirs <= KINDS.keys()
    assert theirs.isdisjoint(DRAWN)


def test_a_seed_says_whether_there_are_sets() -> None:
    assert serves(Serves.SETS.bit | 5) is Serves.SETS
    assert serves(5) is Serves.PLUGIN
