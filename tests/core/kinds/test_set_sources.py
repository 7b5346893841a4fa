"""Sets are read from the operator's file, the fabric manager's list and EGM's; what is wrong costs only itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuactors.core.kinds.set_sources import (
    MODULE_ID_MAX,
    SETS_MAX,
    GpuIdentity,
    SetsRead,
    egm_sets,
    fabric_sets,
    identities,
    known_sets,
    module_ids,
    operator_sets,
    partitions,
)
from gpuactors.core.kinds.sets import DeviceSet, KnownSets, SetsOfSource, SetSource
from gpuactors.core.values.model import DeviceKey, PciAddress
from tests.core.builders import gpu
from tests.core.kinds.boards import egm, key, partition

FILE = "/etc/gpuactors/sets.yaml"
FMPM = "fmpm -l"

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def one_problem(read: SetsRead, *words: str) -> tuple[DeviceSet, ...]:
    """The sets that stand, where one is wrong, and the sentence says so with these words."""
    (problem,) = read.problems
    assert all(word in problem for word in words), problem
    return read.sets


# --- the operator's file ----------------------------------------------------------------------------------


def mine(name: str, *numbers: int) -> DeviceSet:
    return DeviceSet(tuple(sorted(map(key, numbers))), SetSource.OPERATOR, name)


def test_the_operators_sets_are_by_size_and_number() -> None:
    content = {
        1: [["0000:01:00.0"]],
        "2": [["02:00.0", "00000000:01:00.0"], ["0000:03:00.0", "0000:04:00.0"]],
    }
    assert operator_sets(FILE, content) == SetsRead((mine("1", 1), mine("1", 1, 2), mine("2", 3, 4)))
    assert operator_sets(FILE, {}) == SetsRead()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (["0000:01:00.0"], "it has 1 addresses; move it"),
        (["0000:01:00.0", "0000:01:00.0"], "0000:01:00.0 is named twice; remove one"),
        (["0000:01:00.0", "GPU-1"], "GPU-1 is no PCI address; write it as"),
        (["0000:03:00.0", 60.0], "60.0 is no PCI address; write it as 0000:3b:00.0, in quotation marks"),
        ("0000:01:00.0", "no list of 1 to 64 PCI addresses"),
        ([], "no list of 1 to 64 PCI addresses"),
        (["0000:01:00.0"] * 65, "no list of 1 to 64 PCI addresses"),
    ],
)
def test_a_wrong_set_is_named_and_the_others_keep_their_numbers(wrong: object, words: str) -> None:
    read = operator_sets(FILE, {2: [wrong, ["0000:03:00.0", "0000:04:00.0"]]})
    assert one_problem(read, f"{FILE}, sets of 2, number 1: ", words) == (mine("2", 3, 4),)


@pytest.mark.parametrize("size", [0, 65, -1, "two", True, None, "²", 2.0])
def test_a_size_that_is_none_costs_its_sets(size: object) -> None:
    read = operator_sets(FILE, {size: [["0000:01:00.0"]], 1: [["0000:02:00.0"]]})
    if size is True:  # the same key as 1
        assert len(read.problems) == 1
    else:
        assert one_problem(read, f"{FILE}, sets of {size}: the size is no number") == (mine("1", 2),)


def test_a_file_of_another_form_is_named() -> None:
    assert one_problem(operator_sets(FILE, ["x"]), FILE, "no mapping") == ()
    assert one_problem(operator_sets(FILE, {2: "x"}), f"{FILE}, sets of 2: it is no list") == ()


def test_a_file_of_too_many_sets_is_read_to_the_bound() -> None:
    content = {1: [["0000:01:00.0"]] * (SETS_MAX + 5), 2: [["0000:01:00.0", "0000:02:00.0"]]}
    assert len(one_problem(operator_sets(FILE, content), f"more than {SETS_MAX} sets")) == SETS_MAX
    assert operator_sets(FILE, {1: content[1][:SETS_MAX]}).problems == ()


def test_module_ids_are_by_address() -> None:
    content = {"0000:01:00.0": 3, "02:00.0": "1", "0000:03:00.0": 0}
    assert module_ids(FILE, content) == ({key(1): 3, key(2): 1}, ())


def test_a_wrong_module_id_costs_itself() -> None:
    content = {
        "0000:01:00.0": 3,
        "0000:02:00.0": 3,
        "0000:03:00.0": MODULE_ID_MAX + 1,
        "x": 4,
        "0000:04:00.0": 4,
    }
    found, problems = module_ids(FILE, content)
    assert found == {key(4): 4}
    assert [p.partition("; ")[0] for p in problems] == [
        f"{FILE}, module id of 0000:03:00.0: 256 is no number from 1 to 255",
        f"{FILE}, module id of x: x is no PCI address",
        f"{FILE}: 2 GPUs have the module id 3",
    ]
    assert module_ids(FILE, 7)[0] == {}


# --- the fabric manager -----------------------------------------------------------------------------------

UNKNOWN = "00000000:00:00.0"


@dataclass(frozen=True)
class Listed:
    """A GPU in the list."""

    physical: int
    uuid: str = ""
    bus: str = UNKNOWN

    def json(self) -> dict[str, object]:
        return {
            "physicalId": self.physical,
            "uuid": self.uuid,
            "pciBusId": self.bus,
            "numNvLinksAvailable": 18,
        }


def entries(*partitions: tuple[int, int, tuple[Listed, ...]]) -> list[object]:
    """As `fmpm -l` prints them: number, whether it is active, GPUs."""
    return [
        {"partitionId": number, "isActive": active, "numGpus": len(gpus), "gpuInfo": [g.json() for g in gpus]}
        for number, active, gpus in partitions
    ]


def listing(*partitions: tuple[int, int, tuple[Listed, ...]]) -> dict[str, object]:
    """The whole of what it prints."""
    return {
        "version": 16909068,
        "numPartitions": len(partitions),
        "maxNumPartitions": 15,
        "partitionInfo": entries(*partitions),
    }


def uuid(number: int) -> str:
    return f"GPU-{number:08x}-0000-4000-8000-000000000000"


def fabric(content: object, gpus: Sequence[GpuIdentity]) -> SetsRead:
    """What is read from the list."""
    listed, wrong = partitions(FMPM, content)
    read = fabric_sets(FMPM, listed, gpus)
    return SetsRead(read.sets, (*wrong, *read.problems))


KNOWN = tuple(GpuIdentity(key(n), uuid(n), n) for n in (1, 2, 3, 4))


def by_all(number: int) -> Listed:
    return Listed(number, uuid(number).upper(), f"00000000:{number:02X}:00.0")


@pytest.mark.parametrize(
    "listed",
    [by_all, lambda n: Listed(8 + n, uuid(n)), lambda n: Listed(8 + n, "", f"0000:{n:02x}:00.0"), Listed],
    ids=["uuid and address", "uuid", "address", "physical id"],
)
def test_a_partition_is_found_by_what_the_list_has(listed: type[Listed]) -> None:
    content = listing((1, 0, (listed(2), listed(1))), (0, 1, (listed(3), listed(4))))
    wanted = (partition(1, 1, 2), partition(0, 3, 4, active=True))
    assert fabric(content, KNOWN) == SetsRead(wanted)
    assert fabric(content["partitionInfo"], KNOWN).sets == wanted


def test_physical_ids_of_an_a100_are_no_module_ids() -> None:
    content = listing((1, 0, tuple(Listed(n, uuid(5 - n)) for n in (1, 2))))
    assert fabric(content, KNOWN) == SetsRead((partition(1, 3, 4),))


def test_a_null_or_missing_name_is_an_empty_one() -> None:
    info = [{"physicalId": 1, "uuid": None, "pciBusId": None}, {"physicalId": 2}]
    content = [{"partitionId": 1, "isActive": True, "gpuInfo": info}]
    assert fabric(content, KNOWN) == SetsRead((partition(1, 1, 2, active=True),))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (
            Listed(1, uuid(1), "00000000:02:00.0"),
            "is that of 0000:01:00.0 here, and pciBusId is 0000:02:00.0",
        ),
        (Listed(1, "GPU-7", "00000000:01:00.0"), "the GPU at 0000:01:00.0 has UUID GPU-00000001"),
        (Listed(1, "GPU-7"), "of no GPU whose UUID is known here"),
        (
            Listed(1, "", "00000000:07:00.0"),
            "the GPU at 0000:07:00.0 is not selected, or is not on this node; ",
        ),
        (Listed(1, "", "nonsense"), "pciBusId nonsense is no PCI address"),
        (Listed(7), "physicalId 7 comes without UUID and PCI address, and is the module id of no GPU here"),
        (Listed(2, uuid(2)), "2 of its GPUs are 0000:02:00.0"),
    ],
)
def test_a_contradiction_refuses_its_partition_alone(wrong: Listed, words: str) -> None:
    content = listing((1, 0, (wrong, by_all(2))), (2, 0, (by_all(3), by_all(4))))
    read = fabric(content, KNOWN)
    assert one_problem(read, f"{FMPM}, partition 1: ", words) == (partition(2, 3, 4),)
    assert "; " in read.problems[0].removesuffix("; the partition is not used"), "and the remedy"


def test_a_uuid_or_module_id_of_two_gpus_is_a_contradiction() -> None:
    twins = (GpuIdentity(key(1), uuid(1), 1), GpuIdentity(key(2), uuid(1), 1))
    of_uuid = fabric(listing((1, 0, (Listed(1, uuid(1)),))), twins)
    assert one_problem(of_uuid, "is that of 0000:01:00.0 and 0000:02:00.0 here") == ()
    of_module = fabric(listing((1, 0, (Listed(1),))), twins)
    assert one_problem(of_module, "is the module id of 0000:01:00.0 and 0000:02:00.0") == ()


def test_a_physical_id_is_one_gpu_in_all_partitions() -> None:
    content = listing((1, 0, (Listed(1, uuid(1)),)), (2, 0, (Listed(1, uuid(2)),)), (3, 0, (by_all(3),)))
    read = fabric(content, KNOWN)
    assert read.sets == (partition(3, 3),)
    assert [p.partition(": ")[0] for p in read.problems] == [f"{FMPM}, partition 1", f"{FMPM}, partition 2"]
    assert all("1 is 0000:01:00.0, 1 is 0000:02:00.0" in p for p in read.problems)
    swapped = listing((1, 0, (Listed(1, uuid(1)),)), (2, 0, (Listed(2, uuid(1)),)))
    assert len(fabric(swapped, KNOWN).problems) == 2, "and a GPU has one physical id"


def test_a_number_that_is_listed_twice_is_of_no_partition() -> None:
    content = listing((1, 0, (by_all(1),)), (1, 1, (by_all(1),)), (2, 0, (by_all(2),)))
    assert one_problem(fabric(content, KNOWN), "partition 1: it is listed more than once") == (
        partition(2, 2),
    )


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("x", "(partition ?)"),
        ({"partitionId": "seven", "gpuInfo": []}, "(partition seven)"),
        ({"partitionId": 7}, "not 1 to 64 GPUs"),
        ({"partitionId": -1, "gpuInfo": [Listed(1).json()]}, "it has no number"),
        ({"partitionId": 7, "gpuInfo": [{"physicalId": []}]}, "$.gpuInfo[0].physicalId"),
        ({"partitionId": 7, "gpuInfo": [Listed(1).json()], "isActive": "maybe"}, "$.isActive"),
    ],
)
def test_an_entry_of_another_form_is_named(entry: object, words: str) -> None:
    content = {"partitionInfo": [entry, *entries((2, 0, (by_all(2),)))]}
    read = fabric(content, KNOWN)
    assert one_problem(read, f"{FMPM}, partition", words) == (partition(2, 2),)


def test_a_list_of_another_form_is_named() -> None:
    assert one_problem(fabric("Failed to connect", KNOWN), FMPM, "no list partitionInfo") == ()
    assert one_problem(fabric({"partitionInfo": 7}, KNOWN), FMPM, "no list partitionInfo") == ()
    many = listing(*((n, 0, (by_all(1),)) for n in range(SETS_MAX + 1)))
    assert len(one_problem(fabric(many, KNOWN), f"more than {SETS_MAX}")) == SETS_MAX


def test_gpus_are_known_by_what_the_host_says_switches_and_virtual_functions_are_none() -> None:
    functions = [
        replace(gpu("01:00.0"), gpu_uuid=uuid(1)),
        gpu("02:00.0"),
        gpu("03:00.0", class_code="068000"),
        replace(gpu("04:00.0"), physical=PciAddress("0000:01:00.0")),
    ]
    assert identities(functions, {key(2): 5}) == (GpuIdentity(key(1), uuid(1)), GpuIdentity(key(2), "", 5))


# --- EGM and NVSwitches -----------------------------------------------------------------------------------


def test_an_egm_is_its_gpus() -> None:
    lists = {"egm5": ("0000:03:00.0",), "egm4": ("0000:02:00.0", "0000:01:00.0"), "egm6": ()}
    assert egm_sets(lists) == SetsRead((egm("egm4", 1, 2), egm("egm5", 3)))


def test_a_wrong_list_of_an_egm_costs_that_egm() -> None:
    read = egm_sets({"egm4": ("x",), "egm5": ("0000:03:00.0",)})
    assert one_problem(read, "/sys/class/egm/egm4", "x is no PCI address") == (egm("egm5", 3),)
    twice = {"egm4": ("0000:01:00.0",), "egm5": ("0000:01:00.0", "0000:02:00.0"), "egm6": ("0000:03:00.0",)}
    assert one_problem(egm_sets(twice), "0000:01:00.0 is in the lists of egm4 and egm5") == (egm("egm6", 3),)


def test_all_sources_together() -> None:
    read = {
        SetSource.OPERATOR: SetsOfSource(KnownSets((mine("1", 1),), {key(1): 7}, ("wrong",))),
        SetSource.FABRIC_MANAGER: SetsOfSource(
            KnownSets(partitions=partitions("", entries((4, 1, (Listed(7),))))[0])
        ),
    }
    functions = {f.address: f for f in (gpu("01:00.0"), gpu("02:00.0"))}
    both = (mine("1", 1), partition(4, 1, active=True))
    known = known_sets(read, functions)
    assert (sorted(known.sets, key=lambda s: s.name), known.problems) == ([*both], ("wrong",))
    assert known_sets({SetSource.OPERATOR: SetsOfSource(unread="away")}, functions) == KnownSets()


# --- any input --------------------------------------------------------------------------------------------


@given(JSON)
def test_any_content_is_read_or_named(content: object) -> None:
    gpus = (GpuIdentity(key(1), uuid(1), 1),)
    for read in (
        operator_sets(FILE, content),
        fabric(content, gpus),
        fabric({"partitionInfo": [content]}, gpus),
        fabric([{"partitionId": 1, "gpuInfo": [content]}], gpus),
        operator_sets(FILE, {1: [content]}),
    ):
        assert all(FILE in p or FMPM in p for p in read.problems)
        assert all(p.isprintable() and len(p) < 3000 for p in read.problems)
        assert all(s.size == len(set(s.devices)) > 0 for s in read.sets)
    found, _ = module_ids(FILE, content)
    assert all(isinstance(number, int) for number in found.values())


@given(st.dictionaries(st.text(max_size=4), st.lists(st.text(max_size=14), max_size=3), max_size=3))
def test_any_list_of_an_egm_is_read_or_named(lists: dict[str, list[str]]) -> None:
    read = egm_sets(lists)
    assert len(read.sets) <= len(lists)
    assert all(p.isprintable() for p in read.problems)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 4)), max_size=6), st.data())
def test_no_partition_has_a_gpu_that_the_list_contradicts(
    infos: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    """Of each GPU: physical id, number of its UUID, number of its address; 0 is none."""
    listed = [
        Listed(p, uuid(u) if u else "", f"00000000:{a:02x}:00.0" if a else UNKNOWN) for p, u, a in infos
    ]
    parts = data.draw(st.lists(st.lists(st.sampled_from(listed), max_size=3), max_size=4)) if listed else []
    content = listing(*((n, 0, tuple(gpus)) for n, gpus in enumerate(parts)))
    read = fabric(content, KNOWN)
    assert len(read.sets) + len(read.problems) == len(parts), "each is used, or named once"
    for found in read.sets:
        meant = parts[int(found.name)]
        assert len(meant) == found.size
        for one in meant:
            if one.uuid:
                assert DeviceKey(f"0000:{int(one.uuid[4:12], 16):02x}:00.0") in found.devices
            if one.bus != UNKNOWN:
                assert DeviceKey(one.bus[4:]) in found.devices
