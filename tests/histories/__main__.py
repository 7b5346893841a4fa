"""`python -m tests.histories`: a campaign of histories on all cores. `just fuzz` and `just histories`, which plays the
histories that were found once before it (`--found`).

With `--script` it plays one order of events on a node in memory, in simulated time, and shows each step.

A campaign exits with 0 if nothing failed and enough was covered, else with 1; with 130 if it was interrupted before it
had played the histories, or covered the pairs, that were requested. A history that fails is made shorter and printed as
the one line that replays it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tests.histories.again import SCHEDULES, play_again
from tests.histories.campaign import Plan, Result, run_campaign
from tests.histories.coverage import share_of, summary, table
from tests.histories.events import check_names
from tests.histories.found import FOUND
from tests.histories.play import Played
from tests.histories.replay import replay
from tests.histories.script import ScriptError, parse_script, replay_line
from tests.histories.shrink import shrink

CLAIMS_EVERY: Final = 4
"""One of so many histories has a node with claims: there are a third as many pairs of kinds as without, and it takes
three times as long."""

DOMAINS_EVERY: Final = 8
"""The same of nodes with compute domains, whose pairs are fewer."""

ADMINISTRATORS_EVERY: Final = 8
"""The same of nodes with claims that a second administrator touches."""

PARTS_EVERY: Final = 8
"""The same of nodes with cards that can have virtual functions."""

VGPUS_EVERY: Final = 8
"""The same of nodes that have vGPUs as well; half of them serve claims."""

SETS_EVERY: Final = 16
FABRICS_EVERY: Final = 32
"""The same of nodes with sets of devices."""

DEAD_EVERY: Final = 16
"""The same of nodes whose cards die; half of them serve claims."""
KATA_EVERY: Final = 16
"""The same of nodes whose daemons answer by CDI names, as Kata needs it."""

EGMS_EVERY: Final = 32
"""The same of nodes of Grace superchips."""

INTERRUPTED: Final = 130
"""The exit code of a process that SIGINT has ended, as a shell has it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a campaign, or plays one script; returns the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.found and not _found_stay_found(options.workers, options.schedules):
        return 1
    seed = _seed(options.seed)
    if options.script is not None:
        try:
            script = check_names(parse_script(options.script))
        except ScriptError as exc:
            parser.error(f"argument --script: {exc}")
        return replay(script, seed, json_lines=options.json, out=sys.stdout)
    seconds = None if options.histories is not None else 60.0 * options.minutes
    plan = Plan(
        seed,
        options.histories,
        seconds,
        options.workers,
        options.histories is not None,
        options.claims_every,
        options.domains_every,
        options.administrators_every,
        options.parts_every,
        options.vgpus_every,
        options.sets_every,
        options.fabrics_every,
        options.dead_every,
        options.kata_every,
        options.egms_every,
    )
    size = f"{options.histories} histories" if options.histories is not None else f"{options.minutes:g} min"
    print(f"Seed {seed}, {plan.workers} processes, {size}.", flush=True)
    result = run_campaign(plan, _Progress())
    show_table = options.table or options.histories is None
    return _report(result, plan, min_pairs=options.min_pairs, show_table=show_table)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.histories", description=__doc__)
    parser.add_argument(
        "--found", action="store_true", help="first play those of found.py, each under its schedules"
    )
    parser.add_argument(
        "--schedules",
        type=int,
        choices=range(1, len(SCHEDULES) + 1),
        default=len(SCHEDULES),
        metavar="N",
        help=f"how many, with --found (default: all {len(SCHEDULES)})",
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="how long to play (default: 10)")
    parser.add_argument("--histories", type=int, help="how many to play instead; ends at the first failure")
    parser.add_argument(
        "--seed", default="", help="a number, or `commit` for one made of the commit's hash; else a new one"
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="processes; they belong to the seed (default: all cores)",
    )
    parser.add_argument(
        "--min-pairs",
        type=float,
        default=0.0,
        metavar="PERCENT",
        help="fail if fewer of the ordered pairs of kinds have followed each other, on nodes of any kind",
    )
    parser.add_argument(
        "--claims-every",
        type=int,
        default=CLAIMS_EVERY,
        metavar="N",
        help=f"one node in so many has claims; 0: none (default: {CLAIMS_EVERY})",
    )
    parser.add_argument(
        "--domains-every",
        type=int,
        default=DOMAINS_EVERY,
        metavar="N",
        help=f"one node in so many has compute domains; 0: none (default: {DOMAINS_EVERY})",
    )
    parser.add_argument(
        "--administrators-every",
        type=int,
        default=ADMINISTRATORS_EVERY,
        metavar="N",
        help="one node in so many has claims and a second administrator; 0: none "
        f"(default: {ADMINISTRATORS_EVERY})",
    )
    parser.add_argument(
        "--parts-every",
        type=int,
        default=PARTS_EVERY,
        metavar="N",
        help="one node in so many has cards that can have virtual functions; 0: none, else 3 or more "
        f"(default: {PARTS_EVERY})",
    )
    parser.add_argument(
        "--vgpus-every",
        type=int,
        default=VGPUS_EVERY,
        metavar="N",
        help=f"one node in so many has vGPUs as well; 0: none, else 4 or more (default: {VGPUS_EVERY})",
    )
    parser.add_argument(
        "--sets-every",
        type=int,
        default=SETS_EVERY,
        metavar="N",
        help=f"one node in so many has sets of devices; 0: none, else 5 or more (default: {SETS_EVERY})",
    )
    parser.add_argument(
        "--fabrics-every",
        type=int,
        default=FABRICS_EVERY,
        metavar="N",
        help="one node in so many activates the partitions of an NVLink fabric; 0: none, else 6 or more (default: "
        f"{FABRICS_EVERY})",
    )
    parser.add_argument(
        "--dead-every",
        type=int,
        default=DEAD_EVERY,
        metavar="N",
        help=f"one node in so many has cards that die; 0: none, else 7 or more (default: {DEAD_EVERY})",
    )
    parser.add_argument(
        "--kata-every",
        type=int,
        default=KATA_EVERY,
        metavar="N",
        help="one node in so many has daemons that answer by CDI names; 0: none, else 8 or more (default: "
        f"{KATA_EVERY})",
    )
    parser.add_argument(
        "--egms-every",
        type=int,
        default=EGMS_EVERY,
        metavar="N",
        help=f"one node in so many is of Grace superchips; 0: none, else 9 or more (default: {EGMS_EVERY})",
    )
    parser.add_argument(
        "--script",
        metavar="'KIND@SLOT+WAIT; …'",
        help="play this one order of events instead, with this seed; show kubelet's counts after each",
    )
    parser.add_argument("--json", action="store_true", help="with --script: one JSON object per step")
    parser.add_argument(
        "--table",
        action="store_true",
        help="show which kinds have followed which; always shown without --histories",
    )
    return parser


