"""Plays one history, so that the same script and the same seed are the same history to the last byte.

What would differ from run to run is pinned here: the order in which trio runs tasks, Python's random numbers, the
garbage collector (which may end an asynchronous generator), the daemon's log. What carries the name of the temporary
directory or a real process's number never reaches the simulation.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

import trio
import trio._core._run as trio_run
from trio.testing import MockClock

from gpuactors.observe import log
from gpuactors_simulation.log_tail import LogTail
from tests.histories.check import Safety, ViolationError, check_journal, settle
from tests.histories.events import KINDS
from tests.histories.script import Script, Step
from tests.histories.trace import Trace
from tests.histories.world import World, innermost, open_world
from tests.memory.faults import PlannedCrashError

REPLAYED_EVERY: Final = 8
"""One history in so many has its journal replayed when it has settled, which takes as long as the history."""

LONG_EVERY: Final = 8
"""One history in so many is watched for longer after it has settled."""

ROUNDS_MAX: Final = 50_000
"""Rounds of trio's scheduler in which no time passes: thousands are a burst, more is a loop that never ends."""

Chooser = Callable[[World], Iterator[Step]]
"""Yields what happens next, each step only when it comes."""

OnStep = Callable[[World, Step | None], None]
"""Called with the world after each step; with None at the beginning, and when it has settled."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The condition that did not hold."""

    check: str
    text: str
    steps: int
    """After how many steps."""
    settled: bool
    """It was found when everything should have been quiet again."""


@dataclass(frozen=True, slots=True)
class Played:
    """A history that was played."""

    seed: int
    script: Script
    """The steps that happened: those that were not enabled are left out."""
    failure: Failure | None
    digest: str
    """The same for the same history."""
    trace: tuple[str, ...]
    """The events, line by line; empty unless they were kept."""


def play(script: Script, seed: int, *, on_step: OnStep | None = None, keep_trace: bool = False) -> Played:
    """Plays a script; a step that cannot happen when its turn comes is left out."""
    return play_chosen(_chooser(script), seed, on_step=on_step, keep_trace=keep_trace)


def _chooser(script: Script) -> Chooser:
    def choose(world: World) -> Iterator[Step]:
        return (step for step in script if KINDS[step.kind].enabled(world, step.slot))

    return choose


def play_chosen(
    choose: Chooser, seed: int, *, on_step: OnStep | None = None, keep_trace: bool = False
) -> Played:
    """Plays the steps that `choose` yields."""
    with (
        tempfile.TemporaryDirectory(prefix="gpuactors-", dir=_memory_directory()) as name,
        _pinned(seed) as tail,
    ):
        return _Play(Path(name), choose, seed, tail, on_step, keep_trace=keep_trace).run()


def _memory_directory() -> str | None:
    """A directory in memory, where there is one: the tree of a node is some hundred files."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


@contextmanager
def _pinned(seed: int) -> Iterator[LogTail]:
    """Pins everything that would differ from run to run, for the time of one history."""
    tail = LogTail()
    root = logging.getLogger()
    before = random.getstate(), trio_run._r.getstate(), trio_run._ALLOW_DETERMINISTIC_SCHEDULING
    handlers, level = root.handlers[:], root.level
    collects = gc.isenabled()
    gc.disable()
    random.seed(seed)
    trio_run._r.seed(seed)
    # Without it the tasks that can run are an unsorted set before they are shuffled (what Hypothesis switches on too).
    trio_run._ALLOW_DETERMINISTIC_SCHEDULING = True  # type: ignore[misc]
    log.configure("json", "error", stream=tail)
    try:
        yield tail
    finally:
        random.setstate(before[0])
        trio_run._r.setstate(before[1])
        trio_run._ALLOW_DETERMINISTIC_SCHEDULING = before[2]  # type: ignore[misc]
        root.handlers[:] = handlers
        root.setLevel(level)
        if collects:
            gc.enable()


@final
class _Play:
    """One history while it is played."""

    def __init__(
        self,
        root: Path,
        choose: Chooser,
        seed: int,
        tail: LogTail,
        on_step: OnStep | None,
        *,
        keep_trace: bool,
    ) -> None:
        self._root = root
        self._choose = choose
        self._seed = seed
        self._tail = tail
        self._on_step = on_step
        self._trace = Trace(keep=keep_trace)
        self._played: list[Step] = []
        self._settling = False
        self._clock = MockClock(autojump_threshold=0)
        self._watchdog = _Watchdog(self._clock)

    def run(self) -> Played:
        failure: Failure | None = None
        try:
            trio.run(self._run, clock=self._clock, instruments=[self._watchdog])
        except BaseException as error:
            failure = self._failure(error)
        if failure is None and self._watchdog.struck:
            failure = self._failed(
                "no time passes", f"{ROUNDS_MAX} rounds of tasks, and the clock has not advanced"
            )
        return Played(self._seed, tuple(self._played), failure, self._trace.digest(), self._trace.lines)

    def _failure(self, error: BaseException) -> Failure:
        found = innermost(error)
        if isinstance(found, ViolationError):
            return self._failed(found.check, found.text)
        if isinstance(found, Exception):
            return self._failed(f"the simulation broke: {type(found).__name__}", repr(found))
        raise error

    def _failed(self, check: str, text: str) -> Failure:
        return Failure(check, text, len(self._played), self._settling)

    async def _run(self) -> None:
        with self._watchdog.scope:
            async with open_world(self._root, self._seed, self._trace) as world:
                safety = Safety(world)
                self._show(world, None)
                for step in self._choose(world):
                    await self._step(world, step, safety)
                self._settling = True
                try:
                    await settle(world, safety, long=self._seed // 8 % LONG_EVERY == 0)
                    self._check_log()
                    if self._seed // 16 % REPLAYED_EVERY == 0:
                        check_journal(world)
                finally:
                    self._trace.add(f"settled {sorted(world.kubelet.view.resources.items())}")
                    self._show(world, None)

    async def _step(self, world: World, step: Step, safety: Safety) -> None:
        self._played.append(step)
        self._trace.add(f"step {step}")
        world.counts[step.kind] += 1
        try:
            done = KINDS[step.kind].act(world, step.slot)
            if done is not None:
                await done
            safety.check(time_passed=False)
            await trio.sleep(step.wait_s)
            safety.check(time_passed=step.wait_s > 0)
            self._check_log()
        finally:
            self._show(world, step)

    def _check_log(self) -> None:
        """A daemon that survives its own bug reports it only in its log."""
        for line in self._tail.complaints:
            if PlannedCrashError.MARK not in line:
                raise ViolationError("an error in the log", line)

    def _show(self, world: World, step: Step | None) -> None:
        if self._on_step is not None:
            self._on_step(world, step)


@final
class _Watchdog(trio.abc.Instrument):
    """Ends a run in which tasks go on and on while no time passes."""

    def __init__(self, clock: MockClock) -> None:
        self.scope = trio.CancelScope()
        self.struck = False
        self._clock = clock
        self._at_s = 0.0
        self._rounds = 0

    def before_io_wait(self, timeout: float) -> None:
        now_s = self._clock.current_time()
        if now_s != self._at_s:
            self._at_s, self._rounds = now_s, 0
            return
        self._rounds += 1
        if self._rounds > ROUNDS_MAX and not self.struck:
            self.struck = True
            self.scope.cancel()
