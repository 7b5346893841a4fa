"""Histories of vGPUs: mediated devices and vGPUs by vendor VFIO come, go and change their type under pods."""

from __future__ import annotations

from typing import Final

import pytest

from tests.histories.events import DRAWN, DRAWN_WITH_CLAIMS, DRAWN_WITH_PARTS, KINDS, Serves, serves
from tests.histories.part_events import BESIDE, PART_KINDS
from tests.histories.play import play
from tests.histories.script import Step, parse_script
from tests.histories.truth import HEALTHY, UNHEALTHY, expected
from tests.histories.vgpu_events import CHANGED_BY, OPENED_BY, VGPU_KINDS
from tests.histories.vgpus import MDEV_RESOURCES, UUIDS, VGPU_RESOURCES
from tests.histories.world import VGPUS, World

MDEV_1Q, MDEV_2Q = MDEV_RESOURCES
VGPU_1Q, VGPU_2Q = VGPU_RESOURCES
ONE, TWO = "0000:05:00.4", "0000:05:00.5"

MADE: Final = "a mediated device is made"
MDEV_POD: Final = "a pod for a mediated device comes"
ON: Final = "SR-IOV is switched on for vGPUs"
TYPED: Final = "a virtual function gets a vGPU type"
VGPU_POD: Final = "a pod for a vGPU comes"
PROC: Final = 1
"""A schedule under which the daemon reads the processes of a group."""
SILENT: Final = 8
"""A schedule under which the kernel says nothing of a removal that waits."""

HISTORIES: Final = {
    "pods get mediated devices of two types": f"{MADE}@3+3; {MADE}@27+3; {MDEV_POD}+3; {MDEV_POD}@6+3; a pod ends+3",
    "a mediated device comes for a pod that waits": f"{MDEV_POD}; a mediated device is made slowly@3+3",
    "a mediated device is removed under a pod": (
        f"{MADE}@3+3; {MDEV_POD}+3; a mediated device is removed@3+3; a pod ends+3; {MADE}@3+3; {MDEV_POD}+3"
    ),
    "a mediated device of nobody gets another type under its UUID": (
        f"{MADE}@3+3; a mediated device is removed and made anew with another type@3+3; {MDEV_POD}@6+3; {MDEV_POD}+3"
    ),
    "the machine of a pod has ended, and its mediated device gets another type": (
        f"{MADE}@3+3; {MDEV_POD}+3; a virtual machine ends by itself; "
        "a mediated device is removed and made anew with another type@3+3; a pod ends+3"
    ),
    "the driver of the card goes under a pod that has its mediated device": (
        f"{MADE}@3+3; {MDEV_POD}+3; unbind@3+3; a pod ends+3; bind to nvidia@3+3; "
        f"the driver of a card offers mediated devices@3; {MADE}@9+3; {MDEV_POD}+3"
    ),
    "the driver of the card goes while a removal waits": (
        f"{MADE}@3+3; {MDEV_POD}+3; {MADE}@9; a mediated device is removed@3+3; unbind@3+3; a pod ends+3"
    ),
    "a daemon starts while the removal of a mediated device waits": (
        f"{MADE}@3+3; {MDEV_POD}+3; a mediated device is removed@3; the daemon is told to stop+3; a daemon starts+3; "
        "a pod ends+3"
    ),
    "a reboot takes the mediated devices": f"{MADE}@3+3; {MDEV_POD}+3; the node reboots+3; {MADE}@3+3",
    "pods get vGPUs of two types": f"{ON}@4+3; {TYPED}@4+3; {TYPED}@22+11; {VGPU_POD}+3; {VGPU_POD}@6+3; a pod ends+3",
    "a card is unplugged before a daemon has read its lists, and its vGPU is open": (
        f"{ON}@490+0.05; {TYPED}@334+0.05; an external process opens a vGPU@250+0.001; unplug@502"
    ),
    "a vGPU of nobody gets another type": f"{ON}@4+3; {TYPED}@4+11; {TYPED}@16+11; {VGPU_POD}@6+3; {VGPU_POD}+3",
    "the machine of a pod has ended, and its vGPU gets another type": (
        f"{ON}@4+3; {TYPED}@4+11; {VGPU_POD}+3; a virtual machine ends by itself; {TYPED}@16+11; a pod ends+11"
    ),
    "a vGPU loses its type before its pod can start": (
        f"{ON}@4+3; {TYPED}@4+11; {VGPU_POD}; a virtual function loses its vGPU type@4+11; a pod ends+3"
    ),
    "SR-IOV is switched off under a pod that has a vGPU": (
        f"{ON}@4+3; {TYPED}@4+11; {VGPU_POD}+3; SR-IOV is switched off@4+3; a pod ends+3; {ON}@4+3; {TYPED}@4+11"
    ),
    "the unbind of a vGPU waits for the pod that was given it when it had another type": (
        f"{ON}@4; {VGPU_POD}@225; {TYPED}@70+0.3; SR-IOV is switched off@4"
    ),
    "the driver of the card goes while the unbind of a virtual function waits, and a daemon starts": (
        "SR-IOV is switched on@4+3; an external process opens a virtual function@4; a virtual function is unbound@4; "
        "unbind@4; a daemon crashes; a daemon starts+3"
    ),
    "the unbind of a vGPU waits, and the first poll can read nothing": (
        f"{ON}@4+11; {TYPED}@4+11; an external process opens a vGPU@4; a virtual function is unbound@4; "
        "polls can read nothing+0.001"
    ),
    "a pod comes for a mediated device that a process has open": (
        f"{MADE}@3; an external process opens a mediated device@3; {MDEV_POD}"
    ),
}


