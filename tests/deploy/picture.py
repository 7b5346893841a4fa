"""docs/media/dashboard.svg: the panels of the dashboard at their places, with what their queries answer for one node.

It is no picture of Grafana: a panel that Grafana draws over time is a list of its series here, each with its last
value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any, Final

from tests.deploy.answers import SHOWN
from tests.deploy.manifests import DEPLOY

COLUMN, ROW = 50, 20
"""Of Grafana's grid, in pixels."""

_WIDTH: Final = 24 * COLUMN
_HEAD: Final = 44
_HIDDEN: Final = {"__name__", "container", "alertstate"}
"""Labels that the tables leave out: the transformation of the panel."""

_COLOURS: Final = ("#73bf69", "#f2cc0c", "#5794f2", "#ff780a", "#b877d9", "#f2495c")
_RED: Final = {"Unhealthy GPUs", "Nodes that are not ready"}
_STYLE: Final = (
    "text{font-family:Inter,Helvetica,Arial,sans-serif;font-size:13px;fill:#ccccdc}"
    ".title{font-weight:500}.cell{font-size:11px}.head{fill:#6e9fff;font-weight:500}.link{fill:#6e9fff;text-decoration:underline}"
    ".value{text-anchor:end}.big{font-size:64px;font-weight:500;text-anchor:middle}"
)


def drawn() -> str:
    """The picture."""
    board = json.loads((DEPLOY / "monitoring" / "dashboard.json").read_text(encoding="utf-8"))
    panels = sorted(board["panels"], key=lambda panel: (panel["gridPos"]["y"], panel["gridPos"]["x"]))
    height = _HEAD + ROW * max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">',
        f"<title>{escape(board['title'])}: one node in trouble</title>",
        f"<style>{_STYLE}</style>",
        f'<rect width="{_WIDTH}" height="{height}" fill="#111217"/>',
        _text(16, 28, board["title"], "title"),
    ]
    for number, link in enumerate(reversed(board["links"])):
        lines.append(_text(_WIDTH - 16 - 150 * number, 28, link["title"], "link value"))
    for panel in panels:
        lines += _panel(panel)
    return "\n".join((*lines, "</svg>", ""))


def _panel(panel: Mapping[str, Any]) -> Iterator[str]:
    place = panel["gridPos"]
    width, height = place["w"] * COLUMN - 8, place["h"] * ROW - 8
    yield f'<g transform="translate({place["x"] * COLUMN + 4},{_HEAD + place["y"] * ROW})">'
    yield f'<rect width="{width}" height="{height}" rx="2" fill="#181b1f" stroke="#2c3235"/>'
    yield _text(12, 22, panel["title"], "title")
    answers = [*zip(panel["targets"], SHOWN[panel["title"]], strict=True)]
    match panel["type"]:
        case "stat":
            ((_, shown),) = answers
            (value,) = shown.values()
            colour = _COLOURS[-1] if value and panel["title"] in _RED else _COLOURS[0]
            at = f'class="big" x="{width // 2}" y="{height // 2 + 32}"'
            yield f'<text {at} style="fill:{colour}">{_figure(value, "short")}</text>'
        case "table":
            yield from _table([_labels(series) for _, shown in answers for series in shown], width)
        case _:
            unit = panel["fieldConfig"]["defaults"]["unit"]
            rows = [(_legend(target, series), v) for target, shown in answers for series, v in shown.items()]
            for number, (legend, value) in enumerate(rows):
                y = 52 + 22 * number
                colour = _COLOURS[number % len(_COLOURS)]
                yield f'<rect x="12" y="{y - 7}" width="14" height="4" rx="2" fill="{colour}"/>'
                yield _text(34, y, legend)
                yield _text(width - 12, y, _figure(value, unit), "value")
    yield "</g>"


def _table(rows: list[dict[str, str]], width: int) -> Iterator[str]:
    """Each column as wide as its longest text."""
    names = sorted({name for row in rows for name in row} - _HIDDEN)
    longest = [max(len(text) for text in (name, *(row.get(name, "") for row in rows))) + 2 for name in names]
    for column, name in enumerate(names):
        x = 12 + (width - 12) * sum(longest[:column]) // sum(longest)
        yield _text(x, 50, name, "cell head")
        for number, row in enumerate(rows):
            kind = "cell link" if name in ("alertname", "cause") else "cell"
            yield _text(x, 74 + 22 * number, row.get(name, ""), kind)


def _labels(series: str) -> dict[str, str]:
    return dict(re.findall(r'(\w+)="([^"]*)"', series))


def _legend(target: Mapping[str, Any], series: str) -> str:
    labels = _labels(series)
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels[found[1]], target["legendFormat"])


def _figure(value: float, unit: str) -> str:
    match unit:
        case "bytes":
            return f"{value / 2**20:g} MiB"
        case "s":
            return f"{1000 * value:g} ms"
        case "reqps":
            return f"{value:g} /s"
        case _:
            return f"{value:g}"


def _text(x: int, y: int, text: str, kind: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text{named} x="{x}" y="{y}">{escape(text)}</text>'
