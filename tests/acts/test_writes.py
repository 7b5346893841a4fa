"""The process that writes to sysfs: real processes, real files, one of them of a driver that does not answer."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import pytest
import trio
import trio.testing

from gpuactors.acts import writer_process
from gpuactors.acts.writes import ProcessWrites
from gpuactors.core.values.claim import ActFault
from gpuactors.ports.claims import ActError
from tests.memory.hanging import HangingFile
from tests.support.patience import patient

PATIENCE_S = patient(20.0)
SHORT_S = 0.3


@pytest.fixture
def override(tmp_path: Path) -> Path:
    path = tmp_path / "driver_override"
    path.write_text("(null)\n")
    return path


def writes(tmp_path: Path, deadline_s: float = PATIENCE_S) -> ProcessWrites:
    return ProcessWrites(str(tmp_path / "locks"), deadline_s=deadline_s)


@pytest.fixture
def unbind(tmp_path: Path) -> Iterator[HangingFile]:
    with HangingFile(tmp_path / "unbind") as file:
        yield file


async def answer(file: HangingFile) -> str:
    """The kernel takes the write that hangs."""
    return await trio.to_thread.run_sync(file.answer, PATIENCE_S)


def text(path: Path) -> str:
    return path.read_text()


async def until_it_ends(pid: int) -> None:
    """A process that was given up, or whose daemon was killed, ends by itself."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        await trio.lowlevel.wait_readable(descriptor)
    finally:
        os.close(descriptor)


def holder(tmp_path: Path, group: int = 51) -> int:
    return int((tmp_path / f"locks/iommu-group-{group}.lock").read_text().split()[0])


async def override_and_unbind(open_writes: ProcessWrites, override: Path, unbind: Path) -> None:
    async with open_writes(51) as act:
        await act.at_the_end(str(override), "\n")
        await act.write(str(override), "vfio-pci\n")
        await act.write(str(unbind), "0000:23:00.0\n")


async def test_it_writes_reads_and_has_the_last_word(tmp_path: Path, override: Path) -> None:
    with trio.fail_after(PATIENCE_S):
        async with writes(tmp_path)(51) as act:
            await act.at_the_end(str(override), "\n")
            await act.write(str(override), "vfio-pci\n")
            assert text(override) == "vfio-pci\n"
            assert await act.read(str(override)) == "vfio-pci\n"
        assert text(override) == "\n"


async def test_it_ends_and_frees_its_lock_before_the_act_is_over(tmp_path: Path, override: Path) -> None:
    opened = writes(tmp_path)
    with trio.fail_after(PATIENCE_S):
        for _ in range(20):
            async with opened(51) as act:
                await act.write(str(override), "x\n")


@pytest.mark.parametrize(
    ("name", "number"), [("none", errno.ENOENT), ("", errno.EISDIR), ("driver_override/x", errno.ENOTDIR)]
)
async def test_the_kernels_error_is_the_acts_error(
    tmp_path: Path, override: Path, name: str, number: int
) -> None:
    with trio.fail_after(PATIENCE_S):
        async with writes(tmp_path)(51) as act:
            with pytest.raises(OSError, match=r".") as caught:
                await act.write(str(tmp_path / name), "x\n")
            assert caught.value.errno == number
            await act.write(str(override), "y\n")


async def test_a_write_that_hangs_is_given_up_and_blocks_its_group_only(
    tmp_path: Path, override: Path, unbind: HangingFile
) -> None:
    with trio.fail_after(PATIENCE_S):
        with pytest.raises(ActError) as caught:
            await override_and_unbind(writes(tmp_path, SHORT_S), override, unbind.path)
        assert caught.value.fault is ActFault.HANGS
        pid = holder(tmp_path)
        # Another daemon, the same lock files.
        with pytest.raises(ActError, match=f"blocked by process {pid}") as caught:
            async with writes(tmp_path)(51):
                pytest.fail("the group is blocked")
        assert caught.value.fault is ActFault.BLOCKED
        async with writes(tmp_path)(52) as other:
            await other.read(str(override))
        assert text(override) == "vfio-pci\n"
        assert await answer(unbind) == "0000:23:00.0\n"
        await until_it_ends(pid)
        assert text(override) == "\n"
        async with writes(tmp_path)(51) as act:
            await act.write(str(override), "z\n")


