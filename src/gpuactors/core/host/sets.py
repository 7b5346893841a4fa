"""The sets of devices that their sources have named, as the state keeps them, and the log lines about them.

A file of its own: `kinds/sets.py`, which decides what a set means, does not know the state.
"""

from __future__ import annotations

from msgspec.structs import replace

from gpuactors.core.kinds.sets import KnownSets
from gpuactors.core.state import NodeState
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.effects import Effect, Level, Log
from gpuactors.core.values.quote import first_of
from gpuactors.core.values.status import Reason


def observed(state: NodeState, known: KnownSets | str) -> tuple[NodeState, list[Effect]]:
    """Take the sets that were read; or, if they could not be read, as `known` says, keep the last ones."""
    host = state.host
    if isinstance(known, str):
        if known == host.sets_unread:
            return state, []
        unread = Log(Level.WARNING, "sets.unread", {"reason": known})
        return replace(state, host=replace(host, sets_unread=known)), [unread]
    if known == host.sets and not host.sets_unread:
        return state, []
    read: list[Effect] = [Log(Level.INFO, "sets.read", {"sets": len(known.sets)})]
    if known.problems and known.problems != (host.sets.problems if host.sets is not None else ()):
        read.append(Log(Level.WARNING, "sets.refused", {"reason": "; ".join(first_of(known.problems))}))
    return replace(state, host=replace(host, sets=known, sets_unread="")), read


def sets_unknown(state: NodeState) -> Reason | None:
    """Return why nobody can tell whether devices are a set: the sources of sets were never read. None if they were, or
    there are none."""
    if state.host.sets is not None or not state.host.sets_unread:
        return None
    unread = (
        f"the sets of devices are not known: {state.host.sets_unread}; or allow any devices by --sets prefer"
    )
    return Reason(Cause.NOT_A_SET, unread)
