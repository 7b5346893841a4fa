"""Histories of cards that move under prepared claims: what must hold does, and planted bugs are found."""

from __future__ import annotations

from typing import Final

import pytest

from gpuactors.core.deviceplugin import calls
from gpuactors.core.state import NodeState
from gpuactors.core.values.model import Call, InspectedKey
from tests.histories.claims import CLAIMS
from tests.histories.events import DRAWN, DRAWN_WITH_CLAIMS
from tests.histories.move_events import (
    CAN_GO,
    COMES_BACK,
    COMES_WITH_FREED,
    MOVE_KINDS,
    NEW_PLACE,
    PULLED,
    STAY,
    SWAPPED,
)
from tests.histories.node_events import REBOOTS_WITH_ANOTHER
from tests.histories.play import play
from tests.histories.script import parse_script

TWO: Final = "a pod with a claim comes; a pod with a claim comes@1+3"
"""Two tenants, each with a card that vfio-pci takes by itself."""

HISTORIES: Final = {
    "two cards swap their numbers under their claims": f"{TWO}; {SWAPPED}+70",
    "two cards swap their numbers while no daemon runs": (
        f"{TWO}; a daemon crashes+3; {SWAPPED}+3; a daemon starts+70"
    ),
    "two cards swap their numbers while files cannot be removed": (
        f"{TWO}; {STAY}; {SWAPPED}+3; {SWAPPED}@1+11; {CAN_GO}+70"
    ),
    "a new card gets the number of one whose files cannot be removed": (
        f"{TWO}; {STAY}; {PULLED}+3; {COMES_WITH_FREED}@{NEW_PLACE + 6}+0.3; a pod with a claim comes@{NEW_PLACE}+11; "
        f"{CAN_GO}+70"
    ),
    "another model is in a claim's slot after a reboot, and later the first one": (
        f"a pod with a claim comes@3+30; {REBOOTS_WITH_ANOTHER}@3+70; {REBOOTS_WITH_ANOTHER}@3+70"
    ),
    "another model is in a claim's slot after two reboots": (
        f"{TWO}; {REBOOTS_WITH_ANOTHER}; the node reboots+70"
    ),
    "two cards swap their numbers twice, without a uevent of the second time": (
        f"{TWO}; {SWAPPED}+3; the next uevents are lost; {SWAPPED}+3"
    ),
    "a new card gets the number of one that was pulled under its claim": (
        f"{TWO}; {PULLED}+3; {COMES_WITH_FREED}@{NEW_PLACE + 6}+0.3; a pod with a claim comes@{NEW_PLACE}+70"
    ),
    "a new card gets the number while no daemon runs, and is claimed": (
        f"{TWO}; a daemon crashes; {PULLED}+3; {COMES_WITH_FREED}@{NEW_PLACE + 6}; "
        f"a pod with a claim comes@{NEW_PLACE}; a daemon starts+70"
    ),
    "a card comes back with another number": f"{TWO}; {PULLED}+3; {COMES_BACK}+70",
    "a prepare was done when kubelet was gone, and is asked for again when its card has another number": (
        "a write to sysfs is slow; a pod with a claim comes@3+1; kubelet stops+11; "
        f"inspections and scans take long; {SWAPPED}@3; kubelet starts+70"
    ),
}


STARTS: Final = "inspections and scans take long; a pod comes"
"""Allocate and PreStartContainer wait for an inspection each: the second one reads after 0.5 s, and ends after 1 s."""

DEAF: Final = "the uevent watcher crashes"

MOVED_UNDER_A_START: Final = {
    "and the daemon hears of it": f"{STARTS}+0.7; {SWAPPED}+70",
    "and the daemon hears that it has missed something": f"{STARTS}+0.7; {DEAF}; {SWAPPED}+70",
    "and nothing is heard before the answer": f"{STARTS}+0.95; {DEAF}+0.001; {SWAPPED}+70",
    "at the moment of the answer": f"{STARTS}+1.001; {SWAPPED}+70",
    "and a pod comes for the card whose group was opened": (
        f"{STARTS}+0.95; {DEAF}+0.001; {SWAPPED}+1; pods come in a burst+3"
    ),
}


@pytest.mark.parametrize("name", MOVED_UNDER_A_START)
def test_a_container_is_started_with_no_other_cards_node_if_that_can_be_known(name: str) -> None:
    played = play(parse_script(MOVED_UNDER_A_START[name]), CLAIMS)
    assert played.failure is None, played.failure


def test_a_daemon_that_answers_in_spite_of_a_uevent_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """It decides by the first inspection that comes back."""

    def is_unseen(state: NodeState, call: Call, key: InspectedKey) -> bool:
        return state.host.seen[key].inspection <= call.since

    monkeypatch.setattr(calls, "_is_unseen", is_unseen)
    _expect_found("and the daemon hears of it")


def test_a_daemon_that_answers_though_it_missed_uevents_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "inspections_waited_for", lambda _: [])
    _expect_found("and the daemon hears that it has missed something")


def _expect_found(name: str) -> None:
    failure = play(parse_script(MOVED_UNDER_A_START[name]), CLAIMS).failure
    assert failure is not None
    assert failure.check == "the daemon misbehaved"
    assert "was started with" in failure.text


@pytest.mark.parametrize("cdev", [0, 4], ids=["without cdevs", "with cdevs"])
@pytest.mark.parametrize("name", HISTORIES)
def test_a_claim_is_given_no_other_cards_node(name: str, cdev: int) -> None:
    script = parse_script(HISTORIES[name])
    played = play(script, CLAIMS | cdev)
    assert played.failure is None, played.failure
    assert played.script == script, "a step of it could not happen"


def test_cards_move_only_on_nodes_with_claims() -> None:
    names = {kind.name for kind in MOVE_KINDS}
    assert names <= DRAWN_WITH_CLAIMS.keys()
    assert names.isdisjoint(DRAWN)
