"""`./do scale`: what a cluster's daemons ask of the API server, as the tables of docs/dev/scale.md.

Two parts. Thousands of nodes against the simulated API server in virtual time; then, where there is a node kit and the
user is root, a real etcd and API server in namespaces of their own, which end with the run. Nothing is judged here: the
counts that must hold are in test_scale.py.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from tests.node.lane import NoProgramsError, install
from tests.node.run import kit_directory
from tests.scale.fleet import GPUS, Served
from tests.scale.tally import Tally
from tests.scale.virtual import SCENARIOS, bring_up, play

RACK: Final = 18
"""Nodes of one NVLink domain of a GB200 NVL72."""

_REAL_S: Final = 600.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="./do scale", description=__doc__)
    parser.add_argument("--nodes", type=int, default=500, help="virtual nodes, up to 10,000")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--domains", type=int, default=278, help=f"ComputeDomains of {RACK} nodes, up to 1,000"
    )
    parser.add_argument(
        "--real", type=int, default=2000, help="nodes of the real API server, up to 10,000; 0: none"
    )
    given = parser.parse_args()
    nodes, domains, real = min(given.nodes, 10_000), min(given.domains, 1000), min(given.real, 10_000)
    for served in (Served(), Served(domains=True)):
        say(
            f"\n{nodes} nodes of {GPUS} GPUs, claims of GPUs{' and of compute domains' if served.domains else ''}\n"
        )
        table(("what happens", "requests a node", "most in a second", "of each", "bytes of watches a node"))
        for name in SCENARIOS:
            began = time.monotonic()
            found = play(nodes, served, name, given.processes)
            row(
                name,
                f"{found.total / nodes:.2f}",
                found.peak,
                of_each(found, nodes),
                found.event_bytes.total() // nodes,
            )
            print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr)
    say(f"\nComputeDomains of {RACK} nodes become ready at the same time, within 30 s\n")
    table(("domains", "requests a node", "of each", "events of watches a node", "bytes a node"))
    for count in (1, domains):
        found = bring_up(count, RACK)
        sent = found.answer_bytes.total() + found.event_bytes.total()
        row(
            count,
            f"{found.total / RACK:.1f}",
            of_each(found, RACK),
            f"{found.events.total() / RACK:.1f}",
            sent // RACK,
        )
    if real and os.geteuid() == 0 and kit_directory() is not None:
        try:
            play_real(real)
        except NoProgramsError as error:
            print(f"./do scale: no real API server was asked: {error}", file=sys.stderr)


def of_each(found: Tally, nodes: int) -> str:
    """The requests by verb and resource, a node."""
    return ", ".join(f"{what} {count / nodes:.3g}" for what, count in sorted(found.asked.items()))


def play_real(nodes: int) -> None:
    """Raises `NoProgramsError`, `ProvisionError` and `subprocess.SubprocessError` where the kit cannot be installed or
    does not start, or the time is up."""
    kit = kit_directory()
    assert kit is not None
    with tempfile.TemporaryDirectory(prefix="gpuactors-scale-") as directory:
        install(kit, Path(directory))
        say(f"\nA real API server, {nodes} nodes\n")
        try:
            subprocess.run(
                (f"{directory}/up.sh", "etcd", "api"), check=True, stdout=sys.stderr, timeout=_REAL_S
            )
            script = '. "$0/env.sh"; exec "$0/in.sh" "$@"'
            counts = (str(nodes), str(min(nodes, 2000)), "100")
            python = (sys.executable, "-m", "tests.scale.real")
            subprocess.run(("bash", "-c", script, directory, *python, *counts), check=True, timeout=_REAL_S)
        finally:
            subprocess.run(
                (f"{directory}/down.sh", "--wipe"), check=False, stdout=sys.stderr, timeout=_REAL_S
            )


def table(heads: Iterable[object]) -> None:
    heads = [*heads]
    row(*heads)
    row(*("---" for _ in heads))


def row(*cells: object) -> None:
    say("| " + " | ".join(str(cell) for cell in cells) + " |")


def say(words: str) -> None:
    print(words, flush=True)


if __name__ == "__main__":
    main()
