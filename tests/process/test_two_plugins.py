"""Another plugin, made with grpcio, takes the daemon's resource on the stand-in for kubelet, over real sockets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tests.process.daemon import WAIT_S, eventually, gpuactors
from tests.process.node import H100, HEALTHY, UNHEALTHY, Node, address, open_node
from tests.support.tiny_plugin import TinyPlugin

GPU = address(0x23)
OURS = {H100: {GPU: HEALTHY}}
THEIRS = {H100: {"51": HEALTHY, "52": HEALTHY}}


@contextmanager
def other_plugin(node: Node) -> Iterator[TinyPlugin]:
    """It has registered, and kubelet has its list."""
    other = TinyPlugin(node.kubelet.socket_dir, "kubevirt-gpu.sock")
    try:
        other.register(resource=H100)
        other.lists.put([("51", HEALTHY), ("52", HEALTHY)])
        node.kubelet.wait_for(
            lambda device_lists: device_lists.get(H100) == THEIRS[H100], WAIT_S, "their list"
        )
        yield other
    finally:
        other.server.stop(grace=None).wait()


def test_a_plugin_that_takes_our_resource_is_said_and_it_is_taken_back() -> None:
    with open_node() as node:
        node.plug(0x23, "2330", driver="vfio-pci")
        with node.daemon() as daemon:
            node.wait_device_lists(OURS)
            mark = daemon.mark()
            with other_plugin(node):
                node.kubelet.hold_register_replies(H100)  # it is taken back after our read
                daemon.wait_event(
                    "plugin.contested",
                    after=mark,
                    has=["'51', '52'", "another plugin serves", "'kubevirt-gpu.sock'", "switch it off"],
                )
                told = gpuactors("explain", GPU, f"--state-dir={node.directory / 's'}").stdout
                assert "not registered with kubelet: kubelet has 2 healthy devices that are not ours" in told
                node.kubelet.release_register_replies()
                daemon.wait_event("plugin.registered", after=mark, resource=H100)
                node.wait_device_lists(OURS)
                assert node.kubelet.allocate(H100, [GPU]).devices
            node.assert_sound(daemon)


def test_a_plugin_that_took_our_resource_and_left_does_not_leave_it_at_0() -> None:
    with open_node() as node:
        node.plug(0x23, "2330", driver="vfio-pci")
        with node.daemon() as daemon:
            node.wait_device_lists(OURS)
            with other_plugin(node) as other:
                other.lists.put(None)
                node.kubelet.wait_for(
                    lambda device_lists: set(device_lists.get(H100, {}).values()) == {UNHEALTHY},
                    WAIT_S,
                    "nobody's list",
                )
            node.wait_device_lists(OURS)
            assert node.kubelet.allocate(H100, [GPU]).devices
            node.assert_sound(daemon)


def test_a_kubelet_that_does_not_tell_its_list_is_no_reason_for_anything() -> None:
    with open_node() as node:
        node.kubelet.disable_allocatable()
        node.plug(0x23, "2330", driver="vfio-pci")
        with node.daemon() as daemon:
            node.wait_device_lists(OURS)
            lists = node.kubelet.lists
            with other_plugin(node):
                eventually(lambda: node.kubelet.lists > lists, "a read of the ledger, as a socket appeared")
            assert len(node.accepted(H100)) == 2, "ours, and the other one's"
            assert [line for line in daemon.log if line["event"] == "plugin.contested"] == []
