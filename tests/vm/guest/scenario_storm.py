"""10,000 uevents without a change, while GPUs are really bound and unbound: the lists become right, in few frames.

Three daemons hear the same storm, each with a kubelet of its own: one as root, for which libudev gets a buffer of 128
MiB; one without any capability, whose buffer is full after some 200 events (ENOBUFS); and one without any capability in
a network namespace of its own, as in a pod. The periodic scan is an hour away.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from gpuactors import limits
from gpuactors.core.host.inspections import UNSETTLED_INSPECTIONS_S
from gpuactors.core.step import CALL_SETTLE_S
from tests.bench import procfs
from tests.support.kubelet_grpcio import HEALTHY
from tests.support.patience import patient
from tests.vm.guest.daemon import START_TIMEOUT_S, DaemonProcess
from tests.vm.guest.node import SLACK_S, Node, arguments
from tests.vm.guest.runner import Guest, eventually
from tests.vm.guest.storm import Storm, uevents_so_far
from tests.vm.guest.sysfs import PCI, Function, function_behind
from tests.vm.guest.uevents import Queue
from tests.vm.kernels import NOT_BY_DEFAULT
from tests.vm.machine import Machine, PciFunction

MACHINE: Final = Machine(
    ports=("rp1", "rp2", "rp3", "rp4"),
    functions=tuple(PciFunction(f"edu{number}", "edu", f"rp{number}") for number in (1, 2, 3, 4)),
    scenario_timeout_s=600.0,
    kernels=NOT_BY_DEFAULT,  # a figure
)

RESOURCE: Final = "pci-1234/11e8"

WITHOUT_CAPABILITIES: Final = ("setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs")

WAYS: Final[Mapping[str, Sequence[str]]] = {
    "root": (),
    "plain": WITHOUT_CAPABILITIES,
    "pod": ("unshare", "--net", *WITHOUT_CAPABILITIES),
}
"""How each daemon is started, by the name under which its figures are kept."""

EVENTS: Final = 10_000

LIES: Final = 2_000
"""Of a first storm, in which nothing changes at all."""

REAL_CHANGES: Final = 10
"""Binds and unbinds of one function, spread over the storm; two more changes follow at its end."""

FRAMES_MAX: Final = 2 * (REAL_CHANGES + 2)
"""A bind may be inspected between the driver's link and the group's node, and what was unbound stays in the list,
Unhealthy, while kubelet may be using that: two frames for each. Nothing else makes any, whatever is said."""

STORM_WITHIN_S: Final = patient(60.0)
"""For the kernel to take all of it; seconds."""

FRAME_WITHIN_S: Final = UNSETTLED_INSPECTIONS_S[0] + SLACK_S
"""From a bind or unbind to kubelet's device lists while there is no storm."""

KNOWN_WITHIN_S: Final = 8 * limits.INSPECTION_DEADLINE_S + SLACK_S
"""From a change at the storm's end, whose uevent is the last one in the queue or was dropped, to kubelet's device
lists. An inspection or a scan that is outstanding may be too early for it; another one follows. Seen: 10 s on two quiet
cores with another guest, three daemons having 10,000 uevents to read. Nothing else finds it: the resync is hourly."""

SETTLED_WITHIN_S: Final = KNOWN_WITHIN_S + CALL_SETTLE_S
"""From the last Allocate, during which no list shrinks, to the right device lists."""

CALL_WITHIN_S: Final = limits.CALL_DEADLINE_S + SLACK_S

GROWTH_MAX_KIB: Final = 32 * 1024
"""Of the daemon's peak, by a storm: the journal's waiting steps (1,024 states of some 10 KB at most), the threads of
the inspections, and Python's own."""

IDLE_S: Final = 2.0

IDLE_CPU_MAX: Final = 0.5
"""Of one core, once it is over; an idle daemon takes about 0.05 under emulation."""


