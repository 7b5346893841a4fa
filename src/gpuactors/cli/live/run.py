"""The command's one function: watches until a signal, or the key q, and gives the terminal back in any case."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Final, TextIO, final

import trio

from gpuactors.cli.formats import Format
from gpuactors.cli.live.follow import follow
from gpuactors.cli.live.screen import frame
from gpuactors.cli.live.stream import Stream
from gpuactors.cli.live.terminal import Terminal, is_screen
from gpuactors.cli.live.watched import Watched
from gpuactors.cli.output import columns_of, wants_colour
from gpuactors.config import Config
from gpuactors.control.client import Running
from gpuactors.control.path import socket_path
from gpuactors.observe.stdout import StdoutError
from gpuactors.ports.errors import ControlError

_TICK_S: Final = 1.0
"""The pause between two updates of the ages on the screen, in seconds."""

_ENDS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_QUIT: Final = b"qQ\x03\x04"


def watch(
    config: Config, output: Format, *, out: TextIO, keys: TextIO | None, aside: Callable[[str], None]
) -> None:
    """Show the running daemon's view on `out`, and what changes in it, until a signal.

    Raises `ports.errors.ControlError` if there is no daemon to watch, and `observe.stdout.StdoutError`.
    """
    path = socket_path(str(config.state_dir))
    environment = dict(os.environ)
    if output in (Format.TABLE, Format.WIDE) and is_screen(out, environment):
        terminal = Terminal(out, keys, colour=wants_colour(out, environment))
        try:
            trio.run(_Screen(terminal, wide=output is Format.WIDE).run, path)
        finally:
            terminal.leave()
        return

    def echo(text: str) -> None:
        out.write(text + "\n")
        out.flush()

    trio.run(_Lines(Stream(output, echo, aside, columns_of(out, environment))).run, path)


@final
class _Screen:
    """The view as a whole screen of a terminal."""

    def __init__(self, terminal: Terminal, *, wide: bool) -> None:
        self._terminal = terminal
        self._wide = wide
        self._watched = Watched()

    async def run(self, path: str) -> None:
        await _until_ended(
            lambda: follow(path, self._heard, self._lost), self._signalled, self._terminal.keys, self._draw
        )

    def _heard(self, running: Running) -> None:
        self._watched.heard(running, trio.current_time())
        self._draw()

    def _lost(self, since: float, why: str) -> None:
        self._watched.lost(since, why)
        self._draw()

    def _signalled(self, number: int) -> None:
        if number == signal.SIGTSTP:
            self._terminal.leave()
            os.kill(os.getpid(), signal.SIGSTOP)  # goes on from here with SIGCONT
        self._draw()

    def _draw(self) -> None:
        if self._watched.running is None:
            return
        columns, rows = self._terminal.size()
        at, wall = trio.current_time(), time.time()
        self._terminal.draw(frame(self._watched, at, wall, columns, rows, wide=self._wide))


@final
class _Lines:
    """The view as lines or documents, where there is no terminal."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._watched = Watched()

    async def run(self, path: str) -> None:
        await _until_ended(
            lambda: follow(path, self._heard, self._lost), lambda number: None, None, lambda: None
        )

    def _heard(self, running: Running) -> None:
        at, wall, was_gone = trio.current_time(), time.time(), self._watched.gone_since is not None
        changes = self._watched.heard(running, at)
        if was_gone:
            self._stream.back(self._watched, wall)
        self._stream.changed(changes, self._watched.inspected(at, wall), wall)

    def _lost(self, since: float, why: str) -> None:
        if self._watched.lost(since, why):
            self._stream.gone(self._watched, time.time())


async def _until_ended(
    following: Callable[[], Awaitable[object]],
    signalled: Callable[[int], None],
    keys: int | None,
    tick: Callable[[], None],
) -> None:
    """Run `following` until a signal or a key ends it, and call `tick` each second. Raise what ended it otherwise, not
    in a group."""
    failure: Exception | None = None
    async with trio.open_nursery() as nursery:

        async def end_at_signals() -> None:
            handled = (signal.SIGTSTP, signal.SIGCONT, signal.SIGWINCH)
            with trio.open_signal_receiver(*_ENDS, *handled) as numbers:
                nursery.start_soon(run)
                async for number in numbers:
                    if number in _ENDS:
                        nursery.cancel_scope.cancel()
                        return
                    signalled(number)

        async def end_at_key() -> None:
            assert keys is not None
            while True:
                await trio.lowlevel.wait_readable(keys)
                typed = os.read(keys, 64)
                if not typed or any(key in _QUIT for key in typed):
                    nursery.cancel_scope.cancel()
                    return

        async def ticks() -> None:
            while True:
                await trio.sleep(_TICK_S)
                tick()

        async def run() -> None:
            nonlocal failure
            try:
                await following()
            except (ControlError, StdoutError, OSError) as exc:
                failure = exc
                nursery.cancel_scope.cancel()

        nursery.start_soon(end_at_signals)
        nursery.start_soon(ticks)
        if keys is not None:
            nursery.start_soon(end_at_key)
    if failure is not None:
        raise failure
