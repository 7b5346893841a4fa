"""Replays a journal: what `gpuactors replay` calls."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from itertools import chain
from typing import Final, NamedTuple, Protocol

from gpuactors import limits
from gpuactors.core.kinds.table import is_key
from gpuactors.core.values.domain import device_of
from gpuactors.core.values.model import DeviceKey
from gpuactors.core.values.quote import quoted, quoted_id
from gpuactors.core.values.selector import full_address
from gpuactors.process.plain_files import replace_plain
from gpuactors.replay.choice import Device, files_within, since
from gpuactors.replay.domain_choice import Chosen, DeviceOfDomains
from gpuactors.replay.play import Moment, play, until, wall_seconds
from gpuactors.replay.progress import Line, ReplayProgress
from gpuactors.replay.reading import Meter, files_to_read
from gpuactors.replay.text import Tally, Text, as_json

EXIT_SAME: Final = 0
EXIT_DIFFERS: Final = 1
STANDARD_OUTPUT: Final = "-"


class Page(Protocol):
    """Shows a replay to people. The page is not part of the daemon (`gpuactors_simulation.replay_page`)."""

    def add(self, moment: Moment) -> None:
        """Take the next moment of the replay."""

    def html(self, tally: Tally) -> str:
        """Return the page of all moments."""


class PageFile(NamedTuple):
    """The path of a page to write, or `STANDARD_OUTPUT`, and the function that makes one of the chosen device, or of
    all."""

    path: str
    page_of: Callable[[Chosen | None], Page]


class PageError(Exception):
    """The page cannot be written; the text names where and why."""


class TimeError(Exception):
    """The value of `--since` or `--until` is no time; the text names the formats."""

    def __init__(self, option: str, text: str) -> None:
        self.option = option
        super().__init__(
            f"{quoted_id(text)!r} is neither seconds since the beginning nor a time such as 2026-11-21T06:15:57"
        )


class DeviceError(Exception):
    """The value of `--device` is no device of this journal; the text names the reason."""


def replay(
    path: str,
    *,
    end: str | None,
    only_differences: bool,
    page_file: PageFile | None,
    json_lines: bool,
    echo: Callable[[str], None],
    begin: str | None = None,
    device: str | None = None,
    progress: Line | None = None,
) -> int:
    """Replay and show a journal; return the exit code: 1 if anything differs from what was recorded, else 0.

    `begin` and `end` are times as `wall_of` takes them; `device` is a PCI address, or the name of a device of compute
    domains (`channel-0`); with `page_file` a page is written instead of lines; `progress` shows how far it has come.
    Raises `JournalError`, `TimeError`, `DeviceError` and `PageError`.
    """
    files, damaged = files_to_read(path)
    first_wall = wall_seconds(files[0].header)
    begins = None if begin is None else wall_of(begin, first_wall, "--since")
    ends = None if end is None else wall_of(end, first_wall, "--until")
    files = files_within(files, begins, ends)
    selected = None if device is None else chosen(device)
    tally, text = Tally(), Text(only_differences, first_wall)
    page = page_file.page_of(selected) if page_file is not None else None
    meter = Meter()
    moments: Iterable[Moment] = since(
        until(chain(damaged, play(files, meter, end=math.inf if ends is None else ends)), ends), begins
    )
    if progress is not None:
        line = ReplayProgress(meter, sum(os.path.getsize(file.path) for file in files), progress)
        moments, echo = line.over(moments), _after(progress.clear, echo)
    for moment in moments:
        tally.count(moment)
        if page is not None:
            page.add(moment)
        elif selected is not None and not selected.concerns(moment):
            pass
        elif json_lines:
            if not only_differences or not hasattr(moment, "differences") or moment.differences:
                echo(as_json(moment, first_wall))
        else:
            for text_line in text.lines(moment):
                echo(quoted(text_line, limits.LOG_TEXT_MAX_CHARS))
    if selected is not None and not selected.is_in_journal:
        names = "`lspci -D` names the devices of a node"
        if isinstance(selected, DeviceOfDomains):
            names = "its ResourceSlice names the devices of compute domains"
        raise DeviceError(f"{selected} is in no state of this journal; {names}")
    if page is not None and page_file is not None:
        content = page.html(tally).encode(errors="backslashreplace")  # a journal may have half a character
        if page_file.path == STANDARD_OUTPUT:
            echo(content.decode())
        else:
            _write(page_file.path, content)
            echo(f"{quoted(page_file.path)}: {tally}")
    elif not json_lines:
        for text_line in text.quiet_lines():
            echo(text_line)
        echo(str(tally))
    return EXIT_DIFFERS if tally.differing else EXIT_SAME


def wall_of(text: str, first_wall: float, option: str) -> float:
    """Return seconds since the beginning, or an ISO 8601 time (UTC if it has no offset), as a time of day.

    Raises `TimeError`.
    """
    try:
        wall = first_wall + float(text)
    except ValueError:
        try:
            when = datetime.fromisoformat(text)
            wall = (when if when.tzinfo is not None else when.replace(tzinfo=UTC)).timestamp()
        except (ValueError, OverflowError):
            raise TimeError(option, text) from None
    if not math.isfinite(wall):
        raise TimeError(option, text)
    return wall


def chosen(text: str) -> Chosen:
    """Return the device of this PCI address or other key, or the device of compute domains of this name. Raises
    `DeviceError`."""
    if (domain_device := device_of(text)) is not None:
        return DeviceOfDomains(domain_device)
    key = full_address(text) or text
    if not is_key(key):
        raise DeviceError(
            f"{quoted_id(text)} is neither a PCI address, such as 0000:23:00.0 or 23:00.0, nor a device of compute "
            "domains, such as channel-0"
        )
    return Device(DeviceKey(key))


def _after(clear: Callable[[], None], echo: Callable[[str], None]) -> Callable[[str], None]:
    def cleared(line: str) -> None:
        clear()
        echo(line)

    return cleared


def _write(path: str, content: bytes) -> None:
    """Write the page whole or not at all: a partial page cannot be told from a whole one. Raises `PageError`."""
    try:
        replace_plain(path, content, 0o644)
    except (OSError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else exc
        raise PageError(
            f"cannot write {quoted(path)}: {reason}; choose another file by --html, or - for standard output"
        ) from None
