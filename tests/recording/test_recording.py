"""The recordings of docs/media/: each picture is its recording's."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.recording.cast import COLUMNS, ROWS, Cast, RecordingError
from tests.recording.svg import rendered
from tests.support.patience import patient

MEDIA = Path(__file__).resolve().parents[2] / "docs" / "media"
CASTS = sorted(MEDIA.glob("*.cast"))


def test_a_picture_has_the_screens_that_stand_for_a_while() -> None:
    header = {"version": 2, "width": 20, "height": 2, "title": "<it>"}
    events = [
        [0.0, "o", "$ "],
        [1.0, "o", "passing"],
        [1.1, "o", "\r\x1b[2K\x1b[1;31mred & bold\x1b[0m\r\n  end"],
    ]
    picture = rendered("\n".join(map(json.dumps, [header, *events])))
    texts = [text.text for text in ET.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")]
    assert texts == ["$", "red & bold", "end"]
    assert 'class="b" style="fill:#f97583">red &amp; bold<' in picture
    assert 'x="16" y="13" textLength="24">end<' in picture
    assert "0.000%{transform:translateY(0px)}26.829%{transform:translateY(-34px)}" in picture


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
