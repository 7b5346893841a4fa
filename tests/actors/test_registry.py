"""The registry and its journal: every step is handed over, also the one that ends the process."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import trio
import trio.testing

from gpuactors.actors import registry
from gpuactors.concurrency.latest import Latest
from gpuactors.concurrency.replies import Replies
from gpuactors.control.messages import status_response
from gpuactors.control.view import About, view_of
from gpuactors.core.effects import Answer
from gpuactors.core.events import (
    Event,
    GroupsObserved,
    HostChanged,
    HostScanned,
    InspectionFailed,
    KubeletAppeared,
    KubeletGone,
    LedgerUnreadable,
    RegisterFailed,
    ScanFailed,
    SocketFailed,
    UeventsLost,
    UeventsOpened,
    UeventsUnavailable,
)
from gpuactors.core.model import GroupUse, Holder, NodeState, ResourceName, pci_address
from gpuactors.core.snapshot import project
from gpuactors.core.step import initial_state, step
from gpuactors.kubelet.translate import frame_message
from gpuactors.observe.journal_format import LineWriter
from gpuactors.ports import Step
from tests.core.builders import SETTINGS, gpu

EVENTS: tuple[Event, ...] = (UeventsOpened(), HostScanned(1, (gpu("23:00.0"),)), KubeletAppeared("1"))


class Recorded:
    """What a registry that is fed `EVENTS` hands to its journal."""

    def __init__(self) -> None:
        self.initial: NodeState = initial_state(SETTINGS)
        self.steps: list[Step] = []

    async def run(self) -> None:
        outputs = project(self.initial)
        cells = registry.Cells(
            looks=Latest(outputs.looks),
            poll=Latest(outputs.poll),
            ledger=Latest(outputs.ledger),
            take_over=Latest(outputs.take_over),
            plugins=Latest({}),
            state=Latest(self.initial),
        )
        replies: Replies[Answer] = Replies()
        post, inbox = trio.open_memory_channel[Event](len(EVENTS))
        for event in EVENTS:
            post.send_nowait(event)
        with trio.fail_after(10):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(
                    registry.run, self.initial, inbox, cells, replies, lambda _: None, self.steps.append
                )
                await trio.testing.wait_all_tasks_blocked()
                nursery.cancel_scope.cancel()


async def test_no_name_of_the_host_stops_the_journal_or_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Issue 10, 5: whatever text the host gives, what leaves the core can be written as JSON and as protobuf."""
    odd = "x\udcff"
    unlike = replace(
        gpu("23:00.0"), driver=odd, model=odd, pcie_root=odd, nodes=(odd,), fault=odd, vendor=odd, device=odd,
        class_code=odd,
    )  # fmt: skip
    other = replace(gpu("24:00.0", driver=odd), vfio_bound=False, model=odd)
    holder = Holder(7, odd, odd)
    use = GroupUse(0x25, {pci_address("0000:25:00.0"): 1}, frozenset(), (holder,), None)
    events: tuple[Event, ...] = (
        UeventsUnavailable(odd),
        UeventsLost(odd),
        HostChanged(None, 35, odd),
        LedgerUnreadable(2, odd),
        HostScanned(1, (unlike, other, gpu("25:00.0", model=odd))),
        ScanFailed(1, odd),
        InspectionFailed(1, pci_address("0000:24:00.0"), odd),
        GroupsObserved(3, (use,)),
        KubeletGone(odd),
        SocketFailed(ResourceName("nvidia.com/X"), 1, odd),
        RegisterFailed(ResourceName("nvidia.com/X"), 1, odd),
    )
    monkeypatch.setattr(sys.modules[__name__], "EVENTS", events)
    recorded = Recorded()
    await recorded.run()
    writer = LineWriter()
    assert len(recorded.steps) == len(events)
    for taken in recorded.steps:
        assert not taken.failure
        writer.step_line(taken)
        writer.state_line(taken.before, taken.at, 0)
        bytes(status_response(view_of(taken.before, taken.at), About(), pid=1, version="1"))
        assert taken.outputs is not None
        for plugin in taken.outputs.plugins.values():
            bytes(frame_message(plugin.frame))


async def test_every_step_is_recorded() -> None:
    recorded = Recorded()
    await recorded.run()
    assert [taken.event for taken in recorded.steps] == list(EVENTS)
    state = recorded.initial
    for taken in recorded.steps:
        assert taken.before == state
        state, effects = step(state, taken.event, taken.at)
        assert (taken.effects, taken.outputs, taken.failure) == (effects, project(state), "")


async def test_the_step_that_raises_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(state: NodeState, event: Event, at: float) -> object:
        if event == EVENTS[-1]:
            raise AssertionError("a device has two owners")
        return step(state, event, at)

    monkeypatch.setattr(registry, "step", fails)
    recorded = Recorded()
    with pytest.RaisesGroup(AssertionError):
        await recorded.run()
    last = recorded.steps[-1]
    assert last.event == EVENTS[-1]
    assert (last.failure, last.outputs, last.effects) == (
        "AssertionError('a device has two owners')",
        None,
        (),
    )
