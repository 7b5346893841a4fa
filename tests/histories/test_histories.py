"""Any order of events under any schedule: what must hold does at each step, and when it is quiet kubelet's view is
right."""

from __future__ import annotations

import random
import shlex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.histories.__main__ import main
from tests.histories.draw import drawn
from tests.histories.found import FOUND, KNOWN, known
from tests.histories.play import Played, play, play_chosen
from tests.histories.script import replay_line

SEEDS = 8
"""Schedules under which each found history is played, odd and even ones: `--holders` proc and passive."""

OLDER_KERNEL = 9
"""One more: the kernel says nothing of an unbind that waits for the card's holder."""


def complaint(played: Played) -> str | None:
    """Why a history failed, if it did for a reason that is not known."""
    if played.failure is None or known(played.failure) is not None:
        return None
    where = replay_line(played.seed, played.script)
    return f"{played.failure.check}: {played.failure.text}\n{where}"


@settings(max_examples=80, database=None)
@given(st.integers(0, 2**32 - 1))
def test_kubelets_view_is_right_after_any_history(seed: int) -> None:
    assert (problem := complaint(play_chosen(drawn(random.Random(seed)), seed))) is None, problem


@pytest.mark.parametrize("name", sorted(FOUND))
def test_a_found_history_stays_found(name: str) -> None:
    for seed in (*range(SEEDS), OLDER_KERNEL):
        played = play(FOUND[name], seed)
        assert (problem := complaint(played)) is None, problem
        if played.failure is None:
            assert played.script == FOUND[name], "a step of it could not happen: it tries something else now"


def test_a_known_fault_is_still_there() -> None:
    """Else its place is in FOUND."""
    for fault in KNOWN:
        failures = (play(fault.script, seed).failure for seed in range(4 * SEEDS))
        assert any(f is not None and fault.matches(f) for f in failures), f"mended: {fault.why}"


def test_the_line_that_is_printed_replays_a_history_step_by_step(capsys: pytest.CaptureFixture[str]) -> None:
    played = play_chosen(drawn(random.Random(7)), 7)
    command = shlex.split(replay_line(played.seed, played.script))
    assert command[:2] == ["./do", "fuzz"]
    assert main(command[2:]) == 0
    shown = capsys.readouterr().out
    assert shown.count("Step ") == len(played.script)
    assert f"at each of {len(played.script)} steps" in shown
    assert "Left out" not in shown
