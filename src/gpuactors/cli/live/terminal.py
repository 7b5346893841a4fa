"""A terminal as a whole screen, with ANSI codes: its alternate screen, so that what was there before comes back.

Only the lines of a screen that differ are written, in one write, so nothing flickers. A dozen codes suffice.
"""

from __future__ import annotations

import os
import termios
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, TextIO, final

from gpuactors.cli.live.text import Line, Style

_ENTER: Final = "\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[2J"
"""The codes for the alternate screen, no cursor, no automatic new line, and an empty screen."""
_LEAVE: Final = "\x1b[0m\x1b[?7h\x1b[?25h\x1b[?1049l"
_AT_ONCE: Final = ("\x1b[?2026h", "\x1b[?2026l")
"""The begin and the end of a block that terminals with this feature show at once."""
_CLEAR: Final = "\x1b[2J"
_SIZE_UNKNOWN: Final = (100, 30)

_CODES: Final = {
    Style.PLAIN: "",
    Style.HEAD: "1",
    Style.GOOD: "32",
    Style.BAD: "31",
    Style.FAINT: "2",
    Style.NEW: "1",
    Style.ALARM: "1;7;31",
}


def is_screen(out: TextIO, environment: dict[str, str]) -> bool:
    """Return whether a whole screen can be drawn on it."""
    return out.isatty() and environment.get("TERM", "dumb") not in ("dumb", "")


@final
class Terminal:
    """The terminal, which this process has from a `draw` until `leave`."""

    def __init__(self, out: TextIO, keys: TextIO | None, *, colour: bool) -> None:
        self._out = out
        self._colour = colour
        self._keys = keys if keys is not None and _is_ours(keys) else None
        self._before: list[Any] | None = None
        self._lines: list[str] = []
        self._size: tuple[int, int] | None = None
        """The size of the screen that was drawn last; None while this process does not have the terminal."""

    @property
    def keys(self) -> int | None:
        """The descriptor from which single keys can be read; None if there is none."""
        return self._keys.fileno() if self._keys is not None else None

    def size(self) -> tuple[int, int]:
        """Return columns and rows."""
        with suppress(OSError):
            columns, rows = os.get_terminal_size(self._out.fileno())
            if columns and rows:
                return columns, rows
        return _SIZE_UNKNOWN

    def draw(self, lines: Sequence[Line]) -> None:
        """Show these lines, which are as wide as the screen. Raises `observe.stdout.StdoutError`."""
        size, text = self.size(), ""
        if self._size is None:
            self._enter()
        elif self._size != size:
            text, self._lines = _CLEAR, []
        self._size = size
        painted = [self._painted(line) for line in lines[: size[1]]]
        for number in range(max(len(painted), len(self._lines))):
            now = painted[number] if number < len(painted) else "\x1b[2K"
            if number >= len(self._lines) or self._lines[number] != now:
                text += f"\x1b[{number + 1};1H{now}"
        self._lines = painted
        if text:
            self._write(_AT_ONCE[0] + text + _AT_ONCE[1])

    def leave(self) -> None:
        """Give the terminal back as it was; `draw` takes it again."""
        if self._size is None:
            return
        self._size, self._lines = None, []
        if self._keys is not None and self._before is not None:
            with suppress(termios.error):
                termios.tcsetattr(self._keys, termios.TCSANOW, self._before)
        self._write(_LEAVE)

    def _enter(self) -> None:
        if self._keys is not None:
            with suppress(termios.error):
                self._before = termios.tcgetattr(self._keys)
                quiet = [*self._before]
                quiet[3] &= ~(termios.ECHO | termios.ICANON)
                termios.tcsetattr(self._keys, termios.TCSANOW, quiet)
        self._write(_ENTER)

    def _painted(self, line: Line) -> str:
        if not self._colour:
            return "".join(piece.text for piece in line)
        return "".join(
            f"\x1b[{_CODES[piece.style]}m{piece.text}\x1b[0m" if _CODES[piece.style] else piece.text
            for piece in line
        )

    def _write(self, text: str) -> None:
        encoding = self._out.encoding
        self._out.write(text.encode(encoding, "replace").decode(encoding))
        self._out.flush()


def _is_ours(keys: TextIO) -> bool:
    """Return whether it is the terminal of which this process is in the foreground: a process in the background is
    stopped for changing it."""
    with suppress(OSError, ValueError):
        return keys.isatty() and os.tcgetpgrp(keys.fileno()) == os.getpgrp()
    return False
