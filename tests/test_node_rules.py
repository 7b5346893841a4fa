"""The rules of the books on the real node: each planted fault is found, and what only takes its time is none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.node.rules import (
    API,
    GRACE_S,
    KUBELET,
    Excuse,
    Look,
    Record,
    broken,
    unexcused,
    unsettled,
    without_ended,
)

H = "nvidia.com/H100"
A, B = "0000:21:00.0", "0000:22:00.0"

TRUE = Look(
    at=0.0, capacity={H: 2}, allocatable={H: 2}, requests={H: 1}, allocated={H: (("default/vm-1", A),)},
    healthy={H: frozenset({A, B})}, claimed=(), offered=frozenset(), owners={33: frozenset({"pod 1"})},
    usable={A: False, B: True},
)  # fmt: skip
"""Two GPUs, of which a pod has one open."""

NO_API = replace(TRUE, api_answers=False)
NO_KUBELET = replace(TRUE, healthy=None, allocated=None)

STEP_S = 0.5


def said(wrong: Sequence[object]) -> list[str]:
    return [str(one) for one in wrong]


def recorded(*looks: tuple[Look, float], stopped: Sequence[str] = ()) -> Record:
    """Each look again and again, for so many seconds."""
    record, at = Record(), 0.0
    for look, for_s in looks:
        until = at + for_s
        while at <= until:
            record.add(replace(look, at=at), stopped)
            at += STEP_S
    return record


# --- one look -------------------------------------------------------------------------------------------------------


def test_true_books_are_not_faulted() -> None:
    assert broken(TRUE) == []
    assert unsettled(TRUE) == []


@pytest.mark.parametrize(
    ("look", "sentence"),
    [
        (replace(TRUE, allocatable={H: 0}, healthy={H: frozenset()}), f"free {H} is 0 - 1 < 0"),
        (
            replace(TRUE, claimed=(("default/c", A),)),
            f"{A} belongs to ['claim default/c', 'pod default/vm-1']",
        ),
        (
            replace(TRUE, claimed=(("default/c", B), ("default/d", B))),
            f"{B} belongs to ['claim default/c', 'claim default/d']",
        ),
        (
            replace(TRUE, allocated={H: (("default/vm-1", A), ("default/vm-2", A))}),
            f"{A} belongs to ['pod default/vm-1', 'pod default/vm-2']",
        ),
        (
            replace(TRUE, owners={33: frozenset({"pod 1", "process 7"})}),
            "group 33 is open in ['pod 1', 'process 7']",
        ),
        (replace(TRUE, capacity={H: 0}), f"1 of {H} are allocated, and its capacity is 0"),
    ],
    ids=["negative", "claim and pod", "two claims", "two pods", "two processes", "capacity"],
)
def test_what_can_never_be_true_is_said_at_once(look: Look, sentence: str) -> None:
    assert sentence in said(broken(look))
    assert sentence in said(unsettled(look))
    (fault,) = [fault for fault in recorded((look, 0.0)).faults() if fault.said == sentence]
    assert unexcused([fault], ()) == [f"{sentence}, for 0.0 s"]


GIVES = f"kubelet would give {B} of {H} to a new pod"
UNUSABLE = "it is not on vfio, its group is not viable, or a process has it open"

UNSETTLED = [
    (replace(TRUE, healthy={H: frozenset({B})}), f"{A} of a pod is not in kubelet's list"),
    (replace(TRUE, allocated={"nvidia.com/gone": (("default/vm-1", A),)}), f"{A} of a pod is not in kubelet's list"),
    (replace(TRUE, capacity={H: 1}), f"the capacity of {H} lacks a device: 1, ['{A}', '{B}']"),
    (replace(TRUE, usable={A: False, B: False}), f"{GIVES}: {UNUSABLE}"),
    (replace(TRUE, usable={A: False}), f"{GIVES}: {UNUSABLE}"),
    (replace(TRUE, claimed=(("default/c", B),)), f"{GIVES}: claim default/c has it"),
    (replace(TRUE, claimed=(("default/c", B),)), f"free {H} is more than a new pod could have: 2 - 1 > 0"),
    (replace(TRUE, allocatable={H: 3}), f"free {H} is more than a new pod could have: 3 - 1 > 1"),
    (replace(TRUE, requests={H: 2}), f"pods ask for 2 {H}, and have ['{A}']"),
    (replace(TRUE, requests={}), f"pods ask for 0 {H}, and have ['{A}']"),
    (
        replace(TRUE, allocatable={H: 1}),
        f"the node's status and kubelet count {H} differently: 1, ['{A}', '{B}']",
    ),
    (replace(TRUE, offered=frozenset({A})), f"{A} of a pod is offered to claims"),
    (NO_KUBELET, "kubelet does not answer"),
    (NO_API, "the API server does not answer"),
]  # fmt: skip


@pytest.mark.parametrize(("look", "sentence"), UNSETTLED, ids=[sentence[-40:] for _, sentence in UNSETTLED])
def test_what_must_become_true_is_said_and_is_a_fault_after_the_grace(look: Look, sentence: str) -> None:
    assert sentence in said(unsettled(look))
    assert sentence not in said(broken(look))
    assert not [fault for fault in recorded((look, GRACE_S)).faults() if fault.said == sentence]
    (fault,) = [f for f in recorded((look, GRACE_S + STEP_S)).faults() if f.said == sentence]
    assert fault.longest_s == fault.total_s == GRACE_S + STEP_S


def test_a_pods_gpu_that_waits_for_it_is_not_free() -> None:
    """One more pod was bound, and has none yet: a third one could have nothing."""
    waits = replace(TRUE, requests={H: 2})
    assert [str(wrong) for wrong in unsettled(waits)] == [f"pods ask for 2 {H}, and have ['{A}']"]


def test_what_an_ended_plugin_has_left_is_no_capacity_until_it_is_another() -> None:
    other = "nvidia.com/A100"
    left = replace(TRUE, capacity={H: 2, other: 1})
    assert without_ended(left, {other: 1}) == {H: 2}
    assert without_ended(left, {other: 1, H: 2}) == {H: 2}, "its devices are in kubelet's list"
    assert without_ended(left, {}) == left.capacity, "it was not there before"
    assert without_ended(left, {other: 2}) == left.capacity
    again = replace(left, allocatable={H: 2, other: 1})
    assert without_ended(again, {other: 1}) == left.capacity
    had = replace(left, allocated={other: (("default/vm-1", A),)})
    assert without_ended(had, {other: 1}) == left.capacity


def test_a_gpu_that_two_plugins_list_by_ids_of_their_own_is_one_gpu() -> None:
    gpu, uuid = "nvidia.com/gpu", "GPU-24980b94-1cbb-5b64-a107-dd7d9b550db4"
    beside = replace(
        TRUE, allocatable={H: 2, gpu: 1}, capacity={H: 2, gpu: 1},
        healthy={**(TRUE.healthy or {}), gpu: frozenset({uuid})}, usable={**TRUE.usable, uuid: True},
        addresses={uuid: "0000:25:00.0"},
    )  # fmt: skip
    assert unsettled(beside) == []
    both = replace(
        beside, requests={H: 1, gpu: 1}, allocated={**(TRUE.allocated or {}), gpu: (("default/c-1", uuid),)},
        addresses={uuid: A},
    )  # fmt: skip
    assert f"{A} belongs to ['pod default/c-1', 'pod default/vm-1']" in said(broken(both))
    left = replace(beside, usable={**TRUE.usable, uuid: False})
    assert any(f"kubelet would give {uuid}" in one for one in said(unsettled(left)))


# --- many looks -----------------------------------------------------------------------------------------------------


def test_what_settles_again_and_again_is_no_fault() -> None:
    late = replace(TRUE, allocatable={H: 1})
    assert recorded((late, GRACE_S - 1), (TRUE, 0.0), (late, GRACE_S - 1)).faults() == []


def test_numbers_that_change_are_the_same_fault() -> None:
    looks = [(replace(TRUE, allocatable={H: 3 + number}), GRACE_S / 2) for number in range(3)]
    assert f"free {H} is more than a new pod could have: 3 - 1 > 1" in [
        f.said for f in recorded(*looks).faults()
    ]


def test_without_the_api_server_the_node_is_still_looked_at() -> None:
    """Another owner, or a GPU that nobody could use, is found in kubelet's and the host's own books."""
    away = recorded(
        (NO_API, 1.0), (replace(NO_API, usable={A: False, B: False}), GRACE_S + 1),
        (replace(NO_API, claimed=(("default/c", A),)), 0.0), stopped=[API],
    )  # fmt: skip
    assert unexcused(away.faults(), ()) == [
        f"{GIVES}: {UNUSABLE}, for {GRACE_S + 1:.1f} s",
        f"{A} belongs to ['claim default/c', 'pod default/vm-1'], for 0.0 s",
    ]


def test_what_the_api_server_said_last_is_not_held_against_kubelet() -> None:
    freed = replace(NO_API, allocated={}, requests={H: 3}, capacity={H: 0}, usable={A: True, B: True})
    assert recorded((freed, GRACE_S + 1), stopped=[API]).faults() == []


@pytest.mark.parametrize(("look", "name"), [(NO_API, API), (NO_KUBELET, KUBELET)])
def test_only_the_silence_of_what_was_stopped_is_no_fault(look: Look, name: str) -> None:
    assert recorded((look, 60.0), stopped=[name]).faults() == []
    (fault,) = recorded((look, 60.0)).faults()
    assert "does not answer" in fault.said


def test_an_excuse_has_an_end() -> None:
    negative = replace(TRUE, allocatable={H: 0}, healthy={H: frozenset({A})}, capacity={H: 2})
    record = recorded((negative, 3.0), (TRUE, 1.0), (negative, 3.0))
    assert unexcused(record.faults(), [Excuse("is 0 - ", 6.0)]) == []
    (wrong,) = unexcused(record.faults(), [Excuse("is 0 - ", 5.0)])
    assert wrong == f"free {H} is 0 - 1 < 0, for 6.0 s in all, and 5 s are excused"


def test_an_excuse_is_for_its_own_words_only() -> None:
    faults = recorded((replace(TRUE, claimed=(("default/c", A),)), 0.0)).faults()
    assert unexcused(faults, [Excuse("is 0 - ", 60.0)]) == [
        f"{A} belongs to ['claim default/c', 'pod default/vm-1'], for 0.0 s"
    ]
