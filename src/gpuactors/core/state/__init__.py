"""The state of the node, as one frozen value of eight parts, and the values derived from it.

The parts about claims are without settings where these are not served (`NO_GPUS`, `NO_DOMAINS`).

Changed only by `step`. A value that is derived from several parts is a property of their state (`NodeState.index`,
`NodeState.assessments`): made once for this state when it is first read, or remembered from another state where the
parts are the same (`values/memo.py`). So no caller can get a value of another state, and no caller decides when it is
derived.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from gpuactors.core.assessment.assessments import assessments
from gpuactors.core.assessment.holding import IsOwn, holding_of
from gpuactors.core.assessment.inputs import holder_inputs
from gpuactors.core.devices.index import Index, index
from gpuactors.core.kinds.set_sources import known_sets
from gpuactors.core.kinds.sets import NO_SETS, DeviceSet, KnownSets, SetsOfSource, SetSource, switch_set
from gpuactors.core.state.claims import Claims
from gpuactors.core.state.domains import NO_DOMAINS, Domains
from gpuactors.core.state.gpus import NO_GPUS, Gpus
from gpuactors.core.state.offered import NOTHING_OFFERED, Offered
from gpuactors.core.state.partitions import Partitions
from gpuactors.core.values.dead_signs import DeadSigns
from gpuactors.core.values.device_spec import DeviceSpecs
from gpuactors.core.values.mediated import MediatedDevices
from gpuactors.core.values.model import (
    Call,
    DeviceId,
    DeviceKey,
    DeviceList,
    Functions,
    InspectedKey,
    Inspections,
    LastCall,
    Ledger,
    Orphan,
    PciAddress,
    PluginState,
    Polls,
    Release,
    Resolved,
    ResourceName,
    Role,
    Seen,
    Settings,
    Token,
    Transition,
    device_key,
)
from gpuactors.core.values.status import Assessment, Holding
from gpuactors.core.values.vgpu import CardTypes


class Host(Struct, frozen=True, gc=False):
    """The kernel's view of the node: sysfs, uevents, the use of the groups."""

    inspections: Inspections
    functions: Functions
    """The functions that are there, sorted by address. The mapping and each function stay the same object until an
    inspection finds something else, so that derived values need only a comparison by identity."""
    seen: Mapping[InspectedKey, Seen]
    """The last inspection of each function and mediated device. The key of one that is gone stays as long as the result
    of an older inspection may come back."""
    short: Mapping[InspectedKey, str]
    """Why one could not be inspected since, as a sentence: the daemon lacked resources, it has no fault."""
    scanned: bool
    """True if a first full scan has come back."""
    uevents: str
    """Why uevents are not received, as a sentence; empty while they are."""
    polls: Polls
    mediated: MediatedDevices = field(default_factory=dict)
    """The mediated devices that are there, sorted by key. The same objects until an inspection finds something else, as
    `functions`."""
    vgpu_types: Mapping[PciAddress, CardTypes] = field(default_factory=dict)
    """The names of the vGPU types of each physical card, by the physical function's address; see
    `host/vgpu_names.py`."""
    dead_signs: DeadSigns = field(default_factory=dict)
    """The remembered signs that functions are dead; see `host/dead_signs.py`."""
    sets: Mapping[SetSource, SetsOfSource] = field(default_factory=dict)
    """The sources of sets of devices that are read, with what was read last."""


class Kubelet(Struct, frozen=True, gc=False):
    """Kubelet's side: its socket, and which pod has which device by its ledger and by our own answers."""

    socket: str | None
    """The identity of the present kubelet.sock; None without one."""
    missing: str
    """Why there is no kubelet.sock, as a sentence."""
    ledger: Ledger
    pending_allocations: Mapping[tuple[ResourceName, DeviceId], float]
    """The devices granted by Allocate that kubelet's ledger does not list yet, and until when they count as
    allocated."""
    resolved: Mapping[tuple[ResourceName, DeviceId], Resolved]
    """The device of every name in kubelet's ledger or of a pending allocation, as far as it is known."""
    orphans: Mapping[DeviceKey, Orphan]
    foreign_sockets: tuple[str, ...] = ()
    """The sockets in kubelet's directory that are neither kubelet's nor ours."""
    ancestors: Mapping[DeviceKey, tuple[DeviceKey, ...]] = field(default_factory=dict)
    """The ancestors of each part of a device that has an owner and has gone, as last seen: a virtual function may be
    unmade while its pod has it."""
    releases: Mapping[DeviceKey, tuple[Release, ...]] = field(default_factory=dict)
    """The last releases of each device, oldest first; see `ledger/releases.py`. Nothing is decided by them."""
    compare_at: float = math.inf
    """When kubelet's list is read because of an odd observation; infinite without one."""


class Calls(Struct, frozen=True, gc=False):
    """Kubelet's calls, and the lists that must keep their devices because of them."""

    waiting: Mapping[Token, Call]
    no_removal_until: Mapping[ResourceName, float]
    """Until when a resource's list must not lose a device, because kubelet may be using it in a call's answer."""
    last: Mapping[DeviceKey, tuple[LastCall, ...]] = field(default_factory=dict)
    """The last answered call of each kind about each device, for the operator; nothing is decided by it."""


