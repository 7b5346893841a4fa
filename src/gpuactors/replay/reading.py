"""Finds a journal's files and reads them, whatever state a crash or a full disk left them in.

Must not interpret the lines: that is `play.py`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from typing import Final

from msgspec import Struct

from gpuactors.observe.journal import DIRECTORY, files_of
from gpuactors.observe.journal_format import AgainLine, Header, StateLine, StepLine
from gpuactors.replay.journal_lines import FormatError, read_line

_TAIL_BYTES: Final = 1 << 16
"""This much of a file's end is read for its last line: many lines, as most have some hundred bytes."""


class JournalError(Exception):
    """There is no journal that can be replayed; the text names where, why and the remedy."""


class Damage(Struct, frozen=True):
    """Lines that cannot be read, and that were skipped up to the next state or the file's end."""

    path: str
    line: int
    """The first of them, from 1."""
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
    """How much has been read."""

    bytes_read: int = 0


Entry = File | StateLine | StepLine | AgainLine | Damage


def files_to_read(path: str) -> tuple[list[File], list[Damage]]:
    """The files of a journal, each process's together and in order; and those of a directory that are none.

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
    found, damaged = [], []
    for name in paths:
        try:
            found.append(File(name, _header(name)))
        except JournalError as exc:
            damaged.append(Damage(name, 1, os.path.getsize(name), str(exc)))
    if not found and damaged:
        raise JournalError(damaged[-1].reason)
    if not found:
        raise JournalError(f"there is no journal in {path}; the daemon writes one below its --state-dir")
    order = {file.header.run: number for number, file in reversed(list(enumerate(found)))}
    return sorted(found, key=lambda file: (order[file.header.run], file.header.part)), damaged


def entries(files: Iterable[File], meter: Meter) -> Iterator[tuple[File, Iterator[Entry]]]:
    """Each file with what is in it after its header."""
    for file in files:
        yield file, _entries(file, meter)


def last_at(file: File) -> float | None:
    """The daemon's clock in the last line of a file that can be read; None if there is none near its end."""
    with open(file.path, "rb") as lines:
        lines.seek(max(0, os.path.getsize(file.path) - _TAIL_BYTES))
        tail = lines.read().split(b"\n")
    for line in reversed(tail[1:]):
        try:
            entry = read_line(line)
        except FormatError:
            continue
        return max(entry.times()) if isinstance(entry, AgainLine) else entry.at
    return None


def runs(files: Iterable[File]) -> Iterator[tuple[str, list[File]]]:
    """The files of each process."""
    for run, of_run in groupby(files, key=lambda file: file.header.run):
        yield run, list(of_run)


def _header(path: str) -> Header:
    try:
        with open(path, "rb") as file:
            line = file.readline(1 << 16)
    except OSError as exc:
        raise JournalError(f"cannot read {path}: {exc.strerror}") from None
    if not line:
        raise JournalError(
            f"{path} cannot be replayed: it is empty: nothing of it was on the disk when the node went down"
        )
    try:
        header = read_line(line)
    except FormatError as exc:
        raise JournalError(f"{path} cannot be replayed: {exc}") from None
    if not isinstance(header, Header) or not _is_time(header.wall):
        raise JournalError(f"{path} cannot be replayed: it does not begin with a journal's header")
    return header


def _is_time(text: str) -> bool:
    try:
        datetime.fromisoformat(text)
    except ValueError:
        return False
    return True


def _entries(file: File, meter: Meter) -> Iterator[Entry]:
    """Steps only after a state; unreadable data is reported once its extent is known."""
    skipped, first, why = 0, 0, ""
    with open(file.path, "rb") as lines:
        lines.readline()
        for number, line in enumerate(lines, start=2):
            meter.bytes_read += len(line)
            try:
                # Only a whole line counts, even if what there is of a torn one can be read.
                entry = read_line(line) if line.endswith(b"\n") else None
                reason = "" if entry is not None else "the last line was not written to its end"
            except FormatError as exc:
                entry, reason = None, str(exc)
            if isinstance(entry, StateLine) or (isinstance(entry, StepLine | AgainLine) and not skipped):
                if skipped:
                    yield Damage(file.path, first, skipped, why)
                    skipped = 0
                yield entry
                continue
            if not skipped:
                first, why = number, reason or "a second header"
            skipped += len(line)
    if skipped:
        yield Damage(file.path, first, skipped, why)
