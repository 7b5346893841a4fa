"""What fails where an option lacks what it needs (deploy/README.md, "What each option needs"), and the messages for it.

Five daemons beside each other, each with a kubelet of its own, in pods that lack something. None of them may fail
silently, and none may do worse at what it does not lack it for: late binds reach kubelet, GPUs are handed out.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from gpuactors.actors.udev_watcher import UEVENTS_RETRY_S
from gpuactors.core.host.inspections import UNSETTLED_INSPECTIONS_S
from gpuactors.core.host.schedule import POLL_FAST_S
from gpuactors.core.host.usage import POLL_S
from tests.support.kubelet_grpcio import HEALTHY, UNHEALTHY, KubeletStandIn
from tests.vm.guest.daemon import START_TIMEOUT_S, DaemonProcess
from tests.vm.guest.node import SLACK_S, by_address
from tests.vm.guest.pod import STATE_DIR, MakePod, Pod, base_pod, holders_proc_pod, privileged_pod
from tests.vm.guest.runner import Guest, eventually
from tests.vm.guest.sysfs import Function, function_behind
from tests.vm.guest.tenant import Tenant
from tests.vm.machine import Machine, PciFunction

MACHINE: Final = Machine(
    ports=("rp1", "rp2"),
    functions=(PciFunction("edu1", "edu", "rp1"), PciFunction("edu2", "edu", "rp2")),
    memory_mib=1536,
    scenario_timeout_s=600.0,
)

RESOURCE: Final = "pci-1234/11e8"
POD_RESOURCES: Final = "/var/lib/kubelet/pod-resources"

HEARD_WITHIN_S: Final = UNSETTLED_INSPECTIONS_S[0] + SLACK_S
SCANNED_WITHIN_S: Final = UEVENTS_RETRY_S + SLACK_S
"""Where uevents cannot be had, asking for them again is followed by a scan."""

SEEN_WITHIN_S: Final = POLL_S + SLACK_S
RELEASE_SEEN_WITHIN_S: Final = POLL_FAST_S + SLACK_S


@dataclass(frozen=True, slots=True)
class Lack:
    """A daemon that lacks something: its arguments, its pod, and what its log must say once, event by event."""

    name: str
    holders: str
    pod: MakePod
    said: dict[str, str]
    heard: bool = True
    group_seen: bool = False
    """Whether it sees a group that is open without its device."""


def _without(pod: Pod, target: str) -> Pod:
    return replace(pod, mounts=tuple(mount for mount in pod.mounts if mount.target != target))


def _read_only(pod: Pod, target: str) -> Pod:
    mounts = tuple(replace(m, read_only=True) if m.target == target else m for m in pod.mounts)
    return replace(pod, mounts=mounts)


LACKS: Final = (
    Lack(
        name="no-host-proc",  # and no PodResources
        holders="proc",
        pod=lambda *node: _without(base_pod(*node), POD_RESOURCES),
        said={
            "holders.unavailable": "/host/proc cannot be listed (No such file or directory)",
            "ledger.read": "kubelet_internal_checkpoint",
        },
    ),
    Lack(
        name="no-capabilities",
        holders="proc",
        pod=lambda *node: replace(holders_proc_pod(*node), capabilities=()),
        said={"holders.unavailable": "CAP_DAC_READ_SEARCH and CAP_SYS_PTRACE"},
    ),
    Lack(
        name="no-device",  # and a state directory that cannot be written
        holders="open",
        pod=lambda *node: _read_only(base_pod(*node), STATE_DIR),
        said={
            "holders.unavailable": "/host/dev/vfio/* may not be opened (Operation not permitted)",
            "control.unavailable": f"may not write to the state directory {STATE_DIR}",
            "journal.failed": f"{STATE_DIR}/journal cannot be written: Read-only file system",
        },
    ),
    Lack(
        name="user-namespace",  # and no state directory
        holders="passive",
        pod=lambda *node: replace(_without(base_pod(*node), STATE_DIR), user_namespace=True),
        said={
            "uevents.unavailable": "hostUsers: false",
            "control.unavailable": f"the state directory {STATE_DIR} does not exist",
            "journal.failed": f"{STATE_DIR}/journal cannot be written",
        },
        heard=False,
    ),
    Lack(name="nothing", holders="open", pod=privileged_pod, said={}, group_seen=True),
)

COMPLAINTS: Final = ("holders.unavailable", "uevents.unavailable", "control.unavailable", "journal.failed")


def run(guest: Guest) -> None:
    """All of them through one story."""
    edu1, edu2 = (function_behind(guest.machine, port) for port in ("rp1", "rp2"))
    edu1.bind_vfio()
    with ExitStack() as stack:
        with guest.step("the daemons start, and each hands its first frame to its kubelet"):
            all_of_them = [_started(stack, guest, lack) for lack in LACKS]
            for each in all_of_them:
                each.wait({edu1.address: HEALTHY}, len(LACKS) * START_TIMEOUT_S)
        _late_bind(guest, all_of_them, edu1, edu2)
        _strangers(guest, all_of_them, edu1, edu2)
        for each in all_of_them:
            with guest.step(f"{each.lack.name}: says what it lacks, once, and nothing else; ends with 0"):
                each.check_words()
                assert each.daemon.terminate() == 0
                each.daemon.check_one_life()
                assert not each.kubelet.panics, each.kubelet.panics


@dataclass(frozen=True, slots=True)
class _Daemon:
    lack: Lack
    guest: Guest
    kubelet: KubeletStandIn
    daemon: DaemonProcess

    def wait(self, wanted: dict[str, str], within_s: float) -> None:
        what = f"lists with {wanted} ({self.lack.name})"
        self.kubelet.wait_for(lambda lists: by_address(lists) == wanted, within_s, what)

    def check_words(self) -> None:
        for event in {*COMPLAINTS, *self.lack.said}:
            reasons = [str(line.get("reason", line.get("source"))) for line in self.daemon.said(event)]
            print(f"    {event}: {reasons}", flush=True)
            if event not in self.lack.said:
                assert not reasons
                continue
            assert self.lack.said[event] in reasons[0], reasons
            assert event not in COMPLAINTS or len(reasons) == 1, reasons


def _started(stack: ExitStack, guest: Guest, lack: Lack) -> _Daemon:
    kubelet = stack.enter_context(KubeletStandIn(Path(f"/run/kubelet-{lack.name}")))
    arguments = (
        "--kubelet-dir", f"/run/kubelet-{lack.name}", "--resync-interval-s", "3600", "--holders", lack.holders,
        "--select", "vendor=1234,device=11e8",
    )  # fmt: skip
    log_file = guest.artifacts / f"{lack.name}.log"
    daemon = stack.enter_context(DaemonProcess.start(arguments, log_file, pod=lack.pod))
    # One pod after the other, while those before it import: once, with all five being made at the same moment, both
    # processors of the emulated machine got stuck in the kernel.
    eventually(f"the pod {lack.name}", lambda: _is_made(daemon), timeout_s=START_TIMEOUT_S)
    return _Daemon(lack, guest, kubelet, daemon)


def _is_made(daemon: DaemonProcess) -> bool:
    daemon.check_alive()
    return b"tests.vm.guest.confined" not in Path(f"/proc/{daemon.process.pid}/cmdline").read_bytes()


def _late_bind(guest: Guest, all_of_them: list[_Daemon], edu1: Function, edu2: Function) -> None:
    both = {edu1.address: HEALTHY, edu2.address: HEALTHY}
    with guest.step("a late bind is heard, or found by a scan"):
        edu2.bind_vfio()
        for each in sorted(all_of_them, key=lambda each: not each.lack.heard):
            each.wait(both, HEARD_WITHIN_S if each.lack.heard else SCANNED_WITHIN_S)
    with guest.step("Allocate"):
        for each in all_of_them:
            given = each.kubelet.allocate(RESOURCE, [edu2.address], pod="vm-1")
            assert str(edu2.group_node) in [device.host_path for device in given.devices]


def _strangers(guest: Guest, all_of_them: list[_Daemon], edu1: Function, edu2: Function) -> None:
    free = {edu1.address: HEALTHY, edu2.address: HEALTHY}
    held = {**free, edu1.address: UNHEALTHY}
    with Tenant.start() as external:
        with guest.step("an external process opens a group alone: seen by each daemon that may open it"):
            external.open_group(edu1.group_node)
            for each in sorted(all_of_them, key=lambda each: not each.lack.group_seen):
                each.wait(held if each.lack.group_seen else free, SEEN_WITHIN_S)
            external.close()
            for each in all_of_them:
                each.wait(free, SEEN_WITHIN_S)
        with guest.step("an external process opens the device: seen by all, named by none"):
            external.open_device(edu1.group_node, edu1.address)
            for each in all_of_them:
                each.wait(held, SEEN_WITHIN_S)
        with guest.step("it ends: seen by all"):
            external.kill()
            for each in all_of_them:
                each.wait(free, RELEASE_SEEN_WITHIN_S)
