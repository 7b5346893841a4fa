"""The pool that is offered: names, order, attributes, slices, taints and withdrawal (contract: ResourceSlices)."""

from __future__ import annotations

import re

import pytest
from msgspec.structs import replace

from gpuactors.core.claims.pool import Pool, has_counters, probe_spec, wanted_pool
from gpuactors.core.kinds.table import slice_name
from gpuactors.core.values.model import DeviceKey
from gpuactors.core.values.slices import (
    SLICE_ATTRIBUTES_MAX,
    Attribute,
    BlockKind,
    BlockReason,
    CounterSet,
    Offer,
    OfferedDevice,
    ServerKeeps,
    Taint,
)
from tests.support.offered import offered_gpu

DRIVER, NODE = "gpu.nvidia.com", "node-1"
YES, NO, UNKNOWN = ServerKeeps.YES, ServerKeeps.NO, ServerKeeps.UNKNOWN
HELD = BlockReason(BlockKind.HELD, "HeldByOther")
DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


offered = offered_gpu


def many(count: int) -> tuple[OfferedDevice, ...]:
    return tuple(offered(f"0000:{n // 8:02x}:00.{n % 8}") for n in range(count))


def pool(*devices: OfferedDevice, keeps: ServerKeeps = YES) -> Pool:
    return wanted_pool(Offer(DRIVER, NODE, devices), keeps)


def names(found: Pool) -> list[str]:
    return [device.name for device in found.devices]


def test_a_device_has_the_attributes_of_the_contract() -> None:
    (device,) = pool(offered(memory_bytes=1 << 38)).devices
    assert device.name == "gpu-0000-23-00-0"
    assert device.attributes == {
        "resource.kubernetes.io/pciBusID": Attribute("string", "0000:23:00.0"),
        "resource.kubernetes.io/pcieRoot": Attribute("string", "pci0000:20"),
        "resource.kubernetes.io/numaNode": Attribute("int", 1),
        "type": Attribute("string", "vfio"),
        "vendorID": Attribute("string", "0x10de"),
        "deviceID": Attribute("string", "0x2330"),
        "productName": Attribute("string", "GH100 [H100 SXM5 80GB]"),
        "iommuGroup": Attribute("int", 51),
        "iommuFDEnabled": Attribute("bool", True),
        "uuid": Attribute("string", "c527652b-b5ed-5dca-91cd-a2bbcb5e3422"),
    }
    assert device.capacity == {"addressableMemory": "256Gi"}
    assert len({**device.attributes, **device.capacity}) <= SLICE_ATTRIBUTES_MAX


def test_a_slice_says_nothing_of_who_has_a_device() -> None:
    gpus = many(200)
    assert pool(replace(gpus[0], claimed=True), *gpus[1:]) == pool(*gpus)


def test_a_device_is_made_again_only_if_it_changed() -> None:
    gpus = many(200)
    first = {device.name: device for device in pool(*gpus).devices}
    other = replace(gpus[7], capacity={"addressableMemory": "1Gi"})
    now = pool(*gpus[:7], other, *gpus[8:]).devices
    assert [device.name for device in now if first[device.name] is not device] == ["gpu-0000-00-00-7"]


def test_a_device_that_is_withdrawn_comes_back_when_the_server_keeps_taints() -> None:
    held = replace(offered(), blocked=HELD)
    without = pool(held, keeps=NO)
    assert (names(without), without.withdrawn) == ([], ("gpu-0000-23-00-0",))
    assert names(pool(held, keeps=YES)) == ["gpu-0000-23-00-0"]


def test_a_device_class_for_gpus_selects_no_nvswitch() -> None:
    (device,) = pool(offered(class_code="068000")).devices
    assert device.attributes["type"] == Attribute("string", "nvswitch")


def test_what_is_not_known_of_a_device_is_no_attribute_of_it() -> None:
    bare = offered(model=None, numa_node=None, pcie_root=None, iommu_group=None, vendor="")
    (device,) = pool(bare).devices
    assert set(device.attributes) == {
        "resource.kubernetes.io/pciBusID", "type", "deviceID", "iommuFDEnabled", "uuid",
    }  # fmt: skip
    assert device.capacity == {}


