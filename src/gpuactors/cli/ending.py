"""The end of a command that fails: a sentence on standard error, and an exit code.

A file of its own: `start.py` uses it without click, `commands.py` with it.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Final, NoReturn

from gpuactors.core.values.quote import quoted
from gpuactors.limits import LOG_TEXT_MAX_CHARS

EX_DATAERR: Final = 65
EX_UNAVAILABLE: Final = 69
EX_SOFTWARE: Final = 70
EX_CANTCREAT: Final = 73
EX_CONFIG: Final = 78


def fail(text: str, code: int) -> NoReturn:
    """Write the sentence to standard error, and end the process."""
    tell(text)
    sys.exit(code)


def tell(text: str) -> None:
    """Write the sentence to standard error, if that can be written."""
    if sys.stderr is not None:
        with suppress(OSError):  # the exit code remains where the sentence cannot be written
            sys.stderr.write(f"gpuactors: {shown(text)}\n")
            sys.stderr.flush()


def shown(text: str) -> str:
    """Make a text safe for a terminal, whatever names and paths are in it: keep its lines, quote other control
    characters."""
    return "\n".join(quoted(line, LOG_TEXT_MAX_CHARS) for line in text.split("\n"))


def first(exc: BaseException) -> BaseException:
    """Return the first exception of a group, and of the groups in it."""
    while isinstance(exc, BaseExceptionGroup):
        exc = exc.exceptions[0]
    return exc
