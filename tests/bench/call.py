"""Allocate: of 1 and of 8 devices, by one caller and by 16, and its neighbours.

The times are a grpcio client's in this process, on one connection as kubelet has it. Floors: the bare plugin, and a
handler without logic on the daemon's own gRPC server (`bare_handler.py`).
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc

from tests.bench import procfs
from tests.bench.context import Bench, in_turn
from tests.bench.node import DidNotWork, Node
from tests.bench.parties import ROOT, SOURCE, Party
from tests.support.device_plugin_grpcio import message, stub

DEVICES: Final = (1, 8)
CALLERS: Final = 16
BLOCK: Final = 25
"""So many calls of one caller follow each other."""
BURST: Final = 10
"""So many calls of each of 16 callers."""
WAIT_S: Final = 30.0
BARE_HANDLER: Final = "bare handler"

Clock = Callable[[], int]


@dataclass(frozen=True, slots=True)
class Plugin:
    """Somebody who answers the device plugin API."""

    name: str
    pid: int
    methods: Mapping[str, Any]
    devices: Sequence[str]

    def ids(self, count: int, i: int) -> list[str]:
        """`count` devices in turn, all of them where there are fewer."""
        first = i * count
        return [self.devices[(first + n) % len(self.devices)] for n in range(min(count, len(self.devices)))]

    def timed(self, method: str, request: Any) -> float:
        """Milliseconds of one call."""
        began_ns = time.perf_counter_ns()
        self.methods[method](request, timeout=WAIT_S)
        return (time.perf_counter_ns() - began_ns) / 1e6

    def allocate(self, count: int, i: int) -> float:
        """Allocate of `count` devices; milliseconds."""
        container = message("ContainerAllocateRequest")(devices_ids=self.ids(count, i))
        return self.timed("Allocate", message("AllocateRequest")(container_requests=[container]))


def measure(bench: Bench) -> None:
    """Raises `DidNotWork`."""
    for gpus in bench.counts.gpus:
        with (
            bench.nodes(gpus) as nodes,
            bare_handler(bench.fresh(), gpus) as bare,
            ExitStack() as stack,
        ):
            plugins = [stack.enter_context(plugin_of(node)) for node in nodes.values()]
            plugins.append(bare)
            for count in DEVICES:
                alone(bench, plugins, gpus, count)
                _at_once(bench, plugins, gpus, count)
            if gpus == bench.counts.gpus[0]:
                _neighbours(bench, [plugin for plugin in plugins if plugin.name in bench.sheet.subjects])


def alone(
    bench: Bench, plugins: Sequence[Plugin], gpus: int, count: int, part: str = "call", of: str = ""
) -> None:
    """One call after the other, the parties in turn by blocks; `of` says which devices there are. The processor time is
    that of a party's own blocks: what it does while another is called is not a call's."""
    name, what = (
        f"{part}.allocate.{count}_of_{gpus}",
        f"Allocate of {min(count, gpus)} of {of or f'{gpus} GPUs'}",
    )
    for plugin, number in in_turn(plugins, bench.counts.blocks + 1):
        before_ns = procfs.processor_ns(plugin.pid)
        samples = [plugin.allocate(count, number * BLOCK + i) for i in range(BLOCK)]
        spent_ns = procfs.processor_ns(plugin.pid) - before_ns
        if number:  # the connection is made by the first, and caches are filled
            bench.sheet.add(name, f"{what}, one caller", "ms", plugin.name, *samples)
            bench.sheet.add(
                f"{name}.processor",
                f"{what}, processor time of a call",
                "µs",
                plugin.name,
                spent_ns / 1e3 / BLOCK,
            )


def _at_once(bench: Bench, plugins: Sequence[Plugin], gpus: int, count: int) -> None:
    name, what = (
        f"call.allocate.{count}_of_{gpus}",
        f"Allocate of {min(count, gpus)} of {gpus} GPUs, {CALLERS} callers",
    )

    def call(plugin: Plugin, first: int) -> list[float]:
        return [plugin.allocate(count, first + i) for i in range(BURST)]

    with ThreadPoolExecutor(CALLERS) as callers:
        for plugin, _ in in_turn(plugins, bench.counts.bursts):
            before_ns, began = procfs.processor_ns(plugin.pid), time.perf_counter()
            runs = [callers.submit(call, plugin, n * BURST) for n in range(CALLERS)]
            samples = [sample for run in runs for sample in run.result()]
            took_s = time.perf_counter() - began
            spent_ns = procfs.processor_ns(plugin.pid) - before_ns
            bench.sheet.add(f"{name}.{CALLERS}_callers", what, "ms", plugin.name, *samples)
            bench.sheet.add(
                f"{name}.{CALLERS}_callers.rate",
                f"{what}, calls a second",
                "calls/s",
                plugin.name,
                len(samples) / took_s,
            )
            bench.sheet.add(
                f"{name}.{CALLERS}_callers.processor", f"{what}, processor time of a call", "µs", plugin.name,
                spent_ns / 1e3 / len(samples),
            )  # fmt: skip


def _neighbours(bench: Bench, plugins: Sequence[Plugin]) -> None:
    for plugin, number in in_turn(plugins, bench.counts.blocks + 1):
        gpus = len(plugin.devices)
        for i in range(BLOCK):
            ids = plugin.ids(1, number * BLOCK + i)
            pre_start = plugin.timed(
                "PreStartContainer", message("PreStartContainerRequest")(devices_ids=ids)
            )
            container = message("ContainerPreferredAllocationRequest")(
                available_deviceIDs=list(plugin.devices), must_include_deviceIDs=[], allocation_size=1
            )
            preferred = plugin.timed(
                "GetPreferredAllocation",
                message("PreferredAllocationRequest")(container_requests=[container]),
            )
            if number:
                bench.sheet.add(
                    "call.pre_start", f"PreStartContainer of 1 of {gpus} GPUs", "ms", plugin.name, pre_start
                )
                bench.sheet.add(
                    "call.preferred",
                    f"GetPreferredAllocation of 1 of {gpus} GPUs, answered from memory",
                    "ms",
                    plugin.name,
                    preferred,
                )


@contextmanager
def plugin_of(node: Node) -> Iterator[Plugin]:
    """The plugin of a party that runs."""
    with grpc.insecure_channel(f"unix:{node.plugin_socket}") as channel:
        yield Plugin(node.party.name, node.pid, stub(channel, "DevicePlugin"), node.gpus)


@contextmanager
def bare_handler(directory: Path, gpus: int) -> Iterator[Plugin]:
    """A handler without logic on the daemon's own gRPC server, as a process."""
    socket = directory / "bare.sock"
    party = Party(BARE_HANDLER, lambda _: (), source=f"{SOURCE}:{ROOT}")
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.bench.bare_handler", str(socket)], env=party.environment()
    )
    try:
        deadline = time.monotonic() + WAIT_S
        while not socket.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise DidNotWork(f"the bare handler did not come to its socket (status {process.poll()})")
            time.sleep(0.01)
        with grpc.insecure_channel(f"unix:{socket}") as channel:
            devices = tuple(f"0000:{number:02x}:00.0" for number in range(gpus))
            yield Plugin(BARE_HANDLER, process.pid, stub(channel, "DevicePlugin"), devices)
    finally:
        process.kill()
        process.wait()
