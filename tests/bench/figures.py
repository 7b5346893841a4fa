"""Figures: what was measured, as values, as text and as JSON; and a whole run that prints them.

A figure is a distribution or a single reading. Must not judge: no figure is too large here, because a benchmark that
fails on a busy machine is soon run nowhere.
"""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Final

from tests.bench.node import DidNotWork

FORMAT: Final = 1
"""Version of the JSON document; raised when a reader of the last one would misread the next."""

Detail = Mapping[str, float | int | str]


@dataclass(frozen=True, slots=True)
class Figure:
    """`n` samples of one thing, or one reading (`n` = 1, all parts equal). `p99` is the nearest rank."""

    name: str
    """`event_to_frame.8_functions`: stable, for machines; dots part the sections."""
    what: str
    """From where to where, in words."""
    unit: str
    n: int
    median: float
    p99: float
    min: float
    max: float
    detail: Detail = field(default_factory=dict)
    """What explains the figure: parts of it, or its parties."""

    def as_json(self) -> dict[str, object]:
        """The JSON object. `p50` is the median under its other name."""
        return {
            "name": self.name,
            "what": self.what,
            "unit": self.unit,
            "n": self.n,
            "median": _rounded(self.median),
            "p50": _rounded(self.median),
            "p99": _rounded(self.p99),
            "min": _rounded(self.min),
            "max": _rounded(self.max),
            **({"detail": dict(self.detail)} if self.detail else {}),
        }


def distribution(
    name: str, what: str, unit: str, samples: Sequence[float], detail: Detail | None = None
) -> Figure:
    """The figure of many samples. Raises `ValueError` if there is none."""
    if not samples:
        raise ValueError(f"{name}: nothing was measured")
    ordered = sorted(samples)
    p99 = ordered[math.ceil(0.99 * len(ordered)) - 1]
    median = statistics.median(ordered)
    return Figure(name, what, unit, len(ordered), median, p99, ordered[0], ordered[-1], detail or {})


def reading(name: str, what: str, unit: str, value: float, detail: Detail | None = None) -> Figure:
    """The figure of a single reading."""
    return Figure(name, what, unit, 1, value, value, value, value, detail or {})


def run(measure: Callable[[Path], Iterable[Figure]], *, as_json: bool = False, quick: bool = False) -> int:
    """Measures in a temporary directory and prints the figures: as text, or as one JSON document on standard output
    (the text then goes to standard error). The exit code: 0, or 1 if something did not work."""
    where, began = machine(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpuactors-bench-") as directory:
        try:
            figures = list(measure(Path(directory)))
        except DidNotWork as error:
            print(f"bench: {error}", file=sys.stderr)
            return 1
    say(f"done in {time.monotonic() - began:.0f} s")
    print(as_text(where, figures), file=sys.stderr if as_json else sys.stdout)
    if as_json:
        print(json.dumps(document(where, figures, quick=quick), indent=2, ensure_ascii=False))
    return 0


def say(text: str) -> None:
    """Progress, for whoever waits."""
    print(f"bench: {text} …", file=sys.stderr, flush=True)


def machine() -> dict[str, object]:
    """Where it was measured. `load_1min` tells a reader whether somebody else was at work."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _cpu(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "grpcio": metadata.version("grpcio"),
        "gpuactors": metadata.version("gpuactors"),
        "load_1min": round(os.getloadavg()[0], 2),
    }


def document(where: Mapping[str, object], figures: Sequence[Figure], *, quick: bool) -> dict[str, object]:
    """The whole JSON document."""
    return {
        "format": FORMAT,
        "quick": quick,
        "machine": dict(where),
        "figures": [figure.as_json() for figure in figures],
    }


def as_text(where: Mapping[str, object], figures: Sequence[Figure]) -> str:
    """The figures as a table, section by section."""
    lines = [", ".join(f"{key} {value}" for key, value in where.items())]
    sections = list(dict.fromkeys(figure.name.partition(".")[0] for figure in figures))
    section = ""
    width = max(len(figure.name.partition(".")[2]) for figure in figures)
    for figure in sorted(figures, key=lambda figure: sections.index(figure.name.partition(".")[0])):
        of, _, rest = figure.name.partition(".")
        if of != section:
            section = of
            lines += ["", section.replace("_", " ")]
        lines.append(f"  {rest.replace('_', ' '):<{width}}  {_numbers(figure)}")
        lines.append(f"  {'':<{width}}    {figure.what}")
        lines += [f"  {'':<{width}}    {key}: {value}" for key, value in figure.detail.items()]
    return "\n".join(lines)


def _numbers(figure: Figure) -> str:
    if figure.n == 1:
        return f"{figure.median:.5g} {figure.unit}"
    return (
        f"median {figure.median:.3f}  p99 {figure.p99:.3f}  min {figure.min:.3f}  max {figure.max:.3f} {figure.unit}"
        f"  (n = {figure.n})"
    )


def _rounded(value: float) -> float:
    # A microsecond in milliseconds: nothing here is known any better.
    return round(value, 3)


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()
