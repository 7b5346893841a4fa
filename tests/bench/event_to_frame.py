"""How long kubelet waits for the news: uevent to frame, and a never-seen model to its registration."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Final

from tests.bench.figures import Figure, distribution, reading
from tests.bench.node import Node

WARM_UP: Final = 5
"""Rounds that are not counted: the start's second scan (after the uevent socket was opened) may still be running."""

PAUSE_S: Final = 0.005
"""Between two uevents. The frame is out before the daemon has written its log line; on a node it is idle by then."""


@dataclass(slots=True)
class _Times:
    """Milliseconds, of one node."""

    bind: list[float] = field(default_factory=list)
    unbind: list[float] = field(default_factory=list)
    burst: list[float] = field(default_factory=list)


def compare(small: Node, large: Node, rounds: int) -> list[Figure]:
    """Both daemons alive and asked in turn, so that what disturbs the machine disturbs both: the ratio is of now."""
    times = alternate((small, large), rounds)
    figures: list[Figure] = []
    for node, of in zip((small, large), times, strict=True):
        figures += _figures(node, of)
    ratio = median(times[1].bind) / median(times[0].bind)
    figures.append(
        reading(
            "event_to_frame.ratio",
            f"median of `bind pci` to frame with {large.functions} PCI functions by that with {small.functions}",
            "times",
            ratio,
        )
    )
    return figures


def more_gpus(directory: Path, gpus: int, rounds: int) -> list[Figure]:
    """The same on a node with more GPUs than any has: every frame lists all of them."""
    with Node(directory, gpus=gpus) as node:
        node.start_daemon()
        node.settle()
        (times,) = alternate((node,), rounds)
        name = f"event_to_frame.{gpus}_gpus"
        what = f"uevent `bind pci` sent to frame received; all {gpus} PCI functions are GPUs of one resource"
        return [distribution(name, what, "ms", times.bind)]


def alternate(nodes: Sequence[Node], rounds: int) -> list[_Times]:
    """Unbinds and binds one GPU after the other, node by node; who goes first alternates as well."""
    times = [_Times() for _ in nodes]
    for i in range(-WARM_UP, rounds):
        order = range(len(nodes)) if i % 2 else range(len(nodes) - 1, -1, -1)
        for n in order:
            _round(nodes[n], i, times[n] if i >= 0 else _Times())
    return times


def _round(node: Node, i: int, times: _Times) -> None:
    address = node.gpus[i % len(node.gpus)]
    times.unbind.append(_unbind(node, address))
    # The tree is as after the whole binding, and the last of its three uevents is the only one to be sent.
    times.bind.append(_bind(node, address, all_uevents=False))
    _unbind(node, address)
    times.burst.append(_bind(node, address, all_uevents=True))


def _unbind(node: Node, address: str) -> float:
    uevents = node.tree.unbind(address)
    seen = node.frames_so_far()
    began_ns = node.send(uevents[-1:])
    frame = node.frame_without(address, after=seen)
    time.sleep(PAUSE_S)
    return (frame.at_ns - began_ns) / 1e6


def _bind(node: Node, address: str, *, all_uevents: bool) -> float:
    uevents = node.bind(address)
    seen = node.frames_so_far()
    began_ns = node.send(uevents if all_uevents else uevents[-1:])
    frame = node.frame_with(address, after=seen)
    time.sleep(PAUSE_S)
    return (frame.at_ns - began_ns) / 1e6


def _figures(node: Node, times: _Times) -> list[Figure]:
    name = f"event_to_frame.{node.functions}_functions"
    on = f"{node.functions} PCI functions, {len(node.gpus)} of them GPUs"
    return [
        distribution(f"{name}.bind", f"uevent `bind pci` sent to frame received; {on}", "ms", times.bind),
        distribution(
            f"{name}.unbind", f"uevent `unbind pci` sent to frame received; {on}", "ms", times.unbind
        ),
        distribution(
            f"{name}.bind_burst",
            f"first of a binding's three uevents, sent back to back, to frame received; {on}",
            "ms",
            times.burst,
        ),
    ]


def new_models(directory: Path, models: int) -> list[Figure]:
    """A device id that the process has never seen: from its uevent to Register, and to its resource's first frame."""
    register_ms: list[float] = []
    frame_ms: list[float] = []
    with Node(directory, gpus=8) as node:
        node.start_daemon()
        node.settle()
        time.sleep(0.5)
        for i in range(models):
            known = len(node.kubelet.registrations)
            address, uevents = node.plug_model(f"f{i:03x}", group=8 + i)
            began_ns = node.send(uevents[-1:])
            registration, frame = node.registered_with(address, after=known)
            register_ms.append((registration.received_ns - began_ns) / 1e6)
            frame_ms.append((frame.at_ns - began_ns) / 1e6)
            time.sleep(PAUSE_S)
    return [
        distribution(
            "new_model.register",
            "uevent of a never-seen device id sent to Register received: the new resource's socket serves by then",
            "ms",
            register_ms,
        ),
        distribution(
            "new_model.first_frame",
            "uevent of a never-seen device id sent to the new resource's first frame received, through kubelet's dial",
            "ms",
            frame_ms,
        ),
    ]
