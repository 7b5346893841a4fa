"""What every test runs under: the daemon's log goes nowhere unless a test sets it up for itself."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from gpuactors.core.values import memo
from gpuactors.observe import log
from tests.support.patience import patient

# No test judges how long something takes: the machine may be busy, and a fresh clone makes tables of Unicode first.
# Every run draws the same examples, so that a change is judged by itself and not by luck; more are drawn by hand.
settings.register_profile(
    "gpuactors", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("gpuactors")


@pytest.fixture(scope="session", autouse=True)
def quiet_log() -> Iterator[None]:
    """Thousands of simulated daemons would write millions of lines; what they say is checked as values."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        log.configure("json", "error", stream=nowhere)
        yield


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    """A test may replace a function, and count calls: no result is from a test before it."""
    memo.forget()
    yield
    memo.forget()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A test that hangs is ended after the time in pyproject.toml, on a slow machine after more of it."""
    limit_s = patient(float(config.getini("timeout")))
    for item in items:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(limit_s))
