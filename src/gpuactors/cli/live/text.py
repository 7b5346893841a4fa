"""Text of a known width, in pieces with a style. Must not know a terminal's codes."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from enum import Enum
from typing import Final

from msgspec import Struct


class Style(Enum):
    """The meaning of a piece of text; `terminal.py` chooses colours and weight."""

    PLAIN = "plain"
    HEAD = "head"
    GOOD = "good"
    BAD = "bad"
    FAINT = "faint"
    NEW = "new"
    """Text that has just changed."""
    ALARM = "alarm"


class Piece(Struct, frozen=True):
    """Text of one style, without control characters."""

    text: str
    style: Style = Style.PLAIN


Line = tuple[Piece, ...]

_CUT: Final = "…"


def line(text: str, style: Style = Style.PLAIN) -> Line:
    """Return a line of one piece."""
    return (Piece(text, style),)


def width(text: str) -> int:
    """Return the columns that a terminal takes for the text."""
    return sum(_columns(char) for char in text)


def cut(text: str, columns: int) -> str:
    """Return the text, or as much of it as fits, with a mark that there is more."""
    clean = "".join(char if char.isprintable() else "?" for char in text)
    if width(clean) <= columns:
        return clean
    kept = ""
    for char in clean:
        if width(kept) + _columns(char) > columns - 1:
            break
        kept += char
    return kept + _CUT if columns > 0 else ""


def end(text: str, columns: int) -> str:
    """Cut the text at its beginning: the end is the significant part of a resource's name."""
    return cut(text[::-1], columns)[::-1]


def padded(text: str, columns: int) -> str:
    """Return the text in exactly so many columns."""
    fitting = cut(text, columns)
    return fitting + " " * (columns - width(fitting))


def fitted(pieces: Sequence[Piece], columns: int) -> Line:
    """Return the line in exactly so many columns."""
    fitting: list[Piece] = []
    room = columns
    for piece in pieces:
        text = cut(piece.text, room)
        fitting.append(Piece(text, piece.style))
        room -= width(text)
        if text != piece.text:
            break
    return (*fitting, Piece(" " * room))


def _columns(char: str) -> int:
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1
