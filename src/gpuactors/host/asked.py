"""A program that is asked one thing: a child process with a deadline. One that does not end when it is killed, as the
kernel holds it, is left to itself and never started beside itself."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, final

import trio
from msgspec import Struct

from gpuactors.host.threads import OneByOne

PROGRAM_OUTPUT_MAX_BYTES: Final = 65536
"""Limit on the output that is read of such a program, 64 KiB: a word, an error, a list of GPUs. A pipe holds as
much."""


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

    def __init__(self, arguments: Sequence[str], name: str, deadline_s: float) -> None:
        """`name`: the name of the thread that starts it."""
        self._arguments = [*arguments]
        self._deadline_s = deadline_s
        self._thread = OneByOne(name)
        self._left: subprocess.Popen[bytes] | None = None
        """A process that was killed and has not ended yet."""

    async def ask(self) -> Ended | Late:
        """Run it once. Raises `OSError` if it cannot be started."""
        if self._left is not None and self._left.poll() is None:
            return Late(f"process {self._left.pid} of an earlier question has not ended")
        self._left = None
        child = None
        with trio.move_on_after(self._deadline_s):
            # In a thread: the program's file system may hang.
            child = await self._thread(self._start)
        return Late("it could not be started in this time") if child is None else await self._answer(child)

    def _start(self) -> subprocess.Popen[bytes]:
        """Start it in a session of its own, so that its children can be killed with it. Raises `OSError`."""
        return subprocess.Popen(
            self._arguments,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "LC_ALL": "C"},
            start_new_session=True,
        )

    async def _answer(self, child: subprocess.Popen[bytes]) -> Ended | Late:
        assert child.stdout is not None
        assert child.stderr is not None
        # A pipe holds more than it has to say; one that says more waits for us, and is late.
        with child.stdout, child.stderr:
            if not await self._ended(child):
                return Late(f"process {child.pid} has not ended")
            return Ended(child.returncode, _output(child.stdout.fileno()), _output(child.stderr.fileno()))

    async def _ended(self, child: subprocess.Popen[bytes]) -> bool:
        """Return whether it ends in time; kill it if it does not, or if this is cancelled."""
        try:
            await self._end_of(child)
        finally:
            if child.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                self._left = child
        return self._left is not child

    async def _end_of(self, child: subprocess.Popen[bytes]) -> None:
        """Wait until it has ended, or its time is over. Raises `OSError`."""
        descriptor = os.pidfd_open(child.pid)
        try:
            with trio.move_on_after(self._deadline_s):
                await trio.lowlevel.wait_readable(descriptor)
        finally:
            os.close(descriptor)


def _output(descriptor: int) -> bytes:
    os.set_blocking(descriptor, False)
    try:
        return os.read(descriptor, PROGRAM_OUTPUT_MAX_BYTES).strip()
    except BlockingIOError:  # something that it has started has the pipe open
        return b""
