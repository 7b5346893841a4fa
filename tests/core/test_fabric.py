"""Partitions of an NVLink fabric in the daemon's decisions: who uses them, and which calls wait for them."""

from __future__ import annotations

from gpuactors.core.events.daemon import HandOverRequested, Ticked
from gpuactors.core.events.partitions import (
    PartitionQueryFailed,
)
from gpuactors.core.partitions.machine import QUERY_S
from gpuactors.core.reports.snapshot import project
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.effects import Level, Ready, Refused
from gpuactors.core.values.model import function_address
from gpuactors.core.values.partition import Goal, Intent, PartitionId, PartitionState
from tests.core.kinds.boards import key
from tests.core.partitions.board import PAIR, Board


def test_a_container_starts_when_its_partition_is_active() -> None:
    board = Board({key(1): "vm-1", key(2): "vm-1"})
    assert board.started() == []
    while not (found := board.one_done()):
        assert len(board.done) <= 1
    assert found == [Ready()]
    assert board.active
    assert board.partitions.records[PAIR].state is PartitionState.ACTIVE


def test_a_call_that_comes_while_a_query_is_under_way_waits_for_the_next_one() -> None:
    """The daemon ended by a KeyError: a call that only requests inspections is not told to the partitions at once."""
    board = Board({key(1): "vm-1", key(2): "vm-1"})
    board.started()
    assert board.settled() == [Ready()]
    board.feed(Ticked(), after_s=QUERY_S)
    query = board.partitions.query
    assert query > board.partitions.answered
    board.silent = True
    assert board.asked() == []
    assert board.one_done() == []
    board.silent = False
    assert board.partitions.query == query + 1
    assert board.inspected_both() == []
    assert board.one_done() == []
    assert board.one_done() == [Ready()], "two of after the call"


def test_a_call_that_comes_before_the_first_list_is_not_answered_by_that_list() -> None:
    """Only the list says which devices are in a partition."""
    board = Board({key(1): "vm-1", key(2): "vm-1"})
    before = board.partitions
    assert before.shown is None
    assert board.started() == []
    assert board.one_done() == []
    assert board.partitions.shown
    assert PAIR in board.partitions.records


def test_a_fabric_manager_that_lists_no_partition_keeps_nobody_waiting() -> None:
    board = Board({key(1): "vm-1", key(2): "vm-1"})
    board.lists = False
    assert board.started() == []
    assert board.settled() == [Ready()]
    assert board.partitions.shown == {}
    assert board.done == []


def test_a_fabric_manager_that_lists_no_partition_is_queried_anew_by_each_call() -> None:
    """It may have started a moment ago, and list them later."""
    board = Board({key(1): "vm-1", key(2): "vm-1"})
    board.lists = False
    board.settled()
    queries = board.partitions.query
    assert board.started() == []
    assert board.settled() == [Ready()]
    assert (board.partitions.query, board.done) == (queries + 1, [])


def test_partitions_that_are_listed_after_the_call_came_are_activated_before_it_is_answered() -> None:
    board = Board({key(1): "vm-1", key(2): "vm-1"})
    board.lists = False
    board.settled()
    board.lists = True
    assert board.started() == []
    assert board.settled() == [Ready()]
    assert board.active


def test_a_list_of_which_nothing_can_be_used_is_not_empty_and_its_problem_is_told() -> None:
    board = Board({key(1): "vm-1", key(2): "vm-1"})
    board.lists, board.problems = False, ("the list has no list partitionInfo",)
    board.settled()
    assert board.started() == []
    assert board.settled() == []
    (refused,) = board.answers(Ticked(), after_s=30.0)
    assert isinstance(refused, Refused)
    assert refused.causes == (Cause.PARTITION_LATE,)
    assert "has not been read yet: the list has no list partitionInfo" in refused.reason


def test_an_empty_list_does_not_count_after_a_query_that_failed() -> None:
    board = Board({key(1): "vm-1", key(2): "vm-1"})
    board.lists = False
    board.settled()
    assert board.started() == []
    board.feed(PartitionQueryFailed(board.partitions.query, "it has not ended within 5 s"))
    board.feed(Ticked(), after_s=6.0)
    assert board.settled() == [Ready()]


def test_a_container_that_waits_for_the_list_is_refused_with_the_words_of_the_command() -> None:
    board = Board({key(1): "vm-1", key(2): "vm-1"})
    assert board.started() == []
    board.feed(PartitionQueryFailed(1, "/opt/fm query ends with status 1"))
    found = board.answers(Ticked(), after_s=30.0)
    (refused,) = found
    assert isinstance(refused, Refused)
    assert refused.causes == (Cause.PARTITION_LATE,)
    assert (
        "the list of the fabric manager's partitions has not been read yet: /opt/fm query" in refused.reason
    )


