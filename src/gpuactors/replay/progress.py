"""The progress line of a replay: a month of a node takes minutes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Protocol

from gpuactors.replay.play import Moment
from gpuactors.replay.reading import Meter
from gpuactors.replay.words import count

_EVERY_S: Final = 0.5
"""The pause between two updates of the line, in seconds."""

_CLOCK_EVERY: Final = 64
"""The number of moments between two reads of the clock."""


class Line(Protocol):
    """The line that shows the progress."""

    def show(self, text: str) -> None:
        """Replace the line."""
        ...

    def clear(self) -> None:
        """Remove the line, before other output."""
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
        """Yield the moments, and show a progress line now and then."""
        for number, moment in enumerate(moments):
            if number % _CLOCK_EVERY == 0 and self._clock() >= self._next:
                self._next = self._clock() + _EVERY_S
                self._line.show(self._text(number))
            yield moment
        self._line.clear()

    def _text(self, number: int) -> str:
        done = 100 * self._meter.bytes_read // max(self._total, 1)
        return f"replayed {count(number, 'step')}, {min(done, 100)} % of {self._total / (1 << 20):.1f} MiB"