class Published(Struct, frozen=True, gc=False):
    """The device lists for kubelet, and the state of each resource's registration."""

    served: Mapping[ResourceName, frozenset[str]]
    """The resources that belong to gpuactors whatever is selected or named now: this daemon serves them, or an earlier
    one did by its state directory, and they have not retired since. For each the models (`10de:2330`) that had this
    name; empty if they are not known."""
    device_lists: Mapping[ResourceName, DeviceList]
    """The device list of each resource that has a plugin."""
    plugins: Mapping[ResourceName, PluginState]
    history: Mapping[DeviceKey, tuple[Transition, ...]]
    """The last published changes of each device, oldest first."""
    specs: DeviceSpecs | None = None
    """The CDI files that are to be there for the device plugin; None where it answers by device nodes, and before the
    first device list."""
    written: DeviceSpecs = field(default_factory=dict)
    """The CDI files that are there, by the last write or look."""
    unwritten: Mapping[ResourceName, str] = field(default_factory=dict)
    """Why a file could not be written, as a sentence."""
    specs_are_known: bool = False
    """Whether the directory of the CDI files has been written or looked at once."""


class Daemon(Struct, frozen=True, gc=False):
    """This process."""

    settings: Settings
    role: Role
    stopping: bool
    config_unused: str = ""
    """Why the configuration file is not the one in use, as a sentence; empty if it is, or is not read again."""


PARTS: Final = ("host", "kubelet", "calls", "published", "daemon", "gpus", "domains", "partitions")
"""The names of the parts of the state; its other fields are derived."""


class NodeState(Struct, frozen=True, dict=True):
    """The state of the node. Owned by the registry actor; changed by `step` only. It keeps the values derived from it
    (`dict`)."""

    host: Host
    kubelet: Kubelet
    calls: Calls
    published: Published
    daemon: Daemon
    gpus: Gpus = NO_GPUS
    """The claims of GPUs; without settings while DRA is off."""
    domains: Domains = NO_DOMAINS
    """The compute domains; without settings while they are off."""
    partitions: Partitions | None = None
    """The partitions of the NVLink fabric that gpuactors activates; None where it activates none."""
    offered: Offered = NOTHING_OFFERED
    """The devices offered to claims, derived from the rest; see `gpus/offer.py`. Empty before the first offer."""

    @property
    def all_claims(self) -> tuple[Claims, ...]:
        """The claims of each DRA driver that is on, in the order in which they are handled."""
        both = (self.gpus.claims, self.domains.claims)
        return tuple(claims for claims in both if claims.settings is not None)

    @property
    def serves_claims(self) -> bool:
        """True if a DRA driver is on."""
        return self.gpus.claims.settings is not None or self.domains.settings is not None

    @cached_property
    def index(self) -> Index:
        """The values derived from the node's functions, devices and owners; see `devices/index.py`."""
        host, kubelet, gpus, ledger = self.host, self.kubelet, self.gpus, self.kubelet.ledger
        return index(
            host.functions,
            host.mediated,
            self.daemon.settings.selectors,
            host.vgpu_types,
            self.daemon.settings.vgpu_types,
            host.polls.groups,
            host.polls.leaving,
            kubelet.resolved,
            ledger.entries,
            ledger.claims,
            ledger.unplaced,
            ledger.cdi,
            gpus.reserved,
            gpus.admin,
            gpus.ended,
            gpus.own,
            self.published.served.keys(),
            self.published.device_lists,
            kubelet.ancestors,
        )

    @cached_property
    def known_sets(self) -> KnownSets:
        """The sets of devices by all their sources; see `kinds/set_sources.py`."""
        return known_sets(self.host.sets, self.host.functions) if self.host.sets else NO_SETS

    @cached_property
    def sets(self) -> tuple[DeviceSet, ...]:
        """The sets of devices: those that their sources name, and the selected NVSwitches."""
        names, functions = self.index.names, self.host.functions
        switches = [key for a, f in functions.items() if f.is_nvswitch and (key := device_key(a)) in names]
        return (*self.known_sets.sets, *switch_set(switches))

    @cached_property
    def assessments(self) -> Mapping[DeviceKey, Assessment]:
        """The assessment of each device; see `assessment/assessments.py`."""
        ledger = self.kubelet.ledger
        return assessments(
            self.index,
            self.host.short,
            self.host.polls,
            self.kubelet.orphans,
            (ledger.read, ledger.problem),
            self.published.device_lists,
        )

    def holding(self, device: DeviceKey, resource: ResourceName, is_own: IsOwn) -> Holding | None:
        """Return the first holder of the device that is not the asking one; see `assessment/holding.py`."""
        ledger = self.kubelet.ledger
        read = ledger.read, ledger.problem
        inputs = holder_inputs(device, self.index, self.host.polls, self.kubelet.orphans, read)
        return holding_of(device, resource, inputs, is_own)


def with_inspections(state: NodeState, inspections: Inspections) -> NodeState:
    """Return `state` with these inspections."""
    return replace(state, host=replace(state.host, inspections=inspections))


def with_polls(state: NodeState, polls: Polls) -> NodeState:
    """Return `state` with these polls."""
    return replace(state, host=replace(state.host, polls=polls))


def with_ledger(state: NodeState, ledger: Ledger) -> NodeState:
    """Return `state` with this ledger."""
    return replace(state, kubelet=replace(state.kubelet, ledger=ledger))


def with_waiting(state: NodeState, waiting: Mapping[Token, Call]) -> NodeState:
    """Return `state` with these waiting calls."""
    return replace(state, calls=replace(state.calls, waiting=waiting))


def with_plugins(state: NodeState, plugins: Mapping[ResourceName, PluginState]) -> NodeState:
    """Return `state` with these registrations."""
    return replace(state, published=replace(state.published, plugins=plugins))
