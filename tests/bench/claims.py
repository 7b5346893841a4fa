"""Claims: prepare and unprepare of a pre-bound GPU, the requests to the API server, and what DRA costs in memory.

`python -m tests.bench.claims`: real daemon processes on fake nodes; a fake API server on loopback and kubelet's calls
by grpcio, both in this process. A GPU on its host's driver needs a kernel that binds: the virtual machine has that.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.bench import procfs
from tests.bench.figures import Figure, distribution, reading, run
from tests.bench.node import DidNotWork, Node
from tests.support.claims import DRIVER, NODE, Api, device_of, plugin_of, prepare, unprepare, write_kubeconfig

GPUS: Final = (4, 32, 256)
QUIET_S: Final = 2.0
WAIT_S: Final = 30.0


def measure(directory: Path, rounds: int, idle_s: float) -> Iterator[Figure]:
    """Raises `DidNotWork`."""
    for gpus in GPUS:
        with _node(directory / str(gpus), gpus) as (node, api):
            yield from _claims(node, api, gpus, rounds)
            if gpus == GPUS[0]:
                yield from _idle(api, idle_s)
                yield _resident(node, "on")
    with Node(_made(directory / "off"), gpus=GPUS[0]) as node:
        node.start_daemon()
        node.settle()
        time.sleep(QUIET_S)
        yield _resident(node, "off")


def _claims(node: Node, api: Api, gpus: int, rounds: int) -> Iterator[Figure]:
    took: dict[str, list[float]] = {"prepare": [], "unprepare": []}
    with plugin_of(node.directory / "kubelet") as plugin:
        warm_up = api.claim("warm-up", node.gpus[0])
        prepare(plugin, "warm-up", warm_up)
        unprepare(plugin, "warm-up", warm_up)
        asked = _requests(api)
        for i in range(rounds):
            name = f"claim-{i}"
            uid = api.claim(name, node.gpus[i % gpus])
            for call, method in (("prepare", prepare), ("unprepare", unprepare)):
                began_ns = time.perf_counter_ns()
                answer = method(plugin, name, uid)
                took[call].append((time.perf_counter_ns() - began_ns) / 1e6)
                if answer.error:
                    raise DidNotWork(f"{call} of {name}: {answer.error}")
    made = _requests(api) - asked
    for call, samples in took.items():
        yield distribution(
            f"claims.{gpus}_gpus.{call}", f"{call} of a claim of one of {gpus} pre-bound GPUs", "ms", samples
        )
    yield reading(
        f"claims.{gpus}_gpus.requests",
        f"requests to the API server for each of {rounds} claims, from prepare to unprepare",
        "",
        sum(made.values()) / rounds,
        {method: round(number / rounds, 2) for method, number in sorted(made.items())},
    )


def _idle(api: Api, idle_s: float) -> Iterator[Figure]:
    time.sleep(QUIET_S)
    before = _requests(api)
    time.sleep(idle_s)
    made = _requests(api) - before
    yield reading(
        "claims.idle.requests",
        f"requests to the API server within {idle_s:g} s in which nothing happens",
        "",
        sum(made.values()),
    )


def _resident(node: Node, dra: str) -> Figure:
    kib = procfs.memory(node.pid).rss_kib
    return reading(
        f"memory.dra_{dra}", f"VmRSS of a daemon with --dra={dra}, {GPUS[0]} GPUs", "MiB", kib / 1024
    )


def _requests(api: Api) -> Counter[str]:
    return api.do(lambda: Counter(method for method, _ in api.server.requests))  # type: ignore[no-any-return]


@contextmanager
def _node(directory: Path, gpus: int) -> Iterator[tuple[Node, Api]]:
    _made(directory)
    with Api() as api:
        write_kubeconfig(directory / "kubeconfig", api.port)
        words = (
            "--dra=on",
            f"--node-name={NODE}",
            f"--driver-name={DRIVER}",
            f"--kubeconfig={directory / 'kubeconfig'}",
            f"--cdi-dir={directory / 'cdi'}",
        )
        with Node(directory, gpus=gpus, words=words) as node:
            node.start_daemon()
            node.settle()
            deadline = time.monotonic() + WAIT_S
            while api.devices() != sorted(map(device_of, node.gpus)):
                if time.monotonic() > deadline:
                    raise DidNotWork("the slices did not come")
                time.sleep(0.05)
            yield node, api


def _made(directory: Path) -> Path:
    directory.mkdir(parents=True)
    return directory


def main() -> int:
    """The exit code: 0, or 1 if something did not work."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.claims", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--rounds", type=int, default=200, help="claims for each number of GPUs (default: 200)"
    )
    parser.add_argument(
        "--idle-s", type=float, default=60.0, help="seconds in which nothing happens (default: 60)"
    )
    options = parser.parse_args()
    return run(lambda directory: measure(directory, options.rounds, options.idle_s))


if __name__ == "__main__":
    sys.exit(main())
