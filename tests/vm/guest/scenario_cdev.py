"""A kernel with iommufd: cdevs are allocated with the group's node, and their holders are detected and named.

A virtual machine may have its GPU either way, by the group or by the cdev; the kernel lets only one of them be in use.
A bound cdev is no different from an open device to whoever counts, except that the group's node was never opened.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc

from gpuactors import limits
from gpuactors.core.host.schedule import POLL_FAST_S
from gpuactors.core.host.usage import POLL_S
from gpuactors.core.ledger.ledger import LEDGER_SETTLING_S
from gpuactors.host.use import PROC_SCAN_REST_MAX_S
from tests.support.kubelet_grpcio import HEALTHY, UNHEALTHY
from tests.vm.guest.daemon import DaemonProcess
from tests.vm.guest.node import NAMED_WITHIN_S, SLACK_S, Node, arguments, last_reason
from tests.vm.guest.runner import Guest, eventually
from tests.vm.guest.sysfs import Function, function_behind, functions_behind
from tests.vm.guest.tenant import Tenant
from tests.vm.kernels import CDEV
from tests.vm.machine import Machine, PciFunction

MACHINE: Final = Machine(
    ports=("rp1", "rp2"),
    functions=(
        PciFunction("edu1", "edu", "rp1"),
        PciFunction("edu2", "edu", "rp2", function=0),
        PciFunction("nic", "e1000e", "rp2", function=1, properties=("romfile=",)),
    ),
    kernels=("iommufd",),
    needs=frozenset({CDEV}),
)

RESOURCE: Final = "pci-1234/11e8"

CONTAINER_NODE: Final = "/dev/vfio/vfio"

IOMMUFD_NODE: Final = "/dev/iommu"

FIRST_FRAME_WITHIN_S: Final = LEDGER_SETTLING_S + limits.DISCONNECT_WAIT_S + SLACK_S
"""From the first scan to the first frame: the ledger, a poll, Register."""

BOUND_SEEN_WITHIN_S: Final = POLL_S + SLACK_S
"""An external process has a cdev bound, which sysfs shows to the next poll."""

OPEN_SEEN_WITHIN_S: Final = POLL_S + PROC_SCAN_REST_MAX_S + SLACK_S
"""An external process has a cdev open and not bound, which only a pass over /proc shows."""

RELEASE_SEEN_WITHIN_S: Final = POLL_FAST_S + SLACK_S

POLLED_S: Final = POLL_S + 0.5
"""After so long a poll has been made and, if it changed anything, told."""


def run(guest: Guest) -> None:
    """One daemon with `--holders proc`."""
    edu = function_behind(guest.machine, "rp1")
    gpu, companion = functions_behind(guest.machine, "rp2")
    for function in (edu, gpu, companion):
        function.bind_vfio()
    with guest.step("the kernel has a node for each device, and one for iommufd"):
        nodes = [function.cdev_node for function in (edu, gpu, companion)]
        assert len(set(nodes)) == 3
        assert all(node.is_char_device() for node in (*nodes, Path(IOMMUFD_NODE))), nodes
    with Node.with_kubelet(guest) as node:
        options = (*arguments("vendor=1234,device=11e8"), "--holders", "proc")
        with DaemonProcess.start(options, guest.artifacts / "daemon.log") as daemon:
            scene = _Scene(node, daemon, edu, gpu)
            with guest.step("the daemon starts"):
                daemon.wait_until_it_listens()
                node.wait(scene.listed(HEALTHY), FIRST_FRAME_WITHIN_S)
            _handed_out(scene, companion)
            _in_a_strangers_hands(scene)
            _in_a_pods_hands(scene)
            with guest.step("0 on SIGTERM"):
                assert daemon.terminate() == 0
                assert not daemon.said("daemon.died")


@dataclass(frozen=True, slots=True)
class _Scene:
    """`edu` is alone in its group and gets held; `gpu` is in a group with a function of another kind."""

    node: Node
    daemon: DaemonProcess
    edu: Function
    gpu: Function

    def listed(self, health: str) -> dict[str, str]:
        """Both are listed; `edu` is so, and `gpu` Healthy."""
        return {self.edu.address: health, self.gpu.address: HEALTHY}

    def leads_to(self, figure: str, act: Callable[[], None], health: str, within_s: float) -> None:
        """Do `act`: within the bound `edu` is so."""
        self.node.timed(figure, act, self.listed(health), within_s)
        self.daemon.check_alive()

    def wait_reason(self, part: str, timeout_s: float = SLACK_S) -> None:
        """Wait until the log's last reason for `edu` has that in it."""
        try:
            eventually(part, lambda: part in last_reason(self.daemon, self.edu.address), timeout_s=timeout_s)
        except TimeoutError as error:
            said = last_reason(self.daemon, self.edu.address)
            raise AssertionError(f"{error}; the last reason was: {said}") from None

    def allocated(self, function: Function, pod: str) -> tuple[str, ...]:
        """The nodes that the pod's container with this function gets; they must all be there."""
        answer = self.node.kubelet.allocate(RESOURCE, [function.address], pod=pod)
        nodes = tuple(device.host_path for device in answer.devices)
        assert all(Path(node).is_char_device() for node in nodes), nodes
        return nodes


