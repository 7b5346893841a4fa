"""Dead GPUs on a whole node: no pod gets one, none is counted twice, and one that is enumerated again is back.

The real daemon, its readers and a tree of sysfs, and the fake kubelet, on trio's mock clock.
"""

from __future__ import annotations

from pathlib import Path
from typing import final

import pytest
import trio
from msgspec.structs import replace
from trio.testing import MockClock

from gpuactors.control.dead_signs import FILE_NAME, dead_signs_json
from gpuactors.core.values.dead_signs import DeadSigns
from gpuactors.replay.counts import Counts
from gpuactors_simulation.kubelet.values import Phase
from tests.histories.trace import Trace
from tests.histories.world import MODEL, MODELS, World, open_world
from tests.support.patience import patient

GPU = MODELS[MODEL]
WITHIN_S = patient(30.0)
DEAD_WITHIN_S = 2.0
"""On the mock clock: from a fatal error to kubelet."""


async def counted(world: World, counts: Counts, within_s: float = WITHIN_S) -> None:
    with trio.fail_after(within_s):
        await world.kubelet.until(lambda view: view.resources.get(GPU) == counts)


async def plugged_below_a_port(world: World) -> str:
    """The first GPU is plugged in again, directly below a root port; returns its address."""
    await counted(world, Counts(3, 3, 0))
    address = world.address(0)
    world.tell(world.tree.unplug(address))
    await counted(world, Counts(2, 2, 0))
    below_port = replace(world.card(0, MODEL, "vfio-pci"), bridges=("0000:20:01.0",))
    world.tell(world.tree.plug(below_port))
    await counted(world, Counts(3, 3, 0))
    return address


async def admitted(world: World, count: int) -> list[Phase]:
    """Submit so many pods of one GPU each, and return their phases a minute later."""
    for number in range(count):
        world.kubelet.submit(f"vm-{number}", {GPU: 1})
    await trio.sleep(60.0)
    return sorted((pod.phase for pod in world.kubelet.view.pods.values()), reverse=True)


@pytest.mark.trio
async def test_a_gpu_with_a_fatal_error_is_out_in_two_seconds_and_back_when_it_is_enumerated_again(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path, 1, Trace()) as world:
        await counted(world, Counts(3, 3, 0))
        dead = world.address(0)
        world.tell(world.tree.fail_fatally(dead))
        await counted(world, Counts(3, 2, 0), DEAD_WITHIN_S)
        for name in ("vm-1", "vm-2", "vm-3"):
            world.kubelet.submit(name, {GPU: 1})
        await counted(world, Counts(3, 2, 2))
        await trio.sleep(60.0)
        assert sorted(pod.phase for pod in world.kubelet.view.pods.values()) == sorted(
            [Phase.RUNNING, Phase.RUNNING, Phase.PENDING]
        )
        world.tell(world.tree.unplug(dead))
        world.tell(world.tree.plug(world.card(0, MODEL, "vfio-pci")))
        await counted(world, Counts(3, 3, 3))
        assert world.kubelet.double_handouts == []


@pytest.mark.trio
async def test_a_gpu_whose_fatal_error_only_the_port_above_counts_is_out_in_two_seconds(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path, 1, Trace()) as world:
        dead = await plugged_below_a_port(world)
        world.tell(world.tree.fail_fatally(dead, by_port=True))
        await counted(world, Counts(3, 2, 0), DEAD_WITHIN_S)
        await trio.sleep(600.0)
        assert world.kubelet.view.resources[GPU] == Counts(3, 2, 0), "it is not back by itself"


SIGNS = ("counted", "port", "silent")


async def died(world: World, sign: str) -> str:
    """A GPU shows this sign, is out, and shows nothing any more if nothing keeps it; returns its address."""
    dead = await plugged_below_a_port(world)
    if sign == "silent":
        world.tree.fall_silent(dead)
        world.tell((world.tree.recovery_begins(dead),))
    else:
        world.tell(world.tree.fail_fatally(dead, by_port=sign == "port"))
    await counted(world, Counts(3, 2, 0))
    world.tree.answer_again(dead)
    return dead


async def restart(world: World) -> None:
    await world.kill_daemon(world.daemons[0], 0)
    await world.start_daemon()


@pytest.mark.trio
@pytest.mark.parametrize("sign", SIGNS)
async def test_a_restarted_daemon_does_not_offer_a_dead_gpu(
    sign: str, tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path, 1, Trace()) as world:
        await died(world, sign)
        for _ in range(2):
            await restart(world)
            await trio.sleep(60.0)
        assert await admitted(world, 3) == [Phase.RUNNING, Phase.RUNNING, Phase.PENDING]
        assert world.kubelet.view.resources[GPU] == Counts(3, 2, 2)


