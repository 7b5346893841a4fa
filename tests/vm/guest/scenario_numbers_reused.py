"""The kernel reuses the numbers of IOMMU groups and vfio devices: no pod is given another device's node.

A function that is plugged in takes the smallest group number that is free, which is the one of whatever was pulled out
before. So one address can come back with another's group, and another address, or another model, with its own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import grpc

from gpuactors import limits
from gpuactors.core.host.inspections import UNSETTLED_INSPECTIONS_S
from gpuactors.core.host.usage import POLL_S
from gpuactors.core.step import CALL_SETTLE_S
from tests.support.kubelet_grpcio import HEALTHY, KubeletStandIn
from tests.support.patience import patient
from tests.vm.guest.daemon import DaemonProcess
from tests.vm.guest.node import NAMED_WITHIN_S, SLACK_S, Node, arguments, last_reason
from tests.vm.guest.runner import Guest, eventually
from tests.vm.guest.sysfs import Function, function_behind, functions_behind
from tests.vm.machine import Machine, PciFunction

EDU1: Final = PciFunction("edu1", "edu", "rp1")
EDU2: Final = PciFunction("edu2", "edu", "rp2")
NIC: Final = PciFunction("nic", "e1000e", "rp3", properties=("romfile=",))
NIC_IN_EDUS_SLOT: Final = PciFunction("nic", "e1000e", "rp1", properties=("romfile=",))

MACHINE: Final = Machine(ports=("rp1", "rp2", "rp3"), functions=(EDU1, EDU2))

RESOURCE: Final = "pci-1234/11e8"

FRAME_WITHIN_S: Final = UNSETTLED_INSPECTIONS_S[0] + SLACK_S
"""From a bind to kubelet's device lists."""

UNPLUG_TIMEOUT_S: Final = patient(15.0)
"""From QEMU's word to the kernel's: pciehp may wait for five seconds after the button was pressed."""

GONE_WITHIN_S: Final = CALL_SETTLE_S + FRAME_WITHIN_S
"""The same of what goes: right after a call the list keeps what it has."""

GIVEN_AGAIN_WITHIN_S: Final = FRAME_WITHIN_S + 2 * limits.CALL_DEADLINE_S
"""From a bind to the second answer that is no refusal. One takes half a second where many share the processors."""

FIRST_FRAME_WITHIN_S: Final = limits.DISCONNECT_WAIT_S + FRAME_WITHIN_S
"""The same of a resource that has to register first."""

FREE_WITHIN_S: Final = limits.LEDGER_S + POLL_S + SLACK_S
"""From a pod's end: its device has left kubelet's ledger, and a poll has found its group free."""

REFUSALS: Final = (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION)
"""Not there, or not as it was; a deadline that passed would be something else."""

ROUNDS: Final = 5
"""Swaps of two devices' groups while both are asked for without a pause."""


def run(guest: Guest) -> None:
    """One daemon; three ways in which a number comes back."""
    edu1, edu2 = (function_behind(guest.machine, function.port) for function in (EDU1, EDU2))
    edu1.bind_vfio()
    edu2.bind_vfio()
    selectors = ("vendor=1234,device=11e8", "vendor=8086,device=10d3")
    with (
        Node.with_kubelet(guest) as node,
        DaemonProcess.start(arguments(*selectors), guest.artifacts / "daemon.log") as daemon,
    ):
        with guest.step("two devices, each with its own group"):
            daemon.wait_until_it_listens()
            node.wait(_healthy(edu1, edu2), FRAME_WITHIN_S)
            assert edu1.group != edu2.group
        _by_another_model(node, daemon, edu1, edu2)
        _in_the_same_slot(node, edu1, edu2)
        _swapped(node, daemon, edu1, edu2)
        with guest.step("0 on SIGTERM"):
            assert daemon.terminate() == 0
            assert not daemon.said("daemon.died")


