"""A GPU that cannot be reset by itself is released slowly, and is not allocated before that is over.

Where a slot has several functions (a GPU and its audio) and none of them can be reset by itself, the kernel resets the
slot when the last one is closed: with `enable` 0 already, with no descriptor in /proc any more where its holder was
killed, and with the group refusing everybody for seconds (drivers/vfio/pci/vfio_pci_core.c, vfio_pci_core_disable).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from gpuactors.core.host.schedule import POLL_FAST_S
from tests.support.kubelet_grpcio import HEALTHY, UNHEALTHY
from tests.support.patience import patient
from tests.vm.guest.modes import (
    POLLED_S,
    RELEASE_SEEN_WITHIN_S,
    RESOURCE,
    SEEN_WITHIN_S,
    PreStart,
    Watcher,
    become_a_pods,
    both_modes,
    figure,
    make_pod_cgroup,
    opens,
    timed_ns,
)
from tests.vm.guest.node import NAMED_WITHIN_S
from tests.vm.guest.runner import Guest, eventually
from tests.vm.guest.sysfs import Function, functions_behind
from tests.vm.guest.tenant import Tenant
from tests.vm.machine import Machine, PciFunction

MACHINE: Final = Machine(
    ports=("rp1",),
    functions=(
        # It knows power management, for which the kernel waits after a reset; the other one cannot be reset alone.
        PciFunction("nic", "e1000e", "rp1", function=0, properties=("romfile=",)),
        PciFunction("edu", "edu", "rp1", function=1),
    ),
)

RELEASE_TIMEOUT_S: Final = patient(10.0)
"""From the kill to a group that opens. Seen: 2.2 s."""

EARLY_MAX_S: Final = POLL_FAST_S
"""How much sooner than the group opens it may be called free: suspended comes last but for the group's own release."""


def run(guest: Guest) -> None:
    """Both daemons; one tenant after the other."""
    nic, edu = functions_behind(guest.machine, "rp1")
    # Only where all its functions are on vfio-pci may the slot be reset.
    nic.bind_vfio()
    make_pod_cgroup()
    with both_modes(guest, edu) as watchers:
        with guest.step("an external process is killed: Healthy when the group opens, not before"):
            _stranger(guest, watchers, edu)
        with guest.step(
            "a pod's process is killed: the next pod's container starts when the group opens, not before"
        ):
            _next_pod(guest, watchers, edu)


def _stranger(guest: Guest, watchers: Sequence[Watcher], edu: Function) -> None:
    with Tenant.start() as external:
        external.open_device(edu.group_node, edu.address)
        for watcher in watchers:
            watcher.wait_health(edu, UNHEALTHY, SEEN_WITHIN_S)
        killed_ns = timed_ns(external.process.kill)
        opens_ns = _opens_ns(guest, edu, killed_ns)
        for watcher in watchers:
            took_ms = watcher.told(edu, HEALTHY, killed_ns, RELEASE_TIMEOUT_S + RELEASE_SEEN_WITHIN_S)
            _check(guest, f"{watcher.mode}_healthy", killed_ns + round(took_ms * 1e6), opens_ns)


def _next_pod(guest: Guest, watchers: Sequence[Watcher], edu: Function) -> None:
    # Of its own, as the calls take seconds where the machine is slow.
    with ThreadPoolExecutor(max_workers=1) as thread, Tenant.start() as vm:
        for watcher in watchers:
            watcher.kubelet.allocate(RESOURCE, [edu.address], pod="vm-1")
            watcher.kubelet.prestart(RESOURCE, [edu.address])
        become_a_pods(vm.pid)
        vm.open_device(edu.group_node, edu.address)
        for watcher in watchers:
            watcher.wait_reason(edu, "allocated to pod default/vm-1", NAMED_WITHIN_S)
        # What no poll has seen in use is not waited for: a machine that lived that short is let go by `enable` alone.
        time.sleep(POLLED_S)
        killed_ns = timed_ns(vm.process.kill)
        opening = thread.submit(_opens_ns, guest, edu, killed_ns)
        # Its processes' end is what kubelet waits for, and not the end of what the kernel does for them.
        for watcher in watchers:
            watcher.kubelet.force_delete("vm-1")
            watcher.kubelet.allocate(RESOURCE, [edu.address], pod="vm-2")
        waiting = [PreStart(watcher, edu) for watcher in watchers]
        opens_ns = opening.result()
        for call in waiting:
            granted_ns = call.granted_ns(RELEASE_SEEN_WITHIN_S)
            _check(guest, f"{call.watcher.mode}_container", granted_ns, opens_ns)


def _opens_ns(guest: Guest, edu: Function, killed_ns: int) -> int:
    """When the group opens again; `enable` must have been 0 for long enough by then."""
    disabled_ns = eventually("disabled", lambda: _disabled_ns(edu), timeout_s=RELEASE_TIMEOUT_S)
    eventually("the group opening", lambda: opens(edu), timeout_s=RELEASE_TIMEOUT_S)
    opens_ns = time.monotonic_ns()
    figure(guest, "kill_to_disabled_ms", round((disabled_ns - killed_ns) / 1e6, 1))
    figure(guest, "disabled_to_group_opens_ms", round((opens_ns - disabled_ns) / 1e6, 1))
    assert opens_ns - disabled_ns > 2 * POLL_FAST_S * 1e9, "it was let go so fast that this shows nothing"
    return opens_ns


def _disabled_ns(edu: Function) -> int | None:
    enabled = (edu.path / "enable").read_text(encoding="ascii").strip() != "0"
    return None if enabled else time.monotonic_ns()


def _check(guest: Guest, name: str, at_ns: int, opens_ns: int) -> None:
    after_ms = round((at_ns - opens_ns) / 1e6, 1)
    figure(guest, f"{name}_after_group_opens_ms", after_ms)
    assert after_ms >= -EARLY_MAX_S * 1000, f"{name}: {-after_ms} ms before the group opens"
    assert after_ms <= RELEASE_SEEN_WITHIN_S * 1000, f"{name}: {after_ms} ms after the group opens"
