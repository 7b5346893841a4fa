"""`python -m gpuactors …` as a process forked from one that has the modules loaded: 0.6 to 1.1 s of the processor less.

For tests of what a command does. Tests of how it starts start a process of their own. Each process of pytest has one
server, which ends with it.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Final, final

from tests.support.patience import patient

START_S: Final = patient(30.0)
READ_AT_THE_START: Final = ("PYTHON", "LC_", "LANG")
"""What the interpreter reads of the environment when it starts: a fork cannot have others."""


def _assert_forkable(env: Mapping[str, str]) -> None:
    read = {name for name in {*env, *os.environ} if name.startswith(READ_AT_THE_START)}
    differ = sorted(name for name in read if env.get(name) != os.environ.get(name))
    assert not differ, f"{differ} are read at the start of a process"


@functools.cache
def _server() -> socket.socket:
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.fork_server", str(its.fileno())],
            cwd=Path(__file__).parents[2],
            pass_fds=[its.fileno()],
        )

    def end() -> None:
        ours.close()
        process.wait(timeout=START_S)

    atexit.register(end)
    return ours


@final
class Forked:
    """A running command, with what the tests use of `subprocess.Popen`."""

    def __init__(
        self,
        words: Sequence[str],
        *,
        env: Mapping[str, str],
        stdin: int = subprocess.DEVNULL,
        stdout: int = subprocess.PIPE,
        stderr: int = subprocess.STDOUT,
        bounds: Mapping[str, float] | None = None,
        owns_terminal: bool = False,
    ) -> None:
        """The files are as for `Popen`. `bounds`: other values, by module and name. With `owns_terminal` it leads a
        session whose terminal is its standard input."""
        self._said, said = os.pipe()
        opened = [said]
        self.stdout: IO[str] | None = None
        if stdin == subprocess.DEVNULL:
            opened.append(stdin := os.open(os.devnull, os.O_RDONLY))
        if stdout == subprocess.PIPE:
            read, stdout = os.pipe()
            opened.append(stdout)
            self.stdout = open(read)  # noqa: SIM115  (open as long as this object)
        request = {
            "words": words, "env": dict(env), "cwd": os.getcwd(), "bounds": dict(bounds or {}),
            "owns_terminal": owns_terminal,
        }  # fmt: skip
        try:
            _assert_forkable(env)
            files = [stdin, stdout, stdout if stderr == subprocess.STDOUT else stderr, said]
            socket.send_fds(_server(), [json.dumps(request).encode()], files)
        finally:
            for file in opened:
                os.close(file)
        self._heard = b""
        self.returncode: int | None = None
        self.pid = int(self._line(START_S))

    def __del__(self) -> None:
        os.close(self._said)
        if self.stdout is not None:
            self.stdout.close()

    def poll(self) -> int | None:
        """The exit code, if it has ended; the negative number of the signal that killed it."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float = START_S) -> int:
        """The exit code. Raises `subprocess.TimeoutExpired`."""
        if self.returncode is None:
            self.returncode = int(self._line(timeout))
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        """Sends it a signal, unless it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):  # ended a moment ago
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Sends it SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _line(self, within_s: float) -> bytes:
        ends = time.monotonic() + within_s
        while b"\n" not in self._heard:
            ready, _, _ = select.select([self._said], [], [], max(0.0, ends - time.monotonic()))
            if not ready:
                raise subprocess.TimeoutExpired("gpuactors", within_s)
            read = os.read(self._said, 64)
            assert read, "the server of forks has ended"
            self._heard += read
        line, _, self._heard = self._heard.partition(b"\n")
        return line


def run(
    words: Sequence[str],
    *,
    env: Mapping[str, str],
    stdout: int | IO[str] | None = None,
    bounds: Mapping[str, float] | None = None,
) -> subprocess.CompletedProcess[str]:
    """A command to its end, with nothing at its standard input; its output in the answer, unless `stdout` takes it."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        to = out if stdout is None else stdout
        written = to if isinstance(to, int) else to.fileno()
        process = Forked(words, env=env, stdout=written, stderr=err.fileno(), bounds=bounds)
        try:
            code = process.wait(patient(60.0))
        finally:
            process.kill()
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(words, code, out.read(), err.read())
