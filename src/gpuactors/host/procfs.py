"""The processes that have vfio groups and devices open: /proc/*/fd, by device number.

By number, not by path: a container has device nodes of its own, with other inodes and maybe other names. Synchronous;
`use.py` runs it. Must not open a device node, and must not wait for a filesystem: a process may have files open on a
dead NFS server.

Needs a /proc of the host's PID namespace, and two capabilities even as root. CAP_DAC_READ_SEARCH: only its owner may
list /proc/PID/fd (mode 0500), so without it the descriptors of another user's process, as KubeVirt's QEMU is, cannot
even be listed. CAP_SYS_PTRACE: its entries are read and followed under ptrace's access check (man 5 proc,
PTRACE_MODE_READ_FSCREDS), which refuses another user's process, and one of our own user that has a capability more.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Final, final

from msgspec import Struct

from gpuactors.core.reports.snapshot import PollTarget
from gpuactors.core.values.model import Holder, PciAddress
from gpuactors.host.best_effort import names_in
from gpuactors.host.faults import raise_if_short
from gpuactors.host.pod_cgroups import uid_of
from gpuactors.host.root import CDEV_NODES, GROUP_NODES, PCI_DEVICES, PROC, HostRoot, cdev_node, group_node

NodeId = tuple[int, int]
"""The identity of an open device: (-1, device number) of a character device, whatever its inode; (device, inode) of a
plain file, which represents a node in a fake tree."""

_VFIO_DEVICE: Final = "anon_inode:[vfio-device]"
"""The descriptor that VFIO_GROUP_GET_DEVICE_FD returns (drivers/vfio/group.c): its device is not shown."""

_NOBODY: Final[Mapping[int, tuple[Holder, ...]]] = MappingProxyType({})


class ProcPass(Struct, frozen=True):
    """The result of one pass over the processes."""

    holders: Mapping[int, tuple[Holder, ...]]
    """The holders by IOMMU group, in the order of their PIDs; no entry for a group without a holder."""
    exhaustive: bool
    """True if every process was read and the group of each open vfio device is known: a group without an entry then has
    no holder."""
    problem: str = ""
    """Why processes could not be read, as a sentence; empty if all could."""


class Users(Struct, frozen=True):
    """The users of some devices."""

    by_process: Mapping[Holder, frozenset[PciAddress]]
    unseen: str
    """Why a process could not be read, as a part of a sentence; empty if all could: there are no other users then."""


@final
class ProcReader:
    """Reads /proc below a host's root. Keeps nothing between calls."""

    def __init__(self, root: HostRoot) -> None:
        self._root = root
        self._proc = root.real(PROC)

    def find(
        self,
        targets: Iterable[PollTarget],
        *,
        only: Iterable[int] | None = None,
        before: Mapping[int, tuple[Holder, ...]] = _NOBODY,
        go_on: Callable[[], bool] = lambda: True,
    ) -> ProcPass:
        """Return the holders of the groups of `targets`, or of a device in them: one pass for all.

        `only` are the PIDs to read, else all; the answer is not exhaustive then. `before` are the holders that the last
        pass found: one of them that is ending holds what it held. When `go_on` returns False the pass ends early. A
        process that vanishes is left out; one that may not be read makes the answer not exhaustive. Raises `HostError`
        only for want of descriptors: the holders are not known then, and no holder counts as gone.
        """
        try:
            pids = self._pids() if only is None else tuple(only)
        except OSError as exc:
            raise_if_short(exc, self._proc)
            return ProcPass({}, False, f"{self._proc} cannot be listed ({exc.strerror})")
        exhaustive = only is None
        if not pids:
            return ProcPass({}, exhaustive)
        targets = tuple(targets)
        nodes = self._nodes(targets)
        wanted = {target.group for target in targets}
        holders: dict[int, list[Holder]] = {}
        problem = ""
        for pid in sorted(pids):
            if not go_on():
                return ProcPass({}, False)
            try:
                groups = self._groups_of(pid, nodes)
            except OSError as exc:
                raise_if_short(exc, self._proc)
                # Without the PID: it changes from pass to pass, the problem does not.
                problem = problem or f"processes' open files in {self._proc} may not be read ({exc.strerror})"
                groups = None
            if groups is None:
                exhaustive = False
                continue
            held = (groups or _groups_held(pid, before)) & wanted
            holder = self._holder(pid) if held and (groups or self._is_ending(pid)) else None
            for group in held:
                if holder is not None and (groups or holder in before[group]):
                    holders.setdefault(group, []).append(holder)
        return ProcPass({group: tuple(of_group) for group, of_group in holders.items()}, exhaustive, problem)

    def users(self, nodes: Mapping[NodeId, PciAddress]) -> Users:
        """Return the processes that have any of these devices open, in the order of their PIDs, with what they have
        open: one pass over all processes, of every container. Raises `HostError` for want of descriptors."""
        by_process: dict[Holder, frozenset[PciAddress]] = {}
        unseen = ""
        try:
            pids = sorted(self._pids())
        except OSError as exc:
            raise_if_short(exc, self._proc)
            return Users({}, f"{self._proc} cannot be listed ({exc.strerror})")
        for pid in pids:
            try:
                held = frozenset(nodes[node] for node in self._open_nodes(pid) if node in nodes)
            except OSError as exc:
                raise_if_short(exc, self._proc)
                unseen = unseen or f"the open files of process {pid} may not be read ({exc.strerror})"
                continue
            if held and (holder := self._holder(pid)) is not None:
                by_process[holder] = held
        return Users(by_process, unseen)

    def _open_nodes(self, pid: int) -> Iterator[NodeId]:
        """Yield the open files of a process that have a path; empty if it is gone. Raises `OSError`."""
        directory = f"{self._proc}/{pid}/fd"
        try:
            for name in os.listdir(directory):
                # Sockets, pipes and the other anonymous inodes have no path.
                if _link(f"{directory}/{name}").startswith("/"):
                    node = node_id(f"{directory}/{name}")
                    if node is not None:
                        yield node
        except (FileNotFoundError, ProcessLookupError):
            return

    # --- nodes ----------------------------------------------------------------------------------------------

    def _nodes(self, targets: Iterable[PollTarget]) -> dict[NodeId, int]:
        """Return the group of each group node and cdev, by the node's identity; -1 for a cdev of no target."""
        group_of_cdev = {
            name: target.group
            for target in targets
            for function in target.functions
            for name in names_in(self._root.real(f"{PCI_DEVICES}/{function}/vfio-dev"))
        } | {name: target.group for target in targets for name in target.cdevs}
        nodes: dict[NodeId, int] = {}
        for name in names_in(self._root.real(GROUP_NODES)):
            if name.isascii() and name.isdigit():
                _add(nodes, self._root.real(group_node(int(name))), int(name))
        for name in names_in(self._root.real(CDEV_NODES)):
            _add(nodes, self._root.real(cdev_node(name)), group_of_cdev.get(name, -1))
        return nodes

    # --- processes ------------------------------------------------------------------------------------------

    def _pids(self) -> tuple[int, ...]:
        """Return every process but this one. Raises `OSError` if /proc cannot be listed."""
        names = os.listdir(self._proc)
        try:
            # Not getpid: the /proc of another PID namespace knows this process by another number.
            myself = os.readlink(f"{self._proc}/self")
        except OSError:
            myself = ""
        return tuple(int(n) for n in names if n != myself and n.isascii() and n.isdigit())

    def _groups_of(self, pid: int, nodes: Mapping[NodeId, int]) -> frozenset[int] | None:
        """Return the groups of which a process has the node or a cdev open (-1: one of no target); empty if it is gone.

        None if that cannot be known: it has a vfio device open but no node (it got the descriptor from another process,
        or closed the group's). Raises `OSError` if its descriptors may not be read.
        """
        directory = f"{self._proc}/{pid}/fd"
        held: set[int] = set()
        has_device = False
        try:
            for name in os.listdir(directory):
                link = _link(f"{directory}/{name}")
                if link == _VFIO_DEVICE:
                    has_device = True
                # Sockets, pipes and the other anonymous inodes have no path.
                elif link.startswith("/"):
                    node = node_id(f"{directory}/{name}")
                    if node is not None and node in nodes:
                        held.add(nodes[node])
        except (FileNotFoundError, ProcessLookupError):
            return frozenset()
        return None if has_device and not held else frozenset(held)

    def _is_ending(self, pid: int) -> bool:
        """Return whether the kernel has taken all descriptors from the process, and may still be closing them.

        At its end a process loses them at once, and is a zombie when the last one is closed; a group's comes after its
        device's, which may take seconds (kernel/exit.c, exit_files and exit_task_work). Its first thread may be a
        zombie before the others close theirs.
        """
        directory = f"{self._proc}/{pid}"
        threads = (f"{directory}/task/{name}/stat" for name in names_in(f"{directory}/task"))
        return not names_in(f"{directory}/fd") and any(_runs(thread) for thread in threads)

    def _holder(self, pid: int) -> Holder | None:
        """Return the process with its name and pod; None if it is gone."""
        try:
            command = _read(f"{self._proc}/{pid}/comm")
        except (FileNotFoundError, ProcessLookupError):
            return None
        except OSError as exc:
            raise_if_short(exc, self._proc)
            command = "?"
        try:
            cgroup = _read(f"{self._proc}/{pid}/cgroup")
        except OSError as exc:
            raise_if_short(exc, self._proc)
            cgroup = ""
        return Holder(pid, command.rstrip("\n"), pod_uid(cgroup))