def _found_stay_found(workers: int, schedules: int) -> bool:
    print(f"{len(FOUND)} histories that were found once, under {schedules} schedules each.", flush=True)
    problems = play_again(workers, schedules)
    for problem in problems:
        print(problem, flush=True)
    return not problems


def _seed(wanted: str) -> int:
    if wanted == "commit":
        return _commit_seed()
    return int(wanted) if wanted else int.from_bytes(os.urandom(4), "big")


def _commit_seed() -> int:
    """The first 32 bits of the commit's hash, so that each change is tried with other histories; 0 without git."""
    here = Path(__file__).resolve().parent
    try:
        done = subprocess.run(
            ["git", "-c", "safe.directory=*", "rev-parse", "HEAD"],
            cwd=here,
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        )
    except (OSError, subprocess.SubprocessError):
        print("There is no commit to make a seed of; it is 0.", flush=True)
        return 0
    return int(done.stdout[:8], 16)


class _Progress:
    """Prints the progress every few seconds, and each failure at once, before it is made shorter."""

    def __init__(self) -> None:
        self._printed = 0

    def __call__(self, result: Result) -> None:
        covered = result.covered.values()
        shares = ", ".join(f"{100 * c.adjacent_share:.1f} % {c.of}" for c in covered if c.histories)
        line = (
            f"{result.histories:7d} histories in {result.took_s:5.0f} s, {sum(c.steps for c in covered)} steps; "
            f"of pairs {shares or 'none'}; {sum(result.failed.values())} failed"
        )
        print(line, file=sys.stderr, flush=True)
        for played in result.failures[self._printed :]:
            assert played.failure is not None
            print(f"{played.failure.check}: {played.failure.text}", file=sys.stderr)
            print(replay_line(played.seed, played.script), file=sys.stderr, flush=True)
        self._printed = len(result.failures)


def _report(result: Result, plan: Plan, *, min_pairs: float, show_table: bool) -> int:
    played = [result.covered[of] for of in plan.played]
    share = 100 * share_of(played)
    few = share < min_pairs and not result.failures
    if show_table or few:
        print("\n\n".join(map(table, played)))
    for coverage in played:
        print(f"{summary(coverage)}.")
    print(f"{share:.1f} % of all pairs in {result.took_s:.0f} s.")
    for why, times in result.known.items():
        print(f"Known and not repaired yet, met {times} times: {why}")
    for failed in result.failures:
        _show(failed, result.failed)
    if few:
        print(f"Only {share:.1f} % of the pairs were covered; {min_pairs:g} % are wanted.")
    if result.failures:
        return 1
    short = plan.histories is not None and result.histories < plan.histories
    if result.interrupted and (few or short):
        print("It was interrupted, so less was tried than requested.")
        return INTERRUPTED
    return 1 if few else 0


def _show(played: Played, times: Mapping[str, int]) -> None:
    """Makes a failure shorter, and prints it as the line that replays it."""
    assert played.failure is not None
    print(f"\nFAILED {times[played.failure.check]} times: {played.failure.check}", flush=True)
    shortest = shrink(played)
    assert shortest.failure is not None
    print(f"{shortest.failure.text}\n{replay_line(shortest.seed, shortest.script)}")


if __name__ == "__main__":
    sys.exit(main())
