"""A program that is asked one thing: a child process with a deadline. One that does not end when it is killed, as the
kernel holds it, is left to itself and never started beside itself."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final, final

import trio
from msgspec import Struct

from gpuactors.host.threads import OneByOne

PROGRAM_OUTPUT_MAX_BYTES: Final = 65536
"""Limit on the output that is read of such a program, 64 KiB: a word, an error, a list of GPUs. A pipe holds as
much."""


_LOCK_SHARE: Final = 0.5
"""The part of its deadline that a program may wait for its lock."""

_LOCK_LOOK_S: Final = 0.05
"""The interval of looks at a lock that another process has. One that has ended frees it at once."""


class Ended(Struct, frozen=True):
    """The result of a program that ended in time."""

    status: int
    output: bytes
    """Its output without surrounding blanks, at most PROGRAM_OUTPUT_MAX_BYTES."""
    error_output: bytes
    """Its standard error, likewise."""


class Late(Struct, frozen=True):
    """The result of a program that did not end in time."""

    what: str
    """The failure as a sentence."""


@final
class AskedProgram:
    """One program with its arguments."""

    def __init__(
        self, arguments: Sequence[str], name: str, deadline_s: float, lock: str | None = None
    ) -> None:
        """`name`: the name of the thread that starts it. `lock`: the path of a file that the program and what it starts
        keep locked, so that it is not started beside one that an earlier process of this daemon has left."""
        self._arguments = [*arguments]
        self._deadline_s = deadline_s
        self._lock = lock
        self._thread = OneByOne(name)
        self._left: subprocess.Popen[bytes] | None = None
        """A process that was killed and has not ended yet."""

    async def ask(self, *more: str, deadline_s: float | None = None) -> Ended | Late:
        """Run it once, with these further arguments. `deadline_s`: its deadline, if it has one of its own. Raises
        `OSError` if it cannot be started: `BlockingIOError` if the lock is held until the deadline."""
        deadline_s = self._deadline_s if deadline_s is None else deadline_s
        if self._left is not None and self._left.poll() is None:
            return Late(f"process {self._left.pid} of an earlier question has not ended")
        self._left = None
        child = None
        with trio.move_on_after(deadline_s):
            # In a thread: the program's file system may hang.
            child = await self._thread(lambda: self._start(more, deadline_s))
        if child is None:
            return Late("it could not be started in this time")
        return await self._answer(child, deadline_s)

    def _start(self, more: Sequence[str], deadline_s: float) -> subprocess.Popen[bytes]:
        """Start it in a session of its own, so that its children can be killed with it. Raises `OSError`."""
        # Less than the deadline: nobody waits for one that is started after it.
        with _locked(self._lock, deadline_s * _LOCK_SHARE) as inherited:
            return subprocess.Popen(
                [*self._arguments, *more],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, "LC_ALL": "C"},
                start_new_session=True,
                pass_fds=inherited,
            )

    async def _answer(self, child: subprocess.Popen[bytes], deadline_s: float) -> Ended | Late:
        assert child.stdout is not None
        assert child.stderr is not None
        # A pipe holds more than it has to say; one that says more waits for us, and is late.
        with child.stdout, child.stderr:
            if not await self._ended(child, deadline_s):
                return Late(f"process {child.pid} has not ended")
            return Ended(child.returncode, _output(child.stdout.fileno()), _output(child.stderr.fileno()))

    async def _ended(self, child: subprocess.Popen[bytes], deadline_s: float) -> bool:
        """Return whether it ends in time; kill it if it does not, or if this is cancelled."""
        try:
            await self._end_of(child, deadline_s)
        finally:
            if child.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                self._left = child
        return self._left is not child

    async def _end_of(self, child: subprocess.Popen[bytes], deadline_s: float) -> None:
        """Wait until it has ended, or its time is over. Raises `OSError`."""
        descriptor = os.pidfd_open(child.pid)
        try:
            with trio.move_on_after(deadline_s):
                await trio.lowlevel.wait_readable(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def _locked(path: str | None, seconds: float) -> Iterator[tuple[int, ...]]:
    """Lock a file for a program that is started in here: the descriptor that it inherits has the lock, and so does each
    process that inherits it, until the last one has ended. Raises `OSError`; `BlockingIOError` if another process has
    the lock for this time."""
    if path is None:
        yield ()
        return
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        until = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise
                time.sleep(_LOCK_LOOK_S)
        yield (descriptor,)
    finally:
        os.close(descriptor)


def _output(descriptor: int) -> bytes:
    os.set_blocking(descriptor, False)
    try:
        return os.read(descriptor, PROGRAM_OUTPUT_MAX_BYTES).strip()
    except BlockingIOError:  # something that it has started has the pipe open
        return b""
