"""Kubelet's failures, while GPUs are really bound and unbound: when it is back, its device lists are right.

It restarts, is killed, dies in the middle of Register, hangs, holds an answer back, cuts a stream; its directory is
wiped; its PodResources socket goes away. Two models, so that what happens to one plugin is seen not to touch the other.
The periodic scan is an hour away.
"""

from __future__ import annotations

import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from gpuactors import limits
from gpuactors.core.deviceplugin.registration import REGISTER_BACKOFF_S
from gpuactors.core.host.inspections import UNSETTLED_INSPECTIONS_S
from tests.support import directories
from tests.support.kubelet_grpcio import GAVE_UP, HEALTHY, UNHEALTHY, EndpointStopped, KubeletStandIn
from tests.support.kubelet_seen import Frame, Snapshot
from tests.vm.guest.broken_kubelet import ACCEPTED, ASKED, DIALLED, HANGS, BrokenKubelet
from tests.vm.guest.daemon import DaemonProcess
from tests.vm.guest.node import NAMED_WITHIN_S, SLACK_S, Node, arguments, by_address, last_reason
from tests.vm.guest.runner import Guest, eventually
from tests.vm.guest.sysfs import Function, function_behind
from tests.vm.kernels import NOT_BY_DEFAULT
from tests.vm.machine import Machine, PciFunction

MACHINE: Final = Machine(
    ports=("rp1", "rp2", "rp3", "rp4"),
    functions=(
        PciFunction("edu1", "edu", "rp1"),
        PciFunction("edu2", "edu", "rp2"),
        PciFunction("nic1", "e1000e", "rp3", properties=("romfile=",)),
        PciFunction("nic2", "e1000e", "rp4", properties=("romfile=",)),
    ),
    scenario_timeout_s=420.0,
    kernels=NOT_BY_DEFAULT,  # tests/node plays it with kubelet itself
)

EDU: Final = "pci-1234/11e8"

NIC_DOMAIN: Final = "intel.com/"
"""What comes after it is the model's name in pci.ids, which may change with that file."""

FIRST_FRAME_WITHIN_S: Final = limits.DISCONNECT_WAIT_S + 5 * SLACK_S
"""From the daemon's first scan to both resources' first frames, with everything in it still cold."""

RETURN_WITHIN_S: Final = limits.DISCONNECT_WAIT_S + SLACK_S
"""From kubelet.sock to kubelet's device lists, of every resource. Whatever was tried before, a new kubelet.sock is
answered at once: no backoff is waited out, and no old call."""

FRAME_WITHIN_S: Final = UNSETTLED_INSPECTIONS_S[0] + SLACK_S
"""From a bind or unbind to the device lists of a kubelet that listens."""

NOTICED_WITHIN_S: Final = SLACK_S
"""From something that kubelet or the kernel did to the daemon's log line about it."""

AGAIN_WITHIN_S: Final = REGISTER_BACKOFF_S[2] + RETURN_WITHIN_S
"""From the end of a stream to the next one's device lists, where the stream before had not lasted."""

RELEASE_SEEN_WITHIN_S: Final = limits.LEDGER_S + SLACK_S
"""From PodResources' return to what it says."""

HELD_S: Final = limits.KUBELET_CONNECT_DEADLINE_S + 2.0
"""A held answer outlasts every shorter deadline that might end the call."""


