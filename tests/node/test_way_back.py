"""A node that is given back to NVIDIA's DRA driver, by the steps of docs/migrate.md ("Back").

Both are the originals. What `gpuactors doctor --before-nvidia` says is done as it stands there.
"""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.node import pods
from tests.node.claims import IDLE, RETRY_S, from_template
from tests.node.cluster import Object, eventually, kubectl
from tests.node.fake_host import NVIDIA
from tests.node.nvidia.scene import USERS, Scene, scene, unset_override  # noqa: F401  # a fixture
from tests.node.test_domains import around  # noqa: F401  # a fixture
from tests.support.patience import patient

pytestmark = [pytest.mark.nvidias_domains, pytest.mark.nvidias_plugins]


def refuses(scene: Scene, *users: str) -> None:  # noqa: F811
    """Waits until doctor names the claim of each of these pods with the pod, and the daemon of the domain."""
    wanted = {f"default/{scene.claim_of(pod)}": f"used by the pod default/{pod}" for pod in users}

    def look() -> bool:
        found = scene.way_back()
        assert "End process" not in str(found), found  # of a claim's pod
        said = [one["message"] for one in found.get("NodeDrained", ())]
        of_pods = [one for one in said if one.startswith("the claim ")]
        for claim, pod in wanted.items():
            assert any(f" {claim} " in one and one.endswith(pod) for one in of_pods), (claim, said)
        assert len(of_pods) == len(users), said
        assert any("the daemon of a compute domain" in one for one in said), said
        return True

    eventually(look, f"doctor's FAIL for {users}")


def command(finding: Object, start: str) -> str:
    """The command of a finding's remedy that starts so."""
    match = re.search(rf"{start} .*?(?=[.;,]? [A-Z]|[.;,]?$)", finding["remedy"])
    assert match is not None, finding
    return match[0]


def on_the_node(scene: Scene, line: str) -> None:  # noqa: F811
    """An administrator runs a command there. Raises AssertionError unless it succeeds."""
    scene.node.said(f"$ {line}")
    done = subprocess.run(
        ("bash", "-c", line), capture_output=True, text=True, timeout=patient(60), check=False
    )
    assert done.returncode == 0, done


def test_a_node_is_given_back_under_each_kind_of_claim(scene: Scene) -> None:  # noqa: F811
    """It was taken over under each kind of claim, and a virtual machine of gpuactors runs as well. Pods that wait for a
    GPU and for the channel get them from NVIDIA's driver afterwards."""
    scene.theirs.start()
    uid = scene.use_all()
    scene.theirs.stop()
    scene.node.install("compute-domains")
    scene.are_taken_over(*USERS)
    scene.claims.create("v2", from_template("free"))
    scene.claims.runs("v2", scene.free)
    scene.claims.create("v3", from_template("machine"))
    scene.make("job-1", uid)
    scene.claims.waits("v3")
    refuses(scene, *USERS, "v2")

    drain = command(scene.way_back()["NodeDrained"][0], "kubectl drain")
    on_the_node(scene, f"{drain} --force")  # no controller has made these pods
    try:
        give_back(scene)
        scene.theirs.start()
        names = [*(f"gpu-{number}" for number in range(3)), *(f"gpu-vfio-{number}" for number in range(4))]
        scene.offers(*names)
    finally:
        kubectl("uncordon", scene.node.name)

    scene.claims.runs("v3", scene.machine)
    pods.wait_running(scene.api, "job-1", RETRY_S)
    scene.claims.create("c1", from_template("container"), command=IDLE)
    scene.claims.create("v4", from_template("bound"))
    scene.claims.create("v5", from_template("free"))
    scene.claims.comes_to("c1", "Running")
    scene.claims.runs("v4", scene.bound)
    scene.claims.runs("v5", scene.free)
    assert scene.values() == [uid, None, uid], scene.history.told(scene.api)
    scene.covered()
    pods.clear(scene.api)
    assert set(scene.node.host.drivers().values()) == {NVIDIA}


def give_back(scene: Scene) -> None:  # noqa: F811
    """The rest of the steps, from the drained node on. Containers are to use the GPU that NVIDIA's driver has bound."""
    found = eventually(lambda: drained(scene), "a node without claims of pods")
    if "NodeDrained" in found:
        (daemon,) = found["NodeDrained"]
        on_the_node(scene, command(daemon, "kubectl label"))
    found = eventually(lambda: without(scene, "NodeDrained"), "a drained node")
    for one in found["NvidiaCheckpoint"]:
        on_the_node(scene, command(one, "rm"))
    found = without(scene, "NodeDrained", "NvidiaCheckpoint")
    assert not [one for of_check in found.values() for one in of_check if one["level"] == "FAIL"], found
    (left,) = found["LeftOnVfio"]
    assert left["devices"] == [scene.machine, scene.bound], left
    scene.node.take_away()
    unset_override(scene.machine)


def drained(scene: Scene) -> dict[str, list[Object]]:  # noqa: F811
    """The findings once no claim of a pod is left."""
    found = scene.way_back()
    assert not [one for one in found.get("NodeDrained", ()) if "kubectl drain" in one["remedy"]], found
    return found


def without(scene: Scene, *checks: str) -> dict[str, list[Object]]:  # noqa: F811
    """The findings once there are none of these checks."""
    found = scene.way_back()
    assert not found.keys() & set(checks), found
    return found
