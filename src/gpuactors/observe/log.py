"""Logging set-up: one line per event on standard error, as JSON or for a console, for our own code and for libraries.

Event names are `noun.verb` (`device.changed`, `host.scanned`), declared in docs/log-events.md; details are fields, not
prose. Fields that hold for all that a trio task logs are bound with `structlog.contextvars.bind_contextvars`: trio
gives each task its own. Must not decide which lines are written, and must not start a thread or an event loop.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from pathlib import PurePath
from typing import Any, Final, Literal, TextIO, TypeAlias

import structlog
from structlog.types import EventDict, Processor, WrappedLogger

from gpuactors.core.values.quote import quoted
from gpuactors.limits import LOG_TEXT_MAX_CHARS

LogFormat: TypeAlias = Literal["json", "console"]
LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]

_LEVELS: Final[dict[LogLevel, int]] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}

LIBRARY_EVENT: Final = "library.logged"
"""The event name of a line that a library wrote; its prose is in the field `message`, its name in
`logger`."""


def configure(
    log_format: LogFormat, log_level: LogLevel, *, node: str = "", stream: TextIO | None = None
) -> None:
    """Set up structlog and the standard library's logging for the whole process; the last call holds.

    Each line has the field `node` if that is not empty: lines of many nodes are read together.
    Lines go to `stream`, standard error where it is None (looked up at each line, so a redirection is
    followed).
    """
    level = _LEVELS[log_level]
    structlog.configure(
        processors=[*_shared(node), structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.stdlib.LoggerFactory(),
        # A cached logger would keep the level and format of an earlier call.
        cache_logger_on_first_use=False,
    )
    handler = _StandardError() if stream is None else logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[_foreign, *_shared(node)],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_renderers(log_format)],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for library in ("hpack", "httpcore"):
        logging.getLogger(library).setLevel(
            logging.WARNING
        )  # at debug they write 20 lines per call or request
    logging.captureWarnings(True)
    # A closed reader of our standard error must not cause a traceback per line.
    logging.raiseExceptions = False


def get_logger(**fields: object) -> structlog.typing.FilteringBoundLogger:
    """A logger whose lines carry `fields`."""
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger("gpuactors", **fields)
    return logger


class _StandardError(logging.StreamHandler[TextIO]):
    """Writes to whatever `sys.stderr` is at that moment."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, value: TextIO) -> None:
        raise AttributeError("the stream is always sys.stderr")


def _shared(node: str) -> list[Processor]:
    """Processing of every line, ours or a library's."""

    def named(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        event.setdefault("node", node)
        return event

    return [
        *([named] if node else []),
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
        _fit_for_a_terminal,
    ]


def _renderers(log_format: LogFormat) -> list[Processor]:
    if log_format == "console":
        plain = structlog.dev.plain_traceback  # a framed one with every local variable fills the screen
        return [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain)]
    return [
        structlog.processors.format_exc_info,
        _time_level_event_first,
        structlog.processors.JSONRenderer(default=_plain, ensure_ascii=False),
    ]


def _fit_for_a_terminal(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """No line controls a terminal or fills a disk, whatever the text of a library or an unquoted sentence."""
    return {key: _fit(value) for key, value in event.items()}


def _fit(value: object) -> object:
    if isinstance(value, str):
        return quoted(value, LOG_TEXT_MAX_CHARS)
    return tuple(map(_fit, value)) if isinstance(value, tuple) else value


def _foreign(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """A library's line, brought into our form."""
    record: logging.LogRecord = event["_record"]
    event["message"], event["event"], event["logger"] = event["event"], LIBRARY_EVENT, record.name
    return event


def _time_level_event_first(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Time, level, event and node first, for people who read JSON lines."""
    first: MutableMapping[str, Any] = {
        key: event.pop(key) for key in ("timestamp", "level", "event", "node") if key in event
    }
    return {**first, **event}


def _plain(value: object) -> object:
    """A field of a type that JSON does not have: sets are sorted, so that a line is the same each time."""
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    return str(value)