def run(guest: Guest) -> None:
    """One daemon process, and many kubelets."""
    edu1, edu2, nic1, nic2 = (function_behind(guest.machine, port) for port in guest.machine.ports)
    with Node.with_kubelet(guest) as node:
        selectors = arguments("vendor=1234,device=11e8", "vendor=8086,device=10d3")
        # In no pod: what a pod has mounted is the directory that was there when it started, also when that is removed.
        with DaemonProcess.start(selectors, guest.artifacts / "daemon.log", prefix=()) as daemon:
            scene = _Scene(node, daemon, edu1, edu2, nic1, nic2)
            with guest.step("two models, a device of each"):
                scene.bind(scene.edu1)
                scene.bind(scene.nic1)
                daemon.wait_until_it_listens()
                scene.wait_served(FIRST_FRAME_WITHIN_S)
            _restarts(scene)
            _is_killed(scene)
            _dies_in_register(scene)
            _hangs(scene)
            _holds_its_answer(scene)
            _cuts_a_stream(scene)
            _directory_is_wiped(scene)
            _pod_resources_go_away(scene)
            with guest.step("one process from the beginning to the end, and 0 on SIGTERM"):
                assert daemon.terminate() == 0
                daemon.check_one_life()
                assert not daemon.said("actor.failed") + daemon.said("actor.restarting")


@dataclass(slots=True)
class _Scene:
    node: Node
    daemon: DaemonProcess
    edu1: Function
    edu2: Function
    nic1: Function
    nic2: Function
    bound: list[Function] = field(default_factory=list)
    """The truth: what is on vfio-pci now."""

    @property
    def kubelet(self) -> KubeletStandIn:
        return self.node.kubelet

    @property
    def nic(self) -> str:
        """The other resource's name."""
        return next(name for name in self.node.resources if name.startswith(NIC_DOMAIN))

    @property
    def truth(self) -> dict[str, str]:
        """The device lists as they must be."""
        return {function.address: HEALTHY for function in self.bound}

    def bind(self, function: Function) -> None:
        """Bind it to vfio-pci."""
        function.bind_vfio()
        self.bound.append(function)

    def unbind(self, function: Function) -> None:
        """Take it from vfio-pci."""
        function.unbind()
        self.bound.remove(function)

    def known(self, function: Function) -> None:
        """Wait until the daemon's log has what was done to it last: kubelet, which is away, cannot tell."""
        event = "device.changed" if function in self.bound else "device.gone"

        def is_said() -> bool:
            lines = self.daemon.said("device.changed") + self.daemon.said("device.gone")
            about = [line for line in lines if line["device"] == function.address]
            return bool(about) and max(about, key=lambda line: str(line["timestamp"]))["event"] == event

        eventually(f"{event} of {function.address} in the log", is_said, timeout_s=FRAME_WITHIN_S)

    def wait_served(self, within_s: float) -> None:
        """Wait until kubelet's device lists are the truth, with one open stream behind each of the two resources."""
        self.kubelet.wait_for(self._is_served, within_s, f"a stream each and {self.truth}")
        self.daemon.check_alive()

    def _is_served(self, lists: Snapshot) -> bool:
        return (
            by_address(lists) == self.truth
            and len(lists) == 2
            and all(self.streams_open(resource) == 1 for resource in lists)
        )

    def wait_registered(self, times: int, within_s: float) -> None:
        """Wait until Register was answered so often, since the scenario began."""
        self.kubelet.wait_for(lambda _: len(self.kubelet.registrations) >= times, within_s, "Register")

    def streams_open(self, resource: str) -> int:
        """Streams that brought a frame and have not ended."""
        ended = {end.client for end in self.kubelet.stream_ends(resource)}
        return len({frame.client for frame in self.kubelet.frames(resource)} - ended)

    def leads_to(self, name: str, act: Callable[[], None]) -> None:
        """Do `act`, which changes the truth: kubelet's device lists follow within the bound; how long it took is a
        figure."""
        started_ns = time.monotonic_ns()
        act()
        self.wait_served(FRAME_WITHIN_S)
        self.figure(name, started_ns, self.node.frames[-1], FRAME_WITHIN_S)

    def starts(self, name: str) -> None:
        """Kubelet starts: each resource registers with it once and is served with the truth from the first frame on,
        within the bound."""
        began_ns, framed = time.monotonic_ns(), len(self.node.frames)
        self.kubelet.start()
        self.wait_served(RETURN_WITHIN_S)
        frames = self.node.frames[framed:]
        self.figure(name, self.kubelet.appeared_ns, frames[-1], RETURN_WITHIN_S)
        self.registered_once(began_ns, EDU, self.nic)
        assert len(frames) == 2, frames
        assert {device.id for frame in frames for device in frame.devices} == self.truth.keys(), frames

    def registered_once(self, since_ns: int, *resources: str) -> None:
        """Since then these registered once each, with success, and no other did.

        A plugin that tries a socket with nobody there again and again may be the first to find the new one. It gives
        that try up as soon as it hears that kubelet is another one; kubelet may dial for it for 10 s, and then says so.
        """
        calls = self.kubelet.registrations
        new = [r for r in calls if r.received_ns >= since_ns and r.error != GAVE_UP]
        assert sorted(registration.resource for registration in new) == sorted(resources), new
        assert all(registration.error is None for registration in new), new

    def figure(self, name: str, started_ns: int, frame: Frame, within_s: float) -> None:
        took_s = (frame.at_ns - started_ns) / 1e9
        assert took_s <= within_s, f"{name}: {took_s:.3f} s, at most {within_s:g} s are promised"
        self.node.figure(name, round(took_s * 1000, 1))

    def reason_is(self, function: Function, part: str, within_s: float) -> None:
        """Wait until the log's last reason for a device has that in it."""
        eventually(
            f"{function.address}: {part}",
            lambda: part in last_reason(self.daemon, function.address),
            timeout_s=within_s,
        )

    @contextmanager
    def says(self, event: str) -> Iterator[None]:
        """The log has one more line of that name within a moment of the block's end."""
        before = len(self.daemon.said(event))
        yield
        eventually(event, lambda: len(self.daemon.said(event)) > before, timeout_s=NOTICED_WITHIN_S)


