"""External processes, to which kubelet gave nothing, open GPUs and close them."""

from __future__ import annotations

import random
from typing import Final

from gpuactors_simulation.expectations import Counts, HeldByExternal, Refused, Runs, Waits
from gpuactors_simulation.scenarios.parts import (
    H100,
    VFIO,
    Act,
    end_pod,
    h100s,
    kill,
    one_after_another,
    release,
    start_node,
    start_pods,
    take_free,
)
from gpuactors_simulation.script import Scenario, Step
from gpuactors_simulation.world import World

_TEXT: Final = """
A QEMU outside Kubernetes, a script, a second device plugin: while such a process has the IOMMU group of a GPU open, no
virtual machine can use the GPU. There are three H100s here; virtual machines use some of them all the time and must not
notice anything.

The daemon opens nothing to find out. It reads the enable count of each function, which an open device raises, and with
--holders proc the descriptors of all processes, which also shows a group whose device is not open and names the holder.
"""

_QEMU: Final = (1901, "qemu-system-x86")
_SCRIPT: Final = (1902, "python3")
_QUICK: Final = (1903, "vfio-tool")


def _steps(rng: random.Random) -> tuple[Step, ...]:
    at_boot = rng.sample(h100s(3, VFIO), 3)
    return (
        Step(
            "The daemon starts, and a virtual machine takes an H100",
            "It has the GPU's group open, and the GPU stays Healthy: it is kubelet's own pod.",
            one_after_another(start_node(*at_boot), start_pods({"vm-1": {H100: 1}})),
            (Counts(H100, 3, 3, 1), Runs("vm-1")),
        ),
        Step(
            "A QEMU outside Kubernetes opens a free one",
            "Within the 2 s between two polls it is Unhealthy, and the reason names the process.",
            take_free(H100, *_QEMU),
            (Counts(H100, 3, 2, 1), HeldByExternal(*_QEMU)),
        ),
        Step(
            "A script opens the group of the last free one, and not the device",
            "Sysfs does not show it (enable stays 0), /proc does.",
            take_free(H100, *_SCRIPT, device=False),
            (Counts(H100, 3, 1, 1), HeldByExternal(*_QEMU), HeldByExternal(*_SCRIPT)),
        ),
        Step(
            "A virtual machine asks for a GPU, and the daemon is restarted",
            "It waits. The new daemon reads kubelet's ledger and polls all groups before it sends its first "
            "list, so there is no gap in which a GPU in use could be allocated.",
            one_after_another(start_pods({"vm-2": {H100: 1}}), _restart_daemon),
            (
                Counts(H100, 3, 1, 1),
                Waits("vm-2"),
                Runs("vm-1"),
                HeldByExternal(*_QEMU),
                HeldByExternal(*_SCRIPT),
            ),
        ),
        Step(
            "The script closes the group",
            "The GPU is Healthy again within a fraction of a second, and the waiting machine gets it.",
            release(_SCRIPT[0]),
            (Counts(H100, 3, 2, 2), Runs("vm-2"), HeldByExternal(*_QEMU)),
        ),
        Step(
            "The QEMU is killed",
            "SIGKILL: the kernel closes what it had open, and sends no uevent.",
            kill(_QEMU[0]),
            (Counts(H100, 3, 3, 2),),
        ),
        Step(
            "A process opens the last free one, and a virtual machine asks for it in the same moment",
            "For kubelet it is still Healthy, and kubelet chooses it. The daemon polls its group before it "
            "answers Allocate, and refuses with the holder's name; the GPU is never swapped for another one. "
            "The poll corrects the list too.",
            _take_and_ask("vm-3"),
            (
                Counts(H100, 3, 2, 2),
                Refused("vm-3", (str(_QUICK[0]), _QUICK[1])),
                HeldByExternal(*_QUICK),
            ),
        ),
        Step(
            "The process ends, and the next virtual machine gets the GPU",
            "The refused pod is replaced by a new one, as a controller would do.",
            one_after_another(end_pod("vm-3"), start_pods({"vm-4": {H100: 1}}), kill(_QUICK[0])),
            (Counts(H100, 3, 3, 3), Runs("vm-4")),
        ),
    )


async def _restart_daemon(world: World) -> None:
    await world.restart_daemon()


def _take_and_ask(pod: str) -> Act:
    async def act(world: World) -> None:
        world.take(await world.until_free(H100), *_QUICK)
        await world.start_pod(pod, {H100: 1})

    return act


EXTERNAL_HOLDER: Final = Scenario(
    "external-holder", "External processes open GPUs and close them.", _TEXT, _steps
)
