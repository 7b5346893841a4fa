"""A terminal's screen: what a program has written to it, as lines of characters with colours.

Knows what rich and our own output use (cursor movement, erasing, SGR with 16 colours), and raises ValueError for
anything else: a recording must not show something else than a terminal would.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias, final


@dataclass(frozen=True, slots=True)
class Style:
    """How characters are shown. A colour is 0 to 15, as in SGR; None is the terminal's own."""

    colour: int | None = None
    bold: bool = False
    dim: bool = False


PLAIN: Final = Style()

Line: TypeAlias = tuple[tuple[str, Style], ...]
"""A line of the screen: runs of characters with one style, without blanks at its end."""

_CELL: Final = (" ", PLAIN)

_SEQUENCE: Final = re.compile(r"\x1b\[(\??[0-9;]*)([A-Za-z])|[\r\n]|[^\x00-\x1f\x7f]+")


@final
class Screen:
    """A screen of `columns` and `rows` that scrolls."""

    def __init__(self, columns: int, rows: int) -> None:
        self._columns, self._rows = columns, rows
        self._cells = [[_CELL] * columns for _ in range(rows)]
        self._row = self._column = 0
        self._style = PLAIN

    def write(self, text: str) -> None:
        """What a program writes. Raises ValueError for a sequence that is not known here."""
        at = 0
        while at < len(text):
            found = _SEQUENCE.match(text, at)
            if found is None:
                raise ValueError(f"not known here: {text[at : at + 12]!r}")
            self._take(found)
            at = found.end()

    def lines(self) -> tuple[Line, ...]:
        """What is to be seen."""
        return tuple(_runs(row) for row in self._cells)

    def _take(self, found: re.Match[str]) -> None:
        match found[0]:
            case "\r":
                self._column = 0
            case "\n":
                self._down()
            case text if not text.startswith("\x1b"):
                for character in text:
                    self._put(character)
            case _:
                self._control(found[1], found[2])

    def _put(self, character: str) -> None:
        if self._column == self._columns:
            self._column = 0
            self._down()
        self._cells[self._row][self._column] = (character, self._style)
        self._column += 1

    def _down(self) -> None:
        if self._row < self._rows - 1:
            self._row += 1
        else:
            self._cells = [*self._cells[1:], [_CELL] * self._columns]

    def _control(self, parameters: str, name: str) -> None:
        if parameters.startswith("?") and name in "hl":
            return  # the cursor is shown or hidden; it is not drawn here
        numbers = [int(number or 0) for number in parameters.split(";")]
        count = max(1, numbers[0])
        match name:
            case "A":
                self._row = max(0, self._row - count)
            case "B":
                self._row = min(self._rows - 1, self._row + count)
            case "K" if numbers[0] in (0, 2):
                since = 0 if numbers[0] == 2 else self._column
                self._cells[self._row][since:] = [_CELL] * (self._columns - since)
            case "m":
                for number in numbers:
                    self._style = _styled(self._style, number)
            case _:
                raise ValueError(f"not known here: CSI {parameters} {name}")


def _styled(style: Style, number: int) -> Style:
    match number:
        case 0:
            return PLAIN
        case 1:
            return replace(style, bold=True)
        case 2:
            return replace(style, dim=True)
        case 22:
            return replace(style, bold=False, dim=False)
        case 39:
            return replace(style, colour=None)
        case _ if 30 <= number <= 37:
            return replace(style, colour=number - 30)
        case _ if 90 <= number <= 97:
            return replace(style, colour=number - 82)
    raise ValueError(f"not known here: SGR {number}")


def _runs(cells: Sequence[tuple[str, Style]]) -> Line:
    runs: list[tuple[str, Style]] = []
    for character, style in cells:
        if runs and runs[-1][1] == style:
            runs[-1] = (runs[-1][0] + character, style)
        else:
            runs.append((character, style))
    while runs and not runs[-1][0].strip():
        runs.pop()
    return (*runs[:-1], (runs[-1][0].rstrip(), runs[-1][1])) if runs else ()
