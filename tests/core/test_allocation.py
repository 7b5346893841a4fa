"""Preferred allocation: must-include first, whole groups, fewest NUMA nodes, then the same PCIe root."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpuactors.core.deviceplugin.allocation import prefer
from gpuactors.core.events.deviceplugin import PreferenceRequest
from gpuactors.core.values.model import DeviceId, PciFunction
from tests.core.builders import devices_of, gpu


def chosen(
    functions: list[PciFunction],
    size: int,
    *,
    available: list[str] | None = None,
    must: tuple[str, ...] = (),
) -> list[str]:
    devices = devices_of(*functions)
    ids = [f.address for f in functions] if available is None else available
    request = PreferenceRequest(
        available=tuple(map(DeviceId, ids)), must_include=tuple(map(DeviceId, must)), size=size
    )
    answer = prefer(request, {DeviceId(d.key): d for d in devices})
    return [i.removeprefix("0000:").removesuffix(".0") for i in answer]


def test_without_topology_the_lowest_addresses() -> None:
    functions = [gpu(f"0{n}:00.0") for n in (4, 2, 3, 1)]
    assert chosen(functions, 2) == ["01:00", "02:00"]


def test_one_numa_node_is_better_than_two() -> None:
    functions = [gpu(f"0{n}:00.0", numa_node=n % 2) for n in range(1, 9)]
    assert chosen(functions, 3) == ["02:00", "04:00", "06:00"]
    assert chosen(functions, 5) == ["01:00", "02:00", "04:00", "06:00", "08:00"]


def test_the_numa_node_of_what_must_be_included_is_stayed_with() -> None:
    functions = [gpu(f"0{n}:00.0", numa_node=n % 2) for n in range(1, 9)]
    assert chosen(functions, 3, must=("0000:03:00.0",)) == ["01:00", "03:00", "05:00"]


def test_one_pcie_root_is_better_than_two_within_the_numa_node() -> None:
    functions = [gpu(f"0{n}:00.0", numa_node=0, pcie_root=f"pci0000:{n % 2}0") for n in range(1, 7)]
    assert chosen(functions, 2) == ["02:00", "04:00"]
    assert chosen(functions, 3) == ["02:00", "04:00", "06:00"]
    assert chosen(functions, 2, must=("0000:05:00.0",)) == ["01:00", "05:00"]


def test_a_device_without_topology_is_used_last() -> None:
    functions = [gpu("01:00.0", numa_node=None), gpu("02:00.0", numa_node=1), gpu("03:00.0", numa_node=1)]
    assert chosen(functions, 2) == ["02:00", "03:00"]


def test_whole_groups_come_before_numa_nodes() -> None:
    pair = [gpu("01:00.0", 7, numa_node=0), gpu("02:00.0", 7, numa_node=0)]
    singles = [gpu("03:00.0", numa_node=0), gpu("04:00.0", numa_node=1), gpu("05:00.0", numa_node=1)]
    assert chosen([*pair, *singles], 2) == ["01:00", "02:00"]
    assert chosen([*pair, *singles], 1) == ["03:00"], "a pair is not broken for a single device"
    assert chosen([*pair, *singles[:1], singles[1]], 3) == ["01:00", "02:00", "03:00"]


def test_the_rest_of_a_group_goes_along_with_what_must_be_included() -> None:
    functions = [gpu("01:00.0", 7), gpu("02:00.0"), gpu("09:00.0", 7)]
    assert chosen(functions, 2, must=("0000:09:00.0",)) == ["01:00", "09:00"]


def test_a_group_is_broken_only_if_it_must_be_and_then_the_smallest() -> None:
    triple = [gpu(f"0{n}:00.0", 7) for n in (1, 2, 3)]
    pair = [gpu(f"0{n}:00.0", 8) for n in (4, 5)]
    assert chosen([*triple, *pair], 4) == ["01:00", "02:00", "03:00", "04:00"]
    assert chosen([*triple, *pair], 1) == ["04:00"]


def test_nonsense_is_answered_not_refused() -> None:
    functions = [gpu("01:00.0"), gpu("02:00.0")]
    assert chosen(functions, 0) == []
    assert chosen(functions, -3) == []
    assert chosen(functions, 9) == ["01:00", "02:00"]
    assert chosen(functions, 1, available=["51", "7"]) == ["51"]
    assert chosen(functions, 1, must=("0000:01:00.0", "0000:02:00.0")) == ["01:00"]


@st.composite
def nodes(draw: st.DrawFn) -> list[PciFunction]:
    count = draw(st.integers(1, 16))
    return [
        gpu(
            f"{n:02x}:00.0",
            draw(st.integers(1, 6)),
            numa_node=draw(st.sampled_from([None, 0, 1, 2])),
            pcie_root=f"pci0000:{draw(st.integers(0, 3))}0",
        )
        for n in range(1, count + 1)
    ]


@given(nodes(), st.integers(-1, 20), st.data())
def test_any_answer_is_of_the_right_size_out_of_what_was_offered_with_what_must_be(
    functions: list[PciFunction], size: int, data: st.DataObject
) -> None:
    addresses = [f.address for f in functions]
    available = data.draw(st.permutations(addresses))[: data.draw(st.integers(1, len(addresses)))]
    must = tuple(available[: data.draw(st.integers(0, min(max(size, 0), len(available))))])
    answer = chosen(functions, size, available=list(available), must=must)
    full = [f"0000:{i}.0" for i in answer]
    assert set(full) <= set(available)
    assert len(full) == len(set(full)) == max(0, min(size, len(available)))
    assert set(must) <= set(full)
    shuffled = data.draw(st.permutations(available))
    assert chosen(functions, size, available=list(shuffled), must=must) == answer, (
        "the order offered does not matter"
    )


@given(nodes(), st.integers(1, 16))
def test_no_group_is_broken_if_whole_groups_can_do(functions: list[PciFunction], size: int) -> None:
    groups: dict[int | None, int] = {}
    for f in functions:
        groups[f.iommu_group] = groups.get(f.iommu_group, 0) + 1
    sums = {0}
    for members in groups.values():
        sums |= {s + members for s in sums}
    answer = {f"0000:{i}.0" for i in chosen(functions, size)}
    broken = [
        g
        for g in groups
        if 0 < len(answer & {f.address for f in functions if f.iommu_group == g}) < groups[g]
    ]
    if size in sums:
        assert broken == []
    else:
        assert len(broken) <= 1
