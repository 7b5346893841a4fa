"""GPUs that go: unbound, unplugged, and changed without a uevent."""

from __future__ import annotations

import random
from typing import Final

from gpuactors_simulation.expectations import Counts, Refused, Runs
from gpuactors_simulation.scenarios.parts import (
    H100,
    HOST_DRIVER,
    L40S,
    VFIO,
    Act,
    bind,
    end_pod,
    gpu,
    h100s,
    one_after_another,
    plug,
    start_node,
    start_pods,
)
from gpuactors_simulation.script import Scenario, Step
from gpuactors_simulation.world import World

_TEXT: Final = """
A GPU that cannot be used must not be listed Healthy, and one that comes back must be. Three H100s and one L40S are in
the node; virtual machines use some of them all the time and must not notice anything.
"""


def _steps(rng: random.Random) -> tuple[Step, ...]:
    first, second, third = rng.sample([spec.address for spec in h100s(3, None)], 3)
    at_boot = [s for s in h100s(3, VFIO) if s.address == first]
    later = [s for s in h100s(3, HOST_DRIVER) if s.address != first]
    (pulled,) = (s for s in h100s(3, VFIO) if s.address == third)
    l40s = gpu("0000:63:00.0", "26b9", 61, VFIO)
    return (
        Step(
            "The daemon starts, and a virtual machine takes the first H100",
            f"{first} is on vfio-pci, and so is an L40S.",
            one_after_another(start_node(*at_boot, *later, l40s), start_pods({"vm-1": {H100: 1}})),
            (Counts(H100, 1, 1, 1), Counts(L40S, 1, 1, 0), Runs("vm-1", frozenset({first}))),
        ),
        Step(
            "The other two H100s are bound to vfio-pci",
            f"{second} and {third} are free.",
            bind((second, third)),
            (Counts(H100, 3, 3, 1),),
        ),
        Step(
            f"A free H100 is unbound ({second})",
            "Without a vfio driver it leaves the list at once.",
            _unbind(second),
            (Counts(H100, 2, 2, 1),),
        ),
        Step(
            "It is bound again",
            "The count is restored. In the field a rebind did not restore it (kubevirt #8607).",
            bind((second,)),
            (Counts(H100, 3, 3, 1),),
        ),
        Step(
            f"A free H100 is unplugged ({third})",
            "In the field a GPU that was gone was still listed Healthy (kubevirt-gpu-device-plugin #97).",
            _unplug(third),
            (Counts(H100, 2, 2, 1),),
        ),
        Step(
            "A virtual machine takes the H100 that is left",
            f"That is {second}; the unplugged one cannot be allocated.",
            start_pods({"vm-2": {H100: 1}}),
            (Counts(H100, 2, 2, 2), Runs("vm-2", frozenset({second}))),
        ),
        Step(
            "The unplugged H100 is plugged in again",
            "vfio-pci takes it, and it is back under the same ID.",
            plug(pulled),
            (Counts(H100, 3, 3, 2),),
        ),
        Step(
            "The only L40S is unplugged",
            "Its list is empty. The resource stays registered for a while and shows zeros.",
            _unplug(l40s.address),
            (Counts(L40S, 0, 0, 0), Counts(H100, 3, 3, 2)),
        ),
        Step(
            "The L40S comes back",
            "It is offered again at once, as its plugin is still there.",
            plug(l40s),
            (Counts(L40S, 1, 1, 0), Counts(H100, 3, 3, 2)),
        ),
        Step(
            f"A GPU is unbound, every uevent of it is lost, and a virtual machine asks for it ({third})",
            "For kubelet it is still Healthy, and kubelet chooses it. The daemon inspects it before it "
            "answers, and refuses with the reason: no virtual machine is started with a GPU that it cannot "
            "open. The inspection corrects the list too: first Unhealthy, and a second later, when kubelet "
            "has surely ended its call, removed.",
            _unbind_silently_and_ask(third, "vm-3"),
            (Counts(H100, 2, 2, 2), Refused("vm-3", (third, "bind it to vfio-pci"))),
        ),
        Step(
            "The GPU is bound again, and the next virtual machine gets it",
            "The refused pod is replaced by a new one, as a controller would do.",
            one_after_another(end_pod("vm-3"), bind((third,)), start_pods({"vm-4": {H100: 1}})),
            (Counts(H100, 3, 3, 3), Runs("vm-4", frozenset({third}))),
        ),
    )


def _unbind(address: str) -> Act:
    async def act(world: World) -> None:
        await world.unbind(address)

    return act


def _unplug(address: str) -> Act:
    async def act(world: World) -> None:
        await world.unplug(address)

    return act


def _unbind_silently_and_ask(address: str, pod: str) -> Act:
    async def act(world: World) -> None:
        await world.unbind(address, uevents=False)
        await world.start_pod(pod, {H100: 1})

    return act


UNPLUG: Final = Scenario(
    "unplug", "GPUs are unbound, unplugged and come back; one changes without a uevent.", _TEXT, _steps
)
