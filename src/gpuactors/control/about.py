"""The parts of the daemon's status that are known when it starts: its node's name and its settings.

A file of its own: the daemon needs them before anybody asks for the view of its node (`view.py`).
"""

from __future__ import annotations

from msgspec import Struct


class Setting(Struct, frozen=True):
    """One setting of the daemon."""

    key: str
    value: str
    """The value as JSON."""
    source: str
    """The source of the value: `flag --select`, `default`."""


class About(Struct, frozen=True):
    """The parts of the daemon's status that are not in its state."""

    node: str = ""
    """The node's name."""
    settings: tuple[Setting, ...] = ()
    """The daemon's settings, in the order in which they are shown."""
