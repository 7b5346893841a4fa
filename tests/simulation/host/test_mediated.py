"""Mediated devices of the fake node come, go and wait as drivers/vfio/mdev makes and removes them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from gpuactors_simulation.host.kernel import FakeKernel, SleepsError
from gpuactors_simulation.host.mediated import MdevType
from gpuactors_simulation.host.tree import HostTree, PciSpec, Uevent

GPU = PciSpec("0000:3b:00.0", "10de", "2236", "030200", 40, driver="nvidia", total_vfs=4)
A10_24Q = MdevType("nvidia-593", "NVIDIA A10-24Q", 1)
A10_12Q = MdevType("nvidia-592", "NVIDIA A10-12Q", 2)
UUID, OTHER = "83b8f4f2-509f-382f-3c1e-e6bfe0fa1001", "83b8f4f2-509f-382f-3c1e-e6bfe0fa1002"
MTTY = "/devices/virtual/mtty/mtty"


def seen(uevents: tuple[Uevent, ...]) -> list[str]:
    return [f"{u.action} {u.subsystem}" for u in uevents]


@pytest.fixture
def tree(tmp_path: Path) -> HostTree:
    tree = HostTree(tmp_path, cdev=True)
    tree.plug(GPU)
    tree.mediated.register(f"/devices/pci0000:20/{GPU.address}", [A10_24Q, A10_12Q], "nvidia-vgpu-vfio")
    return tree


def offered(tree: HostTree, mdev_type: str, name: str) -> str:
    return (tree.device_dir(GPU.address) / "mdev_supported_types" / mdev_type / name).read_text()


def test_a_parent_offers_its_types(tmp_path: Path) -> None:
    tree = HostTree(tmp_path)
    tree.plug(GPU)
    (uevent,) = tree.mediated.register(f"/devices/pci0000:20/{GPU.address}", [A10_24Q], "nvidia-vgpu-vfio")
    assert (uevent.action, uevent.subsystem, uevent["MDEV_STATE"]) == ("change", "pci", "registered")
    assert offered(tree, "nvidia-593", "name") == "NVIDIA A10-24Q\n"
    assert offered(tree, "nvidia-593", "device_api") == "vfio-pci\n"
    assert (tmp_path / f"sys/class/mdev_bus/{GPU.address}").resolve() == tree.device_dir(GPU.address)


def test_the_link_to_the_type_comes_after_the_last_uevent(tree: HostTree) -> None:
    steps = tree.mediated.create_steps(UUID.upper(), GPU.address, "nvidia-592")
    uevents = tuple(next(steps) for _ in range(4))
    assert seen(uevents) == ["add mdev", "add vfio", "add vfio-dev", "bind mdev"]
    assert uevents[0].devpath == f"/devices/pci0000:20/{GPU.address}/{UUID}"
    directory = tree.mediated.device_dir(UUID)
    assert not (directory / "mdev_type").is_symlink()
    assert next(steps, None) is None, "no uevent tells of the link"
    assert (directory / "mdev_type").resolve().name == "nvidia-592"
    assert (directory / "mdev_type" / "devices" / UUID).resolve() == directory
    assert (tree.root / "sys/bus/mdev/devices" / UUID).resolve() == directory
    assert (directory / "driver").readlink().name == "nvidia-vgpu-vfio"


def test_its_group_is_its_own_and_has_the_name_of_one_without_an_iommu(tree: HostTree) -> None:
    """drivers/vfio/group.c, vfio_noiommu_group_alloc serves both kinds of group."""
    tree.mediated.create(UUID, GPU.address, "nvidia-592")
    group = tree.mediated.group_of(UUID)
    assert group is not None
    assert tree.group_members(group) == {UUID}
    assert (tree.root / f"sys/kernel/iommu_groups/{group}/name").read_text() == "vfio-noiommu\n"
    assert sorted(os.listdir(tree.root / "dev/vfio")) == sorted([str(group), "devices", "vfio"])
    assert (tree.mediated.device_dir(UUID) / "iommu_group").resolve().name == str(group)
    assert tree.is_viable(group)


def test_the_room_of_the_parent_is_shared_by_its_types(tree: HostTree) -> None:
    tree.mediated.create(UUID, GPU.address, "nvidia-592")
    assert [offered(tree, t, "available_instances") for t in ("nvidia-593", "nvidia-592")] == ["0\n", "1\n"]
    for uuid, mdev_type, number in (
        (UUID, "nvidia-592", errno.EEXIST),
        (OTHER, "nvidia-593", errno.ENOSPC),
        (OTHER, "nvidia-1", errno.ENOENT),
    ):
        with pytest.raises(OSError, match=r".") as caught:
            tree.mediated.create(uuid, GPU.address, mdev_type)
        assert caught.value.errno == number
    assert seen(tree.mediated.remove(UUID)) == [
        "remove vfio-dev",
        "remove vfio",
        "unbind mdev",
        "remove mdev",
    ]
    assert offered(tree, "nvidia-593", "available_instances") == "1\n"
    assert os.listdir(tree.root / "dev/vfio/devices") == []
    tree.mediated.create(UUID, GPU.address, "nvidia-593")
    assert tree.mediated.types == {UUID: "nvidia-593"}, "the UUID came back with another type"


@pytest.mark.parametrize("silent", [False, True])
def test_a_removal_waits_for_its_holder_off_the_bus_and_without_a_type(tmp_path: Path, silent: bool) -> None:
    tree = HostTree(tmp_path, waits_silently=silent)
    kernel = FakeKernel(tree)
    tree.mediated.register(MTTY, [MdevType("mtty-2", "Dual port serial", 12)], "mtty", subsystem="mtty")
    types = f"{tree.root}/sys{MTTY}/mdev_supported_types/mtty-2"
    kernel.write(f"{types}/create", f"{UUID}\n")
    group = tree.mediated.group_of(UUID)
    assert group is not None
    tree.open_group(group, 4711)
    assert tree.is_open(UUID)
    with pytest.raises(SleepsError):
        kernel.write(f"{tree.root}/sys/bus/mdev/devices/{UUID}/remove", "1\n")
    assert not (tree.root / f"sys/bus/mdev/devices/{UUID}").is_symlink()
    directory = tree.mediated.device_dir(UUID)
    assert not (directory / "mdev_type").is_symlink()
    assert (tree.root / f"dev/vfio/{group}").exists()
    with pytest.raises(OSError, match="exists"):
        kernel.write(f"{types}/create", f"{UUID}\n")
    uevents = seen(tree.kill(4711))
    assert uevents == [*["remove vfio-dev"] * silent, "remove vfio", "unbind mdev", "remove mdev"]
    assert not directory.exists()
    assert tree.group_members(group) == set()


def test_a_parent_without_an_address_has_its_own_subsystem(tmp_path: Path) -> None:
    tree = HostTree(tmp_path)
    (uevent,) = tree.mediated.register(MTTY, [MdevType("mtty-1", None, 24)], "mtty", subsystem="mtty")
    assert (uevent.devpath, uevent.subsystem) == (MTTY, "mtty")
    uevents = tree.mediated.create(UUID, "mtty", "mtty-1")
    assert uevents[0].devpath == f"{MTTY}/{UUID}"
    directory = (tree.root / "sys/bus/mdev/devices" / UUID).resolve()
    assert directory.parent == tree.root / f"sys{MTTY}"
    assert not (directory.parent / "numa_node").exists()
    assert not (directory / "mdev_type/name").exists()


def test_the_driver_of_the_parent_takes_its_devices_with_it(tree: HostTree) -> None:
    """They wait for their holders, and the driver with them; `MDEV_STATE=unregistered` is the parent's last."""
    for uuid in (UUID, OTHER):
        tree.mediated.create(uuid, GPU.address, "nvidia-592")
    group = tree.mediated.group_of(UUID)
    assert group is not None
    tree.open_group(group, 4711)
    assert seen(tree.unbind(GPU.address)) == ["remove vfio-dev"]
    assert tree.driver_of(GPU.address) is None
    assert tree.is_waiting(GPU.address)
    assert seen(tree.kill(4711)) == [
        "remove vfio", "unbind mdev", "remove mdev",
        "remove vfio-dev", "remove vfio", "unbind mdev", "remove mdev",
        "change pci", "unbind pci",
    ]  # fmt: skip
    assert not tree.is_waiting(GPU.address)
    assert not (tree.device_dir(GPU.address) / "mdev_supported_types").exists()


