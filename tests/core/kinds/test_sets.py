"""Sets of devices: which request is none, and what a slice says of them."""

from __future__ import annotations

import pytest

from gpuactors.core.kinds.sets import (
    DeviceSet,
    SetSource,
    not_a_set,
    set_attributes,
    switch_set,
    with_attributes,
    without_devices,
)
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.slices import Attribute, OfferedDevice
from tests.core.kinds.boards import board, egm, key, partition, switches

A, B, C, D = (key(n) for n in range(1, 5))


@pytest.mark.parametrize(
    "devices",
    [(), (1,), (2, 1), (5, 6, 7, 8), tuple(range(1, 9)), (1, 2, 99)],
    ids=["none", "one", "a pair", "a half", "all", "a pair and a device of no set"],
)
def test_a_partition_is_a_set(devices: tuple[int, ...]) -> None:
    assert not_a_set([key(n) for n in devices], board(8)) is None


@pytest.mark.parametrize("devices", [(1, 3), (1, 2, 3), (1, 2, 5, 6), (1, 3, 99)])
def test_what_is_no_partition_is_refused_with_the_partitions_of_its_size(devices: tuple[int, ...]) -> None:
    why = not_a_set([key(n) for n in devices], board(8))
    assert why is not None
    assert why.cause is Cause.NOT_A_SET
    assert all(key(n) in why.message for n in devices if n != 99)
    assert key(99) not in why.message
    assert "--sets prefer" in why.message


def test_a_refusal_names_what_to_request_and_stays_short() -> None:
    why = not_a_set((A, C), board(8))
    assert why is not None
    assert f"({A}, {B}; {C}, {D}; " in why.message
    assert "by matchAttribute partition2" in why.message
    three = not_a_set((A, B, C), board(8))
    assert three is not None
    assert "it has none of 3; request 1, 2, 4, 8 GPUs" in three.message
    many = [partition(n, n, n + 100) for n in range(1, 100)]
    why = not_a_set((A, B), many)
    assert why is not None
    assert "and 95 more" in why.message
    assert len(why.message) < 500


def test_without_partitions_every_request_is_right() -> None:
    assert not_a_set((A, C), ()) is None
    assert not_a_set((A,), (egm("egm4", 1, 2),)) is None, "its container only gets no node of the EGM"


def test_some_of_the_switches_are_refused() -> None:
    s = (*board(8), switches(20, 21))
    assert not_a_set((key(20), key(21)), s) is None
    assert not_a_set((A, B, key(20), key(21)), s) is None
    why = not_a_set((A, B, key(20)), s)
    assert why is not None
    assert why.cause is Cause.NOT_A_SET
    assert f"{key(21)} are missing: request all 2" in why.message


def test_a_slice_says_the_partitions_the_module_and_the_egm() -> None:
    sets = (*board(8), egm("egm4", 1, 2))
    assert set_attributes(A, sets, {A: 3}) == {
        "gpuModuleID": 3,
        "partition1": 8,
        "partition2": 4,
        "partition4": 2,
        "partition8": 1,
        "egm": "egm4",
    }
    assert set_attributes(D, sets, {A: 3}) == {
        "partition1": 11,
        "partition2": 5,
        "partition4": 2,
        "partition8": 1,
    }
    assert set_attributes(key(99), sets, {key(99): 0}) == {}, "0 is unknown"


def test_a_device_of_two_partitions_of_a_size_has_no_number_of_it() -> None:
    sets = (partition(1, 1, 2), partition(2, 2, 3), partition(3, 4, 5))
    assert [set_attributes(key(n), sets, {}).get("partition2") for n in range(1, 6)] == [1, None, 2, 3, 3]


def test_a_number_of_the_operators_is_never_taken_for_one_of_the_fabric_manager() -> None:
    mine = DeviceSet((C, D), SetSource.OPERATOR, "1")
    assert set_attributes(C, (mine,), {}) == {"partition2": 1}
    assert set_attributes(C, (mine, partition(1, 1, 2)), {}) == {}
    single = DeviceSet((C,), SetSource.OPERATOR, "1")
    assert set_attributes(C, (mine, single, partition(1, 1, 2)), {}) == {"partition1": 1}, "another size"


def test_an_offer_without_sets_stays_the_same() -> None:
    offered = OfferedDevice("gpu-1", {"type": Attribute("string", "vfio")})
    assert with_attributes(offered, set_attributes(A, (), {})) is offered
    of_sets = set_attributes(A, (partition(0, 1, 2), egm("egm4", 1)), {A: 2})
    now = with_attributes(offered, of_sets)
    assert now.attributes == {
        "type": Attribute("string", "vfio"),
        "gpuModuleID": Attribute("int", 2),
        "partition2": Attribute("int", 0),
        "egm": Attribute("string", "egm4"),
    }


def test_the_switches_are_one_set_if_there_are_several() -> None:
    assert switch_set((C, B)) == (switches(2, 3),)
    assert switch_set((B,)) == (), "one switch is always whole"


def test_a_call_about_one_resource_has_the_sets_without_the_devices_of_others() -> None:
    sets = (partition(1, 1, 2, 9), switches(9, 10))
    assert without_devices(sets, {key(9), key(10)}) == (partition(1, 1, 2),)
    assert without_devices(sets, {key(1), key(2)}) == (partition(1, 9), switches(9, 10))
