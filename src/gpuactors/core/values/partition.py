"""Partitions of an NVLink fabric: the states of one that gpuactors activates, and every transition (ADR 0025).

A transition names what is requested next; nothing here does it. A pair of state and trigger without a row is a bug:
`follow` raises `NoPartitionTransitionError`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final, NewType

from msgspec import Struct

from gpuactors.core.values.model import DeviceKey

PartitionId = NewType("PartitionId", str)
"""The fabric manager's number of a partition, in decimal digits."""


class ShownPartition(Struct, frozen=True, gc=False):
    """A partition as a query of the operator's command shows it."""

    id: PartitionId
    devices: frozenset[DeviceKey]
    is_active: bool | None
    """None if an earlier query has shown it and this one has not."""


class Goal(StrEnum):
    """The goal of an act, by the word that the command gets; on disk, the intent."""

    ACTIVATE = "activate"
    DEACTIVATE = "deactivate"


class Intent(Struct, frozen=True, gc=False):
    """An intent on disk. It counts in its own boot only."""

    id: PartitionId
    devices: frozenset[DeviceKey]
    goal: Goal


class PartitionState(StrEnum):
    """The state of a partition, as `explain` and the log show it."""

    ABSENT = "Absent"
    """gpuactors has nothing to do with it."""
    CHECKING = "Checking"
    """An owner has exactly its devices. Queries show whether somebody else has activated it."""
    RESERVED = "Reserved"
    """It is to be activated; that intent is being written to disk."""
    ACTIVATING = "Activating"
    """It is being activated, until queries show it."""
    ACTIVE = "Active"
    """Queries show that it is active. Its owner may start."""
    VERIFYING = "Verifying"
    """An earlier daemon of this boot may have activated it. Queries show whether it is active."""
    LOST = "Lost"
    """It was activated, and queries show that it is not active. A restart of the fabric manager ends all partitions."""
    RELEASING = "Releasing"
    """It has no owner. The intent to deactivate it is being written to disk."""
    DEACTIVATING = "Deactivating"
    """It is being deactivated, until queries show it."""


class PartitionTrigger(StrEnum):
    """The events of a partition."""

    WANTED = "wanted"
    """An owner has exactly its devices."""
    UNWANTED = "unwanted"
    """It has no owner, and where it may be active no process has its devices open."""
    CLEAR = "clear"
    """Neither it nor a partition that overlaps it is active."""
    DURABLE = "durable"
    """Its present intent is on disk."""
    SHOWN_ACTIVE = "shown active"
    SHOWN_INACTIVE = "shown inactive"
    START = "start"
    """A container of its owner is to start, and no process has its devices open."""


class PartitionRequest(StrEnum):
    """The request that goes with a transition."""

    NOTHING = "nothing"
    WRITE = "write"
    """Write the intents to disk."""
    ACT = "act"
    """Activate or deactivate it, as its state says."""


_S, _E, _R = PartitionState, PartitionTrigger, PartitionRequest

PARTITION_TRANSITIONS: Final[
    Mapping[tuple[PartitionState, PartitionTrigger], tuple[PartitionState, PartitionRequest]]
] = {
    (_S.ABSENT, _E.WANTED): (_S.CHECKING, _R.NOTHING),
    (_S.CHECKING, _E.CLEAR): (_S.RESERVED, _R.WRITE),
    (_S.CHECKING, _E.UNWANTED): (_S.ABSENT, _R.NOTHING),
    (_S.RESERVED, _E.DURABLE): (_S.ACTIVATING, _R.ACT),
    # Nothing has been activated.
    (_S.RESERVED, _E.UNWANTED): (_S.ABSENT, _R.WRITE),
    (_S.ACTIVATING, _E.SHOWN_ACTIVE): (_S.ACTIVE, _R.NOTHING),
    (_S.ACTIVATING, _E.SHOWN_INACTIVE): (_S.ACTIVATING, _R.ACT),
    (_S.ACTIVATING, _E.UNWANTED): (_S.RELEASING, _R.WRITE),
    (_S.ACTIVE, _E.SHOWN_INACTIVE): (_S.LOST, _R.NOTHING),
    (_S.ACTIVE, _E.UNWANTED): (_S.RELEASING, _R.WRITE),
    (_S.VERIFYING, _E.SHOWN_ACTIVE): (_S.ACTIVE, _R.NOTHING),
    (_S.VERIFYING, _E.SHOWN_INACTIVE): (_S.LOST, _R.NOTHING),
    # Queries decide first: what is not active needs no act, and may be somebody else's a moment later.
    (_S.LOST, _E.SHOWN_ACTIVE): (_S.ACTIVE, _R.NOTHING),
    # An activation trains links: never under a virtual machine that runs.
    (_S.LOST, _E.START): (_S.ACTIVATING, _R.ACT),
    (_S.LOST, _E.UNWANTED): (_S.ABSENT, _R.WRITE),
    # An owner that comes now waits until it is deactivated.
    (_S.RELEASING, _E.DURABLE): (_S.DEACTIVATING, _R.ACT),
    (_S.DEACTIVATING, _E.SHOWN_ACTIVE): (_S.DEACTIVATING, _R.ACT),
    (_S.DEACTIVATING, _E.SHOWN_INACTIVE): (_S.ABSENT, _R.WRITE),
}
"""Every transition."""

INTENTS: Final[Mapping[PartitionState, Goal]] = {
    _S.RESERVED: Goal.ACTIVATE,
    _S.ACTIVATING: Goal.ACTIVATE,
    _S.ACTIVE: Goal.ACTIVATE,
    _S.VERIFYING: Goal.ACTIVATE,
    _S.LOST: Goal.ACTIVATE,
    _S.RELEASING: Goal.DEACTIVATE,
    _S.DEACTIVATING: Goal.DEACTIVATE,
}
"""The intent on disk in each state that has one. To a later daemon an active partition whose intent is to deactivate it
proves nothing: a command may still be deactivating it."""


class NoPartitionTransitionError(AssertionError):
    """The table has no row for this state and trigger: a bug."""


def follow(state: PartitionState, trigger: PartitionTrigger) -> tuple[PartitionState, PartitionRequest]:
    """Return the next state and its request. Raises `NoPartitionTransitionError`."""
    if (transition := PARTITION_TRANSITIONS.get((state, trigger))) is None:
        raise NoPartitionTransitionError(f"a partition that is {state} has no transition on {trigger!s}")
    return transition
