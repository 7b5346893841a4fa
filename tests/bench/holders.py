"""External holders: how soon kubelet's list shows that a process opened or closed a GPU, and what the polls cost.

Both times are bounded by the periods at which the daemon polls (limits.py), because nothing in Linux announces an open
or a close of a vfio group: the median is about half a period, and the round's start is drawn at random so that it is.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from gpuactors import limits
from tests.bench import procfs
from tests.bench.figures import Figure, distribution, reading
from tests.bench.node import Node

HOLDER_PID: Final = 1717


def holders(directory: Path, rounds: int) -> list[Figure]:
    """An external process opens a free GPU and closes it, one GPU after the other."""
    take_ms: list[float] = []
    release_ms: list[float] = []
    rng = random.Random(0)
    with Node(directory, gpus=8) as node:
        node.start_daemon()
        node.settle()
        for i in range(rounds):
            address = node.gpus[i % len(node.gpus)]
            time.sleep(rng.uniform(0, limits.POLL_S))
            seen = node.frames_so_far()
            began_ns = time.monotonic_ns()
            node.tree.open_group(i % len(node.gpus), HOLDER_PID, "python3")
            take_ms.append((node.frame_unhealthy(address, after=seen).at_ns - began_ns) / 1e6)
            time.sleep(rng.uniform(0, limits.POLL_FAST_S))
            seen = node.frames_so_far()
            began_ns = time.monotonic_ns()
            node.tree.kill(HOLDER_PID)
            release_ms.append((node.frame_with(address, after=seen).at_ns - began_ns) / 1e6)
    return [
        distribution(
            "holders.take",
            f"an external process opens a free GPU, to the frame with it Unhealthy; polled every {limits.POLL_S:g} s",
            "ms",
            take_ms,
        ),
        distribution(
            "holders.release",
            "that process ends, to the frame with the GPU Healthy; polled every "
            f"{limits.POLL_FAST_S:g} s while an external process holds a GPU",
            "ms",
            release_ms,
        ),
    ]


def polling(
    directory: Path, groups: Sequence[int], seconds: float, quiet_s: float, *, python: str = sys.executable
) -> list[Figure]:
    """What the polls of a node with so many free GPUs cost, each in a group of its own; nothing happens to it."""
    return [f for count in groups for f in _polling(directory / f"p{count}", count, seconds, quiet_s, python)]


def _polling(directory: Path, groups: int, seconds: float, quiet_s: float, python: str) -> list[Figure]:
    directory.mkdir()
    with Node(directory, gpus=groups, python=python) as node:
        node.start_daemon()
        node.settle()
        time.sleep(quiet_s)
        before, began = procfs.activity(node.pid), time.monotonic()
        time.sleep(seconds)
        spent, took_s = procfs.activity(node.pid).since(before), time.monotonic() - began
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    return [
        reading(
            f"holders.polling.{groups}_groups",
            f"user and system time a minute, of {took_s:.0f} s with --holders passive, a poll every "
            f"{limits.POLL_S:g} s; known to {60 / took_s / ticks_per_s:.2g} s",
            "CPU s/min",
            round(spent.cpu_ticks / ticks_per_s * 60 / took_s, 3),
            {"wake-ups a minute, all threads": round(sum(spent.switches.values()) * 60 / took_s)},
        )
    ]
