"""The table: every kind of event by its name."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Final

from gpuactors.simulation.histories.daemon_events import DAEMON_KINDS
from gpuactors.simulation.histories.host_events import HOST_KINDS
from gpuactors.simulation.histories.kinds import Kind, can_follow
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

NOT_DRAWN: Final[frozenset[str]] = frozenset(
    {
        "a card comes back in another group",
        "a monitor watches, and dials again first",
        "a second plugin takes our resource",
        "an older plugin has given a card away",
        "descriptors run out",
        "mates are released together",
        "our resource has an odd ID",
        "the API server goes away",
        "the next daemon has another pci.ids",
        "the next daemon selects other cards",
        "the node reboots",
        "the second plugin goes",
        "the second plugin sends a frame",
    }
)
"""Kinds that still find, with each other, what is not mended yet, in one history of 500 to 2,000; the last are
`a daemon crashes; an older plugin has given a card away@1; mates are released together@1` with seed 3489452256, and
`a card comes back in another group@4; mates are released together@1; a daemon crashes@117; half gone@4+0.3; plug a
never-seen model@4` with seed 1835169784. Scripts may name them, the histories of `found.py` do, campaigns leave them
out. Should be empty."""

DRAWN: Final[dict[str, Kind]] = {name: kind for name, kind in KINDS.items() if name not in NOT_DRAWN}
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