def test_numa_node_0_is_an_attribute() -> None:
    (device,) = pool(offered(numa_node=0, iommu_group=0)).devices
    assert device.attributes["resource.kubernetes.io/numaNode"] == Attribute("int", 0)
    assert device.attributes["iommuGroup"] == Attribute("int", 0)


@pytest.mark.parametrize("model", ["x" * 65, "é" * 33, "x" + "é" * 32])
def test_a_string_has_at_most_64_bytes(model: str) -> None:
    """slice-create-string-of-65: the server counts bytes, and refuses the whole slice."""
    (device,) = pool(offered(model=model)).devices
    value = device.attributes["productName"].value
    assert isinstance(value, str)
    assert 62 < len(value.encode()) <= 64
    assert model.startswith(value)


@pytest.mark.parametrize("address", ["0000:00:00.0", "0000:ff:1f.7", "abcd:ab:0c.3"])
def test_a_device_name_is_a_dns_label(address: str) -> None:
    """slice-create-bad-device-name."""
    assert DNS_LABEL.fullmatch(slice_name(DeviceKey(address)))


def test_devices_are_sorted_by_address_whatever_their_order() -> None:
    """The scheduler takes the first that fits: the order of the devices is its preference."""
    one, two, three = offered("0000:03:00.0"), offered("0000:23:00.0"), offered("0001:01:00.0")
    wanted = ["gpu-0000-03-00-0", "gpu-0000-23-00-0", "gpu-0001-01-00-0"]
    assert names(pool(three, one, two)) == names(pool(two, three, one)) == wanted


def test_a_five_digit_domain_is_left_out_with_its_reason() -> None:
    found = pool(offered("10000:01:00.0"), offered())
    assert names(found) == ["gpu-0000-23-00-0"]
    assert set(found.left_out) == {"gpu-10000-01-00-0"}
    assert "VMD" in found.left_out["gpu-10000-01-00-0"]


def test_no_device_is_an_empty_slice_and_not_none() -> None:
    assert pool().slices == ((),)


@pytest.mark.parametrize(
    ("count", "slices"), [(1, [1]), (128, [128]), (129, [128, 1]), (300, [128, 128, 44])]
)
def test_a_slice_has_at_most_128_devices(count: int, slices: list[int]) -> None:
    """slice-create-129-devices."""
    assert [len(s) for s in pool(*many(count)).slices] == slices


@pytest.mark.parametrize(("count", "slices"), [(64, [64]), (65, [64, 1]), (128, [64, 64])])
def test_a_slice_has_at_most_64_devices_if_any_has_a_taint(count: int, slices: list[int]) -> None:
    """gate-on-slice-create-65-devices-one-taint."""
    first, *others = many(count)
    assert [len(s) for s in pool(replace(first, blocked=HELD), *others).slices] == slices


def test_a_blocked_device_has_a_taint_where_the_server_keeps_taints() -> None:
    held = replace(offered(), blocked=HELD)
    broken = replace(offered("0000:24:00.0"), blocked=BlockReason(BlockKind.UNHEALTHY, "GroupNotViable"))
    found = pool(held, broken, offered("0000:25:00.0"))
    assert [d.taints for d in found.devices] == [
        (Taint("gpu.nvidia.com/held", "HeldByOther", "NoSchedule"),),
        (Taint("gpu.nvidia.com/unhealthy", "GroupNotViable", "NoSchedule"),),
        (),
    ]
    assert not found.withdrawn


@pytest.mark.parametrize("keeps", [NO, UNKNOWN])
def test_a_blocked_device_is_withdrawn_where_the_server_drops_taints(keeps: ServerKeeps) -> None:
    """slice-create-tainted-dry-run-gate-off: the taint is dropped, and a pod would run on the device. As long as it is
    not known whether it is, neither may be offered."""
    found = pool(replace(offered(), blocked=HELD), offered("0000:24:00.0"), keeps=keeps)
    assert names(found) == ["gpu-0000-24-00-0"]
    assert found.withdrawn == ("gpu-0000-23-00-0",)


@pytest.mark.parametrize("keeps", [NO, UNKNOWN])
def test_withdrawal_never_takes_the_device_of_a_live_claim(keeps: ServerKeeps) -> None:
    found = pool(replace(offered(), blocked=HELD, claimed=True), keeps=keeps)
    assert names(found) == ["gpu-0000-23-00-0"]
    assert not found.devices[0].taints
    assert not found.withdrawn


