"""The hook that checks the subject of a commit: `area: verb what`, the verb in the imperative, at most 72 characters.

pre-commit runs it with the file of the message (`.pre-commit-config.yaml`).
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Final

CHARACTERS: Final = 72
_SUBJECT: Final = re.compile(r"[a-z0-9_./-]+(, [a-z0-9_./-]+)*: (?P<verb>[a-z-]+),? \S.*")
_OF_GIT: Final = ("Merge ", "Revert ", "fixup! ", "squash! ", "amend! ")
_NO_VERB: Final = re.compile(
    "a|an|the|this|that|these|its|it|we|you|no|not|all|each|some|two|more|for|from|in|of|on|to|with|"
    "(?!(alias|bring|embed|feed|focus|need|ping|seed|shed|speed|string)$).*(ing|ed|[^s]s)"
)
"""An article, a pronoun, a preposition, or a form of a verb that is not the imperative."""


def wrong(message: str) -> str:
    """Return what is wrong with the subject of a message, as a sentence; empty if nothing is."""
    subject = message.partition("\n")[0]
    if subject.startswith(_OF_GIT):
        return ""
    if len(subject) > CHARACTERS:
        return f"the subject has {len(subject)} characters; at most {CHARACTERS} are allowed"
    match = _SUBJECT.fullmatch(subject)
    if match is None:
        return (
            "the subject must be `area: verb what`, as in `core: skip fact-driven phases for incoming calls`"
        )
    if _NO_VERB.fullmatch(match["verb"]):
        return (
            f"{match['verb']!r} is no verb in the imperative: say what the commit does, as in `core: skip …`"
        )
    return ""


def main() -> int:
    """Check the message in the file that is the only argument. Exit with 1 if its subject is wrong."""
    problem = wrong(Path(sys.argv[1]).read_text())
    if problem:
        print(problem, file=sys.stderr)
    return int(bool(problem))


if __name__ == "__main__":
    sys.exit(main())
