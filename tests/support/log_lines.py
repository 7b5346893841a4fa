"""The lines that our own code logs, as values: whatever level and form are set up."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

from gpuactors.process.logger import Line

NAME: Final = "gpuactors"
"""Of the logger above all of ours."""


class Logged(NamedTuple):
    """One line."""

    level: str
    event: str
    fields: dict[str, object]
    exception: BaseException | None


class _Keeping(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[Logged] = []

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(record.msg, Line):
            exception = record.exc_info[1] if record.exc_info else None
            self.lines.append(
                Logged(record.levelname.lower(), record.msg.event, dict(record.msg.fields), exception)
            )


@contextmanager
def logged() -> Iterator[list[Logged]]:
    """Those of the block, which grow meanwhile and go nowhere else."""
    logger, keeping = logging.getLogger(NAME), _Keeping()
    before = logger.level, logger.propagate
    logger.addHandler(keeping)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    try:
        yield keeping.lines
    finally:
        logger.removeHandler(keeping)
        logger.level, logger.propagate = before
        logger.setLevel(before[0])
