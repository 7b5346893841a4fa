"""Asks the IMEX daemon that the operator runs on the host whether it is ready, by NVIDIA's nvidia-imex-ctl.

A child process with a deadline. One that does not end when it is killed, as the kernel holds it, is left to itself and
never started beside itself. Must not decide what follows from the answer.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from contextlib import suppress
from typing import Final, final

import trio

from gpuactors import limits
from gpuactors.core.quote import quoted
from gpuactors.host.threads import OneByOne
from gpuactors.ports import HostShortError
from gpuactors.shortage import shortage

_READY: Final = b"READY"
"""All that it says of a daemon that is ready. Not a part of it: another answer is NOT_READY."""


@final
class ImexCtl:
    """One control tool, by its path as this process sees it."""

    def __init__(self, path: str, *, deadline_s: float = limits.IMEX_CTL_S) -> None:
        self._path = path
        self._deadline_s = deadline_s
        self._thread = OneByOne("imex-ctl")
        self._left: subprocess.Popen[bytes] | None = None
        """It was killed and has not ended yet."""

    async def problem(self) -> str:
        """Why the host's IMEX daemon is not ready, as a sentence; empty if it is. Raises `HostShortError`."""
        if self._left is not None and self._left.poll() is None:
            return self._late(f"process {self._left.pid} of an earlier question has not ended")
        self._left = None
        child = None
        try:
            with trio.move_on_after(self._deadline_s):
                # In a thread: the program's file system may hang.
                child = await self._thread(self._start)
        except OSError as error:
            if (short := shortage(error)) is not None:
                raise HostShortError(f"{self._path} -q could not be run: {short}") from error
            name = errno.errorcode.get(error.errno or 0, "")
            return (
                f"{self._path} cannot be run: {error.strerror} ({name}); install NVIDIA's nvidia-imex on the host, and "
                "set --imex-ctl to where its nvidia-imex-ctl is"
            )
        if child is None:
            return self._late("it could not be started in this time")
        return await self._answer(child)

    def _start(self) -> subprocess.Popen[bytes]:
        """In a session of its own, so that what it starts can be killed with it. Raises `OSError`."""
        return subprocess.Popen(
            [self._path, "-q"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "LC_ALL": "C"},
            start_new_session=True,
        )

    async def _answer(self, child: subprocess.Popen[bytes]) -> str:
        assert child.stdout is not None
        assert child.stderr is not None
        # A pipe holds more than it has to say; one that says more waits for us, and is late.
        with child.stdout, child.stderr:
            if not await self._ended(child):
                return self._late(f"process {child.pid} has not ended")
            said, complaint = _said(child.stdout.fileno()), _said(child.stderr.fileno())
        if child.returncode == 0 and said == _READY:
            return ""
        words = quoted((said or complaint).decode(errors="replace")) or "nothing"
        status = "" if child.returncode == 0 else f" and ends with status {child.returncode}"
        return (
            f"the host's IMEX daemon is not ready: {self._path} -q says {words}{status}, and not READY; see the log of "
            "nvidia-imex on the host"
        )

    async def _ended(self, child: subprocess.Popen[bytes]) -> bool:
        """Whether it has ended in time; else, and if this is cancelled, it is killed."""
        descriptor = os.pidfd_open(child.pid)
        try:
            with trio.move_on_after(self._deadline_s):
                await trio.lowlevel.wait_readable(descriptor)
        finally:
            os.close(descriptor)
            if child.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                self._left = child
        return self._left is not child

    def _late(self, what: str) -> str:
        return (
            f"{self._path} -q has not answered within {self._deadline_s:g} s: {what}; look whether nvidia-imex runs on "
            "the host"
        )


def _said(descriptor: int) -> bytes:
    os.set_blocking(descriptor, False)
    try:
        return os.read(descriptor, limits.IMEX_SAID_MAX_BYTES).strip()
    except BlockingIOError:  # something that it has started has the pipe open
        return b""
