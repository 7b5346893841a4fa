"""Another plugin serves the same resource: it replaces the list, it leaves, and it was there first."""

from __future__ import annotations

import random
from typing import Final

from gpuactors import limits
from gpuactors_simulation.expectations import Counts, Runs
from gpuactors_simulation.scenarios.parts import H100, VFIO, Act, h100s, start_node, start_pods
from gpuactors_simulation.script import STEP_DEADLINE_S, Scenario, Step
from gpuactors_simulation.world import World

_TEXT: Final = """
Kubelet lets a second plugin register a resource that the first one serves, and does not inform the first one: its
stream stays open, but the list is the other's, and so is each Allocate. When the other leaves, the node has no GPU for
ever. Only kubelet's own list shows it, so the daemon reads that as well, and registers again where it is not its own.
"""

_HEALED_S: Final = (
    limits.LEDGER_QUIET_S + limits.KUBELET_LIST_AGAIN_S + limits.CONTEND_BACKOFF_S[1] + STEP_DEADLINE_S
)


def _steps(rng: random.Random) -> tuple[Step, ...]:
    other_ids = [str(rng.randrange(10, 99)), "100"]
    return (
        Step(
            "The node starts with four H100s",
            "",
            start_node(*h100s(4, VFIO)),
            (Counts(H100, 4, 4, 0),),
        ),
        Step(
            "Another plugin registers the same resource",
            "It lists two devices under IOMMU group numbers, as NVIDIA's sandbox plugin does. The daemon reports it "
            "in log, explain and inspect, and takes the resource back.",
            _taken(other_ids),
            (Counts(H100, 4, 4, 0),),
            _HEALED_S,
        ),
        Step(
            "A virtual machine starts",
            "Its Allocate goes to the daemon again.",
            start_pods({"vm-1": {H100: 1}}),
            (Counts(H100, 4, 4, 1), Runs("vm-1")),
        ),
        Step(
            "Another plugin registers the same resource, and leaves",
            "Kubelet takes every device for Unhealthy, and the daemon's stream is open all the time.",
            _taken_and_left(other_ids),
            (Counts(H100, 4, 4, 1), Runs("vm-1")),
            _HEALED_S,
        ),
        Step(
            "The other plugin is there before the daemon, and sends another list",
            "Each list replaces the one before, whichever plugin came first.",
            _there_first(other_ids),
            (Counts(H100, 4, 4, 1), Runs("vm-1")),
            _HEALED_S,
        ),
        Step(
            "One more virtual machine starts",
            "",
            start_pods({"vm-2": {H100: 2}}),
            (Counts(H100, 4, 4, 3), Runs("vm-2")),
        ),
    )


def _taken(other_ids: list[str]) -> Act:
    async def act(world: World) -> None:
        await world.start_other_plugin(H100, other_ids)

    return act


def _taken_and_left(other_ids: list[str]) -> Act:
    async def act(world: World) -> None:
        plugin = await world.start_other_plugin(H100, other_ids)
        plugin.leave()
        await world.until(lambda view: H100 not in view.connected, "kubelet has lost the other plugin")

    return act


def _there_first(other_ids: list[str]) -> Act:
    async def act(world: World) -> None:
        await world.stop_daemon()
        plugin = await world.start_other_plugin(H100, other_ids)
        await world.start_daemon()
        await world.until(lambda view: view.resources[H100].capacity == 4, "the daemon has registered")
        plugin.list([*other_ids, "101"])
        await world.until(lambda view: view.resources[H100].capacity == 3, "kubelet has the other list")

    return act


TWO_PLUGINS: Final = Scenario(
    "two-plugins",
    "Another plugin takes the resource, leaves, and is there first; it is taken back.",
    _TEXT,
    _steps,
)
