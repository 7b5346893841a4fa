"""The node boots, and IOMMU groups have other numbers: no container is made with another pod's group node.

Kubelet makes the container of a pod that was there before from the AllocateResponse that its ledger file has, without
asking anybody; the group's number in it is that of the boot before. What it does ask before each start of a container
is PreStartContainer, so that is where the container must be stopped, with the reason.

Nothing is rebooted here: the daemon and kubelet end, both functions are pulled out and come back in the other order,
which is what a boot that enumerates otherwise leaves; then kubelet comes up with its ledger and its pods.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import grpc

from gpuactors import limits
from gpuactors.core.host.inspections import UNSETTLED_INSPECTIONS_S
from gpuactors.core.host.usage import POLL_S
from tests.support.kubelet_grpcio import HEALTHY
from tests.support.patience import patient
from tests.vm.guest.daemon import DaemonProcess
from tests.vm.guest.node import SLACK_S, Node, arguments, last_reason
from tests.vm.guest.runner import Guest, eventually
from tests.vm.guest.sysfs import Function, function_behind, functions_behind
from tests.vm.machine import Machine, PciFunction

EDU1: Final = PciFunction("edu1", "edu", "rp1")
EDU2: Final = PciFunction("edu2", "edu", "rp2")

MACHINE: Final = Machine(ports=("rp1", "rp2"), functions=(EDU1, EDU2))

RESOURCE: Final = "pci-1234/11e8"

FRAME_WITHIN_S: Final = limits.DISCONNECT_WAIT_S + UNSETTLED_INSPECTIONS_S[0] + SLACK_S
"""From the last bind, or kubelet's start, to its device lists of the resource."""

UNPLUG_TIMEOUT_S: Final = patient(15.0)
"""From QEMU's word to the kernel's: pciehp may wait for five seconds after the button was pressed."""

FREE_WITHIN_S: Final = limits.LEDGER_S + POLL_S + SLACK_S
"""From a pod's end to an Allocate that gets its GPU: it has left kubelet's ledger, and nobody holds the group."""

POD: Final = "vm-1"


@dataclass(frozen=True, slots=True)
class _Scene:
    node: Node
    edu1: Function
    edu2: Function

    @property
    def listed(self) -> dict[str, str]:
        return dict.fromkeys((self.edu1.address, self.edu2.address), HEALTHY)

    def start_daemon(self, life: str) -> DaemonProcess:
        """A daemon with a log of its own."""
        log_file = self.node.guest.artifacts / f"daemon-{life}.log"
        return DaemonProcess.start(arguments("vendor=1234,device=11e8"), log_file)


def run(guest: Guest) -> None:
    """Two boots of one node."""
    edu1, edu2 = (function_behind(guest.machine, function.port) for function in (EDU1, EDU2))
    edu1.bind_vfio()
    edu2.bind_vfio()
    with Node.with_kubelet(guest) as node:
        scene = _Scene(node, edu1, edu2)
        groups = _before_the_boot(scene)
        _boots(scene, groups)
        _after_the_boot(scene, groups)


def _before_the_boot(scene: _Scene) -> dict[str, str]:
    """The groups' numbers, by address."""
    node, edu1 = scene.node, scene.edu1
    with scene.start_daemon("before") as daemon:
        with node.guest.step("a pod has the first GPU, with its group's node"):
            daemon.wait_until_it_listens()
            node.wait(scene.listed, FRAME_WITHIN_S)
            allocated = node.kubelet.allocate(RESOURCE, [edu1.address], pod=POD)
            assert str(edu1.group_node) in {n.host_path for n in allocated.devices}, allocated
            node.kubelet.prestart(RESOURCE, [edu1.address])
        assert daemon.terminate() == 0
    return {function.address: function.group or "" for function in (scene.edu1, scene.edu2)}


def _boots(scene: _Scene, groups: dict[str, str]) -> None:
    node = scene.node
    with node.guest.step(
        "the node boots: each function has the other one's group number, kubelet its ledger"
    ):
        node.kubelet.stop()
        for function in (EDU1, EDU2):
            node.guest.qmp.unplug(function.id)
        for function in (EDU1, EDU2):
            node.guest.qmp.wait_unplugged(function.id, timeout_s=UNPLUG_TIMEOUT_S)
            assert functions_behind(node.guest.machine, function.port) == []
        # Whoever comes first gets the smaller number.
        first = (
            (EDU2, EDU1)
            if int(groups[scene.edu1.address]) < int(groups[scene.edu2.address])
            else (EDU1, EDU2)
        )
        for function in first:
            node.guest.qmp.plug(function)
            function_behind(node.guest.machine, function.port).bind_vfio()
        assert scene.edu1.group == groups[scene.edu2.address], (
            "the kernel has not given the numbers away again"
        )
        assert scene.edu2.group == groups[scene.edu1.address]
        node.kubelet.start()


def _after_the_boot(scene: _Scene, groups: dict[str, str]) -> None:
    node, edu1, edu2 = scene.node, scene.edu1, scene.edu2
    stale = f"/dev/vfio/{groups[edu1.address]}"
    with scene.start_daemon("after") as daemon:
        with node.guest.step("the pod's GPU is listed as before, and counted once"):
            daemon.wait_until_it_listens()
            node.wait(scene.listed, FRAME_WITHIN_S)
        with node.guest.step(
            "its container, with the other GPU's node, does not start; the reason names the node"
        ):
            refusal = _refusal_to_start(node, edu1)
            assert stale in refusal, refusal
            assert "delete the pod" in refusal, refusal
        with node.guest.step("another pod gets the other GPU, with the node that has the old number"):
            allocated = node.kubelet.allocate(RESOURCE, [edu2.address], pod="vm-2")
            assert stale == str(edu2.group_node)
            assert stale in {n.host_path for n in allocated.devices}, allocated
            node.kubelet.prestart(RESOURCE, [edu2.address])
        with node.guest.step("the pod is deleted; its successor gets the GPU with the node that it has now"):
            node.kubelet.end_pod(POD)
            eventually(
                "an Allocate for the successor", lambda: _is_given(node, edu1), timeout_s=FREE_WITHIN_S
            )
            node.kubelet.prestart(RESOURCE, [edu1.address])
            assert "allocated" in last_reason(daemon, edu1.address) or "handed out" in last_reason(
                daemon, edu1.address
            )
            assert daemon.terminate() == 0
            daemon.check_one_life()


def _refusal_to_start(node: Node, function: Function) -> str:
    """What PreStartContainer says, whose status makes kubelet try again."""
    try:
        node.kubelet.prestart(RESOURCE, [function.address])
    except grpc.RpcError as error:
        refusal: Any = error
        assert refusal.code() is grpc.StatusCode.FAILED_PRECONDITION, refusal
        return str(refusal.details())
    raise AssertionError(f"a container starts with another group's node as {function.address}")


def _is_given(node: Node, function: Function) -> bool:
    try:
        allocated = node.kubelet.allocate(RESOURCE, [function.address], pod="vm-3")
    except ValueError:  # kubelet's ledger has the old pod for a moment longer
        return False
    assert str(function.group_node) in {n.host_path for n in allocated.devices}, allocated
    return True
