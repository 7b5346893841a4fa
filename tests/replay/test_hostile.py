"""A journal that somebody else has written: nothing of it controls a terminal, costs memory without bound, or ends in a
traceback. Whoever looks into an incident gets journals from other nodes, by mail."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuactors import limits
from gpuactors.core.events.deviceplugin import AllocateAsked, PreStartAsked, RegisterAnswered, SocketFailed
from gpuactors.core.events.host import (
    HostChanged,
    HostScanned,
    InspectionFailed,
    UeventsLost,
    UeventsUnavailable,
)
from gpuactors.core.events.kubelet import ForeignSocketsSeen, KubeletGone
from gpuactors.core.values.model import DeviceId, ResourceName, Token, pci_address
from gpuactors.replay.reading import JOURNAL_LINE_MAX_BYTES, Damage, JournalError
from gpuactors.replay.run import PageError, PageFile, TimeError, replay
from gpuactors.replay.text import Text
from gpuactors_simulation.replay_page.page import Page
from tests.core.builders import H100, gpu
from tests.observe.recording import QuietNode, RecordedCore, story, write
from tests.replay.replayed import Replayed, change, moments

ODD = "\x1b[2J\x1b]0;title\x07\x9b31m\u202e\n\r\x7f\u2028" + "x" * 20_000
"""Clears the screen, sets the window's title, turns the direction of writing, begins a line, and is long."""

GPU = pci_address("0000:23:00.0")


def odd_journal(directory: Path) -> Path:
    """Every text that the daemon takes from outside is odd, and of the header as well."""
    core = RecordedCore(gpu(GPU))
    core.kubelet_restarts()
    inspection = core.state.host.inspections.last
    core.silent = True
    core.ledger_problem = ODD
    core.feed(
        UeventsUnavailable(ODD),
        UeventsLost(ODD),
        HostChanged(GPU, None, ODD),
        InspectionFailed(inspection, GPU, ODD),
        HostScanned(inspection, (gpu(GPU, driver=ODD, model=ODD, fault=ODD),)),
        core.ledger_event(core.state.kubelet.ledger.refresh.outstanding or 0),
        ForeignSocketsSeen((ODD,)),
        SocketFailed(H100, 1, ODD),
        RegisterAnswered(H100, 1, ODD),
        AllocateAsked(Token(1), ResourceName(ODD), ((DeviceId(ODD),),)),
        PreStartAsked(Token(2), H100, (DeviceId(ODD),)),
        KubeletGone(ODD),
    )
    (path,) = write(directory, *core.steps)
    change(path, 0, lambda line: line.update(version=ODD, node=ODD, boot=ODD))
    change(path, -2, lambda line: line.update(effects=[{"say": ODD, "level": "info", "fields": {ODD: ODD}}]))
    change(path, -1, lambda line: line.update(failed=ODD))
    return path


@pytest.mark.parametrize("as_json", [False, True])
def test_nothing_of_a_journal_controls_a_terminal(tmp_path: Path, as_json: bool) -> None:
    shown = Replayed(odd_journal(tmp_path), as_json=as_json)
    assert shown.code == 1
    assert len(shown.lines) > 12
    assert [line for line in shown.lines if not line.isprintable()] == []
    if as_json:
        began, *_ = map(json.loads, shown.lines)
        assert began["node"] == ODD, "nothing is lost"
    else:
        assert r"\x1b[2J" in shown.text
        assert max(map(len, shown.lines)) < 2 * limits.LOG_TEXT_MAX_CHARS


def test_a_place_that_cannot_be_read_is_quoted(tmp_path: Path) -> None:
    directory = tmp_path / "\x1b[2J"
    directory.mkdir()
    (path,) = write(directory, *story(events=12).steps)
    path.write_bytes(path.read_bytes() + b'{"\x1b[2J"\n')
    assert [line for line in Replayed(path).lines if not line.isprintable()] == []


# --- times ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [1e308, 1e18, -1e300, -1.0, 253402300800.0])
@pytest.mark.parametrize("number", [1, -1])
def test_a_line_at_a_time_that_no_clock_has_is_damage(tmp_path: Path, at: float, number: int) -> None:
    (path,) = write(tmp_path, *story(events=12).steps)
    change(path, number, lambda line: line.update(at=at))
    assert any(isinstance(moment, Damage) for moment in moments(path))
    for more in ({}, {"as_json": True}, {"html": tmp_path / "page.html"}):
        Replayed(path, **more)
    Replayed(path, begin="1", end="2")


@pytest.mark.parametrize("seconds", [1e308, 1e12, -1e12])
def test_folded_steps_at_a_time_that_no_clock_has_are_damage(tmp_path: Path, seconds: float) -> None:
    (path,) = write(tmp_path, *QuietNode("idle").steps)
    change(path, -1, lambda line: line.update(after=[seconds for _ in line["after"]]))  # type: ignore[attr-defined]
    assert any(isinstance(moment, Damage) for moment in moments(path))
    Replayed(path, begin="1")


