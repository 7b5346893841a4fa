"""The command's one function: watches until a signal or a key, on a terminal or as a stream of lines."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TextIO, final

import trio

from gpuactors.cli.formats import Format
from gpuactors.cli.live.ends import until_ended
from gpuactors.cli.live.follow import follow
from gpuactors.cli.live.stream import Stream
from gpuactors.cli.live.watched import Watched
from gpuactors.cli.output import columns_of, wants_colour
from gpuactors.config import Config
from gpuactors.control.client import Running
from gpuactors.control.path import socket_path


def watch(
    config: Config, output: Format, *, out: TextIO, keys: TextIO | None, aside: Callable[[str], None]
) -> None:
    """Show the running daemon's view on `out`, and what changes in it, until a signal.

    Raises `ports.errors.ControlError` if there is no daemon to watch, and `observe.stdout.StdoutError`.
    """
    path = socket_path(str(config.state_dir))
    environment = dict(os.environ)
    if output in (Format.TABLE, Format.WIDE) and _is_screen(out, environment):
        from gpuactors.cli.live.terminal import OnTerminal

        colour, wide = wants_colour(out, environment), output is Format.WIDE
        trio.run(OnTerminal(out, keys, colour=colour, wide=wide).run, path)
        return

    def echo(text: str) -> None:
        out.write(text + "\n")
        out.flush()

    trio.run(_Lines(Stream(output, echo, aside, columns_of(out, environment))).run, path)


def _is_screen(out: TextIO, environment: dict[str, str]) -> bool:
    """Return whether a whole screen can be drawn on it."""
    return out.isatty() and environment.get("TERM", "dumb") not in ("dumb", "")


@final
class _Lines:
    """The view as lines or documents, where there is no terminal."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._watched = Watched()

    async def run(self, path: str) -> None:
        await until_ended(lambda: follow(path, self._heard, self._lost))

    def _heard(self, running: Running) -> None:
        at, wall, was_gone = trio.current_time(), time.time(), self._watched.gone_since is not None
        changes = self._watched.heard(running, at)
        if was_gone:
            self._stream.back(self._watched, wall)
        self._stream.changed(changes, self._watched.inspected(at, wall), wall)

    def _lost(self, since: float, why: str) -> None:
        if self._watched.lost(since, why):
            self._stream.gone(self._watched, time.time())
