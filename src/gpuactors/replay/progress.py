"""How far a replay has come: a month of a node takes minutes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Protocol

from gpuactors.replay.play import Moment
from gpuactors.replay.reading import Meter
from gpuactors.replay.words import count

_EVERY_S: Final = 0.5
"""How often the line is written anew."""

_CLOCK_EVERY: Final = 64
"""Moments between two reads of the clock."""


class Line(Protocol):
    """Where the progress is shown: one line, which is written anew."""

    def show(self, text: str) -> None:
        """Replaces the line."""
        ...

    def clear(self) -> None:
        """Removes the line, before other output."""
        ...


class ReplayProgress:
    """Shows a line now and then. A replay that is over soon shows none."""

    def __init__(
        self, meter: Meter, total_bytes: int, line: Line, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._meter = meter
        self._total = total_bytes
        self._line = line
        self._clock = clock
        self._next = clock() + _EVERY_S

    def over(self, moments: Iterable[Moment]) -> Iterator[Moment]:
        """The moments, with a progress line now and then."""
        for number, moment in enumerate(moments):
            if number % _CLOCK_EVERY == 0 and self._clock() >= self._next:
                self._next = self._clock() + _EVERY_S
                self._line.show(self._said(number))
            yield moment
        self._line.clear()

    def _said(self, number: int) -> str:
        done = 100 * self._meter.bytes_read // max(self._total, 1)
        return f"replayed {count(number, 'step')}, {min(done, 100)} % of {self._total / (1 << 20):.1f} MiB"
