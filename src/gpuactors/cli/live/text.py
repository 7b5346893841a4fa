"""Text of a known width, in pieces with a style. Must not know how a style looks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Final

from msgspec import Struct
from urwid import calc_text_pos, calc_width


class Style(StrEnum):
    """The meaning of a piece of text; the palette in `terminal.py` chooses colours and weight."""

    PLAIN = "plain"
    HEAD = "head"
    GOOD = "good"
    BAD = "bad"
    FAINT = "faint"
    NEW = "new"
    """Text that has just changed."""
    ALARM = "alarm"
    SELECTED = "selected"
    """The row that the keys act on; a mark in front of it says so, too."""


class Piece(Struct, frozen=True):
    """Text of one style."""

    text: str
    style: Style = Style.PLAIN


Line = tuple[Piece, ...]

Markup = list[str | tuple[Style, str]]
"""Lines as urwid's `Text` takes them."""

_CUT: Final = "…"


def line(text: str, style: Style = Style.PLAIN) -> Line:
    """Return a line of one piece."""
    return (Piece(text, style),)


def markup(lines: Iterable[Sequence[Piece]]) -> Markup:
    """Return the lines, with a mark for each control character."""
    marked: Markup = []
    for pieces in lines:
        marked += ["\n", *((piece.style, _printable(piece.text)) for piece in pieces)]
    return marked[1:]


def width(text: str) -> int:
    """Return the columns that a terminal takes for the text."""
    return calc_width(text, 0, len(text))


def cut(text: str, columns: int) -> str:
    """Return the text, or as much of it as fits, with a mark that there is more."""
    clean = _printable(text)
    if width(clean) <= columns:
        return clean
    return clean[: calc_text_pos(clean, 0, len(clean), columns - 1)[0]] + _CUT if columns > 0 else ""


def end(text: str, columns: int) -> str:
    """Cut the text at its beginning: the end is the significant part of a resource's name."""
    return cut(text[::-1], columns)[::-1]


def padded(text: str, columns: int) -> str:
    """Return the text in exactly so many columns."""
    fitting = cut(text, columns)
    return fitting + " " * (columns - width(fitting))


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text)
