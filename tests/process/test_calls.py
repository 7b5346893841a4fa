"""Allocate, GetPreferredAllocation, PreStartContainer and the options, asked by grpcio of a daemon process."""

from __future__ import annotations

from collections.abc import Collection

import grpc
import pytest

from tests.process.node import (
    A100,
    H100,
    HEALTHY,
    UNHEALTHY,
    Node,
    address,
    granted,
    open_node,
    refusal,
)
from tests.support.kubelet_seen import PluginOptions

H100_VARIABLE = "PCI_RESOURCE_NVIDIA_COM_GH100_H100_SXM5_80GB"
A100_VARIABLE = "PCI_RESOURCE_NVIDIA_COM_GA100_A100_SXM4_40GB"


def refused(node: Node, ids: Collection[str], resource: str = H100) -> tuple[str, str]:
    """Status and reason with which Allocate is refused."""
    with pytest.raises(grpc.RpcError) as error:
        node.kubelet.allocate(resource, ids)
    return refusal(error.value)


def test_what_a_container_gets_on_a_kernel_without_cdev() -> None:
    first, second, third = address(0x23), address(0x24), address(0x25)
    with open_node() as node:
        for slot in (0x23, 0x24, 0x25):
            node.plug(slot, "2330", driver="vfio-pci")
        node.plug(0x31, "20b0", driver="vfio-pci")
        with node.daemon() as daemon:
            device_lists = {
                H100: dict.fromkeys((first, second, third), HEALTHY),
                A100: {address(0x31): HEALTHY},
            }
            node.wait_device_lists(device_lists)
            kubelet = node.kubelet

            assert kubelet.options(H100) == PluginOptions(True, True)
            assert kubelet.allocate(H100, [first]) == granted(
                H100_VARIABLE, first, "/dev/vfio/vfio", "/dev/vfio/35"
            )
            # One address per unit, sorted, and each group's node.
            assert kubelet.allocate(H100, [third, first]) == granted(
                H100_VARIABLE, f"{first},{third}", "/dev/vfio/vfio", "/dev/vfio/35", "/dev/vfio/37"
            )
            assert kubelet.allocate(A100, [address(0x31)]) == granted(
                A100_VARIABLE, address(0x31), "/dev/vfio/vfio", "/dev/vfio/49"
            )
            kubelet.prestart(H100, [first])
            daemon.wait_event("call.granted", call="PreStartContainer", resource=H100, devices=[first])

            # A node that does not exist would fail the container's creation.
            node.tree.remove_node("/dev/vfio/vfio")
            assert kubelet.allocate(H100, [second]) == granted(H100_VARIABLE, second, "/dev/vfio/36")

            assert refused(node, ["0000:77:00.0"]) == (
                "NOT_FOUND", f"0000:77:00.0: no such device of {H100} on this node"
            )  # fmt: skip
            assert refused(node, [first, address(0x31)])[0] == "NOT_FOUND", "it is another resource's"
            assert refused(node, [])[0] == "INVALID_ARGUMENT"
            assert refused(node, [first, first]) == (
                "INVALID_ARGUMENT", f"requested twice in one call: {first}"
            )  # fmt: skip
            daemon.wait_event("call.refused", has=["no such device"], call="Allocate", status="NOT_FOUND")
            node.wait_device_lists(device_lists)
            node.assert_sound(daemon)


def test_what_a_container_gets_on_a_kernel_with_cdev() -> None:
    gpu = address(0x23)
    with open_node(cdev=True) as node:
        node.plug(0x23, "2330", driver="vfio-pci")
        # Its companion goes along: the group's nodes are given, but the variable names the GPU alone.
        node.plug(0x23, "1aef", function=1, class_code="040300", driver="vfio-pci")
        node.plug(0x24, "2330", driver="vfio-pci")
        with node.daemon("--pre-start-gate=off") as daemon:
            node.wait_device_lists({H100: {gpu: HEALTHY, address(0x24): HEALTHY}})
            assert node.kubelet.options(H100) == PluginOptions(False, True)
            assert node.kubelet.allocate(H100, [gpu]) == granted(
                H100_VARIABLE, gpu,
                "/dev/vfio/vfio", "/dev/vfio/35", "/dev/vfio/devices/vfio0", "/dev/vfio/devices/vfio1", "/dev/iommu",
            )  # fmt: skip
            # A kernel with cdev alone (CONFIG_VFIO_GROUP=n) has neither container nor group nodes.
            node.tree.remove_node("/dev/vfio/vfio")
            node.tree.remove_node("/dev/vfio/36")
            assert node.kubelet.allocate(H100, [address(0x24)]) == granted(
                H100_VARIABLE, address(0x24), "/dev/vfio/devices/vfio2", "/dev/iommu"
            )
            node.assert_sound(daemon)


