"""Kubelet's ledger compared with the kernel: the owner of a GPU in use, and the answer of Allocate.

An external process or a pod's virtual machine is a process of its own that opens group, container and device as QEMU
does. How each kind of open is seen and named is `scenario_tenants.py`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from gpuactors import limits
from tests.support.kubelet_grpcio import HEALTHY, UNHEALTHY
from tests.vm.guest.modes import (
    POLLED_S,
    RELEASE_SEEN_WITHIN_S,
    RESOURCE,
    SEEN_WITHIN_S,
    Watcher,
    become_a_pods,
    both_modes,
    figure,
    make_pod_cgroup,
    timed_ns,
)
from tests.vm.guest.node import NAMED_WITHIN_S, SLACK_S
from tests.vm.guest.runner import Guest
from tests.vm.guest.sysfs import Function, function_behind
from tests.vm.guest.tenant import Tenant
from tests.vm.machine import Machine, PciFunction

MACHINE: Final = Machine(
    ports=("rp1", "rp2"),
    functions=(PciFunction("edu1", "edu", "rp1"), PciFunction("edu2", "edu", "rp2")),
)

LEFT_SEEN_WITHIN_S: Final = limits.LEDGER_S + SLACK_S
"""A pod is gone from kubelet's ledger, its process is not; such a change is followed by a poll at once."""

ALLOCATIONS_AT_ONCE: Final = 3
"""Allocate so many times right after an external process opened the group, in whatever phase the daemon's polls are."""


def run(guest: Guest) -> None:
    """Everything happens to the first function; the second one is Healthy from the beginning to the end."""
    edu1, edu2 = (function_behind(guest.machine, port) for port in ("rp1", "rp2"))
    make_pod_cgroup()
    with both_modes(guest, edu1, edu2) as (passive, proc):
        started_ns = time.monotonic_ns()
        with guest.step("both: a pod holds what it was given: Healthy all the time, also after it ends"):
            _virtual_machine(edu1, (passive, proc))
        with guest.step(
            "passive: Allocate right after an external process opened the device: refused, then Unhealthy"
        ):
            _device_at_once(passive, edu1)
        # A pass over /proc is asked for only by what happens: this process must not be there any more.
        proc.wait_health(edu1, HEALTHY, RELEASE_SEEN_WITHIN_S)
        with guest.step(
            "proc: Allocate right after an external process opened the group: refused, then Unhealthy"
        ):
            _group_at_once(proc, edu1)
        with guest.step("proc: a pod is deleted by force, its process lives on: Unhealthy until that ends"):
            _deleted_by_force(guest, proc, edu1)
        for watcher in (passive, proc):
            watcher.check_healthy_since(started_ns, edu2)


def _virtual_machine(edu: Function, watchers: Sequence[Watcher]) -> None:
    """A pod's own process opens what it was given: it was counted when it was allocated, and is not counted again."""
    with Tenant.start() as vm:
        started_ns = time.monotonic_ns()
        for watcher in watchers:
            watcher.kubelet.allocate(RESOURCE, [edu.address], pod="vm-1")
            watcher.kubelet.prestart(RESOURCE, [edu.address])
        become_a_pods(vm.pid)
        vm.open_device(edu.group_node, edu.address)
        time.sleep(POLLED_S)
        for watcher in watchers:
            watcher.wait_reason(edu, "allocated to pod default/vm-1", NAMED_WITHIN_S)
        vm.kill()
        for watcher in watchers:
            watcher.kubelet.end_pod("vm-1")
        for watcher in watchers:
            watcher.wait_reason(edu, "free", SEEN_WITHIN_S)
            watcher.check_healthy_since(started_ns, edu)


def _device_at_once(passive: Watcher, edu: Function) -> None:
    with Tenant.start() as external:
        external.open_device(edu.group_node, edu.address)
        assert "enable" in passive.check_refused(edu)
        external.close()
        passive.wait_health(edu, HEALTHY, RELEASE_SEEN_WITHIN_S)


def _group_at_once(proc: Watcher, edu: Function) -> None:
    """What the daemon found in /proc a moment ago must not be taken for what is so now: nothing in sysfs shows a group
    that is open without its device."""
    with Tenant.start() as external:
        for _ in range(ALLOCATIONS_AT_ONCE):
            external.open_group(edu.group_node)
            assert f"process {external.pid} ({external.command})" in proc.check_refused(edu)
            external.close()
            proc.wait_health(edu, HEALTHY, RELEASE_SEEN_WITHIN_S)


def _deleted_by_force(guest: Guest, proc: Watcher, edu: Function) -> None:
    with Tenant.start() as vm:
        proc.kubelet.allocate(RESOURCE, [edu.address], pod="vm-2")
        uid = proc.kubelet.uid("vm-2")
        become_a_pods(vm.pid, uid)
        vm.open_device(edu.group_node, edu.address)
        # Else kubelet's device lists would never have had it, as far as the daemon can know.
        proc.wait_reason(edu, "allocated to pod default/vm-2", NAMED_WITHIN_S)
        deleted_ns = timed_ns(lambda: proc.kubelet.force_delete("vm-2"))
        took_ms = proc.told(edu, UNHEALTHY, deleted_ns, LEFT_SEEN_WITHIN_S)
        figure(guest, "force_delete_to_unhealthy_ms", took_ms)
        proc.wait_reason(edu, f"process {vm.pid} ({vm.command}) of the pod with UID {uid}")
        proc.wait_reason(edu, "pod default/vm-2 is gone from kubelet's ledger")
        killed_ns = timed_ns(vm.kill)
        took_ms = proc.told(edu, HEALTHY, killed_ns, RELEASE_SEEN_WITHIN_S)
        figure(guest, "left_holder_sigkill_to_healthy_ms", took_ms)
