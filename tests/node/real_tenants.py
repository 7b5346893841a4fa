"""Who has a vfio group open, where the tenants are real processes: by the device numbers of what they have open.

The kernels that these tests run on have no vfio, so a group's node is a virtual terminal's contents (vcs) by another
name: a character device with a driver, that any process may open, and one for each group number from 20 on.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, final

from gpuactors_simulation.host.tenants import Tenants
from tests.node.lane import LANE_VARIABLE, own_cgroup, processes_below

TTY_MAJOR: Final = 4
VCS_MAJOR: Final = 7
"""Documentation/admin-guide/devices.txt: 4:1 to 4:63 are the virtual terminals, 7:1 to 7:63 what they show."""

GROUPS: Final = range(20, 64)
"""The group numbers that a device with a driver exists for. Nobody can open the nodes of higher ones."""

DRIVERLESS_MAJOR: Final = 240
"""For local use, by the same list of the kernel: no driver has it here, and an open fails with ENXIO."""

LANE: Final = int(os.environ.get(LANE_VARIABLE) or 0)
"""Which of the numbers of a terminal: for four nodes side by side on one machine."""

_DEVICES: Final = ((VCS_MAJOR, 0), (VCS_MAJOR, 64), (VCS_MAJOR, 128), (TTY_MAJOR, 0))
"""By lane, the major number and what is added to the group's: vcs, vcsu, vcsa, tty."""

_POD: Final = re.compile(r"/pod([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})(?:/|$)")
"""In a cgroup's path, with kubelet's cgroupfs driver."""

NVIDIA_MAJOR: Final = 195
CONTAINER: Final = (1, 3)
"""What `/dev/vfio/vfio` is: as /dev/null, it opens for everybody, and tells nothing."""


def make_node(path: str) -> None:
    """Makes the character device at `…/dev/vfio/51`, `…/dev/vfio/vfio` or `…/dev/nvidia0`. Raises `OSError`."""
    name = os.path.basename(path)
    if name == "vfio":
        major, minor = CONTAINER
    elif name.startswith("nvidia"):
        major, minor = NVIDIA_MAJOR, int(name.removeprefix("nvidia"))
    else:
        major, minor = _device(int(name))
    if os.path.lexists(path):
        os.unlink(path)
    os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(major, minor))


def _device(group: int) -> tuple[int, int]:
    """The numbers of the group's device. It opens once the terminal was open (drivers/tty/vt/vc_screen.c, vcs_open)."""
    assert group >= GROUPS.start, f"there is no character device for group {group}"
    if group not in GROUPS:
        return DRIVERLESS_MAJOR, group
    with tempfile.TemporaryDirectory() as directory:
        terminal = f"{directory}/tty"
        os.mknod(terminal, stat.S_IFCHR | 0o600, os.makedev(TTY_MAJOR, group))
        os.close(os.open(terminal, os.O_RDWR | os.O_NOCTTY))
    major, added = _DEVICES[LANE]
    return major, added + group


_COMPONENTS: Final = frozenset({
    "etcd", "kube-apiserver", "kube-controller", "kube-scheduler", "kubelet", "containerd", "containerd-shim",
})  # fmt: skip
"""Of the nodes themselves, by /proc/PID/comm, which has 15 characters: hundreds of descriptors, and never a group's."""


def _command(pid: str) -> str:
    with open(f"/proc/{pid}/comm", encoding="ascii", errors="replace") as file:
        return file.read().rstrip()


def _link(path: str) -> str:
    """Empty if the path is longer than a link can tell: no node of a group has such a one here."""
    try:
        return os.readlink(path)
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        return ""


@final
class RealTenants(Tenants):
    """The processes of this node that have a group's node open: those of its lane, in which this process is."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._cgroup = own_cgroup()
        self.group_of: dict[str, int] = {}
        """The group of each function."""

    def owners(self) -> Mapping[int, frozenset[str]]:
        """Who has each group open: `pod UID`, whichever of its processes, or `process PID`."""
        found: dict[int, set[str]] = {}
        for pid, cgroup, group in self._holders():
            pod = _POD.search(cgroup)
            found.setdefault(group, set()).add(f"process {pid}" if pod is None else f"pod {pod[1]}")
        return {group: frozenset(owners) for group, owners in found.items()}

    def _holders(self) -> Iterator[tuple[str, str, int]]:
        """Process, its cgroup and group of each descriptor of a group's node that is open on this node. One that ends
        is in its cgroup until its descriptors are closed (kernel/exit.c, do_exit)."""
        major, added = _DEVICES[LANE]
        for pid, cgroup in processes_below(self._cgroup):
            try:
                if _command(pid) in _COMPONENTS:
                    continue
                for descriptor in os.scandir(f"/proc/{pid}/fd"):
                    # A container's path is the host's: it is cheaper to read than the device number.
                    if _link(descriptor.path).startswith("/dev/vfio/"):
                        number = os.stat(descriptor.path).st_rdev
                        group = os.minor(number) - added
                        if os.major(number) == major and group in GROUPS:
                            yield pid, cgroup, group
            except (FileNotFoundError, ProcessLookupError):
                continue  # it ended meanwhile

    def holder_of(self, group: int) -> int | None:
        """The process that has a group open."""
        if group not in GROUPS:  # nobody can, and a read of all processes for each would take minutes
            return None
        return next((int(pid) for pid, _, held in self._holders() if held == group), None)

    def opener_of(self, address: str) -> int | None:
        """The process that has a function's group open: its devices come with it."""
        return self.holder_of(self.group_of[address]) if address in self.group_of else None

    def node_removed(self, group: int) -> None:
        """The descriptor of a real process stays as it is."""
