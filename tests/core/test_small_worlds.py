"""Every order of up to five events in worlds of two GPUs (`just small-worlds`; up to two in `just test`).

What such orders have found stays as tests of the core by name (`test_ledger_and_usage.py`): a ledger that was read
before the first scan, a lost device without a plugin, an external process on what a pod had just given back.
"""

from __future__ import annotations

import pytest

from gpuactors.core.deviceplugin import device_lists
from gpuactors.core.host import inspections
from tests.core.orders import check_every_order, is_found
from tests.core.other_driver import (
    OthersClaim,
    a_name_without_a_file_means_no_gpu,
    others_claims_are_not_seen,
)
from tests.core.small_world import EXTERNAL, Outside, small_world
from tests.support.planted_status import plant_allocated_is_unhealthy

VM = "vm-1"
# The one with the most orders first: so two processes end at about the same time.
WORLDS = {
    "two free GPUs beside other plugins": Outside((True, True), crowded=True),
    "a pod has one of them, and other plugins give both away": Outside(
        (True, True), (VM, None), (VM, None), pods=1, others=("other-0", "other-1"), crowded=True
    ),
    "a pod has one by its group's number": Outside(
        (True, True), (None, None), (VM, None), pods=1, known=frozenset({VM}), older=True
    ),
    "a pod has one of them, and polls see no names": Outside(
        (True, True), (VM, None), (VM, None), pods=1, names=False
    ),
    "a pod has one of them": Outside((True, True), (VM, None), (VM, None), pods=1),
    "a pod has both of one group": Outside((True, True), (VM, None), (VM, VM), pods=1, shared=True),
    "two free GPUs": Outside((True, True)),
    "two free GPUs in one group": Outside((True, True), shared=True),
    "a pod has one, an external process the other, and the kernel says nothing of an unbind that waits": Outside(
        (True, True), holders=(VM, EXTERNAL), ledger=(VM, None), pods=1, silent=True
    ),
    "one free GPU, and an empty slot": Outside((True, False)),
    "a pod has one of two in one group": Outside((True, True), (VM, None), (VM, None), pods=1, shared=True),
    "two free GPUs beside another driver": Outside((True, True), has_driver=True),
    "another driver's claim has one, a pod the other": Outside(
        (True, True), (None, VM), (None, VM), pods=1, has_driver=True, claim=OthersClaim(1, 1), claims=1
    ),
    "two free virtual functions of a card": Outside((True, True), virtual=True),
    "a pod has one of two virtual functions of a card": Outside(
        (True, True), (None, VM), (None, VM), pods=1, virtual=True
    ),
    "a pod that is gone holds one, an external process the other": Outside(
        (True, True), (VM, EXTERNAL), pods=1
    ),
}


@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.timeout(600)
def test_the_figures_are_right_after_every_order(name: str) -> None:
    check_every_order(small_world(WORLDS[name]))


def _a_held_one_is_unhealthy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The field's own: busy is Unhealthy, whoever holds it."""
    plant_allocated_is_unhealthy(monkeypatch)
    monkeypatch.setattr(device_lists, "_broken", lambda *_: [])


def _lists_shrink_in_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    device_list = device_lists._device_list
    monkeypatch.setattr(
        device_lists, "_device_list", lambda s, r, devices, _listed, at: device_list(s, r, devices, (), at)
    )


def _old_inspections_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """An inspection overwrites what a later one has found."""
    with_found = inspections._with_results
    monkeypatch.setattr(
        inspections,
        "_with_results",
        lambda host, found, at: with_found(host, [(10**9, of_one) for _, of_one in found], at),
    )


@pytest.mark.parametrize(
    ("plant", "length"),
    [
        (_a_held_one_is_unhealthy, 2),
        (_lists_shrink_in_calls, 2),
        (_old_inspections_win, 4),
        (others_claims_are_not_seen, 1),
        (a_name_without_a_file_means_no_gpu, 1),
    ],
)
def test_a_planted_bug_is_found(plant: object, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert callable(plant)
    plant(monkeypatch)
    assert any(is_found(small_world(world), length) for world in WORLDS.values())
