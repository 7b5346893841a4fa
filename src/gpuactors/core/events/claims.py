"""Claims (DRA): calls, reads, checkpoints, acts and slices.

`driver_kind` says which claims an event is about: numbers, calls and the checkpoint are of one set each.
"""

from __future__ import annotations

from msgspec import Struct, field

from gpuactors import limits
from gpuactors.core.requests import Failure
from gpuactors.core.state.claims import OwedReturn, StoredEntry
from gpuactors.core.values.claim import (
    ActFault,
    BoundFunction,
    Claim,
    ClaimedModels,
    ClaimName,
    ClaimsOf,
    ClaimUid,
    FitnessFinding,
    OriginalDriver,
)
from gpuactors.core.values.model import Token
from gpuactors.core.values.slices import Publication


class PrepareAsked(Struct, frozen=True, gc=False):
    """NodePrepareResources for one claim. A call may name several claims: each is an event of its own."""

    token: Token
    claim: ClaimName
    driver_kind: ClaimsOf


class UnprepareAsked(Struct, frozen=True, gc=False):
    """NodeUnprepareResources for one claim."""

    token: Token
    claim: ClaimName
    driver_kind: ClaimsOf


class ClaimRead(Struct, frozen=True, gc=False):
    """The answer to the read with this number: the claim, by the requested UID. A failure says nothing about the
    claim."""

    number: int
    claim: Claim | Failure
    driver_kind: ClaimsOf
    missing: bool = False
    """True if the API server has no claim of that name, or one with another UID."""
    retry_in_s: float = limits.CLAIM_READ_RETRY_S
    """The wait before a failed read is repeated, in seconds: different for each claim, and not shorter than the server
    asked for."""


class OfDriver(Struct, frozen=True, gc=False, kw_only=True):
    """An event of the claims of one driver."""

    driver_kind: ClaimsOf


class CheckpointRead(OfDriver, frozen=True, gc=False):
    """The checkpoint of this boot was read; empty if there is none, or if it is of another boot."""

    entries: tuple[StoredEntry, ...] = ()
    """The claims that own devices, in the order of their arrival."""
    original_drivers: tuple[OriginalDriver, ...] = ()
    """The original drivers of functions that gpuactors may have bound."""
    warning: str = ""
    """The sentence about what a damaged checkpoint lacks, which was quarantined; empty if it was whole."""
    load: int = 2
    """The number of the read (`DiskWanted.load`). A read that began before the predecessor handed over is not used
    after that."""
    owed: tuple[OwedReturn, ...] = ()
    """The returns that are owed."""
    is_lost: bool = False
    """True if no checkpoint of this boot names the claims: the entries are from files that were found."""
    earlier_models: ClaimedModels = field(default_factory=dict)
    """The model of each device of the claims of earlier boots."""


class CheckpointRefused(Struct, frozen=True, gc=False):
    """The checkpoint cannot be used, for instance because a newer version has written it. No claim is touched."""

    reason: str
    driver_kind: ClaimsOf
    entries: tuple[StoredEntry, ...] = ()
    """The claims whose files name GPUs: these GPUs are theirs."""


class CheckpointWritten(Struct, frozen=True, gc=False):
    """Every checkpoint up to this number is on disk, and survives a power failure. A failed write is repeated."""

    number: int
    driver_kind: ClaimsOf
    failure: Failure | None = None


class ActDone(OfDriver, frozen=True, gc=False):
    """The act with this number reached its goal."""

    number: int
    bound: tuple[BoundFunction, ...] = ()
    """The present drivers of a device's functions; empty for an act on files."""


class ActFailed(OfDriver, frozen=True, gc=False):
    """The act with this number failed. Its changes stay."""

    number: int
    reason: str
    fault: ActFault | None = None
    """The kind of fault; None for an act on files."""
    moved: tuple[BoundFunction, ...] = ()
    """The functions whose driver it changed before it failed, as they are now."""


class FitnessChecked(Struct, frozen=True, gc=False):
    """The fitness check with this number came back, with a finding for each of its devices."""

    number: int
    findings: tuple[FitnessFinding, ...]


class FilesTouched(Struct, frozen=True, gc=False):
    """The CDI files of the claims, or their directory, were touched: a file may be missing. This daemon touches them as
    well, for each claim."""

    driver_kind: ClaimsOf
    claims: tuple[ClaimUid, ...] | None = None
    """The claims whose files these are, sorted; None if any claim's may be."""


class SlicesPublished(Struct, frozen=True, gc=False):
    """The state of the published ResourceSlices has changed."""

    publication: Publication
    driver_kind: ClaimsOf


ClaimEvent = (
    PrepareAsked
    | UnprepareAsked
    | ClaimRead
    | CheckpointRead
    | CheckpointRefused
    | CheckpointWritten
    | ActDone
    | ActFailed
    | FilesTouched
    | SlicesPublished
)
