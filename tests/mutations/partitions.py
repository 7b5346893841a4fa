"""Bugs to plant in the activation of partitions: each names the test that finds it in seconds."""

from __future__ import annotations

from typing import Final

from tests.mutations.mutations import Mutation

_MACHINE: Final = "core/partitions/machine.py"
_BY_NAME: Final = "tests/core/partitions/test_machine.py"
_ORDERS: Final = "tests/core/partitions/test_small_world.py::test_every_order_of_few_uses_and_faults"

PARTITIONS: Final = (
    Mutation(
        "a query counts for a call that came after it was requested",
        "core/fabric.py",
        "            partitions = machine.with_users(partitions, _users(state, replace(partitions, shown=shown)))\n",
        "            partitions = replace(partitions, users=_users(state, replace(partitions, shown=shown)))\n",
        "tests/core/test_fabric.py::test_a_call_that_comes_while_a_query_is_under_way_waits_for_the_next_one",
    ),
    Mutation(
        "one query is proof enough",
        _MACHINE,
        "WITNESSES: Final = 2\n",
        "WITNESSES: Final = 1\n",
        _ORDERS,
    ),
    Mutation(
        "a partition is activated before its intent is on disk",
        _MACHINE,
        "and partitions.durable >= record.intent\n",
        "and partitions.intents >= record.intent\n",
        _ORDERS,
    ),
    Mutation(
        "a partition is deactivated while a process has it open",
        _MACHINE,
        "return _E.UNWANTED if is_decided and not is_held else None",
        "return _E.UNWANTED if is_decided else None",
        f"{_BY_NAME}::test_it_is_deactivated_when_its_owner_has_gone_and_the_virtual_machine_has_ended",
    ),
    Mutation(
        "a lost partition is activated under a running virtual machine",
        _MACHINE,
        "return _E.START if _is_lost(record) and starts and not is_held else None",
        "return _E.START if _is_lost(record) else None",
        f"{_BY_NAME}::test_a_lost_one_without_a_call_is_left_as_it_is",
    ),
    Mutation(
        "an act is repeated under a running virtual machine",
        _MACHINE,
        "return record.act_due and partitions.act is None and is_free",
        "return record.act_due and partitions.act is None",
        f"{_BY_NAME}::test_no_deactivation_is_repeated_under_a_process_that_has_opened_it",
    ),
    Mutation(
        "a query that was requested during the act counts",
        _MACHINE,
        "        since=partitions.query + 1,\n        seen=None,",
        "        since=partitions.answered + 1,\n        seen=None,",
        f"{_BY_NAME}::test_a_query_from_before_the_end_of_the_act_does_not_count",
    ),
    Mutation(
        "an intent to deactivate proves that a partition is active",
        _MACHINE,
        "_S.VERIFYING if intent.goal is Goal.ACTIVATE else _S.DEACTIVATING,",
        "_S.VERIFYING,",
        f"{_BY_NAME}::test_an_intent_to_deactivate_is_no_proof_for_a_new_owner",
    ),
    Mutation(
        "a partition that overlaps another program's is activated",
        _MACHINE,
        "(p.id == record.id or p.devices & record.devices)",
        "p.id == record.id",
        f"{_BY_NAME}::test_one_that_overlaps_somebody_elses_is_refused_until_that_is_inactive",
    ),
    Mutation(
        "two partitions that overlap are ours at once",
        _MACHINE,
        "is_clear = not record.seen and not _overlapping(partitions, record)",
        "is_clear = not record.seen",
        f"{_BY_NAME}::test_of_two_that_overlap_one_is_reserved",
    ),
    Mutation(
        "a call is answered by a query from before it came",
        "core/partitions/outputs.py",
        "if record.seen and is_fresh(partitions, record, owner):",
        "if record.seen:",
        f"{_BY_NAME}::test_one_that_is_lost_is_activated_before_the_next_start_of_a_container",
    ),
    Mutation(
        "one query after the call is enough, beside one from before it",
        _MACHINE,
        "return queries > 0 and queries + by_exit >= WITNESSES",
        "return queries > 0",
        f"{_BY_NAME}::test_one_query_that_lies_after_a_restart_answers_no_call",
    ),
    Mutation(
        "devices that are no partition are used while one of them is deactivated",
        "core/partitions/outputs.py",
        "    touching = [r for r in partitions.records.values() if r.devices & devices]\n",
        "    touching = [r for r in partitions.records.values() if r.devices == devices]\n",
        f"{_BY_NAME}::test_devices_that_are_no_partition_wait_for_the_release_of_one_that_has_a_device",
    ),
    Mutation(
        "the first list answers a call that came before it",
        "core/fabric.py",
        "            partitions = _with_users(state, partitions, at)\n        case PartitionQueryFailed",
        "        case PartitionQueryFailed",
        "tests/core/test_fabric.py::test_a_call_that_comes_before_the_first_list_is_not_answered_by_that_list",
    ),
    Mutation(
        "a GPU that is bound after the list was read is in no partition until the next query",
        "core/fabric.py",
        "(shown := _shown(state)) != partitions.shown:",
        "(shown := partitions.shown) != partitions.shown:",
        "tests/core/test_fabric.py::test_a_gpu_that_is_bound_after_the_list_was_read_has_its_partition",
    ),
    Mutation(
        "a partition stays active for ever after one of its GPUs was pulled out",
        "core/fabric.py",
        "is_active=is_active.get(key) if is_ours else None)",
        "is_active=None)",
        "tests/core/test_fabric.py::test_one_whose_gpu_is_pulled_out_is_deactivated_after_its_pod",
    ),
    Mutation(
        "a container starts whose pod nobody knows",
        "core/deviceplugin/calls.py",
        "    if call.kind is CallKind.PRE_START and unlisted and not conflicts:\n",
        "    if False:\n",
        "tests/core/test_fabric.py::test_a_container_whose_pod_kubelet_does_not_list_waits",
    ),
)
