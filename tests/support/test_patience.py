"""Bounds follow the machine's speed."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.support import patience
from tests.support.patience import patient, slowness


@pytest.fixture(autouse=True)
def measured_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    slowness.cache_clear()
    yield
    slowness.cache_clear()


def test_a_machine_as_quick_as_usual_waits_as_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_TURN_S", "1000")
    assert slowness() == 1.0
    assert patient(3.0) == 3.0


def test_a_slower_one_waits_longer_by_as_much_and_twice_that_for_what_may_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = iter([100.0, 100.0 + 5 * patience.TURNS * patience.QUIET_TURN_S])
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    assert slowness() == pytest.approx(5.0)
    assert patient(3.0) == pytest.approx(30.0)


def test_so_does_one_that_others_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_TURN_S", "1000")
    monkeypatch.setattr(os, "getloadavg", lambda: (14.0, 1.0, 1.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert patient(1.0) == 14.0
