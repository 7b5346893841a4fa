"""How long kubelet has no stream when a daemon is replaced: by hand-over, and by a cold restart.

From the end of the old daemon's stream to the first frame of the new one's, both as the kubelet stand-in saw them. Real
processes; during a hand-over both live, as during an upgrade with maxSurge.
"""

from __future__ import annotations

from pathlib import Path

from tests.bench.figures import Figure, distribution
from tests.bench.node import DidNotWork, Node


def measure(directory: Path, rounds: int) -> list[Figure]:
    """`rounds` upgrades by hand-over, then as many cold restarts. Raises `DidNotWork`."""
    with Node(directory, gpus=8, uevents=False) as node:
        node.start_daemon()
        node.settle()
        handed_over = [_replaced(node, stop_first=False) for _ in range(rounds)]
        cold = [_replaced(node, stop_first=True) for _ in range(rounds)]
    seen = "the old stream's end to the new one's first frame, as kubelet sees them"
    return [
        distribution("hand_over.gap", seen, "ms", [gap for gap, _ in handed_over]),
        distribution(
            "hand_over.to_register",
            "of that, until the new one's Register arrives",
            "ms",
            [to_register for _, to_register in handed_over],
        ),
        distribution(
            "hand_over.cold_restart",
            f"SIGTERM, then a new process: {seen}",
            "ms",
            [gap for gap, _ in cold],
        ),
    ]


def _replaced(node: Node, *, stop_first: bool) -> tuple[float, float]:
    """Milliseconds without a stream, and of that up to Register, which is the daemons' own part: the rest is mostly the
    kubelet stand-in's."""
    known, ended = len(node.kubelet.registrations), len(node.kubelet.stream_ends(node.resource))
    if stop_first:
        node.stop_daemon()
    node.start_daemon()
    registration, frame = node.settle(known)
    if not stop_first:
        node.stop_daemon()
    ends = node.kubelet.stream_ends(node.resource)[ended:]
    if len(ends) != 1 or len(node.kubelet.registrations) != known + 1:
        raise DidNotWork(f"one stream should have ended in one replacement, and there were {ends}")
    return (frame.at_ns - ends[0].at_ns) / 1e6, (registration.received_ns - ends[0].at_ns) / 1e6
