"""The daemon itself: its clock, its predecessor and successor, its end.

A file of its own: each source of events has one.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field

from gpuactors.core.values.model import ResourceName


class Ticked(Struct, frozen=True, gc=False):
    """The time of `next_deadline` has come."""


class PredecessorGone(Struct, frozen=True, gc=False):
    """The daemon that ran before has ended its streams, or there is none; `how` has the outcome, for the log."""

    how: str
    served: Mapping[ResourceName, frozenset[str]] = field(default_factory=dict)
    """The resources, and the models of each, that this node's daemons have served, as their file lists them now: those
    of the last serving daemon as well, which may have started after us."""


class HandOverRequested(Struct, frozen=True, gc=False):
    """A successor is ready and asks us to end our streams."""


class SuccessorLost(Struct, frozen=True, gc=False):
    """The daemon that took over is no longer there."""


class ShutdownRequested(Struct, frozen=True, gc=False):
    """A signal asks the daemon to stop."""


DaemonEvent = PredecessorGone | HandOverRequested | SuccessorLost | ShutdownRequested
