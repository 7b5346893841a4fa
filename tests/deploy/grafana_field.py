"""What Grafana makes of one value: its text, its colour and its link, by the `fieldConfig` of a panel alone.

As @grafana/data 11.6 has it (field/displayProcessor, field/fieldOverrides, valueFormats, themes of the dark mode), for
what our dashboard uses; anything else raises.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

TEXT: Final = "#ccccdc"
LINK: Final = "#6e9fff"

_COLOURS: Final[Mapping[str, str]] = {
    "text": TEXT,
    "green": "#73BF69",
    "semi-dark-yellow": "#F2CC0C",
    "light-blue": "#8AB8FF",
    "semi-dark-orange": "#FF780A",
    "red": "#F2495C",
    "blue": "#5794F2",
    "purple": "#B877D9",
    "orange": "#FF9830",
}
"""The colours of the dark theme, by name."""

_PALETTE: Final = ("green", "semi-dark-yellow", "light-blue", "semi-dark-orange", "red", "blue", "purple")
"""The first of `palette-classic`."""

_STEPS_BY_DEFAULT: Final = ({"color": "green", "value": None}, {"color": "red", "value": 80})
"""What Grafana takes for a field without thresholds."""

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Display:
    """A value as it is shown."""

    text: str
    colour: str


def config_of(panel: Mapping[str, Any], field: str = "") -> Config:
    """The configuration of a field of a panel: the defaults, with the overrides of its name."""
    found: dict[str, Any] = dict(panel["fieldConfig"]["defaults"])
    for override in panel["fieldConfig"]["overrides"]:
        matcher = override["matcher"]
        assert matcher["id"] == "byName", matcher
        if matcher["options"] == field:
            for changed in override["properties"]:
                _set(found, changed["id"].split("."), changed["value"])
    return found


def _set(config: dict[str, Any], path: list[str], value: Any) -> None:
    first, *rest = path
    if rest:
        config[first] = dict(config.get(first, {}))
        _set(config[first], rest, value)
    else:
        config[first] = value


def display(config: Config, value: float | str) -> Display:
    """A value as a field with this configuration shows it: a mapping goes before the unit and the thresholds."""
    mapped = _mapped(config, value)
    text = mapped.get("text") or (value if isinstance(value, str) else figure(value, config["unit"]))
    return Display(text, _COLOURS[mapped.get("color") or _of_thresholds(config, value)])


def _mapped(config: Config, value: float | str) -> Mapping[str, Any]:
    key = value if isinstance(value, str) else f"{value:g}"
    for mapping in config.get("mappings", ()):
        assert mapping["type"] == "value", mapping
        if key in mapping["options"]:
            found: Mapping[str, Any] = mapping["options"][key]
            return found
    return {}


def _of_thresholds(config: Config, value: float | str) -> str:
    """The colour of the last step that the value has reached; a text has reached the first only."""
    assert config.get("color", {"mode": "thresholds"})["mode"] == "thresholds", config["color"]
    colour = ""
    for step in steps(config):
        if step["value"] is None or (not isinstance(value, str) and value >= step["value"]):
            colour = step["color"]
    return colour


def steps(config: Config) -> tuple[Mapping[str, Any], ...]:
    """The thresholds."""
    thresholds = config.get("thresholds", {"mode": "absolute", "steps": _STEPS_BY_DEFAULT})
    assert thresholds["mode"] == "absolute", thresholds
    return (*thresholds["steps"],)


def colour_named(name: str) -> str:
    """A colour of the theme."""
    return _COLOURS[name]


def of_series(config: Config, number: int) -> str:
    """The colour of one of the series of a panel over time."""
    assert config["color"]["mode"] == "palette-classic", config["color"]
    return _COLOURS[_PALETTE[number % len(_PALETTE)]]


def is_link(config: Config) -> bool:
    return bool(config.get("links"))


def figure(value: float, unit: str) -> str:
    """A number with its unit."""
    match unit:
        case "short":
            return f"{value:g}"
        case "bytes" if value < 1024:
            return f"{value:g} B"
        case "bytes":
            return f"{value / 2**20:g} MiB"
        case "reqps":
            return f"{value:g} req/s"
        case "s" if 0 < value < 1:
            return f"{1000 * value:g} ms"
        case "s" if value < 60:
            return f"{value:g} s"
        case "s":
            return f"{value / 60:.3g} mins"
        case _:
            raise AssertionError(f"no figure of unit {unit}")
