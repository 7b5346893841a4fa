"""How a gRPC handler of DRA reaches the core: as in `caller.py`.

A file of its own: it names the values of claims, which a daemon without them does not import.
"""

from __future__ import annotations

from typing import final

from gpuactors.actors.caller import InboxCaller
from gpuactors.core.events.claims import PrepareAsked, UnprepareAsked
from gpuactors.core.values.claim import ClaimName, ClaimsOf, Prepared, Unprepared
from gpuactors.core.values.effects import Elsewhere, Refused


@final
class ClaimsCaller:
    """Asks about the claims of one DRA driver. Implements `relay.Core`."""

    def __init__(self, caller: InboxCaller, driver_kind: ClaimsOf) -> None:
        self._caller = caller
        self._driver_kind = driver_kind

    async def prepare(self, claim: ClaimName) -> Prepared | Refused | Elsewhere:
        answer = await self._caller.ask(
            "NodePrepareResources", lambda token: PrepareAsked(token, claim, self._driver_kind)
        )
        assert isinstance(answer, Prepared | Refused | Elsewhere), "the core's answer to a prepare"
        return answer

    async def unprepare(self, claim: ClaimName) -> Unprepared | Refused | Elsewhere:
        answer = await self._caller.ask(
            "NodeUnprepareResources", lambda token: UnprepareAsked(token, claim, self._driver_kind)
        )
        assert isinstance(answer, Unprepared | Refused | Elsewhere), "the core's answer to an unprepare"
        return answer
