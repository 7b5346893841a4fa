"""What may come after a daemon that has handed over its claims."""

from __future__ import annotations

from dataclasses import dataclass, field

import trio

from gpuactors.core.values.claim import ClaimName, Prepared, Unprepared
from gpuactors.core.values.effects import Refused


@dataclass
class FakeSuccessor:
    """Answers in turn what a test has set, and then that nobody is there. Implements `ports.claims.Successor`."""

    prepared: list[Prepared | Refused | None] = field(default_factory=list)
    unprepared: list[Unprepared | Refused | None] = field(default_factory=list)
    asked: list[tuple[float, str, ClaimName]] = field(default_factory=list)
    """When, what, and about which claim."""

    async def prepare(self, claim: ClaimName) -> Prepared | Refused | None:
        await trio.lowlevel.checkpoint()
        self.asked.append((trio.current_time(), "prepare", claim))
        return self.prepared.pop(0) if self.prepared else None

    async def unprepare(self, claim: ClaimName) -> Unprepared | Refused | None:
        await trio.lowlevel.checkpoint()
        self.asked.append((trio.current_time(), "unprepare", claim))
        return self.unprepared.pop(0) if self.unprepared else None
