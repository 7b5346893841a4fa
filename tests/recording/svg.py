"""A recording as one animated picture: SVG with CSS, without a script, so that it plays in a page of Markdown.

The screens are stacked, and moved past a window one after the other. Each line that occurs is in it once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import Any, Final, TypeAlias

import pyte

_STANDS_S: Final = 0.25
"""A screen that stands for less is left out: nobody reads it."""

_WIDTH, _HEIGHT, _MARGIN = 8.0, 17, 12
"""Of a character, of a line and of the edge, in pixels."""

_COLOURS: Final = {
    "black": "#6a737d", "red": "#f97583", "green": "#85e89d", "brown": "#ffea7f", "blue": "#79b8ff",
    "magenta": "#b392f0", "cyan": "#73e3ff", "white": "#d1d5da", "default": "#e1e4e8",
}  # fmt: skip
"""By pyte's names; what is bright has the colour that is not."""

_GROUND: Final = "#1f2428"

_STYLE: Final = """\
text{{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;fill:#e1e4e8;white-space:pre}}
.b{{font-weight:bold}}
@keyframes screens{{{frames}}}
#screens{{animation:screens {seconds:.2f}s steps(1,end) infinite}}
"""


@dataclass(frozen=True, slots=True)
class Style:
    """How characters are shown."""

    colour: str = "default"
    bold: bool = False
    reverse: bool = False


Line: TypeAlias = tuple[tuple[str, Style], ...]
"""A line of the screen: runs of characters with one style, without blanks at its end."""


def rendered(cast: str) -> str:
    """The picture of a file of `cast.py`."""
    header, *events = (json.loads(line) for line in cast.splitlines())
    screen, shown = pyte.Screen(header["width"], header["height"]), list[tuple[float, tuple[Line, ...]]]()
    stream = pyte.Stream(screen)
    for at, _, text in events:
        stream.feed(text)
        shown.append((at, tuple(_line(screen, row) for row in range(screen.lines))))
    ends = shown[-1][0] + 3.0
    return _picture(list(_lasting(shown, ends)), ends, header["width"], header["height"], header["title"])


def _line(screen: Any, row: int) -> Line:
    cells = (screen.buffer[row][column] for column in range(screen.columns))
    styled = ((cell.data, Style(cell.fg.removeprefix("bright"), cell.bold, cell.reverse)) for cell in cells)
    runs = [("".join(c for c, _ in run), style) for style, run in groupby(styled, key=lambda cell: cell[1])]
    while runs and not runs[-1][1].reverse and not runs[-1][0].strip():
        runs.pop()
    if not runs or runs[-1][1].reverse:
        return tuple(runs)
    return (*runs[:-1], (runs[-1][0].rstrip(), runs[-1][1]))


def _lasting(
    shown: list[tuple[float, tuple[Line, ...]]], ends: float
) -> Iterable[tuple[float, tuple[Line, ...]]]:
    """The screens that stand for a while; the first begins at 0."""
    last: tuple[Line, ...] | None = None
    for (at, lines), (until, _) in zip(shown, [*shown[1:], (ends, ())], strict=True):
        if until - at >= _STANDS_S and lines != last:
            yield (at if last is not None else 0.0), lines
            last = lines


def _picture(
    screens: list[tuple[float, tuple[Line, ...]]], ends: float, columns: int, rows: int, title: str
) -> str:
    known: dict[Line, str] = {}
    stacked: list[str] = []
    for number, (_, lines) in enumerate(screens):
        for row, line in enumerate(lines):
            if line:
                name = known.setdefault(line, f"l{len(known)}")
                stacked.append(f'<use href="#{name}" y="{(number * rows + row) * _HEIGHT}"/>')
    frames = "".join(
        f"{100 * at / ends:.3f}%{{transform:translateY({-number * rows * _HEIGHT}px)}}"
        for number, (at, _) in enumerate(screens)
    )
    width, height = round(columns * _WIDTH), rows * _HEIGHT
    whole = (width + 2 * _MARGIN, height + 2 * _MARGIN)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{whole[0]}" height="{whole[1]}">',
            f"<title>{escape(title)}</title>",
            f"<style>{_STYLE.format(frames=frames, seconds=ends)}</style>",
            "<defs>",
            *(f'<g id="{name}">{_text(line)}</g>' for line, name in known.items()),
            "</defs>",
            f'<rect width="100%" height="100%" rx="6" fill="{_GROUND}"/>',
            f'<svg x="{_MARGIN}" y="{_MARGIN}" width="{width}" height="{height}"><g id="screens">',
            *stacked,
            "</g></svg>",
            "</svg>",
            "",
        ]
    )


def _text(line: Line) -> str:
    column, parts = 0, list[str]()
    for text, style in line:
        if style.reverse:
            parts.append(_bar(column, text, style))
        if text.strip():
            begin = column + len(text) - len(text.lstrip())
            parts.append(_run(begin, text.strip(), style))
        column += len(text)
    return "".join(parts)


def _bar(column: int, text: str, style: Style) -> str:
    """The ground of a run whose colours are exchanged."""
    size = f'width="{len(text) * _WIDTH:g}" height="{_HEIGHT}"'
    return f'<rect x="{column * _WIDTH:g}" {size} fill="{_COLOURS[style.colour]}"/>'


def _run(column: int, text: str, style: Style) -> str:
    bold = ' class="b"' * style.bold
    colour = _GROUND if style.reverse else _COLOURS[style.colour]
    fill = f' style="fill:{colour}"' * (style.reverse or style.colour != "default")
    # Each run has its length, so that columns stay columns in whatever font the reader has.
    place = f'x="{column * _WIDTH:g}" y="13" textLength="{len(text) * _WIDTH:g}"'
    return f"<text {place}{bold}{fill}>{escape(text)}</text>"
