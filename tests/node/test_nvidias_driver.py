"""NVIDIA's own DRA driver on the real node, and gpuactors before it, after it and in its place.

Its two kubelet plugins run over a mock of NVML, its controller and its daemon of compute domains as everywhere here.
What it leaves is therefore its own. `test_takeover.py` plays a part of this with files that are made by hand, where
NVIDIA's programs are not there.
"""

from __future__ import annotations

import pytest

from tests.node import domains, pods
from tests.node.claims import RETRY_S, from_template
from tests.node.cluster import eventually
from tests.node.fake_host import NVIDIA
from tests.node.nvidia.plugins import DOMAIN_DRIVER
from tests.node.nvidia.scene import Scene, scene  # noqa: F401  # a fixture
from tests.node.test_domains import around  # noqa: F401  # a fixture
from tests.support.patience import patient

pytestmark = [pytest.mark.nvidias_domains, pytest.mark.nvidias_plugins]


def test_it_serves_each_kind_of_claim(scene: Scene) -> None:  # noqa: F811
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


def test_a_node_is_taken_over_under_each_kind_of_claim(scene: Scene) -> None:  # noqa: F811
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


def test_a_killed_driver_is_replaced_after_its_slices_are_gone(scene: Scene) -> None:  # noqa: F811
    """Nobody unprepares meanwhile: a pod that ends keeps its GPU until gpuactors is there, and others wait."""
    scene.theirs.start()
    uid = scene.use_all()
    ended = {pod: scene.claims.uid_of(pod) for pod in ("c0", "v0")}
    scene.theirs.kill()
    for pod in (*ended, "job-0"):
        pods.delete(scene.api, pod, grace_s=1)
    scene.claims.create("v2", from_template("free"))
    eventually(lambda: scene.claims.devices_of("v2") == ["gpu-vfio-3"], "the GPU that the slices still offer")
    # Kubelet deletes the slices of a driver that is away for 30 s.
    eventually(lambda: not scene.theirs.offered(), "the end of the slices", patient(60.0))
    scene.claims.create("v3", from_template("machine"))
    scene.make("job-1", uid)
    scene.claims.waits("v3")
    assert all(scene.files_of(claim) for claim in ended.values())
    scene.node.install("compute-domains")
    for pod in (*ended, "job-0"):
        pods.wait_phase(scene.api, pod, "gone", RETRY_S)
    scene.claims.runs("v3", scene.machine)
    pods.wait_running(scene.api, "job-1", RETRY_S)
    scene.claims.runs("v1", scene.bound)
    assert not any(map(scene.files_of, ended.values()))
    # The scheduler has allocated it by a name of NVIDIA's, and nobody has prepared it.
    scene.claims.nudge("v2")
    scene.claims.says("v2", "gpu-vfio-3 is a name by NVIDIA's DRA driver")
    pods.stop(scene.api, "v2")
    scene.claims.create("v4", from_template("free"))
    scene.claims.runs("v4", scene.free)
    scene.claims.create("v5", from_template("any"))
    scene.claims.runs("v5", scene.container)
    assert scene.values() == [uid], scene.history.told(scene.api)
    scene.covered()


def test_what_a_killed_driver_had_only_begun_is_not_taken_over(scene: Scene) -> None:  # noqa: F811
    """Its bind to vfio hangs in the kernel, and its workload waits for a daemon that is not ready. No device belongs to
    these claims. That of GPUs has NVIDIA's names and needs another pod, that of the domain is prepared anew."""
    scene.steering.words = "ready=no\n"
    scene.theirs.start()
    scene.claims.hang("vfio-pci/bind")
    scene.claims.create("v0", from_template("machine"))
    scene.claims.asleep(scene.machine)
    uid = scene.create()
    scene.make("job-0", uid)
    daemon = eventually(lambda: running_daemon(scene, uid), "the domain's daemon")
    assert scene.theirs.checkpointed() == {scene.claims.uid_of("v0"): "PrepareStarted"}
    states = scene.theirs.checkpointed(DOMAIN_DRIVER)
    assert sorted(states.values()) == ["PrepareCompleted", "PrepareStarted"], states
    assert states[scene.claims.uid_of("job-0", "channel")] == "PrepareStarted", states
    scene.theirs.domains.kill()
    scene.theirs.gpus.begin_kill()

    scene.node.install("compute-domains")
    states_here = scene.states()
    assert list(states_here.values()) == ["TakenOver"], states_here
    scene.claims.nudge("v0")
    scene.claims.says("v0", "gpu-vfio-1 is a name by NVIDIA's DRA driver")
    pods.stop(scene.api, "v0")
    scene.claims.create("v1", from_template("machine"))
    eventually(lambda: scene.claims.devices_of("v1"), "the allocation of v1")
    scene.claims.go_on()
    scene.theirs.gpus.kill()
    scene.claims.runs("v1", scene.machine)

    scene.claims.nudge("job-0")
    eventually(lambda: "does not say yet" in scene.waits_for("job-0"), "the claim's wait for the daemon")
    scene.steering.steer(uid, "ready=yes\n")
    pods.wait_running(scene.api, "job-0", RETRY_S)
    assert scene.values() == [uid], scene.history.told(scene.api)
    assert [pod["metadata"]["uid"] for pod in domains.daemons(scene.api, uid)] == [daemon]
    scene.covered()


def running_daemon(scene: Scene, uid: str) -> str:  # noqa: F811
    """The UID of the domain's daemon once its container runs; empty before."""
    found = [pod for pod in domains.daemons(scene.api, uid) if pods.phase(pod) == "Running"]
    return str(found[0]["metadata"]["uid"]) if found else ""
