"""Sysfs that cannot be read, makes no sense, hangs or vanishes; uevents that are none. Each fault is one device's."""

from __future__ import annotations

import json
import os
import shutil

import grpc
import pytest
from msgspec.structs import replace

from tests.process.daemon import DaemonProcess, LogLine, eventually, gpuactors
from tests.process.node import A100, H100, HEALTHY, UNHEALTHY, Node, address, listed, open_node

GOOD = address(0x23)


def test_faults_that_are_there_from_the_start() -> None:
    hollow, no_class, no_vendor, no_numa, no_group, odd_group, negative = (
        address(slot) for slot in range(0x24, 0x2B)
    )
    with open_node() as node:
        tree = node.tree
        for slot in range(0x23, 0x2B):
            node.plug(slot, "2330", numa_node=1, driver="vfio-pci")
        tree.hollow(hollow)
        tree.set_attribute(no_class, "class", b"\xff\xfe\0junk")
        tree.make_unreadable(no_vendor, "vendor")
        tree.set_attribute(no_numa, "numa_node", b"a lot\n")
        tree.set_attribute(negative, "numa_node", b"-1\n")
        tree.remove_attribute(no_group, "iommu_group")
        tree.remove_attribute(odd_group, "iommu_group")
        (tree.device_dir(odd_group) / "iommu_group").symlink_to("../../../kernel/iommu_groups/forty")
        os.symlink("nowhere", tree.root / "sys/bus/pci/devices/not-an-address")
        with node.daemon() as daemon:
            device_lists = {
                H100: {GOOD: HEALTHY, no_numa: HEALTHY, no_group: UNHEALTHY, odd_group: UNHEALTHY, negative: HEALTHY}
            }  # fmt: skip
            node.wait_device_lists(device_lists)
            assert node.last_frame(H100).devices == (
                listed(GOOD, numa_node=1),
                listed(no_numa),
                listed(no_group, UNHEALTHY, numa_node=1),
                listed(odd_group, UNHEALTHY, numa_node=1),
                listed(negative),
            )
            daemon.wait_event("device.changed", device=no_group, has=["in no IOMMU group", "intel_iommu=on"])
            daemon.wait_event("device.changed", device=odd_group, has=["'forty'", "iommu_group"])

            # What could not be read is read again by itself, and then it is known what it is.
            tree.set_attribute(no_class, "class", b"0x030200\n")
            tree.set_attribute(no_vendor, "vendor", b"0x10de\n")
            tree.remove_attribute(odd_group, "iommu_group")
            (tree.device_dir(odd_group) / "iommu_group").symlink_to("../../../kernel/iommu_groups/41")
            device_lists[H100] |= {no_class: HEALTHY, no_vendor: HEALTHY, odd_group: HEALTHY}
            node.wait_device_lists(device_lists)
            node.assert_sound(daemon)


def test_a_gpu_that_is_held_when_the_daemon_starts_is_one_warning() -> None:
    """There were three: whose it is was known, forgotten when the daemon began to serve, and known again."""
    with open_node() as node:
        node.plug(0x23, "2330", driver="vfio-pci")
        node.tree.open_group(0x23, 4711)
        with node.daemon() as daemon:
            daemon.wait_event("daemon.serving")
            eventually(lambda: len(_said(daemon, "ledger.read")) >= 2, "the read for a predecessor's grants")
            eventually(lambda: _said(daemon, "device.changed")[-1]["cause"] == "HeldByOther", "whose it is")
        levels = [line["level"] for line in _said(daemon, "device.changed")]
        assert levels.count("warning") == 1


def _said(daemon: DaemonProcess, event: str) -> list[LogLine]:
    return [line for line in daemon.log if line["event"] == event]


