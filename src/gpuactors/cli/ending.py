"""How a command ends that could not do its work: a sentence on standard error, and an exit code.

A file of its own: `start.py` uses it without click, `commands.py` with it.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Final, NoReturn

EX_DATAERR: Final = 65
EX_UNAVAILABLE: Final = 69
EX_SOFTWARE: Final = 70
EX_CANTCREAT: Final = 73
EX_CONFIG: Final = 78


def fail(text: str, code: int) -> NoReturn:
    """Say why, and end the process."""
    if sys.stderr is not None:
        with suppress(OSError):  # the exit code remains where the sentence cannot be written
            sys.stderr.write(f"gpuactors: {text}\n")
            sys.stderr.flush()
    sys.exit(code)


def first(exc: BaseException) -> BaseException:
    """The first exception of a group, and of the groups in it."""
    while isinstance(exc, BaseExceptionGroup):
        exc = exc.exceptions[0]
    return exc