def pod_uid(cgroup: str) -> str | None:
    """Return the UID of the pod that a process is in, by its /proc/PID/cgroup (v1 or v2); None if it is in no pod.

    Seen from a container with a cgroup namespace of its own the paths begin with `/..`; the pod's part is there as
    well. Where a kubelet runs inside a pod of another one (kind), the innermost pod counts.
    """
    for line in cgroup.splitlines():
        for part in reversed(line.split(":", 2)[-1].split("/")):
            if (uid := uid_of(part)) is not None:
                return uid
    return None


# --- reading ----------------------------------------------------------------------------------------------------


def _groups_held(pid: int, holders: Mapping[int, tuple[Holder, ...]]) -> frozenset[int]:
    return frozenset(group for group, of_group in holders.items() if any(h.pid == pid for h in of_group))


def _runs(stat: str) -> bool:
    """Return whether a thread is neither a zombie nor gone."""
    try:
        # man 5 proc: `4711 (name) S …`, and the name may contain any characters.
        return _read(stat).rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError as exc:
        raise_if_short(exc, stat)
        return False
    except IndexError:
        return False


def _add(nodes: dict[NodeId, int], path: str, group: int) -> None:
    node = node_id(path)
    if node is not None:
        nodes[node] = group


def _link(path: str) -> str:
    """Read a descriptor's link. Empty if it was closed meanwhile; `/` if its path is longer than a link can show
    (ENAMETOOLONG: a page), which any user can cause. Raises `PermissionError`."""
    try:
        return os.readlink(path)
    except FileNotFoundError:
        return ""
    except OSError as exc:
        if exc.errno != errno.ENAMETOOLONG:
            raise
        return "/"


