"""Histories of virtual functions: what may be given away while SR-IOV is switched on and off under pods."""

from __future__ import annotations

from typing import Final

import pytest

from tests.histories.events import DRAWN, DRAWN_WITH_ADMINISTRATORS, DRAWN_WITH_CLAIMS, KINDS, Serves, serves
from tests.histories.part_events import BESIDE, CHANGED_BY, OPENED, PART_KINDS
from tests.histories.play import play
from tests.histories.script import Step, parse_script
from tests.histories.truth import HEALTHY, UNHEALTHY, expected
from tests.histories.world import PART_RESOURCES, PARTS, World

OWN_IDS, SHARED_IDS = PART_RESOURCES
ON: Final = "SR-IOV is switched on"
POD: Final = "a pod for a virtual function comes"
SILENT: Final = 8
"""A schedule under which the kernel says nothing of an unbind that waits."""

HISTORIES: Final = {
    "pods get the virtual functions of two cards": f"{ON}@3+3; {ON}@4+3; {POD}@0+3; {POD}@6+3; {POD}@0+3; {POD}@6+3",
    "SR-IOV is switched off under a pod": f"{ON}@3+3; {POD}+3; SR-IOV is switched off@3+3; a pod ends+3",
    "SR-IOV is switched off and on under an external process": (
        f"{ON}@3+3; an external process opens a virtual function@3; SR-IOV is switched off@3+3; {POD}+3; "
        f"the holder of a virtual function ends@3+3; a pod ends+3; {ON}@3+3"
    ),
    "the driver of the card goes under a pod that has a virtual function": (
        f"{ON}@4+3; {POD}@6+3; unbind@4+3; a pod ends+3; bind to vfio-pci@4+3; a pod comes+3"
    ),
    "a card is on vfio-pci, has a pod, and gets virtual functions": (
        "unbind@3; bind to vfio-pci@3+3; pods come in a burst+3; SR-IOV is switched on by vfio-pci@3+3; a pod ends+3"
    ),
    "a virtual function is removed by hand under a pod": (
        f"{ON}@3+3; {POD}+3; {POD}+3; half the virtual functions are removed by hand@3+3; a pod ends+3; a pod ends@1+3"
    ),
    "a virtual function is removed by hand, whose link stays when SR-IOV is switched off": (
        "unbind slowly@3+0.3; bind to vfio-pci@3; SR-IOV is switched on by vfio-pci@3; "
        "half the virtual functions are removed by hand@3; SR-IOV is switched off@3"
    ),
    "a daemon starts while the removal of a virtual function waits": (
        f"{ON}@3+3; {POD}+3; SR-IOV is switched off@3; the daemon is told to stop+3; a daemon starts+3; a pod ends+3"
    ),
    "SR-IOV is switched off as soon as it is on, and a process has one open": (
        f"{ON}@4; an external process opens a virtual function@4; SR-IOV is switched off@4"
    ),
    "virtual functions go during the first scan of a daemon": (
        "unbind@4; bind slowly@4; a daemon crashes; inspections and scans take long+0.3; "
        "SR-IOV is switched on by vfio-pci@4; a daemon starts+0.001; SR-IOV is switched off@4"
    ),
    "a reboot takes the virtual functions": f"{ON}@3+3; {POD}+3; the node reboots+3; {ON}@3+3",
}


@pytest.mark.parametrize("schedule", [0, 16, SILENT])
@pytest.mark.parametrize("name", HISTORIES)
def test_kubelets_view_is_right_while_virtual_functions_come_and_go(name: str, schedule: int) -> None:
    script = parse_script(HISTORIES[name])
    played = play(script, PARTS | schedule)
    assert played.failure is None, played.failure
    assert played.script == script, "a step of it could not happen"


def wanted(script: str, schedule: int = 0) -> dict[str, dict[str, str]]:
    """What kubelet should have right after the last step."""
    lists: list[dict[str, dict[str, str]]] = []

    def look(world: World, step: Step | None) -> None:
        if step is not None:
            lists.append(expected(world))

    assert play(parse_script(script), PARTS | schedule, on_step=look).failure is None
    return lists[-1]


def test_the_truth_knows_what_keeps_a_virtual_function_from_pods() -> None:
    one, two = "0000:04:00.4", "0000:04:00.5"
    assert wanted(f"{ON}@3")[OWN_IDS] == {one: HEALTHY, two: HEALTHY}
    lists = wanted("unbind@3; bind to vfio-pci@3; SR-IOV is switched on by vfio-pci@3")
    assert lists[OWN_IDS] == {one: UNHEALTHY, two: UNHEALTHY}
    assert lists["nvidia.com/2330"]["0000:04:00.0"] == UNHEALTHY
    lists = wanted(f"{ON}@3+3; an external process opens a virtual function@3; unbind@3")
    assert lists[OWN_IDS] == {one: UNHEALTHY, two: UNHEALTHY}, (
        "the second one is there as long as the first one waits"
    )
    assert "0000:04:00.0" not in lists["nvidia.com/2330"]


def test_virtual_functions_in_one_group_have_one_owner_at_a_time() -> None:
    lists = wanted(f"{ON}@4+3; an external process opens a virtual function@4", 16)
    assert lists[SHARED_IDS] == {"0000:05:00.4": UNHEALTHY, "0000:05:00.5": UNHEALTHY}


# --- the tables -------------------------------------------------------------------------------------------


def test_every_kind_of_parts_is_drawn_where_they_are_and_nowhere_else() -> None:
    theirs = {kind.name for kind in PART_KINDS}
    assert theirs | set(BESIDE) == Serves.PARTS.kinds.keys()
    assert set(BESIDE) <= KINDS.keys()
    assert theirs.isdisjoint({*DRAWN, *DRAWN_WITH_CLAIMS, *DRAWN_WITH_ADMINISTRATORS})
    assert {*CHANGED_BY, OPENED} <= theirs


def test_a_seed_says_whether_there_are_any() -> None:
    assert serves(Serves.PARTS.bit | 5) is Serves.PARTS
    assert serves(5) is Serves.PLUGIN
