"""The pictures: each is well-formed, within its frame, and says what it shows."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from tests.soak.picture import HEIGHT, WIDTH, Mark, chart, ticks

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(
    ("least", "most", "expected"),
    [(0, 10, [0, 2, 4, 6, 8, 10]), (41.2, 43.9, [41, 42, 43, 44]), (0, 0, [0, 0.2]), (5, 5, [5, 6])],
)
def test_a_scale_has_round_numbers(least: float, most: float, expected: list[float]) -> None:
    assert ticks(least, most) == expected


def test_a_line_with_a_gap_and_a_mark() -> None:
    picture = ET.fromstring(
        chart("Memory, MiB", {"rss": [[(0, 40), (60, 41)], [(90, 30), (120, 31)]]}, [Mark(75, "kill <1>")])
    )
    lines = picture.findall(f"{SVG}polyline")
    assert len(lines) == 2
    points = [
        tuple(map(float, point.split(","))) for line in lines for point in (line.get("points") or "").split()
    ]
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in points)
    assert points[0][1] < points[2][1], "40 is above 30"
    texts = [element.text for element in picture.iter() if element.text]
    assert "Memory, MiB" in texts
    assert "kill <1>" in texts


def test_a_mark_without_a_name_has_a_tooltip() -> None:
    picture = ET.fromstring(chart("t", {}, [Mark(5, "kubelet away", is_named=False)]))
    assert [title.text for title in picture.iter(f"{SVG}title")] == ["t", "kubelet away"]
    assert "kubelet away" not in [text.text for text in picture.iter(f"{SVG}text")]


def test_two_lines_have_their_names() -> None:
    texts = [
        e.text for e in ET.fromstring(chart("t", {"a": [[(0, 1)]], "b": [[(0, 2)]]}, [])).iter(f"{SVG}text")
    ]
    assert {"a", "b"} <= set(texts)


def test_nothing_was_sampled() -> None:
    assert ET.fromstring(chart("t", {}, [])).tag == f"{SVG}svg"
