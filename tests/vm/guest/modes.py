"""One node under two daemons, `--holders passive` and `--holders proc`, each with a kubelet of its own.

Whatever somebody does to a function, both see the same, at the same time and in their own polls: so each story is told
once, and what the two modes make of it stands side by side. Neither can disturb anybody, so two are as good as one.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc

from gpuactors.core.host.schedule import POLL_FAST_S
from gpuactors.core.host.usage import POLL_S
from gpuactors.host.use import PROC_SCAN_REST_MAX_S
from tests.support.kubelet_grpcio import HEALTHY, UNHEALTHY, KubeletStandIn
from tests.support.kubelet_seen import Frame
from tests.support.patience import patient
from tests.vm.guest.daemon import DaemonProcess
from tests.vm.guest.node import SLACK_S
from tests.vm.guest.runner import Guest, eventually
from tests.vm.guest.sysfs import Function

RESOURCE: Final = "pci-1234/11e8"

SEEN_WITHIN_S: Final = POLL_S + SLACK_S
"""Somebody has a device open, which sysfs shows."""

GROUP_SEEN_WITHIN_S: Final = POLL_S + PROC_SCAN_REST_MAX_S + SLACK_S
"""Somebody has a group open without its device, which only a pass over /proc shows."""

RELEASE_SEEN_WITHIN_S: Final = POLL_FAST_S + SLACK_S
"""Somebody lets go who should not have held it."""

POLLED_S: Final = POLL_S + 0.5
"""After so long a poll has been made and, if it changed anything, told."""

FRAME_TIMEOUT_S: Final = patient(15.0)
"""The first frames: binding, registering."""

CGROUPS: Final = Path("/sys/fs/cgroup")

POD_UID: Final = "1b4e28ba-2fa1-11d2-883f-0016d3cca427"


def _cgroup(uid: str) -> Path:
    """That of a pod's container, as kubelet and containerd name it: by it a process is known to be a pod's."""
    pod = f"kubepods-burstable-pod{uid.replace('-', '_')}.slice"
    return CGROUPS.joinpath("kubepods.slice", "kubepods-burstable.slice", pod, "cri-containerd-1.scope")


@dataclass(frozen=True, slots=True)
class Watcher:
    """One daemon and its kubelet."""

    mode: str
    guest: Guest
    kubelet: KubeletStandIn
    daemon: DaemonProcess

    def health(self, function: Function) -> str | None:
        """What kubelet's device lists say of it."""
        return self.kubelet.snapshot().get(RESOURCE, {}).get(function.address)

    def wait_health(self, function: Function, health: str, timeout_s: float) -> None:
        """Wait until kubelet's device lists have it so. Raises TimeoutError."""
        self.kubelet.wait_for(
            lambda lists: lists.get(RESOURCE, {}).get(function.address) == health,
            timeout_s,
            f"{function.address} {health} with --holders {self.mode}",
        )

    def told(self, function: Function, health: str, since_ns: int, within_s: float) -> float:
        """Wait until kubelet has it so; the milliseconds from `since_ns` to the frame that first said it."""
        self.wait_health(function, health, within_s)
        frame = next(f for f in self.frames_since(since_ns) if health_in(f, function) == health)
        took_s = (frame.at_ns - since_ns) / 1e9
        assert took_s <= within_s, f"{self.mode}: {health} after {took_s:.3f} s, {within_s:g} s are promised"
        return round(took_s * 1000, 1)

    def frames_since(self, since_ns: int) -> list[Frame]:
        """The frames that came after that moment, in order."""
        return [frame for frame in self.kubelet.frames(RESOURCE) if frame.at_ns >= since_ns]

    def check_healthy_since(self, since_ns: int, *functions: Function) -> None:
        """These were nothing but Healthy since that moment: in the device lists and in every frame."""
        self.daemon.check_alive()
        for frame in self.frames_since(since_ns):
            assert {health_in(frame, function) for function in functions} == {HEALTHY}, (self.mode, frame)
        assert {self.health(function) for function in functions} == {HEALTHY}, self.kubelet.snapshot()

    def reason(self, function: Function) -> str:
        """Why it is what kubelet was told last, as the log has it."""
        said = [line for line in self.daemon.said("device.changed") if line["device"] == function.address]
        return str(said[-1]["reason"]) if said else ""

    def wait_reason(self, function: Function, part: str, timeout_s: float = SLACK_S) -> None:
        """Wait until the log's last reason for it has that in it."""
        try:
            eventually(part, lambda: part in self.reason(function), timeout_s=timeout_s)
        except TimeoutError as error:
            said = self.reason(function)
            raise AssertionError(f"{self.mode}: {error}; the last reason was: {said}") from None

    def check_refused(self, function: Function) -> str:
        """Allocate of it must be refused, and the device lists have it Unhealthy then; the refusal's text."""
        try:
            self.kubelet.allocate(RESOURCE, [function.address])
        except grpc.RpcError as error:
            # What grpcio's blocking calls raise is a Call as well, which its types do not say.
            refusal: Any = error
        else:
            raise AssertionError(f"{self.mode}: {function.address} was handed out although somebody holds it")
        assert refusal.code() is grpc.StatusCode.FAILED_PRECONDITION, refusal
        text = str(refusal.details())
        assert f"{function.address}: IOMMU group {function.group}" in text, text
        self.wait_health(function, UNHEALTHY, SLACK_S)
        return text

    def _finish(self) -> None:
        assert self.daemon.terminate() == 0
        assert not self.kubelet.panics, self.kubelet.panics
        assert not self.daemon.said("daemon.died")

    def _save(self) -> None:
        kubelet = self.kubelet
        items = (*kubelet.registrations, *kubelet.frames(RESOURCE), *kubelet.stream_ends(RESOURCE))
        text = "".join(f"{item}\n" for item in items)
        (self.guest.artifacts / f"kubelet-{self.mode}.log").write_text(text, encoding="utf-8")


