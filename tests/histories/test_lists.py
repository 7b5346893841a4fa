"""Another program calls List while an Allocate is in flight, and a pod has ended meanwhile: kubelet forgets the device
of that Allocate. It must not come to a second pod."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from gpuactors import limits
from gpuactors.core.deviceplugin import calls
from gpuactors.core.host import asking
from gpuactors.core.state import NodeState
from gpuactors.core.values.cause import Cause
from gpuactors_simulation.kubelet.values import Phase
from tests.histories.kubelet_events import lists
from tests.histories.trace import Trace
from tests.histories.world import MODEL, World, open_world
from tests.memory.faults import SLOW_S, Fault

SEED = 0


@pytest.fixture(autouse=True)
def _never_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each Allocate has a read of the ledger of its own, which can be made slow."""
    monkeypatch.setattr(limits, "LEDGER_FRESH_S", -1.0)


@pytest.fixture
async def world(tmp_path: Path, autojump_clock: MockClock) -> AsyncIterator[World]:
    """Three cards of one model."""
    async with open_world(tmp_path, SEED, Trace()) as world:
        yield world


def serving(world: World) -> NodeState:
    """The state of the daemon that serves."""
    (daemon,) = world.serving
    assert daemon.handle is not None
    return daemon.handle.state.value


async def comes(world: World, name: str) -> Phase:
    """A pod for one card is bound to the node: the scheduler has no word in it."""
    world.kubelet.submit(name, {world.resource(MODEL): 1}, bound=True)
    return (await world.kubelet.settled(name)).phase


def shared(world: World) -> list[str]:
    """The devices that two living pods have."""
    given = [device for entry in world.kubelet.view.holdings.values() for device in entry.devices]
    return sorted({device for device in given if given.count(device) > 1})


async def listed_in_an_allocate(world: World, *, by_another: bool) -> None:
    """vm-1 ends while the Allocate of vm-2 is in flight; then all cards but that of vm-2 are given away, and one pod
    more comes."""
    assert await comes(world, "vm-1") is Phase.RUNNING
    await trio.sleep(60)
    world.faults.order(Fault.READ_SLOW)
    world.kubelet.submit("vm-2", {world.resource(MODEL): 1}, bound=True)
    await trio.sleep(SLOW_S / 10)
    assert not world.faults.waits(Fault.READ_SLOW), "the Allocate reads the ledger"
    assert world.kubelet.view.pods["vm-2"].phase is Phase.ADMITTING
    world.kubelet.force_delete("vm-1", dies_after_s=0.0)
    if by_another:
        await lists(world)
    assert (await world.kubelet.settled("vm-2")).phase is Phase.RUNNING
    cards = len(world.kubelet.view.devices)
    for n in range(3, cards + 2):
        assert await comes(world, f"vm-{n}") is Phase.RUNNING, n
    await comes(world, "vm-last")


@pytest.mark.trio
async def test_a_device_that_kubelet_forgot_is_not_given_to_a_second_pod(
    world: World, autojump_clock: MockClock
) -> None:
    await listed_in_an_allocate(world, by_another=True)
    assert shared(world) == []
    last = world.kubelet.view.pods["vm-last"]
    assert last.phase is Phase.FAILED
    assert "which lives; kubelet had forgotten that" in last.message
    await comes(world, "vm-next")
    assert "Requested: 1, Available: 0" in world.kubelet.view.pods["vm-next"].message, (
        "the refusal healed kubelet"
    )
    (address,) = last.asked_for
    (of_it,) = (c for c in serving(world).calls.last.items() if c[0] == address)
    assert Cause.STILL_ALLOCATED in {cause for call in of_it[1] for cause in call.causes}


@pytest.mark.trio
async def test_without_such_a_list_no_pod_is_refused(world: World, autojump_clock: MockClock) -> None:
    await listed_in_an_allocate(world, by_another=False)
    assert shared(world) == []
    assert "Requested: 1, Available: 0" in world.kubelet.view.pods["vm-last"].message


@pytest.mark.trio
async def test_the_bug_is_reached_where_any_owner_is_taken_for_the_pod_of_the_call(
    world: World, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "has_kept", lambda *_: None)
    monkeypatch.setattr(calls, "_is_being_admitted", lambda *_: False)
    await listed_in_an_allocate(world, by_another=True)
    assert len(shared(world)) == 1


@pytest.mark.trio
async def test_the_bug_is_reached_where_our_own_allocate_lists(
    world: World, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "has_kept", lambda *_: None)
    monkeypatch.setattr(calls, "_is_being_admitted", lambda *_: False)
    monkeypatch.setattr(asking, "may_list", lambda *_: True)
    monkeypatch.setattr(asking, "list_due_at", lambda *_: 0.0)
    await listed_in_an_allocate(world, by_another=False)
    assert len(shared(world)) == 1
