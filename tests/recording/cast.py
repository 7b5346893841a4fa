"""A recording of a terminal in asciinema's format, version 2: a header, then `[seconds, "o", text]` for each output."""

from __future__ import annotations

import codecs
import fcntl
import json
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

PROMPT: Final = "\x1b[1;32m$\x1b[0m "

_TYPED_S: Final = 0.04
"""From one typed character to the next."""

_READ_S: Final = 2.5
"""After the end of a command, so that its output can be read."""

_TOGETHER_S: Final = 0.05
"""Outputs that follow so closely are one."""


_FIRST_S: Final = 60.0
"""Until a command has drawn its first screen, or has ended after `q`."""

_IN_FOREGROUND: Final = """\
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""


@dataclass(frozen=True, slots=True)
class Act:
    """What happens while a command is watched."""

    at_s: float
    do: Callable[[], bytes]
    """Does it, and returns the keys that are typed."""


class RecordingError(Exception):
    """A command ended with another code than it should, or not at all."""


@dataclass
class Cast:
    """A recording that grows."""

    title: str
    columns: int = 100
    rows: int = 34
    names: Mapping[str, str] = field(default_factory=dict)
    """What is shown instead of a directory of the fake node."""
    events: list[tuple[float, str]] = field(default_factory=list)
    now_s: float = 0.0
    """Where the next output goes; the seconds of a command are real, those of typing and reading are made."""

    def text(self) -> str:
        """The file."""
        header = {
            "version": 2,
            "width": self.columns,
            "height": self.rows,
            "title": self.title,
            "env": {"TERM": "xterm"},
        }
        lines = [header, *([round(at, 3), "o", text] for at, text in self._joined())]
        return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)

    def type(self, words: str) -> None:
        """Somebody types a command."""
        self._out(PROMPT)
        self.now_s += 0.5
        for character in words:
            self._out(character)
            self.now_s += _TYPED_S
        self._out("\r\n")

    def run(self, words: Sequence[str], env: Mapping[str, str], *, within_s: float, code: int = 0) -> None:
        """Runs a command in a terminal, to its end. Raises `RecordingError`."""
        began, offset = time.monotonic(), self.now_s
        with self._started(words, env, code) as terminal:
            while chunk := _read(terminal, began + within_s - time.monotonic()):
                self.now_s = offset + time.monotonic() - began
                self._out(self._decode(chunk))
        self.now_s += _READ_S
        self._out(PROMPT)

    def watch(
        self, words: Sequence[str], env: Mapping[str, str], acts: Sequence[Act], *, seconds: float
    ) -> None:
        """Records a command that fills the screen, from its first screen on and for so many seconds; then `q` is typed.
        Raises `RecordingError`."""
        left = sorted(acts, key=lambda act: act.at_s)
        with self._started(words, env, 0) as terminal:
            first = _read(terminal, _FIRST_S)
            while chunk := _read_if_there(terminal, _TOGETHER_S):
                first += chunk
            began = time.monotonic()
            self._out(self._decode(first))
            while self.now_s < seconds:
                if left and left[0].at_s <= self.now_s:
                    os.write(terminal, left.pop(0).do())
                if chunk := _read_if_there(terminal, _TOGETHER_S / 2):
                    self._out(self._decode(chunk))
                self.now_s = time.monotonic() - began
            os.write(terminal, b"q")
            while _read(terminal, _FIRST_S):
                pass

    @contextmanager
    def _started(self, words: Sequence[str], env: Mapping[str, str], code: int) -> Iterator[int]:
        """A command in a terminal of this size, whose descriptor it yields; it must end with this code."""
        terminal, its = pty.openpty()
        fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", self.rows, self.columns, 0, 0))
        self._decode = codecs.getincrementaldecoder("utf-8")().decode
        # A session of its own, whose terminal this is: a screen with keys is for the process in its foreground.
        command = [sys.executable, "-c", _IN_FOREGROUND, *words]
        with subprocess.Popen(
            command, stdin=its, stdout=its, stderr=its, env={**env, "TERM": "xterm"}, start_new_session=True
        ) as process:
            os.close(its)
            try:
                yield terminal
            except BaseException:
                process.kill()
                raise
            finally:
                os.close(terminal)
        if process.returncode != code:
            last = self.events[-1][1] if self.events else ""
            raise RecordingError(f"{' '.join(words)} ended with {process.returncode}:\n{last}")

    def _out(self, text: str) -> None:
        if text:
            self.events.append((self.now_s, text))

    def _joined(self) -> list[tuple[float, str]]:
        joined: list[tuple[float, str]] = []
        for at, text in self.events:
            if joined and at - joined[-1][0] < _TOGETHER_S:
                joined[-1] = (joined[-1][0], joined[-1][1] + text)
            else:
                joined.append((at, text))
        return [(at, self._named(text)) for at, text in joined]

    def _named(self, text: str) -> str:
        for directory, name in self.names.items():
            text = text.replace(directory, name)
        return text


def _read(terminal: int, within_s: float) -> bytes:
    """What comes next; nothing at the end. Raises `RecordingError` if nothing comes in time."""
    if not select.select([terminal], [], [], max(0.0, within_s))[0]:
        raise RecordingError("it has not ended in time")
    return _read_if_there(terminal, 0.0)


def _read_if_there(terminal: int, within_s: float) -> bytes:
    """What comes within these seconds; nothing where nothing comes, and at the end."""
    if not select.select([terminal], [], [], within_s)[0]:
        return b""
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # EIO: the other side is closed
        return b""