@pytest.mark.parametrize("schedule", [0, PROC, SILENT, 2])
@pytest.mark.parametrize("name", HISTORIES)
def test_kubelets_view_is_right_while_vgpus_come_and_go(name: str, schedule: int) -> None:
    script = parse_script(HISTORIES[name])
    played = play(script, VGPUS | schedule)
    assert played.failure is None, played.failure
    assert played.script == script, "a step of it could not happen"


CLAIM: Final = "a pod with a claim for a part of a card comes"

WITH_CLAIMS: Final = {
    "claims get a mediated device, a vGPU and a virtual function": (
        f"{MADE}@3+3; {CLAIM}+11; {ON}@4+3; {TYPED}@4+11; {CLAIM}+11; a virtual function is unbound@10+3; {CLAIM}+11; "
        "a pod with a claim ends+11"
    ),
    "SR-IOV is switched off under a claim for a vGPU": (
        f"{ON}@4+3; {TYPED}@4+11; {CLAIM}+11; SR-IOV is switched off@4+3; a pod with a claim ends+11"
    ),
    "a mediated device is removed under a claim": (
        f"{MADE}@3+3; {CLAIM}+11; a mediated device is removed@3+11; a pod with a claim ends+11; {MADE}@3+3; {CLAIM}+11"
    ),
    "a mediated device is removed under a claim, and its machine runs on": (
        f"{MADE}@3+3; {CLAIM}+11; a mediated device is removed@3+70; a pod with a claim ends+11"
    ),
    "a claim for a card and the same for a part of it race": (
        f"a pod with a claim comes@3; {MADE}@3; {CLAIM}+11; a pod with a claim ends+11"
    ),
    "a daemon is killed while a claim has a mediated device": (
        f"{MADE}@3+3; {CLAIM}+11; a daemon crashes; a daemon starts+11; the node reboots+11"
    ),
    "a claim that waits for its card again after a reboot, and one for a part of the card": (
        "a pod with a claim comes@3+0.001; the node reboots; a mediated device is made slowly@3+0.05; "
        + CLAIM
    ),
}


@pytest.mark.parametrize("schedule", [0, PROC, SILENT, 16])
@pytest.mark.parametrize("name", WITH_CLAIMS)
def test_claims_for_parts_of_cards_are_kept(name: str, schedule: int) -> None:
    script = parse_script(WITH_CLAIMS[name])
    played = play(script, Serves.CLAIMED_VGPUS.bit | schedule)
    assert played.failure is None, played.failure
    assert played.script == script, "a step of it could not happen"


def wanted(script: str, schedule: int = PROC) -> dict[str, dict[str, str]]:
    """What kubelet should have right after the last step."""
    lists: list[dict[str, dict[str, str]]] = []

    def look(world: World, step: Step | None) -> None:
        if step is not None:
            lists.append(expected(world))

    assert play(parse_script(script), VGPUS | schedule, on_step=look).failure is None
    return lists[-1]


def test_the_truth_knows_what_keeps_a_mediated_device_from_pods() -> None:
    assert wanted(f"{MADE}@3+3; {MADE}@27")[MDEV_1Q] == {UUIDS[0]: HEALTHY}
    assert wanted(f"{MADE}@3+3; {MADE}@27")[MDEV_2Q] == {UUIDS[1]: HEALTHY}
    held = f"{MADE}@3+3; an external process opens a mediated device@3"
    assert wanted(held)[MDEV_1Q] == {UUIDS[0]: UNHEALTHY}
    assert MDEV_1Q not in wanted(f"{held}; a mediated device is removed@3"), "it is off the bus at once"
    lists = wanted(f"{MADE}@3+3; {MDEV_POD}+3; a mediated device is removed@3")
    assert lists[MDEV_1Q] == {UUIDS[0]: UNHEALTHY}


def test_the_truth_knows_what_keeps_a_vgpu_from_pods() -> None:
    both = f"{ON}@4+3; {TYPED}@4; {TYPED}@22"
    assert (wanted(both)[VGPU_1Q], wanted(both)[VGPU_2Q]) == ({ONE: HEALTHY}, {TWO: HEALTHY})
    assert VGPU_1Q not in wanted(f"{ON}@4+3; {TYPED}@4; a virtual function loses its vGPU type@4")
    lists = wanted(f"{ON}@4+3; {TYPED}@4+11; {VGPU_POD}+3; a virtual machine ends by itself; {TYPED}@16")
    assert (lists[VGPU_1Q], lists[VGPU_2Q]) == ({ONE: UNHEALTHY}, {ONE: UNHEALTHY}), "until its pod has ended"


def test_every_kind_of_vgpus_is_drawn_where_they_are_and_nowhere_else() -> None:
    theirs = {kind.name for kind in VGPU_KINDS}
    assert theirs | {kind.name for kind in PART_KINDS} | set(BESIDE) == Serves.VGPUS.kinds.keys()
    assert theirs <= KINDS.keys()
    assert theirs.isdisjoint({*DRAWN, *DRAWN_WITH_CLAIMS, *DRAWN_WITH_PARTS})
    assert {*CHANGED_BY, *OPENED_BY} <= theirs
    assert CLAIM in Serves.CLAIMED_VGPUS.kinds
    assert not any(CLAIM in of.kinds for of in Serves if of is not Serves.CLAIMED_VGPUS)


def test_a_seed_says_whether_there_are_any() -> None:
    assert serves(Serves.VGPUS.bit | 5) is Serves.VGPUS
    assert serves(Serves.CLAIMED_VGPUS.bit | 5) is Serves.CLAIMED_VGPUS
    assert serves(Serves.PARTS.bit | 5) is Serves.PARTS
