"""The list of the node: the counts of each resource, each GPU in a line, then the claims and compute domains.

A reason that is longer than its line is continued below while the screen has empty lines. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from gpuactors.cli.inspect import claims_report, domains_report
from gpuactors.cli.inspect.cards import in_order
from gpuactors.cli.inspect.report import WIDE, cells, registration, shown
from gpuactors.cli.inspect.view import NO_DEVICES, Inspected
from gpuactors.cli.live.text import Line, Piece, Style, end, line, padded, width
from gpuactors.cli.output import folded
from gpuactors.control.view import DeviceView, NodeView, ResourceView
from gpuactors.core.values.model import Health

NEW_S: Final = 5.0
"""How long a change stands out, in seconds."""

MARGIN: Final = "  "
"""In front of each row: the selected one has its mark there."""

_FULL: Final = ("ADDRESS", "DRIVER", "GROUP", "NUMA", "HEALTH", "SINCE", "REASON")
_NARROW: Final = ("ADDRESS", "DRIVER", "HEALTH", "SINCE", "REASON")
_FULL_COLUMNS: Final = 96
"""The least width of a screen with group and NUMA node: on a narrower one the reason needs their room."""

_COUNTS: Final = ("CAPACITY", "ALLOCATABLE", "ALLOCATED", "FREE", "UNHEALTHY")
_GAP: Final = "  "
_DRIVER_MAX: Final = 14
"""The width of the driver's column on a narrow screen: `nvgrace_gpu_vfio_pci` must leave the reason some room."""
_ROOMY_COLUMNS: Final = 120
"""The least width of a screen that has room for each driver's name."""

_REASON_MIN: Final = 30
"""The least width in which a reason is continued below itself; where it has less, it is continued further left."""
_FURTHER: Final = " " * 6


class Row(Struct, frozen=True):
    """One thing of the list, in one or more lines."""

    lines: tuple[Line, ...]
    name: str = ""
    """The name by which `gpuactors explain` finds it; empty if it cannot be selected."""
    head: Line | None = None
    """The names of its columns, which stay in view above it."""


_EMPTY: Final = Row(((),))


def rows_of(inspected: Inspected, columns: int, room: int, *, wide: bool = False) -> list[Row]:
    """Return the list for a screen of so many columns, of which `room` lines can be in view."""
    view = inspected.view
    names = WIDE if wide else _FULL if columns >= _FULL_COLUMNS else _NARROW
    driver_max = _DRIVER_MAX if columns < _ROOMY_COLUMNS and not wide else columns
    resources, resources_whole = (
        [*_resources(view, columns, is_whole=is_whole), _EMPTY] for is_whole in (False, True)
    )
    sections = _claims(view, columns - len(MARGIN))
    claims = list(_named_once(row for section in sections for row in (_EMPTY, *section)))
    devices = _devices(inspected, names, columns, room - count(resources) - count(claims), driver_max)
    if count(resources_whole) + count(devices) + count(claims) <= room:
        resources = resources_whole
    return [*resources, *devices, *claims]


def count(rows: Iterable[Row]) -> int:
    """Return the number of their lines."""
    return sum(len(row.lines) for row in rows)


def first_of(inspected: Inspected, rows: Sequence[Row]) -> str:
    """Return the name of the first GPU of the list, or else of its first row."""
    devices = {device.address for device in inspected.view.devices}
    names = [row.name for row in rows if row.name]
    return next((name for name in names if name in devices), next(iter(names), ""))


def _continued(before: Sequence[Piece], text: str, columns: int, style: Style) -> list[Line]:
    """Return what stands before a text, the text, and below it what of the text does not fit into the line."""
    used = sum(width(piece.text) for piece in before)
    further = _FURTHER if columns - used < _REASON_MIN else " " * used
    first, *rest = folded(text, columns, " " * used, further) or [""]
    return [(*before, Piece(first[used:], style)), *(line(below, style) for below in rest)]


def _cut_to(lines: Sequence[Line], count: int) -> tuple[Line, ...]:
    """Return so many lines, the last with all the rest of the text, so that it is seen to be cut."""
    if len(lines) <= count:
        return tuple(lines)
    *kept, (*before, last) = lines[:count]
    rest = " ".join(piece.text.strip() for pieces in lines[count:] for piece in pieces)
    return (*kept, (*before, Piece(f"{last.text} {rest}", last.style)))


# --- resources --------------------------------------------------------------------------------------------


def _resources(view: NodeView, columns: int, *, is_whole: bool) -> list[Row]:
    """Return the head and the resources. `is_whole`: whether causes that do not fit beside the counts stand below."""
    if not view.resources:
        return [Row((line(f"{MARGIN}No resource is advertised to kubelet.", Style.FAINT),))]
    longest = max(len("RESOURCE"), *(width(r.name) for r in view.resources))
    counts = "".join(f"{_GAP}{name}" for name in _COUNTS)
    room = min(longest, max(len("RESOURCE"), columns - width(counts) - len(MARGIN)))
    head = line(MARGIN + padded("RESOURCE", room) + counts, Style.HEAD)
    rows = (_resource(resource, view, room, columns, is_whole) for resource in view.resources)
    return [Row((head,)), *(Row(lines, r.name, head) for r, lines in zip(view.resources, rows, strict=True))]


