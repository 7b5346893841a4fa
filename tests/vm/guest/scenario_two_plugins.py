"""Another plugin serves the daemon's resource: before it, after it, and leaves. Each time kubelet's list is ours again.

When a second plugin registers a resource, kubelet tells the first one nothing: its stream stays open, and whatever
either of them sends replaces the whole list. When the newer one goes, nothing is healthy any more, for ever. Only
kubelet's own list (GetAllocatableResources) shows it. The other plugin is made with grpcio and lists the group numbers,
as KubeVirt's built-in one does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from gpuactors import limits
from gpuactors.kubelet.kubelet import REGISTER_DEADLINE_S
from tests.support.kubelet_grpcio import HEALTHY, UNHEALTHY
from tests.support.tiny_plugin import TinyPlugin
from tests.vm.guest.daemon import START_TIMEOUT_S, DaemonProcess
from tests.vm.guest.node import SLACK_S, Node, arguments, by_address
from tests.vm.guest.runner import Guest, eventually
from tests.vm.guest.sysfs import Function, function_behind
from tests.vm.kernels import NOT_BY_DEFAULT
from tests.vm.machine import Machine, PciFunction

PORTS: Final = ("rp1", "rp2")

MACHINE: Final = Machine(
    ports=PORTS,
    functions=tuple(PciFunction(f"edu-{port}", "edu", port) for port in PORTS),
    scenario_timeout_s=420.0,
    kernels=NOT_BY_DEFAULT,  # tests/node plays it with kubelet itself
)

RESOURCE: Final = "pci-1234/11e8"
SOCKET: Final = "kubevirt-edu.sock"

SAID_WITHIN_S: Final = 2 * limits.LEDGER_QUIET_S + SLACK_S
"""From the other plugin's list to our word about it, if no hint of it were seen: two reads of a quiet node."""

OURS_WITHIN_S: Final = SAID_WITHIN_S + REGISTER_DEADLINE_S
"""And to our list in kubelet's device lists, the first wait before registering again included."""


@dataclass(frozen=True, slots=True)
class _Scene:
    node: Node
    functions: tuple[Function, ...]

    @property
    def ours(self) -> dict[str, str]:
        return dict.fromkeys((function.address for function in self.functions), HEALTHY)

    @property
    def theirs(self) -> dict[str, str]:
        return dict.fromkeys((function.group or "" for function in self.functions), HEALTHY)

    @contextmanager
    def other_plugin(self) -> Iterator[TinyPlugin]:
        """The other plugin has registered, and kubelet's device lists hold its list."""
        other = TinyPlugin(self.node.kubelet.socket_dir, SOCKET)
        try:
            other.register(resource=RESOURCE, timeout_s=START_TIMEOUT_S)
            other.lists.put(list(self.theirs.items()))
            self.node.wait(self.theirs, SLACK_S)
            yield other
        finally:
            other.server.stop(grace=None).wait()

    def check_given(self) -> None:
        """Kubelet's Allocate comes to us, and the answer is the device's own group."""
        function = self.functions[0]
        allocated = self.node.kubelet.allocate(RESOURCE, [function.address])
        assert str(function.group_node) in {node.host_path for node in allocated.devices}, allocated


def run(guest: Guest) -> None:
    """Two daemons, one after the other, each with another plugin on its resource."""
    functions = tuple(function_behind(guest.machine, port) for port in PORTS)
    for function in functions:
        function.bind_vfio()
    with Node.with_kubelet(guest) as node:
        scene = _Scene(node, functions)
        with _daemon(guest, "first") as daemon:
            with guest.step("kubelet has both of ours"):
                daemon.wait_until_it_listens()
                node.wait(scene.ours, START_TIMEOUT_S)
            _comes_second_and_stays(scene, daemon)
            _comes_second_and_leaves(scene)
            assert daemon.terminate() == 0
            daemon.check_one_life()
        _was_there_first(scene)


def _daemon(guest: Guest, name: str) -> DaemonProcess:
    return DaemonProcess.start(arguments("vendor=1234,device=11e8"), guest.artifacts / f"daemon-{name}.log")


def _comes_second_and_stays(scene: _Scene, daemon: DaemonProcess) -> None:
    guest = scene.node.guest
    with guest.step("another plugin takes the resource and stays: it is named, and the resource taken back"):
        with scene.other_plugin():
            _wait_contested(daemon)
            scene.node.wait(scene.ours, OURS_WITHIN_S)
            scene.check_given()
        scene.node.wait(scene.ours, OURS_WITHIN_S)


def _comes_second_and_leaves(scene: _Scene) -> None:
    guest = scene.node.guest
    with guest.step("it takes the resource again and leaves: nothing is healthy, then ours are again"):
        with scene.other_plugin() as other:
            other.lists.put(None)
            scene.node.kubelet.wait_for(
                lambda lists: set(by_address(lists).values()) == {UNHEALTHY}, SLACK_S, "nobody's list"
            )
        scene.node.wait(scene.ours, OURS_WITHIN_S)
        scene.check_given()


def _was_there_first(scene: _Scene) -> None:
    guest = scene.node.guest
    with (
        guest.step("another plugin is there before us, and sends its list once more when we have registered"),
        scene.other_plugin() as other,
        _daemon(guest, "second") as daemon,
    ):
        daemon.wait_until_it_listens()
        scene.node.wait(scene.ours, START_TIMEOUT_S)
        other.lists.put(list(scene.theirs.items()))
        scene.node.wait(scene.theirs, SLACK_S)
        _wait_contested(daemon)
        scene.node.wait(scene.ours, OURS_WITHIN_S)
        scene.check_given()
        assert daemon.terminate() == 0
        daemon.check_one_life()


def _wait_contested(daemon: DaemonProcess) -> None:
    """The log names the other plugin's devices and its socket."""

    def said() -> bool:
        lines = [str(line["reason"]) for line in daemon.said("plugin.contested")]
        return any("another plugin serves the same resource" in line and SOCKET in line for line in lines)

    eventually("plugin.contested", said, timeout_s=SAID_WITHIN_S)
