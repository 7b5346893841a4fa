"""What was seen: the tables of `docs/dev/virtual-machine.md`, from the `result.json` of each scenario's last run
on each kernel. Must not judge: a verdict and its reason are what the run left.

A new scenario is a new row by itself, with the first sentence of its docstring; its figures are in the long table by
their names, and in the short one where a pattern of HIGHLIGHTS meets them.
"""

from __future__ import annotations

import argparse
import inspect
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

from tests.support.markdown import put_into, table
from tests.vm.boot import logs_dir
from tests.vm.kernels import KERNELS
from tests.vm.machine import Machine
from tests.vm.matrix import Cell, machines, scenario_module
from tests.vm.provision import CHECKOUT
from tests.vm.results import NOT_RUN, PASSED, Result, load

DOCUMENT: Final = CHECKOUT / "docs" / "dev" / "virtual-machine.md"

BEGIN: Final = "<!-- written by `just vm-table` from here -->"

HIGHLIGHTS: Final[Mapping[str, tuple[str, ...]]] = {
    "Bind to frame, median of 30, ms": ("binding.rebind_to_frame_p50_ms",),
    "Bind to frame, largest of 30 (p99), ms": ("binding.rebind_to_frame_max_ms",),
    "Unbind to frame, median of 30, ms": ("binding.unbind_to_frame_p50_ms",),
    "Unbind to frame, largest of 30 (p99), ms": ("binding.unbind_to_frame_max_ms",),
    "Another process opens a device, to the frame, ms": (
        "*device_open_to_unhealthy_ms",
        "*cdev_bound_to_unhealthy_ms",
    ),
    "A holder closes it, to the frame, ms": (
        "*close_to_healthy_ms",
        "*sigkill_to_healthy_ms",
        "*release_to_frame_ms",
    ),
    "Storm of uevents, until kubelet's lists are right, ms": ("storm.*settled_ms",),
    "Opens of a group beside the daemon": ("*.opens",),
    "of them EBUSY": ("*.opens_ebusy", "opens.ebusy"),
    "Prepare of a claim: a GPU and its companion are bound, median and largest of 10, ms": (
        "claims_rounds.prepare_of_two_functions_*_ms",
    ),
    "Prepare of a claim: a GPU alone is bound, median and largest of 10, ms": (
        "claims_rounds.prepare_of_one_function_*_ms",
    ),
    "Prepare of a claim: the GPU is pre-bound, median and largest of 10, ms": (
        "claims_rounds.prepare_of_a_prebound_*_ms",
    ),
    "QEMU is killed, until its GPU and companion are returned, median and largest of 3, ms": (
        "claims_rounds.kill_to_returned_*_ms",
    ),
    "GetInfo while an unbind hangs, median and largest, ms": (
        "claims_unbind_hangs.unbind_hangs_get_info_*_ms",
    ),
}
"""What is shown first, by patterns of `scenario.figure`. Where several figures meet one, the least and the largest
are shown."""

LIST_MAX: Final = 8
"""Items of a figure that is a list; a longer one is a record, to be read in `result.json`."""

WHY_MAX: Final = 160
"""Characters of a reason. The whole of it is in `result.json`."""

NOTHING: Final = "–"


@dataclass(frozen=True, slots=True)
class Row:
    """A scenario: its name without `scenario_`, what it shows, its machine, and its results by kernel."""

    name: str
    shows: str
    machine: Machine
    results: Mapping[str, Result]


def first_sentence(docstring: str) -> str:
    """What a scenario shows, in one sentence, whichever way its lines are broken."""
    paragraph = " ".join(inspect.cleandoc(docstring).split("\n\n")[0].split())
    found = re.match(r".+?[.](?=\s|$)", paragraph)
    return found[0] if found else paragraph


def render(rows: Sequence[Row]) -> str:
    """The tables, as Markdown."""
    return "\n".join([*_header(rows), "", *_verdicts(rows), "", *_highlights(rows), "", *_all_figures(rows)])


def unmatched(rows: Sequence[Row]) -> list[str]:
    """Those of HIGHLIGHTS that no figure of any run meets: a figure was renamed, or its scenario has not run."""
    figures = [figure for row in rows for figure in _figure_names(row)]
    return [
        label
        for label, patterns in HIGHLIGHTS.items()
        if not any(fnmatch(figure, pattern) for figure in figures for pattern in patterns)
    ]