def test_what_changed_without_a_uevent_is_refused_and_told() -> None:
    stays, unbound, taken, mated, nodeless, gone, replaced = (
        address(0x23),
        address(0x24),
        address(0x25),
        address(0x26),
        address(0x27),
        address(0x28),
        address(0x29),
    )
    with open_node() as node:
        for slot in range(0x23, 0x2A):
            node.plug(slot, "2330", driver="vfio-pci")
        with node.daemon() as daemon:
            names = (stays, unbound, taken, mated, nodeless, gone, replaced)
            node.wait_device_lists({H100: dict.fromkeys(names, HEALTHY)})

            # No uevent announces any of this; the daemon inspects for the call.
            tree = node.tree
            tree.unbind(unbound)
            tree.unbind(taken)
            tree.bind(taken, "nvidia")
            node.plug(0x26, "1aef", function=1, class_code="040300", driver="snd_hda_intel")
            tree.remove_node("/dev/vfio/39")
            tree.unplug(gone)
            tree.unplug(replaced)
            node.plug(0x29, "20b0", driver="vfio-pci")

            reasons = {
                unbound: "bound to no driver; bind it to vfio-pci to offer it",
                taken: "bound to nvidia, which is no vfio driver; bind it to vfio-pci to offer it",
                mated: f"IOMMU group 38 is not viable: {address(0x26, 1)} is bound to snd_hda_intel; "
                "bind it to vfio-pci or to no driver",
                nodeless: "/dev/vfio/39 does not exist; is /dev of the host visible to gpuactors, "
                "and the module vfio_pci loaded?",
                gone: "the PCI function is gone from this node",
                replaced: "another device is there now (10de:20b0, not 10de:2330)",
            }
            for name, reason in reasons.items():
                assert refused(node, [stays, name]) == ("FAILED_PRECONDITION", f"{name}: {reason}")
                daemon.wait_event("call.refused", has=[reason], call="Allocate", resource=H100)
            with pytest.raises(grpc.RpcError) as error:
                node.kubelet.prestart(H100, [mated])
            assert refusal(error.value) == ("FAILED_PRECONDITION", f"{mated}: {reasons[mated]}")
            # One that another model replaced is still listed, until kubelet can be done with the call.
            daemon.wait_event(
                "device.changed",
                has=["another device is there now (10de:20b0)"],
                device=replaced,
                resource=H100,
            )
            # What was found out in the call is in the next frames.
            after = {stays: HEALTHY, mated: UNHEALTHY, nodeless: UNHEALTHY}
            node.wait_device_lists({H100: after, A100: {replaced: HEALTHY}})
            assert node.kubelet.allocate(H100, [stays]).envs == {H100_VARIABLE: stays}

            # Repaired, again without a uevent: the daemon checks for the node periodically.
            tree.restore_node("/dev/vfio/39")
            node.wait_device_lists({H100: after | {nodeless: HEALTHY}, A100: {replaced: HEALTHY}})
            node.assert_sound(daemon)


def test_which_devices_kubelet_had_better_choose() -> None:
    a, b, c, d, e, f = (
        address(0x23),
        address(0x24),
        address(0x33),
        address(0x34),
        address(0x43, 0),
        address(0x43, 1),
    )
    with open_node() as node:
        for slot, numa_node in ((0x23, 0), (0x24, 1), (0x33, 0), (0x34, 1)):
            node.plug(slot, "2330", numa_node=numa_node, driver="vfio-pci")
        for function in (0, 1):  # two GPUs in one group
            node.plug(0x43, "2330", function=function, group=0x43, numa_node=1, driver="vfio-pci")
        with node.daemon() as daemon:
            every = (a, b, c, d, e, f)
            node.wait_device_lists({H100: dict.fromkeys(every, HEALTHY)})

            def preferred(available: Collection[str], must: Collection[str], size: int) -> tuple[str, ...]:
                answer = node.kubelet.preferred(H100, available, must, size)
                assert answer == node.kubelet.preferred(H100, sorted(available, reverse=True), must, size)
                return answer

            assert preferred(every, [], 2) == (a, c), "one NUMA node"
            assert preferred(every, [b], 2) == (b, d), "with what must be included"
            assert preferred(every, [e], 2) == (e, f), "a whole group"
            assert preferred(every, [], 4) == (b, d, e, f), "one NUMA node, whole groups"
            assert preferred([b, e, f], [], 1) == (b,), "no group is torn"
            assert preferred(every, [a, f], 2) == (a, f)
            # Never an error, as that would fail the pod.
            assert preferred([a], [], 3) == (a,)
            assert preferred([], [], 1) == ()
            assert preferred(["0000:77:00.0"], [], 1) == ("0000:77:00.0",)
            assert preferred(every, [], 0) == ()
            node.assert_sound(daemon)
