"""The checkpoint on disk, as it was last written: what it says, and how a daemon that starts reads it."""

from __future__ import annotations

from collections.abc import Mapping

from gpuactors.core.claims.outputs import CheckpointWanted
from gpuactors.core.events.claims import CheckpointRead
from gpuactors.core.state.claims import StoredEntry
from gpuactors.core.values.claim import ClaimsOf, ClaimUid


def stored(disk: CheckpointWanted | None) -> Mapping[ClaimUid, StoredEntry]:
    """The claims in the checkpoint."""
    return {entry.name.uid: entry for entry in disk.entries} if disk is not None else {}


def read_back(disk: CheckpointWanted | None, of: ClaimsOf) -> CheckpointRead:
    """The checkpoint is read."""
    if disk is None:
        return CheckpointRead(driver_kind=of)
    return CheckpointRead(
        disk.entries,
        disk.original_drivers,
        owed=disk.owed,
        earlier_models=disk.earlier_models,
        driver_kind=of,
    )
