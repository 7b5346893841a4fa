"""The checkpoint keeper: reads the claims' checkpoint when it is wanted, and writes the newest contents.

A number that is written includes all before it. The keeper tries a write or read that failed again by itself, with what
is wanted then, and so has a loop of its own instead of `each_once`. What of the checkpoint and of the claims' files
counts is decided in `core/claims/restoration.py`. Where the checkpoint may not be used, nothing is removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import trio

from gpuactors import limits
from gpuactors.actors.raises_only import raises_only
from gpuactors.concurrency.latest import LatestReader
from gpuactors.core.claims.checkpoint import Checkpoint
from gpuactors.core.claims.outputs import DiskWanted
from gpuactors.core.claims.restoration import Restoration, entries_of, next_content, restoration
from gpuactors.core.events import Event
from gpuactors.core.events.claims import CheckpointRead, CheckpointRefused, CheckpointWritten
from gpuactors.core.state.claims import StoredEntry, load_of
from gpuactors.core.values.claim import ClaimsOf
from gpuactors.core.values.model import Role
from gpuactors.ports.claims import CheckpointStore, ClaimFileStore
from gpuactors.ports.errors import StateFileError


async def run(
    wanted: LatestReader[DiskWanted],
    store: CheckpointStore,
    files: ClaimFileStore,
    inbox: trio.MemorySendChannel[Event],
    driver_kind: ClaimsOf,
) -> None:
    """Run for ever. `driver_kind`: the DRA driver whose claims they are."""
    loaded, written, kept = 0, 0, Checkpoint()
    async for _ in wanted:
        while (now := wanted.value).load not in (0, loaded):
            try:
                with raises_only(StateFileError, "checkpoint_keeper"):
                    restored, problems = await _read(
                        store, files, driver_kind, owns=now.load >= load_of(Role.SERVING)
                    )
            except StateFileError as exc:
                await inbox.send(
                    CheckpointRefused(str(exc), driver_kind, await _claims_by_files(files, driver_kind))
                )
                await _pause(wanted, now)
            else:
                loaded, kept = now.load, restored.kept
                await inbox.send(
                    CheckpointRead(
                        entries=restored.entries,
                        original_drivers=restored.original_drivers,
                        warning="; ".join(filter(None, (restored.warning, *problems))),
                        load=loaded,
                        driver_kind=driver_kind,
                        owed=restored.owed,
                        is_lost=restored.is_lost,
                        earlier_models=restored.kept.earlier_models,
                    )
                )
        loaded = loaded if now.load else 0
        while (contents := wanted.value.checkpoint) is not None and contents.number > written:
            try:
                await store.write(next_content(kept, contents))
            except StateFileError as exc:
                await inbox.send(CheckpointWritten(contents.number, driver_kind, str(exc)))
                await trio.sleep(limits.CLAIM_RETRY_S)
            else:
                written = contents.number
                await inbox.send(CheckpointWritten(written, driver_kind))


async def _claims_by_files(files: ClaimFileStore, driver_kind: ClaimsOf) -> tuple[StoredEntry, ...]:
    """Return the claims of GPUs by their files, where the checkpoint may not be used; none where they cannot be
    read."""
    if driver_kind is not ClaimsOf.GPUS:
        return ()
    with suppress(StateFileError), raises_only(StateFileError, "checkpoint_keeper"):
        entries, _ = entries_of(await files.found(owns=False), driver_kind)
        return entries
    return ()


async def _pause(wanted: LatestReader[DiskWanted], now: DiskWanted) -> None:
    """Wait until the next try; return at once if something else is wanted."""
    with trio.move_on_after(limits.CLAIM_RETRY_S):
        while wanted.value.load == now.load:
            await wanted.receive()


async def _read(
    store: CheckpointStore, files: ClaimFileStore, driver_kind: ClaimsOf, *, owns: bool
) -> tuple[Restoration, Sequence[str]]:
    """Read the checkpoint and the files, and remove files of no claim. Return a sentence for each that stays, which
    stops no other claim. `owns`: as `restoration`. Raises `StateFileError`."""
    restored = await store.read(owns=owns)
    plan = restoration(restored, await files.found(owns=owns), driver_kind, owns=owns)
    problems: list[str] = []
    for uid in plan.stray:
        try:
            await files.remove(uid)
        except StateFileError as exc:
            problems.append(str(exc))
    if plan.clear_mounted:
        try:
            problems += await files.clear_mounted(plan.mounted)
        except StateFileError as exc:
            problems.append(str(exc))
    return plan, problems
