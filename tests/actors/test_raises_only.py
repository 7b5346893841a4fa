"""The boundary of one request: a bug ends the request, cancellation and what is no `Exception` pass."""

from __future__ import annotations

import errno
import os
from functools import partial

import pytest
import trio

from gpuactors.actors.raises_only import raises_only
from gpuactors.core.values.claim import ActFault
from gpuactors.ports.claims import ActError
from gpuactors.ports.errors import HostError, HostShortError
from tests.support.log_lines import logged


@pytest.mark.parametrize(
    "bug", [RecursionError(), KeyError("\ud800"), ValueError("x" * 10_000), OSError(5, "I/O")]
)
def test_a_bug_is_logged_with_its_traceback_and_is_the_requests_own_error(bug: Exception) -> None:
    with logged() as lines, pytest.raises(HostError) as caught, raises_only(HostError, "reader"):
        raise bug
    assert type(bug).__name__ in str(caught.value)
    assert str(caught.value).isascii() or "…" in str(caught.value)
    assert len(str(caught.value)) < 500
    (line,) = lines
    assert (line.event, line.level, line.fields["actor"], line.exception) == (
        "actor.failed",
        "error",
        "reader",
        bug,
    )


def test_the_ports_own_error_passes_as_it_is_and_unlogged() -> None:
    expected = HostShortError("no descriptor")
    with logged() as lines, pytest.raises(HostShortError) as caught, raises_only(HostError, "reader"):
        raise expected
    assert (caught.value, lines) == (expected, [])


def test_an_error_that_needs_more_than_a_sentence_is_made_by_its_maker() -> None:
    refused = partial(ActError, ActFault.REFUSED)
    with logged(), pytest.raises(ActError) as caught, raises_only(ActError, "worker", refused):
        raise KeyError("x")
    assert caught.value.fault is ActFault.REFUSED


def test_a_shortage_is_no_bug() -> None:
    short = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    with (
        logged() as lines,
        pytest.raises(HostError, match="no file descriptors left"),
        raises_only(HostError, "reader"),
    ):
        raise short
    assert lines == []


@pytest.mark.parametrize("passing", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_is_no_exception_passes(passing: type[BaseException]) -> None:
    with logged() as lines, pytest.raises(passing), raises_only(HostError, "reader"):
        raise passing
    assert lines == []


async def test_cancellation_passes() -> None:
    with logged() as lines, trio.move_on_after(0) as scope, raises_only(HostError, "reader"):
        await trio.sleep_forever()
    assert scope.cancelled_caught
    assert lines == []
