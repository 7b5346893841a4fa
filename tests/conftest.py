"""What every test runs under: the daemon's log goes nowhere unless a test sets it up for itself."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from gpuactors.observe import log


@pytest.fixture(scope="session", autouse=True)
def quiet_log() -> Iterator[None]:
    """Thousands of simulated daemons would write millions of lines; what they say is checked as values."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        log.configure("json", "error", stream=nowhere)
        yield