def _by_another_model(node: Node, daemon: DaemonProcess, edu1: Function, edu2: Function) -> None:
    step, group, vfio = node.guest.step, edu1.group, _vfio_number(edu1)
    with step("pulled out; another model elsewhere gets its group's and its vfio device's number"):
        _unplug(node, EDU1, _healthy(edu2))
        nic = _plug(node, NIC)
        assert (nic.group, _vfio_number(nic)) == (group, vfio), (
            "the kernel has not given the numbers away again"
        )
        assert nic.address != edu1.address
        node.wait(_healthy(edu2, nic), FIRST_FRAME_WITHIN_S)
    with step("the old address is refused; the new one gets the node that has its number"):
        (resource,) = set(node.resources) - {RESOURCE}
        for refused in (edu1, nic):
            assert _refusal(node.kubelet, RESOURCE, refused) is grpc.StatusCode.NOT_FOUND
        assert _given(node.kubelet, resource, nic) == nic.group
        assert _given(node.kubelet, RESOURCE, edu2) == edu2.group
        _end_pods(node, daemon, nic, edu2)
        _unplug(node, NIC, _healthy(edu2))


def _in_the_same_slot(node: Node, edu1: Function, edu2: Function) -> None:
    with node.guest.step("another model at the same address, with the same numbers: only as what it is"):
        nic = _plug(node, NIC_IN_EDUS_SLOT)
        assert nic == edu1
        node.wait(_healthy(edu2, nic), FRAME_WITHIN_S)
        (resource,) = set(node.resources) - {RESOURCE}
        assert set(node.kubelet.snapshot()[resource]) == {nic.address}
        assert _refusal(node.kubelet, RESOURCE, edu1) is grpc.StatusCode.NOT_FOUND
        _unplug(node, NIC_IN_EDUS_SLOT, _healthy(edu2))
        _plug(node, EDU1)
        node.wait(_healthy(edu1, edu2), FRAME_WITHIN_S)


def _swapped(node: Node, daemon: DaemonProcess, edu1: Function, edu2: Function) -> None:
    with _Asking.of(node.kubelet, edu1) as first, _Asking.of(node.kubelet, edu2) as second:
        # The list keeps what a call has been answered about; of the first one, on its way, the daemon cannot know.
        first.wait_until_given_again()
        second.wait_until_given_again()
        for number in range(1, ROUNDS + 1):
            with node.guest.step(
                f"both pulled out, in again with their groups swapped, asked for all the time ({number})"
            ):
                groups = (_group(edu1), _group(edu2))
                _pull_out(node, EDU1, EDU2)
                # Who comes first gets the smaller number.
                for function in (EDU2, EDU1) if groups[0] < groups[1] else (EDU1, EDU2):
                    _plug(node, function)
                assert (_group(edu1), _group(edu2)) == groups[::-1], groups
                first.wait_until_given_again()
                second.wait_until_given_again()
    for name, asking in (("first", first), ("second", second)):
        assert asking.wrong == [], asking.wrong
        assert len(asking.groups) == 2, f"{asking.function.address} was handed out with {asking.groups} only"
        node.figure(f"swapped_{name}_given", asking.given)
        node.figure(f"swapped_{name}_refused", asking.refused)
    with node.guest.step("the pods end: both are free"):
        _end_pods(node, daemon, edu1, edu2)
        node.wait(_healthy(edu1, edu2), FRAME_WITHIN_S)


@dataclass(slots=True)
class _Asking:
    """A thread that calls Allocate for one address without a pause, and holds each answer against the kernel's link.

    It asks for one pod that has the device all the time, as kubelet gives no device to two pods.
    """

    kubelet: KubeletStandIn
    function: Function
    given: int = 0
    refused: int = 0
    groups: set[str] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)

    @classmethod
    @contextmanager
    def of(cls, kubelet: KubeletStandIn, function: Function) -> Iterator[_Asking]:
        """Ask until the end of the block; what broke the thread is raised there."""
        asking = cls(kubelet, function)
        thread = threading.Thread(target=asking._run, name=f"asking for {function.address}", daemon=True)
        thread.start()
        try:
            yield asking
        finally:
            asking._over.set()
            thread.join(timeout=limits.CALL_DEADLINE_S + SLACK_S)
            assert not thread.is_alive(), "Allocate does not come back"

    def wait_until_given_again(self) -> None:
        """Wait for an answer to a call that begins from now on: with the group that it has now. Raises TimeoutError."""
        before = self.given
        eventually(
            f"Allocate of {self.function.address}",
            lambda: bool(self.wrong) or self.given > before + 1, timeout_s=GIVEN_AGAIN_WITHIN_S,
        )  # fmt: skip

    def _run(self) -> None:
        while not self._over.is_set():
            before = self.function.group
            try:
                group = _given(self.kubelet, RESOURCE, self.function)
            except grpc.RpcError as error:
                refusal: Any = error
                if refusal.code() not in REFUSALS:
                    self.wrong.append(str(refusal))
                self.refused += 1
                continue
            except Exception as error:  # whatever it is, the scenario must not take it for silence
                self.wrong.append(repr(error))
                return
            # It may be pulled out at any moment, also while the call is answered; plugged in again it cannot be.
            allowed = {before, self.function.group} - {None}
            if group not in allowed:
                self.wrong.append(f"{self.function.address}: given group {group}, but its own is {allowed}")
            self.given += 1
            self.groups.add(group)


