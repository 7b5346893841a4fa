"""Resident memory: idle, after load, and after many events. Floor: the bare plugin."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Final

from tests.bench import procfs
from tests.bench.call import plugin_of
from tests.bench.context import Bench
from tests.bench.event import flood
from tests.bench.node import Node

CALLS: Final = 300
AT_ONCE: Final = 10_000
"""Events that are made before the first of them is sent."""


def measure(bench: Bench) -> None:
    """Raises `DidNotWork`."""
    with ExitStack() as stack:
        by_size = {gpus: stack.enter_context(bench.nodes(gpus)) for gpus in bench.counts.gpus}
        time.sleep(bench.counts.quiet_s)
        for nodes in by_size.values():
            for node in nodes.values():
                _add(bench, node, "idle", "idle")
                with plugin_of(node) as plugin:
                    for i in range(CALLS):
                        plugin.allocate(1 + i % 8, i)
                _add(bench, node, "loaded", f"after {CALLS} Allocates of 1 to 8")
        for node in by_size[bench.counts.gpus[0]].values():
            for first in range(0, bench.counts.memory_events, AT_ONCE):
                flood(node, min(AT_ONCE, bench.counts.memory_events - first))
        time.sleep(bench.counts.quiet_s / 4)
        for node in by_size[bench.counts.gpus[0]].values():
            _add(bench, node, "events", f"after {bench.counts.memory_events:,} events")


def _add(bench: Bench, node: Node, name: str, when: str) -> None:
    memory, gpus = procfs.memory(node.pid), len(node.gpus)
    for row, what, kib in (
        ("resident", "resident memory", memory.rss_kib),
        ("private", "memory that would be free without it", memory.private_kib),
        ("peak", "the most resident memory so far", memory.peak_kib),
    ):
        bench.sheet.add(
            f"memory.{name}.{row}.{gpus}_gpus",
            f"{what} {when}, {gpus} GPUs",
            "MiB",
            node.party.name,
            kib / 1024,
        )
