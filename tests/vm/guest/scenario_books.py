"""Who holds a GPU, against the real kernel: strangers are seen and named, releases too, and nobody is ever disturbed.

A stranger is a process of its own that opens the group, or group, container and device as QEMU does. The kernel says
nothing of any of that (no uevent): all that kubelet is told here comes from the daemon's polls.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import grpc
from inotify_simple import INotify, flags

from tests.support.kubelet_grpcio import HEALTHY, UNHEALTHY, KubeletStandIn
from tests.support.kubelet_seen import Frame
from tests.vm.guest.daemon import DaemonProcess
from tests.vm.guest.runner import Guest
from tests.vm.guest.sysfs import Function, function_behind
from tests.vm.guest.tenant import Tenant
from tests.vm.machine import Machine, PciFunction

MACHINE: Final = Machine(
    ports=("rp1", "rp2"),
    functions=(PciFunction("edu1", "edu", "rp1"), PciFunction("edu2", "edu", "rp2")),
)

RESOURCE: Final = "pci-1234/11e8"

POLL_S: Final = 2.0
"""The daemon's promise (limits.POLL_S): how long a stranger can hold a free GPU before kubelet is told."""

LEDGER_S: Final = 5.0
"""The daemon's promise (limits.LEDGER_S): how late a forced deletion is noticed."""

SLACK_S: Final = 4.0
"""For an emulated and busy machine, on top of what the daemon promises."""

SEEN_WITHIN_S: Final = POLL_S + SLACK_S

FRAME_TIMEOUT_S: Final = 15.0
"""The first frames: binding, registering."""

ROUND_S: Final = 0.5
"""More than a poll, a read of the ledger (limits.GRANT_LEDGER_S after Allocate) and a frame together take."""

OPENS: Final = 2000

CONTENDED_OPENS: Final = 300
"""Of each of two tenants at once: enough that they meet."""

ALLOCATIONS_AT_ONCE: Final = 3
"""Allocate so many times right after a stranger opened the group, in whatever phase the daemon's polls are."""


def run(guest: Guest) -> None:
    """Two daemons, one after the other: `--holders passive`, then `--holders proc`."""
    edu1, edu2 = (function_behind(guest.machine, port) for port in ("rp1", "rp2"))
    edu1.bind_vfio()
    edu2.bind_vfio()
    for mode, story in (("passive", _passive), ("proc", _with_proc)):
        kubelet_dir = Path(f"/run/kubelet-{mode}")
        with KubeletStandIn(kubelet_dir) as kubelet:
            scene = Scene(guest, kubelet, mode, edu1, edu2)
            with guest.step(f"{mode}: the daemon starts"):
                daemon = DaemonProcess.start(_arguments(mode, kubelet_dir), guest.artifacts / f"{mode}.log")
            with daemon:
                try:
                    daemon.wait_until_it_listens()
                    scene.daemon = daemon
                    scene.wait_health(edu1, HEALTHY, FRAME_TIMEOUT_S)
                    scene.wait_health(edu2, HEALTHY, FRAME_TIMEOUT_S)
                    story(scene)
                    assert daemon.terminate() == 0
                    assert not kubelet.panics, kubelet.panics
                    assert not daemon.said("daemon.died")
                finally:
                    _save_frames(guest, kubelet, mode)


def _arguments(mode: str, kubelet_dir: Path) -> tuple[str, ...]:
    return (
        "--kubelet-dir", str(kubelet_dir), "--state-dir", f"/run/gpuactors-{mode}",
        "--uevents", "kernel", "--resync-interval-s", "3600", "--holders", mode,
        "--select", "vendor=1234,device=11e8",
    )  # fmt: skip


