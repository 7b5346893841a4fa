"""The view on a terminal, which urwid draws on, reads and gives back: the alternate screen, its size, keys and Ctrl-Z.

docs/dev/adr/0028 says what is left to do here.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from socket import socketpair
from typing import Final, TextIO, final

import trio
import urwid

from gpuactors.cli.live.ends import until_ended
from gpuactors.cli.live.follow import follow
from gpuactors.cli.live.screen import View
from gpuactors.cli.live.text import Style
from gpuactors.cli.live.watched import Watched
from gpuactors.control.client import Running

_TICK_S: Final = 1.0
"""The pause between two updates of the ages on the screen, in seconds."""

_SIZE_UNKNOWN: Final = (80, 24)

PALETTE: Final = (
    (Style.HEAD, "bold", "default"),
    (Style.GOOD, "dark green", "default"),
    (Style.BAD, "dark red", "default"),
    (Style.FAINT, "faint", "default"),
    (Style.NEW, "bold", "default"),
    (Style.ALARM, "dark red,bold,standout", "default"),
    (Style.SELECTED, "standout", "default"),
)
"""How each style looks on a terminal; without colours all look the same."""

_Typed = str | tuple[str, int, int, int]
"""A key, or what a mouse did, as urwid has it."""


@final
class _Terminal(urwid.display.raw.Screen):
    """The terminal as urwid has it. Without keys it reads a socket to which nobody writes."""

    def __init__(self, out: TextIO, keys: TextIO | None) -> None:
        nothing, self._silent = socketpair()
        super().__init__(keys or nothing, out, bracketed_paste_mode=False, focus_reporting=False)

    def get_cols_rows(self) -> tuple[int, int]:
        """Return columns and rows, also of a terminal that does not know its size."""
        columns, rows = super().get_cols_rows()
        return columns or _SIZE_UNKNOWN[0], rows or _SIZE_UNKNOWN[1]


@final
class OnTerminal:
    """The view as a whole screen of a terminal."""

    def __init__(self, out: TextIO, keys: TextIO | None, *, colour: bool, wide: bool) -> None:
        keys = keys if _are_ours(keys) else None
        urwid.set_encoding(out.encoding)
        self._terminal = _Terminal(out, keys)
        self._terminal.set_terminal_properties(colors=16 if colour else 1)
        self._watched = Watched()
        self._view = View(self._watched, wide=wide, keys=keys is not None)
        self._events = urwid.TrioEventLoop()
        self._is_heard = trio.Event()

    async def run(self, path: str) -> None:
        await until_ended(lambda: follow(path, self._heard, self._lost), self._shown, self._ticks)

    async def _shown(self) -> None:
        """Have the terminal from the first view until a key ends it, or it is gone; and give it back in any case."""
        await self._is_heard.wait()
        loop = urwid.MainLoop(
            self._view, PALETTE, self._terminal, handle_mouse=False, event_loop=self._events,
            input_filter=self._typed, unhandled_input=_end_at,
        )  # fmt: skip
        with loop.start():
            try:
                await self._events.run_async()
            except* (urwid.ExitMainLoop, urwid.display.common.InputClosedError):
                pass

    def _heard(self, running: Running) -> None:
        self._watched.heard(running, trio.current_time())
        self._show()
        self._is_heard.set()

    def _lost(self, since: float, why: str) -> None:
        self._watched.lost(since, why)
        self._show()

    async def _ticks(self) -> None:
        await self._is_heard.wait()
        while True:
            await trio.sleep(_TICK_S)
            self._show()

    def _typed(self, keys: list[_Typed], raw: list[int]) -> list[_Typed]:
        if "window resize" in keys:
            self._show()
        return keys

    def _show(self) -> None:
        """Bring the view up to date; urwid draws it before it waits for the next event."""
        self._view.show(trio.current_time(), time.time(), self._terminal.get_cols_rows())


def _end_at(key: _Typed) -> bool:
    """End the screen if this key does so, which no widget has taken. Ctrl-C and Ctrl-D are keys only where the terminal
    makes no signal of them."""
    if key in ("q", "ctrl c", "ctrl d"):
        raise urwid.ExitMainLoop
    return False


def _are_ours(keys: TextIO | None) -> bool:
    """Return whether they are of the terminal of which this process is in the foreground: a process in the background
    is stopped for changing it."""
    with suppress(OSError, ValueError):
        return keys is not None and keys.isatty() and os.tcgetpgrp(keys.fileno()) == os.getpgrp()
    return False
