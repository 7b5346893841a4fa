"""The incident that gpuactors answers, step by step, with the counts as they should have been."""

from __future__ import annotations

import random
from typing import Final

from msgspec.structs import replace

from gpuactors_simulation.expectations import (
    Counts,
    HeldByExternal,
    HeldUp,
    NobodyRefused,
    Orphaned,
    Runs,
    Waits,
)
from gpuactors_simulation.kubelet.values import Phase
from gpuactors_simulation.scenarios.parts import (
    B200,
    H100,
    HOST_DRIVER,
    VFIO,
    Act,
    bind,
    end_pod,
    end_process,
    force_delete,
    gpu,
    h100s,
    plug,
    release,
    start_node,
    start_pods,
    take_free,
)
from gpuactors_simulation.script import Scenario, Step
from gpuactors_simulation.world import World

_TEXT: Final = """
A server has eight GPUs for virtual machines. Six are in use. Two more are bound to vfio-pci while everything runs, and
from there on, in the field, each attempt to make them known to Kubernetes made the counts worse: GPUs in use were
allocated a second time, then nothing could be scheduled at all (free: 2 - 6 = -4), and one virtual machine was down for
three days. Here the same things happen to gpuactors.

Capacity is all GPUs that kubelet lists, allocatable the Healthy ones, allocated what the pods on the node ask for,
and free is allocatable minus allocated: what the scheduler takes for free.

Every virtual machine really has its GPU's IOMMU group open, and a second opener gets EBUSY. A GPU that is held by the
pod that kubelet allocated it to stays Healthy. One that is held by another process is Unhealthy, the reason names the
process, and it is Healthy again as soon as that process closes it.
"""

_EXTERNAL: Final = (1717, "python3")
"""PID and name of an external process."""


def _steps(rng: random.Random) -> tuple[Step, ...]:
    """Each step ends with a check that no pod was ever refused (UnexpectedAdmissionError)."""
    return tuple(replace(step, expect=(*step.expect, NobodyRefused())) for step in _story(rng))


