"""The incident with a real QEMU: a GPU that a virtual machine has is not given to another one.

`Could not open '/dev/vfio/51': Device or resource busy` is what the second QEMU said. Here the first is an external
process to kubelet, then a pod's, then one that outlives its pod; the next pod's container waits until it has let go.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from gpuactors import limits
from gpuactors.daemon.app import STOP_DEADLINE_S
from tests.support.kubelet_grpcio import HEALTHY, UNHEALTHY
from tests.vm.guest.modes import (
    GROUP_SEEN_WITHIN_S,
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
    timed_ns,
)
from tests.vm.guest.node import NAMED_WITHIN_S, SLACK_S
from tests.vm.guest.qemu import Qemu
from tests.vm.guest.runner import Guest
from tests.vm.guest.sysfs import Function, function_behind
from tests.vm.machine import Machine, PciFunction
from tests.vm.provision import CHECKOUT

MACHINE: Final = Machine(
    ports=("rp1", "rp2"),
    functions=(PciFunction("edu1", "edu", "rp1"), PciFunction("edu2", "edu", "rp2")),
    memory_mib=1536,
    scenario_timeout_s=420.0,
)

WAITING_S: Final = 1.0
"""A PreStartContainer that has not been answered for so long waits for something: its inspections take milliseconds."""

BUSY: Final = r"(Could not|failed to) open '?/dev/vfio/{group}'?: Device or resource busy"
"""QEMU's words since 8.2, and before."""


def run(guest: Guest) -> None:
    """Two daemons; each of the virtual machines has the first function, nobody the second."""
    edu1, edu2 = (function_behind(guest.machine, port) for port in ("rp1", "rp2"))
    make_pod_cgroup()
    with both_modes(guest, edu1, edu2) as (passive, proc):
        started_ns = time.monotonic_ns()
        scene = _Scene(guest, passive, proc, edu1)
        with scene.qemu("external") as external:
            scene.external(external)
            scene.incident(external)
            with guest.step("the external process is killed: Healthy again"):
                scene.released(timed_ns(external.kill))
        with scene.pods_machine() as vm:
            scene.outlives_its_pod(vm)
        scene.next_pod()
        for watcher in scene.watchers:
            watcher.check_healthy_since(started_ns, edu2)