def _restarts(scene: _Scene) -> None:
    with scene.node.guest.step("kubelet restarts; a GPU is bound and another one unbound while it is away"):
        with scene.says("kubelet.gone"):
            scene.kubelet.stop()
        scene.bind(scene.edu2)
        scene.unbind(scene.nic1)
        scene.known(scene.edu2)
        scene.known(scene.nic1)
        scene.starts("restart_to_books_ms")
    with scene.node.guest.step("it restarts at once, with a bind in between that nobody waits for"):
        scene.kubelet.stop()
        scene.bind(scene.nic1)
        scene.known(scene.nic1)
        scene.starts("quick_restart_to_books_ms")


def _is_killed(scene: _Scene) -> None:
    with scene.node.guest.step("kubelet is killed: its socket stays, with nobody there; unbind and bind"):
        with scene.says("plugin.unregistered"):
            scene.kubelet.stop(leave_sockets=True)
        scene.unbind(scene.edu2)
        scene.bind(scene.nic2)
        scene.known(scene.edu2)
        scene.known(scene.nic2)
        scene.starts("killed_to_books_ms")


def _dies_in_register(scene: _Scene) -> None:
    with scene.node.guest.step("kubelet dies in the middle of Register, three times; a change after each"):
        scene.kubelet.stop(leave_sockets=True)
        changes = (
            (ACCEPTED, scene.bind, scene.edu2),
            (ASKED, scene.unbind, scene.nic1),
            (DIALLED, scene.unbind, scene.edu1),
        )
        for ending, change, function in changes:
            # How Register ended may not be logged: a retry that meets the new socket before the daemon has heard of it
            # is given up for another one, and by then nobody listens, as before.
            with (
                BrokenKubelet.start(scene.kubelet.socket_dir, ending) as broken,
                scene.says("kubelet.appeared"),
            ):
                broken.wait_dead()
            change(function)
            scene.known(function)
        scene.starts("died_in_register_to_books_ms")


