"""The daemon itself: its clock, its configuration, its predecessor and successor, its end.

A file of its own: each source of events has one.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field

from gpuactors.core.values.dead_signs import DeadSigns
from gpuactors.core.values.model import PciAddress, ResourceName
from gpuactors.core.values.selector import Selector
from gpuactors.core.values.vgpu import CardTypes, OwnVgpuType


class Ticked(Struct, frozen=True, gc=False):
    """The time of `next_deadline` has come."""


class PredecessorGone(Struct, frozen=True, gc=False):
    """The daemon that ran before has ended its streams, or there is none."""

    how: str
    """The outcome, for the log."""
    served: Mapping[ResourceName, frozenset[str]] = field(default_factory=dict)
    """The resources that this node's daemons have served, with the models of each, as their file lists them now. The
    last serving daemon, which may have started later than this one, is among them."""
    vgpu_types: Mapping[PciAddress, CardTypes] = field(default_factory=dict)
    """The names of vGPU types that this node's daemons have read in this boot, as their file has them now."""
    dead_signs: DeadSigns = field(default_factory=dict)
    """The signs that functions are dead, as this node's daemons have kept them in this boot."""


class HandOverRequested(Struct, frozen=True, gc=False):
    """A successor is ready and asks this daemon to end its streams."""


class SuccessorLost(Struct, frozen=True, gc=False):
    """The daemon that took over is no longer there."""


class ShutdownRequested(Struct, frozen=True, gc=False):
    """A signal asks the daemon to stop."""


class ConfigUsed(Struct, frozen=True, gc=False):
    """The configuration file has changed, and its settings are those in use from now on: those of this event, and all
    others as at the start."""

    keys: tuple[str, ...]
    """The settings that have changed; none if the file has the settings in use again."""
    selectors: tuple[Selector, ...]
    vgpu_types: tuple[OwnVgpuType, ...]
    """The same as in `Settings`."""


class ConfigUnused(Struct, frozen=True, gc=False):
    """The configuration file has changed, and nothing of the change is used."""

    reason: str
    """Why it is refused, as a sentence; empty if it is valid."""
    keys: tuple[str, ...] = ()
    """The changed settings that need a restart, of a valid file."""


ConfigEvent = ConfigUsed | ConfigUnused
DaemonEvent = PredecessorGone | HandOverRequested | SuccessorLost | ShutdownRequested
