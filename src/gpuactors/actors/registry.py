"""The registry: owner of the node's state, and the only caller of `step`.

It takes one event after the other from the inbox and carries out the results without ever awaiting: outputs that last
go into latest-value cells, answers to the waiting callers, log lines to the log. So no reader can slow it down, and no
cycle of waiting channels can form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from itertools import chain
from typing import TYPE_CHECKING, Final

import trio
from msgspec import Struct

from gpuactors.concurrency.latest import Latest, LatestReader
from gpuactors.concurrency.replies import Replies
from gpuactors.core.deviceplugin import specs
from gpuactors.core.deviceplugin.registration import PluginOrder
from gpuactors.core.events import Event
from gpuactors.core.events.daemon import Ticked
from gpuactors.core.reports.snapshot import (
    InspectionsWanted,
    LedgerWanted,
    Outputs,
    PluginView,
    project,
)
from gpuactors.core.state import NodeState
from gpuactors.core.step import next_deadline, step
from gpuactors.core.values.dead_signs import DeadSigns
from gpuactors.core.values.device_spec import SpecsWanted
from gpuactors.core.values.effects import Answer, Effect, Log, Reply
from gpuactors.core.values.model import (
    DeviceList,
    PciAddress,
    ResourceName,
    Role,
    is_other_for_kubelet,
)
from gpuactors.core.values.vgpu import CardTypes
from gpuactors.ports.node import Step

if TYPE_CHECKING:
    from gpuactors.core.claims.driver import DeviceAct
    from gpuactors.core.claims.outputs import ClaimsWanted, DiskWanted, FilesAct, ReadWanted, ServingWanted
    from gpuactors.core.domains.outputs import DomainsWanted
    from gpuactors.core.partitions.outputs import PartitionsWanted
    from gpuactors.core.values.claim import ClaimUid, DeviceHealth, FitnessCheck
    from gpuactors.core.values.slices import Offer

REGISTRY_EVENTS: Final = 16
"""Limit on the events that the registry takes in one turn of the loop, at a millisecond each on the largest node."""


class PluginReaders(Struct, frozen=True):
    """The read ends of one plugin: its list, and its orders."""

    device_list: LatestReader[DeviceList]
    order: LatestReader[PluginOrder]


class ClaimCells(Struct, frozen=True):
    """The outputs about claims: a cell for each reader, so that a step wakes only those that it concerns."""

    serving: Latest[ServingWanted]
    disk: Latest[DiskWanted]
    reads: Latest[tuple[ReadWanted, ...]]
    devices: Latest[Mapping[PciAddress, DeviceAct]]
    fitness_check: Latest[FitnessCheck | None]
    files: Latest[Mapping[ClaimUid, FilesAct]]
    offer: Latest[Offer | None]
    """The devices that the ResourceSlices are to list; None while nothing is to be written."""
    health: Latest[tuple[DeviceHealth, ...]]

    @classmethod
    def of(cls, wanted: ClaimsWanted) -> ClaimCells:
        """Make the cells with their first values: each has the name of its output."""
        return cls(**{name: Latest(getattr(wanted, name)) for name in cls.__struct_fields__})

    def show(self, wanted: ClaimsWanted) -> None:
        """Put each output into its cell."""
        for name in self.__struct_fields__:
            getattr(self, name).set(getattr(wanted, name))


class DomainCells(Struct, frozen=True):
    """The outputs about compute domains."""

    wanted: Latest[DomainsWanted]
    claims: ClaimCells

    @classmethod
    def of(cls, wanted: DomainsWanted) -> DomainCells:
        """Make the cells with their first values."""
        return cls(Latest(wanted), ClaimCells.of(wanted.claims))

    def show(self, wanted: DomainsWanted) -> None:
        """Put each output into its cell."""
        self.wanted.set(wanted)
        self.claims.show(wanted.claims)


class Cells(Struct, frozen=True):
    """The registry's outputs that last, made in the composition root, which passes the read ends to their readers.
    `plugins` is closed when the daemon is to stop."""

    inspections: Latest[InspectionsWanted]
    ledger: Latest[LedgerWanted]
    claims: ClaimCells | None
    """The cells of claims of GPUs; None while DRA is off."""
    domains: DomainCells | None
    """The cells of compute domains; None while they are off."""
    partitions: Latest[PartitionsWanted] | None
    """The orders for partitions of the NVLink fabric; None where gpuactors activates none."""
    take_over: Latest[bool]
    plugins: Latest[Mapping[ResourceName, PluginReaders]]
    state: Latest[NodeState]
    role: Latest[Role]
    """The state's role: for a reader that needs nothing else of the state."""
    served: Latest[Mapping[ResourceName, frozenset[str]] | None]
    """The served resources with their models (`Published.served`); None while this daemon does not serve."""
    vgpu_types: Latest[Mapping[PciAddress, CardTypes] | None]
    """The names of vGPU types (`Host.vgpu_types`); None while this daemon does not serve, and without any."""
    dead_signs: Latest[DeadSigns | None]
    """The signs of dead functions (`Host.dead_signs`); None while this daemon does not serve."""
    specs: Latest[SpecsWanted | None]
    """The CDI files of the device plugin that are to be there (`deviceplugin/specs.py`)."""


