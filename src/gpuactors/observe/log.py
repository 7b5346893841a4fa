"""Logging set-up: one line per event on standard error, as JSON or for a console, for our own code and for libraries.

Our own code logs by `process/logger.py`. Must not decide which lines are written, and must not start a thread or an
event loop.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import PurePath
from typing import Final, Literal, TextIO, TypeAlias

from gpuactors.core.values.quote import printable, quoted
from gpuactors.limits import LOG_TEXT_MAX_CHARS
from gpuactors.process.logger import Line

LIBRARY_LINES_MAX: Final = 16
"""Limit on the lines of one text of a library in LIBRARY_LINES_S: enough to see what happens; a client that dials in a
loop would write thousands a second."""

LIBRARY_LINES_S: Final = 60.0
"""The time for which LIBRARY_LINES_MAX holds, 60 s; the other lines of one text in it are counted."""

LIBRARY_TEXTS_MAX: Final = 256
"""Limit on the texts that are counted; a library that puts values into its texts itself has ever new ones."""

LogFormat: TypeAlias = Literal["json", "console"]
LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]

LIBRARY_EVENT: Final = "library.logged"
"""The event name of a line that a library wrote; its prose is in the field `message`, its name in
`logger`."""

_CHATTERING: Final = ("hpack", "httpcore")
"""The libraries that write 20 lines per call or request at debug."""


def configure(
    log_format: LogFormat, log_level: LogLevel, *, node: str = "", stream: TextIO | None = None
) -> None:
    """Set up the standard library's logging for the whole process; the last call holds.

    Each line has the field `node` if that is not empty: lines of many nodes are read together.
    Lines go to `stream`, standard error where it is None (looked up at each line, so a redirection is
    followed).
    """
    handler = _StandardError() if stream is None else logging.StreamHandler(stream)
    handler.addFilter(_Repeats())
    handler.setFormatter(_Formatter(node, _as_json if log_format == "json" else _console(sys.stderr)))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(log_level.upper())
    for library in _CHATTERING:
        logging.getLogger(library).setLevel(logging.WARNING)
    logging.captureWarnings(True)
    # No line names a thread or process: to look them up takes a fifth of a record.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    # A closed reader of our standard error must not cause a traceback per line.
    logging.raiseExceptions = False


class _Repeats(logging.Filter):
    """Let a few lines a minute of each text of a library through, as a library may repeat one for each connection. The
    next one says how many were left out. gpuactors' own lines all pass."""

    def __init__(self) -> None:
        super().__init__()
        self._said: dict[tuple[str, str], tuple[float, int]] = {}
        """The first time and the number of each text, by its logger and the text without its values."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is written."""
        if isinstance(record.msg, Line):
            return True
        text = (record.name, str(record.msg))
        since, times = self._said.get(text, (record.created, 0))
        if record.created >= since + LIBRARY_LINES_S:
            if times > LIBRARY_LINES_MAX:
                record.msg = (
                    f"{record.msg} ({times - LIBRARY_LINES_MAX} more before this one were not logged)"
                )
            since, times = record.created, 0
        if len(self._said) >= LIBRARY_TEXTS_MAX:
            self._said.clear()
        self._said[text] = since, times + 1
        return times < LIBRARY_LINES_MAX


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


class _Formatter(logging.Formatter):
    """Every line, ours or a library's: time, level, event and node come first, for people who read JSON lines."""

    def __init__(self, node: str, render: Callable[[dict[str, object]], str]) -> None:
        super().__init__()
        self._node: Mapping[str, object] = {"node": node} if node else {}
        self._render = render

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "timestamp": f"{datetime.fromtimestamp(record.created, UTC).isoformat(timespec='microseconds')[:-6]}Z",
            "level": record.levelname.lower(),
            **_fields(record, self._node),
        }
        if record.exc_info:
            trace = self.formatException(record.exc_info)
            line["exception"] = "\n".join(map(printable, trace.split("\n")))
        return self._render(line)


def _fields(record: logging.LogRecord, node: Mapping[str, object]) -> dict[str, object]:
    """Return the fields of a line, quoted and cut: no text of a library controls a terminal or fills a disk."""
    if isinstance(record.msg, Line):
        fields = {"event": record.msg.event, **node, **record.msg.fields}
    else:
        fields = {"event": LIBRARY_EVENT, **node, "message": record.getMessage(), "logger": record.name}
    return {key: _fit(value) for key, value in fields.items()}


def _fit(value: object) -> object:
    if isinstance(value, str):
        return quoted(value, LOG_TEXT_MAX_CHARS)
    return tuple(map(_fit, value)) if isinstance(value, tuple) else value


def _plain(value: object) -> object:
    """Convert a field of a type that JSON lacks: sets are sorted, so that a line is the same each time."""
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    return str(value)


_as_json: Final = json.JSONEncoder(default=_plain, ensure_ascii=False).encode
"""The encoder, made once: `json.dumps` makes one for each line."""

_EVENT_CHARS: Final = 30
"""The width of an event's name on a console, so that most fields begin in one column."""

_COLOURS: Final[Mapping[object, str]] = {"error": "31", "warning": "33", "info": "32"}
"""The terminal's number of each level's colour."""


def _console(stream: TextIO) -> Callable[[dict[str, object]], str]:
    coloured = stream.isatty()

    def styled(style: str, text: str) -> str:
        return f"\x1b[{style}m{text}\x1b[0m" if coloured and style else text

    def render(line: dict[str, object]) -> str:
        stamp, level, event = (str(line.pop(key)) for key in ("timestamp", "level", "event"))
        trace = line.pop("exception", "")
        head = (styled("2", stamp), f"[{styled(_COLOURS.get(level, ''), f'{level:<8}')}]")
        fields = (f"{styled('36', key)}={_shown(value)}" for key, value in line.items())
        text = " ".join((*head, styled("1", f"{event:<{_EVENT_CHARS}}"), *fields)).rstrip()
        return f"{text}\n{trace}" if trace else text

    return render


def _shown(value: object) -> str:
    text = str(value)
    return repr(text) if " " in text or not text else text
