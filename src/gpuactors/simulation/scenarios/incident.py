"""The incident that gpuactors answers, step by step, with the books as they should have been."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Final

from gpuactors.simulation.expectations import Books, Runs, Waits
from gpuactors.simulation.scenarios.parts import (
    B200,
    H100,
    HOST_DRIVER,
    VFIO,
    bind,
    end_pod,
    gpu,
    h100s,
    plug,
    start_node,
    start_pods,
)
from gpuactors.simulation.script import Scenario, Step
from gpuactors.simulation.world import World

_TEXT: Final = """
A server has eight GPUs for virtual machines. Six are in use. Two more are handed over to vfio-pci while everything
runs, and from there on, in the field, each attempt to make them known to Kubernetes made the books worse: GPUs that
were in use were given out a second time, then nothing could be scheduled at all (free: 2 - 6 = -4), and one virtual
machine was down for three days. Here the same things happen to gpuactors.

Capacity is all GPUs that kubelet lists, allocatable the Healthy ones, allocated what the pods on the node ask for,
and free is allocatable minus allocated: what the scheduler believes it may still hand out.

What this version does not do yet: find out that somebody whom kubelet does not know holds a GPU. A GPU is Unhealthy
here for what its driver, its IOMMU group and its device node show, never for being busy.
"""


def _steps(rng: random.Random) -> tuple[Step, ...]:
    specs = h100s(8, VFIO)
    late = tuple(sorted(rng.sample([spec.address for spec in specs], 2)))
    bound_later = rng.sample(late, 2)
    at_boot = [s for s in specs if s.address not in late]
    not_yet = [s for s in h100s(8, HOST_DRIVER) if s.address in late]
    on_boot = rng.sample([*at_boot, *not_yet], 8)
    ends = f"vm-{rng.randint(1, 6)}"
    b200 = gpu("0000:63:00.0", "2901", 61, VFIO)
    return (
        Step(
            "The daemon starts on a node with six GPUs on vfio-pci",
            f"Eight H100s are there. Six are bound to vfio-pci; {' and '.join(late)} still belong to the "
            "host's own driver and are not offered.",
            start_node(*on_boot),
            (Books(H100, 6, 6, 0),),
        ),
        Step(
            "Six virtual machines start",
            "Each asks for one GPU. An allocated GPU stays Healthy: it is counted once, in allocated.",
            start_pods({f"vm-{n}": {H100: 1} for n in range(1, 7)}),
            (Books(H100, 6, 6, 6), *(Runs(f"vm-{n}") for n in range(1, 7))),
        ),
        Step(
            "Two GPUs are bound to vfio-pci late",
            "In the field the plugin looked once, at its start: these two stayed invisible until somebody "
            "restarted it. Here the kernel's uevents lead to a look at just these functions.",
            bind(tuple(bound_later)),
            (Books(H100, 8, 8, 6),),
        ),
        Step(
            "The daemon is restarted",
            "In the field the restart was the way to see new GPUs, and it broke the books. One fork left "
            "out the GPUs that were busy: capacity 2, allocated 6, free -4. The next one listed them as "
            "Unhealthy: capacity 8, allocatable 2, free -4 again. Both count the same six GPUs twice.",
            _restart_daemon,
            (Books(H100, 8, 8, 6),),
        ),
        Step(
            "A virtual machine starts",
            "In the field it stayed Pending at free -4; before that, with the books broken in the restart's "
            "gap, a GPU in use was handed out again (Could not open '/dev/vfio/51': Device or resource "
            "busy).",
            start_pods({"vm-7": {H100: 1}}),
            (Books(H100, 8, 8, 7), Runs("vm-7")),
        ),
        Step(
            "Kubelet is restarted",
            "Kubelet removes every socket in its directory and knows no device until the plugin registers "
            "again. It never calls the plugin by itself: in the field a plugin that missed this stayed at "
            "allocatable 0.",
            _restart_kubelet,
            (Books(H100, 8, 8, 7),),
        ),
        Step(
            f"A virtual machine ends ({ends})",
            "In the field its GPU stayed marked as busy, because nothing ever published the release. There "
            "is nothing to publish: the GPU was Healthy all the time, and kubelet knows that it is free.",
            end_pod(ends),
            (Books(H100, 8, 8, 6),),
        ),
        Step(
            "A virtual machine with two GPUs starts",
            "It gets the two that are free. In the field the plugin's last version swapped a GPU for "
            "another one behind kubelet's back when it took it for busy. Here what the container is told is "
            "what kubelet's ledger says.",
            start_pods({"vm-8": {H100: 2}}),
            (Books(H100, 8, 8, 8), Runs("vm-8")),
        ),
        Step(
            "One more has to wait",
            "The node is full, and the books say so: free is 0.",
            start_pods({"vm-9": {H100: 1}}),
            (Books(H100, 8, 8, 8), Waits("vm-9")),
        ),
        Step(
            "A virtual machine ends, and the waiting one starts (vm-7, vm-9)",
            "The GPU that was set free is the one that the waiting machine gets.",
            end_pod("vm-7"),
            (Books(H100, 8, 8, 8), Runs("vm-9")),
        ),
        Step(
            "A GPU of a model never seen here is plugged in",
            "In the field a new model needed a restart. Here a plugin for it starts to serve and registers "
            "within the life of the process; the other model's books do not move.",
            plug(b200),
            (Books(H100, 8, 8, 8), Books(B200, 1, 1, 0)),
        ),
        Step(
            "A virtual machine starts on it",
            "It asks for the new resource by its name.",
            start_pods({"vm-10": {B200: 1}}),
            (Books(B200, 1, 1, 1), Runs("vm-10", frozenset({b200.address}))),
        ),
        Step(
            "It ends, and the GPU is pulled",
            "The list is empty, not stale, and stays registered for a while in case the GPU comes back. "
            "(Right after a call the list keeps its devices for a second: kubelet 1.36 crashes if the one "
            "it has just chosen vanishes.)",
            _end_and_pull("vm-10", b200.address),
            (Books(H100, 8, 8, 8), Books(B200, 0, 0, 0)),
        ),
        Step(
            "Kubelet and the daemon are restarted together",
            "As after an upgrade of the node's software, with eight GPUs in use.",
            _restart_both,
            (Books(H100, 8, 8, 8),),
        ),
    )


async def _restart_daemon(world: World) -> None:
    await world.restart_daemon()


async def _restart_kubelet(world: World) -> None:
    await world.kubelet.stop()
    await world.kubelet.start()


async def _restart_both(world: World) -> None:
    await world.kubelet.stop()
    await world.restart_daemon()
    await world.kubelet.start()


def _end_and_pull(pod: str, address: str) -> Callable[[World], Awaitable[None]]:
    async def act(world: World) -> None:
        world.end_pod(pod)
        await world.unplug(address)

    return act


INCIDENT: Final = Scenario(
    "incident", "The whole story of the field: late binding, restarts, pods that come and go.", _TEXT, _steps
)
