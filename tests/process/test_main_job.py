"""The main job, in one process life: GPUs that come, go and are of a new kind reach kubelet without a restart."""

from __future__ import annotations

from tests.process.node import (
    A100,
    H100,
    HEALTHY,
    K40S,
    NVSWITCH,
    RTX,
    UNHEALTHY,
    UNKNOWN,
    Node,
    address,
    listed,
    open_node,
)

FIRST, SECOND = address(0x23), address(0x24)


def test_gpus_come_and_go_within_one_process_life() -> None:
    with open_node() as node, node.daemon() as daemon:
        node.plug(0x23, "2330", numa_node=0)
        node.plug(0x24, "2330", numa_node=1)
        node.plug(0x30, "1050", vendor="1af4", driver="vfio-pci")
        daemon.wait_event("host.scanned")
        assert daemon.wait_event("daemon.started")["pid"] == daemon.pid
        assert node.device_lists() == {}

        # Late binding: nothing, then one device, then two.
        node.tell(node.tree.bind(FIRST, "vfio-pci"))
        node.wait_device_lists({H100: {FIRST: HEALTHY}})
        assert node.last_frame(H100).devices == (listed(FIRST, numa_node=0),)
        node.tell(node.tree.bind(SECOND, "vfio-pci"))
        node.wait_device_lists({H100: {FIRST: HEALTHY, SECOND: HEALTHY}})
        assert node.last_frame(H100).devices == (listed(FIRST, numa_node=0), listed(SECOND, numa_node=1))

        _a_known_model_and_a_new_one(node)
        _names(node)
        _unbind_rebind_unplug(node)

        node.assert_sound(daemon)
        assert {r: len(node.accepted(r)) for r in node.device_lists()} == dict.fromkeys(
            node.device_lists(), 1
        )
        assert [r.error for r in node.kubelet.registrations] == [None] * len(node.device_lists())
        assert not any(node.kubelet.stream_ends(resource) for resource in node.device_lists())


def _a_known_model_and_a_new_one(node: Node) -> None:
    node.tell(node.plug(0x25, "2330", driver="vfio-pci"))
    h100 = {FIRST: HEALTHY, SECOND: HEALTHY, address(0x25): HEALTHY}
    node.wait_device_lists({H100: h100})
    assert node.last_frame(H100).devices[-1] == listed(address(0x25)), "-1 is no topology, not node 0"
    # The second resource has a socket and a registration of its own, and the first one's stream is not touched.
    node.tell(node.plug(0x31, "20b0", driver="vfio-pci"))
    node.wait_device_lists({H100: h100, A100: {address(0x31): HEALTHY}})
    assert [r.endpoint for r in node.accepted(A100)] == ["gpuactors-nvidia.com_GA100_A100_SXM4_40GB.sock"]
    assert node.endpoint(A100).is_socket()
    assert node.endpoint(H100).is_socket()
    # An audio function on a host's driver makes the group not viable; in the hands of vfio-pci it is none of ours.
    node.tell(node.plug(0x31, "1aef", function=1, class_code="040300", driver="snd_hda_intel"))
    node.wait_device_lists({H100: h100, A100: {address(0x31): UNHEALTHY}})
    node.tell(node.tree.unbind(address(0x31, 1)))
    node.tell(node.tree.bind(address(0x31, 1), "vfio-pci"))
    node.wait_device_lists({H100: h100, A100: {address(0x31): HEALTHY}})


def _names(node: Node) -> None:
    device_lists = node.device_lists()
    # Two ids with one name are one resource, behind one socket.
    node.tell(node.plug(0x41, "2bb1", driver="vfio-pci"))
    node.tell(node.plug(0x42, "2bb4", driver="nvgrace_gpu_vfio_pci"))
    device_lists[RTX] = {address(0x41): HEALTHY, address(0x42): HEALTHY}
    # A name that kubelet would refuse ("…_") is repaired, an unknown id is called by its digits, an NVSwitch has one.
    node.tell(node.plug(0x51, "1024", driver="vfio-pci"))
    node.tell(node.plug(0x52, "29ff", driver="vfio-pci"))
    node.tell(node.plug(0x53, "22a3", class_code="068000", driver="vfio-pci"))
    device_lists |= {
        K40S: {address(0x51): HEALTHY},
        UNKNOWN: {address(0x52): HEALTHY},
        NVSWITCH: {address(0x53): HEALTHY},
    }
    node.wait_device_lists(device_lists)


def _unbind_rebind_unplug(node: Node) -> None:
    device_lists = node.device_lists()
    node.tell(node.tree.unbind(FIRST))
    del device_lists[H100][FIRST]
    node.wait_device_lists(device_lists)
    node.tell(node.tree.bind(FIRST, "nvidia"))
    node.tell(node.tree.unbind(FIRST))
    node.tell(node.tree.bind(FIRST, "vfio-pci"))
    device_lists[H100][FIRST] = HEALTHY
    node.wait_device_lists(device_lists)
    node.tell(node.tree.unplug(SECOND))
    del device_lists[H100][SECOND]
    node.wait_device_lists(device_lists)
    # The last one of its kind: the resource stays, with nothing in it, and takes the next one.
    node.tell(node.tree.unplug(address(0x52)))
    device_lists[UNKNOWN] = {}
    node.wait_device_lists(device_lists)
    node.tell(node.plug(0x54, "29ff", driver="vfio-pci"))
    device_lists[UNKNOWN] = {address(0x54): HEALTHY}
    node.wait_device_lists(device_lists)


def test_without_uevents_the_periodic_scan_finds_what_happened() -> None:
    with open_node() as node, node.daemon("--uevents=off", "--resync-interval-s=0.2") as daemon:
        daemon.wait_event("host.scanned")
        node.plug(0x23, "2330", driver="vfio-pci")
        node.wait_device_lists({H100: {FIRST: HEALTHY}})
        node.plug(0x31, "20b0", driver="vfio-pci")
        node.tree.unplug(FIRST)
        node.wait_device_lists({H100: {}, A100: {address(0x31): HEALTHY}})
        node.assert_sound(daemon)


def test_functions_that_vanish_while_they_are_inspected() -> None:
    """Scans and inspections meet a tree that changes meanwhile; the last list is right."""
    with open_node() as node, node.daemon("--resync-interval-s=0.01") as daemon:
        node.plug(0x23, "2330", driver="vfio-pci")
        for turn in range(40):
            node.tell(node.plug(0x24, "2330", driver="vfio-pci"))
            node.tell(node.plug(0x31, "20b0", group=0x24, driver=("nvidia", "vfio-pci")[turn % 2]))
            node.tell(node.tree.unplug(SECOND))
            node.tell(node.tree.unplug(address(0x31)))
        node.tell(node.plug(0x24, "20b0", driver="vfio-pci"))
        expected = {H100: {FIRST: HEALTHY}, A100: {SECOND: HEALTHY}}
        node.wait_device_lists(expected)
        node.assert_sound(daemon)


def test_selectors_choose_what_is_told() -> None:
    with open_node() as node:
        node.plug(0x23, "2330", driver="vfio-pci")
        node.plug(0x30, "1050", vendor="1af4", class_code="038000", driver="vfio-pci")
        node.plug(0x31, "20b0", driver="vfio-pci")
        with node.daemon("--select=vendor=1af4,device=1050", "--select=address=0000:31:00.0") as daemon:
            virtio = "pci-1af4/VIRTIO_GPU"
            node.wait_device_lists({virtio: {address(0x30): HEALTHY}, A100: {address(0x31): HEALTHY}})
            node.assert_sound(daemon)
