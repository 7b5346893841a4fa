"""What the program says: the texts in its source, by which a document's quotes are checked."""

from __future__ import annotations

import ast
import functools
from pathlib import Path
from typing import Final

SOURCE: Final = Path(__file__).resolve().parents[2] / "src"


@functools.cache
def said() -> frozenset[str]:
    """Every text of the source, the parts of an f-string each."""
    return frozenset(
        node.value
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def is_said(quoted: str) -> bool:
    """Each part between two gaps (…) is in a text of the source."""
    parts = [part.strip() for part in quoted.split("…")]
    return all(any(part in text for text in said()) for part in parts)
