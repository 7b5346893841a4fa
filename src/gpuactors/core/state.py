"""Everything that the daemon knows, as one frozen value of five parts, and what follows from it.

Changed by `step` alone. A part, and each value in it, stays the very same object until it changes: what follows from it
is derived once then, from what has changed, and carried along (`index.py`, `assessment/`, `entries.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

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
class Host:
    """What the kernel shows of the node: sysfs, uevents, the use of the groups."""

    inspections: Inspections
    facts: Mapping[PciAddress, Fact]
    scanned: bool
    """A first full scan has come back."""
    uevents: str
    """Why uevents are not heard, as a sentence; empty while they are."""
    polls: Polls


@dataclass(frozen=True, slots=True)
class Kubelet:
    """Kubelet's side: its socket, and which pod has what by its ledger and by our own answers."""

    socket: str | None
    """Identity of the kubelet.sock that is there now; None while there is none."""
    missing: str
    """Why there is none, as a sentence."""
    ledger: Ledger
    pending_allocations: Mapping[tuple[ResourceName, DeviceId], float]
    """Devices handed out by Allocate that kubelet's ledger does not list yet, and until when we believe in it."""
    resolved: Mapping[tuple[ResourceName, DeviceId], Resolved]
    """Every device that kubelet's ledger or a pending allocation names, if it is known which one is meant."""
    orphans: Mapping[PciAddress, Orphan]
    neighbours: tuple[str, ...] = ()
    """The sockets in kubelet's directory that are neither kubelet's nor ours."""
    compare_at: float = math.inf
    """When kubelet's list is to be read because something odd was seen."""


@dataclass(frozen=True, slots=True)
class Calls:
    """Kubelet's calls, and what they forbid meanwhile."""

    waiting: Mapping[Token, Call]
    no_removal_until: Mapping[ResourceName, float]
    """Until when a resource's list must not lose a device, because kubelet may be using it in a call's answer."""


@dataclass(frozen=True, slots=True)
class Published:
    """What kubelet is told, and where the registration of each resource stands."""

    served: Mapping[ResourceName, frozenset[str]]
    """Resources that are ours whatever is selected or named now: served by this daemon, or by one before it as its
    state directory says, and not retired since. To each the models (`10de:2330`) that were called so meanwhile; none
    if that is not known."""
    device_lists: Mapping[ResourceName, DeviceList]
    """Per resource that has a plugin."""
    plugins: Mapping[ResourceName, PluginState]
    history: Mapping[PciAddress, tuple[Transition, ...]]
    """The last changes of what was published of each device, oldest first."""


@dataclass(frozen=True, slots=True)
class Daemon:
    """This process."""

    settings: Settings
    role: Role
    stopping: bool


@dataclass(frozen=True, slots=True)
class NodeState:
    """Everything that the daemon knows. Owned by the registry actor; changed by `step` only."""

    host: Host
    kubelet: Kubelet
    calls: Calls
    published: Published
    daemon: Daemon
    index: Index = field(default=NO_INDEX, compare=False, repr=False)
    """What follows from the rest; see `index.py`."""
    assessments: Assessments = field(default=NO_ASSESSMENTS, compare=False, repr=False)
    """How each device is, which follows from the rest; see `assessment/`."""
    entries: Entries = field(default=NO_ENTRIES, compare=False, repr=False)
    """What there is to list of each device, as of the last publication; see `entries.py`."""


def with_inspections(state: NodeState, inspections: Inspections) -> NodeState:
    """`state` with these inspections."""
    return replace(state, host=replace(state.host, inspections=inspections))


def with_polls(state: NodeState, polls: Polls) -> NodeState:
    """`state` with these polls."""
    return replace(state, host=replace(state.host, polls=polls))


def with_ledger(state: NodeState, ledger: Ledger) -> NodeState:
    """`state` with this ledger."""
    return replace(state, kubelet=replace(state.kubelet, ledger=ledger))


def with_waiting(state: NodeState, waiting: Mapping[Token, Call]) -> NodeState:
    """`state` with these waiting calls."""
    return replace(state, calls=replace(state.calls, waiting=waiting))


def with_plugins(state: NodeState, plugins: Mapping[ResourceName, PluginState]) -> NodeState:
    """`state` with these registrations."""
    return replace(state, published=replace(state.published, plugins=plugins))
