"""Events, as values. Past tense: an event is something that an adaptor saw, never a request.

An event carries no callback, no channel and no exception. A hint ("something changed there") is an event as well, and
never a fact: it only makes the core request an inspection.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gpuactors.core.state.claims import OwedReturn, StoredEntry
from gpuactors.core.values.claim import (
    ActFault,
    BoundFunction,
    Claim,
    ClaimName,
    ClaimsOf,
    FirstDriver,
    LookFinding,
)
from gpuactors.core.values.domain import Clique, ComputeDomain, DomainUid, ImexFacts, NodeLabel
from gpuactors.core.values.model import (
    CachedAnswer,
    ClaimedDevice,
    DeviceId,
    GroupUse,
    LedgerEntry,
    LedgerFile,
    PciAddress,
    PciFunction,
    ResourceName,
    RunningKubelet,
    Token,
)
from gpuactors.core.values.slices import Publication

# --- the host ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HostChanged:
    """A uevent named this function or this IOMMU group (one of the two is set)."""

    address: PciAddress | None
    iommu_group: int | None
    cause: str
    """Action and subsystem of the uevent: `bind pci`."""


@dataclass(frozen=True, slots=True)
class UeventsOpened:
    """Uevents are received from now on. Earlier changes may have been missed."""


@dataclass(frozen=True, slots=True)
class UeventsLost:
    """Uevents were lost (ENOBUFS); reception continues."""

    reason: str


@dataclass(frozen=True, slots=True)
class UeventsUnavailable:
    """Uevents are unavailable: until they are received only scans find changes."""

    reason: str


@dataclass(frozen=True, slots=True)
class HostScanned:
    """The full scan number `inspection` came back: every selected or given function, companions in their groups
    included."""

    inspection: int
    functions: tuple[PciFunction, ...]


@dataclass(frozen=True, slots=True)
class ScanFailed:
    """The full scan number `inspection` failed; the known facts stay."""

    inspection: int
    reason: str


@dataclass(frozen=True, slots=True)
class FunctionInspected:
    """Inspection number `inspection` of `address` came back: the function itself, if it exists and is selected or
    given, and the other members of its IOMMU group."""

    inspection: int
    address: PciAddress
    functions: tuple[PciFunction, ...]


@dataclass(frozen=True, slots=True)
class InspectionFailed:
    """Inspection number `inspection` of `address` did not come back in time or failed as a whole."""

    inspection: int
    address: PciAddress
    reason: str
    shortage: bool = False
    """The daemon had no descriptors, memory or threads for the inspection: the known facts stay."""


@dataclass(frozen=True, slots=True)
class GroupsObserved:
    """Poll number `poll` came back: the use of every requested group. A group that could not be read at all is not in
    here."""

    poll: int
    uses: tuple[GroupUse, ...]


@dataclass(frozen=True, slots=True)
class SomeGroupsObserved:
    """A `GroupsObserved` of some groups only, without evidence of the others. A kind of its own, as the journal writes
    only the differences from the last event of a kind."""

    poll: int
    uses: tuple[GroupUse, ...]


# --- kubelet's ledger -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LedgerRead:
    """Read number `read` of kubelet's ledger came back: the entries of List and those of the ledger file. Which of them
    count is decided in `ledger/kubelet_startup.py`."""

    read: int
    kubelet: RunningKubelet | None
    """None if no kubelet runs: then there is no list, and only the file counts."""
    listed: tuple[LedgerEntry, ...]
    """The entries of List, sorted."""
    claims: tuple[ClaimedDevice, ...]
    names_end: str | None = None
    """The common end of the names of all pods in List, those without devices included: of a single pod its whole name;
    None if it has no pod. The names themselves change with every pod of the node."""
    healthy: Mapping[ResourceName, tuple[DeviceId, ...]] | None = None
    """Kubelet's own list: the healthy IDs of each requested resource, in the form of `listing.comparable`; a resource
    without a healthy device is not in here. None if kubelet did not list them."""
    file: LedgerFile | None = None
    """None if it could not be read. A read without a kubelet and without its file is `LedgerUnreadable`."""


@dataclass(frozen=True, slots=True)
class LedgerUnreadable:
    """Read number `read` failed: PodResources did not answer, and kubelet's file does not count for owners while
    kubelet runs, or could not be read either."""

    read: int
    reason: str
    cached: tuple[CachedAnswer, ...] | None = None
    """See `LedgerFile.cached`; None if the file could not be read: the answers to Allocate are there, whether
    PodResources answers or not."""
    damaged: str = ""
    """See `LedgerFile.damaged`; without meaning if `cached` is None."""


# --- kubelet ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KubeletAppeared:
    """kubelet.sock is there; `socket` is its identity, so that a replaced one is seen as new."""

    socket: str


@dataclass(frozen=True, slots=True)
class KubeletGone:
    """kubelet.sock is not there; `reason` names what is missing, and where."""

    reason: str


@dataclass(frozen=True, slots=True)
class NeighboursSeen:
    """The other processes' sockets beside kubelet's are these now; one may have been replaced under its name."""

    sockets: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SocketBound:
    """The plugin's endpoint serves (answer to bind order `bind`)."""

    resource: ResourceName
    bind: int


