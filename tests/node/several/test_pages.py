"""A cluster goes over from NVIDIA's plugin node by node, by the pages: one node is migrated, the others are not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.node import daemonset, pods
from tests.node.cluster import NODES, PODS, eventually, kubectl
from tests.node.daemonset import IMAGE, LABEL
from tests.node.pages import FROM_NVIDIA, INSTALL, STEPS_FROM_NVIDIA, UPGRADE
from tests.node.reader import GPU_NODES, MINE, Reader
from tests.node.several.member import Member
from tests.node.several.nodes import H, Nodes


@pytest.fixture
def by_nvidia(nodes: Nodes) -> Iterator[Nodes]:
    """On each node NVIDIA's plugin serves the GPU, and gpuactors is not installed."""
    with nodes.without_gpuactors():
        nodes.on_each(lambda one: one.ask("serve_by_nvidias_plugin"))
        try:
            nodes.free({one.name: 1 for one in nodes.members})
            yield nodes
        finally:
            pods.clear(nodes.api)
            nodes.on_each(lambda one: one.ask("end_nvidias_plugin"))


def served_by_us(nodes: Nodes) -> list[str]:
    """The nodes with a pod of gpuactors, whatever its state."""
    return sorted(one["spec"].get("nodeName", "") for one in nodes.api.items(PODS, labelSelector=LABEL))


def test_one_node_goes_over_and_no_other_is_touched(by_nvidia: Nodes, tmp_path: Path) -> None:
    """Virtual machines run on each node all the time."""
    nodes = by_nvidia
    first, *others = nodes.members

    def pod_of(one: Member) -> str:
        return nodes.daemon(one).name

    for one in nodes.members:
        pods.start(nodes.api, f"vm-{one.number}", {H: 1}, node=one.name)
    reader = Reader(first.name, lambda: pod_of(first), nodes.said, tmp_path)
    install = reader.follow(INSTALL, "3. gpuactors")
    try:
        for line, _ in install:
            if line.startswith("cp "):
                reader.set_image(IMAGE)
            if line.startswith("kubectl apply "):
                break
        # The nodes of an operator of NVIDIA's carry labels of it, and none of ours.
        assert served_by_us(nodes) == []
        for line, _ in reader.follow(FROM_NVIDIA, STEPS_FROM_NVIDIA):
            if line.startswith("kubectl cordon "):
                assert first.ask("end_nvidias_plugin"), "kubelet has had it until now"
        assert served_by_us(nodes) == [first.name]
        nodes.free({one.name: 1 for one in nodes.members})
        told = nodes.daemon(first).run("explain", f"{pods.NAMESPACE}/vm-{first.number}")
        assert f"0000:{first.slot:02x}:00.0" in told, told
        for one in nodes.members:
            pod = pods.get(nodes.api, f"vm-{one.number}")
            assert pods.phase(pod) == "Running", pods.told(pod)
            assert pod is not None
            assert one.ask("open_groups", pod["metadata"]["uid"]) == [one.slot]
        for one in others:
            assert one.ask("end_nvidias_plugin"), f"kubelet of {one.name} has not had it all the time"
        for one in nodes.members:
            pods.stop(nodes.api, f"vm-{one.number}")
        assert dict(reader.follow(UPGRADE, "Uninstall"))
        eventually(lambda: not served_by_us(nodes), "the end of gpuactors")
    finally:
        for one in nodes.members:
            nodes.api.merge(f"{NODES}/{one.name}", {"metadata": {"labels": {GPU_NODES: None}}})
            kubectl("uncordon", one.name)
        kubectl("delete", "-k", str(tmp_path / MINE), "--ignore-not-found", check=False)
        daemonset.wait_gone(nodes.api)