@pytest.mark.parametrize("cause", ["x" * 80, "-odd/one: é ", "", "_"])
def test_the_value_of_a_taint_is_a_label_value(cause: str) -> None:
    (device,) = pool(replace(offered(), blocked=BlockReason(BlockKind.HELD, cause))).devices
    assert re.fullmatch(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?", device.taints[0].value)
    assert len(device.taints[0].value) <= 63


# --- counters -------------------------------------------------------------------------------------------------


def card(parts: int, *, bus: int = 0x3B, whole: bool = True) -> tuple[OfferedDevice, ...]:
    """A physical function, or only its virtual ones."""
    name = f"pf-0000-{bus:02x}-00-0-counter-set"
    virtual = [
        replace(offered(f"0000:{bus:02x}:{n // 8 + 1:02x}.{n % 8}"), counter_set=name) for n in range(parts)
    ]
    physical = replace(offered(f"0000:{bus:02x}:00.0"), counter_set=name, is_whole=True)
    return (physical, *virtual) if whole else tuple(virtual)


def slots(number: int, bus: int = 0x3B) -> CounterSet:
    return CounterSet(f"pf-0000-{bus:02x}-00-0-counter-set", {"vf-slots": str(number)})


def with_counters(*devices: OfferedDevice, keeps: ServerKeeps = YES) -> Pool:
    return wanted_pool(Offer(DRIVER, NODE, devices), YES, keeps)


def test_a_part_takes_one_slot_of_its_card_and_the_card_takes_all() -> None:
    found = with_counters(*card(3), offered())
    consumed = {device.name: device.consumes for device in found.devices}
    assert consumed == {
        "gpu-0000-23-00-0": (),
        "gpu-0000-3b-00-0": (slots(3),),
        **{f"gpu-0000-3b-01-{n}": (slots(1),) for n in range(3)},
    }
    assert found.counter_sets == ((slots(3),),)
    assert len(found.slices) == 1, "no slice has both"


@pytest.mark.parametrize("keeps", [NO, UNKNOWN])
def test_nothing_consumes_counters_that_the_server_drops(keeps: ServerKeeps) -> None:
    found = with_counters(*card(3), keeps=keeps)
    assert found.counter_sets == ()
    assert {device.consumes for device in found.devices} == {()}


@pytest.mark.parametrize(
    "devices", [card(0), card(3, whole=False)], ids=["without parts", "without the whole"]
)
def test_a_card_that_is_not_there_with_parts_has_no_counters(devices: tuple[OfferedDevice, ...]) -> None:
    found = with_counters(*devices)
    assert found.counter_sets == ()
    assert {device.consumes for device in found.devices} == {()}


def test_a_physical_function_that_is_withdrawn_takes_its_counters_with_it() -> None:
    physical, *virtual = card(2)
    blocked = replace(physical, blocked=BlockReason(BlockKind.UNHEALTHY, "VirtualFunctions"))
    found = wanted_pool(Offer(DRIVER, NODE, (blocked, *virtual)), NO, YES)
    assert found.withdrawn == (physical.name,)
    assert found.counter_sets == ()
    found = wanted_pool(Offer(DRIVER, NODE, (replace(blocked, claimed=True), *virtual)), NO, YES)
    assert found.counter_sets == ((slots(2),),), "its claim was allocated before it had any"


def test_256_virtual_functions_of_8_cards_are_in_slices_of_64_and_their_sets_in_one_of_8() -> None:
    found = with_counters(*(device for bus in range(9) for device in card(32, bus=bus)))
    assert [len(devices) for devices in found.slices] == [64, 64, 64, 64, 41]
    assert [len(sets) for sets in found.counter_sets] == [8, 1]


def test_the_probe_has_one_device_with_a_taint() -> None:
    spec = probe_spec(DRIVER, NODE, counters=True)
    assert has_counters(spec)
    assert not has_counters(probe_spec(DRIVER, NODE, counters=False))
    assert (spec.driver, spec.node, spec.pool, spec.slice_count) == (DRIVER, NODE, NODE, 1)
    assert [len(d.taints) for d in spec.devices] == [1]
