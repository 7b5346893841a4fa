"""Writes in threads: in order, given up at the deadline, never after a later one."""

from __future__ import annotations

import threading

import pytest
import trio
import trio.testing

from gpuactors.acts.blocking_runner import OneThread, StoredCheckpoint, StoredFiles, inline
from gpuactors.acts.checkpoint import CheckpointFile
from gpuactors.acts.files import ClaimFiles
from gpuactors.acts.theirs import TheirClaims
from gpuactors.core.claims.checkpoint import Checkpoint, Origin
from gpuactors.core.claims.files import ClaimContents
from gpuactors.core.values.claim import ClaimName, ClaimUid
from gpuactors.ports.claims import CheckpointStore, ClaimFileStore
from gpuactors.ports.errors import StateFileError
from tests.memory.disk import FakeDisk
from tests.support.patience import patient

PATIENCE_S = patient(10.0)
UID = ClaimUid("u1")


async def test_a_write_that_hangs_is_given_up_and_the_next_waits_for_its_end() -> None:
    done: list[str] = []
    gate = threading.Event()

    def hangs() -> None:
        gate.wait(PATIENCE_S)
        done.append("first")

    apart = OneThread("checkpoint", deadline_s=0.05)
    with trio.fail_after(PATIENCE_S):
        with pytest.raises(StateFileError, match=r"checkpoint: the disk has not answered within 0.05 s"):
            await apart(hangs)
        # Nor does a second one begin beside it: it could come to its end first.
        with pytest.raises(StateFileError):
            await apart(lambda: done.append("second"))
        apart.deadline_s = PATIENCE_S
        gate.set()
        await apart(lambda: done.append("third"))
    assert done == ["first", "third"]


async def test_the_stores_in_line_and_in_threads_do_what_their_files_do() -> None:
    for apart in (inline, OneThread("files", deadline_s=PATIENCE_S)):
        disk = FakeDisk()
        theirs = TheirClaims(disk, driver="d", cdi_dir="/cdi", places=None)
        checkpoints: CheckpointStore = StoredCheckpoint(
            CheckpointFile(disk, "/plugins/d", "b1", theirs), apart
        )
        files: ClaimFileStore = StoredFiles(
            ClaimFiles(disk, driver="d", cdi_dir="/cdi", plugin_dir="/plugins/d"), apart
        )
        with trio.fail_after(PATIENCE_S):
            assert (await checkpoints.read(owns=True)).origin is Origin.NONE
            await checkpoints.write(Checkpoint({UID: {"state": "prepared"}}))
            assert (await checkpoints.read(owns=True)).checkpoint.claims == {UID: {"state": "prepared"}}
            await files.write(ClaimContents(ClaimName("ns", "n", UID), {"devices": ()}, ()))
            disk.put("/cdi/.k8s.d-claim_u2.json.new", b"")
            assert list(await files.found(owns=True)) == [UID]
            assert "/cdi/.k8s.d-claim_u2.json.new" not in disk.files
            await files.remove(UID)
            assert await files.found(owns=True) == {}
