"""The claim reader: reads claims from the API server, as they are wanted.

Must not decide anything: that there is no such claim is an answer, and that the server does not answer is one as well.
"""

from __future__ import annotations

from functools import partial

import trio

from gpuactors.actors.api_retry import SharedReads
from gpuactors.actors.raises_only import raises_only
from gpuactors.concurrency.each_once import each_once
from gpuactors.concurrency.latest import LatestReader
from gpuactors.core.claims.outputs import ReadWanted
from gpuactors.core.events import Event
from gpuactors.core.events.claims import ClaimRead
from gpuactors.core.values.claim import Claim, ClaimAbsent, ClaimReplaced, ClaimsOf
from gpuactors.ports.kube import ApiError, ClaimApi


async def run(
    wanted: LatestReader[tuple[ReadWanted, ...]],
    api: ClaimApi,
    inbox: trio.MemorySendChannel[Event],
    driver_kind: ClaimsOf,
) -> None:
    """Run for ever. `driver_kind`: the DRA driver whose claims they are."""
    once = partial(_read, api=api, driver_kind=driver_kind, reads=SharedReads())
    # A claim that is wanted again does not wait for the answer to an earlier read, which may take API_REQUEST_S.
    await each_once(wanted, lambda now: {read.number: read for read in now}, once, inbox)


async def _read(_: int, read: ReadWanted, api: ClaimApi, driver_kind: ClaimsOf, reads: SharedReads) -> Event:
    try:
        with raises_only(ApiError, "claim_reader"):
            answer = await reads.ask(lambda: api.read(read.claim))
    except ApiError as exc:
        return ClaimRead(read.number, str(exc), driver_kind, retry_in_s=reads.retry_in_s())
    match answer:
        case Claim():
            return ClaimRead(read.number, answer, driver_kind)
        case ClaimAbsent():
            reason = f"the API server has no claim {read.claim}: it was deleted"
            return ClaimRead(read.number, reason, driver_kind, missing=True)
        case ClaimReplaced(uid):
            reason = f"the claim {read.claim} was replaced: it has UID {uid} now, not {read.claim.uid}"
            return ClaimRead(read.number, reason, driver_kind, missing=True)
