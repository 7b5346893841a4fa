"""What the daemon costs a node while nothing happens: memory, processor time, context switches, and what wakes it.

Every variant of the settings runs at the same time over the same seconds. Floor: the bare plugin.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from tests.bench import procfs
from tests.bench.claims import claims_node, requests_of
from tests.bench.context import Bench
from tests.bench.node import Node
from tests.bench.parties import ROOT, Party, Place
from tests.support.claims import Api
from tests.support.http_get import get

GPUS: Final = 8
POD: Final = "as in the pod"
PROBED: Final = "with kubelet's probes"
DRA: Final = "with DRA"
DOMAINS: Final = "with DRA and compute domains"
VARIANTS: Final[Mapping[str, Sequence[str]]] = {
    POD: (),
    PROBED: (),
    "without endpoints": ("--http-address=off",),
    "without a journal": ("--journal=off",),
    DRA: (),
    DOMAINS: (),
}
PROBES_S: Final = {"/readyz": 5.0, "/livez": 10.0}
"""Seconds between two of each, as in deploy/base."""


def measure(bench: Bench) -> None:
    """Raises `DidNotWork`."""
    with ExitStack() as stack:
        running = [
            _Running(variant, *stack.enter_context(_node(bench, variant, party)))
            for variant in VARIANTS
            for party in (bench.parties if variant == POD else bench.daemons)
        ]
        watched = {}
        for variant in VARIANTS:
            file = bench.fresh() / "wake-ups.json"
            party = _watched(bench.daemons[0], file, bench.counts.quiet_s)
            watched[file] = _Running(variant, *stack.enter_context(_node(bench, variant, party)))
        with _probed([one.node for one in (*running, *watched.values()) if one.variant == PROBED]):
            time.sleep(bench.counts.quiet_s)
            before = [one.account() for one in running]
            time.sleep(bench.counts.idle_s)
            after = [one.account() for one in running]
        for one, was, now in zip(running, before, after, strict=True):
            _add(bench, one, was, now)
        for file, one in watched.items():
            one.node.stop()
            _add_wake_ups(bench, one.variant, json.loads(file.read_text()))


@dataclass(frozen=True, slots=True)
class _Account:
    cpu_ns: int
    activity: procfs.Activity
    requests: int
    """To the API server."""


@dataclass(frozen=True, slots=True)
class _Running:
    variant: str
    node: Node
    api: Api | None

    def account(self) -> _Account:
        """Up to now."""
        pid = self.node.pid
        requests = requests_of(self.api).total() if self.api else 0
        return _Account(procfs.processor_ns(pid), procfs.activity(pid), requests)


@contextmanager
def _node(bench: Bench, variant: str, party: Party) -> Iterator[tuple[Node, Api | None]]:
    directory = bench.fresh()
    if variant in (DRA, DOMAINS):
        with claims_node(directory, party, GPUS, domains=variant == DOMAINS) as served:
            yield served.node, served.api
    else:
        with Node(directory, party, gpus=GPUS, words=VARIANTS[variant]) as node:
            node.started()
            yield node, None


def _watched(party: Party, to: Path, quiet_s: float) -> Party:
    """The same, with an instrument that counts what wakes it."""

    def command(place: Place) -> Sequence[str]:
        _, _, *words = party.command(place)
        return ("-m", "tests.bench.wake_ups", str(to), str(quiet_s), "--", *words)

    return replace(party, name=f"{party.name} watched", command=command, source=f"{party.source}:{ROOT}")


@contextmanager
def _probed(nodes: Sequence[Node]) -> Iterator[None]:
    stop = threading.Event()

    def probe(path: str, every_s: float) -> None:
        while not stop.wait(every_s):
            for node in nodes:
                get(node.place.http, path)

    probes = [threading.Thread(target=probe, args=item) for item in PROBES_S.items()]
    for thread in probes:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in probes:
            thread.join()


def _add(bench: Bench, one: _Running, was: _Account, now: _Account) -> None:
    party, memory = one.node.party.name, procfs.memory(one.node.pid)
    spent, minutes = now.activity.since(was.activity), bench.counts.idle_s / 60
    name, idle = one.variant.replace(" ", "_"), f"idle {one.variant}, {GPUS} GPUs"
    for row, what, unit, value, detail in (
        ("processor", "processor time a minute", "ms", (now.cpu_ns - was.cpu_ns) / 1e6 / minutes, {}),
        ("switches", "context switches a minute", "", sum(spent.switches.values()) / minutes, spent.switches),
        ("resident", "resident memory", "MiB", memory.rss_kib / 1024, {}),
        ("private", "memory that would be free without it", "MiB", memory.private_kib / 1024, {}),
        ("threads", "threads", "", memory.threads, {}),
    ):
        bench.sheet.add(f"idle.{name}.{row}", f"{idle}: {what}", unit, party, value, detail=detail)
    if one.api:
        requests = (now.requests - was.requests) / minutes
        bench.sheet.add(
            f"idle.{name}.requests", f"{idle}: requests to the API server a minute", "", party, requests
        )


def _add_wake_ups(bench: Bench, variant: str, said: Mapping[str, Any]) -> None:
    minutes, counts = said["seconds"] / 60, Counter[str](said["counts"])
    bench.sheet.add(
        f"idle.{variant.replace(' ', '_')}.wake_ups",
        f"idle {variant}, {GPUS} GPUs: wake-ups of the event loop a minute",
        "",
        bench.daemons[0].name,
        counts.total() / minutes,
        detail={where: round(count / minutes, 1) for where, count in counts.most_common()},
    )
