"""Replays a journal: what `gpuactors replay` calls."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Final

from gpuactors.replay.page import Page
from gpuactors.replay.play import Moment, play, until, wall_seconds
from gpuactors.replay.reading import Damage, files_to_read
from gpuactors.replay.text import Tally, Text, as_json

EXIT_SAME: Final = 0
EXIT_DIFFERS: Final = 1


class PageError(Exception):
    """The page cannot be written; the text says where and why."""


class UntilError(Exception):
    """What was given for `--until` is no time; the text says what would be."""


def replay(
    path: str,
    *,
    end: str | None,
    only_differences: bool,
    html: str | None,
    json_lines: bool,
    echo: Callable[[str], None],
) -> int:
    """Replays and shows a journal; returns the exit code: 1 if anything differs from what was recorded, else 0.

    Raises `JournalError`, `UntilError` and `PageError`.
    """
    files, damaged = files_to_read(path)
    first_wall = wall_seconds(files[0].header)
    moments = until(_with(damaged, play(files)), None if end is None else end_wall(end, first_wall))
    tally, text, page = Tally(), Text(only_differences), Page() if html is not None else None
    for moment in moments:
        tally.count(moment)
        if page is not None:
            page.add(moment)
        elif json_lines:
            if not only_differences or not hasattr(moment, "differences") or moment.differences:
                echo(as_json(moment, first_wall))
        else:
            for line in text.lines(moment):
                echo(line)
    if page is not None and html is not None:
        _write(html, page.html(tally))
        echo(f"{html}: {tally}")
    elif not json_lines:
        for line in text.rest():
            echo(line)
        echo(str(tally))
    return EXIT_DIFFERS if tally.differing else EXIT_SAME


def end_wall(text: str, first_wall: float) -> float:
    """Seconds since the beginning, or an ISO 8601 time (UTC unless it says otherwise), as a time of day.

    Raises `UntilError`.
    """
    try:
        return first_wall + float(text)
    except ValueError:
        pass
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise UntilError(
            f"{text!r} is neither seconds since the beginning nor a time such as 2026-11-21T06:15:57"
        ) from None
    return (when if when.tzinfo is not None else when.replace(tzinfo=UTC)).timestamp()


def _with(damaged: list[Damage], moments: Iterator[Moment]) -> Iterator[Moment]:
    yield from damaged
    yield from moments


def _write(path: str, text: str) -> None:
    """At once or not at all: a page that is half written looks like a page. Raises `PageError`."""
    beside = f"{path}.part"
    try:
        with open(beside, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(beside, path)
    except OSError as exc:
        raise PageError(f"cannot write {path}: {exc.strerror}") from None
