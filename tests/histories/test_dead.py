"""Histories with cards that die: what pods and claims get then, and bugs that these histories find."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import pytest
from msgspec.structs import replace

from gpuactors.core.assessment import assess, blockers
from gpuactors.core.deviceplugin import calls
from gpuactors.core.gpus import exclusion, offer
from gpuactors.core.host import dead_signs, inspections
from gpuactors.core.kinds.dead import dead
from gpuactors.core.values import memo
from gpuactors.core.values.cause import OF_A_PART, Cause
from gpuactors.core.values.dead_signs import DeadSigns
from gpuactors.core.values.inventory import Device
from gpuactors.core.values.model import DeviceKey, Health, PciFunction, Sign
from gpuactors.core.values.status import DeviceStatus, Reason
from gpuactors_simulation.kubelet.values import Phase
from tests.histories.claim_events import FIRST_OF_CLAIMS
from tests.histories.dead import GIVEN, NOT_DEAD
from tests.histories.dead_events import (
    ANSWERS,
    BESIDE,
    BESIDE_WITH_CLAIMS,
    COMES_AGAIN,
    COUNTS,
    DEAD_KINDS,
    PORT_COUNTS,
    SILENT,
)
from tests.histories.events import DRAWN, KINDS, Serves, serves
from tests.histories.found import FOUND_WITH_DEAD
from tests.histories.play import play
from tests.histories.script import Step, parse_script
from tests.histories.world import World

PROC: Final = 1
"""The daemon reads processes."""

NODE: Final = Serves.DEAD.bit | PROC
CLAIMED: Final = Serves.CLAIMED_DEAD.bit | PROC

BURST: Final = "pods come in a burst"
"""One for each card that kubelet takes for free."""

COMPANION: Final = 6
"""Added to a slot: the second function of the place, if it is there."""

TOLD: Final = 12
"""Added to a slot: the kernel says so."""

ALL_DIE: Final = "; ".join(f"{COUNTS}@{place}" for place in range(3))

STARTS_AGAIN: Final = (
    f"{BURST}+11; a pod is force-deleted and dies late; a pod comes+1; {ALL_DIE}; a daemon crashes; "
    "a daemon starts+30"
)
"""A pod has a card that the machine of the one before has open. The call before its container starts is cut off, and
kubelet repeats it."""

RESTART: Final = "a daemon crashes; a daemon starts+3"

HISTORIES: Final[Mapping[str, tuple[str, list[str], int, str]]] = {
    "its own counter tells": (f"{COUNTS}+3; {BURST}+11", ["1", "2"], 0, ""),
    "a restarted daemon reads the counter": (f"{COUNTS}; {RESTART}; {BURST}+11", ["1", "2"], 0, ""),
    "it dies while no daemon runs": (
        f"a daemon crashes; {COUNTS}; a daemon starts+3; {BURST}+11",
        ["1", "2"],
        0,
        "",
    ),
    "a restarted daemon knows what the counter of its port told": (
        f"{PORT_COUNTS}+3; {RESTART}; {BURST}+11",
        ["1", "2"],
        0,
        "",
    ),
    "it answers again, and the daemon is restarted": (
        f"{SILENT}@{TOLD}+3; {ANSWERS}@{TOLD}+3; {RESTART}; {BURST}+11",
        ["1", "2"],
        0,
        "",
    ),
    "the counter of its port tells": (f"{PORT_COUNTS}+3; {BURST}+11", ["1", "2"], 0, ""),
    "its silence is read when it is asked for": (f"{SILENT}+3; {BURST}+11", ["1", "2"], 1, "reads all ones"),
    "it answers again, and that changes nothing": (
        f"{SILENT}; the uevent socket overflows+3; {ANSWERS}; the uevent socket overflows+3; {BURST}+11",
        ["1", "2"],
        0,
        "",
    ),
    "the kernel says that it cuts it off, and that it has recovered it": (
        f"{SILENT}@{TOLD}+3; {ANSWERS}@{TOLD}+3; {BURST}+11",
        ["1", "2"],
        0,
        "",
    ),
    "it was silent, and nobody has read it then": (
        f"{SILENT}; {ANSWERS}; {BURST}+11",
        ["0", "1", "2"],
        0,
        "",
    ),
    "it is enumerated again": (f"{COUNTS}+3; {COMES_AGAIN}+3; {BURST}+11", ["0", "1", "2"], 0, ""),
    "it is enumerated again, and its port keeps its count": (
        f"{PORT_COUNTS}+3; {COMES_AGAIN}+3; {BURST}+11",
        ["0", "1", "2"],
        0,
        "",
    ),
    "its companion dies": (f"plug a companion; {COUNTS}@{COMPANION}+3; {BURST}+11", ["1", "2"], 0, ""),
    "all die under their pods": (f"{BURST}+11; {ALL_DIE}+11", ["0", "1", "2"], 0, ""),
    "all die, and the container of one has not started yet": (
        STARTS_AGAIN,
        ["0", "1", "2"],
        0,
        "",
    ),
}
"""By what happens to the first card: the script, the places of the cards that pods have then, how many pods have
failed, and what their messages have."""


def seen(script: str, seed: int) -> tuple[list[str], list[str]]:
    """The places of the cards that pods have at the last step, and the messages of those that have failed."""
    found: list[tuple[list[str], list[str]]] = []

    def look(world: World, step: Step | None) -> None:
        if step is None:
            return
        view = world.kubelet.view
        places = {world.address(place): str(place) for place in range(3)}
        given = [places[device] for entry in view.holdings.values() for device in entry.devices]
        failed = [pod.message for pod in view.pods.values() if pod.phase is Phase.FAILED]
        found.append((sorted(given), failed))

    played = play(parse_script(script), seed, on_step=look)
    assert played.failure is None, played.failure
    assert played.script == parse_script(script), "a step of it could not happen"
    return found[-1]


@pytest.mark.parametrize("name", HISTORIES)
def test_nobody_gets_a_card_that_has_died(name: str) -> None:
    script, places, failed, says = HISTORIES[name]
    given, messages = seen(script, NODE)
    assert given == places
    assert len(messages) == failed
    assert all(says in message for message in messages)


@pytest.mark.parametrize("sign", [COUNTS, PORT_COUNTS, SILENT])
@pytest.mark.parametrize("place", [0, 3], ids=["on vfio-pci", "on its host's driver"])
def test_no_claim_gets_a_card_that_has_died(sign: str, place: int) -> None:
    phases: list[Phase] = []

    def look(world: World, step: Step | None) -> None:
        if step is not None:
            phases.extend(pod.phase for pod in world.kubelet.view.pods.values())

    script = parse_script(f"{sign}@{place}+3; {FIRST_OF_CLAIMS}@{place}+11")
    played = play(script, CLAIMED, on_step=look)
    assert (played.failure, played.script) == (None, script)
    assert Phase.RUNNING not in phases


@pytest.mark.parametrize("name", FOUND_WITH_DEAD)
def test_what_was_found_once_stays_found(name: str) -> None:
    seed, script = FOUND_WITH_DEAD[name]
    played = play(script, seed)
    assert played.failure is None, played.failure
    assert played.script == script, "a step of it could not happen"


# --- planted bugs -----------------------------------------------------------------------------------------


def _offers_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead card blocks nothing."""
    monkeypatch.setattr(blockers, "dead", lambda _device: None)


