"""The daemon itself: its clock, its predecessor and successor, its end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gpuactors.core.values.model import ResourceName


@dataclass(frozen=True, slots=True)
class Ticked:
    """The time of `next_deadline` has come."""


@dataclass(frozen=True, slots=True)
class PredecessorGone:
    """The daemon that ran before has ended its streams, or there is none; `how` has the outcome, for the log."""

    how: str
    served: Mapping[ResourceName, frozenset[str]] = field(default_factory=dict)
    """The resources, and the models of each, that this node's daemons have served, as their file lists them now: those
    of the last serving daemon as well, which may have started after us."""


@dataclass(frozen=True, slots=True)
class HandOverRequested:
    """A successor is ready and asks us to end our streams."""


@dataclass(frozen=True, slots=True)
class SuccessorLost:
    """The daemon that took over is no longer there."""


@dataclass(frozen=True, slots=True)
class ShutdownRequested:
    """A signal asks the daemon to stop."""


DaemonEvent = PredecessorGone | HandOverRequested | SuccessorLost | ShutdownRequested