@dataclass(slots=True)
class PreStart:
    """A PreStartContainer in a thread of its own, as kubelet has one for each pod."""

    watcher: Watcher
    function: Function
    _answered_ns: int = 0
    _refusal: grpc.RpcError | None = None
    _thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._call, daemon=True)
        self._thread.start()

    def _call(self) -> None:
        try:
            self.watcher.kubelet.prestart(RESOURCE, [self.function.address])
        except grpc.RpcError as error:
            self._refusal = error
        self._answered_ns = time.monotonic_ns()

    @property
    def answered(self) -> bool:
        """Whether it is over."""
        return not self._thread.is_alive()

    def granted_ns(self, within_s: float) -> int:
        """Wait until it is granted; the moment of that (time.monotonic_ns)."""
        self._thread.join(within_s)
        assert self.answered, (
            f"PreStartContainer with --holders {self.watcher.mode}: not within {within_s:g} s"
        )
        assert self._refusal is None, self._refusal
        return self._answered_ns


@contextmanager
def both_modes(guest: Guest, *functions: Function) -> Iterator[tuple[Watcher, Watcher]]:
    """The two daemons, once both have told their kubelet that each of `functions`, now bound, is Healthy; at the end
    both must stop in order."""
    for function in functions:
        function.bind_vfio()
    with ExitStack() as stack:
        with guest.step("a daemon for each mode starts"):
            watchers = (_started(stack, guest, "passive"), _started(stack, guest, "proc"))
            for watcher in watchers:
                watcher.daemon.wait_until_it_listens()
                for function in functions:
                    watcher.wait_health(function, HEALTHY, FRAME_TIMEOUT_S)
        yield watchers
        for watcher in watchers:
            watcher._finish()


def _started(stack: ExitStack, guest: Guest, mode: str) -> Watcher:
    kubelet_dir = Path(f"/run/kubelet-{mode}")
    kubelet = stack.enter_context(KubeletStandIn(kubelet_dir))
    daemon = stack.enter_context(
        DaemonProcess.start(_arguments(mode, kubelet_dir), guest.artifacts / f"{mode}.log")
    )
    watcher = Watcher(mode, guest, kubelet, daemon)
    stack.callback(watcher._save)
    return watcher


def _arguments(mode: str, kubelet_dir: Path) -> tuple[str, ...]:
    return (
        "--kubelet-dir", str(kubelet_dir),
        "--uevents", "kernel", "--resync-interval-s", "3600", "--holders", mode,
        "--select", "vendor=1234,device=11e8",
    )  # fmt: skip


def make_pod_cgroup() -> None:
    """Mount the cgroups, as systemd does on a node, and make the pod's."""
    subprocess.run(["/run/busybox", "mount", "-t", "cgroup2", "cgroup2", str(CGROUPS)], check=True)
    _cgroup(POD_UID).mkdir(parents=True)


def become_a_pods(pid: int, uid: str = POD_UID) -> None:
    """Put a process where the pod's processes are."""
    _cgroup(uid).mkdir(parents=True, exist_ok=True)
    (_cgroup(uid) / "cgroup.procs").write_text(f"{pid}\n", encoding="ascii")


def figure(guest: Guest, name: str, value: object) -> None:
    """Keep it, and show it."""
    guest.figures[name] = value
    print(f"    {name}: {value}", flush=True)


def spread(guest: Guest, name: str, values: Sequence[float]) -> None:
    """Keep how many there are, their median, and the 99th of 100; below 100 of them that is the largest."""
    p99 = max(values) if len(values) < 100 else statistics.quantiles(values, n=100)[-1]
    figure(guest, f"{name}_n", len(values))
    figure(guest, f"{name}_p50_ms", round(statistics.median(values), 1))
    figure(guest, f"{name}_p99_ms", p99)


def health_in(frame: Frame, function: Function) -> str | None:
    """What a frame says of a function; None if it does not list it."""
    return next((device.health for device in frame.devices if device.id == function.address), None)


def opens(function: Function) -> bool:
    """Whether its group opens now."""
    try:
        os.close(os.open(function.group_node, os.O_RDWR))
    except OSError:
        return False
    return True


def timed_ns(act: Callable[[], object]) -> int:
    """Do `act`; the moment before it (time.monotonic_ns)."""
    before_ns = time.monotonic_ns()
    act()
    return before_ns