class Scene:
    """What both stories have in hand."""

    daemon: DaemonProcess

    def __init__(
        self, guest: Guest, kubelet: KubeletStandIn, mode: str, edu1: Function, edu2: Function
    ) -> None:
        self.guest = guest
        self.kubelet = kubelet
        self.mode = mode
        self.edu1 = edu1
        self.edu2 = edu2

    def wait_health(self, function: Function, health: str, timeout_s: float) -> None:
        """Wait until kubelet's books have it so."""
        self.kubelet.wait_for(
            lambda books: books.get(RESOURCE, {}).get(function.address) == health,
            timeout_s,
            f"{function.address} {health} with --holders {self.mode}",
        )

    def timed(
        self, figure: str, act: Callable[[], None], health: str, *, within_s: float = SEEN_WITHIN_S
    ) -> None:
        """Do `act`, wait for edu1's `health`, keep the time between; edu2 must have been Healthy all along."""
        started_ns = time.monotonic_ns()
        act()
        self.wait_health(self.edu1, health, within_s)
        since = self.frames_since(started_ns)
        frame = next(frame for frame in since if health_in(frame, self.edu1) == health)
        assert all(health_in(frame, self.edu2) == HEALTHY for frame in since), since
        took_s = (frame.at_ns - started_ns) / 1e9
        assert took_s <= within_s, f"{figure}: {took_s:.3f} s, at most {within_s:g} s are promised"
        self.figure(figure, round(took_s * 1000, 1))

    def frames_since(self, started_ns: int) -> list[Frame]:
        """The frames that came after that moment, in order."""
        return [frame for frame in self.kubelet.frames(RESOURCE) if frame.at_ns >= started_ns]

    def stays(self, for_s: float) -> None:
        """Nothing but Healthy for so long: the books and every frame."""
        started_ns = time.monotonic_ns()
        time.sleep(for_s)
        self.daemon.check_alive()
        for frame in self.frames_since(started_ns):
            assert {health_in(frame, edu) for edu in (self.edu1, self.edu2)} == {HEALTHY}, frame
        assert set(self.kubelet.snapshot()[RESOURCE].values()) == {HEALTHY}

    def last_reason(self) -> str:
        """Why edu1 is what kubelet was told last, as the log has it."""
        said = [line for line in self.daemon.said("device.changed") if line["device"] == self.edu1.address]
        return str(said[-1]["reason"])

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
        self.wait_health(self.edu1, UNHEALTHY, SEEN_WITHIN_S)
        return text

    def figure(self, name: str, value: object) -> None:
        """Keep it, and show it."""
        self.guest.figures[f"{self.mode}_{name}"] = value
        print(f"    {self.mode}_{name}: {value}", flush=True)


def _with_proc(scene: Scene) -> None:
    edu1 = scene.edu1
    with Tenant.start() as stranger:
        with scene.guest.step("proc: a stranger opens the group alone: Unhealthy, with its pid and command"):
            scene.timed("group_open_to_unhealthy_ms", lambda: stranger.open_group(edu1.group_node), UNHEALTHY)
            _check_named(scene, stranger)
        with scene.guest.step("proc: Allocate of it is refused, with the same name"):
            assert str(stranger.pid) in scene.check_refused()
        with scene.guest.step("proc: it closes: Healthy again"):
            scene.timed("close_to_healthy_ms", stranger.close, HEALTHY)
        with scene.guest.step("proc: it opens the device, too: Unhealthy"):
            scene.timed("device_open_to_unhealthy_ms", _device_open(stranger, edu1), UNHEALTHY)
            _check_named(scene, stranger)
        with scene.guest.step("proc: SIGKILL: Healthy again"):
            scene.timed("sigkill_to_healthy_ms", stranger.kill, HEALTHY)
    _never_disturbed(scene)
    _virtual_machine(scene)
    _deleted_by_force(scene)
    _allocated_at_once(scene)


def _deleted_by_force(scene: Scene) -> None:
    edu1 = scene.edu1
    with (
        scene.guest.step("proc: a pod is deleted by force, its process lives on: Unhealthy until that ends"),
        Tenant.start() as vm,
    ):
        scene.kubelet.allocate(RESOURCE, [edu1.address], pod="vm-2")
        vm.open_device(edu1.group_node, edu1.address)
        scene.stays(ROUND_S)
        scene.timed(
            "force_delete_to_unhealthy_ms", lambda: scene.kubelet.force_delete("vm-2"), UNHEALTHY,
            within_s=LEDGER_S + SEEN_WITHIN_S,
        )  # fmt: skip
        assert "default/vm-2 is gone from kubelet's books" in scene.last_reason(), scene.last_reason()
        assert str(vm.pid) in scene.last_reason()
        scene.timed("left_holder_sigkill_to_healthy_ms", vm.kill, HEALTHY)


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
            scene.wait_health(edu1, HEALTHY, SEEN_WITHIN_S)


