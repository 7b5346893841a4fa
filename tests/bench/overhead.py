"""What the journal and the endpoints cost a call, and what a scrape costs. Floor of a call: the daemon without both."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Final

from tests.bench import procfs
from tests.bench.call import BLOCK, alone, plugin_of
from tests.bench.context import Bench, in_turn
from tests.bench.node import Node
from tests.bench.parties import Party, Place
from tests.support.http_get import get

GPUS: Final = 32
WITHOUT: Final = {
    "without a journal": ("--journal=off",),
    "without endpoints": ("--http-address=off",),
    "without both": ("--journal=off", "--http-address=off"),
}


def measure(bench: Bench) -> None:
    """Raises `DidNotWork`."""
    _calls(bench)
    for gpus in bench.counts.gpus:
        with bench.nodes(gpus, bench.daemons) as nodes:
            for node, number in in_turn(nodes.values(), bench.counts.scrapes + 1):
                _scrape(bench, node, gpus, is_counted=number > 0)


def _calls(bench: Bench) -> None:
    parties = (*bench.daemons, *(_with(bench.daemons[0], name, words) for name, words in WITHOUT.items()))
    with bench.nodes(GPUS, parties) as nodes, ExitStack() as stack:
        plugins = [stack.enter_context(plugin_of(node)) for node in nodes.values()]
        alone(bench, plugins, GPUS, 1, part="overhead")
        time.sleep(bench.counts.quiet_s / 12)  # the journal is written in batches
        for party in bench.daemons:
            state = nodes[party.name].place.state
            size = sum(file.stat().st_size for file in (state / "journal").iterdir())
            calls = (bench.counts.blocks + 1) * BLOCK
            bench.sheet.add(
                "overhead.journal.bytes",
                "journal, with its start, by Allocate",
                "bytes",
                party.name,
                size / calls,
            )


def _with(party: Party, name: str, words: Sequence[str]) -> Party:
    def command(place: Place) -> Sequence[str]:
        return (*party.command(place), *words)

    return replace(party, name=name, command=command)


def _scrape(bench: Bench, node: Node, gpus: int, *, is_counted: bool) -> None:
    before_ns, began_ns = procfs.processor_ns(node.pid), time.perf_counter_ns()
    page = get(node.place.http, "/metrics")
    took_ms = (time.perf_counter_ns() - began_ns) / 1e6
    spent_us = (procfs.processor_ns(node.pid) - before_ns) / 1e3
    assert page.status == 200, page
    if is_counted:
        what, name = f"a scrape of /metrics, {gpus} GPUs", f"overhead.scrape.{gpus}_gpus"
        bench.sheet.add(name, what, "ms", node.party.name, took_ms, detail={"bytes": len(page.text)})
        bench.sheet.add(f"{name}.processor", f"{what}, processor time", "µs", node.party.name, spent_us)
