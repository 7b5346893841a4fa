"""The claims part of the node's state: an entry per claim, the calls that wait for one, and what is on disk of it.

Frozen values. Changed by `claims/machine.py` only, and an entry's state by `values/claim_states.py` only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final, TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

from gpuactors.core.values.cause import Cause
from gpuactors.core.values.claim import (
    BoundFunction,
    BoundFunctions,
    Claim,
    ClaimedModels,
    ClaimName,
    ClaimUid,
    OriginalDriver,
    PreparedDevice,
)
from gpuactors.core.values.claim_states import ENDED, OWNING, ClaimState
from gpuactors.core.values.domain import ClaimedDomain, DomainConfig
from gpuactors.core.values.model import DeviceKey, Role, Token, device_key
from gpuactors.core.values.slices import Publication
from gpuactors.core.values.status import Reason

FILES: Final = "files"
"""The key of the act on a claim's files, beside the addresses of its devices."""

AWAITED: Final = "awaited"
"""The key of an act that others carry out: it is done when the state says so (`Claiming.unmet_prerequisite`)."""


class ClaimedGpu(Struct, frozen=True, gc=False):
    """One device that a claim has for itself, as it was when it was reserved."""

    key: DeviceKey
    functions: tuple[OriginalDriver, ...]
    """The device and its companions, sorted by address, each with the driver that it is returned to."""
    keep_on_vfio: str = ""
    """Why it stays on its vfio driver when the claim ends, as a sentence; empty if it is returned."""
    model: str = ""
    """The model of a device that no act binds (`Device.model`); empty for any other device, whose `functions` have it,
    and if unknown."""
    group: int | None = None
    """The IOMMU group of a mediated device, whose node its files name: it gets another one when it is made again."""

    @property
    def owned_keys(self) -> set[DeviceKey]:
        """The keys of the device and of each of these functions: its owner has them all."""
        return {self.key, *(device_key(function.address) for function in self.functions)}


def one_of_each_group(gpus: Iterable[ClaimedGpu]) -> tuple[ClaimedGpu, ...]:
    """Return one of the claim's devices in each IOMMU group, as one act binds all of them."""
    by_functions: dict[tuple[OriginalDriver, ...], ClaimedGpu] = {}
    for gpu in gpus:
        by_functions.setdefault(gpu.functions, gpu)
    return tuple(by_functions.values())


class GpuReservation(Struct, frozen=True, gc=False, tag="gpus"):
    """The GPUs that a claim has reserved, and how acts have left them."""

    gpus: tuple[ClaimedGpu, ...] = ()
    """The GPUs that it has for itself: none with admin access."""
    bound: BoundFunctions = field(default_factory=dict)
    """The driver of each function of these, as an act last saw it."""

    @property
    def is_unplaced(self) -> bool:
        """True if it was restored from the claim's files: where the devices were when these were written is not
        known."""
        models = [model for gpu in self.gpus for model in (gpu.model, *(f.ids for f in gpu.functions))]
        return bool(models) and not any(models) and not self.bound


class DomainReservation(Struct, frozen=True, gc=False, tag="domain"):
    """The compute domain that a claim is for, and its devices that the claim has reserved."""

    config: DomainConfig | None = None
    """The claim's configuration, decoded once (`Claiming.with_claim`); None before it has been read."""
    domain: ClaimedDomain | None = None
    """The domain and the reserved devices; None before they are reserved."""


Reservation = GpuReservation | DomainReservation
"""The reservation of a claim, by the kind of its devices."""


