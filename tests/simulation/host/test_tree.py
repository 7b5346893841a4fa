"""The fake node: its tree is shaped and changes like the kernel's."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuactors_simulation.host.tree import VFIO_DRIVERS, HostTree, PciSpec, Uevent
from gpuactors_simulation.host.uevents import UeventSender

GPU = PciSpec("0000:23:00.0", "10de", "2330", "030200", 51, driver="vfio-pci")
AUDIO = PciSpec("0000:23:00.1", "10de", "22ba", "040300", 51, driver="vfio-pci")


def names(uevents: tuple[Uevent, ...]) -> list[str]:
    return [f"{uevent.action} {uevent.subsystem}" for uevent in uevents]


def links(tree: HostTree) -> Iterator[Path]:
    for directory, subdirectories, files in os.walk(tree.root):
        for name in (*subdirectories, *files):
            path = Path(directory, name)
            if path.is_symlink():
                yield path


def test_the_tree_is_sysfs_shaped(tmp_path: Path) -> None:
    tree = HostTree(tmp_path, cdev=True)
    tree.plug(replace(GPU, bridges=("0000:20:01.0",), numa_node=1))
    function = tmp_path / "sys/bus/pci/devices/0000:23:00.0"
    assert function.resolve() == tmp_path / "sys/devices/pci0000:20/0000:20:01.0/0000:23:00.0"
    attributes = ("vendor", "device", "class", "numa_node", "enable", "power/runtime_status")
    assert [(function / name).read_text() for name in attributes] == [
        "0x10de\n",
        "0x2330\n",
        "0x030200\n",
        "1\n",
        "0\n",
        "suspended\n",
    ]
    assert (function / "driver").resolve() == tmp_path / "sys/bus/pci/drivers/vfio-pci"
    assert (function / "iommu_group").resolve() == tmp_path / "sys/kernel/iommu_groups/51"
    assert (function / "subsystem").resolve() == tmp_path / "sys/bus/pci"
    assert (function / "vfio-dev/vfio0").is_dir()
    assert os.listdir(function / "iommu_group/devices") == ["0000:23:00.0"]
    assert os.listdir(tmp_path / "sys/bus/pci/drivers/vfio-pci") == ["0000:23:00.0"]
    assert (tmp_path / "sys/devices/virtual/vfio/51").is_dir()
    nodes = sorted(
        str(path.relative_to(tmp_path)) for path in (tmp_path / "dev").rglob("*") if path.is_file()
    )
    assert nodes == ["dev/iommu", "dev/vfio/51", "dev/vfio/devices/vfio0", "dev/vfio/vfio"]


def test_without_cdev_the_directory_is_there_and_the_nodes_are_not(tmp_path: Path) -> None:
    tree = HostTree(tmp_path)
    uevents = tree.plug(GPU)
    assert (tree.device_dir(GPU.address) / "vfio-dev/vfio0").is_dir()
    assert sorted(path.name for path in (tmp_path / "dev").rglob("*") if path.is_file()) == ["51", "vfio"]
    assert "DEVNAME" not in dict(uevents[2].properties)


def test_the_wire_format_is_the_kernels(tmp_path: Path) -> None:
    bound = HostTree(tmp_path).plug(GPU)[-1]
    assert bound.encode() == (
        b"bind@/devices/pci0000:20/0000:23:00.0\0ACTION=bind\0DEVPATH=/devices/pci0000:20/0000:23:00.0\0SUBSYSTEM=pci\0"
        b"DRIVER=vfio-pci\0PCI_CLASS=30200\0PCI_ID=10DE:2330\0PCI_SUBSYS_ID=10DE:2330\0PCI_SLOT_NAME=0000:23:00.0\0"
        b"MODALIAS=pci:v000010DEd00002330sv000010DEsd00002330bc03sc02i00\0SEQNUM=1004\0"
    )


def test_uevents_come_in_the_kernels_order(tmp_path: Path) -> None:
    tree = HostTree(tmp_path)
    assert names(tree.plug(GPU)) == ["add pci", "add vfio", "add vfio-dev", "bind pci"]
    assert names(tree.plug(AUDIO)) == ["add pci", "add vfio-dev", "bind pci"]
    assert names(tree.unbind(GPU.address)) == ["remove vfio-dev", "unbind pci"]
    assert names(tree.unplug(AUDIO.address)) == ["remove vfio-dev", "remove vfio", "unbind pci", "remove pci"]
    assert names(tree.bind(GPU.address, "nvidia")) == ["bind pci"]
    assert names(tree.unplug(GPU.address)) == ["unbind pci", "remove pci"]


def test_sequence_numbers_grow_and_unbind_names_no_driver(tmp_path: Path) -> None:
    tree = HostTree(tmp_path)
    uevents = (*tree.plug(GPU), *tree.unbind(GPU.address))
    numbers = [int(uevent["SEQNUM"]) for uevent in uevents]
    assert numbers == sorted(set(numbers))
    assert uevents[3]["DRIVER"] == "vfio-pci"
    with pytest.raises(KeyError):
        uevents[-1]["DRIVER"]


def test_the_driver_link_goes_before_the_first_uevent_of_an_unbind(tmp_path: Path) -> None:
    """Stopped there, it is an unbind that waits for its holder: the group's node stays."""
    tree = HostTree(tmp_path)
    tree.plug(GPU)
    steps = tree.unbind_steps(GPU.address)
    next(steps)
    assert not (tree.device_dir(GPU.address) / "driver").is_symlink()
    assert (tmp_path / "dev/vfio/51").exists()
    assert names(tuple(steps)) == ["remove vfio", "unbind pci"]
    assert not (tmp_path / "dev/vfio/51").exists()


