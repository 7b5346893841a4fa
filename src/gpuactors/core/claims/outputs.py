"""The orders to the actors of claims, as they follow from the state. Derived each time, never kept.

Standing orders with numbers: each actor does the newest number of each kind once, and a skipped one is never missed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from gpuactors import limits
from gpuactors.core.claims.driver import DeviceAct
from gpuactors.core.claims.files import PlacedFile
from gpuactors.core.claims.view import DriverView
from gpuactors.core.state.claims import (
    FILES,
    ClaimRecord,
    DomainReservation,
    OwedReturn,
    Reservation,
    StoredEntry,
    load_of,
)
from gpuactors.core.values.claim import (
    Claim,
    ClaimedModels,
    ClaimName,
    ClaimsOf,
    ClaimUid,
    DeviceEdits,
    DeviceHealth,
    FitnessCheck,
    OriginalDriver,
)
from gpuactors.core.values.claim_states import OWNING, REMOVING, ClaimState
from gpuactors.core.values.model import DeviceKey, Role
from gpuactors.core.values.slices import Offer

FILES_AT_ONCE: Final = 32
"""The maximum number of claims whose files are requested at one time. One thread writes them, one after the other: more
would only be derived again at each event, which took longer than the writes with 1,000 claims."""


class ReadWanted(Struct, frozen=True, gc=False):
    """A claim to read from the API server."""

    number: int
    claim: ClaimName


class FilesAct(Struct, frozen=True, gc=False):
    """An act on the CDI and metadata files of a claim."""

    number: int
    claim: Claim | None
    """The claim whose files are to be written; None if they are to be removed."""
    devices: tuple[DeviceEdits, ...] = ()
    """The content for each result of the claim, in their order."""
    directories: tuple[str, ...] = ()
    """The host's directories that are made before the files, and removed after them."""
    placed: tuple[PlacedFile, ...] = ()
    """The files in those directories."""


class CheckpointWanted(Struct, frozen=True, gc=False):
    """The contents of the checkpoint."""

    number: int
    entries: tuple[StoredEntry, ...]
    """The claims that own devices, in the order of their arrival."""
    original_drivers: tuple[OriginalDriver, ...]
    """The original drivers of functions that gpuactors may have bound."""
    owed: tuple[OwedReturn, ...] = ()
    """The returns that are owed, by address."""
    earlier_models: ClaimedModels = field(default_factory=dict)
    """The models of the devices of earlier boots' claims (`Checkpoint.earlier_models`)."""


class DiskWanted(Struct, frozen=True, gc=False):
    """The input of the checkpoint's keeper."""

    load: int = 0
    """How many times the checkpoint must have been read: again when a predecessor has handed over. 0 if not at all."""
    checkpoint: CheckpointWanted | None = None


class ServingWanted(Struct, frozen=True, gc=False):
    """The input of the plugin."""

    is_serving: bool = False
    """True if kubelet may send claims to this daemon: it answers, or passes the calls on to its successor."""
    drain_s: float = limits.DRAIN_S
    """How long calls in flight may take when serving ends, in seconds."""


class ClaimsWanted(Struct, frozen=True, gc=False):
    """The input of the claims' actors."""

    serving: ServingWanted = ServingWanted()
    disk: DiskWanted = DiskWanted()
    reads: tuple[ReadWanted, ...] = ()
    devices: Mapping[DeviceKey, DeviceAct] = field(default_factory=dict)
    fitness_check: FitnessCheck | None = None
    files: Mapping[ClaimUid, FilesAct] = field(default_factory=dict)
    offer: Offer | None = None
    """The devices for the ResourceSlices; None while unknown."""
    health: tuple[DeviceHealth, ...] = ()


NO_CLAIMS_WANTED = ClaimsWanted()
"""The orders while DRA is off."""


