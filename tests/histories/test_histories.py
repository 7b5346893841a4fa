"""Any order of events under any schedule: what must hold does at each step, and when it is quiet kubelet's view is
right."""

from __future__ import annotations

import random
import shlex
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.histories.__main__ import main
from tests.histories.again import problem_of
from tests.histories.draw import drawn
from tests.histories.found import FOUND, KNOWN, known
from tests.histories.play import Played, play, play_chosen
from tests.histories.script import replay_line

QUICK_SEEDS = 16
"""The first of ten seeds whose histories are neither watched for long nor replayed from their journals."""

LONG_SEED = 64
"""The same, but watched for long."""

NEEDS_LONG = frozenset({"a claim takes a card while nothing of ours is given away"})
"""Found histories in which the ledger is read on a quiet node, and by nothing else."""


def complaint(played: Played) -> str | None:
    """Why a history failed, if it did for a reason that is not known."""
    if played.failure is None or known(played.failure) is not None:
        return None
    where = replay_line(played.seed, played.script)
    return f"{played.failure.check}: {played.failure.text}\n{where}"


@settings(max_examples=16, database=None)
@given(st.integers(0, 2**32 - 1))
def test_kubelets_view_is_right_after_any_history(seed: int) -> None:
    assert (problem := complaint(play_chosen(drawn(random.Random(seed)), seed))) is None, problem


@pytest.mark.parametrize("name", sorted(FOUND))
def test_a_found_history_stays_found(name: str) -> None:
    """Under one schedule; `just histories` plays each of them under nine."""
    seed = LONG_SEED if name in NEEDS_LONG else QUICK_SEEDS + crc32(name.encode()) % 10
    assert (problem := problem_of(FOUND[name], seed)) is None, problem


def test_a_known_fault_is_still_there() -> None:
    """Else its place is in FOUND."""
    for fault in KNOWN:
        failures = (play(fault.script, seed).failure for seed in range(32))
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
