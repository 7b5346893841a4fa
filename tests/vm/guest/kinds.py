"""What the scenarios of one kind of device share: a daemon with both APIs, and what it says of one device by each.

Must not ask the daemon for its state: what is checked is what kubelet and the API server have, and the daemon's log.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import grpc

from tests.support.claims import device_of, prepare
from tests.support.kubelet_grpcio import HEALTHY, UNHEALTHY
from tests.support.patience import patient
from tests.vm.guest.claims import Cluster, under_way
from tests.vm.guest.daemon import DaemonProcess
from tests.vm.guest.node import KUBELET_DIR, NAMED_WITHIN_S, SLACK_S, Node, last_reason
from tests.vm.guest.qemu import Qemu
from tests.vm.guest.runner import Guest, eventually

POD: Final = "vm-1"
"""The pod that is given a device."""

OFFERED_WITHIN_S: Final = patient(30.0)
"""From a change to the slices, which are written some seconds after it."""


@dataclass(frozen=True, slots=True)
class Scene:
    """Kubelet, API server and daemon. Devices are named by their keys: a PCI address, or a UUID."""

    guest: Guest
    node: Node
    cluster: Cluster
    daemon: DaemonProcess
    plugin: Mapping[str, Any]

    @classmethod
    @contextmanager
    def running(cls, guest: Guest, *selectors: str) -> Iterator[Scene]:
        """A daemon that hears uevents and has registered for claims. At the end it stops by SIGTERM."""
        with ExitStack() as stack:
            node = stack.enter_context(Node.with_kubelet(guest))
            cluster = stack.enter_context(Cluster.running(guest, KUBELET_DIR))
            daemon = stack.enter_context(cluster.start("daemon", selectors=selectors))
            plugin = stack.enter_context(cluster.plugin(daemon))
            daemon.wait_until_it_listens()
            yield cls(guest, node, cluster, daemon, plugin)
            assert daemon.terminate() == 0
            daemon.check_one_life()

    def resource_of(self, key: str) -> str:
        """The one resource in whose device list it is."""
        (name,) = (name for name, health in self.node.kubelet.snapshot().items() if key in health)
        return name

    def wait_lists(self, wanted: Mapping[str, Mapping[str, str]], within_s: float) -> None:
        """Wait until kubelet's device lists are exactly these: resource → device → health; an empty list counts as
        none. Raises TimeoutError."""
        self.node.kubelet.wait_for(
            lambda lists: {name: dict(health) for name, health in lists.items() if health} == wanted,
            within_s,
            f"the device lists {wanted}",
        )

    def wait_health(self, key: str, health: str) -> None:
        """Wait until it is listed with that health, whatever else is listed. Raises TimeoutError."""
        self.node.kubelet.wait_for(
            lambda lists: [found[key] for found in lists.values() if key in found] == [health],
            SLACK_S,
            f"{key} {health}",
        )

    def wait_reason(self, key: str, part: str) -> None:
        """Wait until the log says that of the device's health. Raises TimeoutError."""
        eventually(
            f"{part!r} of {key}", lambda: part in last_reason(self.daemon, key), timeout_s=NAMED_WITHIN_S
        )

    def wait_offered(self, wanted: Mapping[str, str]) -> None:
        """Wait until the slices have exactly these devices, each with its taint, or with none where that is empty.
        Raises TimeoutError."""
        named = {device_of(key): taint for key, taint in wanted.items()}
        eventually(f"slices with {named}", lambda: self.cluster.taints == named, timeout_s=OFFERED_WITHIN_S)

    def not_allocated(self, key: str, *, pre_start: bool = False) -> str:
        """Allocate (or PreStartContainer) of it is refused; in which words."""
        call = self.node.kubelet.prestart if pre_start else self.node.kubelet.allocate
        try:
            call(self.resource_of(key), [key])
        except grpc.RpcError as error:
            # What grpcio's blocking calls raise is a Call as well, which its types do not say.
            refusal: Any = error
        else:
            raise AssertionError(f"{key} was given away, which somebody has or nobody may have")
        assert refusal.code() is grpc.StatusCode.FAILED_PRECONDITION, refusal
        return str(refusal.details())

    def not_allocated_again(self, key: str, vm: Qemu) -> None:
        """Allocate of what POD has, by the QEMU `vm`, is refused. It names the pod if the daemon has asked kubelet for
        it within the call, which depends on the order of what was read; else the process."""
        refusal = self.not_allocated(key)
        assert str(vm) in refusal or f"allocated to pod default/{POD}, which lives" in refusal, refusal

    def claimed_in_qemu(self, key: str) -> None:
        """A claim of it is prepared, and a real QEMU starts from what the claim's files say: the nodes of the CDI file,
        and no other, and the function of the metadata file. Meanwhile no other claim and no pod gets it, which we say.
        It is unprepared, and no file is left."""
        step, cluster = self.guest.step, self.cluster
        uid = cluster.api.claim("vm", key)
        with step("claimed: its files have its nodes and its function"):
            cluster.prepared(self.plugin, "vm", uid)
            function = cluster.function_of(uid)
            assert set(cluster.named[uid]) == {str(function.group_node), "/dev/vfio/vfio"}, cluster.named
            self.wait_health(key, UNHEALTHY)
            self.wait_reason(key, "claim default/vm")
        errors = self.guest.artifacts / "qemu-claim.log"
        with Qemu.start(function, errors, nodes=cluster.named[uid]) as vm:
            with step("a real QEMU starts from what the claim's files say"):
                vm.wait_taken()
            with step("nobody gets it a second time: not by a claim, not by Allocate"):
                self.not_claimed("beside", key, "claim default/vm")
                assert "claim default/vm" in self.not_allocated(key)
                assert vm.process.poll() is None
        with step("unprepared: no file is left"):
            cluster.unprepared(self.plugin, "vm", uid)
            assert cluster.files == [], cluster.files
            self.wait_health(key, HEALTHY)

    def not_claimed(self, name: str, key: str, part: str) -> None:
        """A claim of it waits or is refused, with a reason that says `part`, and is given up. Raises TimeoutError."""
        uid = self.cluster.api.claim(name, key)
        under_way(prepare, self.plugin, name, uid)

        def is_said() -> bool:
            lines = (*self.daemon.said("claim.waiting"), *self.daemon.said("claim.refused"))
            return any(line["uid"] == uid and part in str(line["reason"]) for line in lines)

        eventually(f"a refusal of {key}: {part}", is_said, timeout_s=SLACK_S)
        self.cluster.unprepared(self.plugin, name, uid)
