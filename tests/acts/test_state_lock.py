"""Two daemons of one driver during an update: what the older one has begun to write never lands after its successor has
read. Real files, real threads; each daemon has a lock and a descriptor of its own, as two processes have."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest
import trio

from gpuactors.acts.blocking_runner import OneThread, StoredCheckpoint, StoredFiles
from gpuactors.acts.checkpoint import CheckpointFile
from gpuactors.acts.disk import RealDisk
from gpuactors.acts.files import ClaimFiles
from gpuactors.acts.state_lock import FILE_NAME, StateLock
from gpuactors.acts.theirs import TheirClaims
from gpuactors.acts.writes import ProcessWrites
from gpuactors.core.claims.checkpoint import Checkpoint, Origin
from gpuactors.core.claims.files import ClaimContents
from gpuactors.core.claims.metadata import MetadataFile
from gpuactors.core.values.claim import ActFault, ClaimName, ClaimUid
from gpuactors.ports.claims import ActError
from gpuactors.ports.errors import StateFileError
from tests.support.patience import patient

PATIENCE_S = patient(20.0)
SHORT_S = 0.1

BEFORE = Checkpoint({ClaimUid("u1"): {"state": "Reserved"}})
AFTER = Checkpoint({ClaimUid("u1"): {"state": "Prepared"}})


def lock(directory: Path, wait_s: float = PATIENCE_S) -> StateLock:
    return StateLock(str(directory), wait_s=wait_s)


class Daemon:
    """The stores of one daemon."""

    def __init__(self, directory: Path, wait_s: float = PATIENCE_S) -> None:
        self.lock = lock(directory, wait_s)
        self.file = CheckpointFile(
            RealDisk(),
            str(directory),
            "boot-1",
            TheirClaims(RealDisk(), driver="d", cdi_dir=str(directory / "cdi"), places=None),
        )
        files = ClaimFiles(RealDisk(), driver="d", cdi_dir=str(directory / "cdi"), plugin_dir=str(directory))
        apart = OneThread("state", deadline_s=PATIENCE_S)
        self.checkpoint = StoredCheckpoint(self.file, apart, self.lock)
        self.files = StoredFiles(files, apart, self.lock)


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE])
@pytest.mark.parametrize("call", ["open", "pread"])
def test_who_cannot_read_whose_the_state_is_begins_no_act(
    call: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = lock(tmp_path)
    with ours.reading(owns=True):
        assert ours.taken() == ""

    def fails(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, fails)
    assert "cannot read" in ours.taken()


def test_for_want_of_descriptors_nothing_is_read_without_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would never be ours: each write would find the mark of the daemon before this one, for good."""
    before, ours = lock(tmp_path), lock(tmp_path)
    with before.reading(owns=True):
        pass

    def fails(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", fails)
        with pytest.raises(StateFileError, match="it is tried again"), ours.reading(owns=True):
            pytest.fail("it was read")
    with ours.reading(owns=True):
        pass
    with ours.writing():
        pass


async def test_a_write_that_begins_after_the_successor_has_read_is_not_made(tmp_path: Path) -> None:
    """A thread of the older daemon was late: both the newer content would be lost, and what was answered by it."""
    old, new = Daemon(tmp_path), Daemon(tmp_path)
    with trio.fail_after(PATIENCE_S):
        await old.checkpoint.read(owns=True)
        await old.checkpoint.write(BEFORE)
        await new.checkpoint.read(owns=True)
        await new.checkpoint.write(AFTER)
        with pytest.raises(StateFileError, match=rf"process {os.getpid()}\) has taken over"):
            await old.checkpoint.write(BEFORE)
        assert (await new.checkpoint.read(owns=True)).checkpoint == AFTER


async def test_files_of_a_claim_are_neither_written_nor_removed_after_the_successor_has_read(
    tmp_path: Path,
) -> None:
    old, new = Daemon(tmp_path), Daemon(tmp_path)
    first = ClaimContents(ClaimName("ns", "n", ClaimUid("u1")), {"devices": ()}, ())
    late = ClaimContents(ClaimName("ns", "n", ClaimUid("u2")), {"devices": ()}, ())
    with trio.fail_after(PATIENCE_S):
        await old.checkpoint.read(owns=True)
        await old.files.write(first)
        await new.checkpoint.read(owns=True)
        with pytest.raises(StateFileError, match="has taken over"):
            await old.files.write(late)
        with pytest.raises(StateFileError, match="has taken over"):
            await old.files.remove(ClaimUid("u1"))
        assert list(await new.files.found(owns=True)) == ["u1"]


async def test_the_successor_does_not_read_while_a_write_is_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would go on from what is about to be replaced."""
    old, new = Daemon(tmp_path), Daemon(tmp_path, SHORT_S)
    began, gate = threading.Event(), threading.Event()
    write = CheckpointFile.write

    def slow(file: CheckpointFile, checkpoint: Checkpoint) -> None:
        began.set()
        gate.wait(PATIENCE_S)
        write(file, checkpoint)

    with trio.fail_after(PATIENCE_S):
        await old.checkpoint.read(owns=True)
        await old.checkpoint.write(BEFORE)
        monkeypatch.setattr(CheckpointFile, "write", slow)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(old.checkpoint.write, AFTER)
            await trio.to_thread.run_sync(began.wait, PATIENCE_S)
            with pytest.raises(StateFileError, match=r"locked for 0\.1 s"):
                await new.checkpoint.read(owns=True)
            gate.set()
        assert (await new.checkpoint.read(owns=True)).checkpoint == AFTER


def test_a_lock_that_is_held_too_long_is_said(tmp_path: Path) -> None:
    with lock(tmp_path).writing():
        other = lock(tmp_path, SHORT_S)
        with (
            pytest.raises(StateFileError, match=rf"locked for 0.1 s by process {os.getpid()}"),
            other.reading(owns=True),
        ):
            pytest.fail("it is locked")


async def test_a_daemon_that_does_not_serve_yet_takes_nothing_from_the_one_that_does(tmp_path: Path) -> None:
    old, new = Daemon(tmp_path), Daemon(tmp_path)
    with trio.fail_after(PATIENCE_S):
        await old.checkpoint.read(owns=True)
        await old.checkpoint.write(BEFORE)
        assert (await new.checkpoint.read(owns=False)).checkpoint == BEFORE
        await old.checkpoint.write(AFTER)
        (tmp_path / "gpuactors-checkpoint.json").write_bytes(b"spoiled")
        assert (await new.checkpoint.read(owns=False)).origin is Origin.CORRUPT
        assert (tmp_path / "gpuactors-checkpoint.json").exists(), (
            "nothing is set aside beside a daemon that serves"
        )


async def test_a_daemon_whose_successor_was_lost_owns_the_state_again(tmp_path: Path) -> None:
    old, new = Daemon(tmp_path), Daemon(tmp_path)
    with trio.fail_after(PATIENCE_S):
        for daemon in (old, new, old):
            await daemon.checkpoint.read(owns=True)
        await old.checkpoint.write(AFTER)


async def test_a_lock_file_that_somebody_removes_is_made_again(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path)
    with trio.fail_after(PATIENCE_S):
        await daemon.checkpoint.read(owns=True)
        (tmp_path / FILE_NAME).unlink()
        await daemon.checkpoint.write(AFTER)


async def test_no_act_begins_after_the_successor_has_read(tmp_path: Path) -> None:
    old, new = Daemon(tmp_path), Daemon(tmp_path)
    begin = ProcessWrites(str(tmp_path / "acts"), taken=old.lock.taken, deadline_s=PATIENCE_S)
    with trio.fail_after(PATIENCE_S):
        await old.checkpoint.read(owns=True)
        async with begin(51):
            pass
        await new.checkpoint.read(owns=True)
        with pytest.raises(ActError, match="has taken over") as refused:
            async with begin(51):
                pytest.fail("it is another daemon's")
        assert refused.value.fault is ActFault.BLOCKED
        async with ProcessWrites(str(tmp_path / "acts"), taken=new.lock.taken, deadline_s=PATIENCE_S)(51):
            pass


def test_where_no_lock_file_can_be_made_the_state_is_read_and_not_written(tmp_path: Path) -> None:
    (tmp_path / "a file").write_text("")
    unmade = lock(tmp_path / "a file")
    with unmade.reading(owns=True):
        pass
    with pytest.raises(StateFileError, match="cannot open the lock file"), unmade.writing():
        pytest.fail("it is not locked")


# --- a read-only file system ------------------------------------------------------------------------------------


def read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file system of kubelet's directory is, as after an error of its disk; that of the CDI files is another."""
    real = os.open

    def opened(path: str, flags: int, *rest: int, **more: int) -> int:
        if os.path.basename(path) == FILE_NAME and flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", opened)


@pytest.mark.trio
async def test_files_that_are_as_they_must_be_need_no_write_on_a_read_only_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kubelet restarts, and prepares each claim again: a running virtual machine must not lose its claim for that."""
    name = ClaimName("n", "c", ClaimUid("u1"))
    contents, other = (ClaimContents(name, {"devices": devices}, ()) for devices in ((), (1,)))
    daemon = Daemon(tmp_path)
    with trio.fail_after(PATIENCE_S):
        await daemon.files.write(contents)
        read_only(monkeypatch)
        await daemon.files.write(contents)
        with pytest.raises(StateFileError, match="Read-only file system"):
            await daemon.files.write(other)
        with pytest.raises(StateFileError, match="Read-only file system"):
            await daemon.checkpoint.write(AFTER)
        (tmp_path / "cdi" / "k8s.d-claim_u1.json").unlink()
        with pytest.raises(StateFileError, match="Read-only file system"):
            await daemon.files.write(contents)


@pytest.mark.trio
async def test_the_files_of_an_earlier_version_are_right_on_a_read_only_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They lack where the device is. With a disk to write to they are written anew."""
    name, numa_node = ClaimName("n", "c", ClaimUid("u1")), "resource.kubernetes.io/numaNode"

    def contents(**attributes: int) -> ClaimContents:
        metadata = MetadataFile("main", "/main.json", ({"attributes": attributes},))
        return ClaimContents(name, {"devices": ()}, (metadata,))

    earlier, now, other = contents(id=1), contents(id=1, **{numa_node: 0}), contents(id=2, **{numa_node: 0})
    daemon, path = Daemon(tmp_path), tmp_path / "metadata/u1/main.json"
    with trio.fail_after(PATIENCE_S):
        for written in (now, earlier):
            await daemon.files.write(written)
            assert (numa_node in path.read_text()) is (written is now)
        read_only(monkeypatch)
        await daemon.files.write(now)
        with pytest.raises(StateFileError, match="Read-only file system"):
            await daemon.files.write(other)
