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
from tests.support.patience import patient
from tests.vm.guest.claims import Cluster, under_way
from tests.vm.guest.daemon import DaemonProcess
from tests.vm.guest.node import KUBELET_DIR, NAMED_WITHIN_S, SLACK_S, Node, last_reason
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

    def not_claimed(self, name: str, key: str, part: str) -> None:
        """A claim of it waits or is refused, with a reason that says `part`, and is given up. Raises TimeoutError."""
        uid = self.cluster.api.claim(name, key)
        under_way(prepare, self.plugin, name, uid)

        def is_said() -> bool:
            lines = (*self.daemon.said("claim.waiting"), *self.daemon.said("claim.refused"))
            return any(line["uid"] == uid and part in str(line["reason"]) for line in lines)

        eventually(f"a refusal of {key}: {part}", is_said, timeout_s=SLACK_S)
        self.cluster.unprepared(self.plugin, name, uid)
