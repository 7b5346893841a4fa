"""The flight recorder: every step of the registry, in files of bounded size, to be replayed later.

The registry hands each step over without waiting (`record`); it is encoded and written in a thread, because a disk may
hang. Steps that cannot be kept are counted, and the next line is the whole state: a journal may have gaps, but its
contents are what happened. A failure here does not affect the daemon: it is logged once, and retried.

Must not be read by the daemon itself: a journal is for people, and nothing depends on it.
"""

from __future__ import annotations

import math
import os
import re
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Final, final

import msgspec
import trio

from gpuactors import limits
from gpuactors.observe.journal_format import FORMAT, Header, LineWriter, header_line, is_routine
from gpuactors.ports.node import Step
from gpuactors.process.logger import get_logger
from gpuactors.process.resource_exhaustion import shortage

JOURNAL_FILE_MAX_BYTES: Final = 8 * 1024 * 1024
"""A file of the journal; then the next one begins. Each begins with the whole state, so it can be replayed by itself:
15 KB with 8 GPUs, 2 MB with 512 that were never quiet. A quiet node takes four days to fill one."""

JOURNAL_FILES_MAX: Final = 256
"""Limit on the files: each start of a daemon begins one, and a daemon that is restarted every few minutes must not fill
a directory."""

JOURNAL_WAITING_STEPS: Final = 1024
"""Limit on the steps that wait to be written. The worst burst (INBOX_EVENTS, each with an inspection after it) fits
twice. Steps beyond that while the disk hangs are counted, not kept: each step holds a state of its own."""

JOURNAL_DROPPED_LOG_S: Final = 60.0
"""The log has one line in this time about steps that found no room: in a flood of events there are three gaps a second,
and the journal has each."""

JOURNAL_BATCH_S: Final = 0.25
"""How long steps are gathered before they are written at once, in seconds: one wake-up of a thread for a uevent and
what follows from it. A process that is killed (SIGKILL) loses so much; one that ends, even by a bug, nothing."""

JOURNAL_ROUTINE_S: Final = 60.0
"""How long polls, ticks and reads of the ledger without any consequence wait, in seconds, unless something else
happens: their common fields are written once. A process that is killed loses a minute in which nothing happened."""

JOURNAL_RETRY_S: Final = 30.0
"""The wait after a failed write (disk full, read-only); the next one goes to a new file."""

JOURNAL_LAST_S: Final = 1.0
"""The wait for the last steps at the end of the process; a disk that hangs must not delay it."""

DIRECTORY: Final = "journal"
"""Its name below the state directory."""

_NAME: Final = re.compile(r"(\d{8})\.jsonl")

log = get_logger()


WriteBytes = Callable[[int, bytearray], int]
"""The type of os.write: file descriptor and bytes to the number written. Raises `OSError`."""

BlockingRunner = Callable[[Callable[[], None]], Awaitable[None]]
"""Runs a function that may block, where it delays no other task."""


async def _in_thread(function: Callable[[], None]) -> None:
    await trio.to_thread.run_sync(function, abandon_on_cancel=True)


def files_of(directory: str) -> list[str]:
    """Return the paths of the journal's files in a directory, oldest first. Raises `OSError`."""
    return [os.path.join(directory, name) for name in sorted(os.listdir(directory)) if _NAME.fullmatch(name)]


class Bounds(msgspec.Struct, frozen=True):
    """The bounds of the journal. A test has smaller ones."""

    file_bytes: int = JOURNAL_FILE_MAX_BYTES
    all_bytes: int = limits.JOURNAL_MAX_BYTES
    files: int = JOURNAL_FILES_MAX
    waiting_steps: int = JOURNAL_WAITING_STEPS


class Origin(msgspec.Struct, frozen=True):
    """The header of each file about the process that wrote it."""

    version: str
    run: str
    boot: str
    pid: int
    node: str = ""
    """The node's name; empty if it is not known."""


