"""Finds a journal's files and reads them, whatever state a crash or a full disk left them in.

Must not interpret the lines: that is `play.py`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from typing import BinaryIO, Final

from msgspec import Struct

from gpuactors.observe.journal import DIRECTORY, files_of
from gpuactors.observe.journal_format import AgainLine, Header, Line, StateLine, StepLine
from gpuactors.process.plain_files import open_plain
from gpuactors.replay.journal_lines import FormatError, read_line

JOURNAL_LINE_MAX_BYTES: Final = 16 * 1024 * 1024
"""The most bytes of a line that is replayed: the longest is a state, of 2 MB with 512 GPUs. A longer one counts as
damage and is skipped in pieces: decoded, a line takes some thirty times its length of memory."""

_TAIL_BYTES: Final = 1 << 16
"""The bytes of a file's end that are read for its last line: many lines, as most have some hundred bytes; and of its
beginning for the header."""

_PIECE_BYTES: Final = 1 << 20
"""The size of the pieces in which a line that is too long is skipped."""

_AT_MAX_S: Final = 1e10
"""The latest time of a daemon's clock, 300 years: it counts from less than two weeks before the daemon's start
(trio)."""

_WALL_MAX_S: Final = 2e11
"""The latest time of day, the year 8307: with the time above a date of Python's at all times."""


class JournalError(Exception):
    """There is no journal that can be replayed; the text names where, why and the remedy."""


class Damage(Struct, frozen=True):
    """Lines that cannot be read, and that were skipped up to the next state or the file's end."""

    path: str
    line: int
    """The number of the first of them, from 1."""
    bytes_skipped: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path}, line {self.line}: {self.bytes_skipped} bytes skipped: {self.reason}"


class File(Struct, frozen=True):
    """One file with its header."""

    path: str
    header: Header


@dataclass
class Meter:
    """The bytes that have been read so far."""

    bytes_read: int = 0


JournalEntry = File | StateLine | StepLine | AgainLine | Damage


def files_to_read(path: str) -> tuple[list[File], list[Damage]]:
    """Return the files of a journal, each process's together and in order; and those of a directory that are none.

    `path` is one file, a directory of them, or a state directory. Raises `JournalError`.
    """
    try:
        if not os.path.isdir(path):
            return [File(path, _header(path))], []
        paths = files_of(path) or files_of(os.path.join(path, DIRECTORY))
    except FileNotFoundError:
        paths = []
    except OSError as exc:
        raise JournalError(f"cannot read {exc.filename or path}: {exc.strerror}") from None
    files, damaged = [], []
    for name in paths:
        try:
            files.append(File(name, _header(name)))
        except JournalError as exc:
            damaged.append(Damage(name, 1, os.path.getsize(name), str(exc)))
    if not files and damaged:
        raise JournalError(damaged[-1].reason)
    if not files:
        raise JournalError(f"there is no journal in {path}; the daemon writes one below its --state-dir")
    order = {file.header.run: number for number, file in reversed(list(enumerate(files)))}
    return sorted(files, key=lambda file: (order[file.header.run], file.header.part)), damaged


def entries(files: Iterable[File], meter: Meter) -> Iterator[tuple[File, Iterator[JournalEntry]]]:
    """Yield each file with what is in it after its header."""
    for file in files:
        yield file, _entries(file, meter)


def last_at(file: File) -> float | None:
    """Return the daemon's clock in the last line of a file that can be read; None if there is none near its end."""
    with open_plain(file.path) as lines:
        lines.seek(max(0, os.path.getsize(file.path) - _TAIL_BYTES))
        tail = lines.read(_TAIL_BYTES).split(b"\n")
    for line in reversed(tail[1:]):
        try:
            entry = _checked(read_line(line))
        except FormatError:
            continue
        return max(entry.times()) if isinstance(entry, AgainLine) else entry.at
    return None


def runs(files: Iterable[File]) -> Iterator[tuple[str, list[File]]]:
    """Yield the files of each process."""
    for run, run_files in groupby(files, key=lambda file: file.header.run):
        yield run, list(run_files)


def _header(path: str) -> Header:
    try:
        with open_plain(path) as file:
            line = file.readline(_TAIL_BYTES)
    except OSError as exc:
        raise JournalError(f"cannot read {path}: {exc.strerror}") from None
    if not line:
        raise JournalError(
            f"{path} cannot be replayed: it is empty: nothing of it was on the disk when the node went down"
        )
    try:
        header = _checked(read_line(line))
    except FormatError as exc:
        raise JournalError(f"{path} cannot be replayed: {exc}") from None
    if not isinstance(header, Header) or not _is_time(header.wall):
        raise JournalError(f"{path} cannot be replayed: it does not begin with a journal's header")
    return header


def _is_time(text: str) -> bool:
    try:
        return 0.0 <= datetime.fromisoformat(text).timestamp() <= _WALL_MAX_S
    except (ValueError, OverflowError):
        return False


def _checked(line: Line) -> Line:
    """Return the line if its times can be those of a daemon's clock. Raises `FormatError`."""
    for at in line.times() if isinstance(line, AgainLine) else (line.at,):
        if not 0.0 <= at <= _AT_MAX_S:
            raise FormatError(f"its time {at:g} s is none of a daemon's clock")
    return line


def _entries(file: File, meter: Meter) -> Iterator[JournalEntry]:
    """Yield steps only after a state; report unreadable data once its extent is known."""
    skipped, first_line, why = 0, 0, ""
    with open_plain(file.path) as content:
        content.readline(_TAIL_BYTES)
        for number, (line, length) in enumerate(_lines(content), start=2):
            meter.bytes_read += length
            try:
                # Only a whole line counts, even if what there is of a torn one can be read.
                entry = _checked(read_line(line)) if line.endswith(b"\n") else None
                reason = "" if entry is not None else "the last line was not written to its end"
                if length > JOURNAL_LINE_MAX_BYTES:
                    reason = f"a line of more than {JOURNAL_LINE_MAX_BYTES:,} bytes: no journal has one"
            except FormatError as exc:
                entry, reason = None, str(exc)
            if isinstance(entry, StateLine) or (isinstance(entry, StepLine | AgainLine) and not skipped):
                if skipped:
                    yield Damage(file.path, first_line, skipped, why)
                    skipped = 0
                yield entry
                continue
            if not skipped:
                first_line, why = number, reason or "a second header"
            skipped += length
    if skipped:
        yield Damage(file.path, first_line, skipped, why)


def _lines(content: BinaryIO) -> Iterator[tuple[bytes, int]]:
    """Yield each line with its length; an empty one in the place of a line that is too long."""
    while line := content.readline(JOURNAL_LINE_MAX_BYTES + 1):
        length, is_too_long = len(line), len(line) > JOURNAL_LINE_MAX_BYTES
        while is_too_long and line and not line.endswith(b"\n"):
            line = content.readline(_PIECE_BYTES)
            length += len(line)
        yield (b"" if is_too_long else line), length
