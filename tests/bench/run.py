"""The benchmark: real processes on fake nodes, with a grpcio kubelet in this process.

Prints the figures as text; with --output DIR also writes bench.txt and bench.json there, after each part. The exit code
is not 0 only if something did not work: no figure is judged here.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.bench import (
    call,
    claims,
    commands,
    crowd,
    event,
    idle,
    memory,
    overhead,
    parts,
    path,
    restart,
    start,
)
from tests.bench.context import FULL, QUICK, Bench, say
from tests.bench.figures import Sheet, as_text, machine
from tests.bench.node import DidNotWork
from tests.bench.parties import ROOT, SOURCE, Party, bare_plugin, daemon


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a run."""

    measure: Callable[[Bench], None]
    seconds: int
    """At full length with one daemon, on two cores that others used as well."""
    what: str


PARTS: Final[Mapping[str, Part]] = {
    "start": Part(start.measure, 230, "from exec to the first list, by the number of functions; imports"),
    "call": Part(call.measure, 75, "Allocate of 1 and 8 GPUs, one caller and 16"),
    "event": Part(event.measure, 65, "from a uevent to the list; lists by their length; a storm"),
    "restart": Part(restart.measure, 45, "kubelet is back; hand-overs"),
    "claims": Part(claims.measure, 50, "prepare and unprepare of claims"),
    "crowd": Part(
        crowd.measure, 170, "300 prepares at once; 200 claims that wait; Allocate beside 1,000 claims"
    ),
    "parts": Part(
        parts.measure, 480, "virtual functions and vGPUs of 1 and 8 cards beside as many whole GPUs"
    ),
    "memory": Part(memory.measure, 50, "resident: idle, after Allocates, after 100,000 events"),
    "commands": Part(commands.measure, 70, "`inspect` and `explain`"),
    "overhead": Part(overhead.measure, 20, "of the journal and the endpoints; a scrape"),
    "path": Part(path.measure, 60, "calls, files and hops of an Allocate, a late bind and a prepare"),
    "idle": Part(idle.measure, 90, "processor time, switches and wake-ups of a minute, by the settings"),
}


def main(arguments: list[str] | None = None) -> int:
    """The exit code: 0, or 1 if something did not work."""
    options = _options(arguments)
    parties = _daemons(options)
    sheet, where = Sheet([party.name for party in parties]), machine()
    began, failures = time.monotonic(), 0
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        descriptors = Path(directory) / "deviceplugin.bin"
        _compile(descriptors)
        for name, factor in options.only.items():
            say(name)
            began_part = time.monotonic()
            counts = QUICK if options.quick else FULL.scaled(factor)
            if options.smallest:
                counts = counts.smallest()
            bench = Bench(Path(directory) / name, sheet, parties, bare_plugin(descriptors), counts)
            try:
                PARTS[name].measure(bench)
            except DidNotWork as error:
                failures += 1
                print(f"bench: {name}: {error}", file=sys.stderr)
            say(f"{name} took {time.monotonic() - began_part:.0f} s")
            where["load after"] = round(os.getloadavg()[0], 2)
            where["took s"] = round(time.monotonic() - began)
            if options.output:
                document = sheet.document(where)
                (options.output / "bench.json").write_text(json.dumps(document, indent=1, ensure_ascii=False))
                (options.output / "bench.txt").write_text(as_text(document))
    print(as_text(sheet.document(where)))
    return 1 if failures else 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    whole_min = round(sum(part.seconds for part in PARTS.values()) / 60)
    parser = argparse.ArgumentParser(
        prog="./do bench",
        description=__doc__.split("\n")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"parts, with their seconds on two busy cores; together {whole_min} minutes, with --against half "
        "as much again:\n"
        + "\n".join(f"  {name:<10}{part.seconds:>4}  {part.what}" for name, part in PARTS.items()),
    )
    parser.add_argument(
        "--only",
        metavar="PART[:FACTOR],…",
        default=",".join(PARTS),
        help=f"of {', '.join(PARTS)}; with FACTOR times as many samples (default: all)",
    )
    parser.add_argument(
        "--against",
        metavar="CHECKOUT",
        type=Path,
        help="another checkout, e.g. a git worktree: measured in turn",
    )
    parser.add_argument(
        "--python", metavar="NAME=FILE", action="append", default=[],
        help="another interpreter that runs this checkout, measured in turn; may be repeated",
    )  # fmt: skip
    parser.add_argument("--smallest", action="store_true", help="of each size the smallest only")
    parser.add_argument(
        "--output", metavar="DIR", type=Path, help="where bench.txt and bench.json are written"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a few samples only: does the benchmark itself work?"
    )
    options = parser.parse_args(arguments)
    parts = dict(part.partition(":")[::2] for part in options.only.split(","))
    try:
        options.only = {name: float(factor or 1) for name, factor in parts.items()}
    except ValueError as error:
        parser.error(str(error))
    if unknown := sorted(set(options.only) - set(PARTS)):
        parser.error(f"there is no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if options.against and not (options.against / "src" / "gpuactors").is_dir():
        parser.error(f"{options.against} has no src/gpuactors")
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
    return options


def _daemons(options: argparse.Namespace) -> tuple[Party, ...]:
    found = [daemon("new" if options.against else "gpuactors")]
    if options.against:
        found.append(daemon("old", options.against.resolve() / "src"))
    for named in options.python:
        name, _, file = named.partition("=")
        found.append(daemon(name, SOURCE, file))
    return tuple(found)


def _compile(to: Path) -> None:
    from grpc_tools import protoc

    file = "deviceplugin.proto"
    status = protoc.main(["protoc", f"-I{ROOT / 'protos'}", f"--descriptor_set_out={to}", file])
    if status != 0:
        raise DidNotWork(f"protoc could not compile {file} (status {status})")


if __name__ == "__main__":
    sys.exit(main())
