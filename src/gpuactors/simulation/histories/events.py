"""The table: every kind of event by its name."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Final

from gpuactors.simulation.histories.daemon_events import DAEMON_KINDS
from gpuactors.simulation.histories.host_events import HOST_KINDS
from gpuactors.simulation.histories.kinds import Kind, can_follow, that_can_happen
from gpuactors.simulation.histories.kubelet_events import KUBELET_KINDS
from gpuactors.simulation.histories.ledger_events import LEDGER_KINDS
from gpuactors.simulation.histories.neighbour_events import NEIGHBOUR_KINDS
from gpuactors.simulation.histories.node_events import NODE_KINDS
from gpuactors.simulation.histories.script import Script, ScriptError

KINDS: Final[dict[str, Kind]] = {
    kind.name: kind
    for kind in (*HOST_KINDS, *NODE_KINDS, *KUBELET_KINDS, *LEDGER_KINDS, *NEIGHBOUR_KINDS, *DAEMON_KINDS)
}
"""By name, in a fixed order."""

NOT_DRAWN: Final[frozenset[str]] = frozenset()
"""Kinds that find faults that are not repaired yet: scripts may name them, campaigns leave them out. Should be
empty."""

DRAWN: Final[dict[str, Kind]] = {
    kind.name: kind for kind in that_can_happen(k for k in KINDS.values() if k.name not in NOT_DRAWN)
}
"""What campaigns draw from."""

Pair = tuple[str, str]

PAIRS: Final[frozenset[Pair]] = frozenset(
    (a.name, b.name) for a in DRAWN.values() for b in DRAWN.values() if can_follow(a, b)
)
"""Every ordered pair of kinds of which the second can come right after the first."""


def check_names(script: Script) -> Script:
    """The script, if all its kinds are in the table. Raises `ScriptError`."""
    for step in script:
        if step.kind not in KINDS:
            raise ScriptError(f"there is no kind of event called {step.kind!r}; {_instead(step.kind)}")
    return script


def _instead(name: str) -> str:
    if close := get_close_matches(name, KINDS, cutoff=0.5):
        return f"is it {' or '.join(map(repr, close))}?"
    return f"there are {', '.join(KINDS)}"
