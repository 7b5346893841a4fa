"""Many histories on all cores: which worker plays which, what they found, and what they covered.

History number N of a campaign has a seed of its own, derived from the campaign's seed and N. Of W worker processes
number P plays the histories P, P + W, P + 2 W, …, guided by what *it* has covered; so a campaign with the same seed and
the same number of workers plays the same histories again. Must not judge a history: `check.py` does.
"""

from __future__ import annotations

import faulthandler
import hashlib
import itertools
import multiprocessing
import os
import queue
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.context import SpawnProcess
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from typing import Final

from tests.histories.coverage import Coverage
from tests.histories.draw import Guide, drawn
from tests.histories.events import Serves, serves
from tests.histories.found import known
from tests.histories.play import Played, play_chosen

HANG_S: Final = 120.0
"""A history takes some 50 ms; a worker that hangs in one for so long prints its stack, and ends."""

STEPS_MAX: Final = 28
"""Of one history. Its beginning and its end cost as much as twenty steps, so that more of them cover more pairs in the
same time; a failure is made shorter in any case."""

PROGRESS_S: Final = 5.0

ENDS_CAMPAIGN: Final = (signal.SIGINT, signal.SIGTERM)

DISTINCT_MAX: Final = 5
"""A campaign that goes on after a failure ends when so many different checks have failed."""


@dataclass(slots=True)
class Result:
    """What a campaign found."""

    covered: dict[Serves, Coverage] = field(default_factory=lambda: {of: Coverage(of) for of in Serves})
    """By what the nodes serve."""
    failures: list[Played] = field(default_factory=list)
    """The first history that failed each check."""
    failed: Counter[str] = field(default_factory=Counter)
    """How many failed, by check."""
    known: Counter[str] = field(default_factory=Counter)
    """How many failed for a reason that is known and not repaired yet."""
    took_s: float = 0.0
    interrupted: bool = False

    @property
    def histories(self) -> int:
        """How many were played."""
        return sum(coverage.histories for coverage in self.covered.values())


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is to be played."""

    seed: int
    histories: int | None = None
    seconds: float | None = None
    workers: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    stop_at_first: bool = False
    claims_every: int = 0
    """One node in so many has claims; 0: none."""
    domains_every: int = 0
    """The same of compute domains."""
    administrators_every: int = 0
    """The same of claims and a second administrator."""
    parts_every: int = 0
    """The same of cards that can have virtual functions."""
    vgpus_every: int = 0
    """The same of these and vGPUs; every other one serves claims as well."""
    sets_every: int = 0
    """The same of sets of devices."""
    fabrics_every: int = 0
    """The same of partitions that the daemons activate; every other one serves claims as well."""
    dead_every: int = 0
    """The same of cards that die; every other one serves claims as well."""
    kata_every: int = 0
    """The same of daemons that answer by CDI names."""
    egms_every: int = 0
    """The same of Grace superchips."""

    @property
    def played(self) -> tuple[Serves, ...]:
        """The kinds of nodes that there are."""
        every = {
            Serves.PLUGIN: 1,
            Serves.CLAIMS: self.claims_every,
            Serves.DOMAINS: self.domains_every,
            Serves.ADMINISTRATORS: self.administrators_every,
            Serves.PARTS: self.parts_every,
            Serves.VGPUS: self.vgpus_every,
            Serves.CLAIMED_VGPUS: self.vgpus_every,
            Serves.SETS: self.sets_every,
            Serves.FABRIC: self.fabrics_every,
            Serves.CLAIMED_FABRIC: self.fabrics_every,
            Serves.DEAD: self.dead_every,
            Serves.CLAIMED_DEAD: self.dead_every,
            Serves.KATA: self.kata_every,
            Serves.EGMS: self.egms_every,
        }
        return tuple(of for of, number in every.items() if number)


def history_seed(campaign: int, number: int, of: Serves = Serves.PLUGIN) -> int:
    """The seed of one history of a campaign, on a node of this kind."""
    digest = hashlib.blake2b(f"{campaign}/{number}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") | of.bit


def play_part(plan: Plan, part: int, on_played: Callable[[Played], bool]) -> None:
    """Plays one worker's share until `on_played` returns False."""
    guides = {of: Guide(part, plan.workers, of) for of in Serves}
    for of, number in _numbered(plan, part):
        seed = history_seed(plan.seed, number, of)
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        played = play_chosen(drawn(random.Random(seed), guides[of], STEPS_MAX), seed)
        faulthandler.cancel_dump_traceback_later()
        if not on_played(played):
            return


def _numbered(plan: Plan, part: int) -> Iterator[tuple[Serves, int]]:
    """A worker's histories. A kind of nodes that comes every so many turns has numbers of its own: without it the
    others are the same ones."""
    numbers = {of: itertools.count() for of, _, _ in _IN_TURN}
    for turn in itertools.count(1):
        kinds = next(of for of, every, sooner in _IN_TURN if _is_turn(every(plan), turn + sooner))
        nth = next(numbers[kinds])
        of = kinds[nth % len(kinds)]
        has_claims = of is Serves.PLUGIN and _is_turn(plan.claims_every, nth)
        yield Serves.CLAIMS if has_claims else of, part + plan.workers * nth


