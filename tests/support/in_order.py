"""What is derived of a state is sorted: a choice among several values must not depend on the order in which they came,
nor on their hashes."""

from __future__ import annotations

from typing import Final

from gpuactors.core.devices.index import Index
from gpuactors.core.events import Event
from gpuactors.core.state import NodeState
from gpuactors.core.step import step
from gpuactors.core.values.effects import Effect

_SORTED: Final = ("present", "names", "devices", "polled")
"""The mappings that are sorted by their keys."""


def check_sorted(index: Index) -> None:
    """Raise AssertionError if any of these is not sorted."""
    unsorted = [name for name in _SORTED if list(mapping := getattr(index, name)) != sorted(mapping)]
    assert not unsorted, f"of the index {', '.join(unsorted)} is not sorted"


def checked_step(state: NodeState, event: Event, at: float) -> tuple[NodeState, list[Effect]]:
    """`step`, and the check of the state that it returns where the settings are strict."""
    after, effects = step(state, event, at)
    if after.daemon.settings.strict:
        check_sorted(after.index)
    return after, effects