async def test_who_finds_the_lock_taken_says_which_write_has_not_returned_and_since_when(
    tmp_path: Path, override: Path, unbind: HangingFile
) -> None:
    """So does the event of a claim at 35 s: a daemon that began later knows it from the lock file only."""
    begun = int(time.time())
    with trio.fail_after(PATIENCE_S):
        with pytest.raises(ActError) as given_up:
            await override_and_unbind(writes(tmp_path, SHORT_S), override, unbind.path)
        with pytest.raises(ActError) as caught:
            async with writes(tmp_path)(51):
                pytest.fail("the group is blocked")
        await answer(unbind)
        pid = holder(tmp_path)
        await until_it_ends(pid)
    write = f"the write of 0000:23:00.0 to {unbind.path} has not returned since "
    for error in (given_up, caught):
        since = str(error.value).partition(write)[2][:19]
        assert begun <= datetime.fromisoformat(f"{since}+00:00").timestamp() <= time.time()


async def test_no_write_is_under_way_between_two(tmp_path: Path, override: Path) -> None:
    with trio.fail_after(PATIENCE_S):
        async with writes(tmp_path)(51) as act:
            await act.write(str(override), "x\n")
            with pytest.raises(ActError, match="its write to sysfs has not returned"):
                async with writes(tmp_path)(51):
                    pytest.fail("the group is blocked")


async def test_an_act_that_has_nothing_to_write_learns_of_one_under_way(
    tmp_path: Path, override: Path, unbind: HangingFile
) -> None:
    with trio.fail_after(PATIENCE_S):
        writes(tmp_path).refuse_under_way(51)
        with pytest.raises(ActError):
            await override_and_unbind(writes(tmp_path, SHORT_S), override, unbind.path)
        pid, next_daemon = holder(tmp_path), writes(tmp_path)
        with pytest.raises(ActError, match=f"process {pid}") as caught:
            next_daemon.refuse_under_way(51)
        assert caught.value.fault is ActFault.BLOCKED
        next_daemon.refuse_under_way(52)
        await answer(unbind)
        await until_it_ends(pid)
        next_daemon.refuse_under_way(51)


async def test_a_cancelled_wait_ends_at_once_and_the_write_goes_on(
    tmp_path: Path, override: Path, unbind: HangingFile
) -> None:
    async def act(started: trio.Event) -> None:
        async with writes(tmp_path)(51) as act:
            await act.at_the_end(str(override), "\n")
            started.set()
            await act.write(str(unbind.path), "0000:23:00.0\n")
            pytest.fail("nothing is written after it")

    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            started = trio.Event()
            nursery.start_soon(act, started)
            await started.wait()
            # The request is in the pipe before the wait can be cancelled.
            await trio.testing.wait_all_tasks_blocked(0.01)
            nursery.cancel_scope.cancel()
        pid = holder(tmp_path)
        assert await answer(unbind) == "0000:23:00.0\n"
        await until_it_ends(pid)
        assert text(override) == "\n"


async def test_after_a_refusal_too_the_last_word_is_written_and_the_lock_free(
    tmp_path: Path, override: Path
) -> None:
    opened = writes(tmp_path)
    with trio.fail_after(PATIENCE_S):
        for _ in range(10):
            with pytest.raises(FileNotFoundError):
                await override_and_unbind(opened, override, tmp_path / "none")
            assert text(override) == "\n"


async def test_a_last_word_that_hangs_is_said(tmp_path: Path, unbind: HangingFile) -> None:
    async def only_at_the_end() -> None:
        async with writes(tmp_path, SHORT_S)(51) as act:
            await act.at_the_end(str(unbind.path), "\n")

    with trio.fail_after(PATIENCE_S):
        with pytest.raises(ActError, match="driver_override of a function of IOMMU group 51") as caught:
            await only_at_the_end()
        assert caught.value.fault is ActFault.HANGS
        assert await answer(unbind) == "\n"


KILLED = """
import sys, trio, trio.testing
from gpuactors.acts.writes import ProcessWrites
async def hangs(writes, override, unbind):
    async with writes(51) as act:
        await act.at_the_end(override, "\\n")
        await act.write(override, "vfio-pci\\n")
        await act.write(unbind, "0000:23:00.0\\n")
async def is_idle(writes, override, task_status):
    async with writes(52) as act:
        await act.at_the_end(override, "\\n")
        await act.write(override, "vfio-pci\\n")
        task_status.started()
        await trio.sleep_forever()
async def main(locks, override, unbind, other):
    writes = ProcessWrites(locks)
    async with trio.open_nursery() as nursery:
        await nursery.start(is_idle, writes, other)
        nursery.start_soon(hangs, writes, override, unbind)
        while open(override).read() != "vfio-pci\\n":
            await trio.sleep(0.01)
        await trio.testing.wait_all_tasks_blocked(0.05)
        print("begun", flush=True)
trio.run(main, *sys.argv[1:])
"""
"""A daemon with two acts: the write of that on group 51 hangs, that on group 52 has nothing to write just now."""


