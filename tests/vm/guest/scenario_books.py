"""Who holds a GPU, against the real kernel: strangers are seen and named, releases too, and nobody is ever disturbed.

A stranger is a process of its own that opens the group, or group, container and device as QEMU does. The kernel says
nothing of any of that (no uevent): all that kubelet is told here comes from the daemon's polls.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
from inotify_simple import INotify, flags

from gpuactors import limits
from tests.support.kubelet_grpcio import HEALTHY, UNHEALTHY, KubeletStandIn
from tests.support.kubelet_seen import Frame
from tests.vm.guest.daemon import DaemonProcess
from tests.vm.guest.runner import Guest, eventually
from tests.vm.guest.sysfs import Function, function_behind
from tests.vm.guest.tenant import Tenant
from tests.vm.machine import Machine, PciFunction

MACHINE: Final = Machine(
    ports=("rp1", "rp2"),
    functions=(PciFunction("edu1", "edu", "rp1"), PciFunction("edu2", "edu", "rp2")),
)

RESOURCE: Final = "pci-1234/11e8"

SLACK_S: Final = 2.0
"""On top of the daemon's periods: reading /proc and the ledger, and sending the frame, in an emulated and busy machine.
Seen: at most 0.14 s, with a load of up to 6 on the host's two cores."""

SEEN_WITHIN_S: Final = limits.POLL_S + SLACK_S
"""A stranger has a device open, which sysfs shows."""

GROUP_SEEN_WITHIN_S: Final = limits.POLL_S + limits.PROC_SCAN_REST_MAX_S + SLACK_S
"""A stranger has a group open without its device, which only a pass over /proc shows."""

RELEASE_SEEN_WITHIN_S: Final = limits.POLL_FAST_S + SLACK_S
"""Somebody lets go who should not have held it."""

LEFT_SEEN_WITHIN_S: Final = limits.LEDGER_S + SLACK_S
"""A pod is gone from kubelet's ledger, its process is not; such a change is followed by a poll at once."""

FRAME_TIMEOUT_S: Final = 15.0
"""The first frames: binding, registering."""

POLLED_S: Final = limits.POLL_S + 0.5
"""After so long a poll has been made and, if it changed anything, told."""

OPENS: Final = 2000

CONTENDED_OPENS: Final = 300
"""Of each of two tenants at once: enough that they meet."""

ALLOCATIONS_AT_ONCE: Final = 3
"""Allocate so many times right after a stranger opened the group, in whatever phase the daemon's polls are."""

CGROUPS: Final = Path("/sys/fs/cgroup")

POD_UID: Final = "1b4e28ba-2fa1-11d2-883f-0016d3cca427"

CONTAINER: Final = (
    CGROUPS / f"kubepods.slice/kubepods-pod{POD_UID.replace('-', '_')}.slice/cri-containerd-1.scope"
)
"""The cgroup of that pod's container, as kubelet and containerd name it: by it a process is known to be a pod's."""


def run(guest: Guest) -> None:
    """Two daemons, `--holders passive` and `--holders proc`, each with a kubelet of its own: what must hold for both is
    tried with both at once, the rest with one after the other."""
    edu1, edu2 = (function_behind(guest.machine, port) for port in ("rp1", "rp2"))
    edu1.bind_vfio()
    edu2.bind_vfio()
    subprocess.run(["/run/busybox", "mount", "-t", "cgroup2", "cgroup2", str(CGROUPS)], check=True)
    CONTAINER.mkdir(parents=True)
    with ExitStack() as stack:
        with guest.step("the daemons start"):
            passive, proc = (_started(stack, guest, mode, edu1, edu2) for mode in ("passive", "proc"))
            for scene in (passive, proc):
                scene.daemon.wait_until_it_listens()
                scene.wait_both_healthy(FRAME_TIMEOUT_S)
        _never_disturbed(guest, (passive, proc))
        _virtual_machine(guest, (passive, proc))
        for scene, story in ((passive, _passive), (proc, _with_proc)):
            scene.wait_both_healthy(RELEASE_SEEN_WITHIN_S)
            story(scene)
            assert scene.daemon.terminate() == 0
            assert not scene.kubelet.panics, scene.kubelet.panics
            assert not scene.daemon.said("daemon.died")


