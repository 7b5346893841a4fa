"""GPUs that are bound to vfio-pci while the daemon runs."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Final

from gpuactors_simulation.expectations import Counts, Runs, Unknown, Waits
from gpuactors_simulation.scenarios.parts import (
    H100,
    HOST_DRIVER,
    VFIO,
    bind,
    h100s,
    start_node,
    start_pods,
)
from gpuactors_simulation.script import Scenario, Step
from gpuactors_simulation.world import World

_TEXT: Final = """
Four GPUs are on the host's own driver when the daemon starts, and are bound to vfio-pci one after another while a
virtual machine already waits for one.
"""


def _steps(rng: random.Random) -> tuple[Step, ...]:
    specs = h100s(4, HOST_DRIVER)
    first, *others = rng.sample([spec.address for spec in specs], 4)
    again = others[0]
    return (
        Step(
            "The daemon starts, and there is nothing for it to offer",
            "Four H100s are there, all bound to the host's driver. No resource is registered.",
            start_node(*specs),
            (Unknown(H100),),
        ),
        Step(
            "A virtual machine asks for a GPU",
            "No node has one, so it waits.",
            start_pods({"vm-1": {H100: 1}}),
            (Unknown(H100), Waits("vm-1")),
        ),
        Step(
            f"The first GPU is bound to vfio-pci ({first})",
            "The resource comes into being: a plugin serves, registers, and sends its first list. The "
            "waiting machine gets the GPU without any further action.",
            bind((first,)),
            (Counts(H100, 1, 1, 1), Runs("vm-1", frozenset({first}))),
        ),
        Step(
            "The other three follow",
            f"In the order {', '.join(others)}. The uevents come in bursts; what counts is what an inspection finds.",
            bind(tuple(others)),
            (Counts(H100, 4, 4, 1),),
        ),
        Step(
            "A virtual machine with two GPUs starts",
            "",
            start_pods({"vm-2": {H100: 2}}),
            (Counts(H100, 4, 4, 3), Runs("vm-2")),
        ),
        Step(
            "A GPU is unbound and bound again at once",
            "A free GPU goes from vfio-pci to the host's driver and back again, faster than an inspection. "
            "It is the same device under the same ID.",
            _there_and_back(again, tuple(others)),
            (Counts(H100, 4, 4, 3),),
        ),
    )


def _there_and_back(gpu: str, candidates: tuple[str, ...]) -> Callable[[World], Awaitable[None]]:
    async def act(world: World) -> None:
        used = {row.id for row in world.kubelet.view.devices if row.pod is not None}
        free = gpu if gpu not in used else next(a for a in candidates if a not in used)
        await world.bind(free, HOST_DRIVER)
        await world.bind(free, VFIO)

    return act


LATE_BINDING: Final = Scenario(
    "late-binding", "GPUs are bound to vfio-pci while the daemon runs and a pod waits.", _TEXT, _steps
)
