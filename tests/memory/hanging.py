"""A real file in which a real process's write hangs, as in the kernel's `unbind` while the device is in use."""

from __future__ import annotations

import fcntl
import os
import select
from pathlib import Path
from types import TracebackType
from typing import Final, final

_SHORT_BYTES: Final = 4096
"""One page: the least that a pipe holds, and the most that one read here takes."""


@final
class HangingFile:
    """A file whose writer sleeps until `answer`, or until this process has ended, however it ended.

    It is a FIFO that is full and has a reader, this process: the writer's open(2) returns and its write(2) sleeps. In
    one without a reader the writer's open(2) would sleep, and for ever if this process was killed.
    """

    def __init__(self, path: Path) -> None:
        """Makes the file. Raises `OSError`."""
        self.path = path
        os.mkfifo(path)
        self._descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._full_bytes = fcntl.fcntl(self._descriptor, fcntl.F_SETPIPE_SZ, _SHORT_BYTES)
        assert os.write(self._descriptor, b"\0" * self._full_bytes) == self._full_bytes

    def answer(self, within_s: float) -> str:
        """Waits for a write, or takes that which hangs, and lets it return: what was written. Later writes return at
        once. Raises TimeoutError."""
        self._make_room()
        waiting = select.poll()
        waiting.register(self._descriptor, select.POLLIN)
        if not waiting.poll(1000.0 * within_s):
            raise TimeoutError(f"nobody has written to {self.path} within {within_s:g} s")
        return os.read(self._descriptor, _SHORT_BYTES).decode()

    def close(self) -> None:
        """A write that hangs fails (EPIPE)."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def __enter__(self) -> HangingFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _make_room(self) -> None:
        while self._full_bytes:
            self._full_bytes -= len(os.read(self._descriptor, self._full_bytes))
