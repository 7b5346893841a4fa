"""A real QEMU that has a function or a mediated device by vfio-pci, started in the guest as libvirt does on a node.

Its processor is emulated and stands still (`-S`): what it does to a GPU's group it has done before its first
instruction. Must not decide what a scenario makes of it.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

from tests.support.patience import patient
from tests.vm.guest.mdev import Mediated
from tests.vm.guest.sysfs import DEV_VFIO, Function
from tests.vm.qemu_root import starter

PROGRAM: Final = starter(Path("/run/qemu"))
"""What runs on the host as the machine, wherever it is there; `init` has mounted it."""

MEMORY_MIB: Final = 64
"""Mapped for DMA as a whole while the group is open already."""

START_TIMEOUT_S: Final = patient(120.0)
"""From the start to the open device: 3 s, of which QEMU's own loading is the most."""

STOP_TIMEOUT_S: Final = patient(10.0)

LOOK_PERIOD_S: Final = 0.002


@dataclass(frozen=True, slots=True)
class Taken:
    """When QEMU was seen to have what (time.monotonic_ns)."""

    started_ns: int
    group_ns: int
    """It has the group's node open."""
    device_ns: int
    """Its device is enabled."""


@dataclass(slots=True)
class Qemu:
    """The process. Killed when its `with` ends, if it still runs."""

    process: subprocess.Popen[bytes]
    group_node: Path
    function: Function | Mediated
    started_ns: int
    errors: Path

    @classmethod
    def start(
        cls, function: Function | Mediated, errors: Path, *, nodes: Iterable[str] | None = None
    ) -> Qemu:
        """Start it with `function`; what it says goes to the file `errors`. With `nodes` it has these alone of what is
        in `/dev/vfio`, as in a container."""
        started_ns = time.monotonic_ns()
        with errors.open("wb") as stream:
            process = subprocess.Popen(
                [
                    *(() if nodes is None else _in_container(nodes)),
                    str(PROGRAM),
                    *("-machine", "q35", "-accel", "tcg", "-m", f"{MEMORY_MIB}M", "-S"),
                    *("-nodefaults", "-no-user-config", "-display", "none"),
                    *("-device", function.qemu_device),
                ],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
            )
        return cls(process, function.group_node, function, started_ns, errors)

    def __enter__(self) -> Qemu:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def __str__(self) -> str:
        """As the daemon must call it."""
        return f"process {self.process.pid} ({self.command})"

    @property
    def command(self) -> str:
        """Its name, as the kernel has it."""
        return Path(f"/proc/{self.process.pid}/comm").read_text(encoding="utf-8").strip()

    @property
    def said(self) -> str:
        """Everything it has said."""
        return self.errors.read_text(encoding="utf-8", errors="replace")

    def wait_taken(self) -> Taken:
        """Wait until it has the device. Raises AssertionError if it ends before, or TimeoutError."""
        group_ns: int | None = None
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"QEMU ended with {self.process.returncode}: {self.said}"
            if group_ns is None and self._has_group():
                group_ns = time.monotonic_ns()
            if group_ns is not None and self._device_is_enabled():
                return Taken(self.started_ns, group_ns, time.monotonic_ns())
            time.sleep(LOOK_PERIOD_S)
        raise TimeoutError(f"QEMU did not take {self.function.qemu_device} within {START_TIMEOUT_S:g} s")

    def wait_refused(self) -> str:
        """Wait until it has ended by itself, as it could not have the device; what it said."""
        assert self.process.wait(timeout=START_TIMEOUT_S) == 1, self.said
        return self.said

    def kill(self) -> None:
        """SIGKILL, and wait until the kernel has taken back what it held."""
        self.process.kill()
        self.process.wait(timeout=STOP_TIMEOUT_S)

    def _has_group(self) -> bool:
        return str(self.group_node) in self._files()

    def _device_is_enabled(self) -> bool:
        if isinstance(self.function, Mediated):
            # It has no `enable`: the descriptor of a vfio device is what the kernel calls so.
            return any("vfio-device" in name for name in self._files())
        return self.function.enable_count != 0

    def _files(self) -> list[str]:
        """What it has open."""
        directory = Path(f"/proc/{self.process.pid}/fd")
        found = []
        for entry in os.listdir(directory):
            with suppress(FileNotFoundError):  # closed meanwhile
                found.append(os.readlink(directory / entry))
        return found


def _in_container(nodes: Iterable[str]) -> tuple[str, ...]:
    """What starts the program behind it in mounts of its own, as the same process."""
    made = []
    for node in nodes:
        number = os.stat(node).st_rdev
        made.append(f"mknod {shlex.quote(node)} c {os.major(number)} {os.minor(number)}")
    script = " && ".join((f"/run/busybox mount -t tmpfs tmpfs {DEV_VFIO}", *made, 'exec "$0" "$@"'))
    return ("unshare", "--mount", "sh", "-c", script)
