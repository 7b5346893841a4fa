"""How long kubelet is without a plugin: after its own restart, and when a daemon is replaced, by hand-over or cold.

The times are kubelet's: from its socket's appearance, or the end of the old stream. During a hand-over both daemons
live, as during an upgrade with maxSurge.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Final

from tests.bench.context import Bench, in_turn
from tests.bench.node import DidNotWork, Node

GPUS: Final = 8


def measure(bench: Bench) -> None:
    """Raises `DidNotWork`."""
    with bench.nodes(GPUS) as nodes:
        for node, number in in_turn(nodes.values(), bench.counts.kubelets + 1):
            _kubelet(bench, node, is_counted=number > 0)
    with ExitStack() as stack:
        pairs = [
            stack.enter_context(Node(bench.fresh(), party, gpus=GPUS, uevents=False))
            for party in bench.daemons
        ]
        for node in pairs:
            node.started()
        for node, _ in in_turn(pairs, bench.counts.hand_overs):
            _replaced(bench, node, "hand_over", "a new daemon takes over")
            _replaced(bench, node, "cold", "SIGTERM, then a new daemon")


def _kubelet(bench: Bench, node: Node, *, is_counted: bool) -> None:
    known = len(node.kubelet.registrations)
    node.kubelet.stop()
    node.kubelet.start()
    appeared_ns = node.kubelet.appeared_ns
    registration, frame = node.settle(known)
    if is_counted:
        for name, what, at_ns in (
            ("registered", "Register", registration.received_ns),
            ("list", "the first list", frame.at_ns),
        ):
            bench.sheet.add(
                f"restart.kubelet.{name}", f"kubelet's socket appears to {what}; {GPUS} GPUs", "ms", node.party.name,
                (at_ns - appeared_ns) / 1e6,
            )  # fmt: skip


def _replaced(bench: Bench, node: Node, name: str, how: str) -> None:
    known, ended = len(node.kubelet.registrations), len(node.kubelet.stream_ends(node.resource))
    if name == "cold":
        node.stop()
    node.start()
    registration, frame = node.settle(known)
    if name != "cold":
        node.stop()
    ends = node.kubelet.stream_ends(node.resource)[ended:]
    if len(ends) != 1 or len(node.kubelet.registrations) != known + 1:
        raise DidNotWork(f"one stream should have ended in one replacement, and there were {ends}")
    for row, to, at_ns in (
        ("registered", "Register", registration.received_ns),
        ("list", "the first list", frame.at_ns),
    ):
        bench.sheet.add(
            f"restart.{name}.{row}", f"{how}: end of the old stream to {to}", "ms", node.party.name,
            (at_ns - ends[0].at_ns) / 1e6,
        )  # fmt: skip
