"""The containers of a fake node's pods: virtual machines that open their GPUs, and close them when they end.

They belong to the container runtime and not to kubelet: they live on while kubelet is down, and after a forced
deletion. A `Tenancy` opens and closes the devices; without one a container is only a name. Must not know plugins or
kubelet's ledger.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, final

import trio

from gpuactors_simulation.host.tree import HostTree, Uevent
from gpuactors_simulation.kubelet.values import DoubleHandOut, Pod

QEMU: Final = "qemu-system-x86"
"""`comm` of QEMU's process: the kernel keeps 15 characters."""

FIRST_PID: Final = 4000
"""Process numbers of virtual machines; the external processes of a scenario have smaller ones."""

_GROUP_NODE: Final = re.compile(r"/dev/vfio/(\d+)")


class Tenancy(Protocol):
    """The virtual machine of a pod and its use of the devices that the pod was given."""

    def start(self, pod: Pod, devices: Sequence[str], nodes: Sequence[str]) -> None:
        """Open the devices, all or none: `devices` by kubelet's IDs, `nodes` as paths of the host.

        Raises `OSError` with QEMU's message: EBUSY if another process has one of them open.
        """
        ...

    def stop(self, pod: Pod) -> None:
        """End its process, which closes everything."""
        ...


@final
class TreeTenancy:
    """Virtual machines that hold IOMMU groups of a `HostTree`. Implements `Tenancy`.

    `tell` gets the uevents of an unbind that waited for a machine which ends.
    """

    def __init__(
        self,
        tree: HostTree,
        tell: Callable[[Sequence[Uevent]], object] = lambda _uevents: None,
        first_pid: int = FIRST_PID,
    ) -> None:
        self._tree = tree
        self._tell = tell
        self._pids = itertools.count(first_pid)
        self._running: dict[str, int] = {}
        """The processes that have something open, by pod UID."""

    def start(self, pod: Pod, devices: Sequence[str], nodes: Sequence[str]) -> None:
        """Implement `Tenancy.start`. The groups are those of the nodes; the container node opens any number of
        times."""
        pid = next(self._pids)
        groups = dict.fromkeys(int(match[1]) for node in nodes if (match := _GROUP_NODE.fullmatch(node)))
        try:
            for group in groups:
                self._tree.open_group(group, pid, QEMU, pod.uid)
                self._running[pod.uid] = pid
        except OSError as error:
            self.stop(pod)
            number = error.errno or 0
            raise OSError(number, _qemu_says(devices, group, os.strerror(number))) from error

    def stop(self, pod: Pod) -> None:
        """Implement `Tenancy.stop`."""
        pid = self._running.pop(pod.uid, None)
        if pid is not None and (uevents := self._tree.kill(pid)):
            self._tell(uevents)

    def pid(self, pod: Pod) -> int | None:
        """Return the process of a pod's virtual machine, while it has something open."""
        return self._running.get(pod.uid)


def _qemu_says(devices: Sequence[str], group: int, why: str) -> str:
    """hw/vfio/container.c, vfio_get_group. The group does not show which of its devices it was."""
    hosts = " or ".join(devices)
    return f"qemu-system-x86_64: -device vfio-pci,host={hosts}: vfio {hosts}: failed to open /dev/vfio/{group}: {why}"


@dataclass(eq=False, slots=True)
class _Container:
    pod: Pod
    devices: tuple[str, ...]
    nodes: tuple[str, ...]
    opened: bool = False


@final
class Containers:
    """`nursery` is the node, which outlives kubelet. `exited` is called with the pod and the reason, None for a
    clean end, for a container that had been started and has ended."""

    def __init__(
        self,
        nursery: trio.Nursery,
        tenancy: Tenancy | None,
        exited: Callable[[Pod, str | None], None],
    ) -> None:
        self._nursery = nursery
        self._tenancy = tenancy
        self._exited = exited
        self._running: dict[str, _Container] = {}
        """By pod UID, oldest first."""
        self.double_handouts: list[DoubleHandOut] = []

    def start(
        self, pod: Pod, devices: Sequence[str], nodes: Sequence[str], opens_after_s: float
    ) -> str | None:
        """The container starts; its virtual machine opens the devices then, or `opens_after_s` later.

        Returns why it has failed at once, or None.
        """
        container = _Container(pod, tuple(devices), tuple(nodes))
        if opens_after_s == 0 and (problem := self._open(container)) is not None:
            return problem
        self._running[pod.uid] = container
        if opens_after_s > 0:
            self._nursery.start_soon(self._open_later, container, opens_after_s)
        return None

    def is_running(self, pod: Pod) -> bool:
        """Return whether the pod's container runs."""
        return pod.uid in self._running

    @property
    def pods(self) -> tuple[Pod, ...]:
        """The pods, deleted ones included, whose container runs."""
        return tuple(container.pod for container in self._running.values())

    def kill(self, pod: Pod, after_s: float | None) -> None:
        """SIGTERM: the container ends after `after_s`; None if it ignores SIGTERM."""
        container = self._running.get(pod.uid)
        if container is None or after_s is None:
            return
        if after_s == 0:
            self._end(container, None)
        else:
            self._nursery.start_soon(self._end_later, container, after_s)

    def end(self, name: str) -> None:
        """SIGKILL, or the guest shuts down: the container of a pod of that name, the oldest one, ends now.

        Raises `KeyError` if there is none.
        """
        for container in self._running.values():
            if container.pod.name == name:
                self._end(container, None)
                return
        raise KeyError(name)

    def lose(self) -> None:
        """Drop every container, as the machine stops; `exited` is not called."""
        lost, self._running = self._running, {}
        for container in lost.values():
            if container.opened and self._tenancy is not None:
                self._tenancy.stop(container.pod)

    async def _open_later(self, container: _Container, after_s: float) -> None:
        await trio.sleep(after_s)
        if self._lives(container) and (problem := self._open(container)) is not None:
            self._end(container, problem)

    async def _end_later(self, container: _Container, after_s: float) -> None:
        await trio.sleep(after_s)
        if self._lives(container):
            self._end(container, None)

    def _lives(self, container: _Container) -> bool:
        return self._running.get(container.pod.uid) is container

    def _open(self, container: _Container) -> str | None:
        if self._tenancy is None:
            return None
        try:
            self._tenancy.start(container.pod, container.devices, container.nodes)
        except OSError as error:
            message = error.strerror or str(error)
            if error.errno == errno.EBUSY:
                self.double_handouts.append(DoubleHandOut(container.pod.name, container.devices, message))
            return message
        container.opened = True
        return None

    def _end(self, container: _Container, why: str | None) -> None:
        del self._running[container.pod.uid]
        if container.opened and self._tenancy is not None:
            self._tenancy.stop(container.pod)
        self._exited(container.pod, why)