@dataclass(frozen=True, slots=True)
class SocketFailed:
    """The plugin's endpoint could not be made, or failed (answer to bind order `bind`)."""

    resource: ResourceName
    bind: int
    reason: str


@dataclass(frozen=True, slots=True)
class RegisterSucceeded:
    """Kubelet answered Register (order `register`) without an error."""

    resource: ResourceName
    register: int


@dataclass(frozen=True, slots=True)
class RegisterFailed:
    """Register (order `register`) failed; kubelet may have dropped a running client as well."""

    resource: ResourceName
    register: int
    reason: str


@dataclass(frozen=True, slots=True)
class StreamOpened:
    """A client, usually kubelet, opened ListAndWatch."""

    resource: ResourceName
    stream: int


@dataclass(frozen=True, slots=True)
class StreamEnded:
    """That stream has ended, on either side."""

    resource: ResourceName
    stream: int


# --- calls ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AllocateAsked:
    """Allocate; one tuple of device IDs per container."""

    token: Token
    resource: ResourceName
    requests: tuple[tuple[DeviceId, ...], ...]


@dataclass(frozen=True, slots=True)
class PreStartAsked:
    """PreStartContainer, before every start of a container."""

    token: Token
    resource: ResourceName
    devices: tuple[DeviceId, ...]


@dataclass(frozen=True, slots=True)
class PreferenceRequest:
    """One container's part of GetPreferredAllocation. The lists come in no order."""

    available: tuple[DeviceId, ...]
    must_include: tuple[DeviceId, ...]
    size: int


@dataclass(frozen=True, slots=True)
class PreferenceAsked:
    """GetPreferredAllocation; one request per container."""

    token: Token
    resource: ResourceName
    requests: tuple[PreferenceRequest, ...]


@dataclass(frozen=True, slots=True)
class CallAbandoned:
    """The caller of an unanswered call has gone."""

    token: Token


# --- the daemon -------------------------------------------------------------------------------------------


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


# --- claims (DRA) -----------------------------------------------------------------------------------------
# `of` says which claims an event is about: numbers, calls and the checkpoint are of one set each.


@dataclass(frozen=True, slots=True)
class PrepareAsked:
    """NodePrepareResources for one claim: a call may name several, and each is an event of its own."""

    token: Token
    claim: ClaimName
    of: ClaimsOf


@dataclass(frozen=True, slots=True)
class UnprepareAsked:
    """NodeUnprepareResources for one claim."""

    token: Token
    claim: ClaimName
    of: ClaimsOf


@dataclass(frozen=True, slots=True)
class ClaimRead:
    """The API server has the claim, by the UID that was asked for."""

    number: int
    claim: Claim
    of: ClaimsOf


@dataclass(frozen=True, slots=True)
class ClaimMissing:
    """The API server has no claim of that name, or one with another UID."""

    number: int
    reason: str
    of: ClaimsOf


@dataclass(frozen=True, slots=True)
class ClaimUnreadable:
    """The API server did not answer, or refused to: nothing is known of the claim."""

    number: int
    reason: str
    of: ClaimsOf


@dataclass(frozen=True, slots=True)
class CheckpointRead:
    """The checkpoint of this boot was read; empty if there is none, or if it is of another boot."""

    entries: tuple[StoredEntry, ...] = ()
    """Those that own devices, in the order of their arrival."""
    first_drivers: tuple[FirstDriver, ...] = ()
    """Of the functions whose present driver may be of our making."""
    warning: str = ""
    """A sentence that names what is missing of it: it was damaged, and has been set aside."""
    load: int = 2
    """Which read it was, as `ClaimsWanted.load`. One that was begun before a predecessor handed over does not count
    after that."""
    of: ClaimsOf = field(kw_only=True)
    owed: tuple[OwedReturn, ...] = ()
    """The returns that are owed."""


@dataclass(frozen=True, slots=True)
class CheckpointRefused:
    """It may not be used: a newer version has written it, for instance. Nothing may be touched."""

    reason: str
    of: ClaimsOf
    entries: tuple[StoredEntry, ...] = ()
    """The claims whose files name GPUs: they have them."""


