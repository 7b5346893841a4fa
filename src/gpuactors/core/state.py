"""Everything that the daemon knows, as one frozen value.

Changed by `step` alone. What follows from it is derived once when what it follows from changes: see `index.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from gpuactors.core.assessment.assessments import NO_ASSESSMENTS, Assessments
from gpuactors.core.entries import NO_ENTRIES, Entries
from gpuactors.core.index import NO_INDEX, Index
from gpuactors.core.model import (
    Call,
    DeviceId,
    DeviceList,
    Fact,
    Inspections,
    Ledger,
    Orphan,
    PciAddress,
    PluginState,
    Polls,
    Resolved,
    ResourceName,
    Role,
    Settings,
    Token,
    Transition,
)


@dataclass(frozen=True, slots=True)
class NodeState:
    """Everything that the daemon knows. Owned by the registry actor; changed by `step` only."""

    settings: Settings
    inspections: Inspections
    facts: Mapping[PciAddress, Fact]
    scanned: bool
    """A first full scan has come back."""
    uevents: str
    """Why uevents are not heard, as a sentence; empty while they are."""
    served: Mapping[ResourceName, frozenset[str]]
    """Resources that are ours whatever is selected or named now: served by this daemon, or by one before it as its
    state directory says, and not retired since. To each the models (`10de:2330`) that were called so meanwhile; none
    if that is not known."""
    device_lists: Mapping[ResourceName, DeviceList]
    """What kubelet is told, per resource that has a plugin."""
    plugins: Mapping[ResourceName, PluginState]
    no_removal_until: Mapping[ResourceName, float]
    """Until when a resource's list must not lose a device, because kubelet may be using it in a call's answer."""
    calls: Mapping[Token, Call]
    ledger: Ledger
    polls: Polls
    pending_allocations: Mapping[tuple[ResourceName, DeviceId], float]
    """Devices handed out by Allocate that kubelet's ledger does not list yet, and until when we believe in it."""
    resolved: Mapping[tuple[ResourceName, DeviceId], Resolved]
    """Every device that kubelet's ledger or `granted` names, if it is known which one is meant."""
    orphans: Mapping[PciAddress, Orphan]
    history: Mapping[PciAddress, tuple[Transition, ...]]
    """The last changes of what was said of each device, oldest first."""
    role: Role
    kubelet: str | None
    """Identity of the kubelet.sock that is there now; None while there is none."""
    kubelet_missing: str
    """Why there is none, as a sentence."""
    stopping: bool
    neighbours: tuple[str, ...] = ()
    """The sockets in kubelet's directory that are neither kubelet's nor ours."""
    compare_at: float = math.inf
    """When kubelet's list is to be read because something odd was seen."""
    index: Index = field(default=NO_INDEX, compare=False, repr=False)
    """What follows from the rest; see `index.py`."""
    assessments: Assessments = field(default=NO_ASSESSMENTS, compare=False, repr=False)
    """How each device is, which follows from the rest; see `assessment/`."""
    entries: Entries = field(default=NO_ENTRIES, compare=False, repr=False)
    """What there is to list of each device, as of the last publication; see `entries.py`."""
