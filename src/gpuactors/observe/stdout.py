"""Standard output, whose failures can be distinguished from other files': a full disk is no bug of the command.

`print` and click raise a plain `OSError`, which may be any file's, and the interpreter's own last flush prints
"Exception ignored". Must not know what is written.
"""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class StdoutError(Exception):
    """Standard output could not be written; `errno` and `strerror` are the reason.

    No `OSError`: click would end the process with code 1 for a closed pipe.
    """

    def __init__(self, errno: int | None, strerror: str | None) -> None:
        super().__init__(errno, strerror)
        self.errno, self.strerror = errno, strerror


class _File(io.FileIO):
    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as exc:
            raise StdoutError(exc.errno, exc.strerror) from exc


def opened() -> TextIO:
    """Open standard output as `sys.stdout` has it, but with a `StdoutError` for each failure."""
    file = _File(sys.stdout.fileno(), "w", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(file),
        encoding=sys.stdout.encoding,
        errors=sys.stdout.errors,
        line_buffering=file.isatty(),
        write_through=False,
    )


def give_up() -> None:
    """Drop unwritten output, so that the interpreter does not try again at its end."""
    with suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
