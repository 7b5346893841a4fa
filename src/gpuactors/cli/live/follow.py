"""Follows the running daemon through restarts and hand-overs. Must not print."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NoReturn

import trio

from gpuactors.control.client import OtherVersionError, Running
from gpuactors.control.watch import watch
from gpuactors.ports.errors import ControlError

WATCH_GONE_S: Final = 1.0
"""How long a daemon must be away to be reported as gone, in seconds: a hand-over takes milliseconds, a restart half a
second."""

WATCH_RETRY_S: Final = 0.25
"""The pause between two dials of a daemon that is gone, in seconds; a dial costs next to nothing."""


async def follow(path: str, heard: Callable[[Running], None], lost: Callable[[float, str], None]) -> NoReturn:
    """Call `heard` with what the daemon at `path` knows, at once and after each change; call `lost` with the time and
    the reason when there is none for longer than a hand-over takes, again and again until there is one.

    Raises `ports.errors.ControlError` if there is none at the start, or if it is of another version whose view cannot
    be read.
    """
    gone_since: float | None = None
    is_reached = False

    def reached(running: Running) -> None:
        nonlocal gone_since, is_reached
        gone_since, is_reached = None, True
        heard(running)

    while True:
        try:
            await watch(path, reached)
        except OtherVersionError:
            raise
        except ControlError as exc:
            if not is_reached:
                raise
            now = trio.current_time()
            gone_since = now if gone_since is None else gone_since
            if now - gone_since >= WATCH_GONE_S:
                lost(gone_since, str(exc))
        await trio.sleep(WATCH_RETRY_S)
