"""A node with a fabric manager whose orders are carried out one at a time."""

from __future__ import annotations

from msgspec.structs import replace

from gpuactors.core.events.daemon import Ticked
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
from gpuactors.core.values.effects import Answer
from gpuactors.core.values.model import DeviceId, Token, function_address
from gpuactors.core.values.partition import Goal, Intent, PartitionId
from tests.core.builders import H100, SETTINGS, Core, gpu
from tests.core.kinds.boards import key

GATED = replace(SETTINGS, activates_partitions=True, pre_start_gate=True)
PAIR = PartitionId("3")


class Board(Core):
    """A node with four GPUs, and a fabric manager with a partition of the first two."""

    def __init__(self, pods: dict[str, str], *intents: Intent) -> None:
        super().__init__(*(gpu(f"{n:02x}:00.0") for n in (1, 2, 3, 4)), settings=GATED)
        self.active = False
        self.lists = True
        self.problems: tuple[str, ...] = ()
        self.done: list[Goal] = []
        self.last = Token(0)
        self.ledger = dict(pods)
        self.feed(Ticked(), after_s=60.0)
        self.feed(PartitionIntentsRead(intents))

    @property
    def partitions(self) -> Partitions:
        assert self.state.partitions is not None
        return self.state.partitions

    def asked(self) -> list[Answer]:
        """What is answered when the first two GPUs' container is to start, before anything else is known."""
        self.last = Token(self.last + 1)
        return self.answers(PreStartAsked(self.last, H100, (DeviceId(key(1)), DeviceId(key(2)))))

    def started(self) -> list[Answer]:
        """As `asked`, and when its GPUs have been inspected, before any query comes back."""
        return self.asked() + self.inspected_both()

    def inspected_both(self) -> list[Answer]:
        """What is answered when the two GPUs have been inspected."""
        found: list[Answer] = []
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
            known = KnownSets(partitions=listed, problems=self.problems)
            return self.answers(PartitionsQueried(wanted.query, known))
        return []

    def settled(self) -> list[Answer]:
        """What is answered until nothing is wanted any more."""
        found: list[Answer] = []
        for _ in range(20):
            found += self.one_done()
        return found
