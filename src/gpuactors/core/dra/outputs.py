"""What the claims' actors are to do, as it follows from the state. Derived each time, never kept.

Standing orders with numbers: each actor does the newest number of each kind once, and a skipped one is never missed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gpuactors.core.dra.cdi import DeviceEdits
from gpuactors.core.dra.claim import Claim, ClaimName, ClaimUid, DeviceHealth, FirstDriver, Target
from gpuactors.core.dra.driver import ClaimDriver
from gpuactors.core.dra.entries import FILES, ClaimedGpu, Claims, Entry, StoredEntry, load_of
from gpuactors.core.dra.gpus import GPUS
from gpuactors.core.dra.slices import AnyOffer
from gpuactors.core.dra.table import OWNING, ClaimState
from gpuactors.core.model import PciAddress, Role
from gpuactors.core.state import NodeState


@dataclass(frozen=True, slots=True)
class ReadWanted:
    """A claim to be read from the API server."""

    number: int
    claim: ClaimName


@dataclass(frozen=True, slots=True)
class DeviceAct:
    """What a device and its companions are to be bound to."""

    number: int
    target: Target
    functions: tuple[FirstDriver, ...]
    """Those that are to be touched, sorted by address."""


@dataclass(frozen=True, slots=True)
class FilesAct:
    """The CDI and metadata files of a claim."""

    number: int
    name: ClaimName
    claim: Claim | None
    """None: its files are to be removed."""
    devices: tuple[DeviceEdits, ...] = ()
    """One for each result of the claim, in their order."""
    directories: tuple[str, ...] = ()
    """Directories of the host that are to be there before the files, and to be removed after them."""


@dataclass(frozen=True, slots=True)
class CheckpointWanted:
    """The contents of the checkpoint."""

    number: int
    entries: tuple[StoredEntry, ...]
    """Those that own devices, in the order of their arrival."""
    first_drivers: tuple[FirstDriver, ...]
    """Of the functions for which an intent of ours stands or stood in this boot."""


@dataclass(frozen=True, slots=True)
class ClaimsWanted:
    """The input of the claims' actors."""

    load: int = 0
    """How often the checkpoint is to have been read by now: again when a predecessor has handed over. 0: not at all."""
    is_serving: bool = False
    """Kubelet may send claims to this daemon."""
    reads: tuple[ReadWanted, ...] = ()
    checkpoint: CheckpointWanted | None = None
    devices: Mapping[PciAddress, DeviceAct] = field(default_factory=dict)
    files: Mapping[ClaimUid, FilesAct] = field(default_factory=dict)
    offer: AnyOffer | None = None
    """What the ResourceSlices are to say; None while it is not known."""
    health: tuple[DeviceHealth, ...] = ()


NO_CLAIMS_WANTED = ClaimsWanted()
"""DRA is off."""


def claims_wanted(state: NodeState, driver: ClaimDriver = GPUS) -> ClaimsWanted:
    """The orders that stand for the claims of one driver. A daemon that has handed over gives none: its successor has
    read the checkpoint."""
    claims, role = driver.claims(state), state.daemon.role
    if claims.settings is None or role is Role.HANDED_OVER:
        return NO_CLAIMS_WANTED
    load = load_of(role)
    if not claims.loaded or claims.unserved or role is not Role.SERVING:
        return ClaimsWanted(load)
    offer, health = driver.offered(state)
    acting = [e for e in claims.entries.values() if e.acts and claims.durable >= e.intent]
    return ClaimsWanted(
        load=load,
        is_serving=not state.daemon.stopping,
        reads=tuple(ReadWanted(n, claims.entries[u].name) for u, n in claims.reads.items()),
        checkpoint=_checkpoint(claims) if claims.checkpoint > claims.durable else None,
        devices={g.address: _device_act(e, g) for e in acting for g in e.gpus if g.address in e.acts},
        files={e.name.uid: _files_act(driver, state, e) for e in acting if FILES in e.acts},
        offer=offer,
        health=health,
    )


def _checkpoint(claims: Claims) -> CheckpointWanted:
    return CheckpointWanted(
        claims.checkpoint,
        tuple(_on_disk(e) for e in claims.entries.values() if e.state in OWNING),
        tuple(f for a, f in sorted(claims.first_drivers.items()) if a in claims.acted),
    )


def _on_disk(entry: Entry) -> StoredEntry:
    match entry.state:
        case ClaimState.RELEASING:
            state = ClaimState.RELEASING
        case ClaimState.COMMITTING | ClaimState.PREPARED | ClaimState.VERIFYING:
            state = ClaimState.PREPARED
        case _:
            state = ClaimState.RESERVED
    return StoredEntry(entry.name, state, entry.claim, entry.gpus, entry.bound, entry.domain)


def _device_act(entry: Entry, gpu: ClaimedGpu) -> DeviceAct:
    number = entry.acts[gpu.address]
    if entry.state is ClaimState.RELEASING:
        return DeviceAct(number, Target.FIRST_DRIVER, gpu.functions)
    return DeviceAct(number, Target.VFIO, gpu.functions)


def _files_act(driver: ClaimDriver, state: NodeState, entry: Entry) -> FilesAct:
    number, directories = entry.acts[FILES], driver.directories(state, entry)
    if entry.state in (ClaimState.RELEASING, ClaimState.CLEARING):
        return FilesAct(number, entry.name, None, (), directories)
    assert entry.claim is not None, "files are written for an allocated claim"
    return FilesAct(number, entry.name, entry.claim, driver.devices(state, entry, entry.claim), directories)
