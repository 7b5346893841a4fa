"""Becomes a command as a container's runtime would start it: `python -m tests.vm.guest.confined POD COMMAND…`, where
POD is `Pod.specification`.

The cgroup with its device list and memory, namespaces, a read-only root of the image and the pod's mounts, no
capabilities but those that were added, no new privileges, seccomp: in that order, because each step needs what a later
one takes away. Nobody enters a new PID namespace but by being started there: `new_pid_namespace` is for the process
that starts this one. Standard library only, and no part in the tests but this.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from tests.vm.guest import device_cgroup, seccomp

NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = (
    0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
"""linux/sched.h"""

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = (
    0x1, 0x2, 0x4, 0x8, 0x20, 0x1000, 0x4000, 0x40000,
)  # fmt: skip
"""linux/mount.h"""

PLACE: Final = Path("/mnt")
"""Where things are mounted on their way, seen by this process alone."""

MASKED: Final = ("acpi", "kcore", "keys", "latency_stats", "timer_list", "sched_debug", "scsi")
READ_ONLY: Final = ("bus", "fs", "irq", "sys", "sysrq-trigger")
"""Of /proc: what runtimes hide from, and what they leave readable to, a container that is not privileged."""

NODES: Final = ("null", "zero", "full", "random", "urandom", "tty")

CAPABILITIES: Final = {"DAC_READ_SEARCH": 2, "SYS_MODULE": 16, "SYS_CHROOT": 18, "SYS_PTRACE": 19}
"""linux/capability.h: those that deploy/ adds anywhere."""

_MOUNT_SETATTR: Final = 442  # x86-64; glibc has it from 2.36 on
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 24, 38
_CAPABILITY_VERSION_3: Final = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)


@contextmanager
def new_pid_namespace() -> Iterator[None]:
    """What this thread starts within is process 1 of a PID namespace of its own."""
    with open("/proc/self/ns/pid", "rb") as own:
        _call("unshare", NEWPID)
        try:
            yield
        finally:
            _call("setns", own.fileno(), NEWPID)


def main(specification: str, command: Sequence[str]) -> None:
    """Become `command`. Raises OSError where anything is refused."""
    pod = json.loads(specification)
    _call("unshare", NEWNS)
    _mount(None, "/", None, MS_REC | MS_PRIVATE)
    _enter_cgroup(pod)
    _call("unshare", NEWCGROUP | NEWIPC | NEWUTS | (0 if pod["host_network"] else NEWNET))
    library = seccomp.loaded()
    _change_root(pod)
    if pod["user_namespace"]:
        _enter_user_namespace()
    if not pod["privileged"]:
        _keep_capabilities([CAPABILITIES[name] for name in pod["capabilities"]])
    if pod["no_new_privileges"]:
        _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if pod["seccomp"] and not pod["privileged"]:
        seccomp.load_runtime_default(library, pod["capabilities"])
    environment = {**image["environment"], **pod["environment"]} if (image := pod["image"]) else os.environ
    os.execve(command[0], list(command), environment)


# --- what it may do -------------------------------------------------------------------------------------------


def _enter_cgroup(pod: dict[str, Any]) -> None:
    _mount("cgroup2", PLACE, "cgroup2", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    # Inside a PID namespace all of them are process 1.
    directory = PLACE / f"pod-{os.urandom(4).hex()}"
    device_cgroup.enter(directory, memory_bytes=pod["memory_bytes"], devices=not pod["privileged"])
    _call("umount2", bytes(PLACE), 0)


def _enter_user_namespace() -> None:
    """As root of the node still, to have the files. The network namespace belongs to it then, as a pod's does."""
    _call("unshare", NEWUSER | NEWNET)
    for name, text in (("uid_map", "0 0 1"), ("setgroups", "deny"), ("gid_map", "0 0 1")):
        Path("/proc/self", name).write_text(text, encoding="ascii")


def _keep_capabilities(kept: Sequence[int]) -> None:
    last = int(Path("/proc/sys/kernel/cap_last_cap").read_text(encoding="ascii"))
    for number in range(last + 1):
        if number not in kept:
            _call("prctl", _PR_CAPBSET_DROP, number, 0, 0, 0)
    bits = sum(1 << number for number in kept)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    # Effective, permitted, inheritable; the lower 32 capabilities, then the upper ones.
    _call("capset", header, (ctypes.c_uint32 * 6)(bits, bits, 0, 0, 0, 0))


