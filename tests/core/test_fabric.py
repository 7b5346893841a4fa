"""Partitions of an NVLink fabric in the daemon's decisions: who uses them, and which calls wait for them."""

from __future__ import annotations

from msgspec.structs import replace

from gpuactors.core.events.daemon import HandOverRequested, Ticked
from gpuactors.core.events.deviceplugin import PreStartAsked
from gpuactors.core.events.partitions import (
    PartitionActDone,
    PartitionIntentsRead,
    PartitionIntentsWritten,
    PartitionsQueried,
)
from gpuactors.core.kinds.sets import KnownSets, Partition, PartitionGpu
from gpuactors.core.reports.snapshot import project
from gpuactors.core.state.partitions import Partitions
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.effects import Answer, Ready, Refused
from gpuactors.core.values.model import DeviceId, Token, function_address
from gpuactors.core.values.partition import Goal, PartitionId, PartitionState
from tests.core.builders import H100, SETTINGS, Core, gpu
from tests.core.kinds.boards import key

GATED = replace(SETTINGS, activates_partitions=True, pre_start_gate=True)
PAIR = PartitionId("3")


class Board(Core):
    """A node with four GPUs, and a fabric manager with a partition of the first two."""

    def __init__(self, pods: dict[str, str]) -> None:
        super().__init__(*(gpu(f"{n:02x}:00.0") for n in (1, 2, 3, 4)), settings=GATED)
        self.active = False
        self.lists = True
        self.done: list[Goal] = []
        self.ledger = dict(pods)
        self.feed(Ticked(), after_s=60.0)
        self.feed(PartitionIntentsRead(()))

    @property
    def partitions(self) -> Partitions:
        assert self.state.partitions is not None
        return self.state.partitions

    def started(self) -> list[Answer]:
        """What is answered when the first two GPUs' container is to start, before any query comes back."""
        found = self.answers(PreStartAsked(Token(1), H100, (DeviceId(key(1)), DeviceId(key(2)))))
        for number in (1, 2):
            address = function_address(key(number))
            found += self.answers(self.inspected(address, self.state.host.functions[address]))
        return found

    def one_done(self) -> list[Answer]:
        """What is answered after one of the orders is carried out."""
        wanted = project(self.state).partitions
        assert wanted is not None
        if wanted.file is not None:
            return self.answers(PartitionIntentsWritten(wanted.file.number))
        if wanted.act is not None:
            self.active = wanted.act.goal is Goal.ACTIVATE
            self.done.append(wanted.act.goal)
            return self.answers(PartitionActDone(wanted.act.number, ""))
        if wanted.query is not None:
            gpus = tuple(PartitionGpu(pci_bus_id=key(n)) for n in (1, 2))
            listed = (Partition(3, self.active, gpus),) if self.lists else ()
            return self.answers(PartitionsQueried(wanted.query, KnownSets(partitions=listed)))
        return []

    def settled(self) -> list[Answer]:
        """What is answered until nothing is wanted any more."""
        found: list[Answer] = []
        for _ in range(20):
            found += self.one_done()
        return found


def test_a_container_starts_when_its_partition_is_active() -> None:
    board = Board({key(1): "vm-1", key(2): "vm-1"})
    assert board.started() == []
    while not (found := board.one_done()):
        assert len(board.done) <= 1
    assert found == [Ready()]
    assert board.active
    assert board.partitions.records[PAIR].state is PartitionState.ACTIVE


def test_a_call_that_comes_before_the_first_list_is_not_answered_by_that_list() -> None:
    """Only the list says which devices are in a partition."""
    board = Board({key(1): "vm-1", key(2): "vm-1"})
    before = board.partitions
    assert before.shown is None
    assert board.started() == []
    assert board.one_done() == []
    assert board.partitions.shown
    assert PAIR in board.partitions.records


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
