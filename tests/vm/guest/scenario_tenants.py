"""Every way to have a GPU open, inside and outside a container: detection, the named holder, and the release.

The kernel says nothing of an open or a close (no uevent), and a container has device nodes of its own, which no
process outside can read: all that kubelet gets here comes from the daemons' polls.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from tests.support.kubelet_grpcio import HEALTHY, UNHEALTHY
from tests.vm.guest.modes import (
    GROUP_SEEN_WITHIN_S,
    POD_UID,
    POLLED_S,
    RELEASE_SEEN_WITHIN_S,
    SEEN_WITHIN_S,
    Watcher,
    become_a_pods,
    both_modes,
    health_in,
    make_pod_cgroup,
    opens,
    spread,
    timed_ns,
)
from tests.vm.guest.runner import Guest
from tests.vm.guest.sysfs import Function, function_behind
from tests.vm.guest.tenant import Tenant
from tests.vm.machine import Machine, PciFunction

MACHINE: Final = Machine(
    ports=("rp1", "rp2"),
    functions=(PciFunction("edu1", "edu", "rp1"), PciFunction("edu2", "edu", "rp2")),
    scenario_timeout_s=420.0,
)

WAYS_OUT: Final = (("close", Tenant.close), ("exit", Tenant.quit), ("SIGKILL", Tenant.kill))

CYCLES: Final = (
    *((contained, *way) for contained in (False, True) for way in WAYS_OUT),
    (False, *WAYS_OUT[0]),
    (True, *WAYS_OUT[2]),
)
"""Each way out of each kind of process, and two more, so that with both modes' there are 20 of each figure."""


def run(guest: Guest) -> None:
    """Two daemons, and one tenant after the other at the same function; the other one is nobody's all the time."""
    edu1, edu2 = (function_behind(guest.machine, port) for port in ("rp1", "rp2"))
    make_pod_cgroup()
    with both_modes(guest, edu1, edu2) as (passive, proc):
        started_ns = time.monotonic_ns()
        scene = _Scene(guest, passive, proc, edu1)
        for contained, name, leave in CYCLES:
            where = "in a container" if contained else "on the node"
            with guest.step(f"device open {where}, let go by {name}"):
                scene.device(contained=contained, leave=leave)
        with guest.step("device open, the group's and the container's descriptors closed"):
            scene.device_alone()
        with guest.step("device open in a process and its child: held until the child has ended too"):
            scene.passed_on()
        for name, contained, take, leave in (
            ("group open on the node", False, _take_group, Tenant.close),
            ("group open in a container", True, _take_group, Tenant.quit),
            ("group and VFIO container open in a container", True, _take_vfio_container, Tenant.kill),
        ):
            with guest.step(f"{name}: seen with proc alone"):
                scene.no_device(contained=contained, take=take, leave=leave)
        spread(guest, "device_open_to_frame", scene.takes)
        spread(guest, "group_open_to_frame", scene.group_takes)
        spread(guest, "release_to_frame", scene.releases)
        for watcher in (passive, proc):
            watcher.check_healthy_since(started_ns, edu2)


