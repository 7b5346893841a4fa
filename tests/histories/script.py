"""A history as a list of steps, and the one line that replays it.

A step is written `KIND@SLOT+WAIT`, steps are separated by `;`: `a pod comes@0; the daemon crashes@7+0.3`. KIND is a
name of the table in `events.py`; SLOT is the card, pod or byte that it is about, each kind in its own way (0 if left
out); WAIT is how many seconds of the mock clock pass after it (0 if left out).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from typing import Final, NamedTuple

_STEP: Final = re.compile(r"(?P<kind>[^@+;]+?)\s*(?:@\s*(?P<slot>\d+))?\s*(?:\+\s*(?P<wait>\d+(?:\.\d+)?))?")


class Step(NamedTuple):
    """One event, and how long to wait after it (seconds of the mock clock)."""

    kind: str
    slot: int = 0
    wait_s: float = 0.0


Script = tuple[Step, ...]


class ScriptError(ValueError):
    """A script cannot be read; the text has the place."""


def format_script(script: Iterable[Step]) -> str:
    """One line; `parse_script` reads it back."""
    return "; ".join(map(format_step, script))


def format_step(step: Step) -> str:
    """`a pod comes@0+0.3`"""
    slot = f"@{step.slot}" if step.slot else ""
    return step.kind + slot + (f"+{step.wait_s:.6f}".rstrip("0").rstrip(".") if step.wait_s else "")


def parse_script(text: str) -> Script:
    """The steps of a line. Raises `ScriptError`; whether there is such a kind is not known here."""
    steps = []
    for number, part in enumerate(text.split(";"), start=1):
        if not part.strip():
            continue
        match = _STEP.fullmatch(part.strip())
        if match is None:
            raise ScriptError(f"step {number}, {part.strip()!r}, is not of the form KIND@SLOT+WAIT")
        steps.append(Step(match["kind"], int(match["slot"] or 0), float(match["wait"] or 0)))
    return tuple(steps)


def replay_line(seed: int, script: Iterable[Step]) -> str:
    """The command that plays it again and shows each step."""
    return f"./do fuzz --seed {seed} --script {shlex.quote(format_script(script))}"
