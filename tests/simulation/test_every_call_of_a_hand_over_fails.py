"""As `test_every_call_fails.py`, in a life of hand-overs: a successor starts while pods come and go, and again, until
no call has raised in two whole rounds. What is asked of the predecessor and of the successor raises as well."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import pytest
import trio
from trio.testing import MockClock

from gpuactors.core.values.model import Role
from gpuactors_simulation.kubelet.dra import worker
from tests.histories.claims import CLAIMS
from tests.histories.play import _memory_directory, _pinned
from tests.histories.trace import Trace
from tests.histories.world import World, open_world
from tests.memory import control, kubelet
from tests.simulation.test_every_call_fails import (
    NUMBERS,
    PATIENCE_S,
    PREPARE_AGAIN_S,
    ROUNDS_MAX,
    Played,
    _round,
    os_error,
)
from tests.simulation.test_hand_over_of_claims import REGISTERED_S
from tests.support.strikes import OF_ADAPTORS, Methods, Strikes, striking

OF_HAND_OVERS: Final[Methods] = {
    control._MemoryControlIo: ("dial", "bind"),
    kubelet._MemoryKubeletIo: ("dial_plugin",),
}
"""What only a hand-over calls: the control socket, and the successor's DRA API."""

QUIET_ROUNDS: Final = 2
"""A daemon whose control socket could not be made is followed by one that asks nobody."""

ALL: Final[Methods] = {
    **OF_ADAPTORS,
    **OF_HAND_OVERS,
    kubelet._MemoryKubeletIo: (*OF_ADAPTORS[kubelet._MemoryKubeletIo], "dial_plugin"),
}


def play(methods: Methods, error: Callable[[], Exception], *, system: bool) -> Played:
    played = Played()
    with (
        tempfile.TemporaryDirectory(prefix="gpuactors-", dir=_memory_directory()) as name,
        _pinned(1) as tail,
        striking(methods, error, system=system) as strikes,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(worker, "PREPARE_AGAIN_S", PREPARE_AGAIN_S)
        trio.run(_live, Path(name), strikes, played, clock=MockClock(autojump_threshold=0))
        played.calls, played.struck, played.log = strikes.calls, strikes.struck, tail.complaints
    return played


async def _live(root: Path, strikes: Strikes, played: Played) -> None:
    with trio.fail_after(PATIENCE_S):
        async with open_world(root, CLAIMS | 1, Trace(keep=False)) as world:
            number, quiet = 0, 0
            while quiet < QUIET_ROUNDS:
                struck, number = strikes.struck, number + 1
                assert number < ROUNDS_MAX, f"calls raise for ever: {sorted(strikes.calls)[:3]}"
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(_round, world, number)
                    await _hand_over(world)
                quiet = quiet + 1 if struck == strikes.struck else 0
            played.problems = world.problems
            assert [d.name for d in world.daemons] == [f"daemon {number + 1}"], "the last one lives"


async def _hand_over(world: World) -> None:
    (old,) = world.daemons
    await world.start_daemon()
    new = world.daemons[-1]
    assert new.handle is not None
    async for state in new.handle.state.subscribe():
        if state.daemon.role is Role.SERVING:
            break
    await trio.sleep(REGISTERED_S)
    old.stop()
    await old.ended.wait()


@pytest.mark.parametrize("number", NUMBERS, ids=errno.errorcode.get)
def test_every_call_of_a_hand_over_fails_once(number: int) -> None:
    played = play(OF_HAND_OVERS, partial(os_error, number), system=False)
    print(f"{len(played.calls)} calls have raised {errno.errorcode[number]}")
    assert (played.problems, played.log) == ([], ())
    assert played.struck == len(played.calls)
    struck = {call[0] for call in played.calls}
    assert struck == {f"{of.__name__}.{name}" for of, names in OF_HAND_OVERS.items() for name in names}


def test_every_call_of_an_adaptor_fails_once_in_hand_overs() -> None:
    played = play(ALL, partial(os_error, errno.EIO), system=True)
    print(f"{len(played.calls)} calls have raised EIO")
    assert (played.problems, played.log) == ([], ())
    assert played.struck == len(played.calls) > 100
