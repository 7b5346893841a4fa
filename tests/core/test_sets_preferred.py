"""Preferred allocation where devices belong together: a partition of the exact size that breaks up least."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hypothesis import given
from hypothesis import strategies as st

from gpuactors.core.deviceplugin.allocation import prefer
from gpuactors.core.deviceplugin.choice import Search
from gpuactors.core.events.deviceplugin import PreferenceRequest
from gpuactors.core.kinds.sets import DeviceSet, SetSource
from gpuactors.core.values.model import DeviceId, PciFunction
from tests.core.builders import devices_of, gpu
from tests.core.kinds.boards import board, egm, key, partition, switches


def ids(numbers: Iterable[int]) -> tuple[DeviceId, ...]:
    return tuple(DeviceId(key(n)) for n in numbers)


def chosen(
    size: int,
    sets: Sequence[DeviceSet],
    available: Sequence[int] = range(1, 9),
    *,
    must: tuple[int, ...] = (),
    busy: tuple[int, ...] = (),
    functions: Sequence[PciFunction] | None = None,
    search: Search | None = None,
    required: bool = False,
) -> list[int]:
    """The numbers of the devices that are chosen."""
    functions = [gpu(f"{n:02x}:00.0") for n in available] if functions is None else functions
    known = {DeviceId(d.key): d for d in devices_of(*functions)}
    request = PreferenceRequest(available=ids(available), must_include=ids(must), size=size)
    answer = prefer(request, known, ids(busy), search, sets=sets, sets_required=required)
    return [int(i[5:7], 16) for i in answer]


def test_a_pair_is_a_partition() -> None:
    assert chosen(2, board(8), [2, 3, 4, 5]) == [3, 4]
    assert chosen(2, (), [2, 3, 4, 5]) == [2, 3], "as before without sets"


def test_the_half_that_is_already_broken_up_is_used_first() -> None:
    assert chosen(2, board(8), [1, 2, 3, 4, 5, 6]) == [5, 6]
    assert chosen(1, board(8), [1, 2, 3, 4, 5, 6, 7]) == [7]


def test_of_equal_ones_the_active_is_first() -> None:
    assert chosen(2, board(8)) == [1, 2]
    assert chosen(2, board(8, frozenset({6}))) == [5, 6]
    broken = board(8, frozenset({4}))
    assert chosen(2, broken, [1, 2, 3, 4, 5, 6]) == [5, 6], "an active one that breaks up more is not"


def test_a_set_with_a_busy_device_is_none_while_others_are_free() -> None:
    assert chosen(2, board(8), [1, 2, 3, 4], busy=(1,)) == [3, 4]
    assert chosen(2, board(8), [1, 2, 3], busy=(1,)) == [2, 3], "free devices come before a partition"
    assert chosen(2, board(8), [1, 2], busy=(1,)) == [1, 2]


def test_a_busy_set_comes_before_free_devices_where_sets_are_required() -> None:
    """Allocate would refuse the free ones, which are no set, and the pod would have failed."""
    assert chosen(2, board(8), [1, 2, 3], busy=(1,), required=True) == [1, 2]
    assert chosen(2, board(8), [1, 2, 3, 4], busy=(1,), required=True) == [3, 4], "a free set is better"
    assert chosen(2, board(8), [1, 3, 5], busy=(1,), required=True) == [3, 5], "there is no set"


def test_what_must_be_included_is_in_the_set() -> None:
    assert chosen(2, board(8), must=(6,)) == [5, 6]
    assert chosen(4, board(8), must=(2, 3)) == [1, 2, 3, 4]
    assert chosen(2, board(8), must=(2, 3)) == [2, 3]
    assert chosen(3, board(8), must=(8,)) == [1, 2, 8]


def test_a_partition_does_not_split_an_iommu_group_if_another_one_splits_none() -> None:
    functions = [gpu("01:00.0"), gpu("02:00.0", 7), gpu("03:00.0", 7), gpu("04:00.0"), gpu("05:00.0")]
    sets = (partition(1, 1, 2), partition(2, 4, 5))
    assert chosen(2, sets, [1, 2, 3, 4, 5], functions=functions) == [4, 5]
    assert chosen(2, sets[:1], [1, 2, 3, 4, 5], functions=functions) == [1, 2], "a partition is worth more"


def test_the_gpus_of_an_egm_stay_together() -> None:
    sets = (egm("egm4", 1, 2), egm("egm5", 3, 4))
    assert chosen(2, sets, [2, 3, 4]) == [3, 4]
    assert chosen(1, sets, [1, 2, 3]) == [3], "the one that is broken up already"
    assert chosen(1, sets, [1, 2, 3, 4]) == [1]
    assert chosen(2, sets, [1, 2, 3, 4], must=(4,)) == [3, 4]
    assert chosen(3, sets, [1, 2, 3, 4]) == [1, 2, 3]


def test_the_group_of_what_must_be_included_is_completed_before_its_egm() -> None:
    functions = [gpu(f"0{n}:00.0", group) for n, group in ((1, 7), (2, 7), (3, 8), (4, 8))]
    sets = (egm("egm4", 1, 2, 3, 4),)
    assert chosen(2, sets, [1, 2, 3, 4], functions=functions, must=(4,)) == [3, 4]
    assert chosen(3, sets, [1, 2, 3, 4], functions=functions, must=(4,)) == [1, 3, 4]


def test_a_partition_comes_before_an_egm_of_that_size() -> None:
    assert chosen(2, (egm("egm4", 1, 2), partition(1, 3, 4)), [1, 2, 3, 4]) == [3, 4]


def test_all_switches_or_none() -> None:
    switch = "068000"
    functions = [gpu(f"0{n}:00.0", class_code=switch if n < 3 else "030200") for n in range(1, 6)]
    sets = (switches(1, 2),)
    assert chosen(1, sets, range(1, 6), functions=functions) == [3]
    assert chosen(3, sets, range(1, 6), functions=functions) == [1, 2, 3]
    assert chosen(3, sets, range(2, 6), functions=functions, must=(2,)) == [2, 3, 4]


def test_two_sets_of_the_same_devices_are_one() -> None:
    mine = DeviceSet((key(3), key(4)), SetSource.OPERATOR, "1")
    sets = (mine, partition(1, 3, 4, active=True), partition(2, 1, 2), egm("egm4", 3, 4))
    assert chosen(2, sets, [1, 2, 3, 4]) == [3, 4]
    assert chosen(2, tuple(reversed(sets)), [1, 2, 3, 4]) == [3, 4]


def test_a_search_without_steps_still_takes_a_set_the_active_one_first() -> None:
    assert chosen(2, board(8), [1, 2, 3, 4, 5, 6], search=Search(0)) == [1, 2]
    assert chosen(2, board(8, frozenset({5})), [1, 2, 3, 4, 5, 6], search=Search(0)) == [3, 4]
    search = Search()
    chosen(2, board(8), search=search)
    assert 0 < search.steps < 200


# --- any world --------------------------------------------------------------------------------------------


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[PciFunction], tuple[DeviceSet, ...]]:
    """Up to eight devices, some in one IOMMU group, with any sets of them."""
    count = draw(st.integers(1, 8))
    shared = draw(st.booleans())
    functions = [
        gpu(
            f"{n:02x}:00.0",
            draw(st.integers(20, 24)) if shared else n,
            numa_node=draw(st.sampled_from([None, 0, 1])),
        )
        for n in range(1, count + 1)
    ]
    sizes = st.sampled_from([size for size in (2, 2, 1, 3, 4) if size <= count])
    sets = []
    for name in range(draw(st.integers(0, 8))):
        size = draw(sizes)
        numbers = draw(st.permutations(range(1, count + 1)))[:size]
        sets.append(partition(name, *numbers, active=draw(st.booleans())))
    free = list(range(1, count + 1))
    for name in range(draw(st.integers(0, 2))):  # no device is in two of them
        members = draw(st.sets(st.sampled_from(free), min_size=1, max_size=3)) if free else set()
        if members:
            sets.append(egm(f"egm{name}", *members))
        free = [n for n in free if n not in members]
    return functions, tuple(draw(st.permutations(sets)))


def broken_up(choice: frozenset[int], wholes: Iterable[frozenset[int]]) -> int:
    return sum(bool(choice & whole) and not whole <= choice for whole in wholes)


@given(worlds(), st.data())
def test_any_answer_has_the_size_no_device_twice_and_breaks_up_no_more_than_the_best(
    world: tuple[list[PciFunction], tuple[DeviceSet, ...]], data: st.DataObject
) -> None:
    functions, sets = world
    numbers = [int(f.address[5:7], 16) for f in functions]
    sizes = st.integers(-1, 9)
    size = data.draw(st.sampled_from([s.size for s in sets]) | sizes if sets else sizes)
    gone = data.draw(st.integers(0, min(2, len(numbers) - 1)))
    available = data.draw(st.permutations(numbers))[gone:]
    must = tuple(available[: data.draw(st.sampled_from([0, 0, 1, 2]))])[: max(size, 0)]
    answer = chosen(size, sets, available, must=must, functions=functions)
    assert len(answer) == len(set(answer)) == max(0, min(size, len(available)))
    assert set(must) <= set(answer) <= set(available)
    assert chosen(size, tuple(reversed(sets)), available[::-1], must=must, functions=functions) == answer

    members = [(s, frozenset(int(i[5:7], 16) for i in s.devices)) for s in sets]
    whole = {numbers for _, numbers in members if numbers <= set(available)}
    groups = {
        frozenset(int(f.address[5:7], 16) for f in functions if f.iommu_group == group) & set(available)
        for group in {f.iommu_group for f in functions}
    }

    def cost(choice: frozenset[int]) -> tuple[int, int]:
        return broken_up(choice, groups), broken_up(choice, whole)

    exact = [n for s, n in members if s.is_partition and n in whole and len(n) == size and n >= set(must)]
    if exact and size > len(must):
        assert frozenset(answer) in exact
        assert cost(frozenset(answer)) == min(map(cost, exact))
        best = [n for n in exact if cost(n) == cost(frozenset(answer))]
        active = {n for s, n in members if s.is_active and n in best}
        assert not active or frozenset(answer) in active


@given(worlds(), st.integers(1, 8))
def test_no_egm_is_broken_up_if_whole_ones_can_do(
    world: tuple[list[PciFunction], tuple[DeviceSet, ...]], size: int
) -> None:
    functions = [gpu(f.address, numa_node=f.numa_node) for f in world[0]]  # each a group of its own
    sets = [s for s in world[1] if not s.is_partition]
    numbers = [int(f.address[5:7], 16) for f in functions]
    members = [frozenset(int(i[5:7], 16) for i in s.devices) for s in sets]
    alone = len(numbers) - sum(map(len, members))
    sums = {0}
    for units in (*map(len, members), *[1] * alone):
        sums |= {total + units for total in sums}
    answer = frozenset(chosen(size, sets, numbers, functions=functions))
    assert broken_up(answer, members) <= (0 if size in sums else 1)


@given(worlds(), st.integers(-1, 9))
def test_sets_of_other_nodes_change_nothing(
    world: tuple[list[PciFunction], tuple[DeviceSet, ...]], size: int
) -> None:
    functions, _ = world
    numbers = [int(f.address[5:7], 16) for f in functions]
    others = (partition(1, 50, 51), egm("egm4", 52, 53), switches(54, 55))
    assert chosen(size, others, numbers, functions=functions) == chosen(
        size, (), numbers, functions=functions
    )
