"""The tables of the documents that follow from the code: `just tables` writes them, test_tree.py compares them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpuactors.config import DECLARATIONS, Declaration
from tests.support import markdown

ROOT: Final = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Table:
    """A table between two marks of a document."""

    document: str
    name: str
    lines: Callable[[], list[str]]

    @property
    def begin(self) -> str:
        """The mark above it."""
        return f"<!-- {self.name}, written by `just tables` from here -->"

    def put(self) -> tuple[Path, str, str]:
        """The document, its text as it is, and its text with the table as it should be."""
        path = ROOT / self.document
        text = path.read_text(encoding="utf-8")
        return path, text, markdown.put_into(text, self.begin, "\n".join(self.lines()))


def settings() -> list[str]:
    """Every setting, as it is declared."""
    return markdown.table(["Key", "Value", "Default", "Meaning"], map(_setting, DECLARATIONS.values()))


def _setting(setting: Declaration) -> list[str]:
    value = setting.metavar.replace("|", r"\|")
    return [f"`{setting.key}`", f"`{value}`", setting.default_text("`{}`"), setting.described.description]


TABLES: Final = (Table("README.md", "settings", settings),)


def main() -> int:
    """Command line of `just tables`."""
    for table in TABLES:
        path, _, text = table.put()
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
