"""Writes in threads: in order, given up at the deadline, never after a later one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

import pytest
import trio
import trio.testing

from gpuactors.acts import blocking_runner
from gpuactors.acts.blocking_runner import OneThread, StoredCheckpoint, StoredFiles
from gpuactors.acts.checkpoint import CheckpointFile
from gpuactors.acts.files import ClaimFiles
from gpuactors.acts.theirs import TheirClaims
from gpuactors.core.claims.checkpoint import Checkpoint, Origin
from gpuactors.core.claims.files import ClaimContents
from gpuactors.core.values.claim import ClaimName, ClaimUid
from gpuactors.ports.claims import CheckpointStore, ClaimFileStore
from gpuactors.ports.errors import StateFileError
from gpuactors_simulation.memory.acts import NoLock, inline
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
            CheckpointFile(disk, "/plugins/d", "b1", theirs), apart, NoLock()
        )
        files: ClaimFileStore = StoredFiles(
            ClaimFiles(disk, driver="d", cdi_dir="/cdi", plugin_dir="/plugins/d"), apart, NoLock()
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


async def test_a_call_is_not_late_because_of_the_calls_before_it() -> None:
    """300 prepares at once, of which each takes a tenth of the deadline."""
    order: list[int] = []
    apart = OneThread("claim files", deadline_s=0.2)

    def writes(number: int) -> None:
        time.sleep(0.02)
        order.append(number)

    async with trio.open_nursery() as nursery:
        for number in range(30):
            nursery.start_soon(apart, partial(writes, number))
            await trio.testing.wait_all_tasks_blocked()
    assert order == [*range(30)], "in the order in which they came"


async def test_a_call_is_not_late_because_the_loop_is() -> None:
    gate, done = threading.Event(), list[str]()
    apart = OneThread("claim files", deadline_s=0.2)

    def writes() -> None:
        gate.wait(PATIENCE_S)
        done.append("written")

    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(apart, writes)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(apart, partial(done.append, "the next"))
            await trio.testing.wait_all_tasks_blocked()
            gate.set()
            time.sleep(0.4)  # noqa: ASYNC251 -- it holds up the loop
    assert done == ["written", "the next"]


async def test_all_that_wait_behind_a_call_that_hangs_are_given_up_together() -> None:
    gate = threading.Event()
    apart = OneThread("claim files", deadline_s=0.1)
    errors: list[str] = []
    made: list[int] = []

    async def writes(call: Callable[[], object]) -> None:
        with pytest.raises(StateFileError) as error:
            await apart(call)
        errors.append(str(error.value))

    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(writes, partial(gate.wait, PATIENCE_S))
            await trio.testing.wait_all_tasks_blocked()
            for number in range(20):
                nursery.start_soon(writes, partial(made.append, number))
        gate.set()
        await apart(lambda: made.append(100))
    assert made == [100]
    assert (
        errors.count("claim files: the disk has not answered within 0.1 s; check it; it is tried again") == 1
    )
    assert sum("answered an earlier write within 0.1 s" in error for error in errors) == 20


async def test_a_queue_that_is_full_is_said_as_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocking_runner, "FILES_QUEUE_MAX", 2)
    gate = threading.Event()
    apart = OneThread("claim files", deadline_s=PATIENCE_S)
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(apart, partial(gate.wait, PATIENCE_S))
            await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(StateFileError, match="2 writes wait for the disk already"):
            await apart(lambda: None)
        gate.set()


async def test_who_gives_up_its_place_holds_up_nobody() -> None:
    gate, done = threading.Event(), list[str]()
    apart = OneThread("claim files", deadline_s=PATIENCE_S)
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(apart, partial(gate.wait, PATIENCE_S))
            await trio.testing.wait_all_tasks_blocked()
            with trio.CancelScope() as scope:
                nursery.start_soon(apart, partial(done.append, "third"))
                scope.cancel()
                await apart(partial(done.append, "second"))
            gate.set()
    assert done == ["third"]