# --- what it sees ---------------------------------------------------------------------------------------------


def _change_root(pod: dict[str, Any]) -> None:
    _mount("tmpfs", PLACE, "tmpfs", 0, "mode=755")
    if pod["image"]:
        root = _root_of_image(pod["image"]["root"])
    else:
        root = PLACE
        for directory in ("tmp", "run", "var"):
            (root / directory).mkdir()
        for path in pod["hosts"]:
            _add_from_host(root, Path(path))
    _mount_kernel_files(root, privileged=pod["privileged"])
    for mount in pod["mounts"]:
        target = _inside(root, mount["target"])
        target.mkdir(parents=True, exist_ok=True)
        _mount(mount["source"], target, None, MS_BIND | MS_REC)
        if mount["read_only"]:
            _make_read_only(target, recursive=mount["recursive_read_only"])
    if pod["read_only_root"]:
        _make_read_only(root, recursive=False)
    os.chdir(root)
    _call("pivot_root", b".", b".")
    _call("umount2", b".", 2)  # MNT_DETACH
    os.chdir("/")


def _root_of_image(image: str) -> Path:
    """As runtimes do: a layer above the image's, for the places of the mounts."""
    lower, upper, work, root = (PLACE / name for name in ("image", "upper", "work", "root"))
    for directory in (lower, upper, work, root):
        directory.mkdir()
    # A path of its own, as one in the options may hold no comma and no colon.
    _mount(image, lower, None, MS_BIND)
    _mount("overlay", root, "overlay", 0, f"lowerdir={lower},upperdir={upper},workdir={work}")
    return root


def _add_from_host(root: Path, path: Path) -> None:
    target = _inside(root, path)
    if path.is_symlink():
        target.symlink_to(os.readlink(path))
        _add_from_host(root, path.resolve())
    elif path.is_dir() and not target.exists():
        target.mkdir(parents=True)
        _mount(path, target, None, MS_BIND)
        _make_read_only(target, recursive=True)


def _mount_kernel_files(root: Path, *, privileged: bool) -> None:
    for directory in ("proc", "sys", "dev"):
        (root / directory).mkdir(exist_ok=True)
    dull = MS_NOSUID | MS_NODEV | MS_NOEXEC
    _mount("proc", root / "proc", "proc", dull)
    _mount("sysfs", root / "sys", "sysfs", dull | (0 if privileged else MS_RDONLY))
    _mount("tmpfs", root / "dev", "tmpfs", MS_NOSUID, "mode=755,size=64k")
    for name in NODES:
        os.mknod(root / "dev" / name, 0o020666, os.stat(f"/dev/{name}").st_rdev)
    for name, kind, data in (("pts", "devpts", "newinstance,ptmxmode=0666"), ("shm", "tmpfs", "size=64m")):
        (root / "dev" / name).mkdir()
        _mount(kind, root / "dev" / name, kind, MS_NOSUID | MS_NOEXEC, data)
    (root / "dev" / "ptmx").symlink_to("pts/ptmx")
    if privileged:
        return
    for name in READ_ONLY:
        path = root / "proc" / name
        if path.exists():
            _mount(path, path, None, MS_BIND | MS_REC)
            _make_read_only(path, recursive=True)
    for name in MASKED:
        path = root / "proc" / name
        if path.is_dir():
            _mount("tmpfs", path, "tmpfs", MS_RDONLY)
        elif path.exists():
            _mount("/dev/null", path, None, MS_BIND)


def _make_read_only(path: Path, *, recursive: bool) -> None:
    attributes = (ctypes.c_uint64 * 4)(0x1, 0, 0, 0)  # struct mount_attr: set MOUNT_ATTR_RDONLY
    flags = _AT_RECURSIVE if recursive else 0
    _call("syscall", _MOUNT_SETATTR, _AT_FDCWD, bytes(path), flags, attributes, ctypes.sizeof(attributes))


def _inside(root: Path, path: str | Path) -> Path:
    return root / str(path).lstrip("/")


# --- the C library --------------------------------------------------------------------------------------------


def _mount(
    source: str | Path | None, target: str | Path, kind: str | None, flags: int, data: str = ""
) -> None:
    words = [None if word is None else os.fsencode(word) for word in (source, target, kind)]
    _call("mount", *words, ctypes.c_ulong(flags), data.encode())


def _call(name: str, *arguments: Any) -> None:
    if getattr(_libc, name)(*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}{arguments}: {os.strerror(number)}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