def run(guest: Guest) -> None:
    """The three at once: it is one storm for all of them."""
    functions = [function_behind(guest.machine, port) for port in guest.machine.ports]
    with ExitStack() as stack:
        scene = _started(stack, guest, *functions)
        _lies_alone(scene)
        _storm(scene)
        _afterwards(scene)
        with guest.step("each is the process that was started, and ends with 0 on SIGTERM"):
            for listener in scene.listeners:
                assert listener.daemon.terminate() == 0
                assert len(listener.daemon.said("daemon.started")) == 1
                assert not listener.daemon.said("daemon.died")
                assert len(listener.node.kubelet.registrations) == 1, listener.node.kubelet.registrations


@dataclass(frozen=True, slots=True)
class _Account:
    """What a daemon has cost up to a moment."""

    cpu_s: float
    peak_kib: int
    """The most memory that it had resident at once."""
    frames: int

    @classmethod
    def of(cls, daemon: DaemonProcess, node: Node) -> _Account:
        """As the kernel and kubelet have it now."""
        pid = daemon.process.pid
        cpu_s = procfs.activity(pid).cpu_ticks / os.sysconf("SC_CLK_TCK")
        return cls(cpu_s, procfs.memory(pid).peak_kib, len(node.frames))


@dataclass(frozen=True, slots=True)
class _Listener:
    """One daemon, and its kubelet."""

    name: str
    node: Node
    daemon: DaemonProcess
    calm: _Account
    """Before any storm."""

    @property
    def queue(self) -> Queue:
        """Of its socket for uevents."""
        return Queue.of(self.daemon.process.pid)

    @property
    def overflows(self) -> int:
        """How often it says that the kernel dropped uevents."""
        return len(self.daemon.said("uevents.lost"))

    @property
    def account(self) -> _Account:
        """Up to now."""
        return _Account.of(self.daemon, self.node)

    def figure(self, name: str, value: object) -> None:
        """As `Node.figure`, under this daemon's name."""
        self.node.figure(f"{self.name}_{name}", value)


@dataclass(frozen=True, slots=True)
class _Scene:
    guest: Guest
    listeners: tuple[_Listener, ...]
    keep: Function
    """Bound from the beginning to the end; Allocate asks for it."""
    flap: Function
    early: Function
    """Bound until the storm ends."""
    late: Function
    """Bound when the storm ends. No synthetic uevent is about it: it is known by its own, or by a scan."""

    @property
    def storm(self) -> Storm:
        """About every function but the late one, and about things that are none of a device plugin's business."""
        functions = sorted(path for path in (PCI / "devices").iterdir() if path.name != self.late.address)
        others = sorted(Path("/sys/class/tty").glob("tty[0-9]"))
        groups = [Path("/sys/class/vfio") / str(self.keep.group)]
        devices = sorted((self.keep.path / "vfio-dev").iterdir())
        return Storm([path / "uevent" for path in (*functions, *others, *groups, *devices)])

    def wait(self, *healthy: Function, within_s: float) -> None:
        """Wait until these are in every kubelet's device lists, and nothing but these."""
        for listener in self.listeners:
            listener.node.wait({function.address: HEALTHY for function in healthy}, within_s)
            listener.daemon.check_alive()


def _started(
    stack: ExitStack, guest: Guest, keep: Function, flap: Function, early: Function, late: Function
) -> _Scene:
    keep.bind_vfio()
    early.bind_vfio()
    with guest.step(
        "three daemons start: as root, without capabilities, and so in a network namespace of its own"
    ):
        started = []
        for name, prefix in WAYS.items():
            node = stack.enter_context(Node.with_kubelet(guest, f"kubelet-{name}"))
            options = arguments("vendor=1234,device=11e8", kubelet=node.name)
            daemon = DaemonProcess.start(options, guest.artifacts / f"{name}.log", prefix=prefix)
            started.append((name, node, stack.enter_context(daemon)))
        eventually(
            "every daemon's first scan",
            lambda: all(daemon.said("host.scanned") for _, _, daemon in started),
            timeout_s=len(started) * START_TIMEOUT_S,
        )
        for _, node, daemon in started:
            daemon.wait_until_it_listens()
            node.wait({keep.address: HEALTHY, early.address: HEALTHY}, SETTLED_WITHIN_S)
    listeners = tuple(
        _Listener(name, node, daemon, _Account.of(daemon, node)) for name, node, daemon in started
    )
    root, plain, pod = (listener.daemon.process.pid for listener in listeners)
    assert [_capabilities(pid) > 0 for pid in (root, plain, pod)] == [True, False, False]
    assert [_network(pid) == _network(os.getpid()) for pid in (root, plain, pod)] == [True, True, False]
    return _Scene(guest, listeners, keep, flap, early, late)


