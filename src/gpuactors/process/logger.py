"""A logger of events with fields, over the standard library's logging, which the libraries use.

`log.info("device.changed", address="0000:23:00.0")`: event names are `noun.verb`, declared in docs/reference.md;
details are fields, not prose. The form of a line and the lowest level are set once, by `observe/log.py`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import Final, final


@final
class Line:
    """The message of a log record that is an event."""

    __slots__ = ("event", "fields")

    def __init__(self, event: str, fields: Mapping[str, object]) -> None:
        self.event: Final = event
        self.fields: Final = fields

    def __str__(self) -> str:
        return " ".join((self.event, *(f"{key}={value}" for key, value in self.fields.items())))


@final
class Logger:
    """Writes lines at the levels of the standard library. `exc_info` is an exception whose traceback the line has."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def debug(self, event: str, /, **fields: object) -> None:
        """Log a detail for developers."""
        self.write(logging.DEBUG, event, fields)

    def info(self, event: str, /, **fields: object) -> None:
        """Log a normal event."""
        self.write(logging.INFO, event, fields)

    def warning(self, event: str, /, *, exc_info: BaseException | None = None, **fields: object) -> None:
        """Log something that an operator may have to act on."""
        self.write(logging.WARNING, event, fields, exc_info)

    def error(self, event: str, /, *, exc_info: BaseException | None = None, **fields: object) -> None:
        """Log a failure that an operator has to act on, or a bug."""
        self.write(logging.ERROR, event, fields, exc_info)

    def exception(self, event: str, /, **fields: object) -> None:
        """Log an error, with the exception that is being handled."""
        self.write(logging.ERROR, event, fields, sys.exception())

    def write(
        self, level: int, event: str, fields: Mapping[str, object], exc: BaseException | None = None
    ) -> None:
        """Log at any level of `logging`."""
        logger = self._logger
        if logger.isEnabledFor(level):
            exc_info = None if exc is None else (type(exc), exc, exc.__traceback__)
            logger.handle(logging.LogRecord(logger.name, level, "", 0, Line(event, fields), None, exc_info))


def get_logger(name: str = "gpuactors") -> Logger:
    """Return the logger of that name."""
    return Logger(name)