async def run(
    initial: NodeState,
    inbox: trio.MemoryReceiveChannel[Event],
    cells: Cells,
    replies: Replies[Answer],
    log_line: Callable[[Log], None],
    record: Callable[[Step], None] | None = None,
) -> None:
    """Run for ever. Any exception in here is a bug and ends the process: it is never restarted.

    `record` is called with every step, also with one that raised.
    """
    state = initial
    published = _Published(cells)
    published.show(project(state))

    def turn(first: Event) -> None:
        """Take the event, and those that wait with it: each reader is woken once, and gets the last outputs."""
        nonlocal state
        for event in chain((first,), _waiting(inbox)):
            before, at = state, trio.current_time()
            try:
                state, effects = step(before, event, at)
                outputs = project(state)
            except Exception as exc:
                if record is not None:
                    record(Step(before, event, at, failure=repr(exc)))
                raise
            if record is not None:
                record(Step(before, event, at, effects, outputs))
            for effect in effects:
                _interpret(effect, replies, log_line)
            if outputs.plugins.keys() != published.plugins:
                break  # a plugin that goes and one that comes under its name are two
        cells.state.set(state)
        cells.role.set(state.daemon.role)
        serves = state.daemon.role is Role.SERVING
        cells.served.set(state.published.served if serves else None)
        cells.vgpu_types.set(state.host.vgpu_types or None if serves else None)
        cells.dead_signs.set(state.host.dead_signs if serves else None)
        cells.specs.set(specs.wanted(state))
        published.show(outputs)

    while True:
        # One scope until the clock ends it: to make one for each event takes as long as a small step.
        with trio.CancelScope() as until_due:
            while (deadline := next_deadline(state)) > trio.current_time():
                if deadline < until_due.deadline:  # a later one is looked at again when this one ends
                    until_due.deadline = deadline
                turn(await inbox.receive())
        await trio.lowlevel.checkpoint()
        if next_deadline(state) <= trio.current_time():
            turn(Ticked())


def _waiting(inbox: trio.MemoryReceiveChannel[Event]) -> Iterator[Event]:
    """Yield the waiting events that this turn takes: other tasks and due deadlines get their turn too."""
    for _ in range(REGISTRY_EVENTS - 1):
        try:
            yield inbox.receive_nowait()
        except (trio.WouldBlock, trio.EndOfChannel):
            return


def _interpret(effect: Effect, replies: Replies[Answer], log_line: Callable[[Log], None]) -> None:
    match effect:
        case Reply(token, answer):
            replies.reply(token, answer)
        case Log():
            log_line(effect)


class _Published:
    """The write ends of the cells. Those of a plugin are made when it appears."""

    def __init__(self, cells: Cells) -> None:
        self._cells = cells
        self._plugins: dict[ResourceName, _PluginCells] = {}

    @property
    def plugins(self) -> Set[ResourceName]:
        """The resources that have cells."""
        return self._plugins.keys()

    def show(self, outputs: Outputs) -> None:
        """Put each output into its cell; an equal value wakes no reader."""
        cells = self._cells
        cells.inspections.set(outputs.inspections)
        cells.ledger.set(outputs.ledger)
        if cells.claims is not None and outputs.claims is not None:
            cells.claims.show(outputs.claims)
        if cells.domains is not None and outputs.domains is not None:
            cells.domains.show(outputs.domains)
        if cells.partitions is not None and outputs.partitions is not None:
            cells.partitions.set(outputs.partitions)
        cells.take_over.set(outputs.take_over)
        if cells.plugins.is_closed:
            return
        if outputs.stopping:
            cells.plugins.close()
            return
        if self._plugins.keys() != outputs.plugins.keys():
            before = self._plugins
            self._plugins = {r: before.get(r) or _PluginCells(v) for r, v in outputs.plugins.items()}
            cells.plugins.set({r: plugin.readers for r, plugin in self._plugins.items()})
        for resource, view in outputs.plugins.items():
            plugin = self._plugins[resource]
            plugin.device_list.set(view.device_list)
            plugin.order.set(view.order)


class _PluginCells:
    """One plugin's two cells."""

    def __init__(self, view: PluginView) -> None:
        # Most changes of a list are a device's owner, of which kubelet is told nothing.
        self.device_list = Latest(view.device_list, is_other_for_kubelet)
        self.order = Latest(view.order)
        self.readers = PluginReaders(self.device_list.subscribe(), self.order.subscribe())
