"""The page of `gpuactors replay --html` in a real browser: it draws, it explains, and it needs nothing from outside."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct
from msgspec.structs import replace

from gpuactors.core.events.daemon import HandOverRequested, PredecessorGone
from gpuactors.core.events.host import HostScanned
from gpuactors.core.values.cause import MEANINGS, Cause
from gpuactors.core.values.model import DeviceKey
from gpuactors.observe.journal import Anchor, Bounds, JournalFiles, Missed, Origin
from gpuactors.replay.play import Played, play
from gpuactors.replay.reading import files_to_read
from gpuactors.replay.run import PageFile, replay
from gpuactors.replay.text import Tally
from gpuactors_simulation.replay_page.lanes import statuses
from gpuactors_simulation.replay_page.page import DOMAIN_KINDS, EVENTS_MAX, KINDS, MARKS, Page
from tests.core.builders import SETTINGS, gpu
from tests.observe.recording import WALL, Held, QuietNode, RecordedCore, story, write
from tests.support.browser import Tab, open_browser

GPUS, EVENTS = 16, 10_000


class Written(Struct, frozen=True):
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
        str(journal),
        end=None,
        only_differences=False,
        page_file=PageFile(str(page), Page),
        json_lines=False,
        echo=printed.append,
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
        for address in map(DeviceKey, rows):
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


@pytest.mark.parametrize("dark", [False, True])
def test_every_text_that_is_drawn_has_enough_contrast(large: Written, tab: Tab, dark: bool) -> None:
    opened(tab, large.url, dark=dark)
    found: list[list[str]] = tab.run(DRAWN)
    assert len(found) > 50
    for words, text, background in found:
        measured = contrast(rgb(text), rgb(background))
        assert measured >= ENOUGH, f"{words!r}: {text} on {background} is {measured:.2f}"
    body: list[str] = tab.run("(s => [s.color, s.backgroundColor])(getComputedStyle(document.body))")
    letters, page = (sum(rgb(colour)) for colour in body)
    assert (letters > page) is dark


ENOUGH = 4.5
"""WCAG 2.2, 1.4.3, for text of any size."""

DRAWN = """(() => {
  document.querySelectorAll("details").forEach(d => d.open = true);
  const behind = e => {
    for (; e; e = e.parentElement) {
      const colour = getComputedStyle(e).backgroundColor;
      if (colour !== "rgba(0, 0, 0, 0)") return colour;
    }
  };
  const texts = [...document.querySelectorAll("main *")].filter(
    e => !e.closest("svg") && [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()));
  const html = texts.map(e => [e.textContent.slice(0, 40), getComputedStyle(e).color, behind(e)]);
  const svg = [...document.querySelectorAll("#chart svg text")].map(e => {
    const style = getComputedStyle(e), x = +e.getAttribute("x");
    const bands = [...e.parentElement.querySelectorAll(".band")].filter(
      b => +b.getAttribute("x") <= x && x <= +b.getAttribute("x") + +b.getAttribute("width"));
    let back = bands.length ? getComputedStyle(bands[bands.length - 1]).fill : behind(e.closest(".card"));
    if (style.stroke !== "none") back = style.stroke;
    if (back.includes("unhealthy")) back = getComputedStyle(document.querySelector("#unhealthy rect")).fill;
    return [e.textContent, style.fill, back];
  });
  return [...html, ...svg];
})()"""
"""Text, its colour, and the colour behind it: of a label with a halo the halo's, of a hatched band its lighter one."""


def rgb(colour: str) -> tuple[float, float, float]:
    """Of `#rrggbb`, or of `rgb(r, g, b)`, from 0 to 255. Raises ValueError."""
    if colour.startswith("#"):
        return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)
    found = re.fullmatch(r"rgb\((\d+), (\d+), (\d+)\)", colour)
    if found is None:
        raise ValueError(f"{colour} is no opaque colour")
    return float(found[1]), float(found[2]), float(found[3])


def contrast(one: tuple[float, float, float], other: tuple[float, float, float]) -> float:
    """From 1 to 21 (WCAG 2.2, contrast ratio)."""

    def luminance(colour: tuple[float, float, float]) -> float:
        parts = [part / 255 for part in colour]
        red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_contrast_is_that_of_wcag() -> None:
    assert contrast(rgb("#ffffff"), rgb("rgb(0, 0, 0)")) == pytest.approx(21)
    assert contrast(rgb("#777777"), rgb("#ffffff")) == pytest.approx(4.48, abs=0.01)


TEXT_ON = {
    "text": {"page", "card"},
    "soft": {"page", "card"},
    "warning": {"card"},
    "bug": {"card"},
    "on-band": {"free", "allocated", "claimed", "orphaned", "external", "unhealthy"},
    "on-pale": {"track"},
}
"""Each colour of text, and what is behind it: `on-band` on the bands of devices and on the result, `on-pale` on its
halo."""


