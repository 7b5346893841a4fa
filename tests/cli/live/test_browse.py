"""The keys on the screen of `inspect --watch`: what is selected, what is in view, and what Enter shows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace
from urwid.testing import press

from gpuactors.cli.live.rows import Row, rows_of
from gpuactors.cli.live.text import Style
from gpuactors.cli.live.watched import Watched
from gpuactors.control.about import About
from gpuactors.control.client import Running
from gpuactors.control.node_view import view_of
from gpuactors.control.view import NodeView
from tests.cli.inspect.test_cards import UUIDS, a_card, divided, part, vf
from tests.cli.inspect.test_domains_report import core_with
from tests.cli.live.seen import QEMU, SIZES, WALL, held, node, running, shown, styled, texts, watched
from tests.core.builders import gpu
from tests.core.gpus.claim_core import ClaimCore, allocated, name


def go(seen: Watched, at: float, columns: int, rows: int, *keys: str) -> list[str]:
    """The screen after these keys, as text."""
    return texts(shown(seen, at, columns, rows, *keys), columns, rows)


def marked(lines: list[str]) -> str:
    """What has the mark."""
    (row,) = (line for line in lines if line.startswith("> "))
    return row[2:14]


def listed(seen: Watched, at: float, columns: int, rows: int) -> list[Row]:
    return rows_of(seen.inspected(at, WALL), columns, rows)


@pytest.mark.parametrize(("columns", "rows"), SIZES)
@pytest.mark.parametrize("gpus", [4, 32, 256])
def test_the_selected_gpu_is_in_view_wherever_the_keys_go(gpus: int, columns: int, rows: int) -> None:
    seen, at = held(gpus)
    names = [row.name for row in listed(seen, at, columns, rows) if row.name.startswith("0000:")]
    assert len(names) == gpus
    view = shown(seen, at, columns, rows)
    walked = [marked(texts(view, columns, rows))]
    for _ in names[1 : 2 * rows]:
        assert press(view, (columns, rows), "down") == []
        lines = texts(view, columns, rows)
        assert any(line.startswith("  ADDRESS") for line in lines), "the columns have their names"
        walked.append(marked(lines))
    assert walked == names[: 2 * rows]
    view, paged = shown(seen, at, columns, rows), [names[0]]
    while paged[-2:-1] != paged[-1:]:
        press(view, (columns, rows), "page down")
        paged.append(marked(texts(view, columns, rows)))
    assert paged == sorted(paged, key=names.index)
    assert paged[-1] == names[-1]
    assert len(paged) <= 3 + gpus // (rows - 6), "by the screen, not by the row"
    lines = go(seen, at, columns, rows, "end", "home")
    assert any(line.startswith("> ") and "GH100" in line for line in lines), "the resource is the first row"
    assert any(line.startswith("  RESOURCE") for line in lines)


def test_letters_and_the_space_do_what_arrows_and_page_down_do() -> None:
    seen, at = held(32)
    for letters, keys in (("jjk", ["down", "down", "up"]), (" j", ["page down", "down"])):
        assert go(seen, at, 80, 24, *letters) == go(seen, at, 80, 24, *keys)


def test_the_selected_row_has_a_mark_and_one_look() -> None:
    seen, at = held(4)
    view = shown(seen, at, 80, 24, "down", "down")
    lines = texts(view, 80, 24)
    (row,) = (i for i, line in enumerate(lines) if line.startswith("> "))
    assert "Unhealthy" in lines[row]
    runs = styled(view, 80, 24)
    assert [style for style, _ in runs[row]] == [Style.SELECTED]
    assert [style for style, _ in runs[row + 1]] == [Style.SELECTED], "its second line, too"
    assert lines[row + 1].startswith("   ")


def test_the_selection_stays_with_a_gpu_whose_row_moves() -> None:
    core = node(range(0x10, 0x90))
    core.pass_time(60)
    seen = watched(core)
    view = shown(seen, core.at, 80, 24, "down", "down")
    assert marked(texts(view, 80, 24)) == "0000:12:00.0"
    core.enabled["0000:8f:00.0"] = 1
    core.holders[0x8F] = (QEMU,)
    core.pass_time(10)
    seen.heard(running(core), core.at)
    view.show(core.at, WALL, (80, 24))
    lines = texts(view, 80, 24)
    assert any(line.startswith("  0000:8f:00.0") for line in lines), "it has come in front"
    assert marked(lines) == "0000:12:00.0"


def test_the_first_gpu_is_selected_when_the_selected_one_is_gone() -> None:
    seen, at = held(32)
    view = shown(seen, at, 80, 24, "end")
    fewer, at = held(4)
    assert fewer.running is not None
    seen.heard(fewer.running, at)
    view.show(at, WALL, (80, 24))
    lines = texts(view, 80, 24)
    assert marked(lines) == "0000:11:00.0"
    assert lines[3].startswith("  RESOURCE"), "and what is above is in view"


def test_the_selection_stays_when_the_size_changes() -> None:
    seen, at = held(32)
    view = shown(seen, at, 120, 40, *["down"] * 30)
    there = marked(texts(view, 120, 40))
    for columns, rows in ((80, 24), (60, 20), (80, 6), (200, 60)):
        view.show(at, WALL, (columns, rows))
        assert marked(texts(view, columns, rows)) == there


def test_enter_explains_what_is_selected_and_escape_goes_back() -> None:
    seen, at = held(32)
    before = go(seen, at, 80, 24, "down")
    lines = go(seen, at, 80, 24, "down", "enter")
    address = marked(before)
    assert lines[3] == f"gpuactors explain {address}, as of 2026-11-21T22:00:00Z"
    assert lines[4].startswith(f"{address}  GH100 [H100 SXM5 80GB]")
    assert lines[-1].startswith("Esc, q: back  Up Down PgUp PgDn Home End: scroll")
    for back in ("esc", "q", "Q"):
        assert go(seen, at, 80, 24, "down", "enter", back) == before


def test_an_explanation_longer_than_the_screen_is_scrolled() -> None:
    seen, at = held(4)
    keys = ("down", "down", "enter")
    lines = go(seen, at, 80, 12, *keys)
    whole = go(seen, at, 80, 60, *keys)
    end_of_page = next(line for line in reversed(whole[:-1]) if line)
    assert end_of_page not in lines
    assert "1-8 of " in lines[-1]
    scrolled = go(seen, at, 80, 12, *keys, "down")
    assert scrolled[3:10] == lines[4:11]
    for there in (["end"], ["page down"] * 9, ["down"] * 90):
        assert go(seen, at, 80, 12, *keys, *there)[-2] == end_of_page
    assert go(seen, at, 80, 12, *keys, "end", "home") == lines


def test_what_is_gone_meanwhile_is_said_on_its_page() -> None:
    seen, at = held(32)
    view = shown(seen, at, 80, 24, "end", "enter")
    fewer, at = held(4)
    assert fewer.running is not None
    seen.heard(fewer.running, at)
    view.show(at, WALL, (80, 24))
    assert any(line.startswith("there is no GPU at 0000:ff:00.0") for line in texts(view, 80, 24))


def test_a_page_counts_its_ages_from_what_the_daemon_said() -> None:
    seen, at = held(4)
    view = shown(seen, at, 80, 24, "down", "down", "enter")
    now = texts(view, 80, 24)
    view.show(at + 90, WALL + 90, (80, 24))
    lines = texts(view, 80, 24)
    assert "as of 2026-11-21T22:00:00Z" in lines[3], "not of now"
    assert lines[2:] == now[2:]


def test_keys_that_end_the_screen_are_left_to_it() -> None:
    seen, at = held(4)
    ends = ["q", "ctrl c", "ctrl d"]
    assert press(shown(seen, at, 80, 24), (80, 24), *ends, "esc") == [*ends, "esc"]
    assert press(shown(seen, at, 80, 24, "enter"), (80, 24), *ends) == ends[1:], "q goes back"


def test_without_keys_nothing_is_selected_and_that_is_said() -> None:
    seen, at = held(32)
    lines = texts(shown(seen, at, 80, 24, has_keys=False), 80, 24)
    assert not any(line.startswith(">") for line in lines)
    assert lines[3].startswith("  RESOURCE")
    assert lines[-1].startswith("no keys, as standard input is not this terminal; Ctrl-C ends")


def with_parts() -> NodeView:
    """A card with a virtual function and a mediated device, whose key is a UUID."""
    return divided(vf(4), part(a_card(), UUIDS[0], kind="mdev"))


def with_domains() -> NodeView:
    """Two compute domains with their claims, one of which has GPUs as well."""
    core = ClaimCore(gpu("0000:10:00.0", group=1), gpu("0000:11:00.0", group=2))
    core.prepare(allocated(name("one"), "0000:10:00.0"))
    core.pass_time(3)
    view, domains_core = view_of(core.state, core.at), core_with()
    domains = view_of(domains_core.state, domains_core.at).domains
    assert view.claims is not None
    assert domains is not None
    of_both, *others = domains.claims.claims
    both = replace(of_both, uid=view.claims.claims[0].uid)
    return replace(view, domains=replace(domains, claims=replace(domains.claims, claims=(both, *others))))


@pytest.mark.parametrize("view", [with_parts, with_domains])
def test_each_row_that_can_be_selected_is_reached_once_and_explained(view: Callable[[], NodeView]) -> None:
    seen = Watched()
    seen.heard(Running(7, "1.2.3", About("gpu-17"), view()), 0.0)
    names = [row.name for row in listed(seen, 0.0, 100, 16) if row.name]
    assert len(names) == len({*names}) > 2
    found, walked = shown(seen, 0.0, 100, 16, "home"), list[str]()
    for _ in range(40):  # a key passes a line that cannot be selected, or goes to the next row
        if found.selected not in walked[-1:]:
            walked.append(found.selected)
            press(found, (100, 16), "enter")
            page = texts(found, 100, 16)
            assert any(line.startswith(f"gpuactors explain {walked[-1]}, as of ") for line in page)
            assert not any(
                line.startswith(("nothing on this node", "there is no", "the running daemon knows"))
                for line in page
            )
            press(found, (100, 16), "esc")
        press(found, (100, 16), "down")
        texts(found, 100, 16)
    assert [name for name in walked if name] == names


def test_claims_can_be_selected_and_all_below_the_last_one_can_be_reached() -> None:
    core = ClaimCore(*(gpu(f"0000:{slot:02x}:00.0", group=slot) for slot in range(0x10, 0x18)))
    for words in ("one", "two", "three"):
        core.prepare(allocated(name(words), "0000:10:00.0"))
    core.pass_time(3)
    seen = watched(core)
    rows = listed(seen, core.at, 80, 9)
    names = [row.name for row in rows if row.name]
    last = "".join(piece.text for piece in rows[-1].lines[-1]).rstrip()
    assert shown(seen, core.at, 80, 12, "end").selected == names[-1]
    lines = go(seen, core.at, 80, 12, "end")
    assert lines[-2] == last, "the slices are behind the last claim"
    assert go(seen, core.at, 80, 12, "end", "up")[2:] != lines[2:]
    steps = len(names) - names.index(names[-3]) - 1
    page = go(seen, core.at, 80, 12, "end", *["up"] * steps, "enter")
    title = next(
        i for i, line in enumerate(page) if line.startswith(f"gpuactors explain {names[-3]}, as of ")
    )
    assert page[title + 1].startswith("Claim default/one")
