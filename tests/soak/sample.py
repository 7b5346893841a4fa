"""One sample of what the daemon of a soak takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sample:
    """At one time."""

    at_s: float
    """Since the soak began."""
    process: int
    """The daemon's PID."""
    rss_mib: float
    private_mib: float
    """What would be free without it; less while a child that writes to sysfs shares its pages."""
    descriptors: int
    threads: int
    journal_mib: float
    requests: Mapping[str, int]
    """Of the API server since the soak began, by kind."""
