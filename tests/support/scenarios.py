"""Plays scenarios of `gpuactors simulate`, whole or up to a step that fails."""

from __future__ import annotations

import io
import json
from functools import cache
from typing import Any

import pytest
from msgspec.structs import replace

from gpuactors_simulation import run
from gpuactors_simulation.script import Scenario


@cache  # a story takes seconds, and its output is only read
def steps_of(scenario: str) -> list[dict[str, Any]]:
    """The steps of a story in JSON lines."""
    out = io.StringIO()
    assert run.simulate(scenario=scenario, seed=0, speed=1.0, json_lines=True, out=out) == run.EXIT_OK
    *steps, _ = [json.loads(line) for line in out.getvalue().splitlines()]
    return steps


def fails_at(monkeypatch: pytest.MonkeyPatch, scenario: Scenario, step: int) -> str:
    """What is not as expected in the last step that is played."""
    steps = scenario.steps

    def shorter(rng: Any) -> Any:
        played = steps(rng)[:step]
        return (*played[:-1], replace(played[-1], within_s=4.0))

    monkeypatch.setattr(run, "SCENARIOS", (replace(scenario, steps=shorter),))
    out = io.StringIO()
    code = run.simulate(scenario=scenario.name, seed=0, speed=1.0, json_lines=True, out=out)
    result = json.loads(out.getvalue().splitlines()[-1])
    assert (code, result["steps"]) == (run.EXIT_FAILED, step)
    return "; ".join(result["unmet"])
