"""vGPUs of NVIDIA's vendor VFIO on the fake node, as its user guide and reports (kubevirt PR #16890) describe them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpuactors_simulation.host.kernel import FakeKernel
from gpuactors_simulation.host.tree import HostTree, PciSpec, VgpuType

TYPES = (
    VgpuType(1147, "NVIDIA L40S-1Q", 4),
    VgpuType(1153, "NVIDIA L40S-24Q", 2),
    VgpuType(1155, "NVIDIA L40S-48Q", 1),
)
PF = PciSpec("0000:3b:00.0", "10de", "26b9", "030200", 40, driver="nvidia", total_vfs=4, vgpu_types=TYPES)
FIRST, SECOND = "0000:3b:00.4", "0000:3b:00.5"


@pytest.fixture
def tree(tmp_path: Path) -> HostTree:
    tree = HostTree(tmp_path)
    tree.plug(PF)
    tree.virtualize(PF.address, 2, "nvidia")
    return tree


def read(tree: HostTree, address: str, name: str) -> str:
    return (tree.device_dir(address) / "nvidia" / name).read_text()


def test_on_the_driver_nvidia_it_is_a_vfio_device_without_a_type(tree: HostTree) -> None:
    assert (tree.device_dir(FIRST) / "vfio-dev/vfio0").is_dir()
    group = tree.functions[FIRST].group
    assert group is not None
    assert (tree.root / f"dev/vfio/{group}").exists()
    assert tree.is_viable(group)
    assert read(tree, FIRST, "current_vgpu_type") == "0\n"
    assert not (tree.device_dir(PF.address) / "nvidia").exists()
    with pytest.raises(OSError, match=r".") as caught:
        read(tree, FIRST, "placement_id")
    assert caught.value.errno == errno.ENXIO
    tree.unbind(FIRST)
    assert not (tree.device_dir(FIRST) / "nvidia").exists()


def test_what_can_be_made_follows_from_what_the_card_has(tree: HostTree) -> None:
    header = "ID    : vGPU Name\n"
    assert read(tree, FIRST, "creatable_vgpu_types") == (
        f"{header}1147  : NVIDIA L40S-1Q\n1153  : NVIDIA L40S-24Q\n1155  : NVIDIA L40S-48Q\n"
    )
    tree.set_vgpu_type(FIRST, 1153)
    assert read(tree, FIRST, "current_vgpu_type") == "1153\n"
    assert read(tree, FIRST, "placement_id") == "0\n"
    assert (
        read(tree, SECOND, "creatable_vgpu_types")
        == f"{header}1147  : NVIDIA L40S-1Q\n1153  : NVIDIA L40S-24Q\n"
    )
    tree.set_vgpu_type(SECOND, 1153)
    assert read(tree, FIRST, "creatable_vgpu_types") == header, "the card is full"
    tree.set_vgpu_type(SECOND, 0)
    tree.set_vgpu_type(FIRST, 1155)
    assert read(tree, SECOND, "creatable_vgpu_types") == header


def test_a_number_that_has_no_room_fails_and_leaves_none(tree: HostTree) -> None:
    kernel = FakeKernel(tree)
    path = f"{tree.root}/sys/bus/pci/devices/{SECOND}/nvidia/current_vgpu_type"
    kernel.write(path, "1147\n")
    tree.set_vgpu_type(FIRST, 1147)
    with pytest.raises(OSError, match="Invalid"):
        kernel.write(path, "1155\n")
    assert (tree.vgpu_type(SECOND), read(tree, SECOND, "current_vgpu_type")) == (0, "0\n")


def test_one_that_is_open_keeps_its_type(tree: HostTree) -> None:
    tree.set_vgpu_type(FIRST, 1147)
    group = tree.functions[FIRST].group
    assert group is not None
    tree.open_group(group, 4711)
    with pytest.raises(OSError, match="busy"):
        tree.set_vgpu_type(FIRST, 0)
    tree.kill(4711)
    tree.set_vgpu_type(FIRST, 0)
    assert tree.vgpu_type(FIRST) == 0


def test_the_lists_of_the_user_guide_have_the_name_first(tmp_path: Path) -> None:
    tree = HostTree(tmp_path)
    tree.plug(replace(PF, vgpu_names_first=True))
    tree.virtualize(PF.address, 1, "nvidia")
    assert read(tree, FIRST, "creatable_vgpu_types").splitlines()[0] == "NVIDIA L40S-1Q 1147"


def test_types_are_gone_when_sriov_is_switched_off_and_on(tree: HostTree) -> None:
    tree.set_vgpu_type(FIRST, 1147)
    tree.virtualize(PF.address, 0)
    tree.virtualize(PF.address, 2, "nvidia")
    assert read(tree, FIRST, "current_vgpu_type") == "0\n"


def test_only_the_driver_nvidia_has_them(tree: HostTree) -> None:
    tree.unbind(FIRST)
    tree.bind(FIRST, "vfio-pci")
    assert not (tree.device_dir(FIRST) / "nvidia").exists()
    with pytest.raises(OSError, match="No such"):
        tree.set_vgpu_type(FIRST, 1147)
    assert sorted(os.listdir(tree.device_dir(FIRST) / "vfio-dev")) == ["vfio0"]
