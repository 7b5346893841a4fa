"""The recordings of docs/media/: a screen is what a terminal would show, and each picture is its recording's."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.recording.cast import COLUMNS, ROWS, Cast, RecordingError
from tests.recording.screen import PLAIN, Screen, Style
from tests.recording.svg import rendered
from tests.support.patience import patient

MEDIA = Path(__file__).resolve().parents[2] / "docs" / "media"
CASTS = sorted(MEDIA.glob("*.cast"))


def shown(text: str, columns: int = 20, rows: int = 3) -> list[str]:
    screen = Screen(columns, rows)
    screen.write(text)
    return ["".join(run for run, _ in line) for line in screen.lines()]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("one\r\ntwo", ["one", "two", ""]),
        ("1\r\n2\r\n3\r\n4", ["2", "3", "4"]),
        ("four\r\x1b[2Kno", ["no", "", ""]),
        ("a\r\nb\r\n\x1b[2A\x1b[2KA\x1b[1B\x1b[?25l", ["A", "b", ""]),
        ("0123456789" * 2 + "+", ["01234567890123456789", "+", ""]),
        ("012345\r\x1b[0KX", ["X", "", ""]),
    ],
)
def test_a_screen_shows_what_was_written_to_it(text: str, lines: list[str]) -> None:
    assert shown(text) == lines


def test_characters_have_the_style_that_was_set_before_them() -> None:
    screen = Screen(20, 1)
    screen.write("\x1b[1;31ma\x1b[0m b \x1b[2mc\x1b[22;96md\x1b[39me")
    runs = (
        ("a", Style(1, bold=True)),
        (" b ", PLAIN),
        ("c", Style(dim=True)),
        ("d", Style(14)),
        ("e", PLAIN),
    )
    assert screen.lines() == (runs,)


@pytest.mark.parametrize("text", ["\x1b[5;5H", "\x1b]0;title\x07", "\x1b[38;5;1m", "\t"])
def test_what_is_not_known_is_not_guessed(text: str) -> None:
    with pytest.raises(ValueError, match="not known here"):
        shown(text)


def test_a_command_is_recorded_in_a_terminal_of_this_size() -> None:
    cast = Cast("it")
    cast.type("it")
    program = "import os, sys; print(sys.stdout.isatty(), *os.get_terminal_size())"
    cast.run([sys.executable, "-c", program], {}, within_s=patient(30))
    header, *events = map(json.loads, cast.text().splitlines())
    assert (header["version"], header["width"], header["height"]) == (2, COLUMNS, ROWS)
    assert f"True {COLUMNS} {ROWS}\r\n" in "".join(text for _, _, text in events)
    assert [at for at, _, _ in events] == sorted(at for at, _, _ in events)
    with pytest.raises(RecordingError, match="ended with 3"):
        cast.run([sys.executable, "-c", "print(); raise SystemExit(3)"], {}, within_s=patient(30))
    with pytest.raises(RecordingError, match="not ended in time"):
        cast.run([sys.executable, "-c", "input()"], {}, within_s=0.01)


@pytest.mark.parametrize("cast", CASTS, ids=lambda path: path.name)
def test_a_picture_is_that_of_its_recording(cast: Path) -> None:
    picture = cast.with_suffix(".svg").read_text(encoding="utf-8")
    assert picture == rendered(cast.read_text(encoding="utf-8")), "run `just recording` and commit the result"
    assert ET.fromstring(picture).tag == "{http://www.w3.org/2000/svg}svg"


def test_the_recordings_are_there_and_small() -> None:
    assert [path.stem for path in CASTS] == ["diagnosis", "incident"]
    for path in MEDIA.iterdir():
        assert path.stat().st_size < 300_000, path.name