def _read(path: str) -> str:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, 4096).decode("utf-8", errors="replace")
    finally:
        os.close(descriptor)


class _Timestamp(ctypes.Structure):
    _fields_ = (("sec", ctypes.c_int64), ("nsec", ctypes.c_uint32), ("reserved", ctypes.c_int32))


class _Statx(ctypes.Structure):
    """struct statx, linux/stat.h."""

    _fields_ = (
        ("mask", ctypes.c_uint32),
        ("blksize", ctypes.c_uint32),
        ("attributes", ctypes.c_uint64),
        ("nlink", ctypes.c_uint32),
        ("uid", ctypes.c_uint32),
        ("gid", ctypes.c_uint32),
        ("mode", ctypes.c_uint16),
        ("spare0", ctypes.c_uint16),
        ("ino", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
        ("blocks", ctypes.c_uint64),
        ("attributes_mask", ctypes.c_uint64),
        ("times", _Timestamp * 4),
        ("rdev_major", ctypes.c_uint32),
        ("rdev_minor", ctypes.c_uint32),
        ("dev_major", ctypes.c_uint32),
        ("dev_minor", ctypes.c_uint32),
        ("spare", ctypes.c_uint64 * 14),
    )


_AT_FDCWD: Final = -100
_AT_NO_AUTOMOUNT: Final = 0x800
_AT_STATX_DONT_SYNC: Final = 0x4000
_STATX_BASIC_STATS: Final = 0x7FF

_statx = getattr(ctypes.CDLL(None), "statx", None)
"""The C library's statx(2) (glibc 2.28), None if it has none; Python has it from 3.15 on."""


def node_id(path: str) -> NodeId | None:
    """Return the device of a path; None for anything but a character device or a plain file, or if it does not exist.

    Does not ask a network filesystem's server (AT_STATX_DONT_SYNC): an ordinary stat of a file on one that does not
    answer waits for ever, and holds the thread and the pod that it is in.
    """
    if _statx is None:
        return _node_id_by_stat(path)
    status = _Statx()
    flags = _AT_STATX_DONT_SYNC | _AT_NO_AUTOMOUNT
    if _statx(_AT_FDCWD, os.fsencode(path), flags, _STATX_BASIC_STATS, ctypes.byref(status)) != 0:
        return None
    return _node_id(
        status.mode,
        os.makedev(status.rdev_major, status.rdev_minor),
        os.makedev(status.dev_major, status.dev_minor),
        status.ino,
    )


def _node_id_by_stat(path: str) -> NodeId | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return _node_id(status.st_mode, status.st_rdev, status.st_dev, status.st_ino)


def _node_id(mode: int, number: int, device: int, inode: int) -> NodeId | None:
    if stat.S_ISCHR(mode):
        return -1, number
    return (device, inode) if stat.S_ISREG(mode) else None
