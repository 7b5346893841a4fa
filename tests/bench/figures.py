"""Figures: the samples of each row by party, as text, JSON and a table of Markdown.

A row has one party or several that were measured in turn, so that their ratios are of one run. Must not judge: no
figure is too large here, because a benchmark that fails on a busy machine is soon run nowhere.
"""

from __future__ import annotations

import math
import os
import platform
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Final

NOT_ON_THE_PAGE: Final = re.compile(
    r"start\.stop|\.peak|\.threads|unbind|16_callers\.processor|storm\.(taken|lists)|requests|private"
)
"""Rows that are in the JSON and in the text only."""

FORMAT: Final = 2
"""Version of the JSON document; raised when a reader of the last one would misread the next."""


@dataclass(frozen=True, slots=True)
class Spread:
    """What is known of `n` samples. Percentiles are the nearest rank: below 100 samples p99 is the largest."""

    n: int
    median: float
    p25: float
    p75: float
    p99: float
    min: float
    max: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        """Raises `ValueError` if there is no sample."""
        if not samples:
            raise ValueError("nothing was measured")
        ordered = sorted(samples)

        def rank(share: float) -> float:
            return ordered[math.ceil(share * len(ordered)) - 1]

        median = statistics.median(ordered)
        return cls(len(ordered), median, rank(0.25), rank(0.75), rank(0.99), ordered[0], ordered[-1])

    def as_json(self) -> dict[str, float]:
        """The JSON object."""
        return {"n": self.n} | {
            name: round(getattr(self, name), 4) for name in ("median", "p25", "p75", "p99", "min", "max")
        }


@dataclass(slots=True)
class Row:
    """One figure: its samples by party, and what explains them."""

    name: str
    """`start.first_list.8_functions`: stable, for machines; the first part is the part of the run."""
    what: str
    """From where to where, in words."""
    unit: str
    samples: dict[str, list[float]] = field(default_factory=dict)
    detail: dict[str, dict[str, float | str]] = field(default_factory=dict)

    def spreads(self, subjects: Sequence[str]) -> dict[str, Spread]:
        """By party: the daemons in their order, then the floors."""
        order = [party for party in subjects if party in self.samples]
        order += [party for party in self.samples if party not in subjects]
        return {party: Spread.of(self.samples[party]) for party in order}


class Sheet:
    """All rows of a run. `subjects` are the daemons; the first is the one of this checkout. Others are floors."""

    def __init__(self, subjects: Sequence[str]) -> None:
        self.subjects = tuple(subjects)
        self.rows: dict[str, Row] = {}

    def add(
        self,
        name: str,
        what: str,
        unit: str,
        party: str,
        *samples: float,
        detail: Mapping[str, float | str] | None = None,
    ) -> None:
        """Adds samples of one party to a row, which the first call makes."""
        row = self.rows.setdefault(name, Row(name, what, unit))
        row.samples.setdefault(party, []).extend(samples)
        if detail:
            row.detail[party] = dict(detail)

    def document(self, machine: Mapping[str, object]) -> dict[str, Any]:
        """The whole JSON document."""
        return {
            "format": FORMAT,
            "machine": dict(machine),
            "subjects": list(self.subjects),
            "rows": [
                {
                    "name": row.name,
                    "what": row.what,
                    "unit": row.unit,
                    "values": {
                        party: spread.as_json() for party, spread in row.spreads(self.subjects).items()
                    },
                    "ratios": ratios(row.spreads(self.subjects), self.subjects),
                    **({"detail": row.detail} if row.detail else {}),
                }
                for row in self.rows.values()
            ],
        }


def ratios(spreads: Mapping[str, Spread], subjects: Sequence[str]) -> dict[str, float]:
    """The median of each daemon by that of each floor, and that of the first daemon by those of the others."""
    found: dict[str, float] = {}
    here = [party for party in subjects if party in spreads]
    for number, party in enumerate(here):
        others = [o for o in spreads if o not in subjects] + (here[1:] if number == 0 else [])
        for other in others:
            if spreads[other].median:
                found[f"{party} / {other}"] = round(spreads[party].median / spreads[other].median, 3)
    return found


def machine() -> dict[str, object]:
    """Where it is measured. The load tells a reader whether somebody else was at work."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": _cpu(),
        "Linux": platform.release().partition("-")[0],
        "python": platform.python_version(),
        "grpcio": metadata.version("grpcio"),
        "load before": round(os.getloadavg()[0], 2),
    }


def as_text(document: Mapping[str, Any]) -> str:
    """The figures for a reader, part by part."""
    lines = [", ".join(f"{key} {value}" for key, value in document["machine"].items())]
    part = ""
    for row in document["rows"]:
        of = row["name"].partition(".")[0]
        if of != part:
            part = of
            lines += ["", f"== {part}"]
        lines.append(f"{row['what']} ({row['unit']})  [{row['name']}]")
        width = max(map(len, row["values"]))
        for party, value in row["values"].items():
            by = [
                f"{r:.2f} x {k.partition(' / ')[2]}"
                for k, r in row["ratios"].items()
                if k.partition(" / ")[0] == party
            ]
            lines.append(f"    {party:<{width}}  {_numbers(value)}  {', '.join(by)}".rstrip())
            detail = row.get("detail", {}).get(party, {})
            lines += [f"    {'':<{width}}    {key}: {said}" for key, said in detail.items()]
    return "\n".join(lines) + "\n"


def as_markdown(document: Mapping[str, Any]) -> str:
    """The rows of the first daemon for docs/dev/performance.md, a table for each part."""
    subject, *others = document["subjects"]
    columns = ["What", "n", *others, f"**{subject}**", "p99", "Floor", "Times the floor"]
    lines: list[str] = []
    part = ""
    for row in document["rows"]:
        values, of = row["values"], row["name"].partition(".")[0]
        if NOT_ON_THE_PAGE.search(row["name"]):
            continue
        if of != part:
            part = of
            lines += [
                "",
                f"### {of.capitalize()}",
                "",
                f"| {' | '.join(columns)} |",
                f"|{'---|' * len(columns)}",
            ]
        mine, floors = values.get(subject), [party for party in values if party not in document["subjects"]]
        cells = [
            row["what"] + (f", {row['unit']}" if row["unit"] else ""),
            f"{next(iter(values.values()))['n']:,}",
            *(_short(values[other]["median"]) if other in values else "" for other in others),
            f"**{_short(mine['median'])}**" if mine else "",
            _short(mine["p99"]) if mine and mine["n"] > 1 else "",
            "; ".join(f"{_on_the_page(party)} {_short(values[party]['median'])}" for party in floors),
            "; ".join(
                f"{row['ratios'][key]:.2g}" for f in floors if (key := f"{subject} / {f}") in row["ratios"]
            ),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines).strip() + "\n"


def _on_the_page(party: str) -> str:
    return f"`{party}`" if party.startswith(("import ", "python ")) else party


def _numbers(value: Mapping[str, float]) -> str:
    if value["n"] == 1:
        return _short(value["median"])
    return (
        f"{_short(value['median']):>7}  p99 {_short(value['p99'])}  "
        f"quartiles {_short(value['p25'])}..{_short(value['p75'])}  "
        f"{_short(value['min'])}..{_short(value['max'])}  n {value['n']}"
    )


def _short(value: float) -> str:
    """Three digits that count; large numbers whole."""
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}"


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()