@dataclass(frozen=True, slots=True)
class _Scene:
    guest: Guest
    passive: Watcher
    proc: Watcher
    edu: Function
    takes: list[float] = field(default_factory=list)
    group_takes: list[float] = field(default_factory=list)
    releases: list[float] = field(default_factory=list)

    def device(self, *, contained: bool, leave: Callable[[Tenant], None]) -> None:
        """Unhealthy in both device lists, by name with `proc`; Healthy again when it lets go."""
        with _tenant(self.edu, contained=contained) as tenant:
            named = _named(tenant, contained=contained)
            self._taken(timed_ns(lambda: tenant.open_device(self.edu.group_node, self.edu.address)))
            self._because(self.passive, f"in use (enable of {self.edu.address} is 1)")
            self._because(self.proc, f"held by {named}")
            self._released(timed_ns(lambda: leave(tenant)))

    def device_alone(self) -> None:
        """What is left does not say to which group it belongs: seen, but nobody can be named."""
        with Tenant.start() as tenant:
            taken_ns = timed_ns(lambda: tenant.open_device(self.edu.group_node, self.edu.address))
            tenant.keep_device_alone()
            self._taken(taken_ns)
            for watcher in (self.passive, self.proc):
                self._because(watcher, f"in use (enable of {self.edu.address} is 1)")
            self._released(timed_ns(tenant.kill))

    def passed_on(self) -> None:
        """The end of who opened it is no release."""
        with Tenant.start() as tenant:
            taken_ns = timed_ns(lambda: tenant.open_device(self.edu.group_node, self.edu.address))
            child = tenant.fork()
            self._taken(taken_ns)
            both = f"held by {_named(tenant)}, process {child} ({tenant.command})"
            self.proc.wait_reason(self.edu, both, GROUP_SEEN_WITHIN_S)
            command = tenant.command
            tenant.kill()
            self.proc.wait_reason(self.edu, f"held by process {child} ({command})", RELEASE_SEEN_WITHIN_S)
            for watcher in (self.passive, self.proc):
                assert watcher.health(self.edu) == UNHEALTHY
                healths = [health_in(frame, self.edu) for frame in watcher.frames_since(taken_ns)]
                # A frame from before it was seen may still have been on its way.
                assert HEALTHY not in healths[healths.index(UNHEALTHY) :], (watcher.mode, healths)
            self._released(timed_ns(lambda: os.kill(child, signal.SIGKILL)))

    def no_device(
        self, *, contained: bool, take: Callable[[Tenant, Function], None], leave: Callable[[Tenant], None]
    ) -> None:
        """Nothing in sysfs shows it: only a read of the processes can."""
        with _tenant(self.edu, contained=contained) as tenant:
            taken_ns = timed_ns(lambda: take(tenant, self.edu))
            assert not opens(self.edu)
            self.group_takes.append(self.proc.told(self.edu, UNHEALTHY, taken_ns, GROUP_SEEN_WITHIN_S))
            self._because(self.proc, f"held by {_named(tenant, contained=contained)}")
            # So long that the other daemon has polled as well.
            time.sleep(max(0.0, POLLED_S - (time.monotonic_ns() - taken_ns) / 1e9))
            assert not opens(self.edu)
            self.passive.check_healthy_since(taken_ns, self.edu)
            released_ns = timed_ns(lambda: leave(tenant))
            self.releases.append(self.proc.told(self.edu, HEALTHY, released_ns, RELEASE_SEEN_WITHIN_S))
            self._free()
            self.passive.check_healthy_since(taken_ns, self.edu)

    def _taken(self, since_ns: int) -> None:
        assert not opens(self.edu)
        for watcher in (self.passive, self.proc):
            self.takes.append(watcher.told(self.edu, UNHEALTHY, since_ns, SEEN_WITHIN_S))

    def _because(self, watcher: Watcher, what: str) -> None:
        watcher.wait_reason(
            self.edu, f"IOMMU group {self.edu.group} is {what}, and kubelet has given it to no pod"
        )

    def _released(self, since_ns: int) -> None:
        for watcher in (self.passive, self.proc):
            self.releases.append(watcher.told(self.edu, HEALTHY, since_ns, RELEASE_SEEN_WITHIN_S))
        self._free()

    def _free(self) -> None:
        for watcher in (self.passive, self.proc):
            watcher.wait_reason(self.edu, "free")
        assert opens(self.edu)


def _tenant(edu: Function, *, contained: bool) -> Tenant:
    """In a container it is one in every respect that matters here: mounts, processes, device nodes, cgroup."""
    tenant = Tenant.start(contained=contained)
    if contained:
        become_a_pods(tenant.pid)
        node = os.stat(edu.group_node)
        inside = os.stat(f"/proc/{tenant.pid}/root{edu.group_node}")
        assert inside.st_rdev == node.st_rdev
        assert (inside.st_dev, inside.st_ino) != (node.st_dev, node.st_ino)
        assert os.readlink(f"/proc/{tenant.pid}/ns/pid") != os.readlink("/proc/self/ns/pid")
    return tenant


def _named(tenant: Tenant, *, contained: bool = False) -> str:
    """How the daemon must call it."""
    pod = f" of the pod with UID {POD_UID}" if contained else ""
    return f"process {tenant.pid} ({tenant.command}){pod}"


def _take_group(tenant: Tenant, edu: Function) -> None:
    tenant.open_group(edu.group_node)


def _take_vfio_container(tenant: Tenant, edu: Function) -> None:
    tenant.open_container(edu.group_node)