def _hangs(scene: _Scene) -> None:
    with scene.node.guest.step("kubelet hangs in Register; the next one is not kept waiting by it"):
        scene.kubelet.stop(leave_sockets=True)
        with BrokenKubelet.start(scene.kubelet.socket_dir, HANGS) as hanging:
            hanging.wait_hanging()
            scene.bind(scene.edu1)
            scene.known(scene.edu1)
            scene.starts("hung_to_books_ms")
            began_ns = time.monotonic_ns()
        # The end of the old calls is nobody's business any more.
        scene.leads_to("bind_after_the_hung_one_ms", lambda: scene.bind(scene.nic1))
        scene.registered_once(began_ns)


def _holds_its_answer(scene: _Scene) -> None:
    with scene.node.guest.step(
        f"kubelet holds its answer to one Register for {HELD_S:g} s; the other is served"
    ):
        nic = scene.nic
        scene.kubelet.stop()
        began_ns = time.monotonic_ns()
        scene.kubelet.hold_register_replies(EDU)
        scene.kubelet.start()
        started = time.monotonic()
        others = {scene.nic1.address: HEALTHY, scene.nic2.address: HEALTHY}
        scene.node.wait(others, RETURN_WITHIN_S)
        # It has dialled, and may ask; what it asks is answered.
        eventually("an answer of the endpoint", lambda: _answers(scene), timeout_s=RETURN_WITHIN_S)
        scene.unbind(scene.edu2)
        scene.known(scene.edu2)
        scene.unbind(scene.nic1)
        scene.node.wait({scene.nic2.address: HEALTHY}, FRAME_WITHIN_S)
        scene.bind(scene.nic1)
        scene.node.wait(others, FRAME_WITHIN_S)
        while time.monotonic() < started + HELD_S:
            assert by_address(scene.kubelet.snapshot()) == others, "a frame before Register was answered"
            scene.daemon.check_alive()
            time.sleep(0.1)
        released_ns = time.monotonic_ns()
        scene.kubelet.release_register_replies()
        scene.wait_served(RETURN_WITHIN_S)
        scene.figure("answer_to_books_ms", released_ns, scene.node.frames[-1], RETURN_WITHIN_S)
        scene.registered_once(began_ns, EDU, nic)
    with scene.node.guest.step("kubelet dies while it holds all its answers"):
        scene.kubelet.stop()
        scene.kubelet.hold_register_replies()
        scene.kubelet.start()
        eventually("an answer of the endpoint", lambda: _answers(scene), timeout_s=RETURN_WITHIN_S)
        with scene.says("plugin.unregistered"):
            scene.kubelet.stop(leave_sockets=True)
        scene.bind(scene.edu2)
        scene.known(scene.edu2)
        scene.starts("died_holding_to_books_ms")


def _cuts_a_stream(scene: _Scene) -> None:
    with scene.node.guest.step("kubelet cuts a stream while a GPU is unbound: that resource registers again"):
        for cut, change in enumerate((scene.unbind, scene.bind, scene.unbind)):
            # Register is answered, and the last life's list may be the right one, before the stream is open.
            scene.kubelet.wait_for(lambda _: scene.streams_open(EDU) == 1, AGAIN_WITHIN_S, "an open stream")
            registered = len(scene.kubelet.registrations)
            started_ns = time.monotonic_ns()
            scene.kubelet.cut_stream(EDU)
            change(scene.edu2)
            scene.wait_registered(registered + 1, AGAIN_WITHIN_S)
            scene.wait_served(AGAIN_WITHIN_S)
            scene.figure(f"cut_{cut + 1}_to_books_ms", started_ns, scene.node.frames[-1], 2 * AGAIN_WITHIN_S)
            scene.registered_once(started_ns, EDU)


