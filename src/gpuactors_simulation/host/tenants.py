"""Processes on a fake node that hold vfio groups open, and the /proc that shows them.

Keeps which process holds what, and makes `/proc/PID/{comm,cgroup,fd/N}` below a root for it: descriptors are symbolic
links, as in the real /proc, but to the fake tree's plain files. `tree.py` plays what holding a group means for the rest
of the node.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Final

from gpuactors_simulation.host.pod_cgroups import slice_of

__all__ = ["Tenants"]

_COMMAND_CHARS: Final = 15
"""TASK_COMM_LEN without its NUL (linux/sched.h)."""

_VFIO_DEVICE: Final = "anon_inode:[vfio-device]"


@dataclass(slots=True)
class _Process:
    """A process and what it has open."""

    pid: int
    next_descriptor: int = 3
    groups: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By group: the descriptors of its node and of its container."""
    devices: dict[str, int] = field(default_factory=dict)
    """The device descriptor by the function's address."""
    files: dict[str, int] = field(default_factory=dict)
    """The descriptor of each other file, by its path."""


class Tenants:
    """The processes of one node."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._proc = root / "proc"
        self._proc.mkdir(parents=True, exist_ok=True)
        self._processes: dict[int, _Process] = {}

    # --- what is held ---------------------------------------------------------------------------------------

    def holder_of(self, group: int) -> int | None:
        """Return the PID that has a group open; a group opens once."""
        return next((p.pid for p in self._processes.values() if group in p.groups), None)

    def opener_of(self, address: str) -> int | None:
        """Return the PID that has a function's device open."""
        return next((p.pid for p in self._processes.values() if address in p.devices), None)

    def groups_of(self, pid: int) -> tuple[int, ...]:
        """Return the groups that a process has open, as they were opened."""
        return tuple(self._processes[pid].groups) if pid in self._processes else ()

    def __contains__(self, pid: int) -> bool:
        return pid in self._processes

    # --- what a process does --------------------------------------------------------------------------------

    def start(self, pid: int, command: str, pod_uid: str | None) -> None:
        """Start a process. Raises `ValueError` if the PID is taken."""
        if pid in self._processes:
            raise ValueError(f"process {pid} runs already")
        # Made aside and moved, so that a reader finds a whole process or none.
        made = self._proc / f".{pid}"
        (made / "fd").mkdir(parents=True)
        (made / "comm").write_text(command[:_COMMAND_CHARS] + "\n")
        (made / "cgroup").write_text(f"0::{_cgroup(pod_uid)}\n")
        for number, target in enumerate(("/dev/null", f"pipe:[{pid}]", f"socket:[{pid}]")):
            (made / "fd" / str(number)).symlink_to(target)
        made.rename(self._proc / str(pid))
        self._processes[pid] = _Process(pid)

    def kill(self, pid: int) -> None:
        """End a process and close all that it has open. Raises `ValueError` if there is none."""
        if self._processes.pop(pid, None) is None:
            raise ValueError(f"there is no process {pid}")
        shutil.rmtree(self._proc / str(pid))

    def open_group(self, pid: int, group: int) -> None:
        """A process opens a group's node, and a container for it."""
        process = self._processes[pid]
        process.groups[group] = (
            self._open(process, str(self._root / "dev/vfio" / str(group))),
            self._open(process, str(self._root / "dev/vfio/vfio")),
        )

    def open_device(self, pid: int, address: str) -> None:
        """A process gets a device's descriptor from its group."""
        process = self._processes[pid]
        process.devices[address] = self._open(process, _VFIO_DEVICE)

    def close_device(self, pid: int, address: str) -> None:
        """A process closes a device's descriptor."""
        process = self._processes[pid]
        self._close(process, process.devices.pop(address))

    def close_group(self, pid: int, group: int) -> None:
        """A process closes a group's node and its container."""
        process = self._processes[pid]
        for descriptor in process.groups.pop(group):
            self._close(process, descriptor)

    def open_file(self, pid: int, path: str) -> None:
        """A process opens any other file of the host, by its real path."""
        process = self._processes[pid]
        process.files[path] = self._open(process, path)

    def close_file(self, pid: int, path: str) -> None:
        """Let a process close the file."""
        process = self._processes[pid]
        self._close(process, process.files.pop(path))

    def node_removed(self, group: int) -> None:
        """A group's node goes while a process has it open: the descriptor leads to a node that is gone."""
        pid = self.holder_of(group)
        if pid is None:
            return
        process = self._processes[pid]
        path = self._descriptor(process, process.groups.pop(group)[0])
        target = path.readlink()
        path.unlink()
        path.symlink_to(f"{target} (deleted)")

    # --- files ----------------------------------------------------------------------------------------------

    def _open(self, process: _Process, target: str) -> int:
        number = process.next_descriptor
        process.next_descriptor += 1
        self._descriptor(process, number).symlink_to(target)
        return number

    def _close(self, process: _Process, number: int) -> None:
        self._descriptor(process, number).unlink()

    def _descriptor(self, process: _Process, number: int) -> Path:
        return self._proc / str(process.pid) / "fd" / str(number)


def _cgroup(pod_uid: str | None) -> str:
    """As kubelet's systemd driver and containerd make it; a process outside of pods is in a session."""
    if pod_uid is None:
        return "/user.slice/user-0.slice/session-1.scope"
    container = sha256(pod_uid.encode()).hexdigest()
    return f"/{slice_of(pod_uid)}/cri-containerd-{container}.scope"