def _resource(
    resource: ResourceView, view: NodeView, room: int, columns: int, is_whole: bool
) -> tuple[Line, ...]:
    unhealthy = resource.listed - resource.healthy
    values = (resource.listed, resource.healthy, resource.allocated, resource.free, unhealthy)
    *numbers, last = (f"{_GAP}{n:>{len(name)}}" for name, n in zip(_COUNTS, values, strict=True))
    style = Style.BAD if unhealthy else Style.PLAIN
    before = (
        Piece(MARGIN + padded(end(resource.name, room), room) + "".join(numbers)),
        Piece(last, style),
    )
    causes = _causes(resource, view)
    used = sum(width(piece.text) for piece in before)
    is_below = is_whole and used + len(_GAP + causes) > columns
    is_beside = not is_below and used + len(_GAP) < columns
    lines: list[Line] = [(*before, Piece(_GAP + causes, style)) if is_beside else before]
    lines += _indented(causes, columns, style) if is_below else []
    if not resource.registered or resource.problem:
        lines += _indented(registration(resource), columns, Style.BAD)
    return tuple(lines)


def _indented(text: str, columns: int, style: Style) -> list[Line]:
    return [line(below, style) for below in folded(text, columns, MARGIN + _GAP, MARGIN + _GAP * 2)]


def _causes(resource: ResourceView, view: NodeView) -> str:
    """Return why devices of it are not Healthy: each cause with the number of its devices."""
    listed = [d for d in view.devices if d.listed and d.resource == resource.name]
    causes = Counter(d.cause for d in listed if d.health != Health.HEALTHY)
    return ", ".join(f"{cause} {number}" for cause, number in sorted(causes.items()))


# --- devices ----------------------------------------------------------------------------------------------


def _devices(
    inspected: Inspected, names: Sequence[str], columns: int, spare: int, driver_max: int
) -> list[Row]:
    """Return the head and the GPUs. `spare`: the lines of the screen that nothing else of the list needs. Where they
    are too few for all GPUs, those that are not Healthy come first."""
    ordered = in_order(shown(inspected.view))
    if not ordered:
        return [Row(tuple(line(text, Style.BAD) for text in folded(NO_DEVICES, columns, MARGIN, MARGIN)))]
    spare -= 1 + len(ordered)
    if spare < 0:
        ordered = [(d, 0) for d, _ in ordered if not _is_well(d)] + [
            one for one in ordered if _is_well(one[0])
        ]
    rows = {}
    for device, depth in ordered:
        address, *others = cells(device, inspected.view, names)
        rows[device.address] = (_GAP * depth + address, *others)
    widths = [max(width(row[i]) for row in (names, *rows.values())) for i in range(len(names) - 1)]
    widths[names.index("DRIVER")] = min(widths[names.index("DRIVER")], driver_max)
    cells_of_head = _GAP.join(padded(name, w) for name, w in zip(names, widths, strict=False))
    head = line(f"{MARGIN}{cells_of_head}{_GAP}{names[-1]}", Style.HEAD)
    lines = {
        device.address: _device(device, rows[device.address], widths, names.index("HEALTH"), columns)
        for device, _ in ordered
    }
    counts = _lines_of_each([device for device, _ in ordered], lines, spare)
    return [
        Row((head,)),
        *(Row(_cut_to(lines[d.address], counts[d.address]), d.address, head) for d, _ in ordered),
    ]


def _lines_of_each(
    devices: Sequence[DeviceView], lines: Mapping[str, Sequence[Line]], spare: int
) -> dict[str, int]:
    """Return how many lines each GPU gets: one, and of the spare ones as many as its reason needs. Those that are not
    Healthy come first."""
    counts = {}
    for device in sorted(devices, key=_is_well):
        further = max(0, min(len(lines[device.address]) - 1, spare))
        counts[device.address] = 1 + further
        spare -= further
    return counts


def _is_well(device: DeviceView) -> bool:
    return device.listed and device.health == Health.HEALTHY


def _device(
    device: DeviceView, row: Sequence[str], widths: Sequence[int], health: int, columns: int
) -> list[Line]:
    is_new = device.since_s is not None and device.since_s < NEW_S
    plain = Style.NEW if is_new else Style.PLAIN
    status = Style.GOOD if _is_well(device) else Style.BAD if device.listed else Style.FAINT
    pieces = [
        Piece(padded(cell, w) + _GAP, status if i == health else plain)
        for i, (cell, w) in enumerate(zip(row, widths, strict=False))
    ]
    return _continued((Piece(MARGIN), *pieces), row[-1], columns, plain)


# --- claims -----------------------------------------------------------------------------------------------


def _claims(view: NodeView, columns: int) -> list[list[Row]]:
    """Return the sections of the claims and compute domains. The lines about one of them are one row."""
    sections = [
        *claims_report.sections(view.claims, columns),
        *domains_report.sections(view.domains, columns),
    ]
    return [list(_section(lines)) for lines in sections]


def _named_once(rows: Iterable[Row]) -> Iterator[Row]:
    """Yield the rows. A claim of two drivers has a row in the section of each: its first one can be selected."""
    named = set()
    for row in rows:
        yield row if row.name not in named else replace(row, name="")
        named.add(row.name)


def _section(lines: Iterable[claims_report.About]) -> Iterator[Row]:
    for uid, of_one in groupby(lines, key=lambda about: about[0]):
        texts = [line(MARGIN + text) for _, text in of_one]
        yield from [Row(tuple(texts), uid)] if uid else (Row((text,)) for text in texts)
