"""The daemon's flight recorder on a disk that can be full, without a thread.

The recorder is the daemon's own (`observe/journal.py`), and so are its files. A killed process leaves what it had
written, and a disk that lost its power may have lost the end of it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import final

import trio

from gpuactors.observe.journal import FileJournal, Origin, files_of
from gpuactors.ports.node import Step
from tests.memory.faults import Fault, Faults


@final
class MemoryJournal:
    """Implements `ports.node.Journal`."""

    def __init__(self, directory: str, name: str, faults: Faults) -> None:
        self._directory = directory
        self._faults = faults
        self._killed = False
        self._journal = FileJournal(
            directory,
            Origin(version="simulation", run=name, boot="", pid=1),
            write=self._write,
            run_blocking=self._run_blocking,
        )

    def record(self, step: Step) -> None:
        """Implement `ports.node.Journal.record`."""
        self._journal.record(step)

    async def run(self) -> None:
        """Implement `ports.node.Journal.run`."""
        try:
            await self._journal.run()
        finally:
            self._journal.close()  # of a killed process the kernel does it

    def kill(self, lost_bytes: int) -> None:
        """The process ends, and the disk loses so many bytes of the newest file."""
        self._killed = True
        for path in files_of(self._directory)[-1:]:
            os.truncate(path, max(0, os.stat(path).st_size - lost_bytes))

    async def _run_blocking(self, function: Callable[[], None]) -> None:
        await trio.lowlevel.checkpoint()
        if not self._killed:
            function()

    def _write(self, file: int, content: bytearray) -> int:
        """On a full disk a write ends in the middle, and the next one fails."""
        if self._faults.strikes(Fault.DISK_FULL):
            os.write(file, content[: len(content) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.write(file, content)
