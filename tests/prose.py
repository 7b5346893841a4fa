"""`./do prose`: spelling and the length of sentences in the pages, by harper. A word that its dictionary lacks is in
docs/words.txt, or is a term of the glossary.

Identifiers are not its business: code in backticks, and words with a capital or a digit inside (`HeldByOther`).
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from tests.test_tree import ROOT, texts

WORDS: Final = ROOT / "docs" / "words.txt"
GLOSSARY: Final = ROOT / "docs" / "dev" / "glossary.md"
RULES: Final = "SpellCheck,LongSentences,RepeatedWords"
"""Of harper's 900: those whose findings are right in pages such as these. LongSentences: more than 40 words."""
DIALECT: Final = "gb"
LIMIT_S: Final = 60

_PAGE: Final = re.compile(
    r"(?:README|CONTRIBUTING|CHANGELOG|SECURITY)\.md|deploy/.*\.md|tests/node/.*\.md|docs/(?:dev/)?[\w-]+\.md"
)
_IDENTIFIER: Final = re.compile(r".*(?:\w[A-Z]|\d|^\w\.?$)", re.DOTALL)


def pages() -> list[Path]:
    """The documents that are checked: not the decisions, which tell of what was."""
    return [ROOT / name for name, _ in texts() if _PAGE.fullmatch(name)]


def words() -> list[str]:
    """The words of docs/words.txt, and those of the glossary's terms."""
    terms = re.findall(r"^\| ([a-z][\w -]*) \|", GLOSSARY.read_text(encoding="utf-8"), re.MULTILINE)
    return [*WORDS.read_text(encoding="utf-8").split(), *(word for term in terms for word in term.split())]


def faults(files: Iterable[Path], dictionary: Iterable[str]) -> list[str]:
    """What is wrong in these files, a line each. Raises RuntimeError if harper fails.

    They are one document for harper, which names files without their directory and takes half a second for each.
    """
    whole, places = _joined(files)
    with tempfile.TemporaryDirectory() as directory:
        document, accepted = Path(directory, "pages.md"), Path(directory, "words.txt")
        document.write_text(whole, encoding="utf-8")
        accepted.write_text("".join(f"{word}\n{word}'s\n" for word in dictionary), encoding="utf-8")
        options = ("--quiet", "--format", "json", "--dialect", DIALECT, "--only", RULES)
        done = subprocess.run(
            ("harper", "lint", *options, "--user-dict-path", str(accepted), str(document)),
            capture_output=True, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip
    try:
        (found,) = json.loads(done.stdout)
    except ValueError:
        raise RuntimeError(f"harper: {done.stderr.strip()}") from None
    return [
        f"{places[lint['line'] - 1]}: {lint['message']} {' '.join(lint['matched_text'].split())[:80]!r}"
        for lint in found["lints"]
        if lint["rule"] != "SpellCheck" or not _IDENTIFIER.match(lint["matched_text"])
    ]


def _joined(files: Iterable[Path]) -> tuple[str, list[str]]:
    """Their text, and for each line of it the file and the line there."""
    lines: list[str] = []
    places: list[str] = []
    for path in files:
        name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
        text = path.read_text(encoding="utf-8").split("\n")
        lines += [*text, ""]
        places += [f"{name}:{number}" for number in range(1, len(text) + 2)]
    return "\n".join(lines), places


if __name__ == "__main__":
    wrong = faults(pages(), words())
    print("\n".join(wrong))
    sys.exit(1 if wrong else 0)
