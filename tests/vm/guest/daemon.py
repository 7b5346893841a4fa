"""The daemon as a real process in the guest, and what the kernel and its log say of it.

Must not import gpuactors: it is started, watched and ended as an operator would.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Final

from gpuactors.observe.journal import DIRECTORY
from tests.vm.guest.runner import eventually
from tests.vm.guest.uevents import KERNEL_GROUP, NETLINK_KOBJECT_UEVENT

CHECKOUT: Final = Path(__file__).resolve().parents[3]
"""Its own `src` is what is tested, wherever the virtual environment has gpuactors from."""

JOURNAL_SUFFIX: Final = ".journal"
"""Of a daemon's journal among the artifacts, beside its log."""

START_TIMEOUT_S: Final = 60.0
"""Importing the daemon's 490 modules takes 6 to 8 s under emulation, twice that on a busy machine."""

STOP_TIMEOUT_S: Final = 20.0
"""From SIGTERM to the exit status. The daemon's own bound for stopping is shorter."""


@dataclass(slots=True)
class DaemonProcess:
    """`python -m gpuactors run …`, its log and its journal going to the artifacts.

    The state directory is on the guest's own disk, as the artifacts' filesystem (9p) carries no unix socket.
    """

    process: subprocess.Popen[bytes]
    log_file: Path
    state_dir: Path

    @classmethod
    def start(cls, arguments: Sequence[str], log_file: Path, *, prefix: Sequence[str] = ()) -> DaemonProcess:
        """Start it with `arguments` after `run`; the log is in JSON whatever they say.

        `prefix` is a command that ends by becoming the daemon, such as `setpriv …` or `unshare …`.
        """
        state_dir = Path("/run") / f"gpuactors-{log_file.stem}"
        log: IO[bytes]
        with log_file.open("wb") as log:
            process = subprocess.Popen(
                [
                    *(*prefix, sys.executable, "-m", "gpuactors", "run", *arguments),
                    *("--state-dir", str(state_dir), "--log-format", "json"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join((str(CHECKOUT / "src"), str(CHECKOUT)))},
            )
        return cls(process, log_file, state_dir)

    def __enter__(self) -> DaemonProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        journal = self.state_dir / DIRECTORY
        if journal.is_dir():
            shutil.copytree(journal, self.log_file.with_suffix(JOURNAL_SUFFIX))
        if error is not None:
            print(
                f"end of {self.log_file}:",
                *self.log_file.read_text().splitlines()[-40:],
                sep="\n",
                flush=True,
            )

    def said(self, event: str) -> list[dict[str, object]]:
        """The log lines of one event name, e.g. `host.scanned`."""
        lines: list[dict[str, object]] = []
        for line in self.log_file.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                record = json.loads(line)
            except ValueError:  # half a line, or a traceback of an interpreter that could not start
                continue
            if record.get("event") == event:
                lines.append(record)
        return lines

    def check_alive(self) -> None:
        """Raise unless the very process that was started still runs."""
        status = self.process.poll()
        if status is not None:
            raise AssertionError(f"the daemon ended with {status}")

    def wait_until_it_listens(self) -> None:
        """Wait for its first full scan and for its uevent socket, as the kernel lists it. Raises TimeoutError.

        Only what happens afterwards can tell a daemon that hears events from one that found things at its start.
        """

        def listening() -> bool:
            self.check_alive()
            return bool(self.said("host.scanned")) and hears_uevents(self.process.pid)

        eventually("the daemon's first scan and its uevent socket", listening, timeout_s=START_TIMEOUT_S)

    def terminate(self) -> int:
        """SIGTERM, and the exit status. Raises subprocess.TimeoutExpired."""
        self.check_alive()
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=STOP_TIMEOUT_S)


def hears_uevents(pid: int) -> bool:
    """Whether the process has a socket in the kernel's uevent group (the netlink sockets of its network namespace; its
    first one of a protocol has the process id as port, netlink_autobind)."""
    for line in Path(f"/proc/{pid}/net/netlink").read_text(encoding="ascii").splitlines()[1:]:
        _, protocol, port, groups, *_ = line.split()
        if int(protocol) == NETLINK_KOBJECT_UEVENT and int(port) == pid and int(groups, 16) & KERNEL_GROUP:
            return True
    return False
