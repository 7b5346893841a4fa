"""How far an Allocate, a late bind and a prepare go through the program: its calls, its files, and its hops.

Until the answer, or the list, has left the daemon (`counted.py`). The counts say how much of the program its reader has
to follow, not how long it takes.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

from tests.bench import counted
from tests.bench.call import plugin_of
from tests.bench.claims import WAIT_S, claims_node
from tests.bench.context import Bench
from tests.bench.node import DidNotWork, Node, gpu_addresses
from tests.bench.parties import Party, Place
from tests.support.claims import prepare, unprepare

GPUS: Final = 16
QUIET_S: Final = 1.5
"""The daemon has read kubelet's ledger after the act before (`GRANT_LEDGER_S`), and nothing is left to do."""


def measure(bench: Bench) -> None:
    """Raises `DidNotWork`."""
    for party in bench.daemons:
        _device_plugin(bench, party)
        _claims(bench, party)


def _device_plugin(bench: Bench, party: Party) -> None:
    directory = bench.fresh()
    file = directory / "counted.json"
    with Node(directory, _counting(party, file), gpus=GPUS) as node:
        node.started()
        with plugin_of(node) as plugin:
            for i in range(bench.counts.blocks):
                with _counted(bench, party, node.pid, file, "allocate", f"Allocate of 1 of {GPUS} GPUs"):
                    plugin.allocate(1, i)
        for i in range(bench.counts.blocks):
            address = node.gpus[-1 - i % (GPUS // 2)]
            with _counted(bench, party, node.pid, file, "unbind", "uevent `unbind pci` to the list"):
                seen = node.frames_so_far()
                node.send(node.tree.unbind(address)[-1:])
                node.frame_without(address, after=seen)
            with _counted(bench, party, node.pid, file, "bind", "uevent `bind pci` to the list"):
                seen = node.frames_so_far()
                node.send(node.bind(address)[-1:])
                node.frame_with(address, after=seen)


def _claims(bench: Bench, party: Party) -> None:
    directory = bench.fresh()
    file = directory / "counted.json"
    with claims_node(directory, _counting(party, file), GPUS) as one:
        for i in range(bench.counts.blocks):
            name = f"claim-{i}"
            uid = one.api.claim(name, gpu_addresses(GPUS)[i % GPUS])
            for what, method in (("prepare", prepare), ("unprepare", unprepare)):
                with _counted(bench, party, one.pid, file, what, f"{what} of 1 of {GPUS} pre-bound GPUs"):
                    answer = method(one.plugin, name, uid)
                if answer.error:
                    raise DidNotWork(f"{what} of {name}: {answer.error}")


def _counting(party: Party, file: Path) -> Party:
    """The same party, whose daemon counts."""

    def command(place: Place) -> Sequence[str]:
        minus_m, module, *words = party.command(place)
        assert minus_m == "-m"
        return (str(Path(counted.__file__)), str(file), module, *words)

    return replace(party, command=command)


@contextmanager
def _counted(bench: Bench, party: Party, pid: int, file: Path, name: str, what: str) -> Iterator[None]:
    """Counts what the daemon does in the block."""
    file.unlink(missing_ok=True)
    time.sleep(QUIET_S)
    os.kill(pid, counted.BEGIN)
    yield
    os.kill(pid, counted.END)
    deadline = time.monotonic() + WAIT_S
    while not file.exists():
        if time.monotonic() > deadline:
            raise DidNotWork(f"{party.name} has counted nothing")
        time.sleep(0.01)
    for of, value in json.loads(file.read_text()).items():
        bench.sheet.add(f"path.{name}.{of}", f"{what}: {of}", "", party.name, value)
