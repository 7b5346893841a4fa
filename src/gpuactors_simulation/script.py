"""The form of a scenario: named steps, each with an act and with the conditions after it.

Values only; the scenarios are in `scenarios/`, and `run.py` plays them.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Final

from msgspec import Struct

from gpuactors_simulation.situation import Expectation
from gpuactors_simulation.world import World

STEP_DEADLINE_S: Final = 15.0
"""How long it may take until a step's expectations are met. It takes milliseconds; on a loaded machine longer."""


class Step(Struct, frozen=True):
    """One step of a scenario."""

    title: str
    text: str
    """The events, and what went wrong there in the field, in plain sentences."""
    act: Callable[[World], Awaitable[None]]
    expect: tuple[Expectation, ...]
    within_s: float = STEP_DEADLINE_S


class Scenario(Struct, frozen=True):
    """A scenario. `steps` makes its script; what has no fixed order is drawn from the generator it is given."""

    name: str
    line: str
    """For the list of scenarios."""
    text: str
    steps: Callable[[random.Random], tuple[Step, ...]]
    claims: bool = False
    """The node serves claims of GPUs: it has an API server, and a kernel that does what the daemon writes."""
    domains: bool = False
    """The node has compute domains: an API server, IMEX, and NVIDIA's controller."""
