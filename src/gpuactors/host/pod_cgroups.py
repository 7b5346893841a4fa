"""Which pods live, by their cgroups. Implements `ports.node.PodsSeen`.

Kubelet makes a cgroup for each pod below its `kubepods` (--cgroups-per-qos, on by default) before it makes the pod's
containers, and removes it when the pod has ended (pkg/kubelet/kubelet.go, SyncPod and SyncTerminatedPod). They are
below /sys, which is mounted anyway, and reading them has no effect on anybody. Kubelet's `pods` directories say less
(they stay as long as the API server has the pod), and a mount of them would hold the volumes of every pod.

cgroup v2 says by itself whether a process is in a cgroup or below it (cgroup.events); of v1 the hierarchy of `cpuacct`
is read, as both count the time that any process ever ran there.

Must not decide what follows for a device.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import Final, final

from gpuactors.core.values.model import NO_PODS, PodLife, SeenPods
from gpuactors.host.root import CGROUPS, HostRoot

_KUBEPODS: Final = re.compile(r"kubepods|(?:[^/]*-)?kubepods\.slice")
_CLASS: Final = re.compile(r"burstable|besteffort|(?:[^/]*-)?kubepods-(?:burstable|besteffort)\.slice")
_POD_SLICE: Final = re.compile(r"(?:[^/]*-)?kubepods(?:-burstable|-besteffort)?-pod([0-9A-Za-z_]+)\.slice")
"""The cgroup of a pod, of kubelet with the systemd driver: `kubepods-burstable-pod<UID with _ for ->.slice`; guaranteed
pods have no class in it, and a prefix comes from kubelet's --cgroup-root (pkg/kubelet/cm/cgroup_manager_linux.go)."""

_POD_DIRECTORY: Final = re.compile(r"pod([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{32})")
"""The cgroup of a pod, of kubelet with the cgroupfs driver: `/kubepods/burstable/pod<UID>`. A static pod's UID is a
hash without dashes."""

_USAGE: Final = re.compile(r"^usage_usec (\d+)$", re.MULTILINE)


def uid_of(name: str) -> str | None:
    """Return the UID of the pod whose cgroup has this name; None if it is no pod's."""
    if match := _POD_SLICE.fullmatch(name):
        return match[1].replace("_", "-")
    match = _POD_DIRECTORY.fullmatch(name)
    return match[1] if match else None


@final
class PodCgroups:
    """The cgroups of a host's pods."""

    def __init__(self, root: HostRoot) -> None:
        self._cgroups = root.real(CGROUPS)
        self._kubepods: tuple[str, ...] = ()
        """The directories found last; they are looked for again when one is gone."""
        self._uids: frozenset[str] = frozenset()
        self._came = 0

    def look(self, uids: Collection[str]) -> SeenPods:
        is_v2 = os.path.exists(os.path.join(self._cgroups, "cgroup.controllers"))
        top = self._cgroups if is_v2 else os.path.join(self._cgroups, "cpuacct")
        if not self._kubepods or not all(map(os.path.isdir, self._kubepods)):
            self._kubepods = tuple(_kubepods(top))
        if not self._kubepods:
            return NO_PODS
        try:
            paths = {uid: path for kubepods in self._kubepods for uid, path in _pods(kubepods)}
        except OSError:
            return NO_PODS
        self._came += len(paths.keys() - self._uids)
        self._uids = frozenset(paths)
        lives = dict[str, PodLife]()
        for uid in sorted(uids):
            with suppress(OSError, ValueError):
                lives[uid] = _life(paths[uid], is_v2=is_v2) if uid in paths else PodLife.ABSENT
        return SeenPods(lives, self._came)


def _kubepods(top: str) -> Iterator[str]:
    """Yield the directories of kubelets, at the top or below a --cgroup-root of one part."""
    for name in _directories(top):
        path = os.path.join(top, name)
        if _KUBEPODS.fullmatch(name):
            yield path
            continue
        yield from (os.path.join(path, below) for below in _directories(path) if _KUBEPODS.fullmatch(below))


def _pods(kubepods: str) -> Iterator[tuple[str, str]]:
    """Yield the UID and the directory of each pod. Raises `OSError`, but for a class that is gone meanwhile."""
    for name in os.listdir(kubepods):
        path = os.path.join(kubepods, name)
        if (uid := uid_of(name)) is not None:
            yield uid, path
        elif _CLASS.fullmatch(name):
            for pod in os.listdir(path):
                if (uid := uid_of(pod)) is not None:
                    yield uid, os.path.join(path, pod)


def _directories(path: str) -> list[str]:
    with suppress(OSError), os.scandir(path) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    return []


def _life(path: str, *, is_v2: bool) -> PodLife:
    """Return the life of the pod with this cgroup. Raises `OSError`, and `ValueError` for what no kernel writes."""
    try:
        # The time first: a process that starts between the two reads is no sign of a pod that has stopped.
        if is_v2:
            match = _USAGE.search(_read(path, "cpu.stat"))
            has_run = match is not None and int(match[1]) > 0
        else:
            has_run = int(_read(path, "cpuacct.usage")) > 0
        if "populated 1" in _read(path, "cgroup.events") if is_v2 else _has_process(path):
            return PodLife.RUNNING
    except FileNotFoundError:
        return PodLife.ABSENT
    return PodLife.STOPPED if has_run else PodLife.STARTING


def _has_process(path: str) -> bool:
    """Return whether a process is in the pod's cgroup, or in one of its containers' (cgroup v1)."""
    if _read(path, "cgroup.procs").strip():
        return True
    for container in _directories(path):
        with suppress(FileNotFoundError):
            if _read(os.path.join(path, container), "cgroup.procs").strip():
                return True
    return False


def _read(path: str, name: str) -> str:
    try:
        with open(os.path.join(path, name), encoding="ascii", errors="replace") as file:
            return file.read(4096)
    except OSError as exc:
        if isinstance(exc, FileNotFoundError) or not os.path.isdir(path):
            raise FileNotFoundError(path) from exc  # ENODEV: it has just been removed
        raise