@dataclass(frozen=True, slots=True)
class _Scene:
    guest: Guest
    passive: Watcher
    proc: Watcher
    edu: Function

    @property
    def watchers(self) -> Sequence[Watcher]:
        return (self.passive, self.proc)

    def qemu(self, name: str) -> Qemu:
        return Qemu.start(self.edu, self.guest.artifacts / f"qemu-{name}.log")

    def external(self, qemu: Qemu) -> None:
        """Nobody gave it anything. Until it opens the device, sysfs shows nothing, and it may take its time."""
        with self.guest.step("QEMU that kubelet knows nothing of: Unhealthy, named with proc"):
            taken = qemu.wait_taken()
            group_ms, device_ms = (
                _ms(taken.started_ns, taken.group_ns),
                _ms(taken.started_ns, taken.device_ns),
            )
            figure(self.guest, "qemu_start_to_group_ms", group_ms)
            figure(self.guest, "qemu_group_to_device_ms", round(device_ms - group_ms, 1))
            for watcher, taken_ms, within_s in (
                (self.passive, device_ms, SEEN_WITHIN_S),
                (self.proc, group_ms, GROUP_SEEN_WITHIN_S),
            ):
                # From its start, as a daemon may be quicker than our own read of the process.
                told_ms = watcher.told(self.edu, UNHEALTHY, taken.started_ns, taken_ms / 1000 + within_s)
                figure(self.guest, f"{watcher.mode}_take_to_frame_ms", round(told_ms - taken_ms, 1))
            self.passive.wait_reason(self.edu, f"in use (enable of {self.edu.address} is 1)")
            self.proc.wait_reason(self.edu, f"held by {qemu}, and kubelet has given it to no pod")

    def incident(self, qemu: Qemu) -> None:
        """What happened on the node, and what would have happened with this daemon."""
        with self.guest.step(
            "a second QEMU cannot open it; Allocate would not have given it away; explain says why"
        ):
            explain = _explain(self.proc, self.edu)
            with self.qemu("second") as second:
                said = second.wait_refused()
            assert re.search(BUSY.format(group=self.edu.group), said), said
            print(f"    {said.strip()}", flush=True)
            assert "enable" in self.passive.check_refused(self.edu)
            refusal = self.proc.check_refused(self.edu)
            print(f"    Allocate: {refusal}", flush=True)
            assert f"held by {qemu}" in refusal
            explained, _ = explain.communicate(timeout=STOP_DEADLINE_S + 60.0)
            if "did not report its status" in explained:
                # Emulated, beside a second QEMU that starts, the daemon may need longer than an operator waits.
                explained, _ = _explain(self.proc, self.edu).communicate(timeout=60.0)
            (self.guest.artifacts / "explain.txt").write_text(explained, encoding="utf-8")
            assert f"Unhealthy: IOMMU group {self.edu.group} is held by {qemu}" in explained, explained
            assert "none: kubelet has given it to no pod" in explained, explained

    @contextmanager
    def pods_machine(self) -> Iterator[Qemu]:
        with self.guest.step(
            "QEMU as a pod's virtual machine: Healthy all the time, and the log says whose it is"
        ):
            started_ns = time.monotonic_ns()
            for watcher in self.watchers:
                watcher.kubelet.allocate(RESOURCE, [self.edu.address], pod="vm-1")
                watcher.kubelet.prestart(RESOURCE, [self.edu.address])
            qemu = self.qemu("pod")
            become_a_pods(qemu.process.pid)
            qemu.wait_taken()
            time.sleep(POLLED_S)
            for watcher in self.watchers:
                watcher.wait_reason(self.edu, "allocated to pod default/vm-1", NAMED_WITHIN_S)
                watcher.check_healthy_since(started_ns, self.edu)
        with qemu:
            yield qemu

    def outlives_its_pod(self, qemu: Qemu) -> None:
        """Kubelet gives the GPU of a pod that was deleted by force to the next one at once."""
        step = self.guest.step
        with step("its pod is deleted by force, the next one's container waits while QEMU lives"):
            for watcher in self.watchers:
                watcher.kubelet.force_delete("vm-1")
                watcher.kubelet.allocate(RESOURCE, [self.edu.address], pod="vm-2")
            waiting = [PreStart(watcher, self.edu) for watcher in self.watchers]
            time.sleep(WAITING_S)
            assert not any(call.answered for call in waiting)
        with step("QEMU is killed: the container may start"):
            killed_ns = time.monotonic_ns()
            qemu.process.kill()
            for call in waiting:
                took_ms = _ms(killed_ns, call.granted_ns(RELEASE_SEEN_WITHIN_S))
                figure(self.guest, f"{call.watcher.mode}_kill_to_pre_start_ms", took_ms)

    def next_pod(self) -> None:
        with self.guest.step("the next pod's QEMU has it, and ends with its pod"), self.qemu("next") as vm:
            become_a_pods(vm.process.pid)
            vm.wait_taken()
            vm.kill()
            for watcher in self.watchers:
                watcher.kubelet.end_pod("vm-2")
            for watcher in self.watchers:
                watcher.wait_reason(self.edu, "free", limits.LEDGER_S + SLACK_S)
                assert watcher.health(self.edu) == HEALTHY

    def released(self, since_ns: int) -> None:
        for watcher in self.watchers:
            took_ms = watcher.told(self.edu, HEALTHY, since_ns, RELEASE_SEEN_WITHIN_S)
            figure(self.guest, f"{watcher.mode}_release_to_frame_ms", took_ms)
            watcher.wait_reason(self.edu, "free")


def _explain(watcher: Watcher, function: Function) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "gpuactors", "explain", function.address),
            *("--state-dir", str(watcher.daemon.state_dir)),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT / "src")},
    )


def _ms(from_ns: int, to_ns: int) -> float:
    return round((to_ns - from_ns) / 1e6, 1)
