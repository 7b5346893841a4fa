"""As `test_claims_crash.py`, for compute domains: a daemon that is killed at every operation of a prepare and of an
unprepare, of a channel, of a domain's daemon, and of both at once.

The operations are those of the disk (checkpoint, CDI files, the domain's directory) and the patches of the node's
label: each before the API server has it, and before the daemon knows that.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import pytest
import trio
import trio.testing

from gpuactors.core.domains.label import LABEL_LINGERS_S
from gpuactors.core.values.claim import ClaimName
from gpuactors.ports.claims import ClaimCaller
from tests.claims_world import crash_points, prepared, unprepared
from tests.domains_world import DomainsWorld
from tests.memory.disk import StoppedError

SETTLING_S: Final = LABEL_LINGERS_S + 1.0
"""Of the mock clock. The label goes some time after the end of its last claim is on disk; no answer waits for that."""

Call = Callable[[ClaimCaller, ClaimName], Awaitable[object]]
Claims = Callable[[DomainsWorld], tuple[ClaimName, ...]]

CRASHING: Final[dict[str, tuple[Claims, Claims]]] = {
    "channel": (lambda w: (w.daemon_s,), lambda w: (w.channel,)),
    "daemon": (lambda _: (), lambda w: (w.daemon_s,)),
    "channel and daemon": (lambda _: (), lambda w: (w.channel, w.daemon_s)),
}
"""The claims that are prepared before, and those of which the daemon is killed."""


async def at_once(call: Call, caller: ClaimCaller, claims: tuple[ClaimName, ...]) -> None:
    """Kubelet's calls for these claims, side by side."""
    async with trio.open_nursery() as nursery:
        for claim in claims:
            nursery.start_soon(call, caller, claim)


def play(directory: Path, of: str, crashing: Call, then: Call, stop_at: int | None, *, cut: bool) -> bool:
    """One life with a crash, and one after it. Whether there was an operation to be killed at."""
    world = DomainsWorld(directory)
    before, begun = (claims(world) for claims in CRASHING[of])

    async def go() -> bool:
        with trio.fail_after(10_000):
            died = await _crashed(world, before, begun, crashing, stop_at)
            if died and cut:
                world.disk.power_cut()
                world.boot()
            async with world.daemon() as caller:
                await at_once(then, caller, (*before, *begun))
                if then is prepared:
                    assert len(world.edits()) == 2 * len((*before, *begun))
                    assert world.directories() == (world.domain,)
                    assert world.label == (world.domain if world.channel in begun else None)
                    await at_once(unprepared, caller, (*before, *begun))
                await trio.sleep(SETTLING_S)
                assert world.label is None
                assert world.left_over() == []
                assert world.directories() == ()
        return died

    return trio.run(go, clock=trio.testing.MockClock(autojump_threshold=0))


async def _crashed(
    world: DomainsWorld,
    before: tuple[ClaimName, ...],
    begun: tuple[ClaimName, ...],
    crashing: Call,
    stop_at: int | None,
) -> bool:
    """A daemon that does `crashing`, after what must come before it, and is killed at the operation `stop_at` of it."""
    try:
        async with world.daemon() as caller:
            await at_once(prepared, caller, before if crashing is prepared else (*before, *begun))
            if stop_at is not None:
                world.disk.stop_at = len(world.disk.operations) + stop_at
            await at_once(crashing, caller, begun)
            await trio.sleep(SETTLING_S)
    except StoppedError:
        return True
    return False


@pytest.mark.parametrize("of", CRASHING)
@pytest.mark.parametrize("cut", [False, True], ids=["killed", "power cut"])
@pytest.mark.parametrize("then", [prepared, unprepared], ids=["then prepared", "then unprepared"])
@pytest.mark.parametrize("crashing", [prepared, unprepared], ids=["prepare", "unprepare"])
def test_a_crash_at_every_operation_and_every_patch(
    of: str, crashing: Call, then: Call, *, cut: bool, tmp_path: Path
) -> None:
    played = 0
    for number in crash_points(4 * cut + 2 * (then is prepared) + list(CRASHING).index(of) % 2):
        directory = tmp_path / str(number)
        directory.mkdir()
        if not play(directory, of, crashing, then, number, cut=cut):
            break
        played += 1
    print(f"{played} crash points, and {number} operations at most")
    assert played
