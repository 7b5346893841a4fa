"""Histories with partitions that the daemons activate: what happens to them, and bugs that these histories find."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pytest

from gpuactors.core import fabric as core_fabric
from gpuactors.core.deviceplugin import calls
from gpuactors.core.gpus import files
from gpuactors.core.partitions import machine, outputs
from gpuactors.core.state.partitions import PartitionRecord, Partitions
from gpuactors.core.values.partition import PartitionState, PartitionTrigger
from gpuactors_simulation.kubelet.values import Phase
from tests.histories.events import DRAWN, KINDS, Serves, serves
from tests.histories.fabric import FABRIC
from tests.histories.fabric_events import (
    ACTIVATES,
    DEACTIVATES,
    FABRIC_KINDS,
    FAILS,
    FULL,
    GO_ON,
    HANGS,
    PAIR_CLAIMED,
    PRETENDS,
    QUERY_HANGS,
    RESTARTS,
    WRITABLE,
    WRONG,
)
from tests.histories.found import FOUND_WITH_FABRIC
from tests.histories.kubelet_events import FOR_TWO
from tests.histories.play import play
from tests.histories.script import Step, parse_script
from tests.histories.sets import REQUIRED
from tests.histories.world import World

NODE: Final = FABRIC | REQUIRED | 1
CLAIMED: Final = Serves.CLAIMED_FABRIC.bit | REQUIRED | 1

PAIR: Final = 36
"""The slot of the partition of the first two cards."""

RUNS, WAITS = Phase.RUNNING, Phase.STARTING

HISTORIES: Final = {
    "it is active before the pod starts": (f"{FOR_TWO}+11", {"7"}, [RUNS]),
    "and inactive when the pod has ended": (f"{FOR_TWO}+11; a pod ends+11", set(), []),
    "the command fails once": (f"{FAILS}; {FOR_TWO}+70", {"7"}, [RUNS]),
    "the command fails after it has done it": (f"{FAILS}@1; {FOR_TWO}+70", {"7"}, [RUNS]),
    "the command hangs until its deadline": (f"{HANGS}; {FOR_TWO}+100", {"7"}, [RUNS]),
    "the query hangs": (f"{QUERY_HANGS}; {FOR_TWO}+70", {"7"}, [RUNS]),
    "the command does nothing, and says that it has": (f"{PRETENDS}; {FOR_TWO}+70", {"7"}, [RUNS]),
    "a query says that it is active, and it is not": (f"{WRONG}@{PAIR}; {FOR_TWO}+70", {"7"}, [RUNS]),
    "the intents cannot be written": (f"{FULL}; {FOR_TWO}+11", set(), [WAITS]),
    "the intents can be written again": (f"{FULL}; {FOR_TWO}+11; {WRITABLE}+70", {"7"}, [RUNS]),
    "another program has it": (f"{ACTIVATES}@{PAIR}; {FOR_TWO}+11", {"7"}, [WAITS]),
    "another program had it": (f"{ACTIVATES}@{PAIR}; {FOR_TWO}+11; {DEACTIVATES}@{PAIR}+70", {"7"}, [RUNS]),
    "the fabric manager restarts under a virtual machine": (f"{FOR_TWO}+11; {RESTARTS}+70", set(), [RUNS]),
    "the daemon is killed in the act, which goes on": (
        f"{HANGS}; {FOR_TWO}+0.3; a daemon crashes; a daemon starts+3; {GO_ON}+70",
        {"7"},
        [RUNS],
    ),
    "the node reboots in the act": (f"{HANGS}@1; {FOR_TWO}+0.3; the node reboots@100+100", {"7"}, [WAITS]),
}
"""By what happens: the script, the partitions that are active then, and the phases of the pods. After a reboot the
groups have other numbers, so the pod waits."""


def seen(script: str, seed: int) -> tuple[set[str], list[Phase]]:
    """What is active after the last step, and the pods."""
    views: list[tuple[set[str], list[Phase]]] = []

    def look(world: World, step: Step | None) -> None:
        if step is not None and world.fabric is not None:
            pods = world.kubelet.view.pods.values()
            views.append((set(world.fabric.active), [pod.phase for pod in pods]))

    played = play(parse_script(script), seed, on_step=look)
    assert played.failure is None, played.failure
    assert played.script == parse_script(script), "a step of it could not happen"
    return views[-1]


@pytest.mark.parametrize("name", HISTORIES)
def test_a_pod_starts_with_its_partition_and_never_without(name: str) -> None:
    script, active, phases = HISTORIES[name]
    assert seen(script, NODE) == (active, phases)


def test_a_claim_for_a_pair_has_its_partition_as_long_as_it_lives() -> None:
    pair = f"{PAIR_CLAIMED.name}@1"
    assert seen(f"{pair}+11", CLAIMED) == ({"8"}, [RUNS])
    assert seen(f"{pair}+11; a pod with a claim ends+70", CLAIMED)[0] == set()


@pytest.mark.parametrize("name", FOUND_WITH_FABRIC)
def test_what_was_found_once_stays_found(name: str) -> None:
    seed, script = FOUND_WITH_FABRIC[name]
    played = play(script, seed)
    assert played.failure is None, played.failure
    assert played.script == script, "a step of it could not happen"


# --- planted bugs -----------------------------------------------------------------------------------------


def _waits_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last call of the device plugin does not ask for its partition."""
    monkeypatch.setattr(calls, "unready", lambda *_: None)


