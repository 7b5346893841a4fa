"""The daemon as a real process in the guest, and what the kernel and its log say of it.

It runs in the DaemonSet's pod, as far as a process can (`pod.py`, `confined.py`). Must not import gpuactors: it is
started, watched and ended as an operator would.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Final

from tests.support.patience import patient
from tests.vm.guest.confined import new_pid_namespace
from tests.vm.guest.pod import CHECKOUT, MakePod, Pod, pod_for
from tests.vm.guest.runner import eventually
from tests.vm.guest.uevents import KERNEL_GROUP, NETLINK_KOBJECT_UEVENT

KUBELET_DIR_OPTION: Final = "--kubelet-dir"

JOURNAL_DIRECTORY: Final = "journal"
"""Below the state directory. Its name in the daemon is not imported: that would bring trio along, for seconds."""

JOURNAL_SUFFIX: Final = ".journal"
"""Of a daemon's journal among the artifacts, beside its log."""

CONFINED: Final = (sys.executable, "-S", "-m", "tests.vm.guest.confined")
"""Becomes the command that follows, in the pod that is its first argument."""

PYTHON_ENVIRONMENT: Final = {"PYTHONPATH": os.pathsep.join((str(CHECKOUT / "src"), str(CHECKOUT)))}
"""This checkout's own `src` is what is tested, wherever the virtual environment has gpuactors from."""

START_TIMEOUT_S: Final = patient(180.0)
"""Importing the daemon's 680 modules takes 13 to 24 s under emulation where a guest has both cores, and 60 s where two
daemons start and another guest runs beside them: dataclasses are made of generated code, which an emulator translates
each time."""

STOP_TIMEOUT_S: Final = patient(20.0)
"""From SIGTERM to the exit status. The daemon's own bound for stopping is shorter."""


@dataclass(slots=True)
class DaemonProcess:
    """`python -m gpuactors run …`, its log and its journal going to the artifacts. `process` is the daemon itself.

    The state directory is on the guest's own disk, as the artifacts' filesystem (9p) carries no unix socket.
    """

    process: subprocess.Popen[bytes]
    log_file: Path
    state_dir: Path

    @classmethod
    def start(
        cls,
        arguments: Sequence[str],
        log_file: Path,
        *,
        pod: MakePod | None = None,
        prefix: Sequence[str] | None = None,
        state_dir: Path | None = None,
        program: Sequence[str] = ("-m", "gpuactors"),
    ) -> DaemonProcess:
        """Start it with the DaemonSet's arguments and then these; the log is in JSON whatever they say.

        `--kubelet-dir` among them is where kubelet is on the node; the daemon sees it where the DaemonSet mounts it.
        `pod` is the pod it runs in, unless it is the one that deploy/README.md says these arguments need. With a
        `prefix` (a command that ends by becoming the daemon, such as `setpriv …`, or nothing) it runs in no pod.
        """
        state_dir = state_dir or Path("/run") / f"gpuactors-{log_file.stem}"
        entry_point = (sys.executable, *program)
        if prefix is not None:
            device_plugins = str(_without_kubelet_dir(arguments)[0] / "device-plugins")
            directories = ("--device-plugin-dir", device_plugins, "--state-dir", str(state_dir))
            own = ("run", *arguments, *directories, "--log-format", "json")
            process = _started((*prefix, *entry_point, *own), {**os.environ, **PYTHON_ENVIRONMENT}, log_file)
            return cls(process, log_file, state_dir)
        kubelet_dir, rest = _without_kubelet_dir(arguments)
        made = pod(kubelet_dir, state_dir) if pod is not None else pod_for(arguments, kubelet_dir, state_dir)
        for mount in made.mounts:  # those that kubelet would have made: its own, and DirectoryOrCreate
            Path(mount.source).mkdir(parents=True, exist_ok=True)
        if made.image is not None:
            entry_point = made.image.entry_point
        with nullcontext() if made.host_pid else new_pid_namespace():
            process = _started(
                (*CONFINED, made.specification, *entry_point, *made.arguments, *rest),
                environment_of(made),
                log_file,
            )
        return cls(process, log_file, state_dir)

    def __enter__(self) -> DaemonProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            if error is not None:  # where it is, if its log does not say
                print(f"the daemon: {where_it_is(self.process.pid)}", flush=True)
            self.process.kill()
            self.process.wait()
        journal = self.state_dir / JOURNAL_DIRECTORY
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

    def check_one_life(self) -> None:
        """Raise unless the log has one beginning, and no end by a bug."""
        assert len(self.said("daemon.started")) == 1, self.said("daemon.started")
        assert not self.said("daemon.died")

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


def environment_of(pod: Pod) -> dict[str, str]:
    """What a container's process has that runs this checkout: nothing of the scenario's own but what is Python's."""
    python = {name: value for name, value in os.environ.items() if name.startswith("PYTHON")}
    return {"PATH": os.environ["PATH"], **python, **PYTHON_ENVIRONMENT, **pod.environment}


def hears_uevents(pid: int) -> bool:
    """Whether the process has a socket in the kernel's uevent group (the netlink sockets of its network namespace; its
    first one of a protocol has as port what it is numbered in its PID namespace, netlink_autobind)."""
    number = number_inside(pid)
    for line in Path(f"/proc/{pid}/net/netlink").read_text(encoding="ascii").splitlines()[1:]:
        _, protocol, port, groups, *_ = line.split()
        if int(protocol) == NETLINK_KOBJECT_UEVENT and int(port) == number and int(groups, 16) & KERNEL_GROUP:
            return True
    return False


def number_inside(pid: int) -> int:
    """The process's number in its own PID namespace: 1 in a container, whose first process it is."""
    return int(status_of(pid)["NSpid"].split()[-1])


def where_it_is(pid: int) -> str:
    """What the process is, and what it waits for in the kernel."""
    command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    waits_in = Path(f"/proc/{pid}/wchan").read_text(encoding="ascii", errors="replace")
    return f"process {pid}, state {status_of(pid)['State']}, waits in {waits_in}: {command[:200]}"


def status_of(pid: int) -> dict[str, str]:
    """/proc/PID/status."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def mounts_of(pid: int) -> dict[str, list[str]]:
    """Where something is mounted, with the options of the mount itself; the uppermost where several are."""
    lines = Path(f"/proc/{pid}/mountinfo").read_text(encoding="utf-8").splitlines()
    return {line.split()[4]: line.split()[5].split(",") for line in lines}


def _started(command: Sequence[str], environment: dict[str, str], log_file: Path) -> subprocess.Popen[bytes]:
    log: IO[bytes]
    with log_file.open("wb") as log:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment
        )


def _without_kubelet_dir(arguments: Sequence[str]) -> tuple[Path, list[str]]:
    rest = list(arguments)
    at = rest.index(KUBELET_DIR_OPTION)
    kubelet_dir = Path(rest[at + 1])
    del rest[at : at + 2]
    return kubelet_dir, rest
