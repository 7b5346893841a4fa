"""docs/media/dashboard.svg: the dashboard as its JSON says, with what its queries answer for one node at one moment.

Colours, texts and links are those of the JSON (`grafana_field.py`): nothing is coloured here by a panel's name. A
series over time has one sample, which Grafana draws as a point.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any, Final

from tests.deploy.answers import SHOWN
from tests.deploy.grafana_field import (
    LINK,
    TEXT,
    colour_named,
    config_of,
    display,
    figure,
    is_link,
    of_series,
    steps,
)
from tests.deploy.manifests import DEPLOY

COLUMN, ROW = 50, 20
"""Of Grafana's grid, in pixels."""

_WIDTH: Final = 24 * COLUMN
_HEAD: Final = 44
_STYLE: Final = (
    f"text{{font-family:Inter,Helvetica,Arial,sans-serif;font-size:13px;fill:{TEXT}}}"
    f".title{{font-weight:500}}.cell{{font-size:11px}}.head{{fill:{LINK};font-weight:500}}"
    ".link{text-decoration:underline}.value{text-anchor:end}"
    ".big{font-size:64px;font-weight:500;text-anchor:middle}.on{fill:#111217}"
)

Panel = Mapping[str, Any]
Answer = tuple[Mapping[str, Any], str, float]
"""A target, the series that it answers, and its value."""


def board() -> Panel:
    """The dashboard."""
    found: Panel = json.loads((DEPLOY / "monitoring" / "dashboard.json").read_text(encoding="utf-8"))
    return found


def drawn(of: Panel) -> str:
    """The picture."""
    panels = sorted(of["panels"], key=lambda panel: (panel["gridPos"]["y"], panel["gridPos"]["x"]))
    height = _HEAD + ROW * max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">',
        f"<title>{escape(of['title'])}: one node in trouble</title>",
        f"<style>{_STYLE}</style>",
        f'<rect width="{_WIDTH}" height="{height}" fill="#111217"/>',
        _text(16, 28, of["title"], "title"),
    ]
    for number, link in enumerate(reversed(of["links"])):
        lines.append(_text(_WIDTH - 16 - 150 * number, 28, link["title"], "link value", LINK))
    for panel in panels:
        lines += _panel(panel)
    return "\n".join((*lines, "</svg>", ""))


def _panel(panel: Panel) -> Iterator[str]:
    place = panel["gridPos"]
    width, height = place["w"] * COLUMN - 8, place["h"] * ROW - 8
    yield f'<g transform="translate({place["x"] * COLUMN + 4},{_HEAD + place["y"] * ROW})">'
    yield f'<rect width="{width}" height="{height}" rx="2" fill="#181b1f" stroke="#2c3235"/>'
    yield _text(12, 22, panel["title"], "title")
    targets = zip(panel["targets"], SHOWN[panel["title"]], strict=True)
    answers = [(target, series, value) for target, shown in targets for series, value in shown.items()]
    match panel["type"]:
        case "stat":
            yield from _stat(panel, answers, width, height)
        case "table":
            yield from _table(panel, answers, width)
        case "state-timeline":
            yield from _states(panel, answers, width)
        case "timeseries":
            yield from _over_time(panel, answers, width, height)
        case _:
            raise AssertionError(f"no picture of a {panel['type']}")
    yield "</g>"