def _story(rng: random.Random) -> tuple[Step, ...]:
    specs = h100s(8, VFIO)
    late = tuple(sorted(rng.sample([spec.address for spec in specs], 2)))
    bound_later = rng.sample(late, 2)
    at_boot = [s for s in specs if s.address not in late]
    not_yet = [s for s in h100s(8, HOST_DRIVER) if s.address in late]
    on_boot = rng.sample([*at_boot, *not_yet], 8)
    ends, forced = (f"vm-{n}" for n in rng.sample(range(1, 7), 2))
    b200 = gpu("0000:63:00.0", "2901", 61, VFIO)
    return (
        Step(
            "The daemon starts on a node with six GPUs on vfio-pci",
            f"Eight H100s are there. Six are bound to vfio-pci; {' and '.join(late)} still belong to the "
            "host's own driver and are not offered.",
            start_node(*on_boot),
            (Counts(H100, 6, 6, 0),),
        ),
        Step(
            "Six virtual machines start",
            "Each asks for one GPU. An allocated GPU stays Healthy: it is counted once, in allocated.",
            start_pods({f"vm-{n}": {H100: 1} for n in range(1, 7)}),
            (Counts(H100, 6, 6, 6), *(Runs(f"vm-{n}") for n in range(1, 7))),
        ),
        Step(
            "Two GPUs are bound to vfio-pci late",
            "In the field the plugin scanned once, at its start: these two stayed invisible until it was "
            "restarted. Here the kernel's uevents lead to an inspection of just these functions.",
            bind(tuple(bound_later)),
            (Counts(H100, 8, 8, 6),),
        ),
        Step(
            "The daemon is restarted",
            "In the field the restart was the way to see new GPUs, and it made the counts wrong. One fork "
            "left out the GPUs in use: capacity 2, allocated 6, free -4. The next one listed them as "
            "Unhealthy: capacity 8, allocatable 2, free -4 again. Both count the same six GPUs twice.",
            _restart_daemon,
            (Counts(H100, 8, 8, 6),),
        ),
        Step(
            "The daemon is upgraded",
            "A new one starts beside it, reads kubelet's ledger, polls all groups, and only then asks the "
            "old one to end its streams. The gap in kubelet's list is tens of milliseconds.",
            _upgrade_daemon,
            (Counts(H100, 8, 8, 6),),
        ),
        Step(
            "A virtual machine starts",
            "In the field it stayed Pending at free -4; before that, with the counts wrong in the restart's "
            "gap, a GPU in use was allocated again (Could not open '/dev/vfio/51': Device or resource "
            "busy).",
            start_pods({"vm-7": {H100: 1}}),
            (Counts(H100, 8, 8, 7), Runs("vm-7")),
        ),
        Step(
            f"A virtual machine ends ({ends})",
            "In the field its GPU stayed marked as in use, because its release was never published. Here "
            "there is nothing to publish: the GPU was Healthy all the time, and kubelet knows that it is free.",
            end_pod(ends),
            (Counts(H100, 8, 8, 6),),
        ),
        Step(
            f"A pod is deleted by force, and its virtual machine lives on ({forced})",
            "Kubelet forgets the pod within milliseconds and counts its GPU as free; QEMU still has it open. "
            "Nothing announces that: the daemon finds it when it reads kubelet's ledger again, at the latest "
            "after 5 s, and the reason names the pod and the process that it left behind.",
            force_delete(forced),
            (Counts(H100, 8, 7, 5), Orphaned(forced)),
        ),
        Step(
            "That virtual machine ends",
            "In the field a release was never seen, and the GPU stayed away until the plugin was restarted. "
            "Here it is Healthy again within a fraction of a second.",
            end_process(forced),
            (Counts(H100, 8, 8, 5),),
        ),
        Step(
            "Two virtual machines start, one of them with two GPUs",
            "They get the three that are free. In the field the plugin's last version gave the container "
            "another GPU than kubelet had chosen when it took that one for in use. Here the container gets "
            "what kubelet's ledger says.",
            start_pods({"vm-8": {H100: 2}, "vm-9": {H100: 1}}),
            (Counts(H100, 8, 8, 8), Runs("vm-8"), Runs("vm-9")),
        ),
        Step(
            "One more has to wait",
            "The node is full, and the counts show it: free is 0.",
            start_pods({"vm-10": {H100: 1}}),
            (Counts(H100, 8, 8, 8), Waits("vm-10")),
        ),
        Step(
            "A pod is deleted by force, and kubelet gives its GPU to the waiting one (vm-7, vm-10)",
            "The old virtual machine still has the GPU open. In the field the new one failed (Device or "
            "resource busy). Here PreStartContainer does not return before the old process has ended; for "
            "kubelet the GPU is allocated, and so it is Healthy.",
            _hand_on("vm-7", "vm-10"),
            (Counts(H100, 8, 8, 8), HeldUp("vm-10")),
        ),
        Step(
            "The old virtual machine ends, and the new one starts",
            "The call returns as soon as the group is free. No GPU had two owners.",
            end_process("vm-7"),
            (Counts(H100, 8, 8, 8), Runs("vm-10")),
        ),
        Step(
            "A virtual machine ends (vm-9)",
            "One GPU is free.",
            end_pod("vm-9"),
            (Counts(H100, 8, 8, 7),),
        ),
        Step(
            "An external process opens the free GPU",
            f"A {_EXTERNAL[1]} that was started on the host opens it. Kubelet allocated it to no pod, so it is "
            "Unhealthy, and the reason names the process. The seven in use stay Healthy.",
            take_free(H100, *_EXTERNAL),
            (Counts(H100, 8, 7, 7), HeldByExternal(*_EXTERNAL)),
        ),
        Step(
            "A virtual machine asks for a GPU",
            "It waits: no GPU is allocated that it could not open, and it is not refused either.",
            start_pods({"vm-11": {H100: 1}}),
            (Counts(H100, 8, 7, 7), Waits("vm-11"), HeldByExternal(*_EXTERNAL)),
        ),
        Step(
            "The external process closes it",
            "No restart, no uevent: the GPU is Healthy again, and the waiting machine gets it.",
            release(_EXTERNAL[0]),
            (Counts(H100, 8, 8, 8), Runs("vm-11")),
        ),
        Step(
            "Kubelet is restarted",
            "Kubelet removes every socket in its directory and knows no device until the plugin registers "
            "again. It never calls the plugin first: in the field a plugin that missed this stayed at "
            "allocatable 0.",
            _restart_kubelet,
            (Counts(H100, 8, 8, 8),),
        ),
        Step(
            "A GPU of a model never seen here is plugged in",
            "In the field a new model needed a restart. Here a plugin for it starts to serve and registers "
            "in the running process; the other model's counts stay.",
            plug(b200),
            (Counts(H100, 8, 8, 8), Counts(B200, 1, 1, 0)),
        ),
        Step(
            "A virtual machine starts on it",
            "It asks for the new resource by its name.",
            start_pods({"vm-12": {B200: 1}}),
            (Counts(B200, 1, 1, 1), Runs("vm-12", frozenset({b200.address}))),
        ),
        Step(
            "It ends, and the GPU is unplugged",
            "The list is empty, not stale, and stays registered for a while in case the GPU comes back. "
            "(Right after a call the list keeps its devices for a second: kubelet 1.36 crashes if the one "
            "it has just chosen vanishes.)",
            _end_and_pull("vm-12", b200.address),
            (Counts(H100, 8, 8, 8), Counts(B200, 0, 0, 0)),
        ),
        Step(
            "Kubelet and the daemon are restarted together",
            "As after an upgrade of the node's software, with eight GPUs in use.",
            _restart_both,
            (Counts(H100, 8, 8, 8),),
        ),
    )


async def _restart_daemon(world: World) -> None:
    await world.restart_daemon()


async def _upgrade_daemon(world: World) -> None:
    await world.upgrade_daemon()


async def _restart_kubelet(world: World) -> None:
    await world.kubelet.stop()
    await world.kubelet.start()


async def _restart_both(world: World) -> None:
    await world.kubelet.stop()
    await world.restart_daemon()
    await world.kubelet.start()


def _hand_on(ended_pod: str, waiting: str) -> Act:
    """The next pod gets the GPU while the old machine lives, and the daemon has polled its group several times."""

    async def act(world: World) -> None:
        await world.until_in_ledger(ended_pod)
        world.force_delete_pod(ended_pod)
        await world.until(lambda view: view.pods[waiting].phase is Phase.STARTING, f"{waiting} has its GPU")
        await world.until_polled(3)

    return act


def _end_and_pull(pod: str, address: str) -> Act:
    """Once the daemon has read of the pod: an allocation of a pod that ends before stays pending for GRANT_GRACE_S."""

    async def act(world: World) -> None:
        await world.until_in_ledger(pod)
        world.end_pod(pod)
        await world.unplug(address)

    return act


INCIDENT: Final = Scenario(
    "incident",
    "The whole incident of the field: late GPUs, restarts, pods deleted by force, an external process.",
    _TEXT,
    _steps,
)
