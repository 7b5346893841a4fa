"""Start, memory and polling of two installations of gpuactors in one run, in turn.

`python -m tests.bench.beside --before PYTHON`: the interpreter of the other one. What grows with the number of GPUs in
calls and late binds is compared by `growth.py`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from tests.bench import footprint, holders, start_up
from tests.bench.figures import Figure, distribution, reading, run
from tests.bench.node import Node

FUNCTIONS: Final = (8, 4096)
"""PCI functions, eight of them GPUs."""

GPUS: Final = 8
GROUPS: Final = 256
QUIET_S: Final = 5.0


def measure(directory: Path, pythons: Mapping[str, str], starts: int, idle_s: float) -> Iterator[Figure]:
    """Every figure, by party. Raises `DidNotWork`."""
    for functions in FUNCTIONS:
        yield from _starts(directory / f"f{functions}", pythons, functions, starts)
    for name, python in pythons.items():
        for figure in holders.polling(_made(directory / name), (GROUPS,), idle_s, QUIET_S, python=python):
            yield reading(f"{figure.name}.{name}", figure.what, figure.unit, figure.median, figure.detail)


def _starts(directory: Path, pythons: Mapping[str, str], functions: int, starts: int) -> Iterator[Figure]:
    of, frame_ms = f"{functions}_functions", {name: list[float]() for name in pythons}
    with ExitStack() as open_until_then:
        nodes = {
            name: open_until_then.enter_context(
                Node(_made(directory / name), gpus=GPUS, others=functions - GPUS, python=python)
            )
            for name, python in pythons.items()
        }
        for i in range(-1, starts):
            for name, node in nodes.items():
                took = start_up.started(node)
                if i >= 0:  # the first one warms the caches
                    frame_ms[name].append(took.frame_ms)
        for name, samples in frame_ms.items():
            yield distribution(
                f"start.first_frame.{of}.{name}", "spawn to first list received", "ms", samples
            )
        for node in nodes.values():
            known = len(node.kubelet.registrations)
            node.start_daemon()
            node.settle(known)
        time.sleep(QUIET_S)
        for name, node in nodes.items():
            for figure in footprint.memory(node):
                yield reading(f"{figure.name}.{name}", figure.what, figure.unit, figure.median)


def _made(directory: Path) -> Path:
    directory.mkdir(parents=True)
    return directory


def main() -> int:
    """The exit code: 0, or 1 if something did not work."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.beside", description=__doc__.split("\n")[0])
    parser.add_argument("--before", metavar="PYTHON", required=True, help="the other one's interpreter")
    parser.add_argument("--starts", type=int, default=20, help="of each party (default: 20)")
    parser.add_argument("--idle-s", type=float, default=20.0, help="seconds of polling (default: 20)")
    options = parser.parse_args()
    pythons = {"now": sys.executable, "before": options.before}
    return run(lambda directory: measure(directory, pythons, options.starts, options.idle_s))


if __name__ == "__main__":
    sys.exit(main())
