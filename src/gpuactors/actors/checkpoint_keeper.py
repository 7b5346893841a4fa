"""The checkpoint keeper: reads the claims' checkpoint when it is wanted, and writes the newest contents.

A number that is written stands for all before it. Where the checkpoint is lost, or may not be used, the CDI and
metadata files say which devices belong to claims. Files of no claim are removed, as a daemon that was killed may have
left them, unless the checkpoint may not be used. So are metadata files without the CDI file of the devices, which is
written last, and gone after a reboot: no container can be started with what they are left of. Where the checkpoint is
of another boot, no container runs that has mounted a directory of a claim: all these directories are removed, as nobody
knows whose they are.

What NVIDIA's driver has prepared on this node is taken over with the file that it left, and its own files are left: so
are all these directories, as it makes its own in the same place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

import trio

from gpuactors import limits
from gpuactors.actors.raises_only import raises_only
from gpuactors.concurrency.latest import LatestReader
from gpuactors.core.claims.checkpoint import Checkpoint, MalformedError, Origin, Theirs
from gpuactors.core.claims.files import FoundFiles
from gpuactors.core.claims.outputs import CheckpointWanted, ClaimsWanted
from gpuactors.core.claims.stored import decoded_entry, decoded_return, encoded_entry, encoded_return
from gpuactors.core.devices.identity import claimed_address
from gpuactors.core.events import (
    CheckpointRead,
    CheckpointRefused,
    CheckpointUnwritten,
    CheckpointWritten,
    Event,
)
from gpuactors.core.state.claims import ClaimedGpu, StoredEntry, load_of
from gpuactors.core.values.claim import ClaimsOf, ClaimUid, FirstDriver, Json
from gpuactors.core.values.claim_states import ClaimState
from gpuactors.core.values.model import Role
from gpuactors.ports.node import CheckpointStore, ClaimFileStore, StateFileError


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
                with raises_only(StateFileError, "checkpoint_keeper"):
                    event, known = await _read(store, files, of, owns=now.load >= load_of(Role.SERVING))
            except StateFileError as exc:
                await inbox.send(CheckpointRefused(str(exc), of, await _having(files, of)))
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


async def _having(files: ClaimFileStore, of: ClaimsOf) -> tuple[StoredEntry, ...]:
    """The claims of GPUs by their files, where the checkpoint may not be used; none where they cannot be read."""
    if of is not ClaimsOf.GPUS:
        return ()
    with suppress(StateFileError), raises_only(StateFileError, "checkpoint_keeper"):
        return _rebuilt(await files.found(owns=False), of).entries
    return ()


async def _pause(wanted: LatestReader[ClaimsWanted], now: ClaimsWanted) -> None:
    """Until the next try; at once if something else is wanted."""
    with trio.move_on_after(limits.CLAIM_RETRY_S):
        while wanted.value.load == now.load:
            await wanted.receive()


def _checkpoint(known: Checkpoint, contents: CheckpointWanted) -> Checkpoint:
    """The contents, with what a newer daemon has written into the file and this one does not know."""
    claims, taken_over = dict[ClaimUid, Mapping[str, Json]](), dict[ClaimUid, Mapping[str, Json]]()
    for entry in contents.entries:
        uid, is_theirs = entry.name.uid, entry.state is ClaimState.TAKEN_OVER
        before = (known.taken_over if is_theirs else known.claims).get(uid, {})
        (taken_over if is_theirs else claims)[uid] = {**before, **encoded_entry(entry)}
    first_drivers = {f.address: f for f in contents.first_drivers}
    owed = tuple(map(encoded_return, contents.owed))
    return replace(known, claims=claims, taken_over=taken_over, first_drivers=first_drivers, owed=owed)


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
        stored = {**checkpoint.claims, **checkpoint.taken_over}
        entries = tuple(decoded_entry(uid, content) for uid, content in stored.items())
        owed = tuple(map(decoded_return, checkpoint.owed))
    except MalformedError as exc:
        lost, entries, owed = True, (), ()
        warning = (
            f"an entry of the checkpoint makes no sense ({exc}), and all were found out from the CDI files"
        )
    else:
        warning = restored.sentence if lost else ""
    whole = {uid for uid, of_claim in found.items() if of_claim.devices is not None}
    kept = whole if lost else {entry.name.uid for entry in entries}
    for uid in found.keys() - kept if owns else ():
        await files.remove(uid)
    is_theirs = restored.theirs is not None and bool(restored.theirs.claims)
    if owns and restored.origin is Origin.OTHER_BOOT and not is_theirs:
        await files.clear_mounted()
    if not lost:
        entries, checkpoint = _taken_over(entries, checkpoint, restored.theirs)
        return CheckpointRead(entries, drivers, owed=owed), checkpoint
    rebuilt = _rebuilt({uid: found[uid] for uid in found.keys() & kept}, of)
    if rebuilt.unknown:
        warning += (
            f"; whose files are those of {', '.join(rebuilt.unknown)} cannot be read, and they are left"
        )
    checkpoint = replace(checkpoint, claims={}, owed=(), taken_over={}, taken_from="")
    entries, checkpoint = _taken_over(rebuilt.entries, checkpoint, restored.theirs)
    return CheckpointRead(entries, drivers, warning), checkpoint


def _taken_over(
    entries: tuple[StoredEntry, ...], checkpoint: Checkpoint, theirs: Theirs | None
) -> tuple[tuple[StoredEntry, ...], Checkpoint]:
    """The entries with the claims that NVIDIA's driver has prepared: each state of its file counts once, as the file
    goes on naming those that have ended here since."""
    if theirs is None or theirs.checksum == checkpoint.taken_from:
        return entries, checkpoint
    known = {entry.name.uid for entry in entries}
    taken = tuple(entry for entry in theirs.claims if entry.name.uid not in known)
    return (*entries, *taken), replace(checkpoint, taken_from=theirs.checksum)


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
