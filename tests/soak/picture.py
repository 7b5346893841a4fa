"""Line charts as SVG, without a library. Pure: `chart` returns the file's text.

A process that ends breaks its line. Events are vertical lines with their name, so that a step can be read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

WIDTH: Final = 960
HEIGHT: Final = 320
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 58, 40
LEGEND: Final = 4
"""Names of lines in a row."""

COLOURS: Final = ("#1f6feb", "#d1242f", "#1a7f37", "#9a6700", "#8250df", "#bf3989", "#0a7ea4", "#57606a")
"""Of the lines; they are told apart by their names as well."""

STEPS: Final = (1, 2, 5)
"""Of a scale: multiples of a power of ten."""

Points = Sequence[tuple[float, float]]
"""Seconds since the beginning, and a value."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened at a time."""

    at_s: float
    name: str
    is_named: bool = True
    """Its name stands beside it; otherwise it is a tooltip."""


@dataclass(frozen=True, slots=True)
class _Frame:
    """Where a value is on the picture."""

    end_s: float
    least: float
    most: float

    def x(self, at_s: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * at_s / self.end_s, 1)

    def y(self, value: float) -> float:
        share = (value - self.least) / (self.most - self.least)
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share, 1)


def ticks(least: float, most: float, about: int = 5) -> list[float]:
    """Round numbers from at most `least` to at least `most`."""
    span = (most - least) or max(abs(most), 1.0)
    power = 10.0 ** math.floor(math.log10(span / about))
    step = next((power * n for n in STEPS if span / (power * n) <= about), power * 10)
    first, last = math.floor(least / step), math.ceil(most / step)
    return [round(number * step, 9) for number in range(first, max(last, first + 1) + 1)]


def chart(
    title: str, lines: Mapping[str, Sequence[Points]], marks: Sequence[Mark], *, from_zero: bool = False
) -> str:
    """A chart. `lines`: name → the parts of a line, with a gap between two parts."""
    every = [point for parts in lines.values() for part in parts for point in part] or [(0.0, 0.0)]
    values = [value for _, value in every]
    scale = ticks(0.0 if from_zero else min(values), max(values))
    end_s = max([1.0, *(at_s for at_s, _ in every), *(mark.at_s for mark in marks)])
    frame = _Frame(end_s, scale[0], scale[-1])
    content = [*_grid(frame, scale), *_marks(frame, marks), *_lines(frame, lines)]
    return "\n".join((
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="18" font-size="14" fill="#1f2328">{escape(title)}</text>',
        *content,
        "</svg>\n",
    ))  # fmt: skip


def _grid(frame: _Frame, scale: Sequence[float]) -> list[str]:
    found: list[str] = []
    for value in scale:
        y = frame.y(value)
        found.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" stroke="#d0d7de"/>')
        found.append(f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end" fill="#57606a">{value:g}</text>')
    unit_s, unit = (60.0, "min") if frame.end_s < 3 * 3600 else (3600.0, "h")
    found += [
        f'<text x="{frame.x(at * unit_s)}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle" fill="#57606a">{at:g}</text>'
        for at in ticks(0.0, frame.end_s / unit_s, 10)
        if at * unit_s <= frame.end_s
    ]
    found.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 6}" text-anchor="end" fill="#57606a">{unit}</text>')
    return found


def _marks(frame: _Frame, marks: Sequence[Mark]) -> list[str]:
    found: list[str] = []
    for mark in marks:
        x = frame.x(mark.at_s)
        colour = "#bf8700" if mark.is_named else "#eac54f"
        found.append(
            f'<line x1="{x}" x2="{x}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="{colour}" stroke-dasharray="3 3">'
            f"<title>{escape(mark.name)}</title></line>"
        )
        if mark.is_named:
            found.append(
                f'<text transform="translate({x + 3} {TOP + 2}) rotate(90)" font-size="10" '
                f'fill="#7d4e00">{escape(mark.name)}</text>'
            )
    return found


def _lines(frame: _Frame, lines: Mapping[str, Sequence[Points]]) -> list[str]:
    found: list[str] = []
    for index, (name, parts) in enumerate(lines.items()):
        colour = COLOURS[index % len(COLOURS)]
        for part in parts:
            path = " ".join(f"{frame.x(at_s)},{frame.y(value)}" for at_s, value in part)
            found.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        if len(lines) > 1:
            x = LEFT + (WIDTH - LEFT - RIGHT) * (index % LEGEND) / LEGEND
            y = 34 + 14 * (index // LEGEND)
            found.append(f'<text x="{x:.0f}" y="{y}" font-size="11" fill="{colour}">{escape(name)}</text>')
    return found
