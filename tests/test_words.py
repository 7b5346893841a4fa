"""The words of what users read: phrases that a reader from the field must translate are in no page and in no help."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from typing import Final

import click
import pytest

from gpuactors.cli.commands import cli
from gpuactors.config import DECLARATIONS
from tests.test_documents import DOCUMENTS, OPERATORS
from tests.test_tree import ROOT

BETTER: Final = {
    r"\b(?:is|are|was|were|be|been) told\b": "say who reports what, and where",
    r"\bof ours\b": "say whose: of gpuactors, of this daemon",
    r"\bstands? for\b": "say what it is",
    r"\bof one's own\b": "custom",
    r"\bis no condition\b": "is optional",
    r"\bwhomever\b": "anyone",
    r"\banew\b": "again",
    r"\bas a rule\b": "usually",
    r"\bfor want of\b": "without",
    r"\b[Ss]omebody\b|\b[Nn]obody\b|\b[Ee]verybody\b": "say who: an operator, a process, another client",
}
"""Phrases that are in no page, and what is better."""


def phrases_in(text: str) -> list[str]:
    """Each phrase of `BETTER` in a text, with the better one."""
    flat = " ".join(text.split())
    return [f"{one[0]!r}: {better}" for phrase, better in BETTER.items() for one in re.finditer(phrase, flat)]


@pytest.mark.parametrize("name", [*OPERATORS, "CONTRIBUTING.md", "docs/dev/glossary.md"])
def test_a_page_uses_the_words_of_the_field(name: str) -> None:
    assert phrases_in(DOCUMENTS[name]) == []


def helps(command: click.Command) -> Iterator[str]:
    """The help of a command and of those below it, with their options."""
    yield command.help or ""
    yield from (option.help or "" for option in command.params if isinstance(option, click.Option))
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            yield from helps(inner)


def test_the_help_uses_the_words_of_the_field() -> None:
    texts = [*helps(cli), *(setting.described.description for setting in DECLARATIONS.values())]
    assert len(texts) > 50
    assert [one for text in texts for one in phrases_in(text)] == []


def test_the_chart_uses_the_words_of_the_field() -> None:
    chart = ROOT / "deploy/chart/gpuactors"
    schema = json.loads((chart / "values.schema.json").read_text(encoding="utf-8"))
    assert phrases_in(json.dumps(schema)) == []
    for path in [chart / "values.yaml", *(chart / "templates").iterdir()]:
        assert phrases_in(path.read_text(encoding="utf-8")) == [], path


def test_such_a_phrase_is_found_across_lines() -> None:
    assert phrases_in("the pod is\n  told, of ours") == [
        "'is told': say who reports what, and where",
        "'of ours': say whose: of gpuactors, of this daemon",
    ]


OPENINGS: Final = re.compile(r"As `|(?:Who|What|Whoever|Whatever|Whose)\b")
"""Openings of a docstring that do not say what a thing is or does."""


def test_a_docstring_opens_with_what_a_thing_is_or_does() -> None:
    opened: list[str] = []
    for path in (ROOT / "src").rglob("*.py"):
        at = path.relative_to(ROOT / "src")
        if "pb" in at.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Expr(value=ast.Constant(value=str(text))) if OPENINGS.match(text):
                    opened.append(f"{at}:{node.lineno}: {text[:40]}")
                case _:
                    pass
    assert opened == []