@pytest.mark.parametrize(
    "wall",
    [
        "9999-12-31T23:59:59.999999-12:00",
        "0001-01-01T00:00:00+14:00",
        "0001-01-01",
        "9999-12-31",
        "1960-01-01",
    ],
)
def test_a_header_of_a_time_of_day_that_no_node_has_is_none(tmp_path: Path, wall: str) -> None:
    (path,) = write(tmp_path, *story(events=12).steps)
    change(path, 0, lambda line: line.update(wall=wall))
    with pytest.raises(JournalError, match="does not begin with a journal's header"):
        Replayed(path)


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1e400", "\x1b" + "9" * 100_000])
@pytest.mark.parametrize("option", ["begin", "end"])
def test_a_time_that_is_none_is_quoted(tmp_path: Path, text: str, option: str) -> None:
    (path,) = write(tmp_path, *story(events=12).steps)
    with pytest.raises(TimeError) as found:
        Replayed(path, **{option: text})  # type: ignore[arg-type]
    assert str(found.value).isprintable()
    assert len(str(found.value)) < 300


@pytest.mark.parametrize(
    "text", ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", "1e300", "-1e300"]
)
def test_a_time_long_before_or_after_the_journal_is_one(tmp_path: Path, text: str) -> None:
    (path,) = write(tmp_path, *story(events=12).steps)
    Replayed(path, begin=text)
    Replayed(path, end=text)


# --- files ------------------------------------------------------------------------------------------------------


def fifo(path: Path) -> str:
    os.mkfifo(path)
    return "it is a FIFO, and a regular file is needed"


def device(path: Path) -> str:
    path.symlink_to("/dev/zero")
    return "it is a device, and a regular file is needed"


@pytest.mark.parametrize("made", [fifo, device])
def test_what_is_no_file_is_named_and_not_read(tmp_path: Path, made: Callable[[Path], str]) -> None:
    path = tmp_path / "00000001.jsonl"
    why = made(path)
    with pytest.raises(JournalError, match=why):
        Replayed(path)
    with pytest.raises(JournalError, match=why):
        Replayed(tmp_path)
    write(tmp_path, *story(events=12).steps)
    assert why in Replayed(tmp_path).text


def test_a_line_without_an_end_costs_no_memory_and_what_follows_is_read(tmp_path: Path) -> None:
    (path,) = write(tmp_path, *story(events=12).steps)
    whole = path.read_bytes().splitlines(keepends=True)
    long = 8 * JOURNAL_LINE_MAX_BYTES
    with path.open("wb") as file:
        file.writelines(whole[:3])
        file.truncate(file.tell() + long)  # sparse
        file.seek(0, os.SEEK_END)
        file.writelines([b"\n", *whole[1:]])
    tracemalloc.start()
    try:
        found = moments(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    (damage,) = [moment for moment in found if isinstance(moment, Damage)]
    assert (damage.line, damage.bytes_skipped) == (4, long + 1)
    assert "a line of more than" in damage.reason
    assert len(found) > len(whole) - 2
    assert peak < 3 * JOURNAL_LINE_MAX_BYTES


def test_quiet_steps_are_counted_and_not_kept() -> None:
    """A month of a quiet node has a million of them."""
    from gpuactors.replay.play import Played

    node = QuietNode("idle")
    played = [
        Played(1, taken.at, taken.at, taken.event, taken.before, taken.before, (), "", ())
        for taken in node.steps[-1:]
    ]
    text = Text()
    tracemalloc.start()
    try:
        for _ in range(50_000):
            assert [*text.lines(played[0])] == []
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 100_000
    assert "50000 " in "".join(text.quiet_lines())


def test_of_many_unreadable_places_the_page_names_some(tmp_path: Path) -> None:
    page = Page()
    for line in range(100_000):
        page.add(Damage("/j", line, 1, ODD))
    assert len(page._damage) == 20


def identity(path: Path) -> tuple[int, int, int]:
    """What is there, and whether it is another one; a look at it alone changes its time of access."""
    stat = path.lstat()
    return stat.st_mode, stat.st_ino, stat.st_mtime_ns


def test_a_page_goes_to_standard_output(tmp_path: Path) -> None:
    (path,) = write(tmp_path, *story(events=12).steps)
    Replayed(path, html=tmp_path / "page")
    (shown,) = Replayed(path, html="-").lines
    assert shown == (tmp_path / "page").read_text()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["00000001.jsonl", "page"]


def test_half_a_character_in_a_journal_is_no_error_of_standard_output(tmp_path: Path) -> None:
    """`"\\ud800"` is JSON, and no UTF-8."""
    (path,) = write(tmp_path, *story(events=12).steps)
    half = {"add": lambda self, moment: None, "html": lambda self, tally: "\ud800"}
    lines: list[str] = []
    replay(
        str(path), end=None, only_differences=False, page_file=PageFile("-", lambda _: type("Half", (), half)()),
        json_lines=False, echo=lines.append,
    )  # fmt: skip
    assert [line.encode() for line in lines] == [b"\\ud800"]


@pytest.mark.parametrize("kind", ["FIFO", "device", "link to a file", "directory"])
def test_a_page_takes_the_place_of_a_file_and_of_nothing_else(tmp_path: Path, kind: str) -> None:
    """As root the page would be in the place of /dev/null."""
    (path,) = write(tmp_path, *story(events=12).steps)
    page = tmp_path / "page"
    match kind:
        case "FIFO":
            os.mkfifo(page)
        case "device":
            page.symlink_to(os.devnull)
        case "link to a file":
            page.symlink_to(path)  # as /dev/stdout is one, where a shell redirects it
        case _:
            page.mkdir()
    before = identity(page)
    with pytest.raises(PageError, match=r"cannot write .*page.*choose another file"):
        Replayed(path, html=page)
    assert identity(page) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["00000001.jsonl", "page"]
