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
import termios
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

COLUMNS, ROWS = 100, 34

PROMPT: Final = "\x1b[1;32m$\x1b[0m "

_TYPED_S: Final = 0.04
"""From one typed character to the next."""

_READ_S: Final = 2.5
"""After the end of a command, so that its output can be read."""

_TOGETHER_S: Final = 0.05
"""Outputs that follow so closely are one."""


class RecordingError(Exception):
    """A command ended with another code than it should, or not at all."""


@dataclass
class Cast:
    """A recording that grows."""

    title: str
    events: list[tuple[float, str]] = field(default_factory=list)
    now_s: float = 0.0
    """Where the next output goes; the seconds of a command are real, those of typing and reading are made."""

    def text(self) -> str:
        """The file."""
        header = {
            "version": 2,
            "width": COLUMNS,
            "height": ROWS,
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
        began = time.monotonic()
        terminal, its = pty.openpty()
        fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        decode = codecs.getincrementaldecoder("utf-8")().decode
        offset = self.now_s
        with subprocess.Popen(
            words, stdin=its, stdout=its, stderr=its, env={**env, "TERM": "xterm"}
        ) as process:
            os.close(its)
            try:
                while chunk := _read(terminal, began + within_s - time.monotonic()):
                    self.now_s = offset + time.monotonic() - began
                    self._out(decode(chunk))
            except RecordingError:
                process.kill()
                raise
            finally:
                os.close(terminal)
        if process.returncode != code:
            raise RecordingError(f"{' '.join(words)} ended with {process.returncode}:\n{self.events[-1][1]}")
        self.now_s += _READ_S

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
        return [*joined, (self.now_s, PROMPT)]


def _read(terminal: int, within_s: float) -> bytes:
    """What comes next; nothing at the end. Raises `RecordingError` if nothing comes in time."""
    ready, _, _ = select.select([terminal], [], [], max(0.0, within_s))
    if not ready:
        raise RecordingError("it has not ended in time")
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # EIO: the other side is closed
        return b""
