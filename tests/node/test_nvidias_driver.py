"""NVIDIA's own DRA driver on the real node, and gpuactors before it, after it and in its place.

Its two kubelet plugins run over a mock of NVML, its controller and its daemon of compute domains as everywhere here.
What it leaves is therefore its own. `test_takeover.py` plays a part of this with files that are made by hand, where
NVIDIA's programs are not there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.node import domains, pods
from tests.node.claims import IDLE, ClaimNode, by_address, from_template, request
from tests.node.cluster import eventually
from tests.node.fake_host import NVIDIA
from tests.node.node import Node
from tests.node.nvidia.plugins import CONTAINERS_CLASS, VFIO_CLASS, NvidiasDriver, nvidias_driver
from tests.node.test_domains import CDI, Around, Fabric, around  # noqa: F401

pytestmark = [pytest.mark.nvidias_domains, pytest.mark.nvidias_plugins]

CONTAINER, MACHINE, BOUND, FREE = 0x23, 0x24, 0x25, 0x26
"""The slots of four GPUs, for a container and for virtual machines. One is on vfio-pci since boot."""


class Scene(Fabric):
    """A node with four GPUs, on which NVIDIA's driver can be started, and gpuactors."""

    def __init__(self, node: Node, around: Around, driver: NvidiasDriver) -> None:  # noqa: F811
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


@pytest.fixture
def scene(node: Node, around: Around) -> Iterator[Scene]:  # noqa: F811
    """Without gpuactors, and NVIDIA's driver not started yet. At the end one of them must serve."""
    node.uninstall()
    around.steering.words = ""
    with nvidias_driver(node.api, node.host) as driver:
        around.history.begin(node.api)
        found = Scene(node, around, driver)
        yield found
        node.said(f"label: {around.history.label(node.api)}\n{around.history.told(node.api)}")
        pods.clear(node.api)
        found.claims.forget()
        for domain in node.api.items(domains.ALL_DOMAINS):
            found.delete(domain["metadata"]["name"])
        eventually(lambda: not node.api.items(domains.DAEMON_PODS), "the end of the daemons' pods")
        node.uninstall()


def test_it_serves_each_kind_of_claim(scene: Scene) -> None:
    """NVIDIA's driver offers each free GPU under both names; the other one leaves the slice with the prepare."""
    scene.theirs.start()
    all_names = {f"gpu-{number}" for number in range(3)} | {f"gpu-vfio-{number}" for number in range(4)}
    assert scene.theirs.offered().keys() == all_names
    uid = scene.use_all()
    assert scene.theirs.offered().keys() == {"gpu-0", "gpu-vfio-1", "gpu-vfio-2", "gpu-2", "gpu-vfio-3"}
    assert scene.values() == [uid]
    for pod in ("c0", "v0", "v1"):
        pods.stop(scene.api, pod)
    # It gives each to NVIDIA's driver, also the one that it has found on vfio-pci.
    assert set(scene.node.host.drivers().values()) == {NVIDIA}


def test_a_node_is_taken_over_under_each_kind_of_claim(scene: Scene) -> None:
    """Nothing is given twice, the label stays, and each device is free when its pod has ended."""
    scene.theirs.start()
    uid = scene.use_all()
    taken = {pod: scene.claims.uid_of(pod) for pod in ("c0", "v0", "v1")}
    channel = scene.claim_of("job-0")
    (daemon,) = domains.daemons(scene.api, uid)
    scene.theirs.stop()
    scene.node.install("compute-domains")
    scene.are_taken_over(*taken, "job-0")
    scene.claims.offered(scene.free)
    scene.claims.create("v2", from_template("free"))
    scene.claims.runs("v2", scene.free)
    scene.claims.create("v3", from_template("any"))
    scene.claims.waits("v3")
    # As `test_takeover.py`: kubelet asks for the next one sooner than it ends the one before.
    scene.make("job-1", uid)
    pods.delete(scene.api, "job-0", grace_s=0)
    said = eventually(lambda: scene.waits_for("job-1"), "the wait of job-1")
    assert said == f"channel-0: it belongs, by NVIDIA's driver, to the claim {pods.NAMESPACE}/{channel}", said
    pods.wait_running(scene.api, "job-1")
    pods.stop(scene.api, "v0")
    scene.claims.runs("v3", scene.machine)
    for pod in ("v1", "c0"):
        pods.stop(scene.api, pod)
    eventually(
        lambda: not any(map(scene.files_of, taken.values())), "the end of the files of all that have ended"
    )
    # NVIDIA's plugin would bind both to its driver: gpuactors leaves a binding that it has not made.
    drivers = scene.node.host.drivers()
    assert drivers[scene.machine] == drivers[scene.bound] == "vfio-pci"
    # Those of gpuactors' own claims keep no taint: the scheduler knows that they are allocated.
    scene.claims.offered(scene.container, scene.machine, scene.bound, scene.free)
    assert scene.values() == [uid], scene.history.told(scene.api)
    assert [pod["metadata"]["uid"] for pod in domains.daemons(scene.api, uid)] == [daemon["metadata"]["uid"]]
    scene.covered()
