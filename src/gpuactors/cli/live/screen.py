"""The screen as urwid's widgets: the title and notices of the node, the list of its resources, GPUs and claims, and the
line of keys. Or, instead of the list, what `gpuactors explain` says of one of them.

Must not know the terminal, nor read a clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

import urwid

from gpuactors.cli.inspect.claims_report import lasted
from gpuactors.cli.inspect.report import explained_text, utc
from gpuactors.cli.inspect.view import Inspected, UnknownAddressError, explain_in
from gpuactors.cli.live.rows import MARGIN, NEW_S, Row, count, first_of, rows_of
from gpuactors.cli.live.text import Line, Markup, Style, line, markup
from gpuactors.cli.live.watched import Watched
from gpuactors.cli.output import folded

_SELECTED: Final = "> "
"""The mark of the selected row, in its margin."""

_KEYS: Final = "Enter: explain  q: end  Up Down PgUp PgDn Home End: select"
_PAGE_KEYS: Final = "Esc, q: back  Up Down PgUp PgDn Home End: scroll"
_NO_KEYS: Final = "no keys, as standard input is not this terminal; Ctrl-C ends"

_SAME: Final = {"j": "down", "k": "up", " ": "page down", "Q": "q"}
"""Keys that do the same as another one."""

_Body = urwid.ListBox[int] | urwid.Scrollable[urwid.Text]


@final
class View(urwid.Frame[_Body, urwid.Pile, urwid.AttrMap[urwid.Columns]]):
    """The whole screen. `show` it before it is rendered, and whenever it may have changed."""

    def __init__(self, watched: Watched, *, wide: bool = False, keys: bool = True) -> None:
        """`keys`: whether there are any to press."""
        self._watched = watched
        self._wide = wide
        self._has_keys = keys
        self._shown = (0.0, 0.0, (0, 0))
        self._rows = urwid.SimpleFocusListWalker[_RowText]([])
        self._list = urwid.ListBox(self._rows)
        self._explained = ""
        """The name of what is explained on a page of its own; empty while the list is shown."""
        self._page = _text()
        self._head = _text()
        """The names of the columns of the list's first row in view."""
        self._words, self._position = _text(), urwid.Text("")
        key_line = urwid.AttrMap(_beside(self._words, self._position), Style.FAINT)
        super().__init__(self._list, footer=key_line)

    @property
    def selected(self) -> str:
        """The name of the selected row; empty if none is."""
        row, _ = self._rows.get_focus()
        return row.row.name if row is not None else ""

    def show(self, at: float, wall: float, size: tuple[int, int]) -> None:
        """Take over what `watched` knows. `at`: its clock; `wall`: the time of day, in seconds since 1970; `size`: the
        columns and lines of the screen."""
        self._shown = at, wall, size
        columns, lines = size
        inspected = self._watched.inspected(at, wall)
        notices = _notices(self._watched, inspected, at, columns)[: max(0, lines // 2 - 1)]
        room = max(0, lines - len(notices) - 2)
        rows = rows_of(inspected, columns, room, wide=self._wide)
        if self._explained:
            self._page.set_text(markup(_page(self._watched, at, wall, columns, self._explained)))
        head = [_title(self._watched, inspected, wall), *(_text(markup([notice])) for notice in notices)]
        if self._explained or count(rows) != room:
            head.append(self._head)
        self.header = urwid.Pile([("pack", widget) for widget in head])
        self._set_rows(rows, first_of(inspected, rows))

    def _set_rows(self, rows: Sequence[Row], first: str) -> None:
        """Replace the list. The selected row stays selected, wherever it is now; without it `first` is selected."""
        names, (before, at) = [row.name for row in rows], self._rows.get_focus()
        self._rows[:] = [_RowText(row, selectable=self._has_keys and bool(row.name)) for row in rows]
        if before is None or at is None or before.row.name not in ("", *names):
            self._list.set_focus(names.index(first) if first else 0)
            self._list.set_focus_valign("bottom")  # so that what is above is in view, too
        else:
            self._rows.set_focus(names.index(before.row.name) if before.row.name else min(at, len(rows) - 1))

    def keypress(self, size: tuple[int, int], key: str) -> str | None:  # type: ignore[override]
        """Go where the key says, and return None; or return the key if it says nothing here."""
        key = _SAME.get(key, key)
        match key:
            case "esc" | "q" if self._explained:
                self._explain("")
            case "enter" if self.selected and not self._explained:
                self._explain(self.selected)
            case "home" if not self._explained and self._list.focus_first_selectable():
                self._list.set_focus_valign("bottom")
            case "end" if not self._explained and self._list.focus_last_selectable():
                self._list.set_focus_valign("top")  # so that all below it is in view, too
            case _:
                return super().keypress(size, key)
        return None

    def _explain(self, name: str) -> None:
        self._explained = name
        self.body = urwid.Scrollable(self._page) if name else self._list
        self.show(*self._shown)

    def render(self, size: tuple[int, int], focus: bool = False) -> urwid.Canvas:  # type: ignore[override]
        """Draw it, with the names of the columns and the position in what is longer than the screen."""
        columns, lines = size
        (above, below), _ = self.frame_top_bottom(size, focus)
        room = lines - above - below
        self.body.render((columns, room), focus)  # carries out what a key said
        top, length = self.body.get_scrollpos((columns, room), focus), self.body.rows_max((columns, room))
        head = None if self._explained else _head_at([row.row for row in self._rows], top)
        self._head.set_text(markup([head or ()]))
        self._words.set_text(_NO_KEYS if not self._has_keys else _PAGE_KEYS if self._explained else _KEYS)
        self._position.set_text(f"{top + 1}-{min(top + room, length)} of {length}" if length > room else "")
        return super().render(size, focus)


@final
class _RowText(urwid.Text):
    """One row of the list. The selected one has a mark in its margin, and one look."""

    ignore_focus = False

    def __init__(self, row: Row, *, selectable: bool) -> None:
        super().__init__(markup(row.lines), wrap="ellipsis", selectable=selectable)
        self.row = row

    def render(self, size: tuple[int], focus: bool = False) -> urwid.Canvas:  # type: ignore[override]
        """Draw it."""
        if not (focus and self.selectable()):
            return super().render(size, focus)
        assert isinstance(self.text, str)
        marked = _SELECTED + self.text.removeprefix(MARGIN)
        return urwid.AttrMap(_text(marked), Style.SELECTED).render(size)


def _text(lines: str | Markup = "") -> urwid.Text:
    return urwid.Text(lines, wrap="ellipsis")


def _beside(left: urwid.Text, right: urwid.Text) -> urwid.Columns:
    """Return a line of both: the left one has the room that the right one leaves."""
    return urwid.Columns([left, ("pack", right)], dividechars=2)


def _head_at(rows: Sequence[Row], top: int) -> Line | None:
    """Return the names of the columns of the row that has this line of the list."""
    for row in rows:
        if (top := top - len(row.lines)) < 0:
            return row.head
    return None


def _title(watched: Watched, inspected: Inspected, wall: float) -> urwid.Columns:
    assert watched.running is not None
    running = watched.running
    name = f"Node {inspected.node}  gpuactors {running.version}, process {running.pid}, {running.view.role}"
    return _beside(_text(markup([line(name, Style.HEAD)])), urwid.Text((Style.FAINT, utc(wall))))


def _notices(watched: Watched, inspected: Inspected, at: float, columns: int) -> list[Line]:
    lines = []
    if watched.gone_since is not None:
        gone = f"the daemon is gone since {lasted(at - watched.gone_since)}; still trying; this is what it said last"
        lines += [line(gone, Style.ALARM), *_lines(f"  {watched.why_gone}", columns, Style.FAINT)]
    elif watched.last_change is not None:
        then, what = watched.last_change
        style = Style.NEW if at - then < NEW_S else Style.FAINT
        lines.append(line(f"last change {lasted(at - then)} ago: {what}", style))
    for name, problem in inspected.view.problems:
        lines += _lines(f"{name}: {problem}", columns, Style.BAD) if problem else []
    return lines


def _lines(text: str, columns: int, style: Style) -> list[Line]:
    return [line(folded_line, style) for folded_line in folded(text, columns, "", "  ")]


def _page(watched: Watched, at: float, wall: float, columns: int, name: str) -> Sequence[Line]:
    """Return what `gpuactors explain` says of it. Its ages are those of the time at which the daemon said it."""
    said = watched.inspected(watched.heard_at, wall - (at - watched.heard_at))
    head = line(f"gpuactors explain {name}, as of {utc(said.wall)}", Style.FAINT)
    try:
        title, *further = explained_text(explain_in(said, name), columns).splitlines()
    except UnknownAddressError as exc:
        return [head, (), *_lines(str(exc), columns, Style.BAD)]
    return [head, line(title, Style.HEAD), *map(line, further)]
