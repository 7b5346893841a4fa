"""Beside another vendor's DRA driver: a GPU of its claim is given to no pod and to no claim of ours, by its files."""

from __future__ import annotations

import pytest

from tests.node import pods
from tests.node.claims import IDLE, ClaimNode
from tests.node.cluster import eventually, kubectl
from tests.node.daemonset import NAMESPACE as OURS
from tests.node.fake_host import H100_RESOURCE
from tests.node.node import Node
from tests.node.other_driver import DRIVER, other_driver
from tests.node.test_device_plugin import wait_insufficient

H = H100_RESOURCE


def group_of(node: Node, address: str) -> int:
    group = node.host.tree.functions[address].group
    assert group is not None
    return group


def test_a_gpu_of_another_drivers_claim_is_given_to_no_pod(node: Node) -> None:
    """The claim's container is idle: nothing in the kernel shows that it has the GPU."""
    daemon = node.install()
    its, free = node.host.plug(0x21), node.host.plug(0x22)
    node.settled({H: 2})
    with other_driver(node.api, {"vgpu-0": group_of(node, its)}) as driver:
        entry = driver.claim("theirs")
        pods.create(node.api, pods.tenant("c-1", claims=[entry], command=IDLE))
        pods.wait_running(node.api, "c-1")
        node.settled({H: 1}, {H: 2})
        # Its file has the claim's UID; kubelet is asked for the name within 10 s (docs/dev/adr/0017).
        words = "in use by the claim default/theirs of pod default/c-1"
        eventually(lambda: words in daemon.run("explain", its, check=False), f"{words!r} of {its}")
        pods.start(node.api, "vm-1", {H: 1})
        assert node.devices_of("vm-1") == {free}
        pods.create(node.api, pods.tenant("vm-2", {H: 1}))
        wait_insufficient(node, "vm-2")

        # Neither a new daemon nor a new kubelet knows it by anything else than the list and the file.
        node.excuse_no_plugin()
        node.restart_kubelet()
        kubectl("delete", "pod", "-n", OURS, daemon.name)
        eventually(lambda: node.daemon().uid != daemon.uid, "another pod of gpuactors")
        node.settled({H: 1}, {H: 2})
        wait_insufficient(node, "vm-2")
        pods.stop(node.api, "c-1")
        pods.wait_running(node.api, "vm-2")
        assert node.devices_of("vm-2") == {its}
        pods.stop(node.api, "vm-2")
    node.settled({H: 2}, {H: 2})


def test_without_its_file_every_free_gpu_is_withheld(node: Node) -> None:
    daemon = node.install()
    its, used, free = (node.host.plug(slot) for slot in (0x21, 0x22, 0x23))
    node.settled({H: 3})
    with other_driver(node.api, {"vgpu-0": group_of(node, its)}) as driver:
        pods.create(node.api, pods.tenant("c-1", claims=[driver.claim("theirs")], command=IDLE))
        pods.wait_running(node.api, "c-1")
        node.settled({H: 2}, {H: 3})
        pods.start(node.api, "vm-1", {H: 1})
        (mine,) = node.devices_of("vm-1")
        for file in driver.file_of("*").parent.glob(f"*{DRIVER}*"):
            file.unlink()
        node.excuse_no_plugin()
        kubectl("delete", "pod", "-n", OURS, daemon.name)
        eventually(lambda: node.daemon().uid != daemon.uid, "another pod of gpuactors")
        node.settled({H: 1}, {H: 3})
        (other,) = {used, free} - {mine}
        told = node.daemon().run("explain", other, check=False)
        assert "may be in use by the claim default/theirs of pod default/c-1" in told
        pods.stop(node.api, "c-1")
        node.settled({H: 3}, {H: 3})


@pytest.mark.parametrize("overlay", ["dra"])
def test_nor_to_a_claim_of_ours(node: Node, overlay: str) -> None:
    node.install(overlay)
    claims = ClaimNode(node)
    its, free = node.host.plug(0x21), node.host.plug(0x22)
    claims.offered(its, free)
    with other_driver(node.api, {"vgpu-0": group_of(node, its)}) as driver:
        pods.create(node.api, pods.tenant("c-1", claims=[driver.claim("theirs")], command=IDLE))
        pods.wait_running(node.api, "c-1")
        claims.offered(free)
        pods.stop(node.api, "c-1")
        claims.offered(its, free)
