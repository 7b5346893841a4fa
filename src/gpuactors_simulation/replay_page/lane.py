"""One row of the picture of a replay: bands and marks over time. Must not know their meaning."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from msgspec import Struct

BANDS_MAX: Final = 5_000
"""Of one lane; of one that changes more often, the last ones are kept."""


class Band(Struct, frozen=True):
    """From `began` to `ended` (seconds since the beginning) the status was `kind`, for the reason `text`."""

    began: float
    ended: float
    kind: str
    text: str


class Mark(Struct, frozen=True):
    """At `at` (seconds since the beginning) something of this `kind` happened; `text` describes it."""

    at: float
    kind: str
    text: str


@dataclass
class Lane:
    """One row of the picture."""

    name: str
    about: str = ""
    bands: deque[Band] = field(default_factory=lambda: deque(maxlen=BANDS_MAX))
    marks: deque[Mark] = field(default_factory=lambda: deque(maxlen=BANDS_MAX))
    _now: tuple[float, str, str] | None = None

    def is_now(self, at: float, kind: str, text: str) -> None:
        """From `at` on this is the status, until the next call."""
        if self._now is not None and self._now[1:] == (kind, text):
            return
        self.ends(at)
        self._now = (at, kind, text)

    def ends(self, at: float) -> None:
        """From `at` on nothing is known of it."""
        if self._now is not None:
            began, kind, text = self._now
            self.bands.append(Band(began, at, kind, text))
            self._now = None
