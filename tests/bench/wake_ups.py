"""Runs gpuactors and counts what wakes its event loop: which task, in which function it waited.

`python -m tests.bench.wake_ups FILE QUIET_S -- run …`: the counts from QUIET_S on are written to FILE at the end, as
JSON: the seconds, and how often the loop woke for each function. A wake-up with several tasks counts for the first.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any, Final, final

import trio

UNKNOWN: Final = "trio itself"


@final
class WakeUps(trio.abc.Instrument):
    """Counts; writes at the end of the run."""

    def __init__(self, to: Path, quiet_s: float) -> None:
        self._to = to
        self._quiet_s = quiet_s
        self._began = 0.0
        self._slept = False
        self._counts = Counter[str]()

    def before_run(self) -> None:
        self._began = trio.current_time() + self._quiet_s

    def after_io_wait(self, timeout: float) -> None:
        self._slept = timeout > 0 and trio.current_time() >= self._began

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if self._slept:
            self._slept = False
            self._counts[_where(task)] += 1

    def after_run(self) -> None:
        seconds = trio.current_time() - self._began
        self._to.write_text(json.dumps({"seconds": seconds, "counts": self._counts}))


def _where(task: trio.lowlevel.Task) -> str:
    """The innermost function of ours that waits, and its caller: `use_poller.run > requests.wait`."""
    ours = [name for frame, _ in task.iter_await_frames() if (name := _name_of(frame))]
    return " > ".join(ours[-2:]) or f"{UNKNOWN} ({task.name})"


def _name_of(frame: FrameType) -> str:
    module = str(frame.f_globals.get("__name__", ""))
    if not module.startswith("gpuactors."):
        return ""
    return f"{module.removeprefix('gpuactors.')}.{frame.f_code.co_name}"


def main() -> None:
    """Does not return."""
    to, quiet_s, dashes, *words = sys.argv[1:]
    assert dashes == "--", "python -m tests.bench.wake_ups FILE QUIET_S -- WORDS…"
    counting, original = WakeUps(Path(to), float(quiet_s)), trio.run

    def run(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs | {"instruments": [counting]})

    setattr(trio, "run", run)  # noqa: B010  (mypy knows its type)
    sys.argv = ["gpuactors", *words]
    from gpuactors.__main__ import main as gpuactors

    gpuactors()


if __name__ == "__main__":
    main()