class Anchor(msgspec.Struct, frozen=True):
    """One moment on two clocks: the daemon's own, and the time of day in seconds since 1970."""

    at: float
    wall: float

    def time_of_day(self, at: float) -> str:
        """Return the time of day at another moment of the daemon's clock, as ISO 8601."""
        return datetime.fromtimestamp(self.wall + at - self.at, UTC).isoformat(timespec="microseconds")


class Missed(msgspec.Struct, frozen=True):
    """A gap of so many steps; the next step begins with its state."""

    steps: int


@final
class JournalFiles:
    """The files. Blocks; used by one thread at a time. `write` is os.write, or a failing substitute."""

    def __init__(self, directory: str, origin: Origin, bounds: Bounds, write: WriteBytes = os.write) -> None:
        self._directory = directory
        self._origin = origin
        self._bounds = bounds
        self._write = write
        self._lines = LineWriter()
        self._file: int | None = None
        self._size = 0
        self._part = 0
        self._missed = 0
        self._others = (0, 0.0)

    def kept(self) -> tuple[int, float]:
        """Return the bytes of the files that are kept, and since when at the latest they have every event, in seconds
        since 1970 (0 if there is none). Reads no disk: the other files are counted when one is begun."""
        others, oldest = self._others
        return others + (self._size if self._file is not None else 0), oldest

    def write(self, steps: Sequence[Step | Missed], now: Anchor) -> None:
        """Write the steps. Raises `OSError`; they count as missed then, and the next call begins a new file."""
        missed_before = self._missed
        waiting = bytearray()
        try:
            for step in steps:
                if isinstance(step, Missed):
                    self._missed += step.steps
                    continue
                if self._file is None or self._size + len(waiting) >= self._bounds.file_bytes:
                    waiting += self._lines.rest()
                    self._put(waiting)
                    self._begin(step.at, now)
                    waiting += self._state_line(step)
                elif self._missed:
                    waiting += self._state_line(step)
                waiting += self._lines.step_line(step)
            waiting += self._lines.rest()
            self._put(waiting)
        except BaseException:
            # A partly written line is a torn tail, so this file is closed. Some steps that were written before the
            # failure may be counted as well.
            self.close()
            self._lines = LineWriter()
            self._missed = missed_before + sum(s.steps if isinstance(s, Missed) else 1 for s in steps)
            raise

    def close(self) -> None:
        """End the file."""
        if self._file is not None:
            with suppress(OSError):
                os.close(self._file)
            self._file = None

    def _state_line(self, step: Step) -> bytes:
        line = self._lines.state_line(step.before, step.at, self._missed)
        self._missed = 0
        return line

    def _put(self, waiting: bytearray) -> None:
        """Write the buffer, and empty it."""
        while waiting:
            assert self._file is not None
            written = self._write(self._file, waiting)
            self._size += written
            del waiting[:written]

    def _begin(self, at: float, now: Anchor) -> None:
        """Begin a new file and make room for it."""
        self.close()
        os.makedirs(self._directory, mode=0o700, exist_ok=True)
        older = files_of(self._directory)
        number = int(os.path.basename(older[-1]).partition(".")[0]) + 1 if older else 1
        while self._file is None:
            path = os.path.join(self._directory, f"{number:08}.jsonl")
            with suppress(FileExistsError):  # a predecessor that is just handing over writes here as well
                self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            number += 1
        self._size = 0
        self._part += 1
        o = self._origin
        header = Header(FORMAT, o.version, o.run, self._part, o.boot, o.pid, now.time_of_day(at), at, o.node)
        try:
            self._put(bytearray(header_line(header)))
        except OSError:
            with suppress(OSError):  # a full disk must not get empty files
                os.unlink(path)
            raise
        sizes, dates = self._remove_oldest(older)
        self._others = sum(sizes.values()), min((dates[path] for path in sizes), default=now.wall)

    def _remove_oldest(self, older: Sequence[str]) -> tuple[dict[str, int], dict[str, float]]:
        """Remove the oldest files; return the sizes of those that stay, and when each of the older ones was last
        written."""
        sizes, dates = {}, {}
        for path in older:
            with suppress(OSError):
                status = os.stat(path)
                sizes[path], dates[path] = status.st_size, status.st_mtime
        room = self._bounds.all_bytes - self._bounds.file_bytes
        for path in older:
            if sum(sizes.values()) <= room and len(sizes) < self._bounds.files:
                break
            with suppress(OSError):
                os.unlink(path)
            sizes.pop(path, None)
        return sizes, dates


