"""Models that the node has never seen are plugged in while the daemon runs."""

from __future__ import annotations

import random
from typing import Final

from gpuactors.core.values.cause import Cause
from gpuactors_simulation.expectations import Counts, Runs, Unhealthy
from gpuactors_simulation.host.tree import PciSpec
from gpuactors_simulation.scenarios.parts import (
    H100,
    L40S,
    RTX_6000_ADA,
    VFIO,
    bind,
    gpu,
    h100s,
    plug,
    start_node,
    start_pods,
)
from gpuactors_simulation.script import Scenario, Step

_TEXT: Final = """
A node with one model of GPU gets others while it runs: one that pci.ids knows, one with an audio function beside it,
and one that is newer than pci.ids. Every new model is a new resource with a plugin of its own, and none needs a
restart.
"""

_UNNAMED: Final = "nvidia.com/3fff"
_AUDIO_DRIVER: Final = "snd_hda_intel"


def _steps(rng: random.Random) -> tuple[Step, ...]:
    first_l40s, second_l40s = rng.sample(
        [gpu("0000:63:00.0", "26b9", 61, VFIO), gpu("0000:64:00.0", "26b9", 62, VFIO)], 2
    )
    card = gpu("0000:a1:00.0", "26b1", 63, VFIO, numa_node=1)
    audio = PciSpec("0000:a1:00.1", "10de", "22ba", "040300", 63, 1, "pci0000:60", _AUDIO_DRIVER)
    unnamed = gpu("0000:e1:00.0", "3fff", 64, VFIO, numa_node=-1)
    h100 = Counts(H100, 2, 2, 0)
    return (
        Step(
            "The daemon starts with two H100s", "Both are on vfio-pci.", start_node(*h100s(2, VFIO)), (h100,)
        ),
        Step(
            "An L40S is plugged in",
            "vfio-pci knows its id and takes it at once. A second resource registers.",
            plug(first_l40s),
            (h100, Counts(L40S, 1, 1, 0)),
        ),
        Step(
            "A card with an audio function is plugged in",
            f"Both functions share IOMMU group {card.group}. The GPU is on vfio-pci, but the audio function "
            f"went to {_AUDIO_DRIVER}: QEMU would refuse the whole group. The card is listed Unhealthy and "
            "the reason names the audio function, which is no GPU and is not counted.",
            plug(card, audio),
            (
                h100,
                Counts(RTX_6000_ADA, 1, 0, 0),
                Unhealthy(card.address, Cause.GROUP_NOT_VIABLE, (audio.address, _AUDIO_DRIVER)),
            ),
        ),
        Step(
            "The audio function is bound to vfio-pci",
            "Now the group is viable, and the card is Healthy without a restart.",
            bind((audio.address,)),
            (h100, Counts(RTX_6000_ADA, 1, 1, 0)),
        ),
        Step(
            "A model that pci.ids does not know is plugged in",
            "It is offered under the hex digits of its device id. The kernel knows no NUMA node for it "
            "(numa_node is -1), so it is listed without one, which is not node 0.",
            plug(unnamed),
            (h100, Counts(L40S, 1, 1, 0), Counts(RTX_6000_ADA, 1, 1, 0), Counts(_UNNAMED, 1, 1, 0)),
        ),
        Step(
            "A virtual machine takes one of each",
            "",
            start_pods({"vm-1": {H100: 1, L40S: 1, RTX_6000_ADA: 1, _UNNAMED: 1}}),
            (
                Runs("vm-1"),
                Counts(H100, 2, 2, 1),
                Counts(L40S, 1, 1, 1),
                Counts(RTX_6000_ADA, 1, 1, 1),
                Counts(_UNNAMED, 1, 1, 1),
            ),
        ),
        Step(
            "A second L40S is plugged in",
            "The model is known now: the same resource grows.",
            plug(second_l40s),
            (Counts(L40S, 2, 2, 1), Counts(H100, 2, 2, 1)),
        ),
    )


NEW_MODEL: Final = Scenario(
    "new-model", "Models never seen before are plugged in; each becomes a resource.", _TEXT, _steps
)
