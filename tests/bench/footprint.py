"""What the daemon costs a node while nothing happens: memory, and how often it wakes."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Final

from tests.bench import procfs
from tests.bench.figures import Figure, reading
from tests.bench.node import Node

QUIET_S: Final = 12.0
"""Before idling is measured: trio ends a worker thread that had nothing to do for 10 s (trio/_core/_thread_cache.py),
and that wake-up belongs to the work before."""


def idle(nodes: Sequence[Node], seconds: float, *, quiet_s: float = QUIET_S) -> list[Figure]:
    """Wake-ups and processor time of each daemon over the same `seconds`; nothing is done to any of them."""
    time.sleep(quiet_s)
    before = [procfs.activity(node.pid) for node in nodes]
    time.sleep(seconds)
    after = [procfs.activity(node.pid) for node in nodes]
    figures: list[Figure] = []
    for node, was, now in zip(nodes, before, after, strict=True):
        spent = now.since(was)
        of = f"{node.functions}_functions"
        figures.append(
            reading(
                f"idle.wake_ups.{of}",
                f"context switches over {seconds:g} idle s, default resync interval; threads: {len(now.switches)}",
                "wake-ups",
                sum(spent.switches.values()),
                {f"thread {thread}": count for thread, count in spent.switches.items()},
            )
        )
        ticks_per_s = os.sysconf("SC_CLK_TCK")
        figures.append(
            reading(
                f"idle.processor.{of}",
                f"user and system time over {seconds:g} idle s, in ticks of 1/{ticks_per_s} s",
                "ticks",
                spent.cpu_ticks,
            )
        )
    return figures


def memory(node: Node) -> list[Figure]:
    """Memory of a settled daemon."""
    used = procfs.memory(node.pid)
    on = f"{node.functions} PCI functions, {len(node.gpus)} of them GPUs, threads: {used.threads}"
    parts = {
        "resident": (f"VmRSS; {on}", used.rss_kib),
        "peak": ("VmHWM, the largest VmRSS so far", used.peak_kib),
        "proportional": ("PSS: shared pages divided by their users", used.pss_kib),
        "private": ("pages of its own alone", used.private_kib),
    }
    return [
        reading(f"memory.{part}.{node.functions}_functions", what, "MiB", kib / 1024)
        for part, (what, kib) in parts.items()
    ]