def test_what_is_opened_as_soon_as_its_group_is_there_stays_awake(tmp_path: Path) -> None:
    """The kernel lets a function sleep before it makes the group's node, not after."""
    tree = HostTree(tmp_path)
    tree.plug(replace(GPU, driver=None))
    steps = tree.bind_steps(GPU.address, "vfio-pci")
    next(steps)
    tree.open_group(51, 4711)
    assert names(tuple(steps)) == ["add vfio-dev", "bind pci"]
    assert (tree.device_dir(GPU.address) / "power/runtime_status").read_text() == "active\n"


def test_vfio_numbers_are_reused(tmp_path: Path) -> None:
    tree = HostTree(tmp_path)
    tree.plug(GPU)
    tree.plug(AUDIO)
    assert (tree.vfio_number(GPU.address), tree.vfio_number(AUDIO.address)) == (0, 1)
    tree.unbind(GPU.address)
    tree.plug(replace(GPU, address="0000:24:00.0", group=52))
    assert tree.vfio_number("0000:24:00.0") == 0


def test_what_the_kernel_would_refuse(tmp_path: Path) -> None:
    tree = HostTree(tmp_path)
    tree.plug(GPU)
    with pytest.raises(ValueError, match="plugged in already"):
        tree.plug(GPU)
    with pytest.raises(ValueError, match="bound to vfio-pci already"):
        tree.bind(GPU.address, "vfio-pci")
    tree.unbind(GPU.address)
    with pytest.raises(ValueError, match="bound to no driver"):
        tree.unbind(GPU.address)
    with pytest.raises(ValueError, match="not plugged in"):
        tree.unplug(AUDIO.address)


def test_faults(tmp_path: Path) -> None:
    tree = HostTree(tmp_path)
    tree.plug(GPU)
    directory = tree.device_dir(GPU.address)
    tree.set_attribute(GPU.address, "numa_node", b"nonsense")
    assert (directory / "numa_node").read_bytes() == b"nonsense"
    tree.make_unreadable(GPU.address, "vendor")
    with pytest.raises(IsADirectoryError):
        (directory / "vendor").read_text()
    tree.remove_attribute(GPU.address, "iommu_group")
    assert not os.path.lexists(directory / "iommu_group")
    tree.remove_node("/dev/vfio/51")
    assert not (tmp_path / "dev/vfio/51").exists()
    tree.restore_node("/dev/vfio/51")
    assert (tmp_path / "dev/vfio/51").exists()
    tree.hollow(GPU.address)
    bus = tmp_path / "sys/bus/pci/devices"
    assert os.listdir(bus) == [GPU.address]
    assert not (bus / GPU.address).exists()
    assert names(tree.unplug(GPU.address))[-1] == "remove pci"
    assert os.listdir(bus) == []


def test_a_hang_ends_when_it_is_told_to(tmp_path: Path) -> None:
    tree = HostTree(tmp_path)
    tree.plug(GPU)
    attribute = tree.device_dir(GPU.address) / "device"
    tree.make_hang(GPU.address, "device")
    reader = threading.Thread(target=attribute.read_bytes, daemon=True)
    reader.start()
    # A reader between the lookup of the name and the wait in open() would miss the writer that ends the hang.
    waits_in = Path(f"/proc/self/task/{reader.native_id}/wchan")
    deadline = time.monotonic() + 30
    while waits_in.read_text() != "wait_for_partner":  # fs/pipe.c, fifo_open
        assert time.monotonic() < deadline, f"the reader waits in {waits_in.read_text()}"
        time.sleep(0.01)
    tree.end_hang(GPU.address, "device", b"0x2330\n")
    reader.join(timeout=10)
    assert not reader.is_alive()
    assert attribute.read_bytes() == b"0x2330\n"


