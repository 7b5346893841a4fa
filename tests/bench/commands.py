"""`inspect` and `explain`: from exec to the end, of a daemon that runs. Floor: `python -c pass`."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence

from tests.bench.context import Bench, in_turn
from tests.bench.node import DidNotWork, Node


def measure(bench: Bench) -> None:
    """Raises `DidNotWork`."""
    for gpus in bench.counts.gpus:
        with bench.nodes(gpus, bench.daemons) as nodes:
            for node, number in in_turn(nodes.values(), bench.counts.commands + 1):
                for name, words in (("inspect", ()), ("explain", (node.gpus[0],))):
                    took_ms = _timed(node, name, *words)
                    if number:
                        what = (
                            f"`{' '.join((name, *('ADDRESS' for _ in words)))}`, exec to the end; {gpus} GPUs"
                        )
                        bench.sheet.add(f"commands.{name}.{gpus}_gpus", what, "ms", node.party.name, took_ms)
                        bench.sheet.add(
                            f"commands.{name}.{gpus}_gpus", what, "ms", "python -c pass", _pass(node)
                        )


def _timed(node: Node, *words: str) -> float:
    paths = (f"--host-root={node.place.host}", f"--state-dir={node.place.state}")
    return _ran(node, ("-m", "gpuactors", words[0], *paths, *words[1:]))


def _pass(node: Node) -> float:
    return _ran(node, ("-c", "pass"))


def _ran(node: Node, words: Sequence[str]) -> float:
    began = time.perf_counter()
    ended = subprocess.run(
        (node.party.python, *words),
        env=node.party.environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    took_ms = (time.perf_counter() - began) * 1e3
    if ended.returncode != 0:
        raise DidNotWork(
            f"{node.party.name}: {' '.join(words)} ended with {ended.returncode}: {ended.stderr!r}"
        )
    return took_ms