def _started(stack: ExitStack, guest: Guest, mode: str, edu1: Function, edu2: Function) -> Scene:
    """A kubelet and a daemon; both end with `stack`."""
    kubelet_dir = Path(f"/run/kubelet-{mode}")
    kubelet = stack.enter_context(KubeletStandIn(kubelet_dir))
    stack.callback(_save_frames, guest, kubelet, mode)
    daemon = stack.enter_context(
        DaemonProcess.start(_arguments(mode, kubelet_dir), guest.artifacts / f"{mode}.log")
    )
    return Scene(guest, kubelet, daemon, mode, edu1, edu2)


def _arguments(mode: str, kubelet_dir: Path) -> tuple[str, ...]:
    return (
        "--kubelet-dir", str(kubelet_dir),
        "--uevents", "kernel", "--resync-interval-s", "3600", "--holders", mode,
        "--select", "vendor=1234,device=11e8",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Scene:
    """A daemon, its kubelet, and the two functions that both are about."""

    guest: Guest
    kubelet: KubeletStandIn
    daemon: DaemonProcess
    mode: str
    edu1: Function
    edu2: Function

    def wait_both_healthy(self, timeout_s: float) -> None:
        """Wait until kubelet's books have both so."""
        for edu in (self.edu1, self.edu2):
            self.wait_health(edu, HEALTHY, timeout_s)

    def wait_health(self, function: Function, health: str, timeout_s: float) -> None:
        """Wait until kubelet's books have it so."""
        self.kubelet.wait_for(
            lambda books: books.get(RESOURCE, {}).get(function.address) == health,
            timeout_s,
            f"{function.address} {health} with --holders {self.mode}",
        )

    def timed(self, figure: str, act: Callable[[], None], health: str, within_s: float) -> None:
        """Do `act`, wait for edu1's `health`, keep the time between; edu2 must have been Healthy all along."""
        started_ns = time.monotonic_ns()
        act()
        self.wait_health(self.edu1, health, within_s)
        since = self.frames_since(started_ns)
        frame = next(frame for frame in since if health_in(frame, self.edu1) == health)
        assert all(health_in(frame, self.edu2) == HEALTHY for frame in since), since
        took_s = (frame.at_ns - started_ns) / 1e9
        assert took_s <= within_s, f"{figure}: {took_s:.3f} s, at most {within_s:g} s are promised"
        _figure(self.guest, f"{self.mode}_{figure}", round(took_s * 1000, 1))

    def frames_since(self, started_ns: int) -> list[Frame]:
        """The frames that came after that moment, in order."""
        return [frame for frame in self.kubelet.frames(RESOURCE) if frame.at_ns >= started_ns]

    def stays(self, for_s: float) -> None:
        """Nothing but Healthy for so long: the books and every frame."""
        started_ns = time.monotonic_ns()
        time.sleep(for_s)
        self.check_healthy_since(started_ns)

    def check_healthy_since(self, started_ns: int) -> None:
        """Nothing but Healthy since that moment: the books and every frame."""
        self.daemon.check_alive()
        for frame in self.frames_since(started_ns):
            assert {health_in(frame, edu) for edu in (self.edu1, self.edu2)} == {HEALTHY}, frame
        assert set(self.kubelet.snapshot()[RESOURCE].values()) == {HEALTHY}

    def last_reason(self) -> str:
        """Why edu1 is what kubelet was told last, as the log has it."""
        said = [line for line in self.daemon.said("device.changed") if line["device"] == self.edu1.address]
        return str(said[-1]["reason"])

    def wait_reason(self, part: str, timeout_s: float = SLACK_S) -> None:
        """Wait until the log's last reason for edu1 has that in it."""
        try:
            eventually(part, lambda: part in self.last_reason(), timeout_s=timeout_s)
        except TimeoutError as error:
            raise AssertionError(f"{error}; the last reason was: {self.last_reason()}") from None

    def check_refused(self) -> str:
        """Allocate of edu1 must be refused, and the books have it Unhealthy then; the refusal's text."""
        try:
            self.kubelet.allocate(RESOURCE, [self.edu1.address])
        except grpc.RpcError as error:
            # What grpcio's blocking calls raise is a Call as well, which its types do not say.
            refusal: Any = error
        else:
            raise AssertionError(f"{self.edu1.address} was handed out although a stranger holds its group")
        assert refusal.code() is grpc.StatusCode.FAILED_PRECONDITION, refusal
        text = str(refusal.details())
        assert f"{self.edu1.address}: IOMMU group {self.edu1.group}" in text, text
        self.wait_health(self.edu1, UNHEALTHY, SLACK_S)
        return text


def _with_proc(scene: Scene) -> None:
    edu1 = scene.edu1
    with Tenant.start() as stranger:
        named = f"process {stranger.pid} ({stranger.command})"
        with scene.guest.step("proc: a stranger opens the device: Unhealthy, with its pid and command"):
            scene.timed("device_open_to_unhealthy_ms", _device_open(stranger, edu1), UNHEALTHY, SEEN_WITHIN_S)
            scene.wait_reason(named)
        with scene.guest.step("proc: Allocate of it is refused, with the same name"):
            assert str(stranger.pid) in scene.check_refused()
        with scene.guest.step("proc: it closes: Healthy again"):
            scene.timed("close_to_healthy_ms", stranger.close, HEALTHY, RELEASE_SEEN_WITHIN_S)
        # The close was a change, so a pass over /proc has just been made: none is as far from the next one.
        with scene.guest.step("proc: it opens the group alone: Unhealthy, with the same name"):
            scene.timed(
                "group_open_to_unhealthy_ms", lambda: stranger.open_group(edu1.group_node), UNHEALTHY,
                GROUP_SEEN_WITHIN_S,
            )  # fmt: skip
            scene.wait_reason(named)
        with scene.guest.step("proc: SIGKILL: Healthy again"):
            scene.timed("sigkill_to_healthy_ms", stranger.kill, HEALTHY, RELEASE_SEEN_WITHIN_S)
    _deleted_by_force(scene)
    _allocated_at_once(scene)


def _deleted_by_force(scene: Scene) -> None:
    edu1 = scene.edu1
    with (
        scene.guest.step("proc: a pod is deleted by force, its process lives on: Unhealthy until that ends"),
        Tenant.start() as vm,
    ):
        scene.kubelet.allocate(RESOURCE, [edu1.address], pod="vm-2")
        _become_pods(vm)
        vm.open_device(edu1.group_node, edu1.address)
        # Else kubelet's books would never have had it, as far as the daemon can know.
        scene.wait_reason("allocated to pod default/vm-2", limits.GRANT_LEDGER_S + SLACK_S)
        scene.timed(
            "force_delete_to_unhealthy_ms", lambda: scene.kubelet.force_delete("vm-2"), UNHEALTHY,
            LEFT_SEEN_WITHIN_S,
        )  # fmt: skip
        scene.wait_reason(f"process {vm.pid} ({vm.command}) of the pod with UID {POD_UID}")
        scene.wait_reason("pod default/vm-2 is gone from kubelet's books")
        scene.timed("left_holder_sigkill_to_healthy_ms", vm.kill, HEALTHY, RELEASE_SEEN_WITHIN_S)


def _allocated_at_once(scene: Scene) -> None:
    """What the daemon found in /proc a moment ago must not be taken for what is so now: nothing in sysfs shows a group
    that is open without its device."""
    edu1 = scene.edu1
    with (
        scene.guest.step("proc: Allocate right after a stranger opened the group: refused, then Unhealthy"),
        Tenant.start() as stranger,
    ):
        for _ in range(ALLOCATIONS_AT_ONCE):
            stranger.open_group(edu1.group_node)
            assert str(stranger.pid) in scene.check_refused()
            stranger.close()
            scene.wait_health(edu1, HEALTHY, RELEASE_SEEN_WITHIN_S)


def _passive(scene: Scene) -> None:
    edu1 = scene.edu1
    with Tenant.start() as stranger:
        with scene.guest.step("passive: the group alone shows nowhere"):
            stranger.open_group(edu1.group_node)
            scene.stays(POLLED_S)
            stranger.close()
        with scene.guest.step("passive: the device is open: Unhealthy, for its enable count"):
            scene.timed("device_open_to_unhealthy_ms", _device_open(stranger, edu1), UNHEALTHY, SEEN_WITHIN_S)
            scene.wait_reason(f"in use (enable of {edu1.address} is 1)")
        with scene.guest.step("passive: Allocate of it is refused"):
            assert "enable" in scene.check_refused()
        with scene.guest.step("passive: it closes: Healthy again"):
            scene.timed("close_to_healthy_ms", stranger.close, HEALTHY, RELEASE_SEEN_WITHIN_S)
        with scene.guest.step("passive: Allocate right after it opened the device: refused, then Unhealthy"):
            stranger.open_device(edu1.group_node, edu1.address)
            assert "enable" in scene.check_refused()
        with scene.guest.step("passive: SIGKILL: Healthy again"):
            scene.timed("sigkill_to_healthy_ms", stranger.kill, HEALTHY, RELEASE_SEEN_WITHIN_S)


def _device_open(tenant: Tenant, function: Function) -> Callable[[], None]:
    return lambda: tenant.open_device(function.group_node, function.address)


def _become_pods(tenant: Tenant) -> None:
    """Put it where a pod's processes are."""
    (CONTAINER / "cgroup.procs").write_text(f"{tenant.pid}\n", encoding="ascii")


def _never_disturbed(guest: Guest, scenes: Sequence[Scene]) -> None:
    """2,000 opens while the daemons poll as fast as they ever do, because another group is in a stranger's hands.

    Counting refusals alone, a lucky daemon would pass: inotify counts every open that worked, whoever did it.
    """
    edu1, edu2 = scenes[0].edu1, scenes[0].edu2
    node = edu1.group_node
    with (
        guest.step(f"both: {OPENS} opens beside the polling daemons: no EBUSY"),
        Tenant.start() as stranger,
        Tenant.start() as opener,
        INotify() as inotify,
    ):
        stranger.open_device(edu2.group_node, edu2.address)
        for scene in scenes:
            scene.wait_health(edu2, UNHEALTHY, SEEN_WITHIN_S)
        # Both kinds, or the kernel would make one event of several opens in a row.
        inotify.add_watch(str(node), flags.OPEN | flags.CLOSE_WRITE | flags.CLOSE_NOWRITE)
        started = time.monotonic()
        opener.begin_loop(node, OPENS)
        worked, busy = opener.end_loop()
        took_s = time.monotonic() - started
        opened = sum(bool(event.mask & flags.OPEN) for event in inotify.read(timeout=0))
        _figure(guest, "opens", worked + busy)
        _figure(guest, "opens_took_s", round(took_s, 2))
        _figure(guest, "opens_ebusy", busy)
        _figure(guest, "opens_by_others", opened - worked)
        assert (worked, busy, opened) == (OPENS, 0, OPENS)
        assert took_s > limits.POLL_S, "the loop was over before a poll can have met it"
        # The ruler measures: two that open at once do get in each other's way, and are counted.
        stranger.close()
        for tenant in (opener, stranger):
            tenant.begin_loop(node, CONTENDED_OPENS)
        contended = [tenant.end_loop() for tenant in (opener, stranger)]
        _figure(guest, "opens_ebusy_of_two_openers", sum(refused for _, refused in contended))
    for scene in scenes:
        scene.wait_both_healthy(RELEASE_SEEN_WITHIN_S)


def _virtual_machine(guest: Guest, scenes: Sequence[Scene]) -> None:
    """A pod's own process opens what it was given: it was counted when it was allocated, and is not counted again."""
    edu1 = scenes[0].edu1
    with (
        guest.step("both: a pod holds what it was given: Healthy all the time, also after it ends"),
        Tenant.start() as vm,
    ):
        started_ns = time.monotonic_ns()
        for scene in scenes:
            scene.kubelet.allocate(RESOURCE, [edu1.address], pod="vm-1")
            scene.kubelet.prestart(RESOURCE, [edu1.address])
        _become_pods(vm)
        vm.open_device(edu1.group_node, edu1.address)
        time.sleep(POLLED_S)
        for scene in scenes:
            scene.wait_reason("allocated to pod default/vm-1")
        vm.kill()
        for scene in scenes:
            scene.kubelet.end_pod("vm-1")
        for scene in scenes:
            scene.wait_reason("free", SEEN_WITHIN_S)
            scene.check_healthy_since(started_ns)


def _figure(guest: Guest, name: str, value: object) -> None:
    """Keep it, and show it."""
    guest.figures[name] = value
    print(f"    {name}: {value}", flush=True)


def health_in(frame: Frame, function: Function) -> str | None:
    """What a frame says of a device; None if it does not list it."""
    return next((device.health for device in frame.devices if device.id == function.address), None)


def _save_frames(guest: Guest, kubelet: KubeletStandIn, mode: str) -> None:
    items = (*kubelet.registrations, *kubelet.frames(RESOURCE), *kubelet.stream_ends(RESOURCE))
    text = "".join(f"{item}\n" for item in items)
    (guest.artifacts / f"kubelet-{mode}.log").write_text(text, encoding="utf-8")
