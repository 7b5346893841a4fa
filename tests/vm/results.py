"""What became of a scenario on a kernel: `result.json` among its artifacts.

The guest writes its steps, its figures and what it raised; the host adds the verdict, because what decides is seen out
here: the guest's exit status, and whether its journals replay.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

FILE: Final = "result.json"

PASSED: Final = "passed"
FAILED: Final = "failed"
NOT_RUN: Final = "not run"


@dataclass(frozen=True, slots=True)
class Result:
    """A verdict with its reason (None for a scenario that passed), and what was measured.

    `release` is the kernel's (`uname -r`), `at` the day (UTC), `scenario_s` the time from the guest's ready marker to
    its end; None where nothing ran.
    """

    outcome: str
    why: str | None = None
    release: str | None = None
    qemu: str | None = None
    at: str = ""
    boot_s: float | None = None
    scenario_s: float | None = None
    figures: Mapping[str, object] = field(default_factory=dict)


def keep(artifacts: Path, **verdict: object) -> None:
    """Add the host's part to what the guest wrote."""
    known = {**_read(artifacts), "at": datetime.now(UTC).date().isoformat(), **verdict}
    (artifacts / FILE).write_text(json.dumps(known, indent=2) + "\n", encoding="utf-8")


def load(artifacts: Path) -> Result | None:
    """The last run's result; None where there was none. A run without a verdict was cut short: it failed."""
    if not artifacts.is_dir():
        return None
    known = {"outcome": FAILED, "why": "the run was cut short", **_read(artifacts)}
    return Result(**{name: known[name] for name in Result.__slots__ if name in known})


def guests_error(artifacts: Path) -> str | None:
    """What the scenario raised, as its exception's own words."""
    error = _read(artifacts).get("error")
    return str(error) if error else None


def _read(artifacts: Path) -> dict[str, Any]:
    try:
        known = json.loads((artifacts / FILE).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):  # the guest never came so far, or died while it wrote
        return {}
    return known if isinstance(known, dict) else {}
