"""How long kubelet waits for an answer: Allocate and its neighbours, one device, one call after the other.

The times are a grpcio client's in Python: GetPreferredAllocation, which the daemon answers without reading the
host, shows what of it is the way there and back.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.bench.figures import Figure, distribution
from tests.bench.node import Node


def measure(node: Node, calls: int) -> list[Figure]:
    """`calls` calls of each kind, in turn, over the devices in turn."""
    kubelet, resource, ids = node.kubelet, node.resource, node.gpus
    timed: dict[str, tuple[str, Callable[[str], object]]] = {
        "allocate": (
            "Allocate of one device, with its fresh inspection of the host",
            lambda i: kubelet.allocate(resource, [i]),
        ),
        "pre_start": (
            "PreStartContainer of one device, with its fresh inspection of the host",
            lambda i: kubelet.prestart(resource, [i]),
        ),
        "preferred": (
            f"GetPreferredAllocation of one of {len(ids)}, answered from memory",
            lambda i: kubelet.preferred(resource, ids, [], 1),
        ),
    }
    samples: dict[str, list[float]] = {name: [] for name in timed}
    for i in range(calls):
        for name, (_, call) in timed.items():
            began_ns = time.perf_counter_ns()
            call(ids[i % len(ids)])
            samples[name].append((time.perf_counter_ns() - began_ns) / 1e6)
    on = f"{node.functions} PCI functions"
    return [
        distribution(f"calls.{name}.{node.functions}_functions", f"{what}; {on}", "ms", samples[name])
        for name, (what, _) in timed.items()
    ]
