"""Markdown: tables, the part of a document that a recipe writes, and what a document names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
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


_FENCE: Final = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_SPAN: Final = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_LINK: Final = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+)\)")


def blocks(document: str) -> Iterator[str]:
    """The lines of code: of fenced blocks for a shell or for nothing, and those that are indented by four or more."""
    for language, text in _FENCE.findall(document):
        if language in {"", "sh", "console"}:
            yield from (line.strip() for line in text.splitlines())
    yield from (line.strip() for line in _FENCE.sub("", document).splitlines() if line.startswith("    "))


def spans(document: str) -> list[str]:
    """What stands between two backticks, blocks left out."""
    return [span.replace(r"\|", "|") for span in _SPAN.findall(_FENCE.sub("", document))]


def links(document: str) -> list[str]:
    """Where the links and images lead, code left out."""
    return _LINK.findall(_SPAN.sub("`code`", _FENCE.sub("", document)))


def chapter(document: str, heading: str) -> str:
    """What is below a heading of any level, up to the next one that is not deeper. Raises LookupError without it."""
    code = [found.span() for found in _FENCE.finditer(document)]
    begin, depth = None, 0
    for found in re.finditer(r"^(#+) (.+?) *$", document, re.MULTILINE):
        if any(first <= found.start() < end for first, end in code):
            continue
        if begin is not None and len(found[1]) <= depth:
            return document[begin : found.start()]
        if begin is None and found[2] == heading:
            begin, depth = found.end(), len(found[1])
    if begin is None:
        raise LookupError(f"there is no heading {heading!r}")
    return document[begin:]


def anchors(document: str) -> set[str]:
    """The anchors of the headings, as GitHub makes them: of equal ones the second gets `-1`. And those of rows."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+?) *$", _FENCE.sub("", document), re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        names = [slug, *(f"{slug}-{n}" for n in range(1, 100))]
        found.add(next(name for name in names if name not in found))
    return found | {*re.findall(r'<a id="([^"]+)"></a>', _FENCE.sub("", document))}
