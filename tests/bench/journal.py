"""What the journal costs: in the registry, in its thread, on the disk, and in a daemon that idles.

The first three are measured in this process on a recorded story; the last with two daemons side by side, one of them
without a journal.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from gpuactors import limits
from gpuactors.core.reports.snapshot import project
from gpuactors.core.step import step
from gpuactors.observe.journal import Anchor, Bounds, FileJournal, JournalFiles, Origin
from gpuactors.ports.node import Step
from tests.bench import procfs
from tests.bench.figures import Figure, distribution, reading
from tests.bench.node import Node
from tests.observe.recording import Held, QuietNode, story

GPUS: Final = 8
BATCH: Final = 16
"""Steps that are written at once: about what a pod's start leads to within JOURNAL_BATCH_S."""
HOUR_S: Final = 3600.0


def costs(directory: Path, steps: int) -> Iterator[Figure]:
    """Microseconds for each step, on a story with pods, external processes, unbinds and idle time."""
    recorded = story(GPUS, steps).steps
    on = f"{GPUS} GPUs, {len(recorded)} steps of a story"
    yield distribution(
        "journal.step", f"the registry's step and projection, to compare; {on}", "us", _steps(recorded)
    )
    yield distribution(
        "journal.record", f"what the journal adds in the registry; {on}", "us", _records(recorded)
    )
    yield distribution(
        "journal.write",
        f"encoding, digest and write in its thread, {BATCH} steps at once, divided by {BATCH}; {on}",
        "us",
        _writes(directory, recorded),
    )


def growth(directory: Path, held: Held) -> Figure:
    """Bytes a day of a node where nothing new happens."""
    node = QuietNode(held, GPUS)
    written = JournalFiles(str(directory), _ORIGIN, Bounds(file_bytes=1 << 40))
    steps = node.journal_of(HOUR_S, written)
    written.close()
    size = sum(path.stat().st_size for path in directory.iterdir())
    return reading(
        f"journal.growth.{held.replace(' ', '_')}",
        f"one simulated hour, {GPUS} GPUs, {held}, times 24",
        "MiB a day",
        24 * size / (1 << 20),
        {
            "steps a day": 24 * steps,
            "bytes a step": round(size / steps, 1),
            "days kept": round(limits.JOURNAL_MAX_BYTES / (24 * size), 1),
        },
    )


def idle(directory: Path, seconds: float, quiet_s: float) -> Iterator[Figure]:
    """Two daemons that idle side by side, one with and one without a journal."""
    with (
        Node(directory / "a", gpus=GPUS) as on,
        Node(directory / "b", gpus=GPUS, words=("--journal=off",)) as off,
    ):
        for node in (on, off):
            node.start_daemon()
            node.settle()
        time.sleep(quiet_s)
        before = [procfs.activity(node.pid) for node in (on, off)]
        time.sleep(seconds)
        spent = [procfs.activity(node.pid).since(was) for node, was in zip((on, off), before, strict=True)]
    tick_ms = 1000 / os.sysconf("SC_CLK_TCK")
    for name, used in zip(("with", "without"), spent, strict=True):
        yield reading(
            f"journal.idle.{name}",
            f"user and system time of a daemon over {seconds:g} idle s, {name} a journal",
            "ms",
            used.cpu_ticks * tick_ms,
            {"wake-ups": sum(used.switches.values())},
        )


_ORIGIN: Final = Origin("bench", "bench", "", 0)
_NOW: Final = Anchor(0.0, 1.8e9)


def _steps(recorded: Sequence[Step]) -> list[float]:
    took_us = []
    for one in recorded:
        began = time.perf_counter_ns()
        state, _ = step(one.before, one.event, one.at)
        project(state)
        took_us.append((time.perf_counter_ns() - began) / 1e3)
    return took_us


def _records(recorded: Sequence[Step]) -> list[float]:
    journal = FileJournal("/nowhere", _ORIGIN, Bounds(waiting_steps=len(recorded)))
    took_us = []
    for one in recorded:
        began = time.perf_counter_ns()
        journal.record(Step(one.before, one.event, one.at, one.effects, one.outputs))
        took_us.append((time.perf_counter_ns() - began) / 1e3)
    return took_us


def _writes(directory: Path, recorded: Sequence[Step]) -> list[float]:
    files = JournalFiles(str(directory / "costs"), _ORIGIN, Bounds())
    took_us = []
    for i in range(0, len(recorded), BATCH):
        batch = recorded[i : i + BATCH]
        began = time.perf_counter_ns()
        files.write(batch, _NOW)
        took_us.append((time.perf_counter_ns() - began) / 1e3 / len(batch))
    files.close()
    return took_us