@pytest.mark.parametrize("silent", [False, True])
def test_the_driver_of_the_parent_waits_for_a_removal_that_is_under_way(tmp_path: Path, silent: bool) -> None:
    tree = HostTree(tmp_path, waits_silently=silent)
    tree.plug(GPU)
    tree.mediated.register(f"/devices/pci0000:20/{GPU.address}", [A10_12Q], "nvidia-vgpu-vfio")
    for uuid in (OTHER, UUID):
        tree.mediated.create(uuid, GPU.address, "nvidia-592")
    group = tree.mediated.group_of(UUID)
    assert group is not None
    tree.open_group(group, 4711)
    tree.mediated.remove(UUID)
    assert seen(tree.unbind(GPU.address)) == []
    assert tree.is_waiting(GPU.address)
    assert (tree.root / f"sys/bus/mdev/devices/{OTHER}").is_symlink(), "the other one is as it was"
    assert seen(tree.kill(4711)) == [
        *["remove vfio-dev"] * silent, "remove vfio", "unbind mdev", "remove mdev",
        "remove vfio-dev", "remove vfio", "unbind mdev", "remove mdev",
        "change pci", "unbind pci",
    ]  # fmt: skip
    assert not tree.is_waiting(GPU.address)
    assert tree.mediated.types == {}


