"""Which pods live, by their cgroups. Implements `ports.node.PodsSeen`.

Kubelet makes a cgroup for each pod below its `kubepods` (--cgroups-per-qos, on by default) before it makes the pod's
containers, and removes it when the pod has ended (pkg/kubelet/kubelet.go, SyncPod and SyncTerminatedPod). They are
below /sys, which is mounted anyway, and reading them has no effect on anybody. Kubelet's `pods` directories say less
(they stay as long as the API server has the pod), and a mount of them would hold the volumes of every pod.

cgroup v2 says by itself whether a process is in a cgroup or below it (cgroup.events), and for how long any process ever
ran there. Of v1 the hierarchies of `cpuacct` and `pids` are read for that. Its cgroup.procs is no help: that has only
the processes of the reader's PID namespace (kernel/cgroup/cgroup-v1.c, pidlist_array_load), so none of a pod's where
the daemon does not run in the host's.

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

_TIMES: Final = "cpuacct"
_TASKS: Final = "pids"
"""The hierarchies of cgroup v1 that count the time of all processes that ever ran in a cgroup or below it
(kernel/sched/cpuacct.c), and the tasks that are there now (kernel/cgroup/pids.c)."""

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
        top = self._cgroups if is_v2 else os.path.join(self._cgroups, _TIMES)
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
                if uid not in paths:
                    lives[uid] = PodLife.ABSENT
                elif is_v2:
                    lives[uid] = _life(paths[uid])
                else:
                    tasks = os.path.join(self._cgroups, _TASKS, os.path.relpath(paths[uid], top))
                    lives[uid] = _life_v1(paths[uid], tasks)
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


def _life(path: str) -> PodLife:
    """Return the life of the pod with this cgroup. Raises `OSError`, and `ValueError` for what no kernel writes."""
    try:
        # The time first: a process that starts between the two reads is no sign of a pod that has stopped.
        usage = _USAGE.search(_read(path, "cpu.stat"))
        has_run = usage is not None and int(usage[1]) > 0
        return _life_of(has_process="populated 1" in _read(path, "cgroup.events"), has_run=has_run)
    except FileNotFoundError:
        return PodLife.ABSENT


def _life_v1(times: str, tasks: str) -> PodLife:
    """Return the same of cgroup v1, by its cgroups in the hierarchies `_TIMES` and `_TASKS`. `ValueError` also if it
    has none in the second: kubelet is removing it, or does not use that hierarchy."""
    try:
        has_run = int(_read(times, "cpuacct.usage")) > 0
    except FileNotFoundError:
        return PodLife.ABSENT
    try:
        return _life_of(has_process=int(_read(tasks, "pids.current")) > 0, has_run=has_run)
    except FileNotFoundError as exc:
        raise ValueError(f"{tasks} does not exist") from exc


def _life_of(*, has_process: bool, has_run: bool) -> PodLife:
    if has_process:
        return PodLife.RUNNING
    return PodLife.STOPPED if has_run else PodLife.STARTING


def _read(path: str, name: str) -> str:
    try:
        with open(os.path.join(path, name), encoding="ascii", errors="replace") as file:
            return file.read(4096)
    except OSError as exc:
        if isinstance(exc, FileNotFoundError) or not os.path.isdir(path):
            raise FileNotFoundError(path) from exc  # ENODEV: it has just been removed
        raise
