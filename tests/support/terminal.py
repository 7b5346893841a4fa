"""A command on a real terminal of a known size: a pty, with pyte as its screen. The bytes are kept as well."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, final

import pyte

from tests.process.daemon import WAIT_S, clean_environment
from tests.support.forked import Forked

_TAKE_TERMINAL: Final = (
    "import fcntl, os, sys, termios\n"
    "fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
    "os.execv(sys.argv[1], sys.argv[1:])\n"
)
"""The new session gets the terminal as its own, so that Ctrl-C on it is a signal."""


@final
class OnTerminal:
    """A process whose standard input, output and error are a terminal, which it controls. Killed at the end."""

    def __init__(
        self,
        *words: str,
        columns: int = 100,
        rows: int = 30,
        env: Mapping[str, str] | None = None,
        program: Sequence[str] = (),
    ) -> None:
        """`gpuactors` with these words, forked; or another program that starts with them."""
        self.raw = b""
        self.screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self.screen)
        self._master, slave = pty.openpty()
        self.slave = os.dup(slave)
        self.resize(columns, rows)
        self.at_first = self.modes()
        env = {**clean_environment(env), "TERM": "xterm-256color", **(env or {})}
        self.process: Forked | subprocess.Popen[bytes]
        if program:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _TAKE_TERMINAL, *program, *words],
                stdin=slave, stdout=slave, stderr=slave, env=env, start_new_session=True,
            )  # fmt: skip
        else:
            self.process = Forked(words, stdin=slave, stdout=slave, stderr=slave, env=env, owns_terminal=True)
        os.close(slave)

    def __enter__(self) -> OnTerminal:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._master)
        os.close(self.slave)

    def resize(self, columns: int, rows: int) -> None:
        """The terminal's window gets another size; its processes are told by the kernel."""
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.screen.resize(rows, columns)

    def modes(self) -> list[Any]:
        """Of the terminal: echo, line by line or not."""
        return termios.tcgetattr(self.slave)

    def type(self, text: str) -> None:
        """Somebody types."""
        os.write(self._master, text.encode())

    def lines(self) -> list[str]:
        """The screen without what is blank at the right and at the end."""
        lines = [line.rstrip() for line in self.screen.display]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    def wait(self, condition: Callable[[list[str]], bool], what: str, within_s: float = WAIT_S) -> list[str]:
        """The lines, as soon as they are so. Raises TimeoutError that shows them."""
        ends = time.monotonic() + within_s
        while not condition(self.lines()):
            if time.monotonic() > ends:
                raise TimeoutError(f"{what}; the screen is:\n" + "\n".join(self.lines()))
            if not self._read(0.1) and self.process.poll() is not None:
                break
        assert condition(self.lines()), f"{what}; the process has ended, and left:\n" + "\n".join(
            self.lines()
        )
        return self.lines()

    def wait_text(self, text: str) -> list[str]:
        """As `wait`, for a text in any line."""
        return self.wait(lambda lines: any(text in line for line in lines), repr(text))

    def wait_exit(self, number: signal.Signals | None = None) -> int:
        """The exit code, after a signal if one is given; all that it wrote is read."""
        if number is not None:
            self.process.send_signal(number)
        ends = time.monotonic() + WAIT_S
        while (code := self.process.poll()) is None:
            self._read(0.1)
            assert time.monotonic() < ends, "it does not end"
        while self._read(0.1):
            pass
        return code

    def _read(self, within_s: float) -> bool:
        ready, _, _ = select.select([self._master], [], [], within_s)
        if not ready:
            return False
        try:
            read = os.read(self._master, 1 << 16)
        except OSError:  # EIO: nobody has the terminal open any more
            return False
        self.raw += read
        self._stream.feed(read)
        return bool(read)