@pytest.fixture
def killed(tmp_path: Path, override: Path, unbind: HangingFile) -> Path:
    """Kills a daemon with two acts; the `driver_override` of group 52."""
    other = tmp_path / "other_override"
    other.write_text("(null)\n")
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, *map(str, (tmp_path / "locks", override, unbind.path, other))],
        stdout=subprocess.PIPE,
        text=True,
    ) as daemon:
        assert daemon.stdout is not None
        try:
            assert daemon.stdout.readline() == "begun\n"
        finally:
            daemon.kill()
    return other


@pytest.mark.usefixtures("killed")
def test_a_write_that_hangs_outlives_the_daemon_and_holds_the_lock_against_the_next_one(
    tmp_path: Path, override: Path, unbind: HangingFile
) -> None:
    pid = holder(tmp_path)

    async def next_daemon() -> None:
        with trio.fail_after(PATIENCE_S):
            with pytest.raises(ActError, match=f"blocked by process {pid}"):
                async with writes(tmp_path)(51):
                    pytest.fail("the group is blocked")
            await answer(unbind)
            await until_it_ends(pid)
            async with writes(tmp_path)(51) as act:
                assert await act.read(str(override)) == "\n"

    trio.run(next_daemon)


async def test_a_process_with_nothing_to_write_ends_with_its_killed_daemon(
    tmp_path: Path, killed: Path, unbind: HangingFile
) -> None:
    """Also beside one that hangs: neither has a descriptor of the other's input."""
    with trio.fail_after(PATIENCE_S):
        await until_it_ends(holder(tmp_path, 52))
        assert text(killed) == "\n"
        async with writes(tmp_path)(52) as act:
            assert await act.read(str(killed)) == "\n"
        with pytest.raises(ActError, match=f"blocked by process {holder(tmp_path)}"):
            async with writes(tmp_path)(51):
                pytest.fail("the group is blocked")
        await answer(unbind)


async def test_a_signal_to_the_daemons_group_does_not_reach_it(tmp_path: Path, override: Path) -> None:
    with trio.fail_after(PATIENCE_S):
        async with writes(tmp_path)(51) as act:
            pid = holder(tmp_path)
            assert os.getsid(pid) == pid != os.getsid(0)
            await act.write(str(override), "x\n")


async def test_a_writing_process_that_was_killed_is_an_error_and_no_hang(
    tmp_path: Path, override: Path
) -> None:
    with trio.fail_after(PATIENCE_S):
        async with writes(tmp_path)(51) as act:
            os.kill(holder(tmp_path), signal.SIGKILL)
            await until_it_ends(holder(tmp_path))
            with pytest.raises(OSError, match="has ended") as caught:
                await act.write(str(override), "x\n")
    assert caught.value.errno == errno.EPIPE


async def killed_between_two_writes(
    open_writes: ProcessWrites, tmp_path: Path, override: Path, meanwhile: Callable[[], object] = lambda: None
) -> None:
    async with open_writes(51) as act:
        await act.at_the_end(str(override), "\n")
        await act.write(str(override), "vfio-pci\n")
        os.kill(holder(tmp_path), signal.SIGKILL)
        await until_it_ends(holder(tmp_path))
        meanwhile()
        await act.write(str(override.parent / "unbind"), "never\n")


async def test_after_a_kill_another_process_has_the_last_word(tmp_path: Path, override: Path) -> None:
    """Issue 24, 2: driver_override stayed until the claim was unprepared."""
    with trio.fail_after(PATIENCE_S):
        with pytest.raises(OSError, match="has ended"):
            await killed_between_two_writes(writes(tmp_path), tmp_path, override)
        assert text(override) == "\n"


async def test_what_somebody_has_written_after_the_kill_stays(tmp_path: Path, override: Path) -> None:
    with trio.fail_after(PATIENCE_S):
        with pytest.raises(OSError, match="has ended"):
            await killed_between_two_writes(
                writes(tmp_path), tmp_path, override, lambda: override.write_text("an-administrators\n")
            )
        assert text(override) == "an-administrators\n"


