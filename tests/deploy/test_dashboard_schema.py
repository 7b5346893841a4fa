"""The dashboard is one to Grafana's own schema: `grafana-foundation-sdk` has its types, which Grafana Labs generates
from the schema of each version.

The types drop a key that they do not know, and take any value for one that they do. So the dashboard is decoded and
encoded again, where nothing may be lost, and every value is held against what is declared for it. The values of an
override are of no declared type: `grafana_field.py` raises for those that it does not know.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from types import UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

import pytest
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from tests.deploy.test_monitoring import dashboard

TYPES: Final = "grafana_foundation_sdk.models."


def faults(of: Mapping[str, Any]) -> list[str]:
    """What is no part of a dashboard to Grafana."""
    plugins.register_default_plugins()
    decoded = Dashboard.from_json(dict(of))
    lost = _lost(of, json.loads(json.dumps(decoded, cls=JSONEncoder)), "")
    return [*lost, *_out_of_range(decoded, Dashboard, "")]


def _lost(before: Any, after: Any, path: str) -> Iterator[str]:
    """What is not there any more, or is another value."""
    match before, after:
        case dict(), dict():
            for key, value in before.items():
                yield from _lost(value, after[key], f"{path}.{key}") if key in after else (f"{path}.{key}",)
        case list(), list() if len(before) == len(after):
            for number, (one, other) in enumerate(zip(before, after, strict=True)):
                yield from _lost(one, other, f"{path}[{number}]")
        case _ if before != after:
            yield path


def _out_of_range(value: object, declared: Any, path: str) -> Iterator[str]:
    """The values that are not of the type that is declared for them."""
    if isinstance(value, list):
        of_each = (get_args(declared) or (object,))[0] if get_origin(declared) is list else object
        for number, one in enumerate(value):
            yield from _out_of_range(one, of_each, f"{path}[{number}]")
    elif type(value).__module__.startswith(TYPES) and not isinstance(value, Enum):
        for name, hint in get_type_hints(type(value)).items():
            yield from _out_of_range(getattr(value, name), hint, f"{path}.{name}")
    if not _is_of(value, declared):
        yield f"{path}: {value!r} is no {declared}"


def _is_of(value: object, declared: Any) -> bool:
    origin, arguments = get_origin(declared), get_args(declared)
    if declared in (object, Any):
        return True
    if origin in (Union, UnionType):
        return any(_is_of(value, one) for one in arguments)
    if origin is Literal:
        return value in arguments
    if origin in (list, dict):
        return isinstance(value, origin)
    if isinstance(declared, type) and issubclass(declared, Enum):
        return value in {member.value for member in declared}
    if declared is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, declared) and (declared is bool or not isinstance(value, bool))


def test_the_dashboard_is_one_to_grafanas_own_schema() -> None:
    assert faults(dashboard()) == []


def misspelt_option(board: dict[str, Any]) -> None:
    board["panels"][0]["options"]["colourMode"] = "value"


def unknown_mode(board: dict[str, Any]) -> None:
    board["panels"][0]["options"]["graphMode"] = "sparkline"


def text_for_a_number(board: dict[str, Any]) -> None:
    board["panels"][2]["fieldConfig"]["defaults"]["thresholds"]["steps"][1]["value"] = "1"


def misspelt_legend(board: dict[str, Any]) -> None:
    board["panels"][4]["options"]["legend"]["displaymode"] = "table"


def unknown_colour_mode(board: dict[str, Any]) -> None:
    board["panels"][4]["fieldConfig"]["defaults"]["color"]["mode"] = "palette"


def unknown_mapping(board: dict[str, Any]) -> None:
    (panel,) = (panel for panel in board["panels"] if panel["type"] == "state-timeline")
    panel["fieldConfig"]["defaults"]["mappings"][0]["options"]["0"]["colour"] = "red"


@pytest.mark.parametrize(
    ("plant", "where"),
    [
        (misspelt_option, ".panels[0].options.colourMode"),
        (unknown_mode, ".panels[0].options.graph_mode"),
        (text_for_a_number, ".panels[2].field_config.defaults.thresholds.steps[1].value"),
        (misspelt_legend, ".panels[4].options.legend.displaymode"),
        (unknown_colour_mode, ".panels[4].field_config.defaults.color.mode"),
        (unknown_mapping, ".mappings[0].options.0.colour"),
    ],
)
def test_what_grafana_does_not_know_is_found(plant: Callable[[dict[str, Any]], None], where: str) -> None:
    board = dashboard()
    plant(board)
    assert any(where in fault for fault in faults(board))