def _header(rows: Sequence[Row]) -> list[str]:
    results = [result for row in rows for result in row.results.values() if result.outcome != NOT_RUN]
    days = sorted({result.at for result in results if result.at})
    versions = sorted({result.qemu for result in results if result.qemu})
    when = " to ".join(dict.fromkeys((days[0], days[-1]))) if days else "never"
    return [
        f"Run {when}, QEMU {' and '.join(versions) or NOTHING} in software emulation on {os.cpu_count()} cores. "
        "The time is that of the scenario, without the boot."
    ]


def _verdicts(rows: Sequence[Row]) -> list[str]:
    heads = [f"{kernel}{_releases(rows, kernel)}" for kernel in KERNELS]
    lines = [[f"`{row.name}`", row.shows, *(_verdict(row, kernel) for kernel in KERNELS)] for row in rows]
    return table(["Scenario", "What it shows", *heads], lines)


def _releases(rows: Sequence[Row], kernel: str) -> str:
    found = {row.results[kernel].release for row in rows if kernel in row.results} - {None}
    return f" ({', '.join(sorted(str(release) for release in found))})" if found else ""


def _verdict(row: Row, kernel: str) -> str:
    if lacks := row.machine.lacks(kernel):
        return f"{NOTHING} (has no {', '.join(sorted(lacks))})"
    result = row.results.get(kernel)
    if result is None:
        return NOT_RUN
    took = f", {result.scenario_s:.0f} s" if result.scenario_s is not None else ""
    outcome = result.outcome if result.outcome in (PASSED, NOT_RUN) else f"**{result.outcome}**"
    return f"{outcome}{took}{f': {_short(result.why)}' if result.why else ''}"


def _highlights(rows: Sequence[Row]) -> list[str]:
    lines = []
    for label, patterns in HIGHLIGHTS.items():
        cells = [_range(_meeting(rows, kernel, patterns)) for kernel in KERNELS]
        lines.append([label, *cells])
    return table(["What", *KERNELS], lines)


def _meeting(rows: Sequence[Row], kernel: str, patterns: Sequence[str]) -> list[float]:
    return [
        value
        for row in rows
        if kernel in row.results
        for name, value in row.results[kernel].figures.items()
        if isinstance(value, int | float)
        if any(fnmatch(f"{row.name}.{name}", pattern) for pattern in patterns)
    ]


def _range(values: Sequence[float]) -> str:
    if not values:
        return NOTHING
    return " to ".join(dict.fromkeys((f"{min(values):,}", f"{max(values):,}")))


def _all_figures(rows: Sequence[Row]) -> list[str]:
    lines = []
    for row in rows:
        for name in dict.fromkeys(_figure_names(row)):
            own = name.partition(".")[2]
            values = [
                row.results[kernel].figures.get(own) if kernel in row.results else None for kernel in KERNELS
            ]
            lines.append([f"`{name}`", *(NOTHING if value is None else _short(value) for value in values)])
    summary = "<details><summary>Every figure by its name</summary>"
    return [summary, "", *table(["Figure", *KERNELS], lines), "", "</details>"]


def _figure_names(row: Row) -> list[str]:
    return [
        f"{row.name}.{name}"
        for result in row.results.values()
        for name, value in result.figures.items()
        if not (isinstance(value, list) and len(value) > LIST_MAX)
    ]


def _short(value: object) -> str:
    """One cell: no line ends, no bars, not too much of it."""
    items = value if isinstance(value, list) else [value]
    if not items:
        return "none"
    text = " ".join(", ".join(str(item) for item in items).split()).replace("|", "\\|")
    return text if len(text) <= WHY_MAX else text[: WHY_MAX - 2] + " …"


def rows_from(logs: Path) -> list[Row]:
    """Every scenario that there is, with what its last runs left below `logs`."""
    found = []
    for scenario, machine in machines().items():
        results = {
            kernel: result
            for kernel in KERNELS
            if (result := load(logs / Cell(scenario, kernel, machine).directory)) is not None
        }
        shows = first_sentence(scenario_module(scenario).__doc__ or "")
        found.append(Row(scenario.removeprefix("scenario_"), shows, machine, results))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line of `just vm-table`."""
    parser = argparse.ArgumentParser(
        prog="just vm-table", description=f"Write the tables of {DOCUMENT.name}."
    )
    parser.add_argument("--stdout", action="store_true", help="show the tables instead")
    options = parser.parse_args(arguments)
    rows = rows_from(logs_dir())
    for label in unmatched(rows):
        print(f"vm-table: no run left a figure for {label!r}", file=sys.stderr)
    tables = render(rows)
    if options.stdout:
        print(tables)
    else:
        DOCUMENT.write_text(put_into(DOCUMENT.read_text(encoding="utf-8"), BEGIN, tables), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
