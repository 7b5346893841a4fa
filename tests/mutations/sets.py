"""Bugs to plant in the sets of devices: each names the test that finds it in seconds."""

from __future__ import annotations

from typing import Final

from tests.mutations.mutations import Mutation

_PREFERRED: Final = "tests/core/test_sets_preferred.py"
_READ: Final = "tests/core/kinds/test_set_sources.py"
_SETS: Final = "tests/core/kinds/test_sets.py"
_ANY_WORLD: Final = (
    f"{_PREFERRED}::test_any_answer_has_the_size_no_device_twice_and_breaks_up_no_more_than_the_best"
)

SETS: Final = (
    Mutation(
        "a partition that breaks up more is as good",
        "core/deviceplugin/set_choice.py",
        "        sum(not (ids.isdisjoint(other) or ids.issuperset(other)) for other in whole),\n",
        "",
        _ANY_WORLD,
    ),
    Mutation(
        "a partition that splits an IOMMU group is as good",
        "core/deviceplugin/set_choice.py",
        "        sum(not ids.issuperset(group.ids) for group in touched),\n",
        "",
        _ANY_WORLD,
    ),
    Mutation(
        "an EGM of the right size is a partition",
        "core/deviceplugin/set_choice.py",
        "if found.is_partition and len(ids) == size",
        "if len(ids) == size",
        f"{_PREFERRED}::test_a_partition_comes_before_an_egm_of_that_size",
    ),
    Mutation(
        "a partition need not have what must be included",
        "core/deviceplugin/set_choice.py",
        " and ids.issuperset(must)",
        "",
        f"{_PREFERRED}::test_what_must_be_included_is_in_the_set",
    ),
    Mutation(
        "the GPUs of an EGM are chosen one by one",
        "core/deviceplugin/allocation.py",
        "        if len(parts) > 1:\n",
        "        if len(parts) > len(keys):\n",
        f"{_PREFERRED}::test_no_egm_is_broken_up_if_whole_ones_can_do",
    ),
    Mutation(
        "the search for a set takes no steps",
        "core/deviceplugin/set_choice.py",
        "not search.has(len(whole) + len(groups))",
        "not search.has(0)",
        f"{_PREFERRED}::test_a_search_without_steps_still_takes_a_set_the_active_one_first",
    ),
    Mutation(
        "two partitions together are a set",
        "core/kinds/sets.py",
        "any(in_partitions == set(s.devices) for s in partitions)",
        "any(in_partitions >= set(s.devices) for s in partitions)",
        f"{_SETS}::test_what_is_no_partition_is_refused_with_the_partitions_of_its_size",
    ),
    Mutation(
        "a number of the operator's is one of the fabric manager's",
        "core/kinds/sets.py",
        "for s in of_fabric or of_size if",
        "for s in of_size if",
        f"{_SETS}::test_a_number_of_the_operators_is_never_taken_for_one_of_the_fabric_manager",
    ),
    Mutation(
        "a module id of 0 is known",
        "core/kinds/sets.py",
        "modules.get(key) or None",
        "modules.get(key)",
        f"{_SETS}::test_a_slice_says_the_partitions_the_module_and_the_egm",
    ),
    Mutation(
        "an address that contradicts the UUID is not compared",
        "core/kinds/set_sources.py",
        "if len(by_uuid) > 1 or address not in (None, by_uuid[0]):",
        "if len(by_uuid) > 1:",
        f"{_READ}::test_a_contradiction_refuses_its_partition_alone",
    ),
    Mutation(
        "a UUID that contradicts the address is not compared",
        "core/kinds/set_sources.py",
        "            if uuid and gpu.uuid:\n",
        "            if uuid == gpu.uuid != '':\n",
        f"{_READ}::test_a_contradiction_refuses_its_partition_alone",
    ),
    Mutation(
        "a physical id is a module id whatever else the list has",
        "core/kinds/set_sources.py",
        "    if by_uuid:\n        if",
        "    if by_uuid and not info.physical_id:\n        if",
        f"{_READ}::test_physical_ids_of_an_a100_are_no_module_ids",
    ),
)
