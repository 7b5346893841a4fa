"""Writes the table of docs/dev/performance.md from a bench.json: `just bench-table FILE`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

from tests.bench.figures import as_markdown
from tests.bench.parties import ROOT

PAGE: Final = ROOT / "docs" / "dev" / "performance.md"
BEGIN: Final = "<!-- figures: written by `just bench-table` -->\n"
END: Final = "<!-- end of the figures -->\n"


def written(page: str, document: dict[str, Any]) -> str:
    """The page with the document's figures between the markers. Raises `ValueError` if they are not there."""
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE} has no {BEGIN.strip()} … {END.strip()}")
    machine = "; ".join(f"{key} {value}" for key, value in document["machine"].items())
    return f"{head}{begin}\nMeasured on: {machine}.\n\n{as_markdown(document)}\n{end}{tail}"


if __name__ == "__main__":
    figures = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), figures), encoding="utf-8")
