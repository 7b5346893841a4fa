"""Any order of events under any schedule: what must hold does at each step, and when it is quiet kubelet's view is
right."""

from __future__ import annotations

import random
import shlex

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuactors.cli.commands import cli
from gpuactors.simulation.histories.play import Played, play, play_chosen
from gpuactors.simulation.histories.script import replay_line
from tests.histories.draw import drawn
from tests.histories.found import FOUND, KNOWN, known

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


def test_the_line_that_is_printed_replays_a_history_step_by_step() -> None:
    played = play_chosen(drawn(random.Random(7)), 7)
    command = shlex.split(replay_line(played.seed, played.script))
    assert command[0] == "gpuactors"
    done = CliRunner().invoke(cli, command[1:])
    assert done.exit_code == 0, done.output
    assert done.output.count("Step ") == len(played.script)
    assert f"at each of {len(played.script)} steps" in done.output
    assert "Left out" not in done.output