@final
class FileJournal:
    """`ports.node.Journal` in the state directory."""

    def __init__(
        self,
        directory: str,
        origin: Origin,
        bounds: Bounds | None = None,
        *,
        write: WriteBytes = os.write,
        run_blocking: BlockingRunner | None = None,
    ) -> None:
        """`run_blocking` runs what may block outside the event loop: in a thread except in the simulation."""
        self._directory = directory
        self._bounds = bounds or Bounds()
        self._files = JournalFiles(directory, origin, self._bounds, write)
        self._run_blocking = run_blocking or _in_thread
        # An abandoned thread may still hang in a write when the next one begins.
        self._lock = threading.Lock()
        self._waiting: deque[Step | Missed] = deque()
        self._missed = 0
        self._dropped_again_at = -math.inf
        """The time from which the log may have the next line about a gap: a flood of events makes one after the
        other."""
        self._arrived = trio.Event()
        self._problem = ""

    def record(self, step: Step) -> None:
        """Take a step. One without room is counted: the waiting steps are older, and without a gap."""
        if len(self._waiting) >= self._bounds.waiting_steps:
            self._missed += 1
            if (at := trio.current_time()) >= self._dropped_again_at:
                self._dropped_again_at = at + JOURNAL_DROPPED_LOG_S
                log.warning(
                    "journal.dropped",
                    reason=f"writes to {self._directory} are slower than the events; the journal has a gap",
                )
            return
        if self._missed:
            self._waiting.append(Missed(self._missed))
            self._missed = 0
        self._waiting.append(step)
        # Routine waits as long as half of the queue is free.
        if not is_routine(step) or 2 * len(self._waiting) >= self._bounds.waiting_steps:
            self._arrived.set()

    async def run(self) -> None:
        """Write until cancelled, then write what still waits, and close the file. Only one may run at a time."""
        try:
            while True:
                with trio.move_on_after(JOURNAL_ROUTINE_S):
                    await self._arrived.wait()
                    await trio.sleep(JOURNAL_BATCH_S)
                self._arrived = trio.Event()
                if self._waiting and not await self._write():
                    await trio.sleep(JOURNAL_RETRY_S)
        finally:
            with trio.move_on_after(JOURNAL_LAST_S, shield=True):
                await self._write(last=True)

    def kept(self) -> tuple[int, float]:
        """Implement `JournalFiles.kept`."""
        return self._files.kept()

    def close(self) -> None:
        """End the file; what waits is not written."""
        with self._lock:
            self._files.close()

    async def _write(self, *, last: bool = False) -> bool:
        """Write the waiting steps, and close the file behind the `last`; return whether that succeeded."""
        try:
            now = Anchor(trio.current_time(), time.time())
            await self._run_blocking(lambda: self._write_all(now, last=last))
        except Exception as exc:
            self._fails(exc)
            return False
        if self._problem:
            self._problem = ""
            log.info("journal.resumed", directory=self._directory)
        return True

    def _write_all(self, now: Anchor, *, last: bool) -> None:
        with self._lock:
            self._files.write([self._waiting.popleft() for _ in range(len(self._waiting))], now)
            if last:
                self._files.close()

    def _fails(self, exc: Exception) -> None:
        """Log why, each time the reason changes."""
        why = shortage(exc) or (exc.strerror if isinstance(exc, OSError) and exc.strerror else repr(exc))
        if why != self._problem:
            self._problem = why
            log.warning(
                "journal.failed",
                reason=f"the journal in {self._directory} cannot be written: {why}; the daemon continues without it "
                f"and tries again every {JOURNAL_RETRY_S:g} s; free the disk or give another --state-dir",
            )