def _directory_is_wiped(scene: _Scene) -> None:
    directory = scene.kubelet.socket_dir
    with scene.node.guest.step(
        "every socket is wiped under a living kubelet: its streams go on telling the truth"
    ):
        began_ns = time.monotonic_ns()
        with scene.says("kubelet.gone"):
            for entry in directory.iterdir():
                if stat.S_ISSOCK(entry.lstat().st_mode):
                    entry.unlink()
        scene.leads_to("bind_with_the_sockets_wiped_ms", lambda: scene.bind(scene.edu2))
        scene.registered_once(began_ns)
    with scene.node.guest.step("kubelet restarts: sockets and streams are made anew"):
        scene.kubelet.stop()
        scene.unbind(scene.nic2)
        scene.known(scene.nic2)
        scene.starts("wiped_sockets_to_books_ms")
        _check_sockets(scene)
    with scene.node.guest.step("the directory is removed and made anew, as kubeadm reset does"):
        scene.kubelet.stop()
        directories.remove(directory)
        scene.unbind(scene.edu1)
        scene.bind(scene.nic2)
        scene.known(scene.edu1)
        scene.known(scene.nic2)
        # Nothing announces a new directory: the daemon checks for it.
        began_ns = time.monotonic_ns()
        scene.kubelet.start()
        within_s = limits.KUBELET_DIR_RETRY_S + RETURN_WITHIN_S
        scene.wait_served(within_s)
        scene.figure("new_directory_to_books_ms", scene.kubelet.appeared_ns, scene.node.frames[-1], within_s)
        scene.registered_once(began_ns, EDU, scene.nic)
        _check_sockets(scene)


def _pod_resources_go_away(scene: _Scene) -> None:
    kubelet, nic = scene.kubelet, scene.nic
    socket = kubelet.pod_resources_socket
    away = socket.with_name("away")
    with scene.node.guest.step("PodResources goes away; a pod starts and another one ends, and GPUs change"):
        kubelet.allocate(EDU, [scene.edu2.address], pod="vm-1")
        scene.reason_is(scene.edu2, "allocated to pod default/vm-1", NAMED_WITHIN_S)
        socket.rename(away)
        kubelet.allocate(nic, [scene.nic1.address], pod="vm-2")
        # All that is known of it now is what kubelet's file says.
        scene.reason_is(scene.nic1, "allocated to pod with UID", limits.GRANT_LEDGER_S + SLACK_S)
        kubelet.end_pod("vm-1")
        scene.leads_to("bind_without_pod_resources_ms", lambda: scene.bind(scene.edu1))
        scene.nic1.unbind()
        scene.node.wait({**scene.truth, scene.nic1.address: UNHEALTHY}, FRAME_WITHIN_S)
        scene.leads_to("rebind_without_pod_resources_ms", scene.nic1.bind_vfio)
        assert "allocated to" in last_reason(scene.daemon, scene.edu2.address)
    with scene.node.guest.step("it is back: the release is seen, the allocation is named"):
        returned = time.monotonic()
        away.rename(socket)
        scene.reason_is(scene.edu2, "free", RELEASE_SEEN_WITHIN_S)
        took_ms = round((time.monotonic() - returned) * 1000, 1)
        scene.node.figure("pod_resources_back_to_release_seen_ms", took_ms)
        scene.reason_is(scene.nic1, "allocated to pod default/vm-2", NAMED_WITHIN_S)
        scene.leads_to("unbind_after_the_release_ms", lambda: scene.unbind(scene.edu2))
        kubelet.end_pod("vm-2")


def _answers(scene: _Scene) -> bool:
    """Kubelet has dialled the endpoint, inside Register, and it answers."""
    offered = [scene.edu1.address]
    try:
        return scene.kubelet.preferred(EDU, offered, [], 1) == tuple(offered)
    except EndpointStopped:
        return False


def _check_sockets(scene: _Scene) -> None:
    """Kubelet's own, and one of ours for each resource."""
    names = {entry.name for entry in scene.kubelet.socket_dir.glob("*.sock")}
    assert len(names) == 3, names
    assert "kubelet.sock" in names
