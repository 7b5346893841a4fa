"""Writes to sysfs, of one act at a time per IOMMU group: the seam between an act and the kernel.

Each act has a process of its own (`writer_process.py`) and the lock file of its group. A write that does not return in
time is given up by the act and not by the process, which waits on and keeps the lock. So a write is never made twice at
once, neither by a later act nor by the next daemon: that finds the lock taken, names the process, and writes nothing.
"""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final, Protocol, final

import trio
from msgspec import Struct

from gpuactors import limits
from gpuactors.acts import writer_process
from gpuactors.core.values.claim import ActFault
from gpuactors.core.values.quote import quoted_id
from gpuactors.host.threads import in_thread
from gpuactors.ports.claims import ActError
from gpuactors.process.resource_exhaustion import NO_THREAD, shortage

_PROGRAM: Final = writer_process.__file__

_LOCK_FILE_BYTES: Final = 16384
"""The bytes of a lock file that are read: a path in hexadecimal, and what is written to it."""


class Writes(Protocol):
    """The writes and reads of an act in sysfs. `OSError` is the kernel's answer; `ActError` (HANGS) means that there
    was none in time, and that this act can do nothing more."""

    async def write(self, path: str, text: str) -> None:
        """Write an attribute. Raises `OSError`, `ActError`."""

    async def read(self, path: str) -> str:
        """Read an attribute that may block. Raises `OSError`, `ActError`."""

    async def at_the_end(self, path: str, text: str) -> None:
        """Have this written when the act is over, however it ends: also if this process is killed, or the writing one;
        then only if nobody has written something else meanwhile. Raises `OSError`, `ActError`."""


class OpenWrites(Protocol):
    """The writes of one act at a time per IOMMU group."""

    def __call__(self, group: int) -> AbstractAsyncContextManager[Writes]:
        """Begin an act on an IOMMU group; it is over when the context is left. Raises `ActError` (BLOCKED) if an
        earlier act on it has not come to its end."""

    def refuse_under_way(self, group: int) -> None:
        """Raise `ActError` (BLOCKED) if an earlier act on this IOMMU group has not come to its end: its write may still
        change the driver of a function."""