def _plug(node: Node, function: PciFunction) -> Function:
    """Plug it in and bind it."""
    node.guest.qmp.plug(function)
    plugged = function_behind(node.guest.machine, function.port)
    plugged.bind_vfio()
    return plugged


def _unplug(node: Node, function: PciFunction, lists: dict[str, str]) -> None:
    """Pull it out, and wait until kubelet's device lists are so."""
    _pull_out(node, function)
    node.wait(lists, GONE_WITHIN_S)


def _pull_out(node: Node, *functions: PciFunction) -> None:
    """Pull them out; returns when the kernel has let all of them go."""
    for function in functions:
        node.guest.qmp.unplug(function.id)
    for function in functions:
        node.guest.qmp.wait_unplugged(function.id, timeout_s=UNPLUG_TIMEOUT_S)
        assert functions_behind(node.guest.machine, function.port) == []


def _end_pods(node: Node, daemon: DaemonProcess, *functions: Function) -> None:
    """End the pods that have them, and wait until the devices are free.

    Only when the daemon knows the names of the pods: what List has never shown counts as allocated for GRANT_GRACE_S.
    """
    eventually(
        "the names of the pods",
        lambda: all(
            last_reason(daemon, function.address) == f"allocated to pod default/{_pod(function)}"
            for function in functions
        ),
        timeout_s=NAMED_WITHIN_S,
    )
    for function in functions:
        node.kubelet.end_pod(_pod(function))
    eventually(
        f"{[function.address for function in functions]} free",
        lambda: all(last_reason(daemon, function.address) == "free" for function in functions),
        timeout_s=FREE_WITHIN_S,
    )


def _pod(function: Function) -> str:
    """The one pod that ever has it at a time."""
    return f"vm-{function.address}"


def _given(kubelet: KubeletStandIn, resource: str, function: Function) -> str:
    """Allocate it for its pod: the number of the one group whose node is in the answer."""
    allocated = kubelet.allocate(resource, [function.address], pod=_pod(function))
    container, group = sorted((node.host_path for node in allocated.devices), reverse=True)
    assert container == "/dev/vfio/vfio", allocated
    assert allocated.envs[_variable(resource)] == function.address, allocated
    return group.removeprefix("/dev/vfio/")


def _variable(resource: str) -> str:
    return "PCI_RESOURCE_" + resource.upper().replace("/", "_").replace(".", "_")


def _refusal(kubelet: KubeletStandIn, resource: str, function: Function) -> grpc.StatusCode:
    """The status with which Allocate is refused."""
    try:
        kubelet.allocate(resource, [function.address])
    except grpc.RpcError as error:
        # What grpcio's blocking calls raise is a Call as well, which its types do not say.
        refusal: Any = error
        code = refusal.code()
        assert isinstance(code, grpc.StatusCode)
        return code
    raise AssertionError(f"{function.address} was handed out as {resource}")


def _group(function: Function) -> int:
    """The number of its IOMMU group. Raises ValueError where it has none."""
    return int(function.group or "")


def _vfio_number(function: Function) -> str:
    """N of its `vfio-dev/vfioN`: also without a node of that name a number that is given away again.

    Waits for it: the link to the driver comes first, and if the override was there in time it is a thread of the kernel
    that binds what was plugged in. Raises TimeoutError.
    """
    directory = function.path / "vfio-dev"
    eventually(f"{directory}", directory.exists, timeout_s=FRAME_WITHIN_S)
    (entry,) = directory.iterdir()
    return entry.name


def _healthy(*functions: Function) -> dict[str, str]:
    return {function.address: HEALTHY for function in functions}
