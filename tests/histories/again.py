"""The histories that were found once, each under all its schedules, on all cores: the first part of `just histories`.

`just test` plays each of them under one schedule, which is not replayed from its journal and seldom watched for long.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Final

from tests.histories.campaign import HANG_S
from tests.histories.found import FOUND, known
from tests.histories.play import play
from tests.histories.script import Script, replay_line

SCHEDULES: Final = (9, *range(8))
"""Seeds, odd and even ones: `--holders` proc and passive. Under the first one the kernel says nothing of an unbind that
waits for the card's holder."""


def problem_of(script: Script, seed: int) -> str | None:
    """What is wrong with a found history under a schedule; None if it passes, or fails for a reason that is known."""
    played = play(script, seed)
    line = replay_line(seed, script)
    if played.failure is None:
        same = played.script == script
        return None if same else f"a step of it could not happen, it tries something else now\n{line}"
    return None if known(played.failure) else f"{played.failure.check}: {played.failure.text}\n{line}"


def play_again(workers: int, schedules: int, found: Mapping[str, Script] = FOUND) -> list[str]:
    """Plays each history under the first so many schedules; returns what is wrong, with the line that replays it.

    Raises `BrokenProcessPool` if a worker's process dies, which prints its stack if it hung.
    """
    turns = [(name, script, seed) for name, script in found.items() for seed in SCHEDULES[:schedules]]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        problems = pool.map(_bounded, *zip(*((script, seed) for _, script, seed in turns), strict=True))
        return [
            f"{name}: {problem}" for (name, _, _), problem in zip(turns, problems, strict=True) if problem
        ]


def _bounded(script: Script, seed: int) -> str | None:
    faulthandler.dump_traceback_later(HANG_S, exit=True)
    problem = problem_of(script, seed)
    faulthandler.cancel_dump_traceback_later()
    return problem
