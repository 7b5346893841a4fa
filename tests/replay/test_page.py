"""The page of `gpuactors replay --html` in a real browser: it draws, it explains, and it needs nothing from outside."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from gpuactors.core.events.daemon import HandOverRequested, PredecessorGone
from gpuactors.core.events.host import HostScanned
from gpuactors.core.values.model import PciAddress
from gpuactors.observe.journal import Bounds, Missed
from gpuactors.replay.lanes import statuses
from gpuactors.replay.page import EVENTS_MAX, KINDS, Page
from gpuactors.replay.play import Played, play
from gpuactors.replay.reading import files_to_read
from gpuactors.replay.run import replay
from gpuactors.replay.text import Tally
from tests.core.builders import SETTINGS, gpu
from tests.observe.recording import RecordedCore, story, write
from tests.support.browser import Tab, open_browser

GPUS, EVENTS = 16, 10_000


@dataclass(frozen=True)
class Written:
    """A page, and the journal that it was made from."""

    page: Path
    journal: Path

    @property
    def url(self) -> str:
        return self.page.as_uri()

    @property
    def data(self) -> dict[str, Any]:
        """What the page draws."""
        found = re.search(r'<script id="data" type="application/json">(.*)</script>', self.page.read_text())
        assert found is not None
        parsed: dict[str, Any] = json.loads(found[1])
        return parsed


def written(journal: Path, page: Path) -> Written:
    printed: list[str] = []
    code = replay(
        str(journal), end=None, only_differences=False, html=str(page), json_lines=False, echo=printed.append
    )
    assert code == 0
    assert printed[0].startswith(f"{page}: ")
    return Written(page, journal)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """16 GPUs, 10,000 events, one gap."""
    directory = tmp_path_factory.mktemp("large")
    steps = story(GPUS, EVENTS, seed=1).steps
    journal = directory / "journal"
    write(journal, *steps[:5000], Missed(20), *steps[5020:], bounds=Bounds(file_bytes=400_000))
    return written(journal, directory / "page.html")


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    with open_browser() as browser:
        yield browser


def opened(tab: Tab, url: str, *, dark: bool = False) -> Tab:
    tab.open(url, dark=dark)
    tab.wait("document.getElementById('chart').dataset.drawn === 'yes'")
    return tab


def box(tab: Tab, selector: str) -> dict[str, float]:
    """Where an element is: its middle, its left and its width."""
    found: dict[str, float] = tab.run(
        f"(() => {{ const b = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
        "return { x: b.x + b.width / 2, y: b.y + b.height / 2, left: b.x, width: b.width } })()"
    )
    return found


def window(tab: Tab) -> str:
    """The stretch of time that is shown."""
    text: str = tab.run("document.getElementById('window').textContent")
    return text


def test_it_draws_every_device_without_a_word_from_outside(large: Written, tab: Tab) -> None:
    opened(tab, large.url)
    assert tab.run("document.querySelectorAll('.row.device').length") == GPUS
    assert tab.run("[...document.querySelectorAll('.row.device')].every(r => r.querySelector('.band'))")
    assert tab.run("document.querySelectorAll('.row.resource .m-list, .row.events path').length") >= 3
    assert tab.run("document.querySelectorAll('.m-granted, .m-refused').length") > 4
    # Drawn for a screen, not for 10,000 events.
    assert tab.run("document.querySelectorAll('#chart *').length") < 8_000
    assert tab.run("document.documentElement.scrollWidth <= innerWidth")
    asked = [e["params"]["request"]["url"] for e in tab.events if e["method"] == "Network.requestWillBeSent"]
    assert asked == [large.url]
    assert not [e for e in tab.events if e["method"] in ("Runtime.exceptionThrown", "Log.entryAdded")]
    assert "https://" not in large.page.read_text()


def test_the_bands_are_what_the_daemon_knew(large: Written) -> None:
    data = large.data
    rows = {row["name"]: row for row in data["rows"] if row["kind"] == "device"}
    files, _ = files_to_read(str(large.journal))
    steps = [m for m in play(files) if isinstance(m, Played)]
    lasting = [step for step, after in pairwise(steps) if after.wall > step.wall + 2e-3]
    assert len(lasting) > 500
    for step in lasting[:: len(lasting) // 100]:
        at = step.wall - data["began"] + 1e-3
        now = {address: (kind, text) for address, _, kind, text in statuses(step.state)}
        for address in map(PciAddress, rows):
            shown = [
                (band[2], data["texts"][band[3]])
                for band in rows[address]["bands"]
                if band[0] <= at < band[1]
            ]
            assert shown == ([now[address]] if address in now else []), (address, at)


def test_pointing_explains_a_band(large: Written, tab: Tab) -> None:
    opened(tab, large.url)
    place = box(tab, ".row.device .band")
    tab.mouse("mouseMoved", place["x"], place["y"])
    tab.wait("document.getElementById('tip').style.display === 'block'")
    text = tab.run("document.getElementById('tip').textContent")
    first = next(row for row in large.data["rows"] if row["kind"] == "device")
    assert first["name"] in text
    assert KINDS[first["bands"][0][2]] in text
    assert large.data["texts"][first["bands"][0][3]] in text
    tab.click(place["x"], place["y"])
    tab.wait("document.querySelector('.cursor') !== null")
    assert first["name"] in tab.run("document.getElementById('details').textContent")
    tab.mouse("mouseMoved", 5, 5)
    tab.wait("document.getElementById('tip').style.display === 'none'")


def test_wheel_buttons_and_address_zoom(large: Written, tab: Tab) -> None:
    opened(tab, large.url)
    everything = window(tab)
    place = box(tab, ".row.device svg")
    tab.mouse("mouseMoved", place["x"], place["y"])
    tab.mouse("mouseWheel", place["x"], place["y"], deltaX=0, deltaY=-600)
    tab.wait(f"document.getElementById('window').textContent !== {json.dumps(everything)}")
    zoomed = window(tab)
    place = box(tab, "#in")
    tab.click(place["x"], place["y"])
    tab.wait(f"document.getElementById('window').textContent !== {json.dumps(zoomed)}")
    # The address says what is shown, so that it can be passed on.
    closer, address = window(tab), tab.run("location.href")
    assert "#from=" in address
    tab.open("about:blank")
    opened(tab, address)
    tab.wait(f"document.getElementById('window').textContent === {json.dumps(closer)}")
    place = box(tab, "#all")
    tab.click(place["x"], place["y"])
    tab.wait(f"document.getElementById('window').textContent === {json.dumps(everything)}")


def test_the_keyboard_reaches_every_band(large: Written, tab: Tab) -> None:
    opened(tab, large.url)
    for _ in range(20):
        tab.key("Tab")
        if tab.run("document.activeElement.id") == "chart":
            break
    assert tab.run("document.activeElement.id") == "chart"
    rows = [row for row in large.data["rows"] if row["bands"]]
    details = "document.getElementById('details').textContent"
    tab.key("ArrowRight")
    tab.wait(f"{details}.startsWith({json.dumps(rows[0]['name'])})")
    for row in rows[1:]:
        tab.key("ArrowDown")
        tab.wait(f"{details}.startsWith({json.dumps(row['name'])})")
    tab.key("Home")
    for _ in range(len(rows[-1]["bands"])):
        tab.key("ArrowLeft")
    first = large.data["texts"][rows[-1]["bands"][0][3]]
    tab.wait(f"{details}.includes({json.dumps(first)})")
    tab.key("ArrowRight")
    second = large.data["texts"][rows[-1]["bands"][1][3]]
    tab.wait(f"{details}.includes({json.dumps(second)})")
    assert tab.run("document.querySelectorAll('.cursor').length") == 1
    everything = window(tab)
    tab.key("+", "+")
    tab.wait(f"document.getElementById('window').textContent !== {json.dumps(everything)}")
    tab.key("0", "0")
    tab.wait(f"document.getElementById('window').textContent === {json.dumps(everything)}")


def test_gaps_are_hatched(large: Written, tab: Tab) -> None:
    opened(tab, large.url)
    (gap,) = large.data["gaps"]
    assert gap[0] < gap[1]
    assert large.data["texts"][gap[2]] == "20 steps missing in the journal"
    assert tab.run("document.querySelectorAll('.row.device .gap').length") == GPUS


def test_two_processes_that_overlap_have_lanes_of_their_own(tmp_path: Path) -> None:
    old = story(events=60)
    at = old.at
    old.feed(HandOverRequested(), after_s=5.0)
    old.pass_time(60.0)
    new = RecordedCore(settings=replace(SETTINGS, hand_over=True))
    new.at = at
    new.feed(HostScanned(1, (gpu("10:00.0"), gpu("11:00.0"))))
    new.feed(PredecessorGone("process 4711 has handed over"), after_s=5.01)
    new.pass_time(30.0)
    write(tmp_path / "journal", *old.steps, run="old")
    write(tmp_path / "journal", *new.steps, run="new")
    data = written(tmp_path / "journal", tmp_path / "page.html").data
    assert [row["name"] for row in data["rows"]][:3] == ["gpuactors", "gpuactors", "kubelet"]
    kinds = [[band[2] for band in row["bands"]] for row in data["rows"][:2]]
    assert kinds == [["serving", "handed-over"], ["taking-over", "serving"]]
    for row in data["rows"]:
        assert all(a[1] <= b[0] for a, b in pairwise(row["bands"])), row["name"]
        assert all(a[0] <= b[0] for a, b in pairwise(row["marks"])), row["name"]


def test_dark_and_light_can_both_be_read(large: Written, tab: Tab) -> None:
    colours = {}
    for dark in (False, True):
        opened(tab, large.url, dark=dark)
        colours[dark] = tab.run(
            "['body', '.row.device .name', '.card'].map(s => getComputedStyle(document.querySelector(s)))"
            ".map(s => [s.color, s.backgroundColor])"
        )
    for light, dark in zip(colours[False], colours[True], strict=True):
        assert light != dark
    for dark, found in colours.items():
        text, page = (brightness(colour) for colour in found[0])
        assert (text > page) is dark
        assert abs(text - page) > 150


def brightness(colour: str) -> float:
    """Of `rgb(r, g, b)`, from 0 to 255."""
    red, green, blue = map(float, re.findall(r"[\d.]+", colour)[:3])
    return 0.299 * red + 0.587 * green + 0.114 * blue


def test_the_tables_tell_the_same_without_a_script(large: Written) -> None:
    text = large.page.read_text()
    tables = dict(re.findall(r'<table id="(\w+)">(.*?)</table>', text, re.DOTALL))
    assert tables.keys() == {"devices", "events", "differences"}
    bands = sum(len(row["bands"]) for row in large.data["rows"] if row["kind"] == "device")
    assert tables["devices"].count("<tr>") == 1 + min(bands, 2000)
    assert tables["events"].count("<tr") > 500


def test_what_stands_in_a_name_is_no_markup(tmp_path: Path, tab: Tab) -> None:
    core = story(events=30)
    evil = (
        "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">&amp;"
    )
    core.ledger["0000:10:00.0"] = evil
    core.pass_time(20)
    write(tmp_path / "journal", *core.steps)
    page = written(tmp_path / "journal", tmp_path / "page.html")
    opened(tab, page.url)
    assert any(evil in text for text in page.data["texts"])
    assert tab.run("document.title").startswith("gpuactors")
    assert tab.run("document.getElementById('devices').textContent").count("onerror")
    assert tab.run("document.images.length") == 0


def test_an_empty_journal_has_a_page_as_well(tmp_path: Path, tab: Tab) -> None:
    write(tmp_path / "journal", story(events=1).steps[0])
    page = written(tmp_path / "journal", tmp_path / "page.html")
    opened(tab, page.url)
    tab.key("ArrowRight")
    assert tab.run("document.querySelectorAll('.row').length") >= 4


def test_of_too_many_events_the_last_ones_are_shown(large: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuactors.replay.page.EVENTS_MAX", 100)
    page, tally = Page(), Tally()
    files, _ = files_to_read(str(large.journal))
    for moment in play(files):
        page.add(moment)
        tally.count(moment)
    text = page.html(tally)
    assert EVENTS_MAX > 10_000
    assert re.search(r"of \d+ events the last 100 are shown", text)