def _claims_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exclusion, "dead", lambda _device: None)


def _no_taint(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slices do not show it."""
    fault = offer._fault

    def unless_dead(*given: Any, **more: Any) -> Reason | None:
        found = fault(*given, **more)
        return None if found is not None and found.cause is Cause.DEAD else found

    monkeypatch.setattr(offer, "_fault", unless_dead)


def _is_back_when_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    _without(monkeypatch, lambda function, _: function.sign is Sign.SILENT and not function.is_silent)


def _asks_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    _without(monkeypatch, lambda function, _: function.sign is Sign.PORT)


def _counts_since_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fatal error that was counted before the daemon has read the card is none."""
    old: set[tuple[str, int]] = set()

    def is_old(function: PciFunction, last: PciFunction | None) -> bool:
        key = function.address, function.presence
        old.update([key] if last is None and function.has_fatal_errors else ())
        return key in old and function.sign is Sign.FATAL

    _without(monkeypatch, is_old)


def _without(
    monkeypatch: pytest.MonkeyPatch, is_left_out: Callable[[PciFunction, PciFunction | None], bool]
) -> None:
    """These functions get no sign. The second argument is what the daemon has read before."""

    def forgets(function: PciFunction, last: PciFunction | None, signs: DeadSigns) -> PciFunction:
        found = dead_signs.with_sign(function, last, signs)
        return replace(found, sign=None) if is_left_out(found, last) else found

    monkeypatch.setattr(inspections, "with_sign", forgets)


def _subtracts_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead card that a pod has is Unhealthy."""
    status_of = assess.status_of

    def doubly(device: Device, *rest: Any) -> DeviceStatus:
        status = status_of(device, *rest)
        return replace(status, health=Health.UNHEALTHY) if dead(device) is not None else status

    monkeypatch.setattr(assess, "status_of", doubly)


def _starts_on_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """PreStartContainer does not mind."""
    monkeypatch.setattr(calls, "OF_A_PART", OF_A_PART | {Cause.DEAD})


def _never_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has died is dead for ever, by its address."""
    died: set[str] = set()
    is_dead = dead

    def for_ever(device: Device) -> Reason | None:
        sign = is_dead(device)
        died.update({device.key} if sign is not None else ())
        return Reason(Cause.DEAD, "it died once") if device.key in died else None

    monkeypatch.setattr(blockers, "dead", for_ever)


def _refuses_what_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, only of calls."""
    died: set[str] = set()
    blocker_of, is_dead = calls._blocker, dead

    def noted(device: Device) -> Reason | None:
        sign = is_dead(device)
        died.update({device.key} if sign is not None else ())
        return sign

    def for_ever(by_id: Any, state: Any, resource: Any, key: DeviceKey, seen: Any) -> Reason | None:
        return (
            Reason(Cause.DEAD, "it died once")
            if key in died
            else blocker_of(by_id, state, resource, key, seen)
        )

    monkeypatch.setattr(blockers, "dead", noted)
    monkeypatch.setattr(calls, "_blocker", for_ever)


UNSETTLED: Final = "kubelet's view does not settle"


@pytest.mark.parametrize(
    ("plant", "seed", "script", "check"),
    [
        (_offers_them, NODE, f"{COUNTS}; a pod comes+3; {BURST}+3", GIVEN),
        (_offers_them, NODE, COUNTS, UNSETTLED),
        (_claims_get_them, CLAIMED, f"{COUNTS}+3; {FIRST_OF_CLAIMS}+11", GIVEN),
        (_no_taint, CLAIMED, f"{COUNTS}+3", "claims do not settle"),
        (
            _is_back_when_it_answers,
            NODE,
            f"{SILENT}@{TOLD}+3; {ANSWERS}@{TOLD}+3",
            UNSETTLED,
        ),
        (_asks_no_port, NODE, f"{PORT_COUNTS}+3; {BURST}+3", GIVEN),
        (_counts_since_its_start, NODE, f"a daemon crashes; {COUNTS}; a daemon starts+3; {BURST}+3", GIVEN),
        (_subtracts_twice, NODE, f"a pod comes+11; {ALL_DIE}+11", "the daemon misbehaved"),
        (_starts_on_them, NODE, STARTS_AGAIN, GIVEN),
        (_never_comes_back, NODE, f"{COUNTS}+3; {COMES_AGAIN}+3", UNSETTLED),
        (_refuses_what_is_back, NODE, f"{COUNTS}+3; {COMES_AGAIN}+3; {BURST}+3", NOT_DEAD),
    ],
)
def test_a_planted_bug_is_found(
    plant: Callable[[pytest.MonkeyPatch], None],
    seed: int,
    script: str,
    check: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert play(parse_script(script), seed).failure is None
    plant(monkeypatch)
    memo.forget()
    failure = play(parse_script(script), seed).failure
    assert failure is not None
    assert failure.check == check, failure


# --- the table --------------------------------------------------------------------------------------------


def test_every_kind_of_dead_cards_is_drawn_where_they_are_and_nowhere_else() -> None:
    theirs = {kind.name for kind in DEAD_KINDS}
    assert theirs | set(BESIDE) == Serves.DEAD.kinds.keys()
    assert theirs | set(BESIDE_WITH_CLAIMS) == Serves.CLAIMED_DEAD.kinds.keys()
    assert theirs <= KINDS.keys()
    assert theirs.isdisjoint(DRAWN)


def test_a_seed_says_whether_cards_die() -> None:
    assert serves(Serves.DEAD.bit | 5) is Serves.DEAD
    assert serves(Serves.CLAIMED_DEAD.bit | 5) is Serves.CLAIMED_DEAD