@pytest.mark.trio
@pytest.mark.parametrize("sign", SIGNS)
async def test_a_dead_gpu_that_is_enumerated_again_while_no_daemon_runs_is_back(
    sign: str, tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path, 1, Trace()) as world:
        dead = await died(world, sign)
        await world.kill_daemon(world.daemons[0], 0)
        spec = world.tree.functions[dead]
        world.tree.unplug(dead)
        world.tree.plug(spec)
        await world.start_daemon()
        await counted(world, Counts(3, 3, 0))
        assert await admitted(world, 3) == [Phase.RUNNING] * 3
        assert await world.dead_signs.read() == {}


@pytest.mark.trio
async def test_a_successor_does_not_offer_what_its_predecessor_saw_dead(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path, 1, Trace()) as world:
        await died(world, "silent")
        await world.start_daemon()
        await trio.sleep(60.0)
        assert len(world.daemons) == 2
        await world.kill_daemon(world.daemons[0], 0)
        assert await admitted(world, 3) == [Phase.RUNNING, Phase.RUNNING, Phase.PENDING]


@final
class FileOfSigns:
    """The real file, read and written without threads. Implements `ports.node.DeadSignsFile`."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / FILE_NAME
        self.boot = "one"

    async def read(self) -> DeadSigns:
        await trio.lowlevel.checkpoint()
        return dead_signs_json(str(self.path.parent), self.boot).read_here()

    async def write(self, signs: DeadSigns, /) -> None:
        await trio.lowlevel.checkpoint()
        dead_signs_json(str(self.path.parent), self.boot).write_here(signs)


@pytest.mark.trio
@pytest.mark.parametrize(
    ("state_of_file", "counts"),
    [("whole", Counts(3, 2, 0)), ("of another boot", Counts(3, 3, 0)), ("broken", Counts(3, 3, 0))],
)
async def test_only_a_whole_file_of_this_boot_says_what_is_dead(
    state_of_file: str, counts: Counts, tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path, 1, Trace()) as world:
        world.dead_signs = file = FileOfSigns(tmp_path)
        await restart(world)
        await died(world, "silent")
        await world.kill_daemon(world.daemons[0], 0)
        if state_of_file == "of another boot":
            file.boot = "two"
        elif state_of_file == "broken":
            file.path.write_bytes(b'{"boot": "one", "functions": {"0000:')
        await world.start_daemon()
        await trio.sleep(60.0)
        assert world.kubelet.view.resources[GPU] == counts
        assert len(await file.read()) == (counts == Counts(3, 2, 0)), "it is whole again"


@pytest.mark.trio
async def test_a_gpu_that_falls_silent_without_any_event_is_refused_and_then_unhealthy(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path, 1, Trace()) as world:
        await counted(world, Counts(3, 3, 0))
        for slot in range(3):
            world.tree.fall_silent(world.address(slot))
        pod = await world.kubelet.admit("vm-1", {GPU: 1})
        assert pod.phase is Phase.FAILED
        assert "does not answer" in pod.message
        await counted(world, Counts(3, 2, 0))


@pytest.mark.trio
async def test_an_allocated_gpu_that_dies_is_subtracted_once_before_and_after_its_pod_ends(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with open_world(tmp_path, 1, Trace()) as world:
        await counted(world, Counts(3, 3, 0))
        assert (await world.kubelet.admit("vm-1", {GPU: 1})).phase is Phase.RUNNING
        await counted(world, Counts(3, 3, 1))
        (dead,) = (row.id for row in world.kubelet.view.devices if row.pod is not None)
        world.tell(world.tree.fail_fatally(dead))
        await trio.sleep(60.0)
        assert world.kubelet.view.resources[GPU] == Counts(3, 3, 1)
        world.kubelet.delete("vm-1")
        await counted(world, Counts(3, 2, 0))


@pytest.mark.trio
@pytest.mark.parametrize("state", ["D3hot", "D3cold"])
async def test_a_suspended_gpu_is_well(state: str, tmp_path: Path, autojump_clock: MockClock) -> None:
    async with open_world(tmp_path, 1, Trace()) as world:
        await counted(world, Counts(3, 3, 0))
        for slot in range(3):
            world.tree.suspend(world.address(slot), state)
        assert (await world.kubelet.admit("vm-1", {GPU: 3})).phase is Phase.RUNNING
        await trio.sleep(600.0)
        assert world.kubelet.view.resources[GPU] == Counts(3, 3, 3)
