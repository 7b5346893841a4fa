"""Writes parts as one archive, each as soon as it is made: no more than one of them is in memory.

A part that fails does not end the others: its error takes its place. Must not know what the parts are.
"""

from __future__ import annotations

import gzip
import io
import tarfile
import time
import traceback
from collections.abc import Callable, Iterable
from typing import IO, Final

from msgspec import Struct

from gpuactors.cli.ending import first, shown

README: Final = "README.txt"

_GZIP_LEVEL: Final = 6
"""That of the program gzip; Python's default is 9."""


class Part(Struct, frozen=True):
    """One file of the archive."""

    name: str
    what: str
    """The content, in a few words."""
    content: Callable[[], bytes]
    """Makes the content, when it is the part's turn. May raise anything."""


class _Made(Struct, frozen=True):
    name: str
    what: str
    content: bytes

    def __str__(self) -> str:
        return f"{self.name:<24} {len(self.content):>12,}  {self.what}"


def write(
    out: IO[bytes],
    directory: str,
    parts: Iterable[Part],
    readme: Callable[[str], str],
    tell: Callable[[str], None],
) -> None:
    """Write the parts below `directory`, then the README that `readme` makes of the list. `tell` gets each line of
    the list: name, bytes, and what it is. Raises what `out` does."""
    lines = []
    with (
        gzip.GzipFile("", "wb", _GZIP_LEVEL, out) as packed,
        tarfile.open(fileobj=packed, mode="w|") as tar,
    ):
        for part in parts:
            made = _made(part)
            _add(tar, directory, made)
            lines.append(shown(str(made)))
            tell(lines[-1])
        last = _Made(README, "this list, and how to replay the journal", readme("\n".join(lines)).encode())
        _add(tar, directory, last)
        tell(str(last))


def _made(part: Part) -> _Made:
    try:
        return _Made(part.name, part.what, part.content())
    except Exception as exc:  # whatever it is, the report needs it and the other parts
        # Without those that led to it: our own errors are sentences, other programs' may quote what they were given.
        text = "".join(traceback.format_exception(exc, chain=False)).encode(errors="backslashreplace")
        return _Made(f"{part.name}.error", f"{part.what}: not there: {_why(first(exc))}", text)


def _why(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + f" ({error.filename})" * bool(error.filename)
    return str(error)


def _add(tar: tarfile.TarFile, directory: str, made: _Made) -> None:
    entry = tarfile.TarInfo(f"{directory}/{made.name}")
    entry.size, entry.mtime, entry.mode = len(made.content), int(time.time()), 0o600
    tar.addfile(entry, io.BytesIO(made.content))
