"""The start of a daemon: the checkpoint as it was found, the files of the claims, and the checkpoint that NVIDIA's
driver has left.

A checkpoint is lost if it is damaged, or if there is none beside the files of claims. Then the CDI and metadata files
name the devices of the claims. Files of no claim are to be removed, as a daemon that was killed may have left them. So
are metadata files without the CDI file of the devices, which is written last, and is gone after a reboot: no container
can be started with what they are left of.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from gpuactors.core.claims.checkpoint import Checkpoint, MalformedError, Origin, Restored, Theirs
from gpuactors.core.claims.files import FoundFiles
from gpuactors.core.claims.outputs import CheckpointWanted
from gpuactors.core.claims.stored import decoded_entry, decoded_return, encoded_entry, encoded_return
from gpuactors.core.kinds.kind import Act
from gpuactors.core.kinds.table import key_of, kind_named
from gpuactors.core.state.claims import ClaimedGpu, GpuReservation, OwedReturn, StoredEntry, domain_of
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.claim import ClaimsOf, ClaimUid, Json, OriginalDriver
from gpuactors.core.values.claim_states import ClaimState
from gpuactors.core.values.domain import DomainUid
from gpuactors.core.values.model import function_address
from gpuactors.core.values.status import Reason


class Restoration(Struct, frozen=True, gc=False):
    """The entries to go on with, the warning to log, and the files to remove."""

    entries: tuple[StoredEntry, ...]
    original_drivers: tuple[OriginalDriver, ...]
    owed: tuple[OwedReturn, ...]
    warning: str
    """The parts that are missing, as a sentence; empty if none are."""
    is_lost: bool
    """True if no checkpoint of this boot names the claims: kubelet may list more of them (`recovery.py`)."""
    kept: Checkpoint
    """The base of the file's next content (`next_content`)."""
    stray: tuple[ClaimUid, ...]
    """The claims whose files are to be removed."""
    clear_mounted: bool
    """True if directories that containers mount are to be removed."""
    mounted: frozenset[DomainUid] | None
    """The domains whose directories stay, as do those that a CDI file names. None if none stays, as no container
    runs."""


def restoration(
    restored: Restored, files: Mapping[ClaimUid, FoundFiles], kind: ClaimsOf, *, owns: bool
) -> Restoration:
    """Decide which entries are valid. `owns`: this daemon serves from now on. Until then another one does, whose newest
    claim may be in its files and not yet in what was read: nothing is removed.

    Where the checkpoint is of another boot, no container runs that has mounted a directory of a claim, and nobody knows
    whose these are: all are removed. Where NVIDIA's driver has left a checkpoint, its directories are in the same
    place, and those of domains that ended under it stay until a sweep that it does not make any more: they are removed
    if both checkpoints say for which domains this node has a claim.
    """
    checkpoint, drivers = restored.checkpoint, tuple(restored.checkpoint.original_drivers.values())
    lost = restored.origin is Origin.CORRUPT or (restored.origin is Origin.NONE and bool(files))
    try:
        stored = {**checkpoint.claims, **checkpoint.taken_over}
        entries = tuple(decoded_entry(uid, content) for uid, content in stored.items())
        owed = tuple(map(decoded_return, checkpoint.owed))
    except MalformedError as exc:
        lost = True
        warning = f"an entry of the checkpoint is invalid ({exc}), so all were restored from the CDI files"
    else:
        warning = restored.sentence if lost else ""
    if lost:
        whole = {uid: of_claim for uid, of_claim in files.items() if of_claim.devices is not None}
        claimed = {*whole}
        entries, unknown = entries_of(whole, kind)
        owed = ()
        checkpoint = replace(checkpoint, claims={}, owed=(), taken_over={}, taken_from="")
        if unknown:
            warning += (
                f"; the owner of the files of {', '.join(unknown)} cannot be read, so they are left in place"
            )
    else:
        claimed = {entry.name.uid for entry in entries}
    entries, checkpoint = _taken_over(entries, checkpoint, restored.theirs)
    is_over = restored.origin is Origin.OTHER_BOOT and not (restored.theirs and restored.theirs.claims)
    says_all = kind is ClaimsOf.DOMAINS and restored.theirs is not None and not lost
    domains = [own.uid for entry in entries if (own := domain_of(entry).domain) is not None]
    return Restoration(
        entries=entries,
        original_drivers=drivers,
        owed=owed,
        warning=warning,
        is_lost=lost or restored.origin is Origin.NONE,
        kept=checkpoint,
        stray=tuple(uid for uid in files if uid not in claimed) if owns else (),
        clear_mounted=owns and (is_over or (says_all and len(domains) == len(entries))),
        mounted=None if is_over else frozenset(domains),
    )


