"""From exec to registered and to the first list, what of it is imports, and the end.

Every start is a new process; the page cache is warm and the bytecode compiled, as after the first start on a node.
Floors: the bare plugin, `python -c pass`, and an import of each dependency alone.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack
from typing import Final

from tests.bench import procfs
from tests.bench.context import Bench, in_turn
from tests.bench.node import Node, discard, plugged
from tests.bench.parties import Party

DEPENDENCIES: Final = (
    "trio", "grpclib.server", "h2.connection", "betterproto2", "pyudev", "inotify_simple", "msgspec", "yaml", "click",
    "httpcore", "h11", "prometheus_client",
)  # fmt: skip
LEAVE: Final = "import os; os._exit(0)"
SHOWN: Final = 10
"""Packages that are shown by name; the rest is one sum."""


def measure(bench: Bench) -> None:
    """Raises `DidNotWork`."""
    for functions in bench.counts.functions:
        _starts(bench, functions)
    _floors(bench)
    _imports(bench)


def _starts(bench: Bench, functions: int) -> None:
    of, on = f"{functions}_functions", f"{functions} functions, {functions // 2} of them GPUs"
    tree = plugged(functions // 2, functions - functions // 2)
    with ExitStack() as stack:
        stack.callback(discard, tree)
        nodes = [
            stack.enter_context(Node(bench.fresh(), party, gpus=functions // 2, tree=tree))
            for party in bench.parties
        ]
        for node, number in in_turn(nodes, bench.counts.starts + 1):
            known = len(node.kubelet.registrations)
            began_ns = node.start()
            registration, frame = node.settle(known)
            spent_ns = procfs.processor_ns(node.pid)
            stop_ms = node.stop() * 1e3
            if number == 0:  # the first one fills the caches
                continue
            for name, what, value in (
                ("first_list", "exec to first list", (frame.at_ns - began_ns) / 1e6),
                ("registered", "exec to Register", (registration.received_ns - began_ns) / 1e6),
                ("processor", "processor time until the first list", spent_ns / 1e6),
                ("stop", "SIGTERM to the end of the process", stop_ms),
            ):
                bench.sheet.add(f"start.{name}.{of}", f"{what}; {on}", "ms", node.party.name, value)


def _floors(bench: Bench) -> None:
    codes = {"python -c pass": "pass"} | {f"import {name}": f"import {name}" for name in DEPENDENCIES}
    for (name, code), number in in_turn(codes.items(), bench.counts.starts + 1):
        began = time.perf_counter()
        # Tearing the interpreter down is no part of a start.
        subprocess.run(
            [sys.executable, "-c", f"{code}\n{LEAVE}"],
            check=True, stdin=subprocess.DEVNULL, env=bench.floor.environment(),
        )  # fmt: skip
        if number:
            took_ms = (time.perf_counter() - began) * 1e3
            bench.sheet.add("start.floors", "exec to the end of one statement", "ms", name, took_ms)


def _imports(bench: Bench) -> None:
    gpus = bench.counts.functions[0] // 2
    for party in bench.daemons:
        modules, shares = _modules(bench, party, gpus)
        bench.sheet.add("start.modules", "modules imported until the first list", "", party.name, modules)
        bench.sheet.add(
            "start.imports",
            "time in these modules' own code, by `-X importtime`, which is slower",
            "ms",
            party.name,
            sum(shares.values()),
            detail={
                "by package": ", ".join(f"{name} {ms:.1f}" for name, ms in list(shares.items())[:SHOWN]),
            },
        )


def _modules(bench: Bench, party: Party, gpus: int) -> tuple[int, dict[str, float]]:
    """How many, and milliseconds by top-level package; the standard library is one of them."""
    with Node(bench.fresh(), party, gpus=gpus) as node:
        node.start("-X", "importtime")
        node.settle()
        lines = node.log.read_text(encoding="utf-8", errors="replace").splitlines()
        node.stop()
    modules, shares_us = 0, Counter[str]()
    for line in lines:
        parts = line.removeprefix("import time:").split("|")
        if len(parts) == 3 and parts[0].strip().isdigit():
            package = parts[2].strip().partition(".")[0]
            is_standard = package in sys.stdlib_module_names or package.lstrip("_") in sys.stdlib_module_names
            modules += 1
            shares_us["standard library" if is_standard else package] += int(parts[0])
    return modules, {name: us / 1e3 for name, us in shares_us.most_common()}
