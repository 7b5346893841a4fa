"""The benchmark: real daemon processes, fake nodes, a grpcio kubelet in this process.

Prints the figures as text, or with --json as one JSON document on standard output (the text then goes to standard
error). The exit code is not 0 only if something did not work: no figure is judged here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final, get_args

from tests.bench import calls, event_to_frame, footprint, growth, hand_over, holders, journal, start_up
from tests.bench.figures import Figure, run, say
from tests.bench.node import Node
from tests.observe.recording import Held

GPUS: Final = 8
LARGE_FUNCTIONS: Final = 4096
MORE_GPUS: Final = (64, 512)
POLLED_GROUPS: Final = (8, 64, 512)


@dataclass(frozen=True, slots=True)
class Counts:
    """How much is measured."""

    rounds: int
    """Of unbind and bind on each of the two nodes that are compared."""
    more_rounds: int
    calls: int
    starts: int
    models: int
    holders: int
    """Rounds in which an external process opens a GPU and closes it."""
    hand_overs: int
    """Hand-overs, and then as many cold restarts."""
    journal_steps: int
    quiet_s: float
    idle_s: float
    large_functions: int = LARGE_FUNCTIONS
    more_gpus: tuple[int, ...] = MORE_GPUS
    polled_groups: tuple[int, ...] = POLLED_GROUPS
    growth: tuple[int, ...] = growth.GPUS


FULL: Final = Counts(
    rounds=200,
    more_rounds=50,
    calls=1000,
    starts=20,
    models=30,
    holders=30,
    hand_overs=30,
    journal_steps=5000,
    quiet_s=footprint.QUIET_S,
    idle_s=20.0,
)
QUICK: Final = Counts(
    rounds=3,
    more_rounds=2,
    calls=5,
    starts=1,
    models=2,
    holders=2,
    hand_overs=2,
    journal_steps=200,
    quiet_s=0.5,
    idle_s=0.5,
    large_functions=256,
    more_gpus=(16,),
    polled_groups=(8,),
    growth=(2, 4),
)
"""Whether it works; its figures mean nothing."""


def measure(directory: Path, counts: Counts) -> Iterator[Figure]:
    """Every figure, in the order in which they are measured. Raises `DidNotWork`."""
    say("starts")
    yield from start_up.imports(counts.starts)
    with ExitStack() as nodes:
        small = nodes.enter_context(Node(_made(directory / "s"), gpus=GPUS))
        others = counts.large_functions - GPUS
        large = nodes.enter_context(Node(_made(directory / "l"), gpus=GPUS, others=others))
        for node in (small, large):
            yield from start_up.measure(node, counts.starts)
        for node in (small, large):
            known = len(node.kubelet.registrations)
            node.start_daemon()
            node.settle(known)
        say(f"idling, {counts.quiet_s + counts.idle_s:g} s")
        yield from footprint.idle((small, large), counts.idle_s, quiet_s=counts.quiet_s)
        for node in (small, large):
            yield from footprint.memory(node)
        say("event to frame")
        yield from event_to_frame.compare(small, large, counts.rounds)
        say("calls")
        for node in (small, large):
            yield from calls.measure(node, counts.calls)
    say("holders")
    yield from holders.holders(_made(directory / "h"), counts.holders)
    say("polling")
    yield from holders.polling(directory, counts.polled_groups, counts.idle_s, counts.quiet_s)
    say("hand-overs")
    yield from hand_over.measure(_made(directory / "u"), counts.hand_overs)
    say("journal")
    yield from journal.costs(_made(directory / "j"), counts.journal_steps)
    for held in get_args(Held):
        yield journal.growth(_made(directory / f"growth {held}"), held)
    yield from journal.idle(_made(directory / "q"), counts.idle_s, counts.quiet_s)
    say("more and more GPUs")
    yield from growth.measure(_made(directory / "n"), counts.calls // 2, counts.more_rounds, counts.growth)
    say("new models")
    yield from event_to_frame.new_models(_made(directory / "m"), counts.models)
    for gpus in counts.more_gpus:
        say(f"{gpus} GPUs")
        yield from event_to_frame.more_gpus(_made(directory / f"g{gpus}"), gpus, counts.more_rounds)


def main(arguments: list[str] | None = None) -> int:
    """The exit code: 0, or 1 if something did not work."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.run", description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    parser.add_argument(
        "--quick", action="store_true", help="a few rounds only: does the benchmark itself work?"
    )
    options = parser.parse_args(arguments)
    counts = QUICK if options.quick else FULL
    return run(lambda directory: measure(directory, counts), as_json=options.json, quick=options.quick)


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory


if __name__ == "__main__":
    sys.exit(main())
