"""A daemon that is killed at every operation of a prepare and of an unprepare: what becomes of the claim and its GPU.

The operations are all that it writes: to the checkpoint, to CDI and metadata files (each write, sync, rename, removal)
and to sysfs. Each point is played with a kill, after which the node goes on, and with a power cut, after which what was
not synced is lost and the boot has given each function its driver again. `just test` plays one point in eight,
each time others; `just failures` all.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import pytest
import trio
import trio.testing

from gpuactors.core.values.claim import ClaimName
from gpuactors.ports.claims import ClaimCaller
from gpuactors_simulation.host.tree import PciSpec
from tests.claims_world import ClaimsWorld, crash_points, prepared, unprepared
from tests.memory.disk import StoppedError

GPU, AUDIO = "0000:23:00.0", "0000:23:00.1"

NODES: Final = {
    "on its host driver, with an audio companion": (
        PciSpec(GPU, "10de", "2330", "030200", 51, driver="nvidia"),
        PciSpec(AUDIO, "10de", "22ba", "040300", 51, driver="snd_hda_intel"),
    ),
    "pre-bound, with its companion on the host": (
        PciSpec(GPU, "10de", "2330", "030200", 51, driver="vfio-pci"),
        PciSpec(AUDIO, "10de", "22ba", "040300", 51, driver="snd_hda_intel"),
    ),
    "pre-bound": (PciSpec(GPU, "10de", "2330", "030200", 51, driver="vfio-pci"),),
}

Call = Callable[[ClaimCaller, ClaimName], Awaitable[object]]


def play(directory: Path, node: str, crashing: Call, then: Call, stop_at: int | None, *, cut: bool) -> bool:
    """One life with a crash, and one after it. Whether there was an operation to be killed at."""
    world = ClaimsWorld(directory, NODES[node])
    claim = world.claim("one", GPU)

    async def go() -> bool:
        with trio.fail_after(10_000):
            died = await _crashed(world, claim, crashing, stop_at)
            if died and cut:
                world.disk.power_cut()
                world.boot()
            async with world.daemon() as caller:
                await then(caller, claim)
                if then is prepared:
                    assert world.drivers[GPU] == "vfio-pci"
                    assert len([p for p in world.disk.files if p.startswith("/var/run/cdi/")]) == 2
                    await unprepared(caller, claim)
                assert world.drivers == world.at_home
                assert world.left_over() == []
                assert world.overrides() == []
        return died

    return trio.run(go, clock=trio.testing.MockClock(autojump_threshold=0))


async def _crashed(world: ClaimsWorld, claim: ClaimName, crashing: Call, stop_at: int | None) -> bool:
    """A daemon that does `crashing`, after what must come before it, and is killed at the operation `stop_at` of it."""
    try:
        async with world.daemon() as caller:
            if crashing is unprepared:
                await prepared(caller, claim)
            if stop_at is not None:
                world.disk.stop_at = len(world.disk.operations) + stop_at
            await crashing(caller, claim)
    except StoppedError:
        return True
    return False


@pytest.mark.parametrize("node", NODES)
@pytest.mark.parametrize("cut", [False, True], ids=["killed", "power cut"])
@pytest.mark.parametrize("then", [prepared, unprepared], ids=["then prepared", "then unprepared"])
@pytest.mark.parametrize("crashing", [prepared, unprepared], ids=["prepare", "unprepare"])
def test_a_crash_at_every_operation(
    node: str, crashing: Call, then: Call, *, cut: bool, tmp_path: Path
) -> None:
    played = 0
    for number in crash_points(4 * cut + 2 * (then is prepared) + list(NODES).index(node) % 2):
        directory = tmp_path / str(number)
        directory.mkdir()
        if not play(directory, node, crashing, then, number, cut=cut):
            break
        played += 1
    print(f"{played} crash points, and {number} operations at most")
    assert played
