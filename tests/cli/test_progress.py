"""The line that says what a command waits for."""

from __future__ import annotations

import io

import pytest
import trio

from gpuactors.cli.progress import PROGRESS_SILENT_S, Progress
from gpuactors.ports.errors import HostError
from tests.support.written_terminal import WrittenTerminal


async def slow() -> str:
    await trio.sleep(3.5 * PROGRESS_SILENT_S)
    return "read"


async def broken() -> str:
    await slow()
    raise HostError("unreadable")


async def test_what_takes_long_is_named_with_the_seconds_and_taken_back(
    autojump_clock: trio.testing.MockClock,
) -> None:
    out = WrittenTerminal()
    assert await Progress(out).during("the host", slow) == "read"
    assert out.getvalue() == (
        "\r\x1b[Kgpuactors: reading the host … 1 s"
        "\r\x1b[Kgpuactors: reading the host … 1 s"
        "\r\x1b[Kgpuactors: reading the host … 2 s\r\x1b[K"
    )


async def test_what_fails_fails_as_without_it(autojump_clock: trio.testing.MockClock) -> None:
    out = WrittenTerminal()
    with pytest.raises(HostError, match="unreadable"):
        await Progress(out).during("the host", broken)
    assert out.getvalue().endswith("\r\x1b[K")


async def test_what_is_quick_says_nothing() -> None:
    out = WrittenTerminal()
    await Progress(out).during("the host", trio.lowlevel.checkpoint)
    assert out.getvalue() == ""


async def test_where_there_is_no_terminal_nothing_is_said(autojump_clock: trio.testing.MockClock) -> None:
    out = io.StringIO()
    for progress in (Progress(out), Progress(None)):
        assert await progress.during("the host", slow) == "read"
    assert out.getvalue() == ""


def test_a_line_is_never_folded() -> None:
    out = WrittenTerminal()
    Progress(out).show("x" * 200)
    assert out.getvalue() == "\r\x1b[K" + "x" * 79


def test_a_terminal_that_is_gone_is_no_failure() -> None:
    class Gone(io.StringIO):
        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> int:
            raise OSError("gone")

    Progress(Gone()).show("x")
