"""The disk in a small world of claims: the checkpoint as it was last written, and the claims whose files are there."""

from __future__ import annotations

from collections.abc import Mapping

from gpuactors.core.claims.outputs import CheckpointWanted
from gpuactors.core.state.claims import StoredEntry
from gpuactors.core.values.claim import ClaimUid
from gpuactors.core.values.claim_states import ClaimState
from tests.core.orders import WrongError


def stored(disk: CheckpointWanted | None) -> Mapping[ClaimUid, StoredEntry]:
    """The claims in the checkpoint."""
    return {entry.name.uid: entry for entry in disk.entries} if disk is not None else {}


def check_prepared(uid: ClaimUid, disk: CheckpointWanted | None, files: frozenset[ClaimUid]) -> None:
    """When kubelet is told that a claim is prepared. Raises `WrongError` if the disk does not say so."""
    entry = stored(disk).get(uid)
    if entry is None or entry.state is not ClaimState.PREPARED:
        raise WrongError(f"{uid} is said to be prepared, and is not on disk as that")
    if uid not in files:
        raise WrongError(f"{uid} is said to be prepared, and its files are not there")
