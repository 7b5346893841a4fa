"""The registry and its journal: every step is handed over, also the one that ends the process."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import pytest
import trio
import trio.testing

from gpuactors import limits
from gpuactors.actors import registry
from gpuactors.actors.registry import REGISTRY_EVENTS
from gpuactors.concurrency.latest import Latest
from gpuactors.concurrency.replies import Replies
from gpuactors.core.events import Event
from gpuactors.core.events.daemon import Ticked
from gpuactors.core.events.host import HostScanned, UeventsOpened
from gpuactors.core.events.kubelet import KubeletAppeared
from gpuactors.core.host import schedule
from gpuactors.core.reports.snapshot import project
from gpuactors.core.state import NodeState
from gpuactors.core.step import CALL_SETTLE_S, initial_state, step
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.effects import Answer
from gpuactors.core.values.model import ResourceName
from gpuactors.ports.node import Step
from tests.core.builders import H100, SETTINGS, Core, gpu
from tests.support.patience import patient

EVENTS: tuple[Event, ...] = (UeventsOpened(), HostScanned(1, (gpu("23:00.0"),)), KubeletAppeared("1"))


class Recorded:
    """What a registry that is fed `events` hands to its journal."""

    def __init__(self) -> None:
        self.initial: NodeState = initial_state(SETTINGS)
        self.events = EVENTS
        self.steps: list[Step] = []
        self.plugins: Latest[Mapping[ResourceName, registry.PluginReaders]] = Latest({})
        self.shown: list[Mapping[ResourceName, registry.PluginReaders]] = []
        """What `plugins` showed at each step."""

    def record(self, taken: Step) -> None:
        self.steps.append(taken)
        self.shown.append(self.plugins.value)

    async def run(self, state: Latest[NodeState] | None = None) -> None:
        outputs = project(self.initial)
        cells = registry.Cells(
            inspections=Latest(outputs.inspections),
            ledger=Latest(outputs.ledger),
            claims=None,
            domains=None,
            partitions=None,
            take_over=Latest(outputs.take_over),
            plugins=self.plugins,
            state=state or Latest(self.initial),
            role=Latest(self.initial.daemon.role),
            served=Latest(None),
            vgpu_types=Latest(None),
            dead_signs=Latest(None),
            specs=Latest(None),
        )
        replies: Replies[Answer] = Replies()
        post, inbox = trio.open_memory_channel[Event](len(self.events))
        for event in self.events:
            post.send_nowait(event)
        with trio.fail_after(patient(10)):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(
                    registry.run, self.initial, inbox, cells, replies, lambda _: None, self.record
                )
                await trio.testing.wait_all_tasks_blocked()
                nursery.cancel_scope.cancel()


async def test_every_step_is_recorded() -> None:
    recorded = Recorded()
    await recorded.run()
    assert [taken.event for taken in recorded.steps] == list(EVENTS)
    state = recorded.initial
    for taken in recorded.steps:
        assert taken.before == state
        state, effects = step(state, taken.event, taken.at)
        assert (taken.effects, taken.outputs, taken.failure) == (effects, project(state), "")


async def test_a_plugin_is_given_read_ends() -> None:
    """It streams and carries out; what there is to stream and to do is the registry's to say (issue 11, item 5)."""
    recorded = Recorded()
    recorded.initial = Core(gpu("23:00.0")).state
    await recorded.run()
    outputs = recorded.steps[-1].outputs
    assert outputs is not None
    readers = recorded.plugins.value[H100]
    assert (readers.device_list.value, readers.order.value) == (
        outputs.plugins[H100].device_list,
        outputs.plugins[H100].order,
    )
    for reader in (readers.device_list, readers.order):
        assert not hasattr(reader, "set")


async def test_a_device_that_a_pod_gets_wakes_no_stream() -> None:
    """Kubelet has that from itself. What the list says of the device is to be seen all the same."""
    core = Core(gpu("23:00.0"), gpu("24:00.0"))
    core.pass_time(60)
    core.silent, core.ledger["0000:23:00.0"] = True, "vm-1"
    core.state = schedule.ask_ledger(core.state, core.at)
    read = core.state.kubelet.ledger.refresh.outstanding
    assert read is not None
    recorded = Recorded()
    recorded.initial, recorded.events = core.state, (core.ledger_event(read),)
    await recorded.run()
    listed = recorded.plugins.value[H100].device_list
    assert (listed.version, [entry.cause for entry in listed.value]) == (0, [Cause.ALLOCATED, Cause.FREE])


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


async def test_events_that_wait_together_wake_a_reader_once() -> None:
    """Each is a step, and in the journal; the outputs are those of the last."""
    recorded = Recorded()
    recorded.initial = Core(gpu("23:00.0")).state
    cell = Latest(recorded.initial)
    woken, reader = list[NodeState](), cell.subscribe()

    async def read() -> None:
        while True:
            woken.append(await reader.receive())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await trio.testing.wait_all_tasks_blocked()
        await recorded.run(cell)
        nursery.cancel_scope.cancel()
    assert [taken.event for taken in recorded.steps if taken.event != Ticked()] == list(EVENTS)
    assert len(woken) == 2
    assert woken[-1] == cell.value != recorded.initial


async def test_a_turn_ends_after_its_bound_of_events_and_others_have_theirs() -> None:
    """A flood of events must not keep the readers from all of its outputs."""
    recorded = Recorded()
    recorded.initial = Core(gpu("23:00.0")).state
    recorded.events = tuple(KubeletAppeared(f"{n}") for n in range(8 * REGISTRY_EVENTS))
    cell, seen = Latest(recorded.initial), list[int]()
    reader = cell.subscribe()

    async def read() -> None:
        while True:
            seen.append(int((await reader.receive()).kubelet.socket or 0))

    with trio.fail_after(patient(10)):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await trio.testing.wait_all_tasks_blocked()
            await recorded.run(cell)
            nursery.cancel_scope.cancel()
    # The first turn is that of the clock, and the next follows before any reader runs.
    assert seen[-1] == len(recorded.events) - 1
    assert max(now - before for before, now in pairwise(seen)) <= 2 * REGISTRY_EVENTS


def _scan(state: NodeState) -> int:
    """The number of the scan that is outstanding."""
    assert state.host.inspections.whole.outstanding is not None
    return state.host.inspections.whole.outstanding


async def test_a_plugin_that_goes_and_one_that_comes_in_its_place_are_two() -> None:
    """Both in one turn would leave the actor of the first one in place, which serves what is no more."""
    recorded, core = Recorded(), Core(gpu("23:00.0"))
    core.pass_time(SETTINGS.resync_interval_s)
    core.feed(HostScanned(_scan(core.state), ()))
    core.pass_time(CALL_SETTLE_S)
    recorded.initial = core.state
    late = core.at + limits.RETIRE_EMPTY_AFTER_S
    retired, _ = step(core.state, Ticked(), late)
    assert H100 in core.state.published.plugins
    assert H100 not in retired.published.plugins
    recorded.events = (HostScanned(_scan(retired), (gpu("23:00.0"),)),)
    await recorded.run()
    assert [Ticked(), *recorded.events] == [taken.event for taken in recorded.steps[:2]]
    assert [H100 in plugins for plugins in recorded.shown[:2]] == [True, False], "before each of the two"
    assert recorded.shown[0][H100].device_list is not recorded.plugins.value[H100].device_list
