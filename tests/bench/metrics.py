"""What the HTTP endpoints cost: memory, wake-ups while nothing happens, and a scrape, by the number of GPUs.

`python -m tests.bench.metrics`: two daemons on equal nodes at the same time, one without endpoints.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from tests.bench import footprint, procfs
from tests.bench.figures import Figure, distribution, reading, run
from tests.bench.node import Node
from tests.support.http_get import get

GPUS: Final = (4, 32, 256)


def measure(directory: Path, scrapes: int, idle_s: float) -> Iterator[Figure]:
    """`scrapes` of /metrics for each number of GPUs, and `idle_s` without any before them. Raises `DidNotWork`."""
    for count in GPUS:
        with (
            Node(directory / f"off{count}", gpus=count, words=["--http-address=off"]) as without,
            Node(directory / f"on{count}", gpus=count) as node,
        ):
            for one in (without, node):
                one.start_daemon()
                one.settle()
            for name, one in (("off", without), ("on", node)):
                yield from _named(f"{name}.{count}_gpus", footprint.memory(one))
            quiet = footprint.idle([without, node], idle_s) if count == GPUS[0] else []
            half = len(quiet) // 2
            yield from _named("off", quiet[:half])
            yield from _named("on", quiet[half:])
            yield from _scrapes(node, count, scrapes)
            yield from _named(f"scraped.{count}_gpus", footprint.memory(node))


def _named(prefix: str, figures: list[Figure]) -> list[Figure]:
    return [replace(figure, name=f"metrics.{prefix}.{figure.name}") for figure in figures]


def _scrapes(node: Node, count: int, scrapes: int) -> Iterator[Figure]:
    samples, length = [], 0
    before = procfs.activity(node.pid)
    for _ in range(scrapes):
        began_ns = time.perf_counter_ns()
        page = get(node.http, "/metrics")
        samples.append((time.perf_counter_ns() - began_ns) / 1e6)
        assert page.status == 200
        length = len(page.text)
    spent = procfs.activity(node.pid).since(before)
    yield distribution(
        f"metrics.scrape.{count}_gpus", f"a scrape over a unix socket, {length} bytes", "ms", samples
    )
    spent_ms = 1000 * spent.cpu_ticks / os.sysconf("SC_CLK_TCK") / scrapes
    yield reading(
        f"metrics.scrape.{count}_gpus.processor", "the daemon's processor time of one", "ms", spent_ms
    )


def main() -> int:
    """The exit code: 0, or 1 if something did not work."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.metrics", description=__doc__.split("\n")[0])
    parser.add_argument("--scrapes", type=int, default=300, help="of each number of GPUs (default: 300)")
    parser.add_argument("--idle-s", type=float, default=60.0, help="seconds without any (default: 60)")
    options = parser.parse_args()
    return run(lambda directory: measure(directory, options.scrapes, options.idle_s))


if __name__ == "__main__":
    sys.exit(main())