def _stat(panel: Panel, answers: Sequence[Answer], width: int, height: int) -> Iterator[str]:
    assert panel["options"]["graphMode"] == "none"
    ((_, _, value),) = answers
    shown = display(config_of(panel), value)
    colour = shown.colour if panel["options"]["colorMode"] == "value" else TEXT
    yield _text(width // 2, height // 2 + 32, shown.text, "big", colour)


def _table(panel: Panel, answers: Sequence[Answer], width: int) -> Iterator[str]:
    """Each column as wide as its longest text."""
    rows = [_labels(series) for _, series, _ in answers]
    names = _columns(panel, {name for row in rows for name in row})
    longest = [max(len(text) for text in (name, *(row.get(name, "") for row in rows))) + 2 for name in names]
    for column, name in enumerate(names):
        config = config_of(panel, name)
        x = 12 + (width - 12) * sum(longest[:column]) // sum(longest)
        yield _text(x, 50, name, "cell head")
        for number, row in enumerate(rows):
            shown = display(config, row.get(name, ""))
            is_coloured = config["custom"]["cellOptions"]["type"] == "color-text"
            kind, plain = ("cell link", LINK) if is_link(config) else ("cell", TEXT)
            yield _text(x, 74 + 22 * number, shown.text, kind, shown.colour if is_coloured else plain)


def _columns(panel: Panel, labels: set[str]) -> list[str]:
    """The labels in the order of the panel's only transformation, without those that it leaves out."""
    (organize,) = panel["transformations"]
    assert organize["id"] == "organize"
    hidden, order = organize["options"]["excludeByName"], organize["options"]["indexByName"]
    return sorted((n for n in labels if not hidden.get(n)), key=lambda n: (order.get(n, len(order)), n))


def _states(panel: Panel, answers: Sequence[Answer], width: int) -> Iterator[str]:
    """A bar for each series, in the colour and with the text of its value."""
    names = [_legend(target, series) for target, series, _ in answers]
    left = 24 + 7 * max(map(len, names), default=0)
    for number, (name, (_, _, value)) in enumerate(zip(names, answers, strict=True)):
        shown, y = display(config_of(panel), value), 40 + 44 * number
        yield _text(12, y + 22, name, "cell")
        yield f'<rect x="{left}" y="{y}" width="{width - left - 12}" height="34" fill="{shown.colour}"/>'
        yield _text(left + 10, y + 22, shown.text, "cell on")


def _over_time(panel: Panel, answers: Sequence[Answer], width: int, height: int) -> Iterator[str]:
    """The last sample of each series as a point, and the legend with its value."""
    assert panel["options"]["legend"]["displayMode"] == "table"
    config = config_of(panel)
    left, right, low, high = 12, width // 2 - 20, height - 24, 50
    line = [s for s in steps(config) if config["custom"]["thresholdsStyle"]["mode"] == "line" and s["value"]]
    most = max([value for _, _, value in answers] + [step["value"] for step in line], default=0) or 1
    for share in (0, 1):
        y = low - (low - high) * share
        yield f'<path d="M{left} {y}H{right}" stroke="#2c3235"/>'
        yield _text(left, y - 4, figure(most * share, config["unit"]), "cell")
    for step in line:
        y = low - int((low - high) * step["value"] / most)
        yield f'<path d="M{left} {y}H{right}" stroke="{colour_named(step["color"])}" stroke-dasharray="6 4"/>'
    yield _text(width // 2, 40, "Name", "cell head")
    yield _text(width - 12, 40, "Last *", "cell head value")
    for number, (target, series, value) in enumerate(answers):
        y, colour = 64 + 22 * number, of_series(config, number)
        yield f'<circle cx="{right}" cy="{low - int((low - high) * value / most)}" r="3" fill="{colour}"/>'
        yield f'<rect x="{width // 2}" y="{y - 7}" width="14" height="4" rx="2" fill="{colour}"/>'
        yield _text(width // 2 + 22, y, _legend(target, series), "cell")
        yield _text(width - 12, y, figure(value, config["unit"]), "cell value")


def _labels(series: str) -> dict[str, str]:
    return dict(re.findall(r'(\w+)="([^"]*)"', series))


def _legend(target: Mapping[str, Any], series: str) -> str:
    labels = _labels(series)
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels[found[1]], target["legendFormat"])


def _text(x: int, y: int, text: str, kind: str = "", colour: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    filled = f' style="fill:{colour}"' if colour not in ("", TEXT) else ""
    return f'<text{named} x="{x}" y="{y}"{filled}>{escape(text)}</text>'
