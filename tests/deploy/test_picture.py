"""The picture of the dashboard is its JSON's: what is changed there changes it, and nothing else gives it a colour."""

from __future__ import annotations

import re
from typing import Any, Final

import pytest

from tests.deploy.grafana_field import colour_named, config_of, display
from tests.deploy.picture import board, drawn

RED, GREEN, ORANGE = map(colour_named, ("red", "green", "orange"))
NEED_A_HAND: Final = "GPUs that need a hand"


def panel(of: Any, title: str) -> dict[str, Any]:
    found: dict[str, Any] = next(panel for panel in of["panels"] if panel["title"] == title)
    return found


def of_panel(picture: str, title: str) -> str:
    """The part of the picture that a panel has."""
    return next(part for part in picture.split("<g ") if f">{title}</text>" in part)


def figure_of(picture: str, title: str) -> tuple[str, str]:
    """The big figure of a panel, and its colour."""
    found = re.search(r'class="big"[^>]*style="fill:(\S+)">([^<]*)<', of_panel(picture, title))
    assert found is not None
    return found[2], found[1]


def test_a_threshold_gives_a_figure_its_colour() -> None:
    of = board()
    assert figure_of(drawn(of), NEED_A_HAND) == ("1", RED)
    thresholds = panel(of, NEED_A_HAND)["fieldConfig"]["defaults"]["thresholds"]
    thresholds["steps"][1]["value"] = 2
    assert figure_of(drawn(of), NEED_A_HAND) == ("1", GREEN)
    thresholds["steps"][0]["color"] = "orange"
    assert figure_of(drawn(of), NEED_A_HAND) == ("1", ORANGE)


@pytest.mark.parametrize(("value", "colour"), [(79, GREEN), (80, RED)])
def test_without_thresholds_a_figure_has_those_that_grafana_takes_then(value: float, colour: str) -> None:
    """Eighty Healthy GPUs would be red."""
    of = board()
    del panel(of, "Healthy GPUs")["fieldConfig"]["defaults"]["thresholds"]
    assert display(config_of(panel(of, "Healthy GPUs")), value).colour == colour


def test_a_value_mapping_gives_a_state_its_text_and_colour() -> None:
    of, title = board(), "Resources that kubelet does not have from us"
    assert f'fill="{RED}"/>' in of_panel(drawn(of), title)
    (mapping,) = panel(of, title)["fieldConfig"]["defaults"]["mappings"]
    mapping["options"]["1"] |= {"text": "somebody else", "color": "purple"}
    changed = of_panel(drawn(of), title)
    assert ">somebody else</text>" in changed
    assert RED not in changed
    assert colour_named("purple") in changed


def test_an_override_gives_a_column_its_colours_and_links() -> None:
    of, title = board(), "Firing alerts"
    before = of_panel(drawn(of), title)
    assert re.search(rf'style="fill:{RED}">critical<', before)
    assert re.search(r'class="cell link"[^>]*>GpuactorsRefusals<', before)
    panel(of, title)["fieldConfig"]["overrides"].clear()
    after = of_panel(drawn(of), title)
    assert not re.search(r'style="[^"]*">critical<', after)
    assert re.search(r'class="cell"[^>]*>GpuactorsRefusals<', after)


def test_a_line_at_a_threshold_is_where_the_json_has_it() -> None:
    of, title = board(), "Longest pending claim"
    assert "stroke-dasharray" in of_panel(drawn(of), title)
    panel(of, title)["fieldConfig"]["defaults"]["custom"]["thresholdsStyle"]["mode"] = "off"
    assert "stroke-dasharray" not in of_panel(drawn(of), title)


def test_a_kind_of_panel_that_is_not_known_is_not_drawn() -> None:
    of = board()
    panel(of, NEED_A_HAND)["type"] = "gauge"
    with pytest.raises(AssertionError, match="gauge"):
        drawn(of)
