"""Plants each bug of the list in a copy of the program, and expects that CI's budget of histories finds it.

`python -m tests.mutations [NAME…]`: the tests that a bug names, if it does; then every order in small worlds, then the
random histories, as in CI, with the same seed for all. Prints a line for each bug: what found it, after how long. Ends
with 1 if one was not found, or does not fit the program any more. Half an hour on two cores.

First all tests that bugs name are run in a copy without a bug. One that fails there says nothing about any bug: the run
ends with 2 before the first. And a bug is found by a test that fails, not by a run of tests that does not begin.
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

from tests.mutations.acts import ACTS
from tests.mutations.bindings import BINDINGS
from tests.mutations.doctor import DOCTOR
from tests.mutations.domain_edges import DOMAIN_EDGES
from tests.mutations.domain_views import DOMAIN_VIEWS
from tests.mutations.domains import DOMAINS
from tests.mutations.dra_core import DRA_CORE
from tests.mutations.dra_plugin import DRA_PLUGIN
from tests.mutations.edges import EDGES
from tests.mutations.events import EVENTS
from tests.mutations.failures import FAILURES
from tests.mutations.mutations import MUTATIONS, Mutation
from tests.mutations.takeover import TAKEOVER

ROOT: Final = Path(__file__).resolve().parents[2]

ORDERS: Final = (sys.executable, "-m", "pytest", "-q", "-x", "tests/core/test_small_worlds.py")
RIGHT: Final = "test_the_figures_are_right_after_every_order"
CLAIMS: Final = {
    "core/claims/": "tests/core/gpus/test_claim_small_worlds.py",
    "core/gpus/": "tests/core/gpus/test_claim_small_worlds.py",
    "core/domains/": "tests/core/domains/test_domain_small_worlds.py",
}
"""The small worlds of claims, for a bug in that part of the core."""

FEW: Final = "3"
MANY: Final = "5"
"""Events in an order: a quick run first, and what CI does last."""

ALL: Final = (
    *MUTATIONS,
    *ACTS,
    *BINDINGS,
    *DOCTOR,
    *DOMAIN_EDGES,
    *DOMAIN_VIEWS,
    *DOMAINS,
    *DRA_CORE,
    *DRA_PLUGIN,
    *EDGES,
    *TAKEOVER,
    *EVENTS,
    *FAILURES,
)

COPIED: Final = ("src", "tests", "protos", "pyproject.toml")
"""What the program and the tests that bugs name are made of. A test that reads more of the tree fails in the copy."""

RED: Final = 1
"""The exit code of pytest and of the histories if something failed. Any other one is no verdict: nothing was collected,
a file of tests could not be imported, it was interrupted."""


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
    parser.add_argument(
        "--named", action="store_true", help="bugs that name tests only, and these tests only"
    )
    options = parser.parse_args(arguments)
    chosen = [
        m
        for m in ALL
        if (not options.names or any(n in m.name for n in options.names)) and (m.tests or not options.named)
    ]
    try:
        return tried_all(
            chosen, ROOT, histories=options.histories, seed=seed_of(options.seed), named_only=options.named
        )
    except RunnerError as error:
        print(error, file=sys.stderr)
        return 2


def tried_all(
    chosen: Sequence[Mutation], root: Path, *, histories: int, seed: str, named_only: bool = False
) -> int:
    """Tries these bugs in copies of the tree at `root`; answers 1 if one was not found. Raises `RunnerError`."""
    missed = 0
    with tempfile.TemporaryDirectory(prefix="mutations-") as name:
        sound = Path(name) / "sound"
        copied(root, sound)
        prove(sound, chosen)
        for number, mutation in enumerate(chosen):
            commands = () if named_only else unnamed(mutation, histories=histories, seed=seed)
            outcome = tried(mutation, sound, Path(name) / str(number), commands)
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


def prove(sound: Path, chosen: Iterable[Mutation]) -> None:
    """Runs every named test once where no bug is planted. Raises `RunnerError` if one fails there, or is not there."""
    named = tuple(dict.fromkeys(test for mutation in chosen for test in mutation.tests))
    if not named:
        return
    began = time.monotonic()
    done = run((sys.executable, "-m", "pytest", "-q", "-rfE", *named), sound, FEW)
    if done.returncode:
        telling = [line for line in said(done) if line.startswith(("FAILED", "ERROR"))] or said(done)[-20:]
        raise RunnerError(
            "Named tests fail, or are not there, in a copy of the tree without any bug, so they cannot show one. "
            f"The copy has {', '.join(COPIED)} only. Mend these first:\n  " + "\n  ".join(telling)
        )
    print(f"{len(named)} named tests pass without a bug ({time.monotonic() - began:.0f} s).", flush=True)


def unnamed(mutation: Mutation, *, histories: int, seed: str) -> tuple[tuple[str, tuple[str, ...], str], ...]:
    """What is run after the named tests: its name, the command, the length of orders."""
    campaign = (
        sys.executable,
        *("-m", "tests.histories", "--histories", str(histories), "--seed", seed),
    )
    claims = (
        ("claims' worlds", (*ORDERS[:-1], worlds, "-k", "after_every_order"), FEW)
        for part, worlds in CLAIMS.items()
        if mutation.file.startswith(part)
    )
    return (
        *claims,
        ("small worlds", (*ORDERS, "-k", RIGHT), FEW),
        ("histories", campaign, FEW),
        ("small worlds", (*ORDERS, "-k", RIGHT), MANY),
    )


def tried(
    mutation: Mutation, sound: Path, copy: Path, commands: Iterable[tuple[str, tuple[str, ...], str]]
) -> Outcome:
    """Plants one bug in a copy and runs the tests that it names and these commands, until something is red."""
    began = time.monotonic()
    # With the compiled files of the run without a bug: the one that is changed is newer than its own.
    shutil.copytree(sound, copy)
    try:
        problem = planted(mutation, copy)
        if problem is not None:
            return Outcome("", 0.0, problem)
        named = (sys.executable, "-m", "pytest", "-q", "-x", *mutation.tests)
        for what, command, length in (*((("named tests", named, FEW),) if mutation.tests else ()), *commands):
            line = failure(command, copy, length)
            if line is not None:
                return Outcome(what, time.monotonic() - began, line)
    except RunnerError as error:
        return Outcome("", time.monotonic() - began, f"NO VERDICT: {error}")
    finally:
        shutil.rmtree(copy)
    return Outcome("", time.monotonic() - began, "")


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
    return subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True, check=False)


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
