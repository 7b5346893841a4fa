"""Plants each bug of the list in a copy of the program, and expects that CI's budget of histories finds it.

`python -m tests.mutations [NAME…]`: the tests that a bug names, if it does; then every order in small worlds, then the
random histories, as in CI, with the same seed for all. Prints a line for each bug: what found it, after how long. Ends
with 1 if one was not found, or does not fit the program any more. Half an hour on two cores.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.mutations.acts import ACTS
from tests.mutations.dra_plugin import DRA_PLUGIN
from tests.mutations.mutations import MUTATIONS, Mutation

ROOT: Final = Path(__file__).resolve().parents[2]

ORDERS: Final = (sys.executable, "-m", "pytest", "-q", "-x", "tests/core/test_small_worlds.py")
RIGHT: Final = "test_the_figures_are_right_after_every_order"
CLAIMS: Final = (*ORDERS[:-1], "tests/core/dra/test_claim_small_worlds.py", "-k", "after_every_order")
"""Of claims, for a bug in their part of the core."""

FEW: Final = "3"
MANY: Final = "5"
"""Events in an order: a quick run first, and what CI does last."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one bug fared."""

    found_by: str
    """Empty if nothing did."""
    took_s: float
    line: str
    """The failure in its own words."""


def main() -> int:
    """Tries the bugs; answers the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="a part of a bug's name; all of them otherwise"
    )
    parser.add_argument("--histories", type=int, default=3000, help="CI's budget (default: 3000)")
    parser.add_argument("--seed", default="commit", help="as for `just fuzz` (default: commit)")
    options = parser.parse_args()
    chosen = [
        m
        for m in (*MUTATIONS, *ACTS, *DRA_PLUGIN)
        if not options.names or any(n in m.name for n in options.names)
    ]
    missed = 0
    for mutation in chosen:
        outcome = tried(mutation, histories=options.histories, seed=options.seed)
        missed += not outcome.found_by
        print(f"{outcome.found_by or 'NOT FOUND':<16} {outcome.took_s:5.0f} s  {mutation.name}", flush=True)
        if outcome.line:
            print(f"{'':26}{outcome.line}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} bugs were found.")
    return 1 if missed else 0


def tried(mutation: Mutation, *, histories: int, seed: str) -> Outcome:
    """Plants one bug in a copy and runs what CI runs, until something is red."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutation-") as name:
        copy = Path(name)
        for part in ("src", "tests", "protos", "pyproject.toml"):
            source = ROOT / part
            if source.is_dir():
                shutil.copytree(source, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, copy / part)
        problem = planted(mutation, copy)
        if problem is not None:
            return Outcome("", 0.0, problem)
        campaign = (
            sys.executable,
            *("-m", "gpuactors.simulation.histories", "--histories", str(histories), "--seed", seed_of(seed)),
        )
        named = (sys.executable, "-m", "pytest", "-q", "-x", *mutation.tests)
        for what, command, length in (
            *((("named tests", named, FEW),) if mutation.tests else ()),
            *((("claims' worlds", CLAIMS, FEW),) if mutation.file.startswith("core/dra/") else ()),
            ("small worlds", (*ORDERS, "-k", RIGHT), FEW),
            ("histories", campaign, FEW),
            ("small worlds", (*ORDERS, "-k", RIGHT), MANY),
        ):
            line = failure(command, copy, length)
            if line is not None:
                return Outcome(what, time.monotonic() - began, line)
    return Outcome("", time.monotonic() - began, "")


def planted(mutation: Mutation, copy: Path) -> str | None:
    """Changes the copy; says what is wrong if the list does not fit the program any more."""
    path = copy / "src" / "gpuactors" / mutation.file
    text = path.read_text(encoding="utf-8")
    if text.count(mutation.before) != 1:
        return f"{mutation.file} has {text.count(mutation.before)} places like it: write this bug anew"
    path.write_text(text.replace(mutation.before, mutation.after), encoding="utf-8")
    broken = failure((sys.executable, "-c", "import gpuactors.app"), copy, FEW)
    return f"the program cannot even be imported with it: {broken}" if broken is not None else None


def seed_of(wanted: str) -> str:
    """A copy knows no commit."""
    if wanted != "commit":
        return wanted
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    return str(int(found.stdout[:8], 16))


def failure(command: tuple[str, ...], copy: Path, length: str) -> str | None:
    """The line that says what failed; None if nothing did."""
    env = {**os.environ, "PYTHONPATH": f"{copy / 'src'}{os.pathsep}{copy}", "SMALL_WORLDS_LENGTH": length}
    done = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    telling = [line for line in lines if line.startswith(("FAILED", "E  "))]
    return (telling or lines or ["no word"])[0].strip()[:200]


if __name__ == "__main__":
    sys.exit(main())
