"""The host and kubelet's ledger in a small world: what the daemon reads of them, and the answers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from gpuactors.core.events import Event
from gpuactors.core.events.host import FunctionInspected, GroupsObserved, HostScanned
from gpuactors.core.events.kubelet import LedgerEvent
from gpuactors.core.reports.snapshot import PollTarget, project
from gpuactors.core.state import NodeState
from gpuactors.core.values.model import Asking, GroupUse, InspectedKey, PciFunction


class HostSide(Protocol):
    """What there is to read."""

    @property
    def functions(self) -> tuple[PciFunction, ...]:
        """The functions in sysfs."""

    def ledger_event(self, read: int, asking: Asking) -> LedgerEvent:
        """The answer to a read of kubelet's ledger."""

    def group_use(self, target: PollTarget) -> GroupUse:
        """Who uses an IOMMU group."""


def answers(state: NodeState, host: HostSide) -> dict[int, Callable[[], Event]]:
    """The answer to each outstanding read, by its number: a scan's first, a poll's last."""
    inspections, ledger, polls = state.host.inspections, state.kubelet.ledger, state.host.polls
    found: dict[int, Callable[[], Event]] = {}
    if (scan := inspections.whole.outstanding) is not None:
        found[scan] = lambda: HostScanned(scan, host.functions)
    for address, number in inspections.functions.items():
        found[number] = partial(_inspected, host, number, address)
    if (read := ledger.refresh.outstanding) is not None:
        found[read] = lambda: host.ledger_event(read, ledger.asking)
    if (poll := polls.refresh.outstanding) is not None:
        found[poll] = lambda: GroupsObserved(
            poll, tuple(map(host.group_use, project(state).inspections.poll.targets))
        )
    return found


def _inspected(host: HostSide, number: int, address: InspectedKey) -> FunctionInspected:
    """The function with the others of its IOMMU group, and their physical functions."""
    functions = host.functions
    groups = {f.iommu_group for f in functions if f.address == address}
    physical = {f.physical for f in functions if f.iommu_group in groups}
    found = (f for f in functions if f.iommu_group in groups or f.address in physical)
    return FunctionInspected(number, address, tuple(found))
