"""Tables in Markdown, and the part of a document that a recipe writes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

END: Final = "<!-- to here -->"
"""Below what a recipe writes; above it stands a mark that names the recipe."""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def put_into(document: str, begin: str, text: str) -> str:
    """The document with the text between the mark `begin` and the next END. Raises ValueError where it lacks them."""
    before, found, rest = document.partition(begin)
    _, end, after = rest.partition(END)
    if not (found and end):
        raise ValueError(f"the document needs a line {begin!r} and below it a line {END!r}")
    return f"{before}{begin}\n\n{text}\n\n{END}{after}"
