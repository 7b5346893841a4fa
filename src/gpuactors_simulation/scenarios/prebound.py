"""Two identical GPUs, of which one was on vfio-pci before the daemon: that one stays there, whatever happens."""

from __future__ import annotations

import random
from typing import Final

from msgspec.structs import replace

from gpuactors_simulation.expectations import Counts, Runs
from gpuactors_simulation.expectations_claims import Found, NothingLeft, Offered, OnDriver, PreparedOn
from gpuactors_simulation.kubelet.values import Phase
from gpuactors_simulation.scenarios.parts import (
    AUDIO_DRIVER,
    H100,
    HOST_DRIVER,
    VFIO,
    end_claimed,
    h100s,
    one_after_another,
    start_claimed,
    start_node,
    with_audio,
)
from gpuactors_simulation.script import Scenario, Step
from gpuactors_simulation.world import World

_TEXT: Final = """
A GPU that the node binds to vfio-pci at its boot is meant for virtual machines, and the host's driver must not get it.
A driver that binds every GPU to the host's driver when its claim ends takes such GPUs away: NVLink hung for 30 s, and
worse (NVIDIA issues 1089, 1090, 1099). The two have the same ids, so ids cannot tell which is which: what counts is the
original driver of each PCI address in this boot, on disk before anything is written to it.
"""


def _steps(rng: random.Random) -> tuple[Step, ...]:
    first, second = h100s(2, None)
    prebound, other = rng.sample([first, second], 2)
    (bound, its_audio), other_functions = (
        with_audio(replace(prebound, driver=VFIO)),
        with_audio(replace(other, driver=HOST_DRIVER)),
    )
    functions = (bound, replace(its_audio, driver=VFIO), *other_functions)
    stays = OnDriver(prebound.address, VFIO, VFIO)
    bound_now, returned = (
        OnDriver(other.address, VFIO, VFIO),
        OnDriver(other.address, HOST_DRIVER, AUDIO_DRIVER),
    )
    prepared = (
        PreparedOn("vm-1-gpu", frozenset({prebound.address})),
        PreparedOn("vm-2-gpu", frozenset({other.address})),
        Runs("vm-1"),
        Runs("vm-2"),
    )
    both = Offered(frozenset({prebound.address, other.address}))
    claimed = one_after_another(start_claimed("vm-1", prebound.address), start_claimed("vm-2", other.address))
    ended = one_after_another(end_claimed("vm-1"), end_claimed("vm-2"))
    return (
        Step(
            "The node starts with two H100s, one of them on vfio-pci",
            "The device plugin lists the one that is on vfio-pci. Both are offered to claims.",
            start_node(*functions),
            (Counts(H100, 1, 1, 0), Found(), both, stays, returned),
        ),
        Step(
            "Each is claimed by a pod",
            "The pre-bound one stays as it is, the other one is bound to vfio-pci. One owner per GPU: the device "
            "plugin has none to give away.",
            claimed,
            (*prepared, Counts(H100, 2, 0, 0), stays, bound_now),
        ),
        Step(
            "Both pods end",
            "The pre-bound one stays on vfio-pci, the other one goes back to its driver.",
            ended,
            (Counts(H100, 1, 1, 0), both, stays, returned, NothingLeft()),
        ),
        Step(
            "Both are claimed again, and the daemon is restarted",
            "The new daemon sees both on vfio-pci. Which of them was there first is on disk.",
            one_after_another(claimed, _both_run, _restart_daemon),
            (*prepared, Counts(H100, 2, 0, 0), Found(), stays, bound_now),
        ),
        Step(
            "Both pods end",
            "As before.",
            ended,
            (Counts(H100, 1, 1, 0), both, stays, returned, NothingLeft()),
        ),
        Step(
            "Both are claimed once more, and the checkpoint is lost while the daemon is down",
            "The claims are found out from their files and the API server. Which GPU was on vfio-pci first is not "
            "known any more.",
            one_after_another(claimed, _both_run, _lose_checkpoint),
            (*prepared, Counts(H100, 2, 0, 0), Found(), stays, bound_now),
        ),
        Step(
            "Both pods end",
            "In doubt a GPU counts as pre-bound: the host's driver does not get the second one back until the next "
            "boot, or until somebody binds it. The other mistake would pull a GPU away from its users.",
            ended,
            (Counts(H100, 2, 2, 0), both, stays, bound_now, NothingLeft()),
        ),
    )


async def _both_run(world: World) -> None:
    await world.until(
        lambda view: all(view.pods[pod].phase is Phase.RUNNING for pod in ("vm-1", "vm-2")), "both pods run"
    )


async def _restart_daemon(world: World) -> None:
    await world.restart_daemon()


async def _lose_checkpoint(world: World) -> None:
    await world.stop_daemon()
    world.claims.lose_checkpoint()
    await world.start_daemon()


PREBOUND: Final = Scenario(
    "prebound",
    "Of two identical GPUs the one that was on vfio-pci first stays there.",
    _TEXT,
    _steps,
    claims=True,
)
