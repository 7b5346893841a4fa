"""The control socket in memory: who has it, who asks, who is taken over anyway."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from gpuactors import limits
from gpuactors.concurrency.latest import Latest
from gpuactors.control.path import SOCKET_NAME
from gpuactors.control.unix import UnixControl
from gpuactors.core.state import NodeState
from gpuactors.core.step import initial_state
from gpuactors.core.values.model import Settings
from gpuactors.grpc_trio import Owner
from gpuactors.ports.errors import ControlTakenError
from gpuactors.simulation.kubelet.transport import MemoryTransport
from tests.memory.control import memory_control
from tests.memory.faults import Fault, Faults, PlannedCrashError

STATE: Latest[NodeState] = Latest(initial_state(Settings((), 300.0, True)))


OLD, NEW = "daemon 1", "daemon 2"


def none_hangs() -> Latest[frozenset[Owner]]:
    return Latest(frozenset[Owner]())


def two() -> tuple[MemoryTransport, UnixControl, UnixControl]:
    place, faults = MemoryTransport(), Faults()
    old, new = (memory_control(place, none_hangs(), name, faults) for name in (OLD, NEW))
    return place, old, new


async def test_without_a_predecessor(autojump_clock: MockClock) -> None:
    place, old, _ = two()
    assert await old.ask() == "none"
    assert not await old.is_held()
    async with old.hold(STATE.subscribe()) as held:
        assert held.still_ours()
        assert await old.is_held()
    assert place.listener_at(SOCKET_NAME) is None


async def test_a_successor_is_answered_when_the_socket_was_given_up(autojump_clock: MockClock) -> None:
    _, old, new = two()
    answers: list[str] = []

    async def ask() -> None:
        answers.append(await new.ask())

    with trio.fail_after(60):
        async with old.hold(STATE.subscribe()) as held, trio.open_nursery() as nursery:
            with pytest.raises(ControlTakenError, match=OLD):
                await new.hold(STATE.subscribe()).__aenter__()
            nursery.start_soon(ask)
            await held.asked()
            assert answers == []
            await held.give_up()
            async with new.hold(STATE.subscribe()):
                assert not held.still_ours()
    assert answers == ["process 1 has handed over"]


async def test_who_does_not_answer_is_taken_over_anyway(autojump_clock: MockClock) -> None:
    place, old, _ = two()
    hanging = none_hangs()
    new = memory_control(place, hanging, NEW, Faults())
    async with old.hold(STATE.subscribe()) as held:
        began = trio.current_time()
        assert "taken over anyway" in await new.ask()
        assert trio.current_time() - began == pytest.approx(limits.HAND_OVER_DEADLINE_S)
        assert hanging.value == {Owner(1)}
        async with new.hold(STATE.subscribe()):
            assert not held.still_ours()
            assert await old.is_held()


async def test_a_killed_daemon_holds_nothing(autojump_clock: MockClock) -> None:
    place, old, new = two()
    async with old.hold(STATE.subscribe()):
        place.kill(NEW)
        assert place.listener_at(SOCKET_NAME) == OLD
        place.kill(OLD)
        assert await new.ask() == "none"


async def test_it_crashes_when_it_is_told_to() -> None:
    place, faults = MemoryTransport(), Faults()
    async with memory_control(place, none_hangs(), OLD, faults).hold(STATE.subscribe()) as held:
        faults.order(Fault.HAND_OVER_CRASHES)
        with pytest.raises(PlannedCrashError, match="hand_over crashes as planned"):
            held.still_ours()
        assert held.still_ours()
