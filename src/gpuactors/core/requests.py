"""A request with a number: for a scan, an inspection, a read of kubelet's ledger, a poll of the groups' use, a read of
the node's label or of a compute domain.

One request of a kind is outstanding at a time. If it is made again meanwhile, one more request follows when the first
is answered, as that answer may be from before. So every request gets an answer that was requested later. Facts that are
compared with each other have numbers of one counter, so that their order shows which is newer: the host and kubelet's
ledger share a counter, each set of claims has one, and the label, the domains and IMEX share one. Reads of a claim,
acts and checkpoints are no such requests: the state of the claim's entry decides whether they are repeated.
"""

from __future__ import annotations

import math
from typing import TypeAlias

from msgspec import Struct
from msgspec.structs import replace

Failure: TypeAlias = str
"""Why a request failed, as a sentence. An answer has it in place of its result."""


class Refresh(Struct, frozen=True, gc=False):
    """The state of one such request."""

    outstanding: int | None = None
    """The number of the unanswered request; None without one."""
    again: bool = False
    """True if another request is wanted once that one is answered."""
    due_at: float = math.inf
    """When the next request is due by the clock, in seconds of the core's clock."""

    def asked(self, number: int) -> Refresh:
        """Request with this number, or once more after the outstanding request. Nothing is due by the clock then."""
        if self.outstanding is not None:
            return replace(self, again=True, due_at=math.inf)
        return Refresh(number)

    def answered(self, due_at: float = math.inf) -> Refresh:
        """End the outstanding request. If `again`, the caller must request once more."""
        return Refresh(due_at=due_at)

    def due_by(self, at: float) -> Refresh:
        """Make the next request due at `at` at the latest."""
        return self if self.due_at <= at else replace(self, due_at=at)

    @property
    def deadline(self) -> float:
        """When the next request is to be made; infinite while one is outstanding."""
        return self.due_at if self.outstanding is None else math.inf


def asked(last: int, refresh: Refresh) -> tuple[int, Refresh]:
    """Request, and return the last issued number and the refresh. A number is issued only if none is outstanding."""
    after = refresh.asked(last + 1)
    return (last if after.outstanding == refresh.outstanding else last + 1), after
