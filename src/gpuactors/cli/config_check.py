"""The check of a configuration file for all nodes of a fleet: `gpuactors config check`.

The file alone is judged: neither flags nor variables of this machine count. Must not print.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import msgspec
from msgspec import Struct

from gpuactors.cli.formats import Format, either
from gpuactors.cli.shown_settings import as_json, as_table
from gpuactors.config import ConfigError, Provenance, Resolved
from gpuactors.config.fleet import Entry, FleetNode, labels_of, matching
from gpuactors.config.reload import FOLLOWED
from gpuactors.config.sources import File, for_node, read_file, resolved_of, with_entries
from gpuactors.core.values.names import node_name_of
from gpuactors.core.values.quote import first_of, quoted
from gpuactors.daemon.about import about
from gpuactors.process.plain_files import read_plain

NODES_MAX_BYTES: Final = 1 << 30
"""The most bytes of a list of Nodes: 5,000 have some 100 MB."""


_NAMES_SHOWN: Final = 3
"""The most names of nodes with the same settings that are shown: a fleet has thousands."""


_AT_THE_START: Final = "Without reload a daemon reads its file at the start alone: a change needs a restart."
_RELOADED: Final = (
    f"With reload a change of {', '.join(FOLLOWED[:-1])} and {FOLLOWED[-1]} alone is used without a restart; any other "
    "change needs one."
)


class NodesError(Exception):
    """The list of Nodes cannot be read; the text says what it should be."""


class Sort(Struct, frozen=True):
    """The nodes that the same entries match, so that they have the same settings."""

    entries: tuple[Entry, ...]
    names: tuple[str, ...]
    """Their names, sorted."""


class Fleet(Struct, frozen=True):
    """The outcome of a check with a list of Nodes."""

    sorts: tuple[Sort, ...]
    unused: tuple[Entry, ...]
    """The entries that match no node of the list."""


def report(path: str, node: str | None, labels: str | None, nodes: str | None, output: str) -> list[str]:
    """Check the file of this path, and return what is to be printed: the settings of the node; without one, how many
    entries are valid, when a daemon reads the file, and the nodes of a list. The arguments are those of the command.
    Raises ConfigError and NodesError."""
    file = read_file(path)
    reloads = of_entries(file)
    fleet = list(lines_of(of_fleet(file, read_nodes(nodes)))) if nodes is not None else []
    if node is None:
        valid = f"{quoted(path)} is valid: {_counted(len(file.entries))} of nodes"
        return [valid, _RELOADED if reloads else _AT_THE_START, *fleet]
    subject = FleetNode(node_name_of(node), _labels_of(labels))
    resolved = of_node(file, subject)
    shown = about(resolved.config, {key: str(source) for key, source in resolved.provenance.items()}).settings
    if output != Format.TABLE:
        return [either(output, as_json(shown))]
    entries = ", ".join(first_of([str(entry) for entry in matching(file.entries, subject)]))
    own = [setting for setting in shown if setting.source != str(Provenance("default"))]
    return [*fleet, f"node {subject.name}: {entries or 'no entry of nodes'}", "", *as_table(own)]


def _labels_of(text: str | None) -> Mapping[str, str] | None:
    try:
        return None if text is None else labels_of(filter(None, text.split(",")))
    except ValueError as error:
        raise ConfigError(f"--labels is {quoted(repr(text))}: {error}") from None


def of_node(file: File, node: FleetNode) -> Resolved:
    """Return the settings that the file gives one node, with their sources. Raises ConfigError."""
    name = node.name, Provenance("flag", "--node")
    return resolved_of({"node_name": name} | dict(for_node(file, node)))


def of_entries(file: File) -> bool:
    """Check the settings of the file without its entries, and with each one alone; return whether any of these read
    the file again. Raises ConfigError."""
    checked = [resolved_of(file.values), *(_check(file, (entry,), str(entry)) for entry in file.entries)]
    return any(resolved.config.reload == "on" for resolved in checked)


def _counted(entries: int) -> str:
    return "1 entry" if entries == 1 else f"{entries or 'no'} entries"


def of_fleet(file: File, nodes: Iterable[FleetNode]) -> Fleet:
    """Check the settings of each node, once for each set of entries. Raises ConfigError, with a node's name."""
    names: dict[tuple[int, ...], list[str]] = {}
    for node in nodes:
        names.setdefault(tuple([e.number for e in matching(file.entries, node)]), []).append(node.name)
    sorts = [
        Sort(tuple([file.entries[number - 1] for number in numbers]), tuple(sorted(of_sort)))
        for numbers, of_sort in sorted(names.items())
    ]
    for sort in sorts:
        _check(file, sort.entries, f"node {sort.names[0]}")
    used = {number for numbers in names for number in numbers}
    return Fleet(tuple(sorts), tuple([entry for entry in file.entries if entry.number not in used]))


def lines_of(fleet: Fleet) -> Iterator[str]:
    """Return the table of the nodes by their entries, for people."""
    rows = [("ENTRIES", "NODES", "NAMES")]
    for sort in fleet.sorts:
        numbers = ", ".join(str(entry.number) for entry in sort.entries)
        more = len(sort.names) - _NAMES_SHOWN
        names = (*sort.names[:_NAMES_SHOWN], *([f"and {more:,} more"] if more > 0 else []))
        rows.append((numbers or "none", str(len(sort.names)), ", ".join(map(quoted, names))))
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    yield from (f"{entries:<{widths[0]}}  {nodes:>{widths[1]}}  {names}" for entries, nodes, names in rows)
    yield from (f"{entry} matches no node of the list" for entry in fleet.unused)


def read_nodes(path: str) -> tuple[FleetNode, ...]:
    """Read the list of Nodes in a file, or at standard input (`-`). Raises NodesError."""
    try:
        content = sys.stdin.buffer.read(NODES_MAX_BYTES) if path == "-" else read_plain(path, NODES_MAX_BYTES)
        return nodes_of(content)
    except OSError as error:
        raise NodesError(f"the list of Nodes {quoted(path)} cannot be read: {error.strerror}") from None
    except NodesError as error:
        raise NodesError(f"the list of Nodes {quoted(path)} cannot be read: {error}") from None


def nodes_of(content: bytes) -> tuple[FleetNode, ...]:
    """Read a list of Nodes, as `kubectl get nodes -o json` prints it. Raises NodesError."""
    try:
        listed = msgspec.json.decode(content, type=_NodeList)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise NodesError(f"it is not what kubectl get nodes -o json prints: {quoted(str(error))}") from None
    return tuple([FleetNode(node_name_of(item.metadata.name), item.metadata.labels) for item in listed.items])


class _Metadata(Struct, frozen=True):
    name: str
    labels: Mapping[str, str] = {}


class _Node(Struct, frozen=True):
    metadata: _Metadata


class _NodeList(Struct, frozen=True):
    items: tuple[_Node, ...]


def _check(file: File, entries: Iterable[Entry], subject: str) -> Resolved:
    """Return the settings of a node that these entries match. Raises ConfigError, which begins with the subject."""
    try:
        return resolved_of(with_entries(file, entries))
    except ConfigError as error:
        raise ConfigError(f"{subject}: {error}") from None