def _handed_out(scene: _Scene, companion: Function) -> None:
    with scene.node.guest.step("Allocate: container, group, cdev and iommufd"):
        assert scene.allocated(scene.edu, "vm-0") == (
            CONTAINER_NODE, str(scene.edu.group_node), str(scene.edu.cdev_node), IOMMUFD_NODE,
        )  # fmt: skip
    with scene.node.guest.step("Allocate of one in a shared group: the cdevs of all its functions"):
        cdevs = sorted((str(scene.gpu.cdev_node), str(companion.cdev_node)))
        assert scene.allocated(scene.gpu, "vm-pair") == (
            CONTAINER_NODE, str(scene.gpu.group_node), *cdevs, IOMMUFD_NODE,
        )  # fmt: skip
        scene.wait_reason("allocated to pod default/vm-0", NAMED_WITHIN_S)
        for pod in ("vm-0", "vm-pair"):
            scene.node.kubelet.end_pod(pod)
        scene.wait_reason("free", limits.LEDGER_S + SLACK_S)


def _in_a_strangers_hands(scene: _Scene) -> None:
    step, edu = scene.node.guest.step, scene.edu
    with Tenant.start() as external, Tenant.start() as other:
        named = f"process {external.pid} ({external.command})"
        with step("an external process has the cdev bound: Unhealthy, with its pid and command"):
            cdev = edu.cdev_node
            scene.leads_to(
                "cdev_bound_to_unhealthy_ms", lambda: external.bind_cdev(cdev), UNHEALTHY, BOUND_SEEN_WITHIN_S
            )
            scene.wait_reason(named)
        with step("the kernel: enabled once, the group says EBUSY, a second bind EINVAL"):
            assert edu.enable_count == 1
            assert edu.open_error() == errno.EBUSY
            assert "EINVAL" in _refusal(lambda: other.bind_cdev(cdev))
            other.close()
        with step("Allocate of it is refused, with the same name"):
            _check_refused(scene, external)
        with step("it closes: Healthy again, and the group opens"):
            scene.leads_to("cdev_close_to_healthy_ms", external.close, HEALTHY, RELEASE_SEEN_WITHIN_S)
            assert edu.enable_count == 0
            assert edu.open_error() is None
        with step("it has the cdev open, not bound: Unhealthy, with the same name"):
            scene.leads_to(
                "cdev_open_to_unhealthy_ms", lambda: external.open_cdev(cdev), UNHEALTHY, OPEN_SEEN_WITHIN_S
            )
            scene.wait_reason(named)
            assert edu.enable_count == 0
        with step("SIGKILL: Healthy again"):
            scene.leads_to("cdev_sigkill_to_healthy_ms", external.kill, HEALTHY, RELEASE_SEEN_WITHIN_S)
        with step("the group is as usable as ever, and seen as ever"):
            scene.leads_to(
                "group_device_open_to_unhealthy_ms",
                lambda: other.open_device(edu.group_node, edu.address),
                UNHEALTHY,
                BOUND_SEEN_WITHIN_S,
            )
            scene.wait_reason(f"process {other.pid} ({other.command})")
            with Tenant.start() as third:
                assert "EBUSY" in _refusal(lambda: third.bind_cdev(cdev))
            scene.leads_to("group_close_to_healthy_ms", other.close, HEALTHY, RELEASE_SEEN_WITHIN_S)


def _in_a_pods_hands(scene: _Scene) -> None:
    edu = scene.edu
    with (
        scene.node.guest.step("a pod has the cdev bound that it was given: Healthy all the time"),
        Tenant.start() as vm,
    ):
        started_ns = time.monotonic_ns()
        scene.allocated(edu, "vm-1")
        vm.bind_cdev(edu.cdev_node)
        scene.wait_reason("allocated to pod default/vm-1", NAMED_WITHIN_S)
        time.sleep(POLLED_S)
        scene.node.check_always(scene.listed(HEALTHY), started_ns)
        vm.kill()
        scene.node.kubelet.end_pod("vm-1")
        scene.wait_reason("free", limits.LEDGER_S + SLACK_S)
        scene.node.check_always(scene.listed(HEALTHY), started_ns)


def _check_refused(scene: _Scene, external: Tenant) -> None:
    try:
        scene.node.kubelet.allocate(RESOURCE, [scene.edu.address])
    except grpc.RpcError as error:
        # What grpcio's blocking calls raise is a Call as well, which its types do not say.
        refusal: Any = error
    else:
        raise AssertionError(
            f"{scene.edu.address} was handed out although an external process has its cdev bound"
        )
    assert refusal.code() is grpc.StatusCode.FAILED_PRECONDITION, refusal
    assert str(external.pid) in str(refusal.details()), refusal.details()


def _refusal(act: Callable[[], None]) -> str:
    """What a tenant says that the kernel said, with the errno's name."""
    try:
        act()
    except RuntimeError as error:
        return str(error)
    return "nothing: it was let"
