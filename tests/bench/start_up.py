"""From the spawn of the process to kubelet's first frame, and where the time goes.

Every start is a new process; the page cache is warm and the byte code compiled, as after the first start on a node.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Final

from tests.bench.figures import Figure, distribution
from tests.bench.node import Node

IMPORTS: Final = "import gpuactors.cli.commands, gpuactors.daemon.app"
LEAVE: Final = "import os; os._exit(0)"
SHOWN: Final = 12
"""Packages that are shown by name; the rest is one sum."""


@dataclass(frozen=True, slots=True)
class Started:
    """How long one start and stop took, from the spawn and from SIGTERM."""

    register_ms: float
    frame_ms: float
    stop_ms: float


def started(node: Node) -> Started:
    """Starts and stops the daemon on a node that has none."""
    known = len(node.kubelet.registrations)
    began_ns = node.start_daemon()
    registration, frame = node.settle(known)
    took_s = node.stop_daemon()
    return Started((registration.received_ns - began_ns) / 1e6, (frame.at_ns - began_ns) / 1e6, took_s * 1e3)


def measure(node: Node, starts: int) -> list[Figure]:
    """Starts and stops the daemon `starts` times on a node that has none; none runs afterwards."""
    register_ms: list[float] = []
    frame_ms: list[float] = []
    stop_ms: list[float] = []
    for i in range(-1, starts):
        took = started(node)
        if i < 0:  # the first one warms the caches
            continue
        register_ms.append(took.register_ms)
        frame_ms.append(took.frame_ms)
        stop_ms.append(took.stop_ms)
    of = f"{node.functions}_functions"
    on = f"{node.functions} PCI functions, warm page cache"
    return [
        distribution(f"start.first_frame.{of}", f"spawn to first frame received; {on}", "ms", frame_ms),
        distribution(f"start.register.{of}", f"spawn to Register received; {on}", "ms", register_ms),
        distribution(f"start.stop.{of}", "SIGTERM to the end of the process", "ms", stop_ms),
    ]


def imports(runs: int) -> list[Figure]:
    """What of a start is the interpreter and the import of the daemon's modules, with the shares of the packages."""
    bare_ms: list[float] = []
    import_ms: list[float] = []
    for i in range(-1, runs):
        bare, full = _python("pass"), _python(IMPORTS)
        if i >= 0:
            bare_ms.append(bare)
            import_ms.append(full)
    return [
        distribution("start.interpreter", "spawn to the first line of code", "ms", bare_ms),
        distribution(
            "start.interpreter_and_imports",
            f"spawn to the end of `{IMPORTS}`; parts: ms in the packages' own modules, by -X importtime (slower)",
            "ms",
            import_ms,
            _shares(max(1, runs // 3)),
        ),
    ]


def _python(code: str) -> float:
    """Milliseconds from the spawn to the end of `code`: tearing the interpreter down is no part of a start."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", f"{code}\n{LEAVE}"], check=True, stdin=subprocess.DEVNULL)
    return (time.perf_counter() - began) * 1e3


def _shares(runs: int) -> dict[str, float | int | str]:
    """Milliseconds by top-level package, the median of `runs`; the standard library is one of them."""
    samples: defaultdict[str, list[float]] = defaultdict(list)
    for _ in range(runs):
        for package, us in _import_times().items():
            samples[package].append(us / 1e3)
    medians = {package: statistics.median(times) for package, times in samples.items()}
    largest = sorted(medians, key=lambda package: -medians[package])
    shares: dict[str, float | int | str] = {
        package: round(medians[package], 1) for package in largest[:SHOWN]
    }
    shares["others"] = round(sum(medians[package] for package in largest[SHOWN:]), 1)
    return shares


def _import_times() -> dict[str, int]:
    """Microseconds in the modules themselves, by top-level package."""
    run = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", IMPORTS],
        check=True,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    sums: defaultdict[str, int] = defaultdict(int)
    for line in run.stderr.splitlines():
        parts = line.removeprefix("import time:").split("|")
        if len(parts) == 3 and parts[0].strip().isdigit():
            package = parts[2].strip().partition(".")[0]
            is_standard = package.lstrip("_") in sys.stdlib_module_names or package in sys.stdlib_module_names
            sums["standard library" if is_standard else package] += int(parts[0])
    return sums