def test_before_the_first_list_no_pod_is_the_owner_of_a_part_of_its_devices() -> None:
    """A part of the pod's devices was a partition that an earlier daemon has activated for another pod."""
    earlier = Intent(PartitionId("5"), frozenset({key(2)}), Goal.ACTIVATE)
    board = Board({key(1): "vm-1", key(2): "vm-1"}, earlier)
    assert not board.partitions.records[earlier.id].owners
    board.started()
    board.settled()
    assert not board.partitions.records[earlier.id].owners


def test_a_list_that_leaves_the_partition_out_starts_nobody() -> None:
    board = Board({})
    board.settled()
    board.ledger = {key(1): "vm-1", key(2): "vm-1"}
    board.feed(Ticked(), after_s=60.0)
    board.lists = False
    assert board.started() == []
    assert board.settled() == []
    board.lists = True
    board.feed(Ticked(), after_s=6.0)
    assert board.settled() == [Ready()]
    assert board.active


def test_a_gpu_that_is_bound_after_the_list_was_read_has_its_partition() -> None:
    board = Board({})
    second = function_address(key(2))
    function = board.state.host.functions[second]
    board.inspect(second)
    board.settled()
    assert not board.partitions.shown, "one of its GPUs is not there"
    board.inspect(second, function)
    assert board.partitions.shown, "the next query may come a minute later"
    board.ledger = {key(1): "vm-1", key(2): "vm-1"}
    board.feed(Ticked(), after_s=20.0)
    board.started()
    assert board.settled() == [Ready()]
    assert board.active


def test_one_whose_gpu_is_pulled_out_is_deactivated_after_its_pod() -> None:
    """It is known by its number, whatever GPUs are there now."""
    board = Board({key(1): "vm-1", key(2): "vm-1"})
    board.started()
    board.settled()
    board.inspect(function_address(key(2)))
    board.ledger = {}
    board.feed(Ticked(), after_s=60.0)
    board.settled()
    assert board.done == [Goal.ACTIVATE, Goal.DEACTIVATE]
    assert board.partitions.records == {}


def test_a_container_whose_pod_kubelet_does_not_list_waits() -> None:
    """When its call is answered, nobody would have the partition any more."""
    board = Board({})
    assert board.started() == []
    assert board.settled() == []
    board.ledger = {key(1): "vm-1", key(2): "vm-1"}
    board.feed(Ticked(), after_s=20.0)
    assert board.active
    assert board.settled() == []
    (refused,) = board.answers(Ticked(), after_s=10.0)
    assert isinstance(refused, Refused)
    assert refused.causes == (Cause.LEDGER_LATE,)


def test_it_is_deactivated_after_its_pod_has_gone_and_its_virtual_machine_has_ended() -> None:
    board = Board({key(1): "vm-1", key(2): "vm-1"})
    board.started()
    board.settled()
    board.enabled = {key(1): 1, key(2): 1}
    board.feed(Ticked(), after_s=6.0)
    board.ledger = {}
    board.feed(Ticked(), after_s=6.0)
    board.settled()
    assert board.active, "a process has them open"
    board.enabled = {}
    board.feed(Ticked(), after_s=6.0)
    board.settled()
    assert board.done == [Goal.ACTIVATE, Goal.DEACTIVATE]
    assert board.partitions.records == {}


def test_one_that_is_lost_under_a_virtual_machine_is_warned_of_once() -> None:
    board = Board({key(1): "vm-1", key(2): "vm-1"})
    board.started()
    board.settled()
    board.enabled = {key(1): 1, key(2): 1}
    board.active = False
    for _ in range(3):
        board.feed(Ticked(), after_s=60.0)
        board.settled()
    assert [(line.level, line.fields["partition"]) for line in board.logged("partition.lost")] == [
        (Level.WARNING, PAIR)
    ]
    states = [line.fields["state"] for line in board.logged("partition.changed")]
    assert states == ["Checking", "Reserved", "Activating", "Active"]


def test_a_daemon_that_has_handed_over_orders_nothing() -> None:
    board = Board({key(1): "vm-1", key(2): "vm-1"})
    board.started()
    board.settled()
    board.feed(HandOverRequested())
    wanted = project(board.state).partitions
    assert wanted is not None
    assert (wanted.load, wanted.query, wanted.act, wanted.file) == (False, None, None, None)
    assert not board.partitions.is_loaded
    assert board.active
