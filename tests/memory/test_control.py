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
from gpuactors.ports.errors import ControlBlockedError, ControlTakenError
from gpuactors_simulation.kubelet.transport import MemoryTransport
from tests.memory.control import StateDirectory, memory_control
from tests.memory.faults import Fault, Faults, PlannedCrashError

STATE: Latest[NodeState] = Latest(initial_state(Settings((), 300.0, True)))


OLD, NEW = "daemon 1", "daemon 2"


def none_hangs() -> Latest[frozenset[Owner]]:
    return Latest(frozenset[Owner]())


def two() -> tuple[MemoryTransport, UnixControl, UnixControl]:
    place, faults = MemoryTransport(), Faults()
    old, new = (memory_control(StateDirectory(place), none_hangs(), name, faults) for name in (OLD, NEW))
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
    new = memory_control(StateDirectory(place), hanging, NEW, Faults())
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
    async with memory_control(StateDirectory(place), none_hangs(), OLD, faults).hold(
        STATE.subscribe()
    ) as held:
        faults.order(Fault.HAND_OVER_CRASHES)
        with pytest.raises(PlannedCrashError, match="hand_over crashes as planned"):
            held.still_ours()
        assert held.still_ours()


# --- two places -------------------------------------------------------------------------------------------


def apart() -> tuple[MemoryTransport, list[StateDirectory], list[UnixControl]]:
    """Two daemons of one node with different state directories."""
    kubelet, directories = MemoryTransport(), [StateDirectory(MemoryTransport()) for _ in range(2)]
    controls = [
        memory_control(directory, none_hangs(), name, Faults(), kubelet)
        for directory, name in zip(directories, (OLD, NEW), strict=True)
    ]
    return kubelet, directories, controls


async def test_daemons_with_different_state_directories_find_each_other(autojump_clock: MockClock) -> None:
    _, _, (old, new) = apart()
    answers: list[str] = []

    async def ask() -> None:
        answers.append(await new.ask())

    async with old.hold(STATE.subscribe()) as held:
        with pytest.raises(ControlTakenError):
            async with new.hold(STATE.subscribe()):
                pass
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await held.asked()
            await held.give_up()
    assert answers == ["process 1 has handed over"]
    async with new.hold(STATE.subscribe()):
        assert await old.is_held()


async def test_a_successor_is_gone_also_for_one_whose_state_directory_was_deleted(
    autojump_clock: MockClock,
) -> None:
    _, directories, (old, new) = apart()
    directories[0].remove([OLD])
    async with new.hold(STATE.subscribe()):
        assert await old.is_held()
    assert not await old.is_held()


async def test_a_place_that_was_missing_gets_its_socket(autojump_clock: MockClock) -> None:
    _, (directory, _), (old, _) = apart()
    directory.is_removed = True
    async with old.hold(STATE.subscribe()) as held:
        assert "its directory was removed" in await held.complete()
        assert held.still_ours()
        directory.is_removed = False
        assert await held.complete() == ""
        assert directory.sockets.owner_of(SOCKET_NAME) is not None


async def test_a_place_that_another_daemon_has_meanwhile_is_lost(autojump_clock: MockClock) -> None:
    _, (directory, _), (old, _) = apart()
    directory.is_removed = True
    async with old.hold(STATE.subscribe()) as held:
        directory.is_removed = False
        directory.sockets.bind(SOCKET_NAME, NEW)
        assert "listens on" in await held.complete()
        assert not held.still_ours()


async def test_a_daemon_that_serves_and_cannot_be_asked_is_in_the_way(autojump_clock: MockClock) -> None:
    kubelet, _, (_, new) = apart()
    async with kubelet.listen_at("gpuactors-nvidia.com_2330.sock", OLD):
        with pytest.raises(ControlBlockedError, match="another state directory"):
            await new.ask()
    assert await new.ask() == "none"