def test_a_drivers_name_that_is_no_utf_8() -> None:
    """Issue 10, 5: the journal goes on, Allocate is refused with its reason, and `inspect` shows it."""
    odd, audio = address(0x24), address(0x24, 1)
    with open_node() as node:
        node.plug(0x23, "2330", driver="vfio-pci")
        node.plug(0x24, "2330", driver="vfio-pci")
        node.plug(0x24, "22ba", function=1, class_code="040300")
        os.symlink(b"../../../bus/pci/drivers/snd\xff", node.tree.device_dir(audio) / "driver")
        with node.daemon() as daemon:
            node.wait_device_lists({H100: {GOOD: HEALTHY, odd: UNHEALTHY}})
            daemon.wait_event("device.changed", device=odd, has=[rf"{audio} is bound to snd\xff"])
            with pytest.raises(grpc.RpcError) as refused:
                node.kubelet.allocate(H100, [odd])
            assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert rf"{audio} is bound to snd\xff" in str(refused.value.details())
            assert node.kubelet.allocate(H100, [GOOD]).envs
            shown = gpuactors("inspect", f"--state-dir={node.directory / 's'}", "-o", "json")
            assert (shown.returncode, shown.stderr) == (0, "")
            reasons = {d["address"]: d["reason"] for d in json.loads(shown.stdout)["devices"]}
            assert r"snd\xff" in reasons[odd]
            journal = node.directory / "s/journal"
            eventually(
                lambda: rb"snd\\xff" in b"".join(f.read_bytes() for f in journal.glob("*")), "the journal"
            )
            node.assert_sound(daemon)
        assert not [line for line in daemon.log if line["event"].startswith("journal.")]


def test_a_device_whose_id_was_never_read_harms_nobody() -> None:
    second = address(0x24)
    with open_node() as node:
        node.plug(0x23, "2330", driver="vfio-pci")
        node.plug(0x24, "2330", driver="vfio-pci")
        node.tree.set_attribute(second, "device", b"0x23\n")
        with node.daemon() as daemon:
            daemon.wait_event(
                "function.unreadable", address=second, has=[f"{second}/device", "lspci", "automatically"]
            )
            node.wait_device_lists({H100: {GOOD: HEALTHY}})
            node.tree.set_attribute(second, "device", b"0x2330\n")
            both = {GOOD: HEALTHY, second: HEALTHY}
            node.kubelet.wait_for(
                lambda device_lists: device_lists.get(H100) == both, 10, "both under their name"
            )
            node.assert_sound(daemon)


def test_a_gpu_that_never_answers_costs_no_other_gpu_anything() -> None:
    """Issue 24, 4: no GPU of the node was served, 100 s and on."""
    silent = address(0x24)
    with open_node() as node:
        for slot in (0x23, 0x24, 0x25):
            node.plug(slot, "2330", driver="vfio-pci")
        node.tree.make_hang(silent, "vendor")
        with node.daemon() as daemon:
            others = {GOOD: HEALTHY, address(0x25): HEALTHY}
            node.wait_device_lists({H100: others})
            assert node.kubelet.allocate(H100, [GOOD]).envs
            daemon.wait_event(
                "function.unreadable", address=silent, has=["does not answer", f"lspci -vs {silent}"]
            )
            node.tree.end_hang(silent, "vendor", b"0x10de\n")
            node.kubelet.wait_for(
                lambda device_lists: device_lists.get(H100) == {**others, silent: HEALTHY},
                60,
                "the one that answers now",
            )
            node.assert_sound(daemon)


def test_virtual_functions_are_given_away_alone_and_not_while_their_physical_one_is_on_vfio() -> None:
    """Issue 24, 9: a virtual function was handed out as a whole GPU, and so was its physical one."""
    with open_node() as node:
        node.plug(0x23, "2330", driver="vfio-pci")
        spec = replace(node.tree.functions[GOOD], address=address(0x24), group=0x24, total_vfs=1)
        node.tree.plug(spec)
        node.tree.virtualize(spec.address, 1, "vfio-pci")
        (virtual,) = node.tree.virtual_functions(spec.address)
        of_virtual = f"{H100}_VF"
        with node.daemon() as daemon:
            both = {GOOD: HEALTHY, spec.address: UNHEALTHY}
            node.wait_device_lists({H100: both, of_virtual: {virtual: UNHEALTHY}})
            on_vfio = f"a virtual function of {spec.address}, which is on vfio-pci"
            daemon.wait_event("device.changed", device=virtual, has=[on_vfio])
            daemon.wait_event("device.changed", device=spec.address, has=["write 0 to its sriov_numvfs"])
            node.tell(node.tree.virtualize(spec.address, 0))
            node.wait_device_lists({H100: {GOOD: HEALTHY, spec.address: HEALTHY}, of_virtual: {}})
            node.tell(node.tree.unbind(spec.address))
            node.tell(node.tree.bind(spec.address, "nvidia"))
            node.tell(node.tree.virtualize(spec.address, 1, "vfio-pci"))
            node.wait_device_lists({H100: {GOOD: HEALTHY}, of_virtual: {virtual: HEALTHY}})
            node.assert_sound(daemon)


