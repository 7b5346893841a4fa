"""The width of a command's output, and whether it has colours. Nothing is folded for a program that reads it: a pipe
has no width.

A file of its own: what the commands print, the doctor and the live view all need it.
"""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Mapping
from contextlib import suppress
from typing import Final, TextIO

UNFOLDED: Final = sys.maxsize
"""The columns of an output that has no width."""

_COLUMNS_MIN: Final = 40
"""The least width of a text: a narrower one would be a column of single words."""


def wants_colour(out: TextIO | None, environment: Mapping[str, str]) -> bool:
    """Return whether `out` is a terminal that has colours, unless NO_COLOR is set, to anything (no-color.org)."""
    if out is None or not out.isatty() or environment.get("TERM", "dumb") in ("dumb", ""):
        return False
    return not environment.get("NO_COLOR")


def columns_of(out: TextIO | None, environment: Mapping[str, str]) -> int:
    """Return the variable COLUMNS, else the width of the terminal that `out` is, else UNFOLDED."""
    with suppress(ValueError):
        if (wanted := int(environment.get("COLUMNS", ""))) > 0:
            return max(_COLUMNS_MIN, wanted)
    with suppress(OSError, ValueError):  # no descriptor, or a closed one
        if out is not None and out.isatty() and (width := os.get_terminal_size(out.fileno()).columns) > 0:
            return max(_COLUMNS_MIN, width)
    return UNFOLDED


def folded(text: str, columns: int, first: str = "", further: str = "") -> list[str]:
    """Fold a text into lines of at most so many columns, after `first` and, where it goes on, after `further`. A word
    is never broken."""
    return textwrap.wrap(
        text,
        columns,
        initial_indent=first,
        subsequent_indent=further,
        break_on_hyphens=False,
        break_long_words=False,
    )
