"""Claims: prepare and unprepare of a pre-bound GPU, and the requests to the API server.

A fake API server on loopback for each daemon, and kubelet's calls by grpcio, both in this process. A GPU on its host's
driver needs a kernel that binds: the virtual machine has that. There is no floor: nothing bare prepares a claim.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.bench import procfs
from tests.bench.context import Bench, in_turn
from tests.bench.node import DidNotWork, Node
from tests.bench.parties import Party
from tests.support.claims import DRIVER, NODE, Api, device_of, plugin_of, prepare, unprepare, write_kubeconfig
from tests.support.domains import with_imex

WAIT_S: Final = 30.0
CALLS: Final = {"prepare": prepare, "unprepare": unprepare}


@dataclass(frozen=True, slots=True)
class Served:
    """A daemon that serves claims, its API server, and its DRA plugin's methods."""

    node: Node
    api: Api
    plugin: Mapping[str, Any]


def measure(bench: Bench) -> None:
    """Raises `DidNotWork`."""
    for gpus in bench.counts.gpus:
        with ExitStack() as stack:
            served = [stack.enter_context(claims_node(bench.fresh(), party, gpus)) for party in bench.daemons]
            for one, number in in_turn(served, bench.counts.claims + 1):
                _claim(bench, one, number, gpus)


def _claim(bench: Bench, one: Served, number: int, gpus: int) -> None:
    name = f"claim-{number}"
    uid = one.api.claim(name, one.node.gpus[number % gpus])
    asked = requests_of(one.api)
    for call, method in CALLS.items():
        before_ns, began_ns = procfs.processor_ns(one.node.pid), time.perf_counter_ns()
        answer = method(one.plugin, name, uid)
        took_ms = (time.perf_counter_ns() - began_ns) / 1e6
        spent_us = (procfs.processor_ns(one.node.pid) - before_ns) / 1e3
        if answer.error:
            raise DidNotWork(f"{call} of {name}: {answer.error}")
        if number:
            what = f"{call} of a claim of 1 of {gpus} pre-bound GPUs"
            bench.sheet.add(f"claims.{call}.{gpus}_gpus", what, "ms", one.node.party.name, took_ms)
            bench.sheet.add(
                f"claims.{call}.{gpus}_gpus.processor", f"{what}, processor time until the answer", "µs",
                one.node.party.name, spent_us,
            )  # fmt: skip
    if number:
        made = requests_of(one.api) - asked
        bench.sheet.add(
            f"claims.requests.{gpus}_gpus", f"requests to the API server for such a claim, {gpus} GPUs", "",
            one.node.party.name, made.total(), detail={method: made[method] for method in sorted(made)},
        )  # fmt: skip


def requests_of(api: Api) -> Counter[str]:
    """How many there were so far, by method."""
    found: Counter[str] = api.do(lambda: Counter(method for method, _ in api.server.requests))
    return found


@contextmanager
def claims_node(
    directory: Path, party: Party, gpus: int, *, domains: bool = False, words: Sequence[str] = ()
) -> Iterator[Served]:
    """A node whose daemon offers its GPUs as claims and, with `domains`, IMEX channels. Kubelet knows the driver, which
    the slices wait for, and the API server has the slices."""
    with Api() as api:
        write_kubeconfig(directory / "kubeconfig", api.port)
        more = (
            "--dra=on",
            f"--node-name={NODE}",
            f"--driver-name={DRIVER}",
            f"--kubeconfig={directory / 'kubeconfig'}",
            f"--cdi-dir={directory / 'cdi'}",
            *(("--compute-domains=on",) if domains else ()),
            *words,
        )
        with Node(directory, party, gpus=gpus, words=more) as node:
            if domains:
                with_imex(node.tree.root)
            node.started()
            with plugin_of(node.place.kubelet) as plugin:
                deadline = time.monotonic() + WAIT_S
                while api.devices() != sorted(map(device_of, node.gpus)):
                    if time.monotonic() > deadline:
                        raise DidNotWork("the slices did not come")
                    time.sleep(0.05)
                yield Served(node, api, plugin)
