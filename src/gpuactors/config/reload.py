"""The difference between the settings in use and those of a file that was read again: what a running daemon can use,
and what needs a restart. Must not read anything.

A file of its own: only a daemon with `--reload on` and `config check` import it.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from .settings import DECLARATIONS, Config

FOLLOWED: Final = tuple(key for key, setting in DECLARATIONS.items() if setting.described.is_followed)
"""The settings of which a running daemon uses a change."""

OF_READING: Final = ("node_labels",)
"""The settings that serve the reading of the file alone: a change of one counts by what it changes in others."""


class Changed(Struct, frozen=True):
    """The settings with another value."""

    followed: tuple[str, ...]
    """Those that a running daemon can use."""
    restart: tuple[str, ...]
    """Those that need a restart."""


def changed(in_use: Config, read: Config) -> Changed:
    """Return the settings in which the two differ, in the order in which settings are shown."""
    keys = [key for key in DECLARATIONS if getattr(in_use, key) != getattr(read, key)]
    return Changed(
        tuple(key for key in keys if key in FOLLOWED),
        tuple(key for key in keys if key not in (*FOLLOWED, *OF_READING)),
    )