def _taken_over(
    entries: tuple[StoredEntry, ...], checkpoint: Checkpoint, theirs: Theirs | None
) -> tuple[tuple[StoredEntry, ...], Checkpoint]:
    """Add the claims that NVIDIA's driver has prepared: each state of its file counts once, as the file goes on naming
    those that have ended here since."""
    if theirs is None or theirs.checksum == checkpoint.taken_from:
        return entries, checkpoint
    uids = {entry.name.uid for entry in entries}
    taken = tuple(entry for entry in theirs.claims if entry.name.uid not in uids)
    return (*entries, *taken), replace(checkpoint, taken_from=theirs.checksum)


def entries_of(
    files: Mapping[ClaimUid, FoundFiles], kind: ClaimsOf
) -> tuple[tuple[StoredEntry, ...], tuple[ClaimUid, ...]]:
    """Return the claims by their files, and the UIDs of files whose claim or devices cannot be read. The devices of a
    compute domain's claim are read from the API server again; a GPU must not be offered until then."""
    entries, unknown = [], []
    for uid, of_claim in files.items():
        gpus = gpus_by_name(of_claim.devices or ())
        if of_claim.claim is None or (kind is ClaimsOf.GPUS and not gpus):
            unknown.append(uid)
        else:
            entries.append(
                StoredEntry(of_claim.claim, ClaimState.PREPARED, None, GpuReservation(gpus) if gpus else None)
            )
    return tuple(entries), tuple(unknown)


CHECKPOINT_LOST: Final = Reason(Cause.API_SERVER_FAILED, "the checkpoint is lost")
"""Why a claim that was found out without the checkpoint is stopped, until it is read from the API server again."""


def gpus_by_name(devices: Iterable[str]) -> tuple[ClaimedGpu, ...]:
    """Return the GPUs of a claim by the names of its devices, where the checkpoint is lost."""
    why = "its original driver in this boot is not known, as the checkpoint is lost"
    return tuple(
        ClaimedGpu(key, (OriginalDriver(function_address(key), None, vfio=True),), why)
        if Act.BIND in kind_named(device).acts
        else ClaimedGpu(key, ())
        for device in devices
        if (key := key_of(device)) is not None
    )


def next_content(kept: Checkpoint, wanted: CheckpointWanted) -> Checkpoint:
    """Return the content to write, with the parts that a newer daemon has written into the file and this one does not
    know."""
    claims, taken_over = dict[ClaimUid, Mapping[str, Json]](), dict[ClaimUid, Mapping[str, Json]]()
    for entry in wanted.entries:
        uid, is_theirs = entry.name.uid, entry.state is ClaimState.TAKEN_OVER
        before = (kept.taken_over if is_theirs else kept.claims).get(uid, {})
        (taken_over if is_theirs else claims)[uid] = {**before, **encoded_entry(entry)}
    original_drivers = {f.address: f for f in wanted.original_drivers}
    owed = tuple(map(encoded_return, wanted.owed))
    return replace(
        kept,
        claims=claims,
        taken_over=taken_over,
        original_drivers=original_drivers,
        owed=owed,
        earlier_models=wanted.earlier_models,
    )
