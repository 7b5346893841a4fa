"""The search for the fewest places: what it chooses is what trying everything would choose, and its work has an end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuactors.core.deviceplugin.choice import PREFERENCE_STEPS_MAX, Group, Search, choose
from gpuactors.core.events.deviceplugin import AllocateAsked, PreferenceAsked, PreferenceRequest
from gpuactors.core.values.model import DeviceId, Token
from tests.core.builders import H100, Core, allocate_call, gpu

# --- the model: every set of places, every choice of groups -----------------------------------------------


def modelled(groups: list[Group], need: int, anchors: Collection[tuple[int, str]]) -> list[DeviceId]:
    """`choose` by trying everything, one place and one group after the other."""
    if need <= 0:
        return []
    groups = narrowed(groups, need, lambda g: g.numa_node, {n for n, _ in anchors})
    groups = narrowed(groups, need, lambda g: g.pcie_root, {r for _, r in anchors})
    exact = exactly(groups, need)
    return [i for g in exact for i in g.ids] if exact is not None else by_size(groups, need)


def narrowed(
    groups: list[Group], need: int, place: Callable[[Group], Any], anchors: Collection[Any]
) -> list[Group]:
    whole = exactly(groups, need) is not None
    places = sorted({place(g) for g in groups} - set(anchors))
    for size in range(len(places) + 1):
        for extra in combinations(places, size):
            inside = [g for g in groups if place(g) in anchors or place(g) in extra]
            enough = sum(len(g.ids) for g in inside) >= need
            if enough and (not whole or exactly(inside, need) is not None):
                return inside
    return groups


def exactly(groups: list[Group], need: int) -> list[Group] | None:
    sums = [{0}]
    for group in reversed(groups):
        sums.append(sums[-1] | {s + len(group.ids) for s in sums[-1]})
    sums.reverse()
    if need not in sums[0]:
        return None
    taken = []
    for index, group in enumerate(groups):
        if need and need - len(group.ids) in sums[index + 1]:
            taken.append(group)
            need -= len(group.ids)
    return taken


def by_size(groups: list[Group], need: int) -> list[DeviceId]:
    taken: list[DeviceId] = []
    left = sorted(groups, key=lambda g: (-len(g.ids), g.key))
    while need > 0 and left:
        fitting = next((g for g in left if len(g.ids) <= need), None)
        group = fitting or min(left, key=lambda g: (len(g.ids), g.key))
        left.remove(group)
        taken.extend(group.ids[:need])
        need -= min(len(group.ids), need)
    return taken


@st.composite
def nodes(draw: st.DrawFn) -> list[Group]:
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=12))
    groups, number = [], 0
    for size in sizes:
        ids = tuple(DeviceId(f"0000:{number + n:02x}:00.0") for n in range(size))
        number += size
        root = f"pci0000:{draw(st.integers(0, 4))}0"
        groups.append(Group(ids, draw(st.sampled_from([0, 1, 2, 3, 1 << 16])), root))
    return sorted(groups, key=lambda g: g.key)


@given(nodes(), st.integers(0, 40), st.data())
def test_the_answer_is_that_of_trying_everything(groups: list[Group], need: int, data: st.DataObject) -> None:
    need = min(need, sum(len(g.ids) for g in groups))
    places = sorted({(g.numa_node, g.pcie_root) for g in groups})
    anchors = data.draw(st.sets(st.sampled_from(places), max_size=2))
    assert choose(groups, need, anchors, Search()) == modelled(groups, need, anchors)


@given(nodes(), st.integers(1, 40), st.integers(0, 30))
def test_without_steps_the_answer_still_has_the_right_size_and_breaks_no_group_without_need(
    groups: list[Group], need: int, steps_max: int
) -> None:
    need = min(need, sum(len(g.ids) for g in groups))
    search = Search(steps_max)
    ids = choose(groups, need, (), search)
    assert search.steps <= steps_max
    assert len(ids) == len(set(ids)) == need
    broken = [g for g in groups if 0 < len(set(ids) & set(g.ids)) < len(g.ids)]
    assert len(broken) <= (exactly(groups, need) is None)


def test_without_steps_the_fullest_places_are_taken() -> None:
    sizes = {0: 1, 1: 3, 2: 2, 3: 3}
    groups = [
        Group((DeviceId(f"0000:{node}{n}:00.0"),), node, "")
        for node, size in sizes.items()
        for n in range(size)
    ]
    assert {g.numa_node for g in groups if g.ids[0] in choose(groups, 5, (), Search(0))} == {1, 3}


def test_a_node_of_32_devices_is_searched_to_the_end() -> None:
    for each in (1, 2, 3, 4):
        groups = [
            Group(
                tuple(DeviceId(f"0000:{n * each + i:02x}:00.0") for i in range(each)),
                n % 8,
                f"pci{n % 16:02x}",
            )
            for n in range(32 // each)
        ]
        groups.sort(key=lambda g: g.key)
        for need in range(1, sum(len(g.ids) for g in groups) + 1):
            search = Search()
            choose(groups, need, (), search)
            assert search.steps < PREFERENCE_STEPS_MAX / 2, (each, need)


# --- the work of a whole call -----------------------------------------------------------------------------

CALLS_PER_ID = 60
"""Function calls of Python for one device ID, with those of its groups and places; the old search took thousands."""


def counted(work: Callable[[], object]) -> int:
    """How many functions are called, built-in ones included: the same number on each machine."""
    count = 0

    def profile(_frame: object, event: str, _arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


NODES: dict[str, Callable[[int], tuple[int, int, str]]] = {
    # group, NUMA node, root of device n
    "pairs on 16 NUMA nodes": lambda n: (n // 2, n % 16, f"pci{n % 20:04x}"),
    "each device has its root": lambda n: (n, 0, f"pci{n:04x}"),
    "groups of every size": lambda n: (int((2 * n) ** 0.5), n % 7, f"pci{n % 31:04x}"),
    "one group": lambda n: (1, 0, "pci0000"),
}


@pytest.mark.parametrize("containers", [8, 24])
@pytest.mark.parametrize("shape", NODES)
def test_a_preference_of_many_times_1024_devices_costs_a_bounded_number_of_steps(
    shape: str, containers: int
) -> None:
    functions = []
    for n in range(1024):
        group, numa_node, root = NODES[shape](n)
        functions.append(
            gpu(f"{n // 256:04x}:{n % 256:02x}:00.0", group, numa_node=numa_node, pcie_root=root)
        )
    core = Core(*functions)
    ids = tuple(DeviceId(f.address) for f in functions)
    requests = tuple(
        PreferenceRequest(ids, (), size)
        for size in (513, 512, 511, 7, 1023, 1, 300, 1024) * (containers // 8)
    )
    without = counted(lambda: core.feed(PreferenceAsked(Token(1), H100, ())))
    work = counted(lambda: core.feed(PreferenceAsked(Token(2), H100, requests)))
    assert work - without < CALLS_PER_ID * len(ids) * len(requests)


def test_ids_that_are_not_ours_are_answered_with_as_little_work() -> None:
    core = Core(gpu("01:00.0"))
    ids = tuple(DeviceId(str(n)) for n in range(8192))
    work = counted(
        lambda: core.feed(PreferenceAsked(Token(1), H100, (PreferenceRequest(ids, ids[:9], 5000),)))
    )
    assert work < CALLS_PER_ID * len(ids)


class Compared(str):
    """A string whose comparisons `counted` sees."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other)


@pytest.mark.parametrize("different", [4096, 4095, 1])
def test_an_allocate_of_thousands_of_unknown_ids_is_refused_with_little_work(different: int) -> None:
    core = Core(*(gpu(f"{n:02x}:00.0") for n in range(1, 65)))
    ids = tuple(DeviceId(Compared(n % different)) for n in range(4096))
    asked = AllocateAsked(Token(1), H100, (ids,))
    one = counted(lambda: core.feed(allocate_call("x", token=2)))
    assert counted(lambda: core.feed(asked)) - one < 50 * len(ids)
