"""A node with NVIDIA's own DRA driver and gpuactors, one after the other: what a scenario does with them, and sees."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Final

import pytest

from tests.node import domains, pods
from tests.node.claims import IDLE, ClaimNode, by_address, from_template, request
from tests.node.cluster import Object, eventually
from tests.node.fake_host import HOST, NVIDIA
from tests.node.node import Node
from tests.node.nvidia.plugins import CONTAINERS_CLASS, VFIO_CLASS, NvidiasDriver, nvidias_driver
from tests.node.test_domains import CDI, Around, Fabric

CONTAINER, MACHINE, BOUND, FREE = 0x23, 0x24, 0x25, 0x26
"""The slots of four GPUs, for a container and for virtual machines. One is on vfio-pci since boot."""

USERS: Final = ("c0", "v0", "v1", "job-0")
"""The pods of `Scene.use_all`."""


class Scene(Fabric):
    """A node with four GPUs, on which NVIDIA's driver can be started, and gpuactors."""

    def __init__(self, node: Node, around: Around, driver: NvidiasDriver) -> None:
        super().__init__(node, around)
        self.theirs = driver
        self.claims = ClaimNode(node)
        self.container, self.machine, self.free = (
            node.host.plug(slot, driver=NVIDIA) for slot in (CONTAINER, MACHINE, FREE)
        )
        self.bound = node.host.plug(BOUND)
        by_container = by_address(self.container)
        self.claims.template("container", request(selector=by_container, device_class=CONTAINERS_CLASS))
        for name, gpu in {"machine": self.machine, "bound": self.bound, "free": self.free}.items():
            self.claims.template(name, request(selector=by_address(gpu), device_class=VFIO_CLASS))
        self.claims.template("any", request(device_class=VFIO_CLASS))

    def use_all(self) -> str:
        """A pod with each kind of claim runs: `c0` with a container's GPU, `v0` and `v1` with GPUs on vfio, `job-0`
        with a channel. The UID of the domain."""
        self.claims.create("c0", from_template("container"), command=IDLE)
        self.claims.comes_to("c0", "Running")
        self.claims.create("v0", from_template("machine"))
        self.claims.runs("v0", self.machine)
        self.claims.create("v1", from_template("bound"))
        self.claims.runs("v1", self.bound)
        uid = self.create()
        self.start("job-0", uid, dies_after_s=60, grace_s=8)
        return uid

    # --- gpuactors --------------------------------------------------------------------------------------------------

    def states(self) -> dict[str, str]:
        """The state of each claim that gpuactors knows, by the claim's name."""
        report = json.loads(self.node.daemon().run("inspect", "-o", "json"))
        found = [*report["claims"]["claims"], *report["compute_domains"]["claims"]]
        return {claim["name"]: claim["state"] for claim in found}

    def are_taken_over(self, *names: str) -> None:
        """Waits until gpuactors has taken over the claims of these pods, and that of the domain's daemon."""
        mine = {self.claim_of(pod) for pod in names}

        def look() -> bool:
            states = self.states()
            assert {states.get(name) for name in mine} == {"TakenOver"}, states
            assert list(states.values()).count("TakenOver") == len(mine) + 1, states
            return True

        eventually(look, f"the claims of {names} taken over")

    def files_of(self, uid: str) -> list[str]:
        """The CDI files of a claim."""
        return [path.name for path in CDI.glob(f"*{uid}*")]

    def way_back(self) -> dict[str, list[Object]]:
        """The findings of `gpuactors doctor --before-nvidia` that are no PASS, by their check; without that on the
        interrupts of this machine."""
        printed = self.node.daemon().run("doctor", "--before-nvidia", "-o", "json", check=False)
        report, _ = json.JSONDecoder().raw_decode(printed)  # kubectl says an exit code after it
        found: dict[str, list[Object]] = {}
        for one in report["findings"]:
            if one["level"] != "PASS" and one["check"] != "InterruptRemapping":
                found.setdefault(one["check"], []).append(one)
        return found

    # --- NVIDIA's driver --------------------------------------------------------------------------------------------

    def offers(self, *names: str) -> None:
        """Waits until these are the devices of the GPUs' slices: of whichever driver, they have other names."""

        def look() -> bool:
            offered = self.theirs.offered().keys()
            assert offered == set(names), sorted(offered)
            return True

        eventually(look, f"an offer of {names}")


def unset_override(address: str) -> None:
    """What `driverctl unset-override` writes."""
    devices = HOST / "sys/bus/pci/devices" / address
    (devices / "driver/unbind").write_text(address)
    (devices / "driver_override").write_text("\n")
    (HOST / "sys/bus/pci/drivers_probe").write_text(address)


@pytest.fixture
def scene(node: Node, around: Around) -> Iterator[Scene]:
    """Without gpuactors, and NVIDIA's driver not started yet. At the end one of them must serve."""
    node.uninstall()
    around.steering.words = ""
    with nvidias_driver(node.api, node.host) as driver:
        around.history.begin(node.api)
        found = Scene(node, around, driver)
        yield found
        node.said(f"label: {around.history.label(node.api)}\n{around.history.told(node.api)}")
        found.claims.go_on()
        pods.clear(node.api)
        found.claims.forget()
        for domain in node.api.items(domains.ALL_DOMAINS):
            found.delete(domain["metadata"]["name"])
        eventually(lambda: not node.api.items(domains.DAEMON_PODS), "the end of the daemons' pods")
        node.uninstall()
