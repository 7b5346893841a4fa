"""The recordings of docs/media/: each picture is its recording's."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pyte
import pytest

from tests.recording.cast import Act, Cast, RecordingError
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
    cast = Cast("it", columns=80, rows=20)
    cast.type("it")
    program = "import os, sys; print(sys.stdout.isatty(), *os.get_terminal_size())"
    cast.run([sys.executable, "-c", program], {}, within_s=patient(30))
    header, *events = map(json.loads, cast.text().splitlines())
    assert (header["version"], header["width"], header["height"]) == (2, cast.columns, cast.rows)
    assert f"True {cast.columns} {cast.rows}\r\n" in "".join(text for _, _, text in events)
    assert [at for at, _, _ in events] == sorted(at for at, _, _ in events)
    with pytest.raises(RecordingError, match="ended with 3"):
        cast.run([sys.executable, "-c", "print(); raise SystemExit(3)"], {}, within_s=patient(30))
    with pytest.raises(RecordingError, match="not ended in time"):
        cast.run([sys.executable, "-c", "input()"], {}, within_s=0.01)


_SCREEN = """\
import sys, tty
tty.setcbreak(0)
print("first", end="", flush=True)
while (key := sys.stdin.read(1)) != "q":
    print(f"got {key}", end="", flush=True)
"""


def test_a_screen_is_recorded_from_its_first_frame_while_things_happen() -> None:
    cast, done = Cast("it", columns=80, rows=20), []

    def act() -> bytes:
        done.append("act")
        return b""

    acts = (Act(0.4, act), Act(0.2, lambda: b"x"))
    cast.watch([sys.executable, "-c", _SCREEN], {}, acts, seconds=0.6)
    _, *events = map(json.loads, cast.text().splitlines())
    assert [text for _, _, text in events] == ["first", "got x"]
    assert (events[0][0], 0.2 <= events[1][0] < 0.6, done) == (0.0, True, ["act"])


@pytest.mark.parametrize("name", ["incident"])
def test_the_first_frame_of_the_film_says_what_is_wrong(name: str) -> None:
    header, first, *later = map(json.loads, (MEDIA / f"{name}.cast").read_text().splitlines())
    screen = pyte.Screen(header["width"], header["height"])
    pyte.Stream(screen).feed(first[2])
    assert "is still held by process" in " ".join(" ".join(line.split()) for line in screen.display)
    assert (first[0], later[-1][0] < 15.0) == (0.0, True)


def test_a_directory_of_the_fake_node_is_shown_by_its_usual_name() -> None:
    cast = Cast("it", names={"/tmp/ga-1/k": "/var/lib/kubelet"})
    cast.run([sys.executable, "-c", "print('/tmp/ga-1/k/device-plugins')"], {}, within_s=patient(30))
    assert "/var/lib/kubelet/device-plugins" in cast.text()


def test_no_recording_has_a_temporary_path() -> None:
    assert [path.name for path in CASTS if "/tmp/" in path.read_text()] == []


@pytest.mark.parametrize("cast", CASTS, ids=lambda path: path.name)
def test_a_picture_is_that_of_its_recording(cast: Path) -> None:
    picture = cast.with_suffix(".svg").read_text(encoding="utf-8")
    assert picture == rendered(cast.read_text(encoding="utf-8")), "run `just recording` and commit the result"
    assert ET.fromstring(picture).tag == "{http://www.w3.org/2000/svg}svg"


def test_the_recordings_are_there_and_small() -> None:
    assert [path.stem for path in CASTS] == ["diagnosis", "incident"]
    for path in MEDIA.iterdir():
        assert path.stat().st_size < 300_000, path.name
