"""The claim reader: reads claims from the API server, as they are wanted, each number once.

Must not decide anything: that there is no such claim is an answer, and that the server does not answer is one as well.
"""

from __future__ import annotations

import trio

from gpuactors.actors.raises_only import raises_only
from gpuactors.concurrency.latest import LatestReader
from gpuactors.core.claims.outputs import ClaimsWanted, ReadWanted
from gpuactors.core.events import ClaimMissing, ClaimRead, ClaimUnreadable, Event
from gpuactors.core.values.claim import Claim, ClaimAbsent, ClaimReplaced, ClaimsOf
from gpuactors.ports.kube import ApiError, ClaimApi


async def run(
    wanted: LatestReader[ClaimsWanted],
    api: ClaimApi,
    inbox: trio.MemorySendChannel[Event],
    of: ClaimsOf,
) -> None:
    """Runs for ever. `of`: whose claims they are."""
    last = 0
    async with trio.open_nursery() as nursery:
        async for now in wanted:
            for read in now.reads:
                if read.number > last:
                    nursery.start_soon(_read, read, api, inbox, of)
            last = max(last, *(read.number for read in now.reads), 0)


async def _read(read: ReadWanted, api: ClaimApi, inbox: trio.MemorySendChannel[Event], of: ClaimsOf) -> None:
    try:
        with raises_only(ApiError, "claim_reader"):
            found = await api.read(read.claim)
    except ApiError as exc:
        await inbox.send(ClaimUnreadable(read.number, str(exc), of))
        return
    match found:
        case Claim():
            await inbox.send(ClaimRead(read.number, found, of))
        case ClaimAbsent():
            reason = f"the API server has no claim {read.claim}: it was deleted"
            await inbox.send(ClaimMissing(read.number, reason, of))
        case ClaimReplaced(uid):
            reason = f"the claim {read.claim} was replaced: it has UID {uid} now, not {read.claim.uid}"
            await inbox.send(ClaimMissing(read.number, reason, of))