def test_the_driver_of_the_parent_waits_for_a_creation_that_is_under_way(tree: HostTree) -> None:
    """mdev_device_create holds `unreg_sem` until the device is complete."""
    steps = tree.mediated.create_steps(UUID, GPU.address, "nvidia-592")
    assert seen((next(steps),)) == ["add mdev"]
    assert seen(tree.unbind(GPU.address)) == []
    assert tree.is_waiting(GPU.address)
    assert seen(tuple(steps)) == [
        "add vfio", "add vfio-dev", "bind mdev",
        "remove vfio-dev", "remove vfio", "unbind mdev", "remove mdev",
        "change pci", "unbind pci",
    ]  # fmt: skip
    assert not tree.is_waiting(GPU.address)
    assert tree.mediated.types == {}


def test_groups_have_the_lowest_free_numbers_from_a_given_one_on(tmp_path: Path) -> None:
    tree = HostTree(tmp_path)
    tree.mediated.register(MTTY, [MdevType("mtty-1", None, 24)], "mtty", subsystem="mtty", first_group=7)
    for uuid in (UUID, OTHER):
        tree.mediated.create(uuid, "mtty", "mtty-1")
    assert [tree.mediated.group_of(uuid) for uuid in (UUID, OTHER)] == [7, 8]
    tree.mediated.remove(UUID)
    tree.mediated.create(UUID, "mtty", "mtty-1")
    assert tree.mediated.group_of(UUID) == 7


def test_the_parent_may_be_a_virtual_function(tree: HostTree) -> None:
    tree.virtualize(GPU.address, 1, "nvidia")
    (virtual,) = tree.virtual_functions(GPU.address)
    tree.mediated.register(f"/devices/pci0000:20/{virtual}", [A10_24Q], "nvidia-vgpu-vfio")
    tree.mediated.create(UUID, virtual, "nvidia-593")
    assert (tree.root / "sys/bus/mdev/devices" / UUID).resolve().parent.name == virtual
    assert seen(tree.virtualize(GPU.address, 0))[-4:] == [
        "remove mdev", "change pci", "unbind pci", "remove pci",
    ]  # fmt: skip
    assert tree.mediated.types == {}
