"""What each part of a run is given: the parties, how much to measure, where to put it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Final, TypeVar

from tests.bench.figures import Sheet
from tests.bench.node import Node
from tests.bench.parties import Party

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Counts:
    """How much is measured of each party."""

    starts: int
    blocks: int
    """Of calls by one caller."""
    bursts: int
    """Of calls by 16 callers."""
    claims: int
    crowd: int
    """Prepares at once."""
    waiting: int
    """Claims that the API server refuses to be read."""
    claims_kept: int
    """In the checkpoint, beside Allocates."""
    binds: int
    storms: int
    storm_events: int
    kubelets: int
    """Restarts of kubelet."""
    hand_overs: int
    idle_s: float
    quiet_s: float
    """Before idling: trio ends a worker thread after 10 s without work (trio/_core/_thread_cache.py), and that wake-up
    belongs to the work before."""
    memory_events: int
    commands: int
    scrapes: int
    functions: tuple[int, ...] = (8, 64, 512, 4096)
    """Half of them GPUs."""
    gpus: tuple[int, ...] = (4, 32, 256)
    lists: tuple[int, ...] = (4, 32, 256, 2048)
    """GPUs of one resource, all of them in each list."""

    def smallest(self) -> Counts:
        """Of each size the smallest only."""
        return replace(self, functions=self.functions[:1], gpus=self.gpus[:1], lists=self.lists[:1])

    def scaled(self, factor: float) -> Counts:
        """As many times so much, but at least 2 of each; the sizes stay."""

        def some(count: int) -> int:
            return max(2, round(count * factor))

        return replace(
            self,
            starts=some(self.starts),
            blocks=some(self.blocks),
            bursts=some(self.bursts),
            claims=some(self.claims),
            binds=some(self.binds),
            storms=some(self.storms),
            kubelets=some(self.kubelets),
            hand_overs=some(self.hand_overs),
            idle_s=self.idle_s * factor,
            memory_events=some(self.memory_events),
            commands=some(self.commands),
            scrapes=some(self.scrapes),
        )


FULL: Final = Counts(
    starts=20,
    blocks=20,
    bursts=8,
    claims=100,
    crowd=300,
    waiting=200,
    claims_kept=1000,
    binds=100,
    storms=3,
    storm_events=10_000,
    kubelets=100,
    hand_overs=10,
    idle_s=60.0,
    quiet_s=12.0,
    memory_events=100_000,
    commands=20,
    scrapes=200,
)
QUICK: Final = Counts(
    starts=1,
    blocks=1,
    bursts=1,
    claims=2,
    crowd=8,
    waiting=8,
    claims_kept=8,
    binds=2,
    storms=1,
    storm_events=50,
    kubelets=1,
    hand_overs=1,
    idle_s=0.5,
    quiet_s=0.0,
    memory_events=50,
    commands=1,
    scrapes=2,
    functions=(8,),
    gpus=(4,),
    lists=(4,),
)
"""Whether it works; its figures mean nothing."""


@dataclass(frozen=True, slots=True)
class Bench:
    """One run."""

    directory: Path
    sheet: Sheet
    daemons: tuple[Party, ...]
    """The first is the one of this checkout."""
    floor: Party
    """The bare plugin."""
    counts: Counts
    _numbers: Iterator[int] = field(default_factory=count)

    def fresh(self) -> Path:
        """A new directory. Its path is short: those of sockets end at 107 bytes (unix(7))."""
        directory = self.directory / str(next(self._numbers))
        directory.mkdir(parents=True)
        return directory

    @property
    def parties(self) -> tuple[Party, ...]:
        """The daemons and the floor."""
        return (*self.daemons, self.floor)

    @contextmanager
    def nodes(self, gpus: int, parties: Sequence[Party] | None = None) -> Iterator[dict[str, Node]]:
        """A node for each party by its name, all started."""
        with ExitStack() as stack:
            nodes = {
                party.name: stack.enter_context(Node(self.fresh(), party, gpus=gpus))
                for party in (self.parties if parties is None else parties)
            }
            for node in nodes.values():
                node.started()
            yield nodes


def in_turn(parties: Iterable[T], rounds: int) -> Iterator[tuple[T, int]]:
    """Each party once in each round, with the round's number; who begins changes from round to round."""
    order = list(parties)
    for number in range(rounds):
        first = number % len(order)
        yield from ((party, number) for party in order[first:] + order[:first])


def say(text: str) -> None:
    """Progress, for whoever waits."""
    print(f"bench: {text} …", file=sys.stderr, flush=True)
