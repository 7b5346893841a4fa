"""GPUs of several nodes: each daemon has its own node's, and what moves or is updated is refused nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import pytest
import yaml

from tests.node import daemonset, pods
from tests.node.claims import EXAMPLES, from_template, request
from tests.node.cluster import CLASSES, EVENTS, SLICES, Api, eventually
from tests.node.daemonset import IMAGE, OTHER_IMAGE
from tests.node.several.member import Member
from tests.node.several.nodes import ROLLED_OUT_S, H, Nodes
from tests.support.patience import patient

DEPLOYMENTS: Final = f"/apis/apps/v1/namespaces/{pods.NAMESPACE}/deployments"
TEMPLATES: Final = f"/apis/resource.k8s.io/v1/namespaces/{pods.NAMESPACE}/resourceclaimtemplates"

LATE_S: Final = patient(90.0)
"""After so long at most kubelet tries again by itself."""


def slices(api: Api) -> dict[str, tuple[str, frozenset[str]]]:
    """Of GPUs, by node: the version of its slice, and its devices. Each node has one slice, in a pool of its name."""
    found: dict[str, tuple[str, frozenset[str]]] = {}
    for one in api.items(SLICES):
        spec = one["spec"]
        if spec["driver"] == "gpu.nvidia.com":
            assert spec["nodeName"] == spec["pool"]["name"], spec
            assert spec["nodeName"] not in found, found
            devices = frozenset(device["name"] for device in spec.get("devices", ()))
            found[spec["nodeName"]] = (one["metadata"]["resourceVersion"], devices)
    return found


def device_of(address: str) -> str:
    """The name of a function in a slice."""
    return "gpu-" + address.replace(":", "-").replace(".", "-")


def test_each_node_has_a_pool_of_its_own(nodes: Nodes) -> None:
    """No daemon touches another one's slice: when a GPU comes and goes, and when a daemon is replaced."""
    own = {one.name: frozenset({device_of(f"0000:{one.slot:02x}:00.0")}) for one in nodes.members}

    def are(wanted: dict[str, frozenset[str]]) -> bool:
        found = {name: devices for name, (_, devices) in slices(nodes.api).items()}
        assert found == wanted, found
        return True

    eventually(lambda: are(own), "a slice of each node")
    before, hit = slices(nodes.api), nodes.members[1]
    more = hit.ask("plug", hit.slot + 1)
    eventually(lambda: are({**own, hit.name: own[hit.name] | {device_of(more)}}), "one GPU more")
    hit.ask("unplug", more)
    eventually(lambda: are(own), "one GPU less")
    daemon = nodes.daemon(hit)
    nodes.api.delete(f"/api/v1/namespaces/{daemonset.NAMESPACE}/pods/{daemon.name}")
    eventually(lambda: nodes.daemon(hit).uid != daemon.uid, "another pod of the DaemonSet")
    eventually(lambda: are(own), "a slice of each node")
    after = slices(nodes.api)
    assert {n: of for n, of in after.items() if n != hit.name} == {
        n: of for n, of in before.items() if n != hit.name
    }


@pytest.fixture(params=["device plugin", "claim"])
def deployment(request: pytest.FixtureRequest, nodes: Nodes) -> Iterator[str]:
    """The name of a Deployment whose only pod has a GPU."""
    by_claim = request.param == "claim"
    options: dict[str, Any] = {"claims": [from_template("gpu")]} if by_claim else {"resources": {H: 1}}
    name = "moving"
    pod = pods.tenant(name, restart="Always", labels={"app": name}, **options)
    if by_claim:
        use_claims(nodes.api)
    nodes.api.create(
        DEPLOYMENTS,
        {
            "metadata": {"name": name},
            "spec": {
                "replicas": 1, "selector": {"matchLabels": {"app": name}},
                "template": {"metadata": {"labels": pod["metadata"]["labels"]}, "spec": pod["spec"]},
            },
        },
    )  # fmt: skip
    yield name
    nodes.api.delete(f"{DEPLOYMENTS}/{name}")
    eventually(lambda: not nodes.api.items(pods.PATH, labelSelector=f"app={name}"), "the end of its pods")
    if by_claim:
        nodes.api.delete(f"{TEMPLATES}/gpu")