_IN_TURN: Final[tuple[tuple[tuple[Serves, ...], Callable[[Plan], int], int], ...]] = (
    ((Serves.EGMS,), lambda plan: plan.egms_every, 8),
    ((Serves.KATA,), lambda plan: plan.kata_every, 7),
    ((Serves.DEAD, Serves.CLAIMED_DEAD), lambda plan: plan.dead_every, 6),
    ((Serves.FABRIC, Serves.CLAIMED_FABRIC), lambda plan: plan.fabrics_every, 5),
    ((Serves.SETS,), lambda plan: plan.sets_every, 4),
    ((Serves.VGPUS, Serves.CLAIMED_VGPUS), lambda plan: plan.vgpus_every, 3),
    ((Serves.PARTS,), lambda plan: plan.parts_every, 2),
    ((Serves.DOMAINS,), lambda plan: plan.domains_every, 0),
    ((Serves.ADMINISTRATORS,), lambda plan: plan.administrators_every, 1),
    ((Serves.PLUGIN,), lambda _: 1, 0),
)
"""Kinds of nodes that have turns: the first that has this one; how many turns lie between two; by how many sooner they
come, so that kinds with one distance do not meet. Several kinds of a row have its turns one after the other."""


def _is_turn(every: int, turn: int) -> bool:
    return every > 0 and turn % every == 0


def _work(plan: Plan, part: int, count: int | None, results: Queue[Played | None], stop: Event) -> None:
    """A worker's process. A signal that ends a campaign may reach the whole process group; only the parent handles it.
    If the parent is killed, the worker ends after its history, and what it found is lost."""
    for number in ENDS_CAMPAIGN:
        signal.signal(number, signal.SIG_IGN)
    parent, left = multiprocessing.parent_process(), count

    def on_played(played: Played) -> bool:
        nonlocal left
        if parent is not None and not parent.is_alive():
            results.cancel_join_thread()  # nothing reads the queue
            return False
        results.put(played)
        left = None if left is None else left - 1
        return left != 0 and not stop.is_set()

    if left != 0:
        play_part(plan, part, on_played)
    results.put(None)


def run_campaign(plan: Plan, progress: Callable[[Result], None] = lambda _result: None) -> Result:
    """Plays a campaign; `progress` is called every few seconds. Ctrl-C and SIGTERM end it early.

    Raises `RuntimeError` if a worker's process dies, which no history should cause.
    """
    context = multiprocessing.get_context("spawn")
    results: Queue[Played | None] = context.Queue()
    stop = context.Event()
    workers = [
        context.Process(
            target=_work, args=(plan, part, _share(plan, part), results, stop), name=f"worker {part}"
        )
        for part in range(plan.workers)
    ]
    result, began_s = Result(), time.monotonic()
    for worker in workers:
        worker.start()
    try:
        with _signals_end(stop, result):
            _collect(plan, workers, results, stop, result, progress)
    finally:
        stop.set()
        _end(workers, results)
        result.took_s = time.monotonic() - began_s
    return result


@contextmanager
def _signals_end(stop: Event, result: Result) -> Iterator[None]:
    """What was found so far is still reported."""

    def end(_signal: int, _frame: object) -> None:
        result.interrupted = True
        stop.set()

    before = {number: signal.signal(number, end) for number in ENDS_CAMPAIGN}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(workers: list[SpawnProcess], results: Queue[Played | None]) -> None:
    """Returns when every worker has ended. A worker cannot end before its queue is read, so the queue is read."""
    while any(worker.is_alive() for worker in workers):
        with suppress(queue.Empty):
            results.get(timeout=0.1)


def _share(plan: Plan, part: int) -> int | None:
    """How many histories a worker plays."""
    if plan.histories is None:
        return None
    return len(range(part, plan.histories, plan.workers))


def _collect(
    plan: Plan,
    workers: list[SpawnProcess],
    results: Queue[Played | None],
    stop: Event,
    result: Result,
    progress: Callable[[Result], None],
) -> None:
    began_s = time.monotonic()
    shown_s, working = began_s, len(workers)
    while working:
        now_s = time.monotonic()
        if now_s - shown_s >= PROGRESS_S:
            shown_s = now_s
            result.took_s = now_s - began_s
            progress(result)
        if plan.seconds is not None and now_s - began_s >= plan.seconds:
            stop.set()
        try:
            played = results.get(timeout=1.0)
        except queue.Empty:
            dead = [worker.name for worker in workers if worker.exitcode not in (None, 0)]
            if dead:
                raise RuntimeError(f"{', '.join(dead)} died; what it was doing is above") from None
            continue
        if played is None:
            working -= 1
        elif _count(result, played) and (plan.stop_at_first or len(result.failures) >= DISTINCT_MAX):
            stop.set()


def _count(result: Result, played: Played) -> bool:
    """Counts a history; returns whether it failed for a reason that is not known."""
    result.covered[serves(played.seed)].add(played.script)
    if played.failure is None:
        return False
    if (fault := known(played.failure)) is not None:
        result.known[fault.why] += 1
        return False
    result.failed[played.failure.check] += 1
    if result.failed[played.failure.check] == 1:
        result.failures.append(played)
    return True
