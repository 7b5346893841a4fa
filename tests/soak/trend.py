"""How fast something grows, from samples of processes that follow each other. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

WARM_UP_S: Final = 120.0
"""Of a process: what it imports and allocates in its first minutes is no growth."""

LONG_S: Final = 600.0
"""A process that has been observed for so long, warm-up left out, shows whether descriptors leak."""

MOST_GROWTH: Final = 4
"""Descriptors: a connection more than before may be open at any time."""

HOUR_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class Point:
    """One sample."""

    at_s: float
    """Since the soak began."""
    process: int
    """The PID."""
    value: float


def processes(points: Sequence[Point]) -> list[list[Point]]:
    """The samples of each process, in the order of their beginnings."""
    found: list[list[Point]] = []
    for before, point in pairwise((None, *points)):
        assert point is not None
        if before is None or before.process != point.process:
            found.append([])
        found[-1].append(point)
    return found


def warm(points: Sequence[Point]) -> list[list[Point]]:
    """The same, without each process's first `WARM_UP_S`."""
    cut = [[p for p in mine if p.at_s >= mine[0].at_s + WARM_UP_S] for mine in processes(points)]
    return [mine for mine in cut if len(mine) > 1]


def slope_an_hour(points: Sequence[Point]) -> float | None:
    """By how much the value grows in an hour: the least-squares line through the samples of all processes, with one
    slope and an intercept for each process. None where no process lived for longer than its warm-up."""
    above = below = 0.0
    for mine in warm(points):
        middle_s = sum(p.at_s for p in mine) / len(mine)
        mean = sum(p.value for p in mine) / len(mine)
        above += sum((p.at_s - middle_s) * (p.value - mean) for p in mine)
        below += sum((p.at_s - middle_s) ** 2 for p in mine)
    return HOUR_S * above / below if below else None


def leak(points: Sequence[Point]) -> str | None:
    """A sentence if the descriptors of a long-lived process leak: the fewest of its last third are more than the most
    of its first third by more than `MOST_GROWTH`. Work that comes and goes does not raise the fewest."""
    for mine in warm(points):
        length_s = mine[-1].at_s - mine[0].at_s
        if length_s < LONG_S:
            continue
        first = max(p.value for p in mine if p.at_s <= mine[0].at_s + length_s / 3)
        last = min(p.value for p in mine if p.at_s >= mine[-1].at_s - length_s / 3)
        if last > first + MOST_GROWTH:
            return (
                f"descriptors of process {mine[0].process} leak: at most {first:.0f} in the first third of "
                f"{length_s:.0f} s, at least {last:.0f} in the last"
            )
    return None