ADDRESSES = [f"0000:{bus:02x}:00.{function}" for bus in (0x23, 0x24) for function in (0, 1)]


@settings(max_examples=40, deadline=None)
@given(
    cdev=st.booleans(),
    order=st.lists(
        st.tuples(
            st.sampled_from(["plug", "unplug", "bind", "unbind"]),
            st.sampled_from(ADDRESSES),
            st.sampled_from(["vfio-pci", "nvidia", "nvgrace_gpu_vfio_pci"]),
            st.sampled_from([51, 52, None]),
        ),
        max_size=25,
    ),
)
def test_in_any_order_the_tree_stays_consistent(
    cdev: bool, order: list[tuple[str, str, str, int | None]]
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        tree = HostTree(Path(directory), cdev=cdev)
        for act, address, driver, group in order:
            try:
                match act:
                    case "plug":
                        tree.plug(PciSpec(address, "10de", "2330", "030200", group))
                    case "unplug":
                        tree.unplug(address)
                    case "bind":
                        tree.bind(address, driver)
                    case _:
                        tree.unbind(address)
            except ValueError:
                continue
            check(tree)


def check(tree: HostTree) -> None:
    """What holds on any host at rest."""
    assert [link for link in links(tree) if not link.exists()] == []
    assert set(os.listdir(tree.root / "sys/bus/pci/devices")) == set(tree.functions)
    vfio_bound = {
        address
        for address, spec in tree.functions.items()
        if tree.driver_of(address) in VFIO_DRIVERS and spec.group is not None
    }
    groups = {str(tree.functions[address].group) for address in vfio_bound}
    assert {name for name in os.listdir(tree.root / "dev/vfio") if name.isdigit()} == groups
    assert set(os.listdir(tree.root / "sys/devices/virtual/vfio")) == groups
    numbers = [tree.vfio_number(address) for address in vfio_bound]
    assert len(set(numbers)) == len(numbers)
    assert sorted(os.listdir(tree.root / "sys/class/vfio-dev")) == sorted(
        f"vfio{number}" for number in numbers
    )
    in_groups = {str(spec.group) for spec in tree.functions.values() if spec.group is not None}
    assert set(os.listdir(tree.root / "sys/kernel/iommu_groups")) == in_groups


# --- the sender -------------------------------------------------------------------------------------------------


@pytest.mark.trio
async def test_without_a_listener_uevents_are_dropped_and_counted(tmp_path: Path) -> None:
    uevents = HostTree(tmp_path / "host").plug(GPU)
    with UeventSender(tmp_path / "none") as sender, trio.fail_after(10):
        assert sender.send(uevents) == 0
        assert await sender.send_all(uevents) == 0
        assert (sender.sent, sender.dropped) == (0, 8)


@pytest.mark.trio
async def test_a_full_queue_drops_or_waits(tmp_path: Path) -> None:
    uevents = HostTree(tmp_path / "host").plug(GPU) * 200
    with (
        trio.socket.socket(trio.socket.AF_UNIX, trio.socket.SOCK_DGRAM) as receiver,
        UeventSender(tmp_path / "uevents") as sender,
        trio.fail_after(10),
    ):
        await receiver.bind(str(tmp_path / "uevents"))
        delivered = sender.send(uevents)
        assert 0 < delivered < len(uevents)
        assert sender.dropped == len(uevents) - delivered
        for _ in range(delivered):
            await receiver.recv(4096)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sender.send_all, uevents)
            for uevent in uevents:
                assert await receiver.recv(4096) == uevent.encode()


@pytest.mark.trio
async def test_a_receiver_that_dies_or_is_replaced(tmp_path: Path) -> None:
    uevents = HostTree(tmp_path / "host").plug(GPU) * 50
    path = tmp_path / "uevents"
    with UeventSender(path) as sender, trio.fail_after(10):
        with trio.socket.socket(trio.socket.AF_UNIX, trio.socket.SOCK_DGRAM) as first:
            await first.bind(str(path))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(sender.send_all, uevents)
                await trio.testing.wait_all_tasks_blocked()
                first.close()  # the sender waits for room; now there will never be any
        assert sender.sent + sender.dropped == len(uevents)
        path.unlink()
        with trio.socket.socket(trio.socket.AF_UNIX, trio.socket.SOCK_DGRAM) as second:
            await second.bind(str(path))
            assert sender.send(uevents[:1]) == 1
            assert await second.recv(4096) == uevents[0].encode()
