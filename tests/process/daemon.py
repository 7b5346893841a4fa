"""The daemon as a process of its own: run as an operator runs it, watched through its log and its exit code.

Most are forked with their modules loaded (`tests/support/forked.py`), which costs a tenth of a start.

Every wait has a deadline and polls a condition. Must not import gpuactors: all that these tests know of the daemon is
what a process shows to the outside.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from types import TracebackType
from typing import IO, Any, Final

from tests.support import forked
from tests.support.forked import Forked
from tests.support.patience import patient

WAIT_S: Final = patient(20.0)
"""Far above anything that is waited for here, on a machine that is busy with something else as well."""

POLL_S: Final = 0.01

EXIT_S: Final = patient(15.0)
"""From a signal to the end of the process; the daemon's own bound is 8 s."""

LogLine = Mapping[str, Any]


def eventually(condition: Callable[[], bool], what: str, within_s: float = WAIT_S) -> None:
    """Waits until `condition` is true. Raises TimeoutError that says `what` did not come."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come within {within_s:g} s")
        time.sleep(POLL_S)


def clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment without settings of gpuactors or a width (80 in workers of pytest), and `extra`."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("GPUACTORS_") and name not in ("NODE_NAME", "COLUMNS")
    }
    return {**kept, **(extra or {})}


def gpuactors(
    *words: str,
    env: Mapping[str, str] | None = None,
    stdout: int | IO[str] | None = None,
    bounds: Mapping[str, float] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs `python -m gpuactors …` to its end, forked; its output is in what is returned, unless `stdout` takes it.
    `bounds`: as for `DaemonProcess`."""
    return forked.run(words, env=clean_environment(env), stdout=stdout, bounds=bounds)


PATIENT_LOOKS: Final = {"limits.INSPECTION_DEADLINE_S": patient(5.0), "limits.CALL_DEADLINE_S": patient(12.0)}
"""Bounds of a daemon whose inspections hang for as long as a test needs to do something beside them."""

PATIENT_END: Final = {"limits.DRAIN_S": patient(2.0), "daemon.app.STOP_DEADLINE_S": patient(8.0)}
"""Bounds of a daemon that may finish a call when it ends, however slowly a test does what that call waits for."""


class DaemonProcess:
    """`python -m gpuactors run …` for as long as the context is open.

    Leaving the context ends it with SIGTERM, unless it was ended before, and checks that it went well: exit code 0,
    nothing but JSON lines in its output, and no line at level error except the events in `tolerated` (every other one
    would be a bug: an actor that crashed, a handler that failed).
    """

    def __init__(
        self,
        *words: str,
        env: Mapping[str, str] | None = None,
        tolerated: Collection[str] = (),
        bounds: Mapping[str, float] | None = None,
        planted: str = "",
        starts: bool = False,
    ) -> None:
        """`bounds`: other values for some of the daemon's own, by module and name. `planted`: Python that runs
        before the daemon's imports. With it, or with `starts`, a process starts; else it is forked."""
        assert not (bounds and (planted or starts)), "those of a process that starts are its own"
        self._bounds = bounds
        self._planted = planted
        self._starts = starts or bool(planted)
        self._words = words
        self._env = clean_environment(env)
        self._tolerated = frozenset(tolerated)
        self._changed = threading.Condition()
        self._lines: list[LogLine] = []
        self._stray: list[str] = []
        self._killed = False

    def __enter__(self) -> DaemonProcess:
        words = ["run", *self._words]
        self._process: Forked | subprocess.Popen[str]
        if not self._starts:
            self._process = Forked(words, env=self._env, bounds=self._bounds)
        else:
            program = f"{self._planted}\nfrom gpuactors.__main__ import main\nmain()\n"
            self._process = subprocess.Popen(
                [sys.executable, "-c", program, *words],
                env=self._env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
        self._reader = threading.Thread(target=self._read, name="daemon's log", daemon=True)
        self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None and not self._killed:
                if self._process.poll() is None:
                    self._process.send_signal(signal.SIGTERM)
                assert self.wait_exit() == 0, "the daemon did not end well"
                self._check_log()
        except BaseException:
            self._show_log()
            raise
        else:
            if error is not None:
                self._show_log()
        finally:
            self._process.kill()
            self._process.wait()
            self._reader.join(timeout=EXIT_S)

    # --- what it shows ------------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def descriptors(self) -> int:
        """How many files and sockets it has open, without the journal's, which opens when there is time."""
        count = 0
        for descriptor in os.listdir(f"/proc/{self.pid}/fd"):
            with suppress(FileNotFoundError):  # closed meanwhile
                count += not os.readlink(f"/proc/{self.pid}/fd/{descriptor}").endswith(".jsonl")
        return count

    @property
    def log(self) -> tuple[LogLine, ...]:
        """Its log so far."""
        with self._changed:
            return tuple(self._lines)

    def mark(self) -> int:
        """A moment in the log, for `after`."""
        with self._changed:
            return len(self._lines)

    def wait_event(
        self, event: str, *, has: Collection[str] = (), after: int = 0, within_s: float = WAIT_S, **fields: object
    ) -> LogLine:  # fmt: skip
        """The first log line named `event` with these fields, and each of `has` somewhere in its reason.

        Raises TimeoutError, also when the process ended without saying it.
        """
        deadline = time.monotonic() + within_s
        with self._changed:
            while True:
                for line in self._lines[after:]:
                    reason = str(line.get("reason", ""))
                    same = all(line.get(key) == value for key, value in fields.items())
                    if line["event"] == event and same and all(part in reason for part in has):
                        return line
                wait_s = deadline - time.monotonic()
                if wait_s <= 0 or self._process.poll() is not None:
                    raise TimeoutError(f"the daemon did not log {event} with {fields} and {list(has)}")
                self._changed.wait(timeout=min(wait_s, 0.5))

    def assert_alive(self) -> None:
        """It is still the process that was started."""
        assert self._process.poll() is None, f"the daemon ended with code {self._process.returncode}"

    # --- its end ------------------------------------------------------------------------------------------

    def signal(self, number: signal.Signals) -> None:
        """Sends it a signal."""
        if number is signal.SIGKILL:
            self._killed = True
        self._process.send_signal(number)

    def wait_exit(self, within_s: float = EXIT_S) -> int:
        """Its exit code. Raises `subprocess.TimeoutExpired`."""
        code = self._process.wait(timeout=within_s)
        self._reader.join(timeout=EXIT_S)
        return code

    def _check_log(self) -> None:
        assert not self._stray, f"not a line of JSON: {self._stray[:5]}"
        wrong = [
            line for line in self.log if line["level"] == "error" and line["event"] not in self._tolerated
        ]
        assert not wrong, f"the daemon logged errors: {wrong[:3]}"

    def _show_log(self) -> None:
        """Into the test's output, which is shown when it fails."""
        with suppress(subprocess.TimeoutExpired):  # where it is dying, its last words are the most telling
            self.wait_exit(within_s=1.0)
        print(f"--- log of the daemon (process {self.pid}, exit code {self._process.poll()})")
        for line in self.log[-80:]:
            print(json.dumps(line, ensure_ascii=False))
        for text in self._stray[-40:]:
            print(f"not JSON: {text}")

    def _read(self) -> None:
        assert self._process.stdout is not None
        for text in self._process.stdout:
            try:
                line = json.loads(text)
                line["event"], line["level"], line["timestamp"]
            except (ValueError, TypeError, KeyError):
                line = None
            with self._changed:
                if line is None:
                    self._stray.append(text.rstrip())
                else:
                    self._lines.append(line)
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()
