"""Plays a scenario: what `gpuactors simulate` calls.

Each step acts, then waits until its expectations are met, and is shown. Must not know any particular scenario.
"""

from __future__ import annotations

import random
import sys
from typing import Final, TextIO

import trio

from gpuactors.observe import log
from gpuactors_simulation.expectations import Sound
from gpuactors_simulation.log_tail import LogTail
from gpuactors_simulation.scenarios import SCENARIOS
from gpuactors_simulation.script import Scenario, Step
from gpuactors_simulation.show import JsonLines, PlainText, ScenarioResult, Show, StepResult
from gpuactors_simulation.world import World, open_world

PAUSE_S: Final = 4.0
"""Between two steps on a terminal at speed 1: long enough to read one."""

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
EXIT_INTERRUPTED: Final = 130


def list_scenarios() -> tuple[tuple[str, str], ...]:
    """Name and one line of each scenario."""
    return tuple((scenario.name, scenario.line) for scenario in SCENARIOS)


def simulate(
    *, scenario: str, seed: int, speed: float, json_lines: bool, out: TextIO, columns: int = sys.maxsize
) -> int:
    """Play a scenario and return the exit code: 0, or 1 if anything was not as expected.

    `speed` divides the pauses between steps on a terminal; elsewhere there are none. Raises `ValueError` for a name
    that is not in `list_scenarios`, and what `out` raises. `columns`: how wide prose may get.
    """
    chosen = next((s for s in SCENARIOS if s.name == scenario), None)
    if chosen is None:
        raise ValueError(f"no scenario {scenario!r}; there are {', '.join(s.name for s in SCENARIOS)}")
    show: Show = JsonLines(out) if json_lines else PlainText(out, columns)
    pause_s = PAUSE_S / speed if out.isatty() and not json_lines else 0.0
    code = EXIT_FAILED
    try:
        result = trio.run(play, chosen, seed, show, pause_s)
        code = EXIT_OK if result.ok else EXIT_FAILED
    except* KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    return code


async def play(scenario: Scenario, seed: int, show: Show, pause_s: float) -> ScenarioResult:
    """Play a scenario in a new world, up to the first step that is not as expected.

    Takes over the logging of the process.
    """
    tail = LogTail()
    log.configure("json", "warning", stream=tail)
    began_at = trio.current_time()
    steps = scenario.steps(random.Random(seed))
    show.opening(scenario, seed)
    unmet: tuple[str, ...] = ()
    played = 0
    async with open_world(seed, tail, claims=scenario.claims, domains=scenario.domains) as world:
        for number, step in enumerate(steps, start=1):
            outcome = await play_step(world, number, len(steps), step, show)
            played, unmet = number, outcome.unmet
            show.step_ends(outcome)
            if unmet:
                break
            if number < len(steps):
                await trio.sleep(pause_s)
    result = ScenarioResult(
        scenario=scenario,
        seed=seed,
        steps=played,
        of=len(steps),
        unmet=unmet,
        took_s=trio.current_time() - began_at,
        log=tail.lines if unmet else (),
    )
    show.closing(result)
    return result


async def play_step(world: World, number: int, steps: int, step: Step, show: Show) -> StepResult:
    """Play one step and wait until its expectations are met."""
    before = world.kubelet.view
    began_at, negative_s = trio.current_time(), world.negative_s
    show.step_begins(number, steps, step)
    unmet: tuple[str, ...]
    try:
        with trio.fail_after(step.within_s):
            await step.act(world)
    except Exception as error:
        unmet = (f"the step could not be done: {str(error) or type(error).__name__}",)
        settled_s = trio.current_time() - began_at
    else:
        expected = (*step.expect, Sound())
        outcome = await world.settle(expected, before, step.within_s, began_at)
        unmet, settled_s = outcome.unmet, outcome.settled_s
    return StepResult(number, step, world.moment(), unmet, settled_s, world.negative_s - negative_s)
