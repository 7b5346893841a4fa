"""Every call of the daemon to the outside raises once: the daemon lives, and everything is served in the end.

Nothing is drawn: in a life each kind of call that is made raises the first time that it is made, a life for each errno.
So each act and each read is begun anew until it has failed at each of its calls. `python -m
tests.simulation.test_every_call_fails [EIO …]` plays each pair of a call and an errno in a life of its own, which takes
half an hour.
"""

from __future__ import annotations

import errno
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import pytest
import trio
from trio.testing import MockClock

from gpuactors.simulation.histories.claims import CLAIMS
from gpuactors.simulation.histories.play import _memory_directory, _pinned
from gpuactors.simulation.histories.trace import Trace
from gpuactors.simulation.histories.world import MODEL, MODELS, World, open_world
from gpuactors.simulation.kubelet.dra import worker
from gpuactors.simulation.kubelet.values import KubeletView, Phase
from tests.support.strikes import OF_ACTORS, OF_ADAPTORS, Call, Methods, Strikes, striking

NUMBERS: Final = (
    errno.EIO, errno.EACCES, errno.ENOSPC, errno.EMFILE, errno.ENOMEM, errno.EAGAIN, errno.EBUSY, errno.ENODEV,
    errno.ENOENT, errno.EROFS, errno.ESTALE,
)  # fmt: skip

RESOURCE: Final = MODELS[MODEL]
BOUND_LATE: Final = 3
"""The place of a card that the boot has put on its host's driver."""

PATIENCE_S: Final = 3600.0
"""Of the mock clock, for a life."""

PREPARE_AGAIN_S: Final = (2.0, 3.0)
"""Kubelet's own pause after a prepare that failed is 60 to 90 s, of which a node has fifty in a life."""

ROUNDS_MAX: Final = 60


def os_error(number: int) -> Exception:
    return OSError(number, os.strerror(number), "/struck")


class Played:
    """A life."""

    def __init__(self) -> None:
        self.calls: set[Call] = set()
        self.struck = 0
        self.problems: list[str] = []
        self.log: tuple[str, ...] = ()


def play(
    methods: Methods, error: Callable[[], Exception], *, system: bool, only: Call | None = None
) -> Played:
    played = Played()
    with (
        tempfile.TemporaryDirectory(prefix="gpuactors-", dir=_memory_directory()) as name,
        _pinned(1) as tail,
        striking(methods, error, system=system, only=only) as strikes,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(worker, "PREPARE_AGAIN_S", PREPARE_AGAIN_S)
        trio.run(_live, Path(name), strikes, played, clock=MockClock(autojump_threshold=0))
        played.calls, played.struck, played.log = strikes.calls, strikes.struck, tail.complaints
    return played


async def _live(root: Path, strikes: Strikes, played: Played) -> None:
    """Pods come and go, by the device plugin and with a claim, until no call has raised for a whole round."""
    with trio.fail_after(PATIENCE_S):
        async with open_world(root, CLAIMS | 1, Trace(keep=False)) as world:
            struck, number = -1, 0
            while struck != strikes.struck:
                struck, number = strikes.struck, number + 1
                assert number < ROUNDS_MAX, f"calls raise for ever: {sorted(strikes.calls)[:3]}"
                await _round(world, number)
            played.problems = world.problems
            assert [d.name for d in world.daemons] == ["daemon 1"], "it lives"


def _has_begun(pod: str, view: KubeletView) -> bool:
    return view.pods[pod].phase in (Phase.RUNNING, Phase.FAILED)


async def _round(world: World, number: int) -> None:
    kubelet, claimed = world.kubelet, f"claimed-{number}"
    assert world.claims is not None
    world.claims.allocate(claimed, [world.address(BOUND_LATE)])
    kubelet.submit(claimed, {}, uses=(claimed,))
    attempt = 0
    while True:  # a pod whose Allocate was refused has failed, and its controller makes another one
        vm = f"vm-{number}-{attempt}"
        kubelet.submit(vm, {RESOURCE: 1})
        view = await kubelet.until(partial(_has_begun, vm))
        if view.pods[vm].phase is Phase.RUNNING:
            break
        kubelet.delete(vm)
        attempt += 1
        await trio.sleep(1)
    await kubelet.until(lambda v: v.pods[claimed].phase is Phase.RUNNING)
    for name in (vm, claimed):
        kubelet.delete(name)
    await kubelet.until(lambda v: not v.pods and v.resources[RESOURCE].free == 3)
    while not world.claims.is_on_host_driver(world.address(BOUND_LATE)):  # noqa: ASYNC110 -- the kernel tells nobody
        await trio.sleep(1)


@pytest.mark.parametrize("number", NUMBERS, ids=errno.errorcode.get)
def test_every_call_of_an_adaptor_fails_once(number: int) -> None:
    """Issue 24, 2: an OSError at the wrong call ended the daemon, and every start after it."""
    played = play(OF_ADAPTORS, partial(os_error, number), system=True)
    print(f"{len(played.calls)} calls have raised {errno.errorcode[number]}")
    assert (played.problems, played.log) == ([], ())
    assert played.struck == len(played.calls) > 100


@pytest.mark.parametrize("bug", [RecursionError, KeyError, ValueError])
def test_every_call_of_an_actor_fails_once_by_a_bug(bug: type[Exception]) -> None:
    """Issue 24, 1: a claim that nests too deep ended the daemon, whoever had decoded it."""
    played = play(OF_ACTORS, lambda: bug("a bug"), system=False)
    print(f"{len(played.calls)} calls have raised {bug.__name__}")
    assert played.problems == []
    assert played.struck == len(played.calls) == len(played.log) > 10
    assert all('"event": "actor.failed"' in line for line in played.log)


def _all_pairs() -> int:
    calls = sorted(play(OF_ADAPTORS, Exception, system=True, only=()).calls)
    failed = 0
    numbers = [getattr(errno, name) for name in sys.argv[1:]] or NUMBERS
    for call in calls:
        for number in numbers:
            try:
                played = play(OF_ADAPTORS, partial(os_error, number), system=True, only=call)
                wrong = [*played.problems, *played.log]
                if played.struck != 1:
                    wrong.append("it was not made")
            except Exception as error:
                wrong = [repr(error)]
            if wrong:
                failed += 1
                print(errno.errorcode[number], call, wrong, flush=True)
    print(
        f"{len(calls)} calls, {len(numbers)} errors each: {failed} of {len(calls) * len(numbers)} pairs failed"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(_all_pairs())
