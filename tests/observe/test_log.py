"""Log lines: their form, their level, where they go, and that a library's lines have the same form."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
import warnings
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import PurePosixPath

import pytest

from gpuactors import limits
from gpuactors.observe.log import (
    LIBRARY_EVENT,
    LIBRARY_LINES_MAX,
    LIBRARY_LINES_S,
    LIBRARY_TEXTS_MAX,
    LogFormat,
    configure,
)
from gpuactors.process.logger import get_logger


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Logging belongs to the process: leave it as it was for the other tests."""
    root = logging.getLogger()
    before = (root.handlers[:], root.level, logging.raiseExceptions)
    yield
    root.handlers[:], root.level, logging.raiseExceptions = before
    logging.captureWarnings(False)


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_is_an_event_with_fields() -> None:
    stream = io.StringIO()
    configure("json", "info", stream=stream)
    get_logger().info(
        "scan.finished", actor="inspector", functions=3, path=PurePosixPath("/sys"), groups=frozenset({51, 7})
    )
    (line,) = lines(stream)
    assert list(line)[:3] == ["timestamp", "level", "event"]
    stamp = datetime.fromisoformat(str(line.pop("timestamp")))
    assert stamp.utcoffset() == timedelta(0)
    assert line == {
        "level": "info",
        "event": "scan.finished",
        "actor": "inspector",
        "functions": 3,
        "path": "/sys",
        "groups": [51, 7],
    }


def test_no_field_takes_a_terminal_over_or_fills_a_disk() -> None:
    """Whoever's words they are, ours or a library's, and whoever forgot to quote them."""
    stream = io.StringIO()
    configure("console", "info", stream=stream)
    odd = "\x1b[2J\u202e\r"
    get_logger().info("call.refused", reason=odd, devices=(odd, "x" * 1_000_000))
    logging.getLogger("library").warning("%s", odd + "x" * 1_000_000)
    shown = stream.getvalue()
    assert all(line.isprintable() for line in shown.split("\n"))
    assert len(shown) < 3 * limits.LOG_TEXT_MAX_CHARS


def test_lines_below_the_level_are_not_written_and_the_last_set_up_holds() -> None:
    stream = io.StringIO()
    logger = get_logger()
    configure("json", "warning", stream=stream)
    logger.info("scan.finished")
    logging.getLogger("library").info("chatter")
    assert stream.getvalue() == ""
    configure("json", "debug", stream=stream)
    logger.debug("scan.started")
    logging.getLogger("library").debug("chatter")
    assert [line["event"] for line in lines(stream)] == ["scan.started", LIBRARY_EVENT]


def test_a_library_writes_in_the_same_form() -> None:
    stream = io.StringIO()
    configure("json", "info", stream=stream)
    logging.getLogger("grpclib.server").warning("lost %s", "peer")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old name", DeprecationWarning, stacklevel=1)
    lost, warned = lines(stream)
    assert (lost["level"], lost["logger"], lost["message"]) == ("warning", "grpclib.server", "lost peer")
    assert warned["logger"] == "py.warnings"
    assert "old name" in str(warned["message"])
    assert "_record" not in lost


def test_an_exception_stays_on_one_line() -> None:
    stream = io.StringIO()
    configure("json", "info", stream=stream)
    try:
        (0).to_bytes(-1)
    except ValueError:
        get_logger().exception("actor.failed", actor="registry")
        logging.getLogger("library").exception("oh")
    ours, theirs = lines(stream)
    assert ours["event"] == "actor.failed"
    for line in (ours, theirs):
        assert "ValueError" in json.dumps(line["exception"])


def test_the_console_is_for_people() -> None:
    stream = io.StringIO()
    configure("console", "info", stream=stream)
    get_logger().info("device.added", address="0000:23:00.0")
    logging.getLogger("library").info("hello")
    first, second = stream.getvalue().splitlines()
    assert "device.added" in first
    assert "address=0000:23:00.0" in first
    assert "message=hello" in second


def test_lines_go_to_standard_error_and_no_loop_or_thread_is_started() -> None:
    program = """
import os, threading
from gpuactors.observe.log import configure
from gpuactors.process.logger import get_logger
configure("json", "info")
get_logger().info("process.started")
print(threading.active_count(), any("anon_inode" in os.readlink(f"/proc/self/fd/{n}") for n in range(3, 20)
      if os.path.islink(f"/proc/self/fd/{n}")))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert json.loads(done.stderr)["event"] == "process.started"
    assert done.stdout.split() == ["1", "False"]


def test_a_reader_that_went_away_does_not_end_the_program() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    configure("json", "info", stream=Gone())
    get_logger().info("process.started")
    logging.getLogger("library").info("hello")


def says(text: str, *values: object, at: float) -> None:
    """A library writes at that time of day."""
    record = logging.LogRecord("a.package", logging.WARNING, "/x.py", 1, text, values, None)
    record.created = at
    logging.getLogger("a.package").handle(record)


def test_of_a_line_that_a_library_repeats_a_few_are_written_and_the_others_counted() -> None:
    """A client that dials in a loop, or sends nonsense on each connection, must not fill the log."""
    stream, refused = io.StringIO(), "connection refused: %d are open already"
    configure("json", "info", stream=stream)
    for number in range(1000):
        says(refused, number, at=1_000_000.0)
        get_logger().info("call.refused", number=number)
    says("another text", at=1_000_000.0)
    written = lines(stream)
    assert sum("refused:" in str(line.get("message")) for line in written) == LIBRARY_LINES_MAX
    assert sum(line["event"] == "call.refused" for line in written) == 1000
    assert written[-1]["message"] == "another text"
    for number in (7, 8):
        says(refused, number, at=1_000_000.0 + LIBRARY_LINES_S)
    more = 1000 - LIBRARY_LINES_MAX
    assert [line["message"] for line in lines(stream)[-2:]] == [
        f"connection refused: 7 are open already ({more} more before this one were not logged)",
        "connection refused: 8 are open already",
    ]


def test_texts_of_a_library_that_are_ever_new_are_not_kept() -> None:
    configure("json", "info", stream=io.StringIO())
    (counting,) = logging.getLogger().handlers[0].filters
    for number in range(10 * LIBRARY_TEXTS_MAX):
        says(f"text {number}", at=1_000_000.0)
    assert len(vars(counting)["_said"]) <= LIBRARY_TEXTS_MAX


@pytest.mark.parametrize("form", ["json", "console"])
def test_a_traceback_takes_no_terminal_over(form: LogFormat) -> None:
    stream = io.StringIO()
    configure(form, "info", stream=stream)
    try:
        raise OSError("no such file: \x1b[2J\x9b\u202e")
    except OSError as exc:
        get_logger().error("actor.failed", actor="one", exc_info=exc)
    assert [line for line in stream.getvalue().splitlines() if not line.isprintable()] == []
    assert "x1b[2J" in stream.getvalue()