def test_faults_that_come_later() -> None:
    second, third = address(0x24), address(0x25)
    with open_node() as node:
        tree = node.tree
        for slot in (0x23, 0x24, 0x25):
            node.plug(slot, "2330", driver="vfio-pci")
        with node.daemon() as daemon:
            device_lists = {H100: {GOOD: HEALTHY, second: HEALTHY, third: HEALTHY}}
            node.wait_device_lists(device_lists)

            # A known device keeps its name and its place while it cannot be read; the reason names the file.
            for name, nonsense, sense in (
                ("vendor", b"", b"0x10de\n"),
                ("device", b"0x23300\n", b"0x2330\n"),
                ("class", b"display", b"0x030200\n"),
            ):
                mark = daemon.mark()
                tree.set_attribute(second, name, nonsense)
                _inspect(node, second)
                node.wait_device_lists({H100: device_lists[H100] | {second: UNHEALTHY}})
                attribute = str(tree.root / f"sys/bus/pci/devices/{second}/{name}")
                daemon.wait_event(
                    "function.unreadable", address=second, has=[attribute, "instead of"], after=mark
                )
                tree.make_unreadable(second, name)
                _inspect(node, second)
                daemon.wait_event("function.unreadable", address=second, has=["cannot be read"], after=mark)
                tree.set_attribute(second, name, sense)
                _inspect(node, second)
                node.wait_device_lists(device_lists)

            # A group that cannot be listed: nobody knows what else a tenant would get.
            group = tree.root / "sys/kernel/iommu_groups/36/devices"
            shutil.move(group, node.directory / "members")
            group.write_text("")
            _inspect(node, second)
            daemon.wait_event("function.unreadable", address=second, has=[str(group), "cannot be listed"])
            group.unlink()
            shutil.move(node.directory / "members", group)
            node.wait_device_lists(device_lists)

            # One read hangs in the kernel: nobody else waits for it.
            tree.make_hang(third, "device")
            _inspect(node, third)
            node.tell(node.plug(0x31, "20b0", driver="vfio-pci"))
            node.tell(tree.unbind(second))
            device_lists = {H100: {GOOD: HEALTHY, third: HEALTHY}, A100: {address(0x31): HEALTHY}}
            node.wait_device_lists(device_lists)
            assert node.kubelet.allocate(A100, [address(0x31)]).envs
            assert node.kubelet.allocate(H100, [GOOD]).envs
            tree.end_hang(third, "device", b"0x2330\n")

            # Listed on the bus, but its directory is gone; then it is gone altogether.
            tree.hollow(third)
            _inspect(node, third)
            del device_lists[H100][third]
            node.wait_device_lists(device_lists)
            node.tell(tree.unplug(third))
            node.tell(tree.bind(second, "vfio-pci"))
            device_lists[H100][second] = HEALTHY
            node.wait_device_lists(device_lists)
            node.assert_sound(daemon)


def test_garbage_on_the_uevents_socket() -> None:
    with open_node() as node, node.daemon() as daemon:
        daemon.wait_event("uevents.opened")
        for datagram in (
            b"",
            b"\0",
            b"\xff\x00@",
            b"libudev\0\xfe\xed\xca\xfe" + b"\0" * 40,
            b"bind@/devices\0ACTION=bind\0SUBSYSTEM=pci\0",
            b"bind@\0ACTION=bind\0DEVPATH=\0SUBSYSTEM=pci\0PCI_SLOT_NAME=../../etc\0",
            b"add@/x\0ACTION=add\0DEVPATH=/x\0SUBSYSTEM=vfio\0DEVNAME=vfio/" + b"9" * 40 + b"\0",
            b"add@/x\0ACTION=add\0DEVPATH=/x\0SUBSYSTEM=pci\0PCI_SLOT_NAME=ffff:ff:1f.7\0",
            b"A" * 60_000,
            b"=\0" * 5_000,
        ):
            node.tell_raw(datagram)
        node.tell(node.plug(0x23, "2330", driver="vfio-pci"))
        node.wait_device_lists({H100: {GOOD: HEALTHY}})
        node.assert_sound(daemon)


def _inspect(node: Node, name: str) -> None:
    """A uevent about a function, whatever it is."""
    devpath = f"/devices/pci0000:20/{name}"
    pairs = f"ACTION=change\0DEVPATH={devpath}\0SUBSYSTEM=pci\0PCI_SLOT_NAME={name}\0SEQNUM=1\0"
    node.tell_raw(f"change@{devpath}\0{pairs}".encode())
