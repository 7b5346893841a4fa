"""The log events as docs/reference.md#log-events declares them: the document is the one declaration.

`test_log_events.py` compares it with the calls in the source, and `test_documents.py` looks up the names that other
documents have.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.support.markdown import chapter

_PAGE: Final = Path(__file__).parents[2] / "docs/reference.md"
TEXT: Final = chapter(_PAGE.read_text(encoding="utf-8"), "Log events")


@dataclass(frozen=True, slots=True)
class LogEvent:
    """One row of the tables of events."""

    levels: tuple[str, ...]
    """The levels that it is logged with; with `debug` beside another one, that is its repetition, or routine."""
    fields: tuple[str, ...]
    """Its own fields, those that it may lack included."""
    when: str
    remedy: str


def rows(text: str, columns: int) -> Iterator[tuple[str, ...]]:
    """The rows of the tables with so many columns that begin with a name in backticks."""
    for line in text.splitlines():
        cells = re.split(r" ?\| ?", line)[1:-1]
        if len(cells) == columns and re.fullmatch(r"`[a-z_.]+`", cells[0]):
            yield tuple(cells)


def _names(cell: str) -> tuple[str, ...]:
    return tuple(re.findall(r"[a-z_]+", cell))


EVENTS: Final[Mapping[str, LogEvent]] = {
    name.strip("`"): LogEvent(_names(levels), _names(fields), when, remedy)
    for name, levels, fields, when, remedy in rows(TEXT, 5)
}

FIELDS: Final[Mapping[str, str]] = {name.strip("`"): meaning for name, meaning in rows(TEXT, 2)}
"""What the fields mean that more than one event has, or that do not speak for themselves."""
