"""Quoting of text from outside in sentences: printable and short.

A device's ID, a pod's name, a process's name or kubelet's error text is input. It may hold control characters, marks
that turn the direction of writing, or megabytes, and it ends up in the log, on a terminal and in a gRPC status.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gpuactors.limits import QUOTED_ITEMS_MAX, QUOTED_NAME_CHARS_MAX

QUOTED_ID_CHARS_MAX: Final = 64
"""The maximum length of a device's ID, or a driver's or process's name, in a sentence: three times a PCI address."""

QUOTED_TEXT_CHARS_MAX: Final = 1000
"""The maximum length of another program's error text in a sentence: half of GRPC_STATUS_TEXT_MAX_CHARS
(`grpc_trio/limits.py`)."""


def printable(text: str) -> str:
    """Escape every character of `text` that is not printable (Unicode categories Other and Separator, except the space)
    as Python does: controls, direction marks, line separators, surrogates."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text
    )


def printable_json(text: str) -> str:
    """Escape in JSON, as JSON does, every character that `printable` would escape, except the line ends."""
    if text.replace("\n", "").isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else _escaped_in_json(c) for c in text)


def _escaped_in_json(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i : i + 2].hex()}" for i in range(0, len(units), 2))


def quoted(text: str, chars_max: int = QUOTED_TEXT_CHARS_MAX) -> str:
    """Quote `text` in a sentence: printable, at most `chars_max` characters; if it is cut, with its full length."""
    if len(text) <= chars_max and text.isprintable():
        return text
    shown = printable(text[: chars_max + 1])
    if len(shown) <= chars_max:
        return shown
    return f"{shown[:chars_max]}… ({len(text):,} characters)"


def quoted_id(device: str) -> str:
    """Quote a device's ID, or the name of a driver or process."""
    return quoted(device, QUOTED_ID_CHARS_MAX)


def quoted_name(name: str) -> str:
    """Quote a name that Kubernetes should have checked: a pod's, a claim's, a resource's."""
    return quoted(name, QUOTED_NAME_CHARS_MAX)


def first_of(items: Sequence[str]) -> tuple[str, ...]:
    """Return the items; if there are more than QUOTED_ITEMS_MAX, that many of them and the number of the others."""
    if len(items) <= QUOTED_ITEMS_MAX:
        return tuple(items)
    return (*items[:QUOTED_ITEMS_MAX], f"and {len(items) - QUOTED_ITEMS_MAX:,} more")


def quoted_ids(devices: Sequence[str]) -> tuple[str, ...]:
    """Quote device IDs for a field of the log or, joined, for a sentence."""
    shown = first_of(devices)
    return tuple(map(quoted_id, shown))
