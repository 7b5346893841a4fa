"""Many claims wait for an API server that refuses every request: the node asks it no more for many than for one."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
import trio.testing

from gpuactors import limits
from gpuactors.actors.api_retry import API_BACKOFF_S, API_READS_AT_ONCE
from gpuactors.core.values.claim import ClaimName
from gpuactors.core.values.effects import Refused
from gpuactors.ports.claims import ClaimCaller
from gpuactors_simulation.host.tree import PciSpec
from gpuactors_simulation.kube.server import ApiFault
from tests.claims_world import ClaimsWorld, prepared

CLAIMS = 40


@pytest.mark.parametrize("fault", [ApiFault.OVERLOADED, ApiFault.BROKEN])
def test_many_waiting_claims_ask_an_overloaded_server_as_one_does(fault: ApiFault, tmp_path: Path) -> None:
    cards = [
        PciSpec(f"0000:{n:02x}:00.0", "10de", "2330", "030200", n, driver="vfio-pci") for n in range(CLAIMS)
    ]
    world = ClaimsWorld(tmp_path, cards)
    claims = [world.claim(f"claim-{n}", card.address) for n, card in enumerate(cards)]
    reads: list[float] = []

    async def go() -> None:
        async with world.daemon() as caller:
            await trio.sleep(10)  # the slices are written
            before = len(world.api.requests)
            world.api.order(fault, 1_000_000, "GET")
            async with trio.open_nursery() as nursery:
                for claim in claims:
                    nursery.start_soon(_refused, caller, claim)
            reads.extend(range(before, len(world.api.requests)))
            world.api.end_faults()
            with trio.fail_after(2 * API_BACKOFF_S[-1]):
                async with trio.open_nursery() as nursery:
                    for claim in claims:
                        nursery.start_soon(prepared, caller, claim)

    trio.run(go, clock=trio.testing.MockClock(autojump_threshold=0))
    print(f"{len(reads)} requests in {limits.CLAIM_ANSWER_S:g} s for {CLAIMS} claims")
    # The first of each slot, then one after each wait.
    assert len(reads) < API_READS_AT_ONCE + 20


async def _refused(caller: ClaimCaller, claim: ClaimName) -> None:
    answer = await caller.prepare(claim)
    assert isinstance(answer, Refused)
    assert "ApiServerFailed" in answer.causes
