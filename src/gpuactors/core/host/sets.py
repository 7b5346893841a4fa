"""The sets of devices that their sources have named, as the state keeps them, and the log lines about them.

A file of its own: `kinds/sets.py`, which decides what a set means, does not know the state.
"""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from gpuactors.core.events.host import SetsObserved
from gpuactors.core.kinds.sets import NO_SETS, SetsOfSource, SetSource
from gpuactors.core.state import NodeState
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.effects import Effect, Level, Log
from gpuactors.core.values.quote import first_of
from gpuactors.core.values.status import Reason

_OF_PARTITIONS: Final = frozenset({SetSource.OPERATOR, SetSource.FABRIC_MANAGER})


def observed(state: NodeState, event: SetsObserved) -> tuple[NodeState, list[Effect]]:
    """Take what a source names now; if it could not be read, keep what it named last."""
    before = state.host.sets.get(event.source, SetsOfSource())
    if isinstance(event.known, str):
        now = replace(before, unread=event.known)
        line = Log(Level.WARNING, "sets.unread", {"source": str(event.source), "reason": event.known})
    else:
        now = SetsOfSource(event.known)
        line = Log(Level.INFO, "sets.read", {"source": str(event.source)})
    is_none = event.source is SetSource.SWITCHES and now.known == NO_SETS and before.known is None
    if now == before or (is_none and not before.unread):
        return state, []
    return replace(state, host=replace(state.host, sets={**state.host.sets, event.source: now})), [line]


def refused(before: NodeState, state: NodeState) -> list[Effect]:
    """Return the log line about the sets that are left out, if these have changed: before the first scan it is unknown
    which GPUs there are."""
    if not state.host.sets or not state.host.scanned:
        return []
    problems = state.known_sets.problems
    if not problems or (before.host.scanned and before.known_sets.problems == problems):
        return []
    return [Log(Level.WARNING, "sets.refused", {"reason": "; ".join(first_of(problems))})]


def sets_unknown(state: NodeState) -> Reason | None:
    """Return why nobody can tell whether devices are a set: a source of sets was never read. None if all were, or there
    are none. The others name no partition, so they refuse nothing (`not_a_set`)."""
    of_partitions = (read for source, read in state.host.sets.items() if source in _OF_PARTITIONS)
    unread = [read.unread for read in of_partitions if read.known is None]
    if not unread:
        return None
    message = f"the sets of devices are not known: {'; '.join(unread)}; or allow any devices by --sets prefer"
    return Reason(Cause.NOT_A_SET, message)