async def test_a_process_that_is_killed_again_is_the_acts_error(
    tmp_path: Path, override: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Issue 24, 2: it ended the daemon, and each start after it."""
    opened, ours = writes(tmp_path), "gpuactors.acts.writes._PROGRAM"
    with trio.fail_after(PATIENCE_S):
        with pytest.raises(ActError, match=r"was killed between two writes, and .*driver_override") as caught:
            await killed_between_two_writes(
                opened, tmp_path, override, lambda: monkeypatch.setattr(ours, str(tmp_path / "none.py"))
            )
        assert caught.value.fault is ActFault.REFUSED
        monkeypatch.undo()
        async with opened(51) as act:
            assert await act.read(str(override)) == "vfio-pci\n"


@pytest.mark.parametrize(
    "number", [errno.EAGAIN, errno.EACCES, errno.EMFILE, errno.ENOMEM, errno.ENOENT, errno.EIO]
)
@pytest.mark.parametrize("call", ["subprocess.Popen", "os.dup", "fcntl.flock", "os.pidfd_open"])
async def test_no_process_for_the_writes_is_the_acts_error_and_passes(
    tmp_path: Path, override: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    """Issue 24, 2: an OSError of Popen ended the daemon and, as the intent is durable, every start after it."""
    opened = writes(tmp_path)

    def fails(*_args: object, **_kwargs: object) -> None:
        raise OSError(number, os.strerror(number))

    with trio.fail_after(PATIENCE_S):
        with monkeypatch.context() as patched:
            patched.setattr(f"gpuactors.acts.writes.{call}", fails)
            if call == "os.pidfd_open":  # it is waited for otherwise
                await override_and_no_more(opened, override)
            else:
                expected = (
                    "blocked"
                    if (call, number) == ("fcntl.flock", errno.EAGAIN)
                    else "nothing was written, as"
                )
                with pytest.raises(ActError, match=expected):
                    await override_and_no_more(opened, override)
        if call == "os.dup":  # its process ends by itself
            await until_it_ends(holder(tmp_path))
        await override_and_no_more(opened, override)
    assert text(override) == "\n"


async def override_and_no_more(open_writes: ProcessWrites, override: Path) -> None:
    async with open_writes(51) as act:
        await act.at_the_end(str(override), "\n")
        await act.write(str(override), "vfio-pci\n")


async def test_lock_files_that_cannot_be_made_are_named(tmp_path: Path) -> None:
    (tmp_path / "locks").write_text("")
    with pytest.raises(ActError, match=r"lock file .*iommu-group-51.lock cannot be made"):
        async with writes(tmp_path)(51):
            pytest.fail("there is no lock")


async def test_a_link_in_the_place_of_a_lock_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "locks").mkdir()
    (tmp_path / "locks" / "iommu-group-51.lock").symlink_to(tmp_path / "target")
    with pytest.raises(ActError, match=r"iommu-group-51.lock cannot be made"):
        async with writes(tmp_path)(51):
            pytest.fail("there is no lock")
    assert not (tmp_path / "target").exists()


def test_an_existing_file_is_replaced_whole_and_a_missing_one_is_not_made(tmp_path: Path) -> None:
    path = tmp_path / "driver_override"
    path.write_text("nvgrace_gpu_vfio_pci\n")
    writer_process.write(str(path), "\n")
    assert path.read_text() == "\n"
    with pytest.raises(FileNotFoundError):
        writer_process.write(str(tmp_path / "none"), "x")


def test_it_starts_without_anything_of_ours() -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-X", "importtime", writer_process.__file__],
        input=b"",
        capture_output=True,
        check=True,
        timeout=PATIENCE_S,
    )
    imported = {line.rpartition(b"|")[2].strip() for line in done.stderr.splitlines()}
    assert not imported & {b"gpuactors", b"trio", b"subprocess", b"json", b"asyncio"}


async def test_no_descriptor_and_no_thread_is_left(
    tmp_path: Path, override: Path, unbind: HangingFile
) -> None:
    opened = writes(tmp_path)

    async def one() -> None:
        async with opened(51) as act:
            await act.write(str(override), "x\n")

    with trio.fail_after(PATIENCE_S):
        await one()
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            await one()
        with pytest.raises(ActError):
            async with writes(tmp_path, 0.05)(52) as act:
                await act.write(str(unbind.path), "x\n")
        assert len(os.listdir("/proc/self/fd")) == before
        await answer(unbind)
    assert threading.active_count() < 20
