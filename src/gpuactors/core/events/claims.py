"""Claims (DRA): calls, reads, checkpoints, acts and slices.

`of` says which claims an event is about: numbers, calls and the checkpoint are of one set each.
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
    """NodePrepareResources for one claim: a call may name several, and each is an event of its own."""

    token: Token
    claim: ClaimName
    of: ClaimsOf


class UnprepareAsked(Struct, frozen=True, gc=False):
    """NodeUnprepareResources for one claim."""

    token: Token
    claim: ClaimName
    of: ClaimsOf


class ClaimRead(Struct, frozen=True, gc=False):
    """The read with this number has an answer: the claim, by the UID that was asked for. If it failed, nothing is known
    of the claim."""

    number: int
    claim: Claim | Failure
    of: ClaimsOf
    missing: bool = False
    """The API server has no claim of that name, or one with another UID."""
    retry_in_s: float = limits.CLAIM_READ_RETRY_S
    """When a read that failed is to be tried again. Each claim's is another one, and none is before the time that the
    server asked for."""


class OfDriver(Struct, frozen=True, gc=False, kw_only=True):
    """An event of the claims of one driver."""

    of: ClaimsOf


class CheckpointRead(OfDriver, frozen=True, gc=False):
    """The checkpoint of this boot was read; empty if there is none, or if it is of another boot."""

    entries: tuple[StoredEntry, ...] = ()
    """Those that own devices, in the order of their arrival."""
    original_drivers: tuple[OriginalDriver, ...] = ()
    """Of the functions whose present driver may be of our making."""
    warning: str = ""
    """A sentence that names what is missing of it: it was damaged, and has been set aside."""
    load: int = 2
    """The number of the read (`ClaimsWanted.load`). A read that began before the predecessor handed over is not used
    after that."""
    owed: tuple[OwedReturn, ...] = ()
    """The returns that are owed."""
    is_lost: bool = False
    """No checkpoint of this boot names the claims: the entries are those of files that were found."""
    earlier_models: ClaimedModels = field(default_factory=dict)
    """The model of each device of the claims of earlier boots."""


class CheckpointRefused(Struct, frozen=True, gc=False):
    """It may not be used: a newer version has written it, for instance. Nothing may be touched."""

    reason: str
    of: ClaimsOf
    entries: tuple[StoredEntry, ...] = ()
    """The claims whose files name GPUs: they have them."""


class CheckpointWritten(Struct, frozen=True, gc=False):
    """Every checkpoint up to this number is on disk, and stays there when the power is cut. If the write failed, it is
    tried again."""

    number: int
    of: ClaimsOf
    failure: Failure | None = None


class ActDone(OfDriver, frozen=True, gc=False):
    """The act with this number reached its goal."""

    number: int
    bound: tuple[BoundFunction, ...] = ()
    """The drivers of a device's functions now; of an act on files none."""


class ActFailed(OfDriver, frozen=True, gc=False):
    """The act with this number did not reach its goal. Its changes stay."""

    number: int
    reason: str
    fault: ActFault | None = None
    """Of an act on a device."""
    moved: tuple[BoundFunction, ...] = ()
    """The functions whose driver it has changed before it failed, as they are now."""


class FitnessChecked(Struct, frozen=True, gc=False):
    """The fitness check with this number has come back, with a finding for each of its devices."""

    number: int
    findings: tuple[FitnessFinding, ...]


class FilesTouched(Struct, frozen=True, gc=False):
    """Somebody has touched the CDI files of our claims, or their directory: one may be missing now. So has this daemon
    itself, for each claim."""

    of: ClaimsOf
    claims: tuple[ClaimUid, ...] | None = None
    """Those whose files they are, sorted; None: it may be each."""


class SlicesPublished(Struct, frozen=True, gc=False):
    """The publisher of our ResourceSlices knows something else than before."""

    publication: Publication
    of: ClaimsOf


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
