"""Kubelet is absent, restarts, restarts again at once, and loses a stream."""

from __future__ import annotations

import random
from typing import Final

from gpuactors_simulation.expectations import Counts, Runs, Waits
from gpuactors_simulation.host.tree import PciSpec
from gpuactors_simulation.scenarios.parts import H100, HOST_DRIVER, VFIO, Act, bind, h100s, start_pods
from gpuactors_simulation.script import Scenario, Step
from gpuactors_simulation.world import World

_TEXT: Final = """
Kubelet never calls a plugin first: when it restarts it removes every socket in its directory and knows no
device until the plugin has registered, and when a stream ends it waits for the plugin to register. Registered means
here: one ListAndWatch stream is open.
"""

_RESTARTS: Final = 3


def _steps(rng: random.Random) -> tuple[Step, ...]:
    late = rng.choice([spec.address for spec in h100s(4, None)])
    specs = [s for s in h100s(4, VFIO) if s.address != late]
    specs += [s for s in h100s(4, HOST_DRIVER) if s.address == late]
    return (
        Step(
            "The daemon starts before kubelet does",
            "Three H100s are on vfio-pci, a fourth is not. The daemon waits for kubelet's socket, and "
            "registers when it appears.",
            _daemon_first(tuple(specs)),
            (Counts(H100, 3, 3, 0),),
        ),
        Step(
            "Two virtual machines start",
            "",
            start_pods({"vm-1": {H100: 1}, "vm-2": {H100: 1}}),
            (Counts(H100, 3, 3, 2), Runs("vm-1"), Runs("vm-2")),
        ),
        Step(
            "Kubelet restarts",
            "The running virtual machines are not touched; kubelet's ledger is on disk. Only the list has "
            "to come back.",
            _restart(1),
            (Counts(H100, 3, 3, 2),),
        ),
        Step(
            f"A GPU is bound while kubelet is away ({late})",
            "The first list that the new kubelet gets has it.",
            _bind_in_the_gap(late),
            (Counts(H100, 4, 4, 2),),
        ),
        Step(
            f"Kubelet restarts {_RESTARTS} times in a row",
            "Each time before the daemon can be sure of the last one: its socket vanishes, Register fails "
            "or meets a kubelet that is going. Registration is tried again until a stream is open.",
            _restart(_RESTARTS),
            (Counts(H100, 4, 4, 2),),
        ),
        Step(
            "The stream breaks while kubelet lives on",
            "Kubelet takes every device for Unhealthy and does not dial again. In the field this was not "
            "noticed (kubernetes #125501), and the node stayed at 0 until the plugin was restarted.",
            _lose_stream,
            (Counts(H100, 4, 4, 2),),
        ),
        Step(
            "The remaining GPUs are allocated, and one more virtual machine waits",
            "",
            start_pods({"vm-3": {H100: 2}, "vm-4": {H100: 1}}),
            (Counts(H100, 4, 4, 4), Runs("vm-3"), Waits("vm-4")),
        ),
        Step(
            "Kubelet restarts on the full node",
            "The waiting machine goes on waiting: a restart frees no GPU.",
            _restart(1),
            (Counts(H100, 4, 4, 4), Waits("vm-4")),
        ),
    )


def _daemon_first(specs: tuple[PciSpec, ...]) -> Act:
    async def act(world: World) -> None:
        await world.plug(*specs)
        await world.start_daemon()
        await world.kubelet.start()

    return act


def _restart(times: int) -> Act:
    async def act(world: World) -> None:
        for _ in range(times):
            await world.kubelet.stop()
            await world.kubelet.start()

    return act


def _bind_in_the_gap(address: str) -> Act:
    async def act(world: World) -> None:
        await world.kubelet.stop()
        await bind((address,))(world)
        await world.kubelet.start()

    return act


async def _lose_stream(world: World) -> None:
    world.kubelet.lose_stream(H100)
    await world.until(lambda view: H100 not in view.connected, "kubelet has lost the stream")


KUBELET_RESTART: Final = Scenario(
    "kubelet-restart", "Kubelet is absent, restarts, and loses a stream; the list comes back.", _TEXT, _steps
)
