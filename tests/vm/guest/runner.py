"""What runs in the guest: `python -m tests.vm.guest.runner SCENARIO KERNEL TIMEOUT_S` says that Python is there, runs
the scenario's `run(guest)` and ends with 0 if it returned, 1 if it raised.

A scenario is a module of this package with `MACHINE` (a `tests.vm.machine.Machine`) and `run(guest: Guest) -> None`.
The runner imports it only after the ready marker, so that a scenario's own imports count as its own time.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

from tests.support.patience import patient, slowness
from tests.vm.guest.qmp import QmpClient
from tests.vm.machine import LONGEST_STRETCH, QMP_PORT_NAME, READY_MARKER, Machine

ARTIFACTS: Final = Path("/run/artifacts")
"""Shared with the host: what is written here is in `var/vm/logs/<scenario>@<kernel>/` afterwards."""

LAST_WORDS_S: Final = 5.0
"""So long before the host ends a scenario that hangs, the stacks of all threads are on the console."""

POLL_PERIOD_S: Final = 0.1
"""Between two checks. One often reads a log that is on the host: a hundred of them a second take half of the guest,
while a daemon starts in it."""

T = TypeVar("T")


@dataclass(slots=True)
class Guest:
    """What a scenario has in hand: its machine, the kernel's name (`kernels.KERNELS`), QEMU's monitor, a place for
    artifacts, and named steps."""

    machine: Machine
    kernel: str
    qmp: QmpClient
    artifacts: Path = ARTIFACTS
    steps: list[dict[str, object]] = field(default_factory=list)
    figures: dict[str, object] = field(default_factory=dict)
    error: str | None = None

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """A named part of the scenario: its name is on the console before it begins, its time when it is done."""
        started = time.monotonic()
        print(f"[{_uptime_s():7.2f}] {name} …", flush=True)
        yield
        took_s = time.monotonic() - started
        self.steps.append({"name": name, "took_s": round(took_s, 4)})
        print(f"[{_uptime_s():7.2f}] {name}: ok, {took_s:.3f} s", flush=True)

    def save(self) -> None:
        """Write steps, figures and what the scenario raised to `result.json` among the artifacts; the host adds its
        verdict."""
        text = json.dumps({"steps": self.steps, "figures": self.figures, "error": self.error}, indent=2)
        (self.artifacts / "result.json").write_text(text + "\n", encoding="utf-8")


def eventually(what: str, check: Callable[[], T | None], *, timeout_s: float) -> T:
    """The first result of `check` that is neither None nor False. Raises TimeoutError that names `what`."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = check()
        if found is not None and found is not False:
            return found
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {timeout_s:g} s")
        time.sleep(POLL_PERIOD_S)


def _uptime_s() -> float:
    return float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])


def main(scenario: str, kernel: str, timeout_s: float) -> int:
    """Run one scenario; its exit status."""
    stretch = min(patient(1.0), LONGEST_STRETCH)
    print(
        f"[{_uptime_s():7.2f}] {READY_MARKER}: {scenario} on {kernel}, bounds times {stretch:.1f}", flush=True
    )
    # From the marker on, as the host counts: importing a scenario takes many seconds of its time.
    faulthandler.dump_traceback_later(max(1.0, timeout_s * stretch - LAST_WORDS_S))
    guest: Guest | None = None
    try:
        module = importlib.import_module(f"tests.vm.guest.{scenario}")
        guest = Guest(module.MACHINE, kernel, QmpClient.through_port(QMP_PORT_NAME))
        guest.figures["slowness of the machine"] = round(slowness(), 1)
        module.run(guest)
    except Exception as error:
        traceback.print_exc()
        if guest is not None:
            guest.error = traceback.format_exception_only(error)[-1].strip()
        return 1
    finally:
        if guest is not None:
            guest.save()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], float(sys.argv[3])))
