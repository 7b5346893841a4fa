"""The progress line on a terminal: what a command is waiting for, shown after a second, with the seconds, and removed
at the end.

Nothing is written where standard error is no terminal: a script's log has no use for it. Must not know any command.
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final, TextIO, TypeVar, final

PROGRESS_SILENT_S: Final = 0.7
"""The seconds after which a read is named on the terminal, and the pause between two updates of its time. Less than
CONTROL_CALL_S, so that a daemon that hangs is named before it is given up."""

T = TypeVar("T")

_FIRST_COLUMN: Final = "\r\x1b[K"
"""The codes to go to the first column, and to erase the line."""

_COLUMNS: Final = 80
"""The columns of a terminal that does not report them."""


@final
class Progress:
    """The progress line on `out`; none where that is no terminal."""

    def __init__(self, out: TextIO | None) -> None:
        self._out = out if out is not None and out.isatty() else None
        self._is_shown = False

    def show(self, text: str) -> None:
        """Write the line over the last one, as much of it as fits: one that is folded could not be taken back."""
        if self._out is None:
            return
        columns = _COLUMNS
        with suppress(OSError):
            columns = os.get_terminal_size(self._out.fileno()).columns
        self._write(_FIRST_COLUMN + text[: columns - 1])
        self._is_shown = True

    def clear(self) -> None:
        """Remove the line, before other output."""
        if self._is_shown:
            self._is_shown = False
            self._write(_FIRST_COLUMN)

    async def during(self, what: str, read: Callable[[], Awaitable[T]]) -> T:
        """Return or raise what `read` does; show its name if it takes longer than PROGRESS_SILENT_S."""
        import trio  # most commands run none

        results: list[T] = []
        failure: Exception | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._show_waits, what)
            try:
                results.append(await read())
            except Exception as exc:  # past the nursery, which would put it into a group
                failure = exc
            finally:
                self.clear()
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure
        return results[0]

    async def _show_waits(self, what: str) -> None:
        import trio

        began = trio.current_time()
        while True:
            await trio.sleep(PROGRESS_SILENT_S)
            self._show_wait(what, trio.current_time() - began)

    def while_blocked(self, what: str, read: Callable[[], T]) -> T:
        """Return or raise what `read` does, which blocks; show its name as `during` does."""
        if self._out is None:
            return read()
        import threading

        is_read = threading.Event()

        def show_waits() -> None:
            began = time.monotonic()
            while not is_read.wait(PROGRESS_SILENT_S):
                self._show_wait(what, time.monotonic() - began)

        thread = threading.Thread(target=show_waits)
        thread.start()
        try:
            return read()
        finally:
            is_read.set()
            thread.join()
            self.clear()

    def _show_wait(self, what: str, seconds: float) -> None:
        self.show(f"gpuactors: reading {what} … {seconds:.0f} s")

    def _write(self, text: str) -> None:
        assert self._out is not None
        with suppress(OSError):  # what matters is on standard output
            self._out.write(text)
            self._out.flush()


SILENT: Final = Progress(None)
"""The progress of a command whose output a program reads: none."""