def test_every_colour_of_text_has_enough_contrast_in_both_schemes() -> None:
    template = (resources.files("gpuactors_simulation.replay_page") / "page.html").read_text(encoding="utf-8")
    style = template[template.index("<style>") : template.index("</style>")]
    light, dark = re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    schemes = {"light": variables(light)}
    schemes["dark"] = schemes["light"] | variables(dark)
    for name, colours in schemes.items():
        for text, backgrounds in TEXT_ON.items():
            for background in backgrounds:
                measured = contrast(rgb(colours[text]), rgb(colours[background]))
                assert measured >= ENOUGH, f"{name}: --{text} on --{background} is {measured:.2f}"
    # No other colour is one of text, and no other band has a label without a halo.
    rules = re.findall(r"([^{}]+)\{([^{}]*)\}", style[style.index("* {") :])
    used = {found for _, rule in rules for found in re.findall(r"(?<![-\w])color: ([^;}]+?) *(?:;|$)", rule)}
    used |= {
        found
        for selector, rule in rules
        if "text" in selector
        for found in re.findall(r"fill: ([^;}]+?) *(?:;|$)", rule)
    }
    assert used - {"inherit"} == {f"var(--{name})" for name in TEXT_ON}
    haloed = re.search(r'\["unknown", .*?\]\.includes\(band\[2\]\)', template)
    assert haloed is not None
    labelled = {*KINDS, *DOMAIN_KINDS} - set(re.findall(r'"([\w-]+)"', haloed[0]))
    fills = dict(re.findall(r"svg \.b-([\w-]+) \{ fill: (?:var\(--|url\(#)([\w-]+)", style))
    assert {fills[kind] for kind in labelled} <= TEXT_ON["on-band"]
    assert {*KINDS, *DOMAIN_KINDS} <= fills.keys()


def variables(rule: str) -> dict[str, str]:
    """Its custom properties."""
    return dict(re.findall(r"--([\w-]+): (#\w{6})", rule))


def test_the_legend_has_what_occurs_and_nothing_else(large: Written, tab: Tab) -> None:
    opened(tab, large.url)
    rows = large.data["rows"]
    bands = {band[2] for row in rows if row["kind"] == "device" for band in row["bands"]}
    marks = {mark[1] for row in rows for mark in row["marks"]}
    legend = tab.run("[...document.querySelectorAll('.legend li')].map(li => li.textContent)")
    assert len(bands) > 3
    assert "offered" not in bands
    expected = {KINDS[kind] for kind in bands} | {MARKS[kind] for kind in marks} | {"missing in the journal"}
    assert set(legend) == expected
    assert len(legend) == len(expected)


@pytest.mark.parametrize(
    ("held", "headline"),
    [
        ("in use", '<p class="headline ">At the end no GPU of 3 needs attention: 3 allocated to pods.</p>'),
        (
            "one held externally",
            '<p class="headline attention">At the end 1 of 3 GPUs needs attention: 1 held by another process.'
            " The others: 2 free.</p>",
        ),
    ],
)
def test_the_headline_says_which_gpus_need_attention(tmp_path: Path, held: Held, headline: str) -> None:
    journal = JournalFiles(str(tmp_path / "journal"), Origin("0.1.0", "a", "boot", 4711, "n-7"), Bounds())
    node = QuietNode(held, 3)
    journal.write(node.steps, Anchor(node.at, WALL))
    journal.close()
    text = written(tmp_path / "journal", tmp_path / "page.html").page.read_text()
    assert headline in text
    problems = re.search(r'<section id="problems".*?<tbody>(.*?)</tbody>', text, re.DOTALL)
    assert problems is not None
    rows = re.findall(r"<tr>(.*?)</tr>", problems[1])
    assert len(rows) == ("headline attention" in headline)
    for row in rows:
        address, since, why, remedy = re.findall(r"<td>(.*?)</td>", row)
        assert address in text
        assert re.fullmatch(r"(before )?\d\d:\d\d:\d\d\.\d+ <small>\+[\d.]+ s</small>", since)
        assert "kubelet has given it to no pod" in why
        assert re.sub("</?code>", "`", remedy) == html.escape(MEANINGS[Cause.HELD_BY_OTHER].remedy)
    assert "<title>gpuactors on node n-7</title>" in text


def test_the_tables_tell_the_same_without_a_script(large: Written) -> None:
    text = large.page.read_text()
    tables = dict(re.findall(r'<table id="(\w+)">(.*?)</table>', text, re.DOTALL))
    assert tables.keys() == {"devices", "events", "differences"}, "that of the problems is above them"
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
    assert tab.run("document.title").startswith("gpuactors on ")
    assert tab.run("document.getElementById('devices').textContent").count("onerror")
    assert tab.run("document.images.length") == 0


def test_an_empty_journal_has_a_page_as_well(tmp_path: Path, tab: Tab) -> None:
    write(tmp_path / "journal", story(events=1).steps[0])
    page = written(tmp_path / "journal", tmp_path / "page.html")
    opened(tab, page.url)
    tab.key("ArrowRight")
    assert tab.run("document.querySelectorAll('.row').length") >= 4


def test_of_too_many_events_the_last_ones_are_shown(large: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuactors_simulation.replay_page.page.EVENTS_MAX", 100)
    page, tally = Page(), Tally()
    files, _ = files_to_read(str(large.journal))
    for moment in play(files):
        page.add(moment)
        tally.count(moment)
    text = page.html(tally)
    assert EVENTS_MAX > 10_000
    assert re.search(r"of \d+ events the last 100 are shown", text)
