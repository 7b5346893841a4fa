"""Claims: prepare and unprepare of a pre-bound GPU, and the requests to the API server.

A fake API server on loopback for each daemon, and kubelet's calls by grpcio, both in this process. A GPU on its host's
driver needs a kernel that binds: the virtual machine has that. Floor: a DRA plugin without any logic (`bare_dra.py`),
which has an API server of its own as well.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gpuactors_simulation.host.tree import HostTree
from tests.bench import procfs
from tests.bench.context import Bench, in_turn
from tests.bench.node import DidNotWork, Node, gpu_addresses
from tests.bench.parties import ROOT, Party
from tests.support.claims import DRIVER, NODE, Api, device_of, plugin_of, prepare, unprepare, write_kubeconfig
from tests.support.domains import with_imex

WAIT_S: Final = 30.0
BARE_DRA: Final = "bare plugin of claims"
CALLS: Final = {"prepare": prepare, "unprepare": unprepare}


@dataclass(frozen=True, slots=True)
class Served:
    """A process that serves claims, its API server, and its DRA plugin's methods."""

    party: str
    pid: int
    api: Api
    plugin: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ServedNode(Served):
    """A daemon that serves claims."""

    node: Node


def measure(bench: Bench) -> None:
    """Raises `DidNotWork`."""
    for gpus in bench.counts.gpus:
        with ExitStack() as stack:
            served: list[Served] = [
                stack.enter_context(claims_node(bench.fresh(), party, gpus)) for party in bench.daemons
            ]
            served.append(stack.enter_context(bare_dra(bench.fresh())))
            for one, number in in_turn(served, bench.counts.claims + 1):
                _claim(bench, one, number, gpus)


def _claim(bench: Bench, one: Served, number: int, gpus: int) -> None:
    name = f"claim-{number}"
    uid = one.api.claim(name, gpu_addresses(gpus)[number % gpus])
    asked = requests_of(one.api)
    for call, method in CALLS.items():
        before_ns, began_ns = procfs.processor_ns(one.pid), time.perf_counter_ns()
        answer = method(one.plugin, name, uid)
        took_ms = (time.perf_counter_ns() - began_ns) / 1e6
        spent_us = (procfs.processor_ns(one.pid) - before_ns) / 1e3
        if answer.error:
            raise DidNotWork(f"{call} of {name}: {answer.error}")
        if number:
            what = f"{call} of a claim of 1 of {gpus} pre-bound GPUs"
            bench.sheet.add(f"claims.{call}.{gpus}_gpus", what, "ms", one.party, took_ms)
            bench.sheet.add(
                f"claims.{call}.{gpus}_gpus.processor", f"{what}, processor time until the answer", "µs",
                one.party, spent_us,
            )  # fmt: skip
    if number:
        made = requests_of(one.api) - asked
        bench.sheet.add(
            f"claims.requests.{gpus}_gpus", f"requests to the API server for such a claim, {gpus} GPUs", "",
            one.party, made.total(), detail={method: made[method] for method in sorted(made)},
        )  # fmt: skip


def prepared_and_unprepared(one: Served, name: str, address: str) -> dict[str, float]:
    """Prepare a claim of the device, and unprepare it; the milliseconds of each call. Raises `DidNotWork`."""
    uid, times_ms = one.api.claim(name, address), {}
    for call, method in CALLS.items():
        began_ns = time.perf_counter_ns()
        answer = method(one.plugin, name, uid)
        times_ms[call] = (time.perf_counter_ns() - began_ns) / 1e6
        if answer.error:
            raise DidNotWork(f"{call} of {name}: {answer.error}")
    return times_ms


def requests_of(api: Api) -> Counter[str]:
    """How many there were so far, by method."""
    found: Counter[str] = api.do(lambda: Counter(method for method, _ in api.server.requests))
    return found


@contextmanager
def claims_node(
    directory: Path,
    party: Party,
    gpus: int,
    *,
    tree: HostTree | None = None,
    addresses: Sequence[str] | None = None,
    domains: bool = False,
    words: Sequence[str] = (),
) -> Iterator[ServedNode]:
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
        with Node(directory, party, gpus=gpus, tree=tree, addresses=addresses, words=more) as node:
            if domains:
                with_imex(node.tree.root)
            node.started()
            with plugin_of(node.place.kubelet) as plugin:
                deadline = time.monotonic() + WAIT_S
                # A card is there beside its virtual functions, with a taint.
                while not set(map(device_of, node.gpus)).issubset(api.devices()):
                    if time.monotonic() > deadline:
                        raise DidNotWork("the slices did not come")
                    time.sleep(0.05)
                yield ServedNode(party.name, node.pid, api, plugin, node)


@contextmanager
def bare_dra(directory: Path) -> Iterator[Served]:
    """A DRA plugin that does the least (`bare_dra.py`), as a process."""
    kubelet, party = directory / "kubelet", Party(BARE_DRA, lambda _: (), source=str(ROOT))
    with Api() as api:
        words = (str(kubelet), DRIVER, str(directory / "cdi"), str(api.port))
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.bench.bare_dra", *words], env=party.environment()
        )
        try:
            with plugin_of(kubelet, get_info_s=WAIT_S) as plugin:
                yield Served(BARE_DRA, process.pid, api, plugin)
        finally:
            process.kill()
            process.wait()
