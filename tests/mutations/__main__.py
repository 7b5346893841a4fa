"""Plants each bug of the lists in a copy of the program, and expects that its test finds it, or CI's budget of orders
and histories.

`python -m tests.mutations [NAME…]`: a bug that names a test is tried with that one, in some seconds. For any other one:
every order in small worlds, then the random histories, as in CI, with the same seed for all. Prints a line for each
bug: what found it, after how long. Ends with 1 if one was not found, or does not fit the program any more. Half an hour
on two cores. A bug is found by a test that fails, not by a run of tests that does not begin or does not end.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.mutations.bounds import BOUNDS
from tests.mutations.dead import DEAD
from tests.mutations.domains import DOMAINS
from tests.mutations.drift import DRIFT
from tests.mutations.groups import GROUPS
from tests.mutations.host import HOST
from tests.mutations.mutations import MUTATIONS, Mutation
from tests.mutations.others import OTHERS
from tests.mutations.partitions import PARTITIONS
from tests.mutations.parts import PARTS
from tests.mutations.pending import PENDING
from tests.mutations.reload import RELOAD
from tests.mutations.sets import SETS
from tests.mutations.specs import SPECS

ROOT: Final = Path(__file__).resolve().parents[2]

ALL: Final = (
    *MUTATIONS,
    *BOUNDS,
    *HOST,
    *GROUPS,
    *OTHERS,
    *DOMAINS,
    *DRIFT,
    *PENDING,
    *PARTS,
    *RELOAD,
    *SETS,
    *PARTITIONS,
    *SPECS,
    *DEAD,
)

ORDERS: Final = (sys.executable, "-m", "pytest", "-q", "-x", "tests/core/test_small_worlds.py")
RIGHT: Final = "test_the_figures_are_right_after_every_order"
FEW: Final = "3"
MANY: Final = "5"
"""Events in an order: a quick run first, and what CI does last."""

COPIED: Final = ("src", "tests", "protos", "pyproject.toml")
"""What the program and its small worlds and histories are made of."""

RED: Final = 1
"""The exit code of pytest and of the histories if something failed. Any other one is no verdict: nothing was collected,
a file of tests could not be imported, it was interrupted."""


TEST_S: Final = 120.0
"""One named test takes seconds: one that does not end finds nothing."""


class RunnerError(Exception):
    """This runner cannot say whether a bug is found; the text says why, and what to look at."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one bug fared."""

    found_by: str
    """Empty if nothing did."""
    took_s: float
    line: str
    """The failure in its own words."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Tries the bugs; answers the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="a part of a bug's name; all of them otherwise"
    )
    parser.add_argument("--histories", type=int, default=3000, help="CI's budget (default: 3000)")
    parser.add_argument("--seed", default="commit", help="as for `just fuzz` (default: commit)")
    options = parser.parse_args(arguments)
    chosen = [m for m in ALL if not options.names or any(n in m.name for n in options.names)]
    return tried_all(chosen, ROOT, searches(options.histories, seed_of(options.seed)))


Search = tuple[str, tuple[str, ...], str]
"""What may find a bug: its name, the command, the length of orders."""


def tried_all(chosen: Sequence[Mutation], root: Path, searched: Sequence[Search]) -> int:
    """Tries these bugs in copies of the tree at `root`; returns 1 if one was not found."""
    missed = 0
    with tempfile.TemporaryDirectory(prefix="mutations-") as name:
        sound = Path(name) / "sound"
        copied(root, sound)
        for number, mutation in enumerate(chosen):
            outcome = tried(mutation, sound, Path(name) / str(number), searched)
            missed += not outcome.found_by
            print(
                f"{outcome.found_by or 'NOT FOUND':<16} {outcome.took_s:5.0f} s  {mutation.name}", flush=True
            )
            if outcome.line:
                print(f"{'':26}{outcome.line}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} bugs were found.")
    return 1 if missed else 0


def copied(root: Path, to: Path) -> None:
    """The parts of the tree that the runs need."""
    to.mkdir()
    for part in COPIED:
        source = root / part
        if source.is_dir():
            shutil.copytree(source, to / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, to / part)


def searches(histories: int, seed: str) -> tuple[Search, ...]:
    """What is run for each bug, the quicker ones first."""
    campaign = (sys.executable, "-m", "tests.histories", "--histories", str(histories), "--seed", seed)
    return (
        ("small worlds", (*ORDERS, "-k", RIGHT), FEW),
        ("histories", campaign, FEW),
        ("small worlds", (*ORDERS, "-k", RIGHT), MANY),
    )


def tried(mutation: Mutation, sound: Path, copy: Path, searched: Iterable[Search]) -> Outcome:
    """Plants one bug in a copy and runs these searches, until something is red."""
    began = time.monotonic()
    shutil.copytree(sound, copy)
    try:
        problem = planted(mutation, copy)
        if problem is not None:
            return Outcome("", 0.0, problem)
        for what, command, length in (_by_name(mutation),) if mutation.test else searched:
            line = failure(command, copy, length)
            if line is not None:
                return Outcome(what, time.monotonic() - began, line)
    except RunnerError as error:
        return Outcome("", time.monotonic() - began, f"NO VERDICT: {error}")
    finally:
        shutil.rmtree(copy)
    return Outcome("", time.monotonic() - began, "")


def _by_name(mutation: Mutation) -> Search:
    return "its test", (sys.executable, "-m", "pytest", "-q", "-x", mutation.test), FEW


def planted(mutation: Mutation, copy: Path) -> str | None:
    """Changes the copy; says what is wrong if the list does not fit the program any more."""
    path = copy / "src" / "gpuactors" / mutation.file
    text = path.read_text(encoding="utf-8")
    if text.count(mutation.before) != 1:
        return f"{mutation.file} has {text.count(mutation.before)} places like it: write this bug anew"
    path.write_text(text.replace(mutation.before, mutation.after), encoding="utf-8")
    imported = run((sys.executable, "-c", "import gpuactors.daemon.app"), copy, FEW)
    return (
        f"the program cannot even be imported with it: {said(imported)[-1]}" if imported.returncode else None
    )


def seed_of(wanted: str) -> str:
    """A copy knows no commit."""
    if wanted != "commit":
        return wanted
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    return str(int(found.stdout[:8], 16))


def run(command: tuple[str, ...], copy: Path, length: str) -> subprocess.CompletedProcess[str]:
    """A command in a copy, with the copy's program."""
    env = {**os.environ, "PYTHONPATH": f"{copy / 'src'}{os.pathsep}{copy}", "SMALL_WORLDS_LENGTH": length}
    is_one_test = "::" in command[-1]
    try:
        return subprocess.run(
            command,
            cwd=copy,
            env=env,
            capture_output=True,
            text=True,
            check=False,
            timeout=TEST_S if is_one_test else None,
        )
    except subprocess.TimeoutExpired as expired:
        raise RunnerError(f"{shlex.join(command)} did not end within {expired.timeout:g} s") from expired


def said(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The lines of its output."""
    return [line for line in (done.stdout + done.stderr).splitlines() if line.strip()] or ["no word"]


def failure(command: tuple[str, ...], copy: Path, length: str) -> str | None:
    """The line that says what failed; None if nothing did. Raises `RunnerError` where there is no verdict."""
    done = run(command, copy, length)
    if done.returncode == 0:
        return None
    lines = said(done)
    if done.returncode != RED:
        raise RunnerError(
            f"{shlex.join(command)} ended with {done.returncode}, so nothing was tried: {lines[-1].strip()[:200]}"
        )
    for telling in ("FAILED", "E  "):
        if found := [line for line in lines if line.startswith(telling)]:
            return found[0].strip()[:200]
    return lines[0].strip()[:200]


if __name__ == "__main__":
    sys.exit(main())
