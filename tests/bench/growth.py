"""What grows with the number of GPUs: Allocate alone and by many callers at once, its processor time, and a late bind.

`python -m tests.bench.growth [--before PYTHON]`: with another installation's interpreter its daemon is measured too,
alive at the same time and called in turn, so that the ratios are of one run. Beside them answers a plugin that does
nothing (`bare_plugin.py`), on the same gRPC server.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import grpc

from tests.bench import event_to_frame, procfs
from tests.bench.figures import Figure, distribution, reading, run
from tests.bench.node import DidNotWork, Node
from tests.support.device_plugin_grpcio import message, stub

GPUS: Final = (4, 32, 256)
CALLERS: Final = 16
BLOCK: Final = 25
"""So many calls of one party follow each other."""
WAIT_S: Final = 30.0

NOW: Final = "now"
BEFORE: Final = "before"
BARE: Final = "bare"


@dataclass(frozen=True, slots=True)
class Plugin:
    """Somebody who answers Allocate: its process, its DevicePlugin service, and the devices to ask for."""

    pid: int
    methods: Mapping[str, Any]
    devices: Sequence[str]

    def allocate(self, i: int) -> float:
        """Allocate of one device, the devices in turn; milliseconds."""
        device = self.devices[i % len(self.devices)]
        request = message("AllocateRequest")(
            container_requests=[message("ContainerAllocateRequest")(devices_ids=[device])]
        )
        began_ns = time.perf_counter_ns()
        self.methods["Allocate"](request, timeout=WAIT_S)
        return (time.perf_counter_ns() - began_ns) / 1e6


def measure(
    directory: Path, calls: int, rounds: int, gpus: Sequence[int] = GPUS, before: str | None = None
) -> Iterator[Figure]:
    """`calls` Allocates and `rounds` late binds per party and number of GPUs. Raises `DidNotWork`."""
    pythons = {NOW: sys.executable} | ({BEFORE: before} if before else {})
    one: dict[tuple[str, int], float] = {}
    cpu: dict[tuple[str, int], float] = {}
    for count in gpus:
        with ExitStack() as open_until_then:
            nodes = {
                name: open_until_then.enter_context(_node(directory / f"{name}{count}", count, python))
                for name, python in pythons.items()
            }
            plugins = {name: open_until_then.enter_context(_plugin_of(node)) for name, node in nodes.items()}
            plugins[BARE] = open_until_then.enter_context(_bare(directory / f"bare{count}"))
            for name, samples, spent_ms in _alone(plugins, calls):
                one[name, count], cpu[name, count] = median(samples), spent_ms
                yield distribution(
                    f"allocate.{name}.{count}_gpus", f"Allocate of one of {count} GPUs", "ms", samples
                )
                yield reading(
                    f"allocate.{name}.{count}_gpus.processor",
                    f"processor time of one of these {calls} calls, all threads",
                    "ms",
                    spent_ms,
                )
            for name, samples in _at_once(plugins, calls):
                yield distribution(
                    f"allocate.{name}.{count}_gpus.{CALLERS}_callers",
                    f"the same, {CALLERS} callers at once, each with one call after the other",
                    "ms",
                    samples,
                )
            for name, times in zip(
                nodes, event_to_frame.alternate(tuple(nodes.values()), rounds), strict=True
            ):
                yield distribution(
                    f"late_bind.{name}.{count}_gpus",
                    f"uevent `bind pci` sent to list received; {count} GPUs of one resource",
                    "ms",
                    times.bind,
                )
    for name in pythons:
        yield from _ratios(name, gpus, one, cpu)


def _ratios(
    name: str,
    gpus: Sequence[int],
    one: Mapping[tuple[str, int], float],
    cpu: Mapping[tuple[str, int], float],
) -> Iterator[Figure]:
    few, many = gpus[0], gpus[-1]
    yield reading(
        f"allocate.{name}.to_bare", f"median at {few} GPUs by that of the bare plugin", "times",
        one[name, few] / one[BARE, few],
    )  # fmt: skip
    yield reading(
        f"allocate.{name}.processor_growth", f"processor time of a call at {many} GPUs by that at {few}", "times",
        cpu[name, many] / cpu[name, few] if cpu[name, few] else 0.0,
    )  # fmt: skip


def _alone(plugins: Mapping[str, Plugin], calls: int) -> Iterator[tuple[str, list[float], float]]:
    """One call after the other, the parties in turn by blocks: (party, milliseconds of each, processor time of one).

    The processor time is that of a party's own blocks: what it does while another is called is not a call's.
    """
    for name in plugins:
        plugins[name].allocate(0)  # the connection is made by the first
    samples: dict[str, list[float]] = {name: [] for name in plugins}
    spent_ns = dict.fromkeys(plugins, 0)
    for first in range(0, calls, BLOCK):
        for name, plugin in plugins.items():
            before_ns = procfs.processor_ns(plugin.pid)
            samples[name] += [plugin.allocate(i) for i in range(first, min(first + BLOCK, calls))]
            spent_ns[name] += procfs.processor_ns(plugin.pid) - before_ns
    for name in plugins:
        yield name, samples[name], spent_ns[name] / 1e6 / calls


def _at_once(plugins: Mapping[str, Plugin], calls: int) -> Iterator[tuple[str, list[float]]]:
    each = max(1, calls // CALLERS)

    def call(plugin: Plugin, first: int) -> list[float]:
        return [plugin.allocate(first + i) for i in range(each)]

    for name, plugin in plugins.items():
        with ThreadPoolExecutor(CALLERS) as callers:
            runs = [callers.submit(call, plugin, n * each) for n in range(CALLERS)]
            yield name, [sample for run in runs for sample in run.result()]


@contextmanager
def _node(directory: Path, gpus: int, python: str) -> Iterator[Node]:
    directory.mkdir()
    with Node(directory, gpus=gpus, python=python) as node:
        node.start_daemon()
        node.settle()
        yield node


@contextmanager
def _plugin_of(node: Node) -> Iterator[Plugin]:
    (socket,) = (node.directory / "kubelet" / "device-plugins").glob("gpuactors-*.sock")
    with grpc.insecure_channel(f"unix:{socket}") as channel:
        yield Plugin(node.pid, stub(channel, "DevicePlugin"), node.gpus)


@contextmanager
def _bare(directory: Path) -> Iterator[Plugin]:
    directory.mkdir()
    socket = directory / "bare.sock"
    process = subprocess.Popen([sys.executable, "-m", "tests.bench.bare_plugin", str(socket)])
    try:
        deadline = time.monotonic() + WAIT_S
        while not socket.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise DidNotWork(f"the bare plugin did not come to its socket (status {process.poll()})")
            time.sleep(0.01)
        with grpc.insecure_channel(f"unix:{socket}") as channel:
            yield Plugin(process.pid, stub(channel, "DevicePlugin"), ("0000:01:00.0",))
    finally:
        process.kill()
        process.wait()


def main() -> int:
    """The exit code: 0, or 1 if something did not work."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.growth", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--before", metavar="PYTHON", help="the interpreter of another installation of gpuactors"
    )
    parser.add_argument("--calls", type=int, default=500, help="Allocates of each party (default: 500)")
    parser.add_argument("--rounds", type=int, default=50, help="late binds of each party (default: 50)")
    options = parser.parse_args()
    return run(lambda directory: measure(directory, options.calls, options.rounds, before=options.before))


if __name__ == "__main__":
    sys.exit(main())
