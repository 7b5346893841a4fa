"""How long a test waits on this machine: bounds follow its speed, not its clock.

A bound of a test ends a wait for what never comes. On a machine with seven times the work that it has cores for, what
comes takes ten times as long, and is as right as ever. So each bound is given for a quiet machine and multiplied by how
much slower this one is, measured once in each process. What is asserted is never made wider by it. Must import the
standard library alone: the guests of the virtual machine measure themselves with it as well.
"""

from __future__ import annotations

import functools
import os
import time
from typing import Final

QUIET_TURN_S: Final = 0.001
"""What `_turn` takes on a quiet core (AMD EPYC, Python 3.11). In another place where this is what is usual, an emulated
guest for one, `TEST_TURN_S` in the environment says what it takes there."""

TURNS: Final = 40
"""Turns of one measurement, with the processor given away after each: 40 ms on a quiet machine."""

ROOM: Final = 2.0
"""A machine that is busy now may be twice as busy in a minute."""

QUIET_BELOW: Final = 1.5
"""A machine is quiet up to so many times the usual duration: clock rates and other Pythons differ as much."""


def _turn() -> None:
    total = 0
    for number in range(20_000):
        total += number * number % 7


@functools.cache
def slowness() -> float:
    """How many times longer than usual everything takes here, as it was when this process first asked; at least 1."""
    began = time.perf_counter()
    for _ in range(TURNS):
        _turn()
        time.sleep(0)
    usual_s = float(os.environ.get("TEST_TURN_S", QUIET_TURN_S))
    measured = (time.perf_counter() - began) / (TURNS * usual_s)
    return max(1.0, measured, os.getloadavg()[0] / (os.cpu_count() or 1))


def patient(seconds: float) -> float:
    """A bound for this machine, from one for a quiet machine."""
    return seconds * (1.0 if slowness() < QUIET_BELOW else ROOM * slowness())
