"""`gpuactors run` takes plain words itself, as click would, and leaves every other command line to click."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from gpuactors.cli import commands, start
from gpuactors.config import DECLARATIONS


def by_click(words: Sequence[str]) -> dict[str, object]:
    """What click hands over that was given."""
    parsed = commands.cli.commands["run"].make_context("run", list(words)).params
    return {key: value for key, value in parsed.items() if value not in (None, ())}


EACH = [
    *(f"{setting.flag}={'a=b' if setting.is_list else 'x=y'}" for setting in DECLARATIONS.values()),
    *(word for setting in DECLARATIONS.values() for word in (setting.flag, "value")),
]
"""Every setting in both spellings."""


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--select=vendor=10de", "--dra=on", "--select", "!address=0000:23:00.0", "--select=class=03"],
        ["--dra=on", "--dra", "off"],
        ["--node-name=", "--config", "x.toml", "--http-address=[::1]:9400"],
        EACH,
    ],
)
def test_plain_words_are_taken_as_click_takes_them(words: list[str]) -> None:
    assert start.flags_of(words) == by_click(words)


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["-h"],
        ["--help-settings"],
        ["--dr=on"],
        ["--dra"],
        ["--dra", "--config=x"],
        ["--dra=on", "on"],
        ["--", "--dra=on"],
        ["--dra", "-on"],
        ["--no-such-setting=1"],
        [""],
        ["-"],
    ],
)
def test_every_other_command_line_is_clicks(words: list[str]) -> None:
    assert start.flags_of(words) is None