def _lies_alone(scene: _Scene) -> None:
    with scene.guest.step(f"{LIES} uevents, nothing changes: not a single frame"):
        frames = [listener.node.frames for listener in scene.listeners]
        storm = scene.storm
        storm.blow(LIES)
        storm.wait(timeout_s=STORM_WITHIN_S)
        for listener in scene.listeners:
            _heard_out(listener)
            listener.node.kubelet.allocate(RESOURCE, [scene.keep.address], timeout_s=CALL_WITHIN_S)
        assert [listener.node.frames for listener in scene.listeners] == frames


def _storm(scene: _Scene) -> None:
    guest, flap = scene.guest, scene.flap
    with guest.step(
        f"{EVENTS} uevents, and {REAL_CHANGES + 2} real changes among them; Allocate all the time"
    ):
        before = uevents_so_far()
        storm = scene.storm
        with _allocating(scene) as calls:
            storm.blow(EVENTS)
            for change in range(REAL_CHANGES):
                # One after the other with the storm's progress, the last one just before its end.
                _reached(storm, EVENTS * (change + 1) // (REAL_CHANGES + 1))
                (flap.unbind if change % 2 else flap.bind_vfio)()
            took_s = storm.wait(timeout_s=STORM_WITHIN_S)
            scene.early.unbind()
            scene.late.bind_vfio()
            ended_ns = time.monotonic_ns()
        scene.listeners[0].node.figure("storm_s", round(took_s, 2))
        scene.listeners[0].node.figure("storm_uevents", uevents_so_far() - before)
        scene.wait(scene.keep, scene.late, within_s=SETTLED_WITHIN_S)
    with guest.step("the truth is there, in few frames; the daemons are none the worse"):
        for listener in scene.listeners:
            _heard_out(listener)
            _figures_of_calls(listener, calls[listener.name])
            _check_frames(listener, scene, ended_ns)
            _check_health(listener)
        root, plain, pod = scene.listeners
        assert (root.queue.dropped, root.overflows) == (0, 0)
        for listener in (plain, pod):
            assert listener.queue.dropped > 0, f"{listener.name}: the kernel had room for everything"
            assert listener.overflows > 0, f"{listener.name} did not say that uevents were dropped"


def _figures_of_calls(listener: _Listener, took_s: Sequence[float]) -> None:
    listener.figure("allocate_p50_ms", round(statistics.median(took_s) * 1000, 1))
    listener.figure("allocate_max_ms", round(max(took_s) * 1000, 1))
    listener.figure("allocations", len(took_s))


def _check_frames(listener: _Listener, scene: _Scene, ended_ns: int) -> None:
    frames = listener.node.frames
    known_s = (_first_frame_with(listener, scene.late) - ended_ns) / 1e9
    listener.figure("last_bind_to_frame_ms", round(known_s * 1000, 1))
    listener.figure("settled_ms", round((frames[-1].at_ns - ended_ns) / 1e6, 1))
    listener.figure("frames", len(frames) - listener.calm.frames)
    assert known_s <= KNOWN_WITHIN_S
    assert len(frames) - listener.calm.frames <= FRAMES_MAX, frames
    listener.node.check_always({scene.keep.address: HEALTHY}, since_ns=0)


def _check_health(listener: _Listener) -> None:
    cost = listener.account
    growth_kib = cost.peak_kib - listener.calm.peak_kib
    listener.figure("dropped", listener.queue.dropped)
    listener.figure("overflows", listener.overflows)
    listener.figure("cpu_s", round(cost.cpu_s - listener.calm.cpu_s, 2))
    listener.figure("peak_growth_kib", growth_kib)
    assert growth_kib <= GROWTH_MAX_KIB
    # No read of sysfs hangs here: whoever says so has not come to it.
    assert not listener.daemon.said("inspection.failed"), listener.daemon.said("inspection.failed")


def _afterwards(scene: _Scene) -> None:
    with scene.guest.step("the next bind and the next unbind are heard as ever"):
        scene.flap.bind_vfio()
        scene.wait(scene.keep, scene.late, scene.flap, within_s=FRAME_WITHIN_S)
        scene.late.unbind()
        scene.wait(scene.keep, scene.flap, within_s=FRAME_WITHIN_S)
    with scene.guest.step(f"they are idle: {IDLE_S:g} s"):
        before = [listener.account.cpu_s for listener in scene.listeners]
        time.sleep(IDLE_S)
        for listener, cpu_s in zip(scene.listeners, before, strict=True):
            share = (listener.account.cpu_s - cpu_s) / IDLE_S
            listener.figure("idle_cpu", round(share, 3))
            assert share <= IDLE_CPU_MAX, f"{listener.name} takes {share:.0%} of a core after the storm"


@contextmanager
def _allocating(scene: _Scene) -> Iterator[Mapping[str, Sequence[float]]]:
    """Each kubelet asks for the GPU that is always there, again and again until the block's end: seconds by daemon.

    Raises what a call raised, a refusal or DEADLINE_EXCEEDED, after the block.
    """
    over = threading.Event()
    callers = [_Caller(listener, scene.keep, over) for listener in scene.listeners]
    threads = [threading.Thread(target=caller.run, daemon=True) for caller in callers]
    for thread in threads:
        thread.start()
    try:
        yield {caller.listener.name: caller.took_s for caller in callers}
    finally:
        over.set()
        for thread in threads:
            thread.join()
    for caller in callers:
        if caller.failure is not None:
            raise AssertionError(f"Allocate of {caller.listener.name} in the storm") from caller.failure
        assert caller.took_s, f"{caller.listener.name} was never asked"
        assert max(caller.took_s) <= CALL_WITHIN_S


@dataclass(slots=True)
class _Caller:
    listener: _Listener
    function: Function
    over: threading.Event
    took_s: list[float] = field(default_factory=list)
    failure: Exception | None = None

    def run(self) -> None:
        """One call after the other; the last one may have begun in the storm and ends after it."""
        try:
            while not self.over.wait(timeout=0.1):
                began = time.monotonic()
                self.listener.node.kubelet.allocate(
                    RESOURCE, [self.function.address], timeout_s=CALL_WITHIN_S
                )
                self.took_s.append(time.monotonic() - began)
        except Exception as error:
            self.failure = error


def _first_frame_with(listener: _Listener, function: Function) -> int:
    """When it was first listed, on time.monotonic_ns()."""
    return next(frame.at_ns for frame in listener.node.frames if function.address in frame.ids)


def _reached(storm: Storm, events: int) -> None:
    def reached() -> bool:
        return storm.sent >= events or storm.is_over()

    eventually(f"{events} uevents", reached, timeout_s=STORM_WITHIN_S)


def _heard_out(listener: _Listener) -> None:
    """Wait until nothing waits in its socket."""

    def heard_out() -> bool:
        return listener.queue.waiting_bytes == 0

    eventually(f"{listener.name} with no uevent left to read", heard_out, timeout_s=SETTLED_WITHIN_S)


def _capabilities(pid: int) -> int:
    """The bounding set: what the process or anybody it starts could have."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("CapBnd:")), 16)


def _network(pid: int) -> str:
    return os.readlink(f"/proc/{pid}/ns/net")
