"""Exceptions for some nodes of a fleet: the part `nodes` of a configuration file, so that all nodes have one file.

Each entry has a `match` (`names`, globs of node names; `labels` of the Node) and `settings`. All entries are checked on
every node, also those of other nodes: a wrong file is refused by the first daemon that reads it. Must not know the
meaning of a setting, and must not read anything: the file's content, and the node's name and labels, come in.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Final

from msgspec import Struct

from gpuactors.core.values.quote import first_of, quoted

from .declaration import OF_THE_NODE

ENTRIES_SCHEMA: Final[Mapping[str, object]] = {
    "description": "Settings for some nodes. Of the entries that match a node and have a setting, the last one wins.",
    "type": "array",
    "minItems": 1,
}
"""The JSON Schema of `nodes`, without that of an entry."""

LABEL: Final = re.compile(r"(?P<key>[A-Za-z0-9._/-]+)=(?P<value>[A-Za-z0-9._-]*)")
"""A label as `KEY=VALUE`. Kubernetes' own rules are narrower; what they refuse is on no Node."""


class EntryError(ValueError):
    """The entries are not as they must be; the text names the entry, and what to write."""


class FleetNode(Struct, frozen=True):
    """The facts by which a node is matched."""

    name: str
    labels: Mapping[str, str] | None
    """None: they are not known, so that no entry can be matched by them."""


class Entry(Struct, frozen=True):
    """One entry of `nodes`."""

    number: int
    """Its place in the file, from 1."""
    names: tuple[str, ...]
    """The globs of which the node's name must match one; empty: any name."""
    labels: Mapping[str, str]
    """The labels that the Node must have, each with this value; empty: any labels."""
    settings: Mapping[str, object]
    """The values by key, as the file has them."""

    def __str__(self) -> str:
        """Return what it matches, for people: `entry 2 (names gpu-a*)`."""
        names = f"names {', '.join(first_of(self.names))}" if self.names else ""
        labels = [f"{key}={value}" for key, value in self.labels.items()]
        by_label = f"labels {', '.join(first_of(labels))}" if labels else ""
        return f"entry {self.number} ({quoted('; '.join(filter(None, (names, by_label))))})"

    def has_name(self, name: str) -> bool:
        """Return whether it matches the node of this name, as far as names go."""
        return not self.names or bool(_globs(self.names)(name))

    def matches(self, node: FleetNode) -> bool:
        """Return whether the node has one of the names, and all labels. Raises EntryError if that depends on labels
        that are not known."""
        if not self.has_name(node.name):
            return False
        if self.labels and node.labels is None:
            raise EntryError(
                f"{self} of nodes matches by labels, and those of the node {node.name} are not known: give them "
                "(node_labels; --labels in a check), or match by names"
            )
        return node.labels is None or self.labels.items() <= node.labels.items()


def entries_of(content: object) -> tuple[Entry, ...]:
    """Read the value of `nodes`. The keys and values in `settings` are left to the caller. Raises EntryError."""
    if not isinstance(content, list) or not content:
        raise EntryError("nodes must be a list of entries, each with match and settings")
    return tuple(_entry(number, item) for number, item in enumerate(content, 1))


def entry_schema(settings: Mapping[str, object]) -> Mapping[str, object]:
    """Return the JSON Schema of one entry, by those of the settings that it may have."""
    match = {
        "names": {
            "description": "Names of nodes, one of which must match, with * and ? for any characters.",
            "anyOf": [{"type": "array", "items": {"type": "string"}, "minItems": 1}, {"type": "string"}],
        },
        "labels": {
            "description": "Labels, all of which the Node must have.",
            "type": "object",
            "minProperties": 1,
            "additionalProperties": {"type": "string"},
        },
    }
    return _object(
        {"match": {**_object(match), "required": []}, "settings": {**_object(settings), "required": []}}
    )


def _object(properties: Mapping[str, object]) -> dict[str, object]:
    """Return the JSON Schema of a mapping that has these properties, and no other."""
    return {
        "type": "object",
        "required": list(properties),
        "minProperties": 1,
        "additionalProperties": False,
        "properties": dict(properties),
    }


def matching(entries: Iterable[Entry], node: FleetNode) -> tuple[Entry, ...]:
    """Return the entries that match the node, in their order. Raises EntryError as `Entry.matches`."""
    return tuple([entry for entry in entries if entry.matches(node)])


def deciding_labels(entries: Iterable[Entry], name: str) -> frozenset[str]:
    """Return the keys of the labels that decide which entries match the node of this name."""
    return frozenset([key for entry in entries if entry.has_name(name) for key in entry.labels])


def labels_of(texts: Iterable[str]) -> dict[str, str]:
    """Read labels as `KEY=VALUE`. Raises ValueError for a text that is none, and for two values of one label."""
    labels: dict[str, str] = {}
    for text in texts:
        if (match := LABEL.fullmatch(text.strip())) is None:
            raise ValueError(f"{text!r} is not KEY=VALUE")
        if labels.setdefault(match["key"], match["value"]) != match["value"]:
            raise ValueError(f"{match['key']} has two values")
    return labels


def _entry(number: int, item: object) -> Entry:
    where = f"entry {number} of nodes"
    parts = _mapping(where, item, ("match", "settings"))
    match = _mapping(f"match in {where}", parts.get("match"), ("names", "labels"))
    names = _names(where, match["names"]) if "names" in match else ()
    labels = _labels(where, match["labels"]) if "labels" in match else {}
    if not names and not labels:
        raise EntryError(
            f"{where} matches every node: name some by names or labels, or move its settings to the top of the file"
        )
    settings = _mapping(f"settings in {where}", parts.get("settings"))
    if refused := [key for key in OF_THE_NODE if key in settings]:
        raise EntryError(f"{where} cannot have {refused[0]}: entries are chosen by it")
    return Entry(number, names, labels, settings)


def _mapping(where: str, value: object, keys: Sequence[str] = ()) -> dict[str, object]:
    """Return a mapping, which is not empty and has no other than these keys; any keys if there are none."""
    if not isinstance(value, dict) or not value:
        raise EntryError(f"{where} must have {' and '.join(keys) or 'keys with values'}")
    if keys and (unknown := [key for key in value if key not in keys]):
        raise EntryError(f"{where} has {quoted(str(unknown[0]))}, but may have {' and '.join(keys)} only")
    return value


def _names(where: str, value: object) -> tuple[str, ...]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not names or not all(isinstance(n, str) and n.strip() for n in names):
        raise EntryError(f"names in {where} must be a list of node names, with * and ? for any characters")
    return tuple([name.strip().lower() for name in names])


def _labels(where: str, value: object) -> dict[str, str]:
    if not isinstance(value, dict) or not value:
        raise EntryError(f"labels in {where} must be labels with their values")
    for key, text in value.items():
        if not isinstance(text, str):
            raise EntryError(
                f"the label {quoted(str(key))} in {where} must have a text: write its value in quotes"
            )
        if LABEL.fullmatch(f"{key}={text}") is None:
            raise EntryError(f"no Node has the label {quoted(f'{key}={text}')} of {where}")
    return value


@lru_cache(maxsize=1024)
def _globs(names: tuple[str, ...]) -> Callable[[str], object]:
    """Return the function that says whether a name matches one of these globs. A file is matched with 5,000 names."""
    return re.compile("|".join(map(fnmatch.translate, names))).fullmatch
