"""The colours of `inspect` at a terminal, by the rules of `doctor`: green is well, red is not, bold is a heading.

A colour never says what the text below it does not say.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto

import click

from gpuactors.cli.inspect.claims_report import WELL
from gpuactors.core.values.model import Health


class Part(Enum):
    """The parts of the output that may have a colour."""

    HEADING = auto()
    HEALTH = auto()
    """The text of `claims_report.listing`; it may be padded."""
    PROBLEM = auto()


Paint = Callable[[Part, str], str]


def plain(_: Part, text: str) -> str:
    """Return the text as it is."""
    return text


def coloured(part: Part, text: str) -> str:
    """Return the text with the codes of its colour. The blanks around it have none."""
    words = text.strip()
    match part:
        case Part.HEADING:
            styled = click.style(words, bold=True)
        case Part.PROBLEM:
            styled = click.style(words, fg="red")
        case Part.HEALTH if words in WELL:
            styled = click.style(words, fg="green")
        case Part.HEALTH if words == Health.UNHEALTHY:
            styled = click.style(words, fg="red", bold=True)
        case _:
            return text
    return text.replace(words, styled, 1)