@final
class ProcessWrites:
    """`OpenWrites` on a real host. `directory` is for the lock files; it is the same for every daemon of this node."""

    def __init__(
        self,
        directory: str,
        *,
        taken: Callable[[], str] = lambda: "",
        deadline_s: float = limits.SYSFS_WRITE_DEADLINE_S,
    ) -> None:
        """`taken`: why this daemon may begin no act any more, as a sentence; empty if it may (`StateLock.taken`)."""
        self._directory = directory
        self._taken = taken
        self._deadline_s = deadline_s
        self._left: list[subprocess.Popen[bytes]] = []
        """The processes that had not ended when their act was given up, to be reaped."""

    @asynccontextmanager
    async def __call__(self, group: int) -> AsyncIterator[Writes]:
        self._left = [process for process in self._left if process.poll() is None]
        # In one piece: given up half way, the thread ends with nothing, or with a process whose input ends at once.
        process = await in_thread(lambda: self._start(group), name=f"act {group}")
        try:
            requests, answers = _streams(process)
        except OSError as error:
            self._left.append(process)  # which ends, as its input does
            raise _not_begun("the process for them cannot be reached", error) from None
        act = _Act(process.pid, requests, answers, self._deadline_s)
        try:
            yield act
        finally:
            # Closing its input ends the process as soon as its write returns.
            with trio.CancelScope(shield=True):
                await trio.aclose_forcefully(requests)
                await trio.aclose_forcefully(answers)
            try:
                if not act.hangs:  # also after a refusal; a cancelled act does not wait
                    await self._ended(process, group)
                    if process.poll() and act.left:
                        await self._make_up(group, act)
            finally:
                if process.poll() is None:
                    self._left.append(process)

    def refuse_under_way(self, group: int) -> None:
        """Implement `OpenWrites.refuse_under_way`. Raises `ActError` (REFUSED) if the lock file cannot be made."""
        os.close(self._lock(group))

    async def _ended(self, process: subprocess.Popen[bytes], group: int) -> None:
        """Wait until the final writes are done, and the lock is free. Raises `ActError`."""
        with trio.move_on_after(self._deadline_s):
            await _end_of(process)
            return
        path = f"driver_override of a function of IOMMU group {group}"
        raise hangs(UnderWay(path, "", time.time() - self._deadline_s), process.pid, self._deadline_s)

    async def _make_up(self, group: int, killed: _Act) -> None:
        """Have another process make the final writes of one that was killed, where nobody has written anything else
        since. Raises `ActError`."""
        async with self(group) as act:
            for path, text in killed.left.items():
                try:
                    if (await act.read(path)).strip() == killed.written[path].strip():
                        await act.write(path, text)
                except FileNotFoundError:
                    continue
                except OSError as error:
                    raise ActError(
                        ActFault.REFUSED,
                        f"process {killed.pid} was killed between two writes, and {path}, which it left, could not be "
                        f"restored ({error.strerror}): see the kernel's log for the cause, usually a lack of "
                        "memory; the next attempt restores it",
                    ) from None

    def _start(self, group: int) -> subprocess.Popen[bytes]:
        """Start the process in a session of its own, so that a signal to the daemon's does not reach it. Raises
        `ActError`."""
        lock = self._lock(group)
        try:
            # Under the lock: an act that begins now has the group until its end, also for a successor.
            if taken := self._taken():
                raise ActError(ActFault.BLOCKED, taken)
            try:
                process = subprocess.Popen(
                    [sys.executable, "-I", "-S", _PROGRAM, str(lock)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    bufsize=0,
                    pass_fds=(lock,),
                    start_new_session=True,
                    cwd="/",
                )
            except OSError as error:
                raise _not_begun(f"{sys.executable} cannot be started for them", error) from None
            with suppress(OSError):  # word of who has the lock, for who finds it taken
                os.ftruncate(lock, 0)
                os.pwrite(lock, f"{process.pid}\n".rjust(writer_process.NOTE_AT).encode(), 0)
            return process
        finally:
            os.close(lock)

    def _lock(self, group: int) -> int:
        path = os.path.join(self._directory, f"iommu-group-{group}.lock")
        try:
            os.makedirs(self._directory, mode=0o700, exist_ok=True)
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise ActError(
                ActFault.REFUSED,
                f"the lock file {path} cannot be made ({error.strerror}), so nothing is written: check its directory",
            ) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            text = ""
            with suppress(OSError):
                text = os.pread(lock, _LOCK_FILE_BYTES, 0).decode(errors="replace")
            os.close(lock)
            holder, under_way = text[: writer_process.NOTE_AT].strip(), text[writer_process.NOTE_AT :]
            raise blocked(group, holder, _noted(under_way)) from None
        except OSError as error:
            os.close(lock)
            raise _not_begun(f"{path} cannot be locked", error) from None
        return lock


def _streams(process: subprocess.Popen[bytes]) -> tuple[trio.lowlevel.FdStream, trio.lowlevel.FdStream]:
    """Return its input and its output. Raises `OSError`: both are closed then."""
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        requests = trio.lowlevel.FdStream(os.dup(process.stdin.fileno()))
        try:
            return requests, trio.lowlevel.FdStream(os.dup(process.stdout.fileno()))
        except OSError:
            requests.close()
            raise


async def _end_of(process: subprocess.Popen[bytes]) -> None:
    try:
        descriptor = os.pidfd_open(process.pid)
    except OSError:  # for want of descriptors
        await in_thread(process.wait, name="end of a writing process")
        return
    try:
        await trio.lowlevel.wait_readable(descriptor)
    finally:
        os.close(descriptor)


def _not_begun(what: str, error: OSError) -> ActError:
    """Return the error of an act for which no process could be started."""
    why = NO_THREAD if error.errno == errno.EAGAIN else shortage(error) or error.strerror
    return ActError(
        ActFault.REFUSED,
        f"nothing was written, as {what} ({why}): check the daemon's limits and its container; the next request "
        "tries again",
    )


class UnderWay(Struct, frozen=True):
    """A write to sysfs that has not returned, or a read."""

    path: str
    text: str | None
    """The text to write (the function's address for an unbind); None for a read."""
    since: float
    """The time of the request, in Unix seconds."""

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.since, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        what = "read of" if self.text is None else f"write of {quoted_id(self.text.strip())} to"
        return f"the {what} {self.path} has not returned since {since}"


def _noted(words: str) -> UnderWay | None:
    """Parse the note of `writer_process.note`; None if it is missing or malformed."""
    try:
        since, word, path, *text = words.split()
        written = bytes.fromhex(text[0]).decode() if word == "write" and text else ""
        noted = UnderWay(
            os.fsdecode(bytes.fromhex(path)), None if word == "read" else written, float(int(since))
        )
        str(noted)  # a time that is none
        return noted
    except (ValueError, OverflowError, OSError):
        return None


def blocked(group: int, holder: str, under_way: UnderWay | None = None) -> ActError:
    """Return the error of an act on a group on which an earlier one has not come to its end."""
    what = under_way or "its write to sysfs has not returned"
    return ActError(
        ActFault.BLOCKED,
        f"IOMMU group {group} is blocked by process {holder or '(unknown)'}: {what}. "
        f"/proc/{holder or 'PID'}/stack shows what the kernel waits for, usually for a process to close the device; "
        "then it continues by itself. Nothing was written",
    )


def hangs(under_way: UnderWay, pid: int | str, deadline_s: float) -> ActError:
    """Return the error of a write that has not returned in time."""
    return ActError(
        ActFault.HANGS,
        f"{under_way}, and it was given up after {deadline_s:g} s: the kernel waits, usually until a process closes "
        f"the device; process {pid} waits for it and nothing else is written to this group. Find the holder with "
        "`gpuactors explain`, or lsof on the host",
    )


@final
@dataclass(slots=True)
class _Act:
    """Implements `Writes`."""

    pid: int
    requests: trio.lowlevel.FdStream
    answers: trio.lowlevel.FdStream
    deadline_s: float
    hangs: bool = False
    """True if there was no answer in time."""
    written: dict[str, str] = field(default_factory=dict)
    """The last text written to each file, or possibly written."""
    duties: dict[str, str] = field(default_factory=dict)

    @property
    def left(self) -> dict[str, str]:
        """The final writes to files that were written to."""
        return {path: text for path, text in self.duties.items() if path in self.written}

    async def write(self, path: str, text: str) -> None:
        self.written[path] = text
        await self._ask(path, "write", text)

    async def read(self, path: str) -> str:
        return await self._ask(path, "read")

    async def at_the_end(self, path: str, text: str) -> None:
        await self._ask(path, "finally", text)
        self.duties[path] = text

    async def _ask(self, path: str, word: str, text: str | None = None) -> str:
        parts = [word, os.fsencode(path).hex()] + ([] if text is None else [text.encode().hex()])
        under_way = UnderWay(path, text, time.time())
        with trio.move_on_after(self.deadline_s):
            try:
                await self.requests.send_all(" ".join(parts).encode() + b"\n")
                answer = await self._answer()
            except trio.BrokenResourceError:
                answer = b""
            if not answer:
                raise OSError(errno.EPIPE, f"process {self.pid} for the write has ended", path)
            number, _, content = answer.decode().partition(" ")
            if number != "0":
                raise OSError(int(number), os.strerror(int(number)), path)
            return bytes.fromhex(content).decode()
        self.hangs = True
        raise hangs(under_way, self.pid, self.deadline_s)

    async def _answer(self) -> bytes:
        """Read one line; empty if the process has ended."""
        line = b""
        while not line.endswith(b"\n"):
            part = await self.answers.receive_some(8192)
            if not part:
                return b""
            line += part
        return line.strip()
