"""NVIDIA's own DRA driver on the real node: its two kubelet plugins over a mock of NVML."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.node import pods
from tests.node.claims import IDLE, ClaimNode, from_template, request
from tests.node.fake_host import NVIDIA
from tests.node.node import Node
from tests.node.nvidia.plugins import CONTAINERS_CLASS, VFIO_CLASS, NvidiasDriver, nvidias_driver
from tests.node.test_domains import Around, around  # noqa: F401

pytestmark = [pytest.mark.nvidias_domains, pytest.mark.nvidias_plugins]


@pytest.fixture
def theirs(node: Node, around: Around) -> Iterator[NvidiasDriver]:  # noqa: F811
    """A node without gpuactors, where NVIDIA's driver can be started."""
    node.uninstall()
    with nvidias_driver(node.api, node.host) as driver:
        yield driver
        pods.clear(node.api)


def test_it_serves_a_container_and_a_virtual_machine(theirs: NvidiasDriver, node: Node) -> None:
    """NVIDIA's driver offers each free GPU under both names; the other one leaves the slice with the prepare."""
    container, machine = node.host.plug(0x23, driver=NVIDIA), node.host.plug(0x24, driver=NVIDIA)
    bound = node.host.plug(0x25)
    theirs.start()
    assert theirs.offered().keys() == {"gpu-0", "gpu-1", "gpu-vfio-0", "gpu-vfio-1", "gpu-vfio-2"}
    claims = ClaimNode(node)
    claims.template("container", request(device_class=CONTAINERS_CLASS))
    claims.template("machine", request(device_class=VFIO_CLASS))
    claims.create("c0", from_template("container"), command=IDLE)
    claims.comes_to("c0", "Running")
    claims.create("v0", from_template("machine"))
    claims.runs("v0", machine)
    assert theirs.offered().keys() == {"gpu-0", "gpu-vfio-1", "gpu-vfio-2"}
    for pod in ("c0", "v0"):
        pods.stop(node.api, pod)
    assert node.host.drivers() == {container: NVIDIA, machine: NVIDIA, bound: "vfio-pci"}
    claims.forget()
    assert theirs.stop() < 5