class ClaimRecord(Struct, frozen=True, gc=False):
    """One claim on this node, as far as the daemon knows it."""

    name: ClaimName
    state: ClaimState
    order: int
    """The order of arrival: of two claims that wait for a device the smaller one came first."""
    since: int = 0
    """The last number issued before the claim was read: only later inspections and polls are used for it."""
    since_at: float = 0.0
    """When that was, in seconds of the events' clock."""
    claim: Claim | None = None
    """The claim as it was read from the API server; None before."""
    reservation: Reservation | None = None
    """The reservation of the claim; None before that is known, and when nothing is left of it."""
    intent: int = 0
    """The number of the checkpoint that has the present state."""
    acts: Mapping[str, int] = field(default_factory=dict)
    """The requested acts, with their numbers: by a device's address, or FILES."""
    has_files: bool = False
    """Its files may exist: they were requested after their last removal. They name the nodes of
    `GpuReservation.bound`."""
    given: tuple[PreparedDevice, ...] = ()
    """The answer of NVIDIA's driver to the prepare of a claim that was taken over from it."""
    unplaced: tuple[str, ...] = ()
    """The names of the devices of such a claim whose PCI address is unknown."""
    why: Reason | None = None
    """Why it makes no progress: the last act or read that failed, or the owner that it waits for."""
    is_outdated: bool = False
    """A pod had one of its devices: they are read again before the claim gets them (`Conflict.outdates`)."""
    broken: str = ""
    """Why it is quarantined, as a sentence: the table lacks a transition, which is a bug; empty if it is not. A call
    about it is another try."""
    retry_at: float = math.inf
    """When a failed act or read is tried again, or a tombstone is forgotten."""
    collect_at: float = math.inf
    """When the API server is asked whether the claim still exists, as kubelet lists it for no pod."""
    missing: int = 0
    """The number of reads in a row in which the API server had no claim of this UID."""
    changed_at: float = 0.0
    """When it came to its present state, in seconds of the events' clock; of a claim from the checkpoint, when that
    was read."""
    pending_since: float = math.inf
    """When it last left a state of `RESTING`, or was first known, on the same clock; infinity while it is in one. A
    claim whose prepare fails again and again is in several states by turns, and has one such time."""

    @property
    def is_left(self) -> bool:
        """True if only a directory is left of it that its container had mounted, and that cannot be removed."""
        why = self.why
        return self.state is ClaimState.RELEASING and why is not None and why.cause is Cause.DIRECTORY_LEFT

    @property
    def is_unread(self) -> bool:
        """True if it was found out without the checkpoint, and has not been read from the API server since: what it
        asks for is not known."""
        return self.claim is None and self.state in (ClaimState.STOPPED, ClaimState.DRIFTED)

    @property
    def is_unanswered(self) -> bool:
        """True if the API server has not answered yet whether it has the claim."""
        return self.is_unread and self.why is not None and self.why.cause is Cause.API_SERVER_FAILED

    @property
    def has_unplaced_files(self) -> bool:
        """True if it was restored from its files, without a checkpoint: where its devices were when they were
        written is not known, and a number in them may be another tenant's by now."""
        return self.has_files and gpus_of(self).is_unplaced

    @property
    def problem(self) -> str:
        """Why it makes no progress, as a sentence; empty if no reason is known."""
        return self.why.message if self.why is not None else ""


class StoredEntry(Struct, frozen=True, gc=False):
    """The part of an entry that is on disk: how far an act came is not known to the daemon that reads it."""

    name: ClaimName
    state: ClaimState
    """RESERVED, PREPARED, TAKEN_OVER or RELEASING."""
    claim: Claim | None
    reservation: Reservation | None
    given: tuple[PreparedDevice, ...] = ()
    """The same as `ClaimRecord.given`."""
    unplaced: tuple[str, ...] = ()
    """The same as `ClaimRecord.unplaced`."""


_NO_GPUS: Final = GpuReservation()
_NO_DOMAIN: Final = DomainReservation()


def gpus_of(record: ClaimRecord | StoredEntry) -> GpuReservation:
    """Return the claim's reservation of GPUs; an empty one if it has none."""
    return record.reservation if isinstance(record.reservation, GpuReservation) else _NO_GPUS


def domain_of(record: ClaimRecord | StoredEntry) -> DomainReservation:
    """Return the claim's reservation of a compute domain; an empty one if it has none."""
    return record.reservation if isinstance(record.reservation, DomainReservation) else _NO_DOMAIN


R = TypeVar("R", ClaimRecord, StoredEntry)


