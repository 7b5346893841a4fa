"""The progress of a replay, on standard error: a month of a node takes minutes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final, TextIO

from gpuactors.replay.play import Moment
from gpuactors.replay.reading import Meter
from gpuactors.replay.words import count

TERMINAL_EVERY_S: Final = 0.5
"""How often the line on a terminal is rewritten."""

LINE_EVERY_S: Final = 10.0
"""How often a line is written where standard error is no terminal."""

_CLOCK_EVERY: Final = 64
"""Moments between two reads of the clock."""


class Progress:
    """Writes a line now and then. A replay that is over soon writes none."""

    def __init__(
        self, meter: Meter, total_bytes: int, out: TextIO, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._meter = meter
        self._total = total_bytes
        self._out = out
        self._clock = clock
        self._terminal = out.isatty()
        self._every_s = TERMINAL_EVERY_S if self._terminal else LINE_EVERY_S
        self._next = clock() + self._every_s
        self._shown = False

    def over(self, moments: Iterable[Moment]) -> Iterator[Moment]:
        """The moments, with a progress line now and then."""
        for number, moment in enumerate(moments):
            if number % _CLOCK_EVERY == 0 and self._clock() >= self._next:
                self._next = self._clock() + self._every_s
                self._show(number)
            yield moment
        self.clear()

    def clear(self) -> None:
        """Removes the line from the terminal, before other output."""
        if self._shown:
            self._out.write("\r\x1b[K")
            self._out.flush()
            self._shown = False

    def _show(self, number: int) -> None:
        done = 100 * self._meter.bytes_read // max(self._total, 1)
        line = f"replayed {count(number, 'step')}, {min(done, 100)} % of {self._total / (1 << 20):.1f} MiB"
        self._out.write(f"\r\x1b[K{line}" if self._terminal else f"{line}\n")
        self._out.flush()
        self._shown = self._terminal
