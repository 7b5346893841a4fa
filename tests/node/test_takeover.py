"""A node that is taken over from NVIDIA's DRA driver while its claims are in use, and given back; with NVIDIA's own
controller and daemon.

NVIDIA's kubelet plugin is not needed, as what it leaves is made by hand: gpuactors prepares the claims, is stopped, and
its files are made into those that NVIDIA's plugin would have left (`tests/support/nvidia_checkpoint.py`). Kubelet, the
API server, the pods and the domain know no difference: devices, CDI ids and label are the same.
`test_nvidias_driver.py` plays it with NVIDIA's own.

A daemon that takes NVIDIA's checkpoint for a corrupt one of its own, or removes the label as stale, fails the first.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.node import daemonset, domains, pods
from tests.node.cluster import CLAIMS, eventually, kubectl, kubelet_dir
from tests.node.test_domains import (
    CDI,
    Fabric,
    H,
    around,  # noqa: F401  # its fixtures
    fabric,  # noqa: F401
)
from tests.support import nvidia_checkpoint as nvidia

pytestmark = pytest.mark.nvidias_domains

OURS = "gpuactors-checkpoint.json"
THEIRS = "checkpoint.json"


@contextmanager
def without_daemon(found: Fabric) -> Iterator[Path]:
    """gpuactors is stopped while the context is open; what it has written stays. Gives its driver's directory."""
    nowhere = json.dumps({"spec": {"template": {"spec": {"nodeSelector": {"tests.node/nowhere": "yes"}}}}})
    here = nowhere.replace('"yes"', "null")
    words = ("patch", "-n", daemonset.NAMESPACE, "daemonset/gpuactors", "--type=merge", "-p")
    before = found.node.daemon()
    kubectl(*words, nowhere)
    try:
        daemonset.wait_gone(found.api)  # until then it writes again what is taken away
        yield kubelet_dir() / "plugins" / domains.DRIVER
    finally:
        kubectl(*words, here)
    eventually(lambda: found.node.daemon().uid != before.uid, "another pod of gpuactors")


def as_nvidias(found: Fabric, directory: Path) -> bytes:
    """The state of gpuactors made into that of NVIDIA's plugin: the content of its checkpoint."""
    stored = json.loads((directory / OURS).read_text())["checkpoint"]
    claims = [
        {"claim": claim, "state": nvidia.COMPLETED}
        for claim in found.api.items(CLAIMS)
        if claim["metadata"]["uid"] in stored["claims"]
    ]
    assert len(claims) == len(stored["claims"])
    content = nvidia.written(domains.DRIVER, stored["bootId"], claims, {})
    (directory / OURS).unlink()
    (directory / THEIRS).write_bytes(content)
    for path in CDI.glob(f"k8s.{domains.DRIVER}-claim_*.json"):
        path.rename(path.with_suffix(".yaml"))  # JSON is YAML
    return content


def states(found: Fabric) -> dict[str, str]:
    """The state of each claim of a domain, by its name."""
    report = json.loads(found.node.daemon().run("inspect", "-o", "json"))["compute_domains"]
    return {claim["name"]: claim["state"] for claim in report["claims"]}


def files_of(uid: str) -> list[str]:
    """What is left of a claim's devices in the directory of CDI files."""
    return [path.name for path in CDI.glob(f"k8s.*{uid}*")]


def test_a_node_is_taken_over_under_its_pods(fabric: Fabric) -> None:  # noqa: F811
    """The channel that NVIDIA's plugin gave to a pod stays its own, the label and the domain's daemon stay; a claim
    that is to get the channel waits, is told whose it is, and gets it when kubelet has unprepared the old one."""
    uid = fabric.create()
    fabric.start("job-0", uid, dies_after_s=60, grace_s=8)
    claim = fabric.claim_of("job-0")
    old = str(fabric.api.get(f"{domains.TENANTS_CLAIMS}/{claim}")["metadata"]["uid"])
    (daemon,) = domains.daemons(fabric.api, uid)
    with without_daemon(fabric) as directory:
        content = as_nvidias(fabric, directory)
        assert files_of(old) == [f"k8s.{domains.DRIVER}-claim_{old}.yaml"]
    eventually(
        lambda: states(fabric).get(claim) == "TakenOver",
        "the claim taken over, by the name that kubelet has for it",
    )
    fabric.make("job-1", uid)
    # The API server forgets the pod at once, and kubelet ends its container later: the new prepare comes first.
    pods.delete(fabric.api, "job-0", grace_s=0)
    said = eventually(lambda: fabric.waits_for("job-1"), "the wait of job-1")
    assert said == f"channel-0: it belongs, by NVIDIA's driver, to the claim {pods.NAMESPACE}/{claim}", said
    pods.wait_running(fabric.api, "job-1")
    fabric.check()
    assert fabric.values() == [uid], fabric.history.told(fabric.api)
    assert [pod["metadata"]["uid"] for pod in domains.daemons(fabric.api, uid)] == [daemon["metadata"]["uid"]]
    assert states(fabric)[claim] == "Unprepared"
    assert not files_of(old)
    # And back: NVIDIA's plugin finds its own checkpoint as it left it, and ours has another name.
    assert (directory / THEIRS).read_bytes() == content
    fabric.node.settled({H: 1})


def test_a_node_that_was_taken_over_is_taken_over_once(fabric: Fabric) -> None:  # noqa: F811
    """NVIDIA's checkpoint goes on naming a claim that has ended: a restart does not take it over again."""
    uid = fabric.create()
    fabric.start("job-0", uid)
    claim = fabric.claim_of("job-0")
    with without_daemon(fabric) as directory:
        as_nvidias(fabric, directory)
    eventually(lambda: states(fabric).get(claim) == "TakenOver", "the claim taken over")
    pods.stop(fabric.api, "job-0")
    eventually(lambda: states(fabric).get(claim) == "Unprepared", "the end of the claim")
    with without_daemon(fabric):
        pass
    assert claim not in states(fabric)
    fabric.start("job-1", uid)
    fabric.check()
    assert fabric.values() == [uid]
