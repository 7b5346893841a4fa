"""Events of the daemon's own process, and of the clock."""

from __future__ import annotations

from typing import Final

import trio
from trio.testing import MockClock

from tests.histories.kinds import Flag, Kind, always, crash, detail_of, fault
from tests.histories.world import World
from tests.memory.faults import Fault

DAEMONS_MAX: Final = 3
"""Processes at once, those included that are ending."""

SHORTAGE_S: Final = 12.0
"""A daemon has no descriptor left for so long: longer than all restarts of an actor before the daemon ends."""


def _can_start(world: World, _slot: int) -> bool:
    return not world.serving and len(world.daemons) < DAEMONS_MAX


def _can_have_successor(world: World, _slot: int) -> bool:
    return len(world.serving) == 1 and len(world.daemons) < DAEMONS_MAX


def _can_lose_names(world: World, _slot: int) -> bool:
    """The other order of `_keeps_names` (node_events.py)."""
    return not world.has_other_names


async def _start(world: World, _slot: int) -> None:
    await world.start_daemon()


async def _start_elsewhere(world: World, _slot: int) -> None:
    world.change_state_directory(remove=False)
    await world.start_daemon()


async def _crash(world: World, slot: int) -> None:
    """At any await: within the first thousand turns of the scheduler after the event before."""
    ticks = detail_of(slot) * detail_of(slot) // 10
    await world.kill_daemon(world.daemons[slot % len(world.daemons)], ticks)


def _jump(_world: World, slot: int) -> None:
    """The machine slept: the clock goes on by 1 to 10 minutes at once."""
    clock = trio.lowlevel.current_clock()
    assert isinstance(clock, MockClock)
    clock.jump(60.0 * (1 + detail_of(slot) % 10))


_TWO: Final = {Flag.TWO_SERVE: True}

DAEMON_KINDS: Final = (
    Kind(
        "the daemon is told to stop",
        lambda w, _s: len(w.serving) == 1,
        lambda w, _s: w.serving[0].stop(),
        needs={Flag.ONE_SERVES: True, Flag.TWO_SERVE: False},
        leaves={Flag.ONE_SERVES: False, Flag.TWO_SERVE: False},
    ),
    Kind(
        "a daemon starts",
        _can_start,
        _start,
        needs={Flag.ONE_SERVES: False, Flag.TWO_SERVE: False},
        leaves={Flag.ONE_SERVES: True, Flag.TWO_SERVE: False},
    ),
    Kind(
        "a successor starts",
        _can_have_successor,
        _start,
        needs={Flag.ONE_SERVES: True, Flag.TWO_SERVE: False},
        leaves={Flag.ONE_SERVES: True, Flag.TWO_SERVE: True},
    ),
    Kind(
        "the predecessor is told to stop",
        lambda w, _s: len(w.serving) == 2,
        lambda w, _s: w.serving[0].stop(),
        needs=_TWO,
        leaves={Flag.ONE_SERVES: True, Flag.TWO_SERVE: False},
    ),
    Kind(
        "the successor is told to stop",
        lambda w, _s: len(w.serving) == 2,
        lambda w, _s: w.serving[-1].stop(),
        needs=_TWO,
        leaves={Flag.ONE_SERVES: True, Flag.TWO_SERVE: False},
    ),
    Kind(
        "a daemon crashes",
        lambda w, _s: bool(w.daemons),
        _crash,
        leaves={Flag.TWO_SERVE: False},
        may_bring={Flag.ONE_SERVES: False},
    ),
    Kind(
        "a daemon starts with another state directory",
        lambda w, s: _can_have_successor(w, s) and _can_lose_names(w, s),
        _start_elsewhere,
        needs={Flag.ONE_SERVES: True, Flag.TWO_SERVE: False},
        leaves={Flag.ONE_SERVES: True, Flag.TWO_SERVE: True},
    ),
    Kind(
        "the state directory is deleted",
        _can_lose_names,
        lambda w, _s: w.change_state_directory(remove=True),
    ),
    crash("the hand-over crashes", Fault.HAND_OVER_CRASHES),
    Kind(
        "descriptors run out",
        always,
        lambda w, _s: w.faults.order_for(Fault.NO_DESCRIPTORS, SHORTAGE_S),
    ),
    Kind("the disk is full", always, fault(Fault.DISK_FULL, 1)),
    Kind("the clock jumps", always, _jump),
)
"""Every kind of event of the daemon's own life."""
