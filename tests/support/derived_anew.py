"""What a state carries along is what is derived of it from nothing: an independent check of every comparison that says
that something has not changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import fields, replace

from gpuactors.core.assessment.assessments import NO_ASSESSMENTS
from gpuactors.core.deviceplugin.entries import entries
from gpuactors.core.devices.index import NO_INDEX, Index
from gpuactors.core.events import Event
from gpuactors.core.state import NodeState
from gpuactors.core.state.entries import NO_ENTRIES
from gpuactors.core.step import step
from gpuactors.core.values.effects import Effect

_SORTED: Final = ("functions", "names", "devices", "polled")
"""The mappings that are sorted by their keys. A choice among several values must not depend on the order in which they
came, nor on their hashes."""


def check_derived(state: NodeState) -> None:
    """Raises AssertionError if anything that the state carries differs from what is derived of it from nothing, or is
    not sorted."""
    fresh = replace(state, _index=NO_INDEX, _index_of=(None,) * 5, _assessments=NO_ASSESSMENTS)
    differ = [
        f.name
        for carried, now in zip(_parts(state.index), _parts(fresh.index), strict=True)
        for f in fields(carried)
        if (value := getattr(now, f.name)) != getattr(carried, f.name) and not isinstance(value, Struct)
    ]
    assert not differ, f"of the index {', '.join(differ)} is stale"
    unsorted = [name for name in _SORTED if list(m := getattr(state.index, name)) != sorted(m)]
    assert not unsorted, f"of the index {', '.join(unsorted)} is not sorted"
    carried, now = state.assessments, fresh.assessments
    stale = sorted(a for a in carried.keys() | now.keys() if carried.get(a) != now.get(a))
    assert not stale, f"the assessment of {', '.join(stale)} is stale"
    listed, now_listed = entries(state).of, entries(replace(fresh, entries=NO_ENTRIES)).of
    wrong = sorted(r for r in listed.keys() | now_listed.keys() if listed.get(r) != now_listed.get(r))
    assert not wrong, f"the entries of {', '.join(wrong)} are stale"


def _parts(index: Index) -> tuple[Any, ...]:
    return index.known, index.meant, index.of, index.held, index


def checked(
    step: Callable[[NodeState, Event, float], tuple[NodeState, list[Effect]]],
) -> Callable[[NodeState, Event, float], tuple[NodeState, list[Effect]]]:
    """`step` with the check of every state that it returns, where the settings are strict."""

    def stepped(state: NodeState, event: Event, at: float) -> tuple[NodeState, list[Effect]]:
        after, effects = step(state, event, at)
        if after.daemon.settings.strict and after.index is not state.index:
            check_derived(after)
        return after, effects

    return stepped


checked_step: Final = checked(step)
