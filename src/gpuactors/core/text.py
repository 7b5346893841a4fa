"""Text that can be written down: the journal, protobuf and the log are UTF-8, and the host's names need not be.

A name in sysfs, in /proc or in a path is bytes. Python hands out what of them is no UTF-8 as lone surrogates (PEP 383),
which no encoder takes: one odd driver name stopped the journal and every answer that named it (issue 10).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

T = TypeVar("T")


def encodable(text: str) -> str:
    r"""`text` with what is no UTF-8 as an escape, `\xff`; the same object where there is nothing of it."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        try:
            return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        except UnicodeEncodeError:  # a surrogate that stands for no byte
            return text.encode("utf-8", "backslashreplace").decode()
    return text


def all_encodable(value: T) -> T:
    """`value`, a value of the core, with every text in it `encodable`; the same object where all of them are."""
    changed: Any = _encodable(value)
    return value if changed is None else changed


def _encodable(value: Any) -> Any:
    """None if nothing in it has to change."""
    match value:
        case str():
            text = encodable(value)
            return None if text is value else text
        case tuple() | frozenset():
            return type(value)(_all(value)) if any(_encodable(inner) is not None for inner in value) else None
        case Mapping():
            if all(_encodable(key) is _encodable(inner) is None for key, inner in value.items()):
                return None
            return {all_encodable(key): all_encodable(inner) for key, inner in value.items()}
        case _ if is_dataclass(value) and not isinstance(value, type):
            found = {f.name: _encodable(getattr(value, f.name)) for f in fields(value)}
            changed = {name: inner for name, inner in found.items() if inner is not None}
            return replace(value, **changed) if changed else None
        case _:
            return None


def _all(values: Any) -> Any:
    return (all_encodable(inner) for inner in values)
