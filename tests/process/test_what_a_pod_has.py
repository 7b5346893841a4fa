"""A daemon is started anew with other selectors, or with a newer pci.ids, while a pod has a GPU of this node."""

from __future__ import annotations

from tests.process.daemon import DaemonProcess
from tests.process.node import H100, HEALTHY, PCI_IDS, Node, address, open_node

GPU, OTHER = address(0x23), address(0x24)
OWN = "example.com/h100"
NEW = "nvidia.com/GH100_H100_SXM5_80GB_HBM3"
BOTH = {H100: {GPU: HEALTHY, OTHER: HEALTHY}}


def given(node: Node, daemon: DaemonProcess) -> None:
    """A pod has one of two GPUs."""
    for slot in (0x23, 0x24):
        node.tell(node.plug(slot, "2330", driver="vfio-pci"))
    node.wait_device_lists(BOTH)
    node.kubelet.allocate(H100, [GPU], pod="vm")
    daemon.wait_event("device.changed", device=GPU, has=["allocated to pod"])


def test_a_selection_is_narrowed_under_a_pod() -> None:
    with open_node() as node:
        with node.daemon() as daemon:
            given(node, daemon)
        with node.daemon(f"--select=address={OTHER}") as daemon:
            node.wait_device_lists(BOTH)
            node.kubelet.prestart(H100, [GPU])
            node.kubelet.end_pod("vm")
            node.wait_device_lists({H100: {OTHER: HEALTHY}})
            assert node.kubelet.allocate(H100, [OTHER]).envs
            node.assert_sound(daemon)


def test_pci_ids_is_renewed_under_a_pod() -> None:
    with open_node() as node:
        with node.daemon() as daemon:
            given(node, daemon)
        newer = PCI_IDS.replace("GH100 [H100 SXM5 80GB]", "GH100 [H100 SXM5 80GB HBM3]")
        (node.directory / "pci.ids").write_text(newer)
        with node.daemon() as daemon:
            node.wait_device_lists({H100: {GPU: HEALTHY}, NEW: {OTHER: HEALTHY}})
            node.kubelet.prestart(H100, [GPU])
            node.kubelet.end_pod("vm")
            node.wait_device_lists({H100: {}, NEW: {GPU: HEALTHY, OTHER: HEALTHY}})
            assert node.kubelet.allocate(NEW, [GPU]).envs
            node.assert_sound(daemon)


def test_a_model_gets_a_name_of_the_operators_own_under_a_pod() -> None:
    with open_node() as node:
        with node.daemon() as daemon:
            given(node, daemon)
        with node.daemon(f"--resource-name=10de:2330={OWN}") as daemon:
            node.wait_device_lists({H100: {GPU: HEALTHY}, OWN: {OTHER: HEALTHY}})
            node.kubelet.prestart(H100, [GPU])
            node.kubelet.end_pod("vm")
            node.wait_device_lists({H100: {}, OWN: {GPU: HEALTHY, OTHER: HEALTHY}})
            assert node.kubelet.allocate(OWN, [GPU]).envs["PCI_RESOURCE_EXAMPLE_COM_H100"] == GPU
            node.assert_sound(daemon)
