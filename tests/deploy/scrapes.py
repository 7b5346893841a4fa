"""A daemon's metrics as Prometheus stores them: each series by its name and its labels, with those of the target."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

from gpuactors.core.state import NodeState
from gpuactors.observe.counts import Counts
from gpuactors.observe.metrics import Metrics

SCRAPED: Final = {"node": "n1", "container": "gpuactors"}
"""What Prometheus adds, by the PodMonitor."""

_SUFFIXES: Final = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}


def scrape(metrics: Metrics, of: NodeState, at: float = 0.0) -> Mapping[str, float]:
    """The series with their values. A label without a value is none to Prometheus."""
    found: dict[str, float] = {}
    for line in metrics.page(of, at, 0).decode().splitlines():
        if not line.startswith("#"):
            series, _, value = line.rpartition(" ")
            name, _, labels = series.partition("{")
            found[text(name, dict(re.findall(r'(\w+)="([^"]+)"', labels)))] = float(value)
    return found


def text(name: str, labels: Mapping[str, str]) -> str:
    """A series as promtool reads it."""
    listed = ",".join(f'{label}="{value}"' for label, value in sorted({**labels, **SCRAPED}.items()))
    return f"{name}{{{listed}}}"


def series(name: str, **labels: str) -> str:
    """A series that a daemon may have: of a metric that it declares, with each of its labels."""
    declared = DECLARED[name]
    assert labels.keys() == declared, f"{name} has the labels {sorted(declared)}"
    return text(name, labels)


def _declared() -> Iterator[tuple[str, frozenset[str]]]:
    for family, labels in Metrics("", Counts(), process=False).families():
        for suffix in _SUFFIXES.get(family.type, ("",)):
            yield family.name + suffix, frozenset({*labels, *(("le",) if suffix == "_bucket" else ())})


DECLARED: Final = dict(_declared())
"""The labels of each metric that a daemon declares, by the name of its series."""