def _claims_wait_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "unready", lambda *_: None)


def _sees_no_holder(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod that has left has left its devices."""
    monkeypatch.setattr(core_fabric, "_is_held", lambda *_: False)


def _keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is deactivated."""
    use = machine._use

    def unless_active(partitions: Partitions, record: PartitionRecord) -> PartitionTrigger | None:
        return None if record.state is PartitionState.ACTIVE else use(partitions, record)

    monkeypatch.setattr(machine, "_use", unless_active)


def _believes_one_query(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "WITNESSES", 1)


def _lets_others_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two devices that are no partition wait for nothing."""
    monkeypatch.setattr(outputs, "_is_overlapping", lambda *_: False)


FOUND_RELEASE: Final = (
    "a pod gets two devices that are no partition while the partition of one of them is released"
)


@pytest.mark.parametrize(
    ("plant", "seed", "script", "check"),
    [
        (_waits_for_none, NODE, f"{FOR_TWO}+3", "a container starts without its partition"),
        (
            _claims_wait_for_none,
            CLAIMED,
            f"{PAIR_CLAIMED.name}@1+3",
            "a container starts without its partition",
        ),
        (
            _sees_no_holder,
            NODE,
            f"{FOR_TWO}+11; a pod is force-deleted and dies late+11",
            "a partition was changed under a virtual machine",
        ),
        (_keeps_it, NODE, f"{FOR_TWO}+11; a pod ends+11", "a partition is left"),
        (
            _believes_one_query,
            NODE,
            f"{ACTIVATES}@{PAIR}+70; {WRONG}@{PAIR}; {FOR_TWO}+11; a pod ends+11",
            "another program's partition was deactivated",
        ),
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
    failure = play(parse_script(script), seed).failure
    assert failure is not None
    assert failure.check == check, failure


def test_a_partition_that_is_deactivated_under_another_pod_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    seed, script = FOUND_WITH_FABRIC[FOUND_RELEASE]
    _lets_others_in(monkeypatch)
    failure = play(script, seed).failure
    assert failure is not None
    assert failure.check == "a partition was changed under a virtual machine", failure


# --- the table --------------------------------------------------------------------------------------------


def test_every_kind_of_partitions_is_drawn_where_they_are_and_nowhere_else() -> None:
    theirs = {kind.name for kind in FABRIC_KINDS}
    assert theirs <= Serves.FABRIC.kinds.keys() & KINDS.keys()
    assert {*theirs, PAIR_CLAIMED.name} <= Serves.CLAIMED_FABRIC.kinds.keys()
    assert (theirs | {PAIR_CLAIMED.name}).isdisjoint(DRAWN.keys() | Serves.SETS.kinds.keys())


def test_a_seed_says_whether_partitions_are_activated() -> None:
    assert serves(Serves.FABRIC.bit | 5) is Serves.FABRIC
    assert serves(Serves.CLAIMED_FABRIC.bit | 5) is Serves.CLAIMED_FABRIC
