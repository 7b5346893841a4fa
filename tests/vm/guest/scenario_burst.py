"""One pod after the other on IOMMU groups of two, as fast as kubelet admits them: no call of kubelet is refused.

Two functions of one slot share a group, so that a pod with one of them makes the other useless to everybody else.
Kubelet does not know of groups: it gives away whatever the list has Healthy. So the list that says so must be on its
way before the Allocate that caused it is answered, the preferred device must not be the other half of a group that is
taken, and who has just left kubelet's ledger must not stand in the way of the next pod.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import grpc

from gpuactors import limits
from gpuactors.core.host.inspections import UNSETTLED_INSPECTIONS_S
from gpuactors.core.host.usage import POLL_S
from tests.support.kubelet_grpcio import HEALTHY
from tests.support.pod_resources_grpcio import RELEASE_S
from tests.vm.guest.daemon import DaemonProcess
from tests.vm.guest.node import SLACK_S, Node, arguments
from tests.vm.guest.runner import Guest, eventually
from tests.vm.guest.sysfs import functions_behind
from tests.vm.kernels import NOT_BY_DEFAULT
from tests.vm.machine import Machine, PciFunction

PORTS: Final = ("rp1", "rp2", "rp3", "rp4")

MACHINE: Final = Machine(
    ports=PORTS,
    functions=tuple(
        PciFunction(f"edu-{port}-{number}", "edu", port, function=number)
        for port in PORTS
        for number in range(2)
    ),
    scenario_timeout_s=420.0,
    kernels=NOT_BY_DEFAULT,  # tests/node plays it with kubelet itself
)

RESOURCE: Final = "pci-1234/11e8"

ROUNDS: Final = int(os.environ.get("VM_ROUNDS") or "30")
"""`GPUACTORS_VM_ROUNDS` on the host; 30 by default, as each takes a second and more in emulation."""

PODS: Final = 8
"""In each round: twice as many as there are groups, so that half of them find nothing free."""

BETWEEN_PODS_S: Final = 0.05
"""From the answer to one pod's Allocate to the admission of the next: kubelet writes its ledger's file and syncs it to
the disk in between, some milliseconds, more where everything is emulated. In that time the thread that reads the stream
takes the list that came before the answer; whether it did come before is tests/kubelet/test_device_plugin.py's."""

FRAME_WITHIN_S: Final = limits.DISCONNECT_WAIT_S + UNSETTLED_INSPECTIONS_S[0] + SLACK_S
"""From the last bind to kubelet's device lists of the resource."""


@dataclass(slots=True)
class _Burst:
    """Kubelet's side: what it has given to whom, and what came of it."""

    node: Node
    groups: dict[str, str]
    """Device → its IOMMU group."""
    pods: dict[str, str] = field(default_factory=dict)
    """Device → the pod that has it."""
    ended: list[tuple[float, str]] = field(default_factory=list)
    """When each pod ended that kubelet's ledger may still have."""
    count: int = 0
    refused: list[str] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)

    def admit(self) -> None:
        """One pod of one GPU: kubelet chooses among what is Healthy and not given, as the plugin prefers."""
        lists = self.node.kubelet.snapshot()[RESOURCE]
        free = [device for device, health in lists.items() if health == HEALTHY and device not in self.pods]
        if not free:
            self.outcomes["found nothing free"] += 1
            return
        preferred = self.node.kubelet.preferred(RESOURCE, free, (), 1)
        (device,) = [d for d in preferred if d in free] or free[:1]
        self.count += 1
        pod = f"vm-{self.count}"
        try:
            self.node.kubelet.allocate(RESOURCE, [device], pod=pod)
        except grpc.RpcError as refusal:
            self.refused.append(f"{pod}: {refusal}")
            self.outcomes["refused"] += 1
            return
        self.pods[device] = pod
        self.outcomes["admitted"] += 1
        time.sleep(BETWEEN_PODS_S)

    def end_all(self) -> None:
        """Every pod's process ends; kubelet's ledger has them RELEASE_S longer."""
        for pod in self.pods.values():
            self.node.kubelet.end_pod(pod)
        self.pods.clear()
        time.sleep(RELEASE_S)  # kubelet's own delay, which is part of what is played

    def check_one_per_group(self) -> None:
        """No two pods have a device of one group."""
        taken = Counter(self.groups[device] for device in self.pods)
        assert max(taken.values(), default=0) <= 1, (self.pods, taken)


def run(guest: Guest) -> None:
    """Rounds of eight pods on four groups."""
    functions = [function for port in PORTS for function in functions_behind(guest.machine, port)]
    with guest.step("eight functions, two in each group"):
        groups = {function.address: function.group or "" for function in functions}
        assert set(Counter(groups.values()).values()) == {2}, groups
        for function in functions:
            function.bind_vfio()
    with (
        Node.with_kubelet(guest) as node,
        DaemonProcess.start(arguments("vendor=1234,device=11e8"), guest.artifacts / "daemon.log") as daemon,
    ):
        with guest.step("kubelet has all eight"):
            daemon.wait_until_it_listens()
            node.wait(dict.fromkeys(groups, HEALTHY), FRAME_WITHIN_S)
        burst = _Burst(node, groups)
        with guest.step(f"{ROUNDS} times {PODS} pods of one GPU, one right after the other"):
            began = time.monotonic()
            for _ in range(ROUNDS):
                _one_round(burst)
            node.figure("burst_s", round(time.monotonic() - began, 1))
            node.figure("burst_outcomes", dict(burst.outcomes))
        assert burst.refused == [], burst.refused[:5]
        assert burst.outcomes["admitted"] == ROUNDS * len(PORTS), burst.outcomes
        with guest.step("all ended: all Healthy again"):
            node.wait(dict.fromkeys(groups, HEALTHY), limits.LEDGER_S + POLL_S + SLACK_S)
            assert daemon.terminate() == 0
            daemon.check_one_life()


def _one_round(burst: _Burst) -> None:
    for _ in range(PODS):
        burst.admit()
    burst.check_one_per_group()
    _eventually_all_groups(burst, range(len(PORTS) - len(burst.pods)))
    burst.end_all()


def _eventually_all_groups(burst: _Burst, missing: Sequence[int]) -> None:
    """A pod that found nothing free because the other GPU of a group whose pod has ended was still listed Unhealthy is
    admitted when the list says so: its controller makes it again."""
    for _ in missing:
        pods = len(burst.pods)

        def admitted(before: int = pods) -> bool:
            burst.admit()
            return len(burst.pods) > before or bool(burst.refused)

        eventually("a free group", admitted, timeout_s=limits.LEDGER_S + SLACK_S)
    burst.check_one_per_group()
