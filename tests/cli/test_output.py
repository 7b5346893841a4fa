"""How wide the output is: of a terminal, of a pipe, and with COLUMNS."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import sys
import termios
from collections.abc import Iterator

import pytest

from gpuactors.cli import commands
from gpuactors.cli.output import UNFOLDED, columns_of, folded, wants_colour
from gpuactors.observe.stdout import StdoutError


@pytest.fixture
def terminal() -> Iterator[int]:
    """A terminal of 120 columns."""
    ours, its = os.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 120, 0, 0))
    yield its
    os.close(its)
    os.close(ours)


def test_a_pipe_has_no_width_and_a_terminal_has_its_own(terminal: int) -> None:
    read, write = os.pipe()
    with os.fdopen(write, "w") as pipe, os.fdopen(read), os.fdopen(os.dup(terminal), "w") as screen:
        assert columns_of(pipe, {}) == UNFOLDED
        assert columns_of(screen, {}) == 120
        assert columns_of(None, {}) == UNFOLDED
        for out in (pipe, screen):
            assert columns_of(out, {"COLUMNS": "77"}) == 77
            assert columns_of(out, {"COLUMNS": "3"}) == 40
            assert (
                columns_of(out, {"COLUMNS": "-1"})
                == columns_of(out, {"COLUMNS": "wide"})
                == columns_of(out, {})
            )


def test_colours_are_for_a_terminal_that_has_some_and_no_color_switches_them_off(terminal: int) -> None:
    read, write = os.pipe()
    with os.fdopen(write, "w") as pipe, os.fdopen(read), os.fdopen(os.dup(terminal), "w") as screen:
        assert wants_colour(screen, {"TERM": "xterm"})
        assert not wants_colour(screen, {"TERM": "xterm", "NO_COLOR": "0"})
        assert not wants_colour(screen, {"TERM": "dumb"})
        assert not wants_colour(screen, {})
        assert not wants_colour(pipe, {"TERM": "xterm"})
        assert not wants_colour(None, {"TERM": "xterm"})


def test_a_text_without_a_width_is_one_line_and_a_word_is_never_broken() -> None:
    text = "IOMMU group 47 " * 40
    assert folded(text, UNFOLDED) == [text.strip()]
    assert folded("a " + "x" * 50 + "-y b", 10, "1 ", "  ") == ["1 a", "  " + "x" * 50 + "-y", "  b"]


@pytest.mark.parametrize("words", [["simulate", "--list"], ["config", "schema"]])
def test_a_reader_that_closes_the_pipe_is_no_failure(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def closed(*_: object, **__: object) -> None:
        raise StdoutError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr("sys.argv", ["gpuactors", *words])
    monkeypatch.setattr("click.echo", closed)
    monkeypatch.setattr("gpuactors.observe.stdout.opened", lambda: sys.stdout)
    monkeypatch.setattr("gpuactors.observe.stdout.give_up", lambda: None)
    with pytest.raises(SystemExit) as ended:
        commands.main()
    assert (ended.value.code, capsys.readouterr().err) == (141, "")
