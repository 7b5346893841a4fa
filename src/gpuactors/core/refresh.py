"""What is asked for by number: a scan, an inspection, a read of kubelet's ledger, a poll of the groups' use.

One request of a kind is outstanding at a time. What is asked for meanwhile is asked for once more when that is back, as
its answer may be from before: so whoever asks gets an answer that was asked for later. Must not give out numbers: those
of all kinds come from one counter, so that "known after" can be told across them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Refresh:
    """Where one such request stands."""

    outstanding: int | None = None
    """The number of the request that is not answered yet."""
    again: bool = False
    """Another one is wanted once that is answered."""
    due_at: float = math.inf
    """When the next one is due by itself, in seconds of the core's clock."""

    def asked(self, number: int) -> Refresh:
        """After it was asked for: with this number, or once more after the outstanding one. Nothing is due then."""
        if self.outstanding is not None:
            return replace(self, again=True, due_at=math.inf)
        return Refresh(number)

    def answered(self, due_at: float = math.inf) -> Refresh:
        """After the outstanding one was answered. Whether it was wanted again is the caller's to see to."""
        return Refresh(due_at=due_at)

    def due_by(self, at: float) -> Refresh:
        """The next one is due at that time, or before."""
        return self if self.due_at <= at else replace(self, due_at=at)

    @property
    def deadline(self) -> float:
        """When it is to be asked for; never while one is outstanding."""
        return self.due_at if self.outstanding is None else math.inf