def _passive(scene: Scene) -> None:
    edu1 = scene.edu1
    with Tenant.start() as stranger:
        with scene.guest.step("passive: the group alone shows nowhere"):
            stranger.open_group(edu1.group_node)
            scene.stays(POLL_S + ROUND_S)
            stranger.close()
        with scene.guest.step("passive: the device is open: Unhealthy, for its enable count"):
            scene.timed("device_open_to_unhealthy_ms", _device_open(stranger, edu1), UNHEALTHY)
            assert f"in use (enable of {edu1.address} is 1)" in scene.last_reason(), scene.last_reason()
        with scene.guest.step("passive: Allocate of it is refused"):
            assert "enable" in scene.check_refused()
        with scene.guest.step("passive: it closes: Healthy again"):
            scene.timed("close_to_healthy_ms", stranger.close, HEALTHY)
        with scene.guest.step("passive: Allocate right after it opened the device: refused, then Unhealthy"):
            stranger.open_device(edu1.group_node, edu1.address)
            assert "enable" in scene.check_refused()
        with scene.guest.step("passive: SIGKILL: Healthy again"):
            scene.timed("sigkill_to_healthy_ms", stranger.kill, HEALTHY)
    _never_disturbed(scene)
    _virtual_machine(scene)


def _device_open(tenant: Tenant, function: Function) -> Callable[[], None]:
    return lambda: tenant.open_device(function.group_node, function.address)


def _check_named(scene: Scene, tenant: Tenant) -> None:
    wanted = f"process {tenant.pid} ({tenant.command})"
    assert wanted in scene.last_reason(), f"{wanted} is not in: {scene.last_reason()}"


def _never_disturbed(scene: Scene) -> None:
    """2,000 opens while the daemon polls as fast as it ever does, because another group is in a stranger's hands.

    Counting refusals alone, a lucky daemon would pass: inotify counts every open that worked, whoever did it.
    """
    node = scene.edu1.group_node
    with (
        scene.guest.step(f"{scene.mode}: {OPENS} opens beside the polling daemon: no EBUSY"),
        Tenant.start() as stranger,
        Tenant.start() as opener,
        INotify() as inotify,
    ):
        stranger.open_device(scene.edu2.group_node, scene.edu2.address)
        scene.wait_health(scene.edu2, UNHEALTHY, SEEN_WITHIN_S)
        # Both kinds, or the kernel would make one event of several opens in a row.
        inotify.add_watch(str(node), flags.OPEN | flags.CLOSE_WRITE | flags.CLOSE_NOWRITE)
        started = time.monotonic()
        opener.begin_loop(node, OPENS)
        worked, busy = opener.end_loop()
        took_s = time.monotonic() - started
        opened = sum(bool(event.mask & flags.OPEN) for event in inotify.read(timeout=0))
        scene.figure("opens", worked + busy)
        scene.figure("opens_took_s", round(took_s, 2))
        scene.figure("opens_ebusy", busy)
        scene.figure("opens_by_others", opened - worked)
        assert (worked, busy, opened) == (OPENS, 0, OPENS)
        assert took_s > POLL_S, "the loop was over before a poll can have met it"
        # The ruler measures: two that open at once do get in each other's way, and are counted.
        stranger.close()
        for tenant in (opener, stranger):
            tenant.begin_loop(node, CONTENDED_OPENS)
        contended = [tenant.end_loop() for tenant in (opener, stranger)]
        scene.figure("opens_ebusy_of_two_openers", sum(refused for _, refused in contended))
    for edu in (scene.edu1, scene.edu2):
        scene.wait_health(edu, HEALTHY, SEEN_WITHIN_S)


def _virtual_machine(scene: Scene) -> None:
    """A pod's own process opens what it was given: it was counted when it was allocated, and is not counted again."""
    edu1, kubelet = scene.edu1, scene.kubelet
    with (
        scene.guest.step(
            f"{scene.mode}: a pod holds what it was given: Healthy all the time, also after it ends"
        ),
        Tenant.start() as vm,
    ):
        kubelet.allocate(RESOURCE, [edu1.address], pod="vm-1")
        kubelet.prestart(RESOURCE, [edu1.address])
        vm.open_device(edu1.group_node, edu1.address)
        scene.stays(POLL_S + ROUND_S)
        assert "allocated to pod default/vm-1" in scene.last_reason(), scene.last_reason()
        vm.kill()
        kubelet.end_pod("vm-1")
        scene.stays(POLL_S)


def health_in(frame: Frame, function: Function) -> str | None:
    """What a frame says of a device; None if it does not list it."""
    return next((device.health for device in frame.devices if device.id == function.address), None)


def _save_frames(guest: Guest, kubelet: KubeletStandIn, mode: str) -> None:
    items = (*kubelet.registrations, *kubelet.frames(RESOURCE), *kubelet.stream_ends(RESOURCE))
    text = "".join(f"{item}\n" for item in items)
    (guest.artifacts / f"kubelet-{mode}.log").write_text(text, encoding="utf-8")