def use_claims(api: Api) -> None:
    """The class of the examples, and a template for one GPU."""
    for example in yaml.safe_load_all((EXAMPLES / "device-class.yaml").read_text()):
        if api.find(f"{CLASSES}/{example['metadata']['name']}") is None:
            api.create(CLASSES, example)
    spec = {"spec": {"devices": {"requests": [request()]}}}
    api.create(TEMPLATES, {"metadata": {"name": "gpu"}, "spec": spec})


def test_a_deployments_pod_moves_and_comes_back(nodes: Nodes, deployment: str) -> None:
    """By drain: on each node it has that node's GPU, and nobody has it where the pod was."""
    first = where_it_runs(nodes, deployment)
    with nodes.drained(first):
        second = where_it_runs(nodes, deployment, first)
    with nodes.drained(*(one for one in nodes.members if one != first)):
        assert where_it_runs(nodes, deployment, second) == first
    # That of a claim is Unhealthy to the device plugin where it is.
    nodes.free({one.name: 1 for one in nodes.members if one != first})


def where_it_runs(nodes: Nodes, deployment: str, before: Member | None = None) -> Member:
    """Waits until the pod runs, on another node than before, and has the GPU there open, alone."""

    def look() -> Member | None:
        found = nodes.api.items(pods.PATH, labelSelector=f"app={deployment}")
        pod = next((one for one in found if "deletionTimestamp" not in one["metadata"]), None)
        assert pod is not None
        assert pods.phase(pod) == "Running", pods.told(pod)
        of = next(one for one in nodes.members if one.name == pod["spec"]["nodeName"])
        assert of != before
        assert of.ask("open_groups", pod["metadata"]["uid"]) == [of.slot]
        return of

    found = eventually(look, "the Deployment's pod with a GPU", LATE_S)
    assert found is not None
    return found


@pytest.mark.timeout(patient(400.0))
def test_pods_with_gpus_all_the_time_of_a_rolling_update(nodes: Nodes) -> None:
    """Each node has a stream of pods, one after the other. gpuactors refuses no call; only kubelet does, of a pod that
    it admits in the milliseconds between two daemons. No pod is late."""
    over, ran, failed = threading.Event(), list[str](), list[str]()
    with ThreadPoolExecutor(len(nodes.members)) as threads:
        streams = [
            threads.submit(
                pods.stream,
                nodes.api,
                f"vm-{one.number}",
                H,
                over,
                ran,
                failed,
                node=one.name,
                begins_s=LATE_S,
            )
            for one in nodes.members
        ]
        try:
            for image in (OTHER_IMAGE, IMAGE):
                nodes.set_image(image)
                daemonset.wait_rolled_out(nodes.api, ROLLED_OUT_S)
        finally:
            over.set()
    for ended in streams:
        ended.result()
    nodes.said(f"2 rolling updates of {len(nodes.members)} nodes: {len(ran)} pods ran, {len(failed)} failed")
    for words in failed:
        nodes.said(words)
    assert ran
    assert all(any(of_gap in words for of_gap in pods.OF_GAP) for words in failed), failed
    assert len(failed) <= 2 * len(nodes.members), failed
    for one in nodes.members:
        lines = nodes.daemon(one).log()
        refused = [line for line in lines if line["event"] in ("call.refused", "claim.refused")]
        assert not refused, refused
    # What the daemons before these have refused: their logs are gone.
    events = (e for e in nodes.api.items(EVENTS) if e["involvedObject"]["name"].startswith("vm-"))
    told = [e["message"] for e in events if "rpc error" in e["message"]]
    assert not told, told
