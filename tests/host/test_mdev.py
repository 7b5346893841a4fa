"""The reader of mediated devices against a real tree, sound and broken."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from gpuactors.core.values.mediated import MediatedDevice, functions_of, mediated_of
from gpuactors.core.values.model import PciAddress
from gpuactors.core.values.selector import parse_selector
from gpuactors.host.mdev import PartsReader
from gpuactors.host.pci_ids import PciIds
from gpuactors.host.root import HostRoot
from gpuactors.host.sysfs import SysfsReader
from gpuactors.ports.errors import HostError
from gpuactors_simulation.host.tree import VGPU_HEADER, HostTree, PciSpec
from tests.support.mdev_files import OTHER_UUID, UUID, link_type, make_device, make_type, remove_device

CARD = PciSpec("0000:23:00.0", "10de", "2236", "030200", 51, numa_node=1, driver="nvidia", total_vfs=4)
FUNCTION = PciAddress(CARD.address)


@pytest.fixture
def tree(tmp_path: Path) -> HostTree:
    tree = HostTree(tmp_path)
    tree.plug(CARD)
    make_type(tree.device_dir(FUNCTION))
    return tree


def reader(tree: HostTree, *selectors: str) -> PartsReader:
    root = HostRoot(str(tree.root))
    chosen = tuple(map(parse_selector, selectors or ("vendor=10de,class=03",)))
    return PartsReader(root, SysfsReader(root, chosen, PciIds.open(None)))


def device(tree: HostTree) -> MediatedDevice:
    """The device itself, out of an inspection of it."""
    (found,) = mediated_of(reader(tree).inspect(UUID))
    return found


# --- sound ------------------------------------------------------------------------------------------------------------


def test_all_facts_of_a_device(tree: HostTree) -> None:
    directory = make_device(tree.root, tree.device_dir(FUNCTION))
    expected = MediatedDevice(
        key=UUID,
        parent=FUNCTION,
        parent_name=FUNCTION,
        type_id="nvidia-593",
        type_name="NVIDIA A10-24Q",
        driver="nvidia-vgpu-vfio",
        iommu_group=70,
        cdevs=("vfio3",),
        nodes=("/dev/vfio/vfio", "/dev/vfio/70"),
        numa_node=1,
        pcie_root="pci0000:20",
        fault=None,
        presence=directory.stat().st_ino,
    )
    scanned = reader(tree).scan()
    assert mediated_of(scanned) == (expected,)
    assert [f.address for f in functions_of(scanned)] == [FUNCTION]
    assert mediated_of(reader(tree).inspect(UUID)) == (expected,)
    assert expected.has_node


def test_its_nodes_are_those_of_the_legacy_container_on_a_kernel_with_iommufd(tree: HostTree) -> None:
    """QEMU opens a mediated device by its group, and who has that open can open no cdev."""
    make_device(tree.root, tree.device_dir(FUNCTION), cdev=3)
    (tree.root / "dev/vfio/devices").mkdir()
    for other in ("iommu", "vfio/devices/vfio3"):
        (tree.root / "dev" / other).touch()
    assert device(tree).nodes == ("/dev/vfio/vfio", "/dev/vfio/70")


def test_a_node_without_the_module_has_none(tree: HostTree) -> None:
    assert mediated_of(reader(tree).scan()) == ()
    assert reader(tree).inspect(UUID) == ()


def test_the_functions_that_it_is_a_part_of_come_with_it_chosen_or_not(tree: HostTree) -> None:
    tree.virtualize(FUNCTION, 1)
    (virtual,) = tree.functions.keys() - {FUNCTION}
    make_type(tree.device_dir(virtual))
    make_device(tree.root, tree.device_dir(virtual))
    for parts in (
        reader(tree, "vendor=8086").scan(),
        reader(tree, "vendor=8086").inspect(UUID),
    ):
        assert {f.address: f.physical for f in functions_of(parts)} == {FUNCTION: None, virtual: FUNCTION}
        (found,) = mediated_of(parts)
        assert (found.parent, found.parent_name) == (virtual, virtual)


def test_a_parent_that_is_no_pci_function_has_no_address(tree: HostTree) -> None:
    parent = tree.root / "sys/devices/virtual/mtty/mtty"
    make_type(parent, "mtty-2", "Dual port serial\n")
    make_device(tree.root, parent, type_id="mtty-2", driver="mtty")
    found = device(tree)
    assert (found.parent, found.parent_name, found.type_id) == (None, "mtty", "mtty-2")
    assert (found.type_name, found.numa_node, found.pcie_root) == ("Dual port serial", None, None)
    assert found.fault is None


@pytest.mark.parametrize(("content", "node"), [(b"-1\n", None), (b"0\n", 0)])
def test_its_numa_node_is_that_of_its_parent_if_that_has_one(
    tree: HostTree, content: bytes, node: int | None
) -> None:
    tree.set_attribute(FUNCTION, "numa_node", content)
    make_device(tree.root, tree.device_dir(FUNCTION))
    assert (device(tree).numa_node, device(tree).fault) == (node, None)


def test_on_a_node_with_iommufd_it_has_the_nodes_of_the_legacy_container_alone(tmp_path: Path) -> None:
    tree = HostTree(tmp_path, cdev=True)
    tree.plug(CARD)
    make_type(tree.device_dir(FUNCTION))
    make_device(tree.root, tree.device_dir(FUNCTION))
    (tree.root / "dev/vfio/devices/vfio3").touch()
    assert (tree.root / "dev/iommu").exists()
    assert device(tree).nodes == ("/dev/vfio/vfio", "/dev/vfio/70")


@pytest.mark.parametrize(
    ("name", "read"),
    [("GRID T4-1Q\n", "GRID T4-1Q"), (None, "nvidia-593"), ("\n", "nvidia-593"), ("A\xff\n", "A\xff")],
)
def test_the_name_of_its_type(tmp_path: Path, name: str | None, read: str) -> None:
    tree = HostTree(tmp_path)
    tree.plug(CARD)
    make_type(tree.device_dir(FUNCTION), name=name)
    make_device(tree.root, tree.device_dir(FUNCTION))
    assert device(tree).type_name == read


def test_the_link_to_its_type_comes_last(tree: HostTree) -> None:
    directory = make_device(tree.root, tree.device_dir(FUNCTION), type_id=None)
    assert (device(tree).type_id, device(tree).type_name, device(tree).fault) == (None, "", None)
    link_type(directory, "nvidia-593")
    assert device(tree).type_name == "NVIDIA A10-24Q"


def test_made_again_with_the_same_uuid_it_is_another(tree: HostTree) -> None:
    directory = make_device(tree.root, tree.device_dir(FUNCTION))
    before = device(tree)
    remove_device(tree.root, directory)
    assert reader(tree).inspect(UUID) == ()
    (tree.root / "taken").mkdir()  # of ordinary files the next directory may get the number that is free
    make_type(tree.device_dir(FUNCTION), "nvidia-594", "NVIDIA A10-12Q\n")
    make_device(tree.root, tree.device_dir(FUNCTION), type_id="nvidia-594", group=71)
    after = device(tree)
    assert (after.type_name, after.iommu_group) == ("NVIDIA A10-12Q", 71)
    assert after.presence != before.presence


@pytest.mark.parametrize("missing", ["group", "driver", "node"])
def test_what_the_kernel_has_not_made_yet_is_missing_and_no_fault(tree: HostTree, missing: str) -> None:
    make_device(
        tree.root,
        tree.device_dir(FUNCTION),
        group=None if missing == "group" else 70,
        driver=None if missing == "driver" else "nvidia-vgpu-vfio",
        node=missing != "node",
    )
    found = device(tree)
    assert found.fault is None
    assert not found.has_node


def test_several_are_sorted_and_other_names_are_none(tree: HostTree) -> None:
    parent = tree.device_dir(FUNCTION)
    make_device(tree.root, parent, OTHER_UUID, group=71)
    make_device(tree.root, parent, UUID)
    (tree.root / "sys/bus/mdev/devices/no-uuid").symlink_to("../../../devices")
    assert [d.key for d in mediated_of(reader(tree).scan())] == [UUID, OTHER_UUID]


def test_an_inspection_of_a_function_is_as_without_them(tree: HostTree) -> None:
    make_device(tree.root, tree.device_dir(FUNCTION))
    (found,) = reader(tree).inspect(FUNCTION)
    assert found == functions_of(reader(tree).scan())[0]


# --- broken -----------------------------------------------------------------------------------------------------------


def test_what_cannot_be_read_is_a_fault_and_the_rest_is_read(tree: HostTree) -> None:
    directory = make_device(tree.root, tree.device_dir(FUNCTION))
    (directory / "iommu_group").unlink()
    (directory / "iommu_group").symlink_to("../../../kernel/iommu_groups/x")
    found = device(tree)
    assert found.fault is not None
    assert "is not the number of an IOMMU group" in found.fault
    assert "lspci" not in found.fault
    assert (found.iommu_group, found.type_name) == (None, "NVIDIA A10-24Q")


def test_a_type_whose_name_cannot_be_read_has_none(tree: HostTree) -> None:
    make_device(tree.root, tree.device_dir(FUNCTION))
    name = tree.device_dir(FUNCTION) / "mdev_supported_types/nvidia-593/name"
    name.unlink()
    name.mkdir()
    found = device(tree)
    assert found.type_name == ""
    assert found.fault is not None
    assert "cannot be read" in found.fault


def test_one_that_does_not_answer_is_at_fault_without_a_read_of_its_attributes(tree: HostTree) -> None:
    make_device(tree.root, tree.device_dir(FUNCTION))
    read: list[str] = []
    (found,) = mediated_of(reader(tree).scan(unanswered=[UUID], reads=read.append))
    assert UUID not in read
    assert (found.type_id, found.type_name, found.numa_node) == ("nvidia-593", "", None)
    assert found.fault is not None
    assert "does not answer" in found.fault


def test_a_bus_that_cannot_be_listed_fails_the_scan(tree: HostTree) -> None:
    bus = tree.root / "sys/bus/mdev/devices"
    bus.parent.mkdir(parents=True)
    bus.symlink_to(bus)
    with pytest.raises(HostError, match="mediated devices cannot be listed"):
        reader(tree).scan()


def test_one_that_nvidias_driver_has_marked_is_its(tree: HostTree, tmp_path: Path) -> None:
    make_device(tree.root, tree.device_dir(FUNCTION))
    make_device(tree.root, tree.device_dir(FUNCTION), OTHER_UUID, group=71)
    markers = tmp_path / "vgpu-concrete"
    root = HostRoot(str(tree.root))
    marked = PartsReader(root, SysfsReader(root, (), PciIds.open(None)), str(markers))
    assert [d.made_by for d in mediated_of(marked.scan())] == ["", ""]
    markers.mkdir()
    (markers / UUID).touch()
    assert [d.made_by for d in mediated_of(marked.scan())] == ["NVIDIA's DRA driver", ""]


def test_a_virtual_function_that_nvidias_driver_has_marked_is_its(tree: HostTree, tmp_path: Path) -> None:
    tree.virtualize(FUNCTION, 2, "nvidia")
    first, second = tree.virtual_functions(FUNCTION)
    for address in (first, second):
        tree.register_vgpu(address, VGPU_HEADER)
    markers = tmp_path / "vgpu-concrete"
    markers.mkdir()
    (markers / first).touch()
    (markers / FUNCTION).touch()  # the card itself is no vGPU
    root = HostRoot(str(tree.root))
    selectors = (parse_selector("vendor=10de"),)
    marked = PartsReader(root, SysfsReader(root, selectors, PciIds.open(None)), str(markers))
    for parts in (marked.scan(), (*marked.inspect(PciAddress(first)), *marked.inspect(PciAddress(second)))):
        made_by = {f.address: f.vgpu and f.vgpu.made_by for f in functions_of(parts)}
        assert made_by == {FUNCTION: None, first: "NVIDIA's DRA driver", second: ""}
    make_type(tree.device_dir(first))
    make_device(tree.root, tree.device_dir(first))
    (of_parent, *_) = functions_of(marked.inspect(UUID))
    assert of_parent.vgpu is not None
    assert of_parent.vgpu.made_by, "read because of a part of it, it is the same"


def test_it_is_the_same_after_a_second_scan(tree: HostTree) -> None:
    make_device(tree.root, tree.device_dir(FUNCTION))
    first, second = reader(tree).scan(), reader(tree).scan()
    assert first == second
    assert replace(mediated_of(first)[0], presence=0) != mediated_of(first)[0]
