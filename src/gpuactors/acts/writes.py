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
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Final, Protocol, final

import trio

from gpuactors import limits
from gpuactors.acts import writer_process
from gpuactors.core.dra.claim import ActFault
from gpuactors.host.threads import in_thread
from gpuactors.ports import ActError

_PROGRAM: Final = writer_process.__file__


class Writes(Protocol):
    """What an act may do in sysfs. `OSError` is the kernel's answer; `ActError` (HANGS) means that there was none in
    time, and that this act can do nothing more."""

    async def write(self, path: str, text: str) -> None:
        """Writes an attribute. Raises `OSError`, `ActError`."""
        ...

    async def read(self, path: str) -> str:
        """Reads an attribute that may block. Raises `OSError`, `ActError`."""
        ...

    async def at_the_end(self, path: str, text: str) -> None:
        """Has this written when the act is over, however it ends: also if this process is killed."""
        ...


OpenWrites = Callable[[int], AbstractAsyncContextManager[Writes]]
"""Begins an act on an IOMMU group; it is over when the context is left. Raises `ActError` (BLOCKED) if an earlier act
on it has not come to its end."""


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
        """Processes that had not ended when their act was given up, to be reaped."""

    @asynccontextmanager
    async def __call__(self, group: int) -> AsyncIterator[Writes]:
        """As `OpenWrites`."""
        self._left = [process for process in self._left if process.poll() is None]
        # In one piece: given up half way, the thread ends with nothing, or with a process whose input ends at once.
        process = await in_thread(lambda: self._start(group), name=f"act {group}", ended=lambda: None)
        assert process.stdin is not None
        assert process.stdout is not None
        requests = trio.lowlevel.FdStream(os.dup(process.stdin.fileno()))
        answers = trio.lowlevel.FdStream(os.dup(process.stdout.fileno()))
        process.stdin.close()
        process.stdout.close()
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
            finally:
                if process.poll() is None:
                    self._left.append(process)

    async def _ended(self, process: subprocess.Popen[bytes], group: int) -> None:
        """What was to be written at the end is written, and the lock is free. Raises `ActError`."""
        descriptor = os.pidfd_open(process.pid)
        try:
            with trio.move_on_after(self._deadline_s):
                await trio.lowlevel.wait_readable(descriptor)
                return
        finally:
            os.close(descriptor)
        raise hangs(f"driver_override of a function of IOMMU group {group}", process.pid, self._deadline_s)

    def _start(self, group: int) -> subprocess.Popen[bytes]:
        """The process, in a session of its own, so that a signal to the daemon's does not reach it. Raises
        `ActError`."""
        lock = self._lock(group)
        try:
            # Under the lock: an act that begins now has the group until its end, also for a successor.
            if taken := self._taken():
                raise ActError(ActFault.BLOCKED, taken)
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", _PROGRAM],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                pass_fds=(lock,),
                start_new_session=True,
                cwd="/",
            )
            with suppress(OSError):  # word of who has the lock, for who finds it taken
                os.ftruncate(lock, 0)
                os.pwrite(lock, f"{process.pid}\n".encode(), 0)
            return process
        finally:
            os.close(lock)

    def _lock(self, group: int) -> int:
        path = os.path.join(self._directory, f"iommu-group-{group}.lock")
        try:
            os.makedirs(self._directory, mode=0o700, exist_ok=True)
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ActError(
                ActFault.REFUSED,
                f"the lock file {path} cannot be made ({error.strerror}), so nothing is written: check its directory",
            ) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(lock, 32, 0).decode(errors="replace").strip()
            os.close(lock)
            raise blocked(group, holder) from None
        return lock


def blocked(group: int, holder: str) -> ActError:
    """The error of an act on a group on which an earlier one has not come to its end."""
    return ActError(
        ActFault.BLOCKED,
        f"IOMMU group {group} is blocked by process {holder or '(unknown)'}, whose write to sysfs has not returned: "
        f"see /proc/{holder or 'PID'}/stack for what the kernel waits for, usually that a process closes the device; "
        "it goes on by itself then. Nothing was written",
    )


def hangs(path: str, pid: int | str, deadline_s: float) -> ActError:
    """The error of a write that has not returned in time."""
    return ActError(
        ActFault.HANGS,
        f"the write to {path} has not returned within {deadline_s:g} s: the kernel waits, usually until a process "
        f"closes the device; process {pid} waits for it and nothing else is written to this group. Find the holder "
        "with `gpuactors explain`, or lsof on the host",
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
    """There was no answer in time."""

    async def write(self, path: str, text: str) -> None:
        """As `Writes.write`."""
        await self._ask(path, "write", text)

    async def read(self, path: str) -> str:
        """As `Writes.read`."""
        return await self._ask(path, "read")

    async def at_the_end(self, path: str, text: str) -> None:
        """As `Writes.at_the_end`."""
        await self._ask(path, "finally", text)

    async def _ask(self, path: str, word: str, text: str | None = None) -> str:
        parts = [word, os.fsencode(path).hex()] + ([] if text is None else [text.encode().hex()])
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
        raise hangs(path, self.pid, self.deadline_s)

    async def _answer(self) -> bytes:
        """One line; empty if the process has ended."""
        line = b""
        while not line.endswith(b"\n"):
            part = await self.answers.receive_some(8192)
            if not part:
                return b""
            line += part
        return line.strip()
