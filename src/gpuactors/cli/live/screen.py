"""One screen of the node: the counts of each resource, each GPU in a line, and as much of the claims as fits.

Pure: the lines follow from the view, the time and the size. Must not know a terminal's codes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from gpuactors.cli.inspect import claims_report, domains_report
from gpuactors.cli.inspect.cards import in_order
from gpuactors.cli.inspect.claims_report import lasted
from gpuactors.cli.inspect.report import WIDE, cells, registration, shown, utc
from gpuactors.cli.inspect.view import NO_DEVICES, Inspected
from gpuactors.cli.live.text import Line, Piece, Style, end, fitted, line, padded, width
from gpuactors.cli.live.watched import Watched
from gpuactors.control.view import DeviceView, NodeView, ResourceView
from gpuactors.core.values.model import Health

NEW_S: Final = 5.0
"""How long a change stands out, in seconds."""

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


def frame(
    watched: Watched, at: float, wall: float, columns: int, rows: int, *, wide: bool = False
) -> list[Line]:
    """Return the lines of a screen of that size, each of exactly `columns`. `at`: the clock of `watched`; `wall`: the
    time of day, in seconds since 1970."""
    inspected = watched.inspected(at, wall)
    lines = [_title(watched, inspected, wall, columns), *_notices(watched, inspected, at), ()]
    lines += _resources(inspected.view, columns)
    names = WIDE if wide else _FULL if columns >= _FULL_COLUMNS else _NARROW
    driver_max = _DRIVER_MAX if columns < _ROOMY_COLUMNS and not wide else columns
    lines += _devices(inspected, names, rows - len(lines), driver_max)
    for section in _claims(inspected.view, columns):
        lines += [(), *map(line, section)]
    if len(lines) > rows:
        more = len(lines) - rows + 1
        lines[rows - 1 :] = [line(f"… and {more} lines more: gpuactors inspect", Style.FAINT)]
    return [fitted(pieces, columns) for pieces in lines]


def _title(watched: Watched, inspected: Inspected, wall: float, columns: int) -> Line:
    assert watched.running is not None
    running, time = watched.running, utc(wall)
    name = f"Node {inspected.node}  gpuactors {running.version}, process {running.pid}, {running.view.role}"
    return (
        Piece(padded(name, max(0, columns - width(time) - 2)) + _GAP, Style.HEAD),
        Piece(time, Style.FAINT),
    )


def _notices(watched: Watched, inspected: Inspected, at: float) -> list[Line]:
    lines = []
    if watched.gone_since is not None:
        gone = f"the daemon is gone since {lasted(at - watched.gone_since)}; still trying; this is what it said last"
        lines += [line(gone, Style.ALARM), line(f"  {watched.why_gone}", Style.FAINT)]
    elif watched.last_change is not None:
        then, what = watched.last_change
        style = Style.NEW if at - then < NEW_S else Style.FAINT
        lines.append(line(f"last change {lasted(at - then)} ago: {what}", style))
    for name, problem in inspected.view.problems:
        lines += [line(f"{name}: {problem}", Style.BAD)] if problem else []
    return lines


# --- resources --------------------------------------------------------------------------------------------


def _resources(view: NodeView, columns: int) -> list[Line]:
    if not view.resources:
        return [line("No resource is advertised to kubelet.", Style.FAINT), ()]
    longest = max(len("RESOURCE"), *(width(r.name) for r in view.resources))
    counts = "".join(f"{_GAP}{name}" for name in _COUNTS)
    room = min(longest, max(len("RESOURCE"), columns - width(counts)))
    lines = [line(padded("RESOURCE", room) + counts, Style.HEAD)]
    for resource in view.resources:
        unhealthy = resource.listed - resource.healthy
        values = (resource.listed, resource.healthy, resource.allocated, resource.free, unhealthy)
        *numbers, last = (f"{_GAP}{n:>{len(name)}}" for name, n in zip(_COUNTS, values, strict=True))
        style = Style.BAD if unhealthy else Style.PLAIN
        lines.append(
            (
                Piece(padded(end(resource.name, room), room) + "".join(numbers)),
                Piece(last, style),
                Piece(f"{_GAP}{_causes(resource, view)}", style),
            )
        )
        if not resource.registered or resource.problem:
            lines.append(line(f"  {registration(resource)}", Style.BAD))
    return [*lines, ()]


def _causes(resource: ResourceView, view: NodeView) -> str:
    """Return why devices of it are not Healthy: each cause with the number of its devices."""
    listed = [d for d in view.devices if d.listed and d.resource == resource.name]
    causes = Counter(d.cause for d in listed if d.health != Health.HEALTHY)
    return ", ".join(f"{cause} {number}" for cause, number in sorted(causes.items()))


# --- devices ----------------------------------------------------------------------------------------------


def _devices(inspected: Inspected, names: Sequence[str], room: int, driver_max: int) -> list[Line]:
    ordered = in_order(shown(inspected.view))
    devices = [device for device, _ in ordered]
    if not devices:
        return [line(NO_DEVICES, Style.BAD)]
    assert names[0] == "ADDRESS"
    rows = {}
    for device, depth in ordered:
        address, *others = cells(device, inspected.view, names)
        rows[device.address] = (_GAP * depth + address, *others)
    widths = [max(width(row[i]) for row in (names, *rows.values())) for i in range(len(names) - 1)]
    widths[names.index("DRIVER")] = min(widths[names.index("DRIVER")], driver_max)
    head = _GAP.join(padded(name, w) for name, w in zip(names, widths, strict=False))
    lines = [line(f"{head}{_GAP}{names[-1]}", Style.HEAD)]
    fitting = _that_fit(devices, room - 1)
    lines += [_device(device, rows[device.address], widths, names.index("HEALTH")) for device in fitting]
    if len(fitting) < len(devices):
        hidden = [device for device in devices if device not in fitting]
        unhealthy = sum(not _is_well(device) for device in hidden)
        lines.append(
            line(
                f"… and {len(hidden)} GPUs more, {unhealthy} of them not Healthy: gpuactors inspect",
                Style.FAINT,
            )
        )
    return lines


def _that_fit(devices: Sequence[DeviceView], room: int) -> list[DeviceView]:
    """Return all devices, or else as many as fit beside a line about the others: first those that are not Healthy."""
    if len(devices) <= room:
        return list(devices)
    chosen = {device.address for device in sorted(devices, key=_is_well)[: max(1, room - 1)]}
    return [device for device in devices if device.address in chosen]


def _is_well(device: DeviceView) -> bool:
    return device.listed and device.health == Health.HEALTHY


def _device(device: DeviceView, row: Sequence[str], widths: Sequence[int], health: int) -> Line:
    is_new = device.since_s is not None and device.since_s < NEW_S
    plain = Style.NEW if is_new else Style.PLAIN
    status = Style.GOOD if _is_well(device) else Style.BAD if device.listed else Style.FAINT
    pieces = [
        Piece(padded(cell, w) + _GAP, status if i == health else plain)
        for i, (cell, w) in enumerate(zip(row, widths, strict=False))
    ]
    return (*pieces, Piece(row[-1], plain))


# --- claims -----------------------------------------------------------------------------------------------


def _claims(view: NodeView, columns: int) -> list[list[str]]:
    return [*claims_report.sections(view.claims, columns), *domains_report.sections(view.domains, columns)]