def claims_wanted(view: DriverView) -> ClaimsWanted:
    """Return the orders for the claims of one driver. A daemon that has handed over gives none: its successor has
    read the checkpoint."""
    claims, role = view.claims, view.state.daemon.role
    if claims.settings is None:
        return NO_CLAIMS_WANTED
    relays = claims.relays_until > -math.inf
    if role is Role.HANDED_OVER:
        drain_s = limits.CLAIM_CALL_S if claims.settings.side_by_side else limits.DRAIN_S
        # Kubelet reads the health of both, and takes the last list that came: they are to be the same.
        health = _offered(view)[1] if relays else ()
        return ClaimsWanted(ServingWanted(relays, drain_s), health=health)
    load = load_of(role)
    if not claims.loaded or claims.unserved or role is not Role.SERVING:
        return ClaimsWanted(ServingWanted(relays), DiskWanted(load))
    (offer, health), acts = _offered(view), view.driver.acts
    acting = [e for e in claims.entries.values() if e.acts and claims.durable >= e.intent]
    return ClaimsWanted(
        serving=ServingWanted(not view.state.daemon.stopping),
        disk=DiskWanted(load, _checkpoint(view) if claims.checkpoint > claims.durable else None),
        reads=tuple(ReadWanted(n, claims.entries[u].name) for u, n in claims.reads.items()),
        devices=acts.device_acts(view.state, acting) if acts is not None else {},
        fitness_check=acts.fitness_check(view.state) if acts is not None else None,
        files=_files(view, acting),
        offer=offer,
        health=health,
    )


def _offered(view: DriverView) -> tuple[Offer | None, tuple[DeviceHealth, ...]]:
    """Return the devices that the driver offers to claims, None while unknown; and their health."""
    state, kind = view.state, view.driver.kind
    part = state.offered if kind is ClaimsOf.GPUS else state.domains.offered
    return part.offer, part.health


def _checkpoint(view: DriverView) -> CheckpointWanted:
    claims, acts = view.claims, view.driver.acts
    original_drivers, owed = acts.kept(view.state) if acts is not None else ((), ())
    entries = tuple(_on_disk(e) for e in claims.entries.values() if e.state in OWNING)
    return CheckpointWanted(claims.checkpoint, entries, original_drivers, owed, claims.earlier_models)


def _on_disk(entry: ClaimRecord) -> StoredEntry:
    match entry.state:
        case ClaimState.RELEASING:
            state = ClaimState.RELEASING
        case ClaimState.TAKEN_OVER:
            state = ClaimState.TAKEN_OVER
        case ClaimState.COMMITTING | ClaimState.PREPARED | ClaimState.VERIFYING | ClaimState.DRIFTED:
            state = ClaimState.PREPARED
        case _:
            state = ClaimState.RESERVED
    return StoredEntry(
        entry.name,
        state,
        entry.claim,
        _reservation_on_disk(entry),
        given=entry.given,
        unplaced=entry.unplaced,
    )


def _reservation_on_disk(entry: ClaimRecord) -> Reservation | None:
    """Return the part of a reservation that the checkpoint has: not a domain's configuration, which is in the claim."""
    if not isinstance(entry.reservation, DomainReservation):
        return entry.reservation
    return replace(entry.reservation, config=None) if entry.reservation.domain is not None else None


def _files(view: DriverView, acting: Iterable[ClaimRecord]) -> Mapping[ClaimUid, FilesAct]:
    """Return the next few acts on files, in the order of the claims; first those that kubelet waits for, then the
    files that are written again for a prepared claim. A write of files that could be wrong waits for the removals.
    The disk does one after the other."""
    having = (entry for entry in acting if FILES in entry.acts)
    ordered = sorted(having, key=lambda entry: (entry.state is ClaimState.PREPARED, entry.acts[FILES]))
    free = (
        entry
        for entry in ordered
        if entry.state in REMOVING or view.driver.files.may_write(view.state, entry)
    )
    return {e.name.uid: _files_act(view, e) for e in islice(free, FILES_AT_ONCE)}


def _files_act(view: DriverView, entry: ClaimRecord) -> FilesAct:
    files, number = view.driver.files, entry.acts[FILES]
    directories = files.directories(view.state, entry)
    if entry.state in REMOVING:
        return FilesAct(number, None, (), directories)
    assert entry.claim is not None, "files are written for an allocated claim"
    devices, placed = files.devices(view.state, entry, entry.claim), files.placed(view.state, entry)
    return FilesAct(number, entry.claim, devices, directories, placed)
