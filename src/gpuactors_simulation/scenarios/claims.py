"""A GPU on its host's driver goes to one virtual machine after another by claims, and back to its driver."""

from __future__ import annotations

import random
from typing import Final

from gpuactors_simulation.expectations import Runs
from gpuactors_simulation.expectations_claims import (
    Found,
    NothingLeft,
    Offered,
    OnDriver,
    PreparedOn,
    WaitsFor,
)
from gpuactors_simulation.scenarios.parts import (
    AUDIO_DRIVER,
    HOST_DRIVER,
    VFIO,
    Act,
    end_claimed,
    end_process,
    h100s,
    start_claimed,
    start_node,
    with_audio,
)
from gpuactors_simulation.script import Scenario, Step
from gpuactors_simulation.world import World

_TEXT: Final = """
With Dynamic Resource Allocation a pod gets its GPU by a ResourceClaim. The node may use the GPU with its own driver
until then: it is bound to vfio-pci with its audio function when the claim is prepared, and both go back to their
drivers when it is unprepared.

Kubelet sends these calls in no order across claims. After a pod was deleted by force the prepare of its successor came
0.1 s later, and the unprepare of the old claim seconds after that; a driver that refuses such a prepare is asked again
after 60 to 90 s only, and one that rolls the old claim back takes the GPU from a virtual machine that runs.
"""

_RELEASED_S: Final = 120.0
"""Kubelet repeats a prepare that was refused after 60 to 90 s: it is refused if the step before was read for more than
35 s."""


def _steps(rng: random.Random) -> tuple[Step, ...]:
    gpus = with_audio(*h100s(2, HOST_DRIVER))
    first, second = (spec.address for spec in gpus if spec.class_code.startswith("03"))
    gpu, other = rng.sample([first, second], 2)
    at_home = OnDriver(gpu, HOST_DRIVER, AUDIO_DRIVER)
    other_at_home = OnDriver(other, HOST_DRIVER, AUDIO_DRIVER)
    both = Offered(frozenset({gpu, other}))
    return (
        Step(
            "The node starts with two H100s on the host's driver",
            "The device plugin lists neither, as no virtual machine could open one. Both are offered to claims.",
            start_node(*gpus),
            (Found(), both, at_home, other_at_home),
        ),
        Step(
            "A pod with a claim is started",
            "The claim is read from the API server, and that the GPU is its own is on disk before anything is "
            "touched. Then the GPU and its audio function are bound to vfio-pci, and the CDI file names the nodes "
            "that are there.",
            start_claimed("vm-1", gpu),
            (
                PreparedOn("vm-1-gpu", frozenset({gpu})),
                OnDriver(gpu, VFIO, VFIO),
                Runs("vm-1"),
                other_at_home,
                both,
            ),
        ),
        Step(
            "The pod is deleted by force, and its successor is given the same GPU",
            "The old virtual machine still runs and kubelet has not unprepared its claim. The prepare of the new "
            "claim waits in its call, and says for whom.",
            _replace_by_force("vm-1", "vm-2", gpu),
            (WaitsFor("vm-2-gpu", "vm-1-gpu"), OnDriver(gpu, VFIO, VFIO), other_at_home),
        ),
        Step(
            "The old virtual machine ends",
            "Kubelet unprepares the old claim: its GPU goes back to its driver. That wakes the prepare that waits, "
            "and the second virtual machine starts.",
            end_process("vm-1"),
            (
                PreparedOn("vm-2-gpu", frozenset({gpu})),
                OnDriver(gpu, VFIO, VFIO),
                Runs("vm-2"),
                other_at_home,
                both,
            ),
            _RELEASED_S,
        ),
        Step(
            "The second pod ends",
            "The GPU and its audio function are on the drivers that they had first in this boot.",
            end_claimed("vm-2"),
            (at_home, other_at_home, both, NothingLeft()),
        ),
    )


def _replace_by_force(old: str, new: str, gpu: str) -> Act:
    async def act(world: World) -> None:
        world.force_delete_pod(old)
        world.claims.delete(f"{old}-gpu")
        await start_claimed(new, gpu)(world)

    return act


CLAIMS: Final = Scenario(
    "claims",
    "A GPU on its host's driver is claimed, waited for, handed on and returned.",
    _TEXT,
    _steps,
    claims=True,
)