@dataclass(frozen=True, slots=True)
class CheckpointWritten:
    """Every checkpoint up to this number is on disk, and stays there when the power is cut."""

    number: int
    of: ClaimsOf


@dataclass(frozen=True, slots=True)
class CheckpointUnwritten:
    """The checkpoint with this number could not be written. It is tried again."""

    number: int
    reason: str
    of: ClaimsOf


@dataclass(frozen=True, slots=True)
class ActDone:
    """The act with this number reached its goal."""

    number: int
    bound: tuple[BoundFunction, ...] = ()
    """The drivers of a device's functions now; of an act on files none."""
    of: ClaimsOf = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class ActFailed:
    """The act with this number did not reach its goal. What it touched stays as it is."""

    number: int
    reason: str
    fault: ActFault | None = None
    """Of an act on a device."""
    of: ClaimsOf = field(kw_only=True)
    moved: tuple[BoundFunction, ...] = ()
    """The functions whose driver it has changed before it failed, as they are now."""


@dataclass(frozen=True, slots=True)
class GpusLooked:
    """The look with this number has come back, with a finding for each of its devices."""

    number: int
    findings: tuple[LookFinding, ...]


# --- compute domains --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LabelRead:
    """The read with this number has seen the label of our Node."""

    number: int
    label: NodeLabel


@dataclass(frozen=True, slots=True)
class LabelUnreadable:
    """The read with this number failed."""

    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class LabelPatched:
    """The API server has made the patch with this number."""

    number: int


@dataclass(frozen=True, slots=True)
class LabelConflicted:
    """The API server has refused the patch with this number, as the label was not as the patch expects it (422)."""

    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class LabelFailed:
    """The patch with this number failed; whether it was made is not known."""

    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class NodeTouched:
    """Our Node has changed: a hint that its label may have."""


@dataclass(frozen=True, slots=True)
class DomainRead:
    """The read with this number came back: the ComputeDomain with this UID, and its clique on this node's fabric."""

    number: int
    uid: DomainUid
    domain: ComputeDomain | None
    """None: there is none with this UID."""
    clique: Clique | None = None
    """None: there is none, or the node is on no fabric."""


@dataclass(frozen=True, slots=True)
class DomainUnreadable:
    """The read with this number failed: nothing is known of the domain."""

    number: int
    uid: DomainUid
    reason: str


@dataclass(frozen=True, slots=True)
class DomainsTouched:
    """A ComputeDomain or a clique has changed: a hint."""


@dataclass(frozen=True, slots=True)
class ImexRead:
    """The read with this number came back: what the host says of IMEX."""

    number: int
    facts: ImexFacts


@dataclass(frozen=True, slots=True)
class ImexUnreadable:
    """The read with this number failed."""

    number: int
    reason: str


DomainEvent = (
    LabelRead
    | LabelUnreadable
    | LabelPatched
    | LabelConflicted
    | LabelFailed
    | NodeTouched
    | DomainRead
    | DomainUnreadable
    | DomainsTouched
    | ImexRead
    | ImexUnreadable
)
HostEvent = (
    HostChanged
    | UeventsOpened
    | UeventsLost
    | UeventsUnavailable
    | HostScanned
    | ScanFailed
    | FunctionInspected
    | InspectionFailed
)
UsageEvent = GroupsObserved | SomeGroupsObserved
LedgerEvent = LedgerRead | LedgerUnreadable
KubeletEvent = (
    KubeletAppeared
    | KubeletGone
    | NeighboursSeen
    | SocketBound
    | SocketFailed
    | RegisterSucceeded
    | RegisterFailed
    | StreamOpened
    | StreamEnded
)
CallEvent = AllocateAsked | PreStartAsked | PreferenceAsked | CallAbandoned


@dataclass(frozen=True, slots=True)
class FilesTouched:
    """Somebody has touched the CDI files of our claims, or their directory: one may be missing now."""

    of: ClaimsOf


@dataclass(frozen=True, slots=True)
class SlicesPublished:
    """The publisher of our ResourceSlices knows something else than before."""

    publication: Publication
    of: ClaimsOf


ClaimEvent = (
    PrepareAsked
    | UnprepareAsked
    | ClaimRead
    | ClaimMissing
    | ClaimUnreadable
    | CheckpointRead
    | CheckpointRefused
    | CheckpointWritten
    | CheckpointUnwritten
    | ActDone
    | ActFailed
    | FilesTouched
    | SlicesPublished
)
DaemonEvent = PredecessorGone | HandOverRequested | SuccessorLost | ShutdownRequested
Event = (
    HostEvent
    | UsageEvent
    | LedgerEvent
    | KubeletEvent
    | CallEvent
    | ClaimEvent
    | GpusLooked
    | DomainEvent
    | DaemonEvent
    | Ticked
)
