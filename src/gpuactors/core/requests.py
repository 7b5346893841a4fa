"""A request with a number: for a scan, an inspection, a read of kubelet's ledger, a poll of the groups' use, a look at
the node's label, a read of a compute domain.

One request of a kind is outstanding at a time. If it is requested again meanwhile, one more request follows when the
first is answered, as its answer may be from before. So every request gets an answer that was requested later. The
numbers of what is compared with each other come from one counter, so that their order shows which fact is newer: the
host and kubelet's ledger have one, each set of claims has one, and the label, the domains and IMEX have one. A read of
a claim, an act and a checkpoint are none of these: the state of the claim's entry says whether they are repeated.
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
    """The number of the request that is not answered yet."""
    again: bool = False
    """Another one is wanted once that is answered."""
    due_at: float = math.inf
    """When the next one is due by itself, in seconds of the core's clock."""

    def asked(self, number: int) -> Refresh:
        """After a request: outstanding with this number, or once more after the outstanding one. Nothing is due
        then."""
        if self.outstanding is not None:
            return replace(self, again=True, due_at=math.inf)
        return Refresh(number)

    def answered(self, due_at: float = math.inf) -> Refresh:
        """After the outstanding one was answered. If it was wanted again, the caller must request it."""
        return Refresh(due_at=due_at)

    def due_by(self, at: float) -> Refresh:
        """The next one is due at `at`, or earlier."""
        return self if self.due_at <= at else replace(self, due_at=at)

    @property
    def deadline(self) -> float:
        """When it is to be requested; infinite while one is outstanding."""
        return self.due_at if self.outstanding is None else math.inf


def asked(last: int, refresh: Refresh) -> tuple[int, Refresh]:
    """The last issued number and the refresh, after a request. A number is issued only if none is outstanding."""
    after = refresh.asked(last + 1)
    return (last if after.outstanding == refresh.outstanding else last + 1), after
