"""The checkpoint keeper: reads the claims' checkpoint when it is wanted, and writes the newest contents.

A number that is written stands for all before it. Where the checkpoint is lost, the CDI and metadata files say which
devices belong to claims; files of no claim are removed, as a daemon that was killed may have left them. So are metadata
files without the CDI file of the devices, which is written last, and gone after a reboot: no container can be started
with what they are left of. Where the checkpoint is of another boot, no container runs that has mounted a directory of a
claim: all these directories are removed, as nobody knows whose they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import trio

from gpuactors import limits
from gpuactors.concurrency.latest import LatestReader
from gpuactors.core.dra.checkpoint import Checkpoint, MalformedError, Origin
from gpuactors.core.dra.claim import ClaimsOf, ClaimUid, FirstDriver
from gpuactors.core.dra.entries import ClaimedGpu, StoredEntry, load_of
from gpuactors.core.dra.files import FoundFiles
from gpuactors.core.dra.outputs import CheckpointWanted, ClaimsWanted
from gpuactors.core.dra.stored import decoded_entry, encoded_entry
from gpuactors.core.dra.table import ClaimState
from gpuactors.core.events import (
    CheckpointRead,
    CheckpointRefused,
    CheckpointUnwritten,
    CheckpointWritten,
    Event,
)
from gpuactors.core.identity import claimed_address
from gpuactors.core.model import Role
from gpuactors.ports import CheckpointStore, ClaimFileStore, StateFileError


async def run(
    wanted: LatestReader[ClaimsWanted],
    store: CheckpointStore,
    files: ClaimFileStore,
    inbox: trio.MemorySendChannel[Event],
    of: ClaimsOf = ClaimsOf.GPUS,
) -> None:
    """Runs for ever. `of`: whose claims they are."""
    loaded, written, known = 0, 0, Checkpoint()
    async for _ in wanted:
        while (now := wanted.value).load not in (0, loaded):
            try:
                event, known = await _read(store, files, of, owns=now.load >= load_of(Role.SERVING))
            except StateFileError as exc:
                await inbox.send(CheckpointRefused(str(exc), of))
                await _pause(wanted, now)
            else:
                loaded = now.load
                await inbox.send(replace(event, load=loaded, of=of))
        loaded = loaded if now.load else 0
        while (contents := wanted.value.checkpoint) is not None and contents.number > written:
            try:
                await store.write(_checkpoint(known, contents))
            except StateFileError as exc:
                await inbox.send(CheckpointUnwritten(contents.number, str(exc), of))
                await trio.sleep(limits.CLAIM_RETRY_S)
            else:
                written = contents.number
                await inbox.send(CheckpointWritten(written, of))


async def _pause(wanted: LatestReader[ClaimsWanted], now: ClaimsWanted) -> None:
    """Until the next try; at once if something else is wanted."""
    with trio.move_on_after(limits.CLAIM_RETRY_S):
        while wanted.value.load == now.load:
            await wanted.receive()


def _checkpoint(known: Checkpoint, contents: CheckpointWanted) -> Checkpoint:
    """The contents, with what a newer daemon has written into the file and this one does not know."""
    claims = {
        entry.name.uid: {**known.claims.get(entry.name.uid, {}), **encoded_entry(entry)}
        for entry in contents.entries
    }
    return replace(known, claims=claims, first_drivers={f.address: f for f in contents.first_drivers})


@dataclass(frozen=True, slots=True)
class _Rebuilt:
    entries: tuple[StoredEntry, ...]
    unknown: tuple[ClaimUid, ...]
    """Files whose claim or devices cannot be read."""


async def _read(
    store: CheckpointStore, files: ClaimFileStore, of: ClaimsOf, *, owns: bool
) -> tuple[CheckpointRead, Checkpoint]:
    """`owns`: this daemon serves from now on. Until then another one does, whose newest claim may be in its files and
    not yet in what was read: nothing is removed. Raises `StateFileError`."""
    restored = await store.read(owns=owns)
    found = await files.found(owns=owns)
    checkpoint, drivers = restored.checkpoint, tuple(restored.checkpoint.first_drivers.values())
    lost = restored.origin is Origin.CORRUPT or (restored.origin is Origin.NONE and found)
    try:
        entries = tuple(decoded_entry(uid, content) for uid, content in checkpoint.claims.items())
    except MalformedError as exc:
        lost, entries = True, ()
        warning = (
            f"an entry of the checkpoint makes no sense ({exc}), and all were found out from the CDI files"
        )
    else:
        warning = restored.sentence if lost else ""
    whole = {uid for uid, of_claim in found.items() if of_claim.devices is not None}
    kept = whole if lost else {entry.name.uid for entry in entries}
    for uid in found.keys() - kept if owns else ():
        await files.remove(uid)
    if owns and restored.origin is Origin.OTHER_BOOT:
        await files.clear_mounted()
    if not lost:
        return CheckpointRead(entries, drivers), checkpoint
    rebuilt = _rebuilt({uid: found[uid] for uid in found.keys() & kept}, of)
    if rebuilt.unknown:
        warning += (
            f"; whose files are those of {', '.join(rebuilt.unknown)} cannot be read, and they are left"
        )
    return CheckpointRead(rebuilt.entries, drivers, warning), replace(checkpoint, claims={})


def _rebuilt(found: Mapping[ClaimUid, FoundFiles], of: ClaimsOf) -> _Rebuilt:
    """What a claim of a compute domain has is read from the API server again; a GPU must not be offered until then."""
    entries, unknown = [], []
    for uid, of_claim in found.items():
        gpus = tuple(_gpus(of_claim.devices or ()))
        if of_claim.claim is None or (of is ClaimsOf.GPUS and not gpus):
            unknown.append(uid)
        else:
            entries.append(StoredEntry(of_claim.claim, ClaimState.PREPARED, None, gpus))
    return _Rebuilt(tuple(entries), tuple(unknown))


def _gpus(devices: Iterable[str]) -> Iterable[ClaimedGpu]:
    for device in devices:
        if (address := claimed_address(device)) is not None:
            stays = "its first driver in this boot is not known, as the checkpoint is lost"
            yield ClaimedGpu(address, (FirstDriver(address, None, vfio=True),), stays)