def with_gpus(record: R, gpus: Iterable[ClaimedGpu]) -> R:
    """Replace the GPUs that the claim has for itself."""
    return replace(record, reservation=replace(gpus_of(record), gpus=tuple(gpus)))


def with_bound(record: ClaimRecord, bound: Iterable[BoundFunction]) -> ClaimRecord:
    """Record what an act has last seen of these functions."""
    if not (seen := {b.address: b for b in bound}):
        return record
    own = gpus_of(record)
    return replace(record, reservation=replace(own, bound={**own.bound, **seen}))


class OwedReturn(Struct, frozen=True, gc=False):
    """A device of an ended claim that gpuactors left on vfio because its original driver was not loaded."""

    gpu: ClaimedGpu
    claim: ClaimName
    reason: str = ""
    """Why it has not been returned yet, as a sentence; empty if that is not known."""
    act: int = 0
    """The number of the act that returns it; 0 while none is under way."""
    retry_at: float = 0.0
    """When the return is tried next."""


class ClaimCall(Struct, frozen=True, gc=False):
    """A prepare or unprepare of one claim that waits for its answer."""

    uid: ClaimUid
    prepares: bool
    deadline: float


class ClaimSettings(Struct, frozen=True, gc=False):
    """The settings of one DRA driver."""

    driver: str
    """The name of the DRA driver: `gpu.nvidia.com`."""
    pool: str
    """The name of the pool of its devices: the node's name."""
    side_by_side: bool = False
    """The driver's sockets are named after this instance, so that a successor can serve beside it."""


class Claims(Struct, frozen=True, gc=False):
    """The claims of one DRA driver on this node. Numbers of reads, acts and checkpoints come from one counter and
    only grow."""

    settings: ClaimSettings | None = None
    """The driver's settings; None while DRA is off."""
    loaded: bool = False
    """The checkpoint has been read: until then it is not known which devices belong to claims."""
    lost_since: int | None = None
    """The last number issued when the checkpoint was found lost: kubelet's next list restores the claims that it
    names. None if nothing is missing."""
    unserved: str = ""
    """Why no claim is served, as a sentence; empty if claims are served."""
    entries: Mapping[ClaimUid, ClaimRecord] = field(default_factory=dict)
    """The record of each claim, in the order of arrival."""
    calls: Mapping[Token, ClaimCall] = field(default_factory=dict)
    last: int = 0
    """The last issued number."""
    checkpoint: int = 0
    """The number of the newest content for the checkpoint; 0 before the first."""
    durable: int = 0
    """The number up to which every checkpoint is on disk."""
    unwritten: str = ""
    """Why the checkpoint cannot be written, as a sentence; empty while it can."""
    reads: Mapping[ClaimUid, int] = field(default_factory=dict)
    """The numbers of the outstanding reads from the API server."""
    publication: Publication | None = None
    """The state of the published devices; None before the first report."""
    earlier_models: ClaimedModels = field(default_factory=dict)
    """The models of the devices of earlier boots' claims, until these are prepared or unprepared in this boot."""
    relays_until: float = -math.inf
    """Until when the sockets stay after a hand-over, to pass calls on to the successor."""

    @property
    def is_known(self) -> bool:
        """True if it is known which devices belong to claims."""
        return self.settings is None or self.loaded


def load_of(role: Role) -> int:
    """Return how many times a daemon in this role must have read the checkpoint: again when its predecessor has
    handed over."""
    return 1 if role is Role.TAKING_OVER else 2


NO_CLAIMS: Final = Claims()
"""The claims of a node without claims."""


def with_entry(claims: Claims, entry: ClaimRecord) -> Claims:
    """Replace the record of one claim; remove it if its state is ABSENT."""
    uid = entry.name.uid
    if uid in claims.earlier_models and (entry.state in OWNING or entry.state in ENDED):
        # What it has, if anything, is in its entry.
        earlier = {u: models for u, models in claims.earlier_models.items() if u != uid}
        claims = replace(claims, earlier_models=earlier)
    if entry.state is ClaimState.ABSENT:
        return replace(claims, entries={u: e for u, e in claims.entries.items() if u != uid})
    return replace(claims, entries={**claims.entries, uid: entry})
