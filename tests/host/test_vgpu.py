"""What NVIDIA's driver says of a virtual function that can be a vGPU."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from gpuactors.core.values.model import PciAddress, PciFunction
from gpuactors.core.values.selector import parse_selector
from gpuactors.core.values.vgpu import VendorVgpu
from gpuactors.host.pci_ids import PciIds
from gpuactors.host.root import HostRoot
from gpuactors.host.sysfs import SysfsReader
from gpuactors.ports.errors import HostError
from gpuactors_simulation.host.tree import VGPU_HEADER, HostTree, PciSpec

PF = PciSpec("0000:3b:00.0", "10de", "26b9", "030200", 51, driver="nvidia", total_vfs=2)
VF = "0000:3b:00.4"

REAL = VGPU_HEADER + "1147  : NVIDIA L40S-1Q\n1148  : NVIDIA L40S-2Q\n"
DOCUMENTED = "NVIDIA L40S-1Q 1147\nNVIDIA L40S-2Q 1148\n"
TYPES = ((1147, "NVIDIA L40S-1Q"), (1148, "NVIDIA L40S-2Q"))


@pytest.fixture
def tree(tmp_path: Path) -> HostTree:
    tree = HostTree(tmp_path)
    tree.plug(PF)
    tree.virtualize(PF.address, 2, "nvidia")
    tree.register_vgpu(VF, REAL)
    return tree


def found(tree: HostTree, address: str = VF) -> PciFunction:
    reader = SysfsReader(HostRoot(str(tree.root)), (parse_selector("vendor=10de"),), PciIds.open(None))
    return next(f for f in reader.inspect(PciAddress(address)) if f.address == address)


def vgpu(tree: HostTree) -> VendorVgpu:
    read = found(tree).vgpu
    assert read is not None
    return read


def types(tree: HostTree, content: str | bytes) -> Sequence[tuple[int, str]]:
    raw = content if isinstance(content, bytes) else content.encode()
    tree.set_attribute(VF, "nvidia/creatable_vgpu_types", raw)
    return vgpu(tree).creatable


def test_a_function_with_and_without_a_type(tree: HostTree) -> None:
    bind = (tree.device_dir(PF.address) / "driver").lstat().st_ino
    assert vgpu(tree) == VendorVgpu(0, TYPES, "", bind)
    assert not vgpu(tree).is_typed
    tree.set_vgpu(VF, 1147, REAL)
    assert vgpu(tree) == VendorVgpu(1147, TYPES, "", bind)
    assert vgpu(tree).is_typed
    function = found(tree)
    assert (function.driver, function.vfio_bound, function.fault) == ("nvidia", True, None)
    assert function.nodes == ("/dev/vfio/vfio", f"/dev/vfio/{function.iommu_group}")


def test_without_a_numa_node_it_has_none_nor_that_of_its_card(tree: HostTree) -> None:
    tree.set_attribute(PF.address, "numa_node", b"1\n")
    tree.set_attribute(VF, "numa_node", b"-1\n")
    assert (found(tree, PF.address).numa_node, found(tree).numa_node) == (1, None)


def test_the_attributes_that_answer_enxio_without_a_type_are_no_fault(tree: HostTree) -> None:
    for name in ("gpu_instance_id", "placement_id"):
        with pytest.raises(OSError, match="No such device or address"):
            (tree.device_dir(VF) / "nvidia" / name).read_bytes()
    function = found(tree)
    assert (function.vgpu, function.fault) == (VendorVgpu(0, TYPES, "", vgpu(tree).driver_bind), None)


def test_only_a_virtual_function_with_these_attributes_has_such_facts(tree: HostTree) -> None:
    assert found(tree, PF.address).vgpu is None
    assert found(tree, "0000:3b:00.5").vgpu is None, "the driver has not registered it"
    tree.unbind(VF)
    assert found(tree).vgpu is None
    tree.bind(VF, "vfio-pci")
    assert found(tree).vgpu is None


@pytest.mark.parametrize(
    "content",
    [
        REAL,
        DOCUMENTED,
        REAL.replace("  : ", "\t:\t"),
        REAL.rstrip("\n"),
        "\n\n" + REAL.replace("\n", "\r\n"),
        "vGPU Name ID\n" + DOCUMENTED,
        "1148: NVIDIA L40S-2Q\n1147: NVIDIA L40S-1Q\n1147: NVIDIA L40S-1Q",
    ],
)
def test_both_forms_of_the_list(tree: HostTree, content: str) -> None:
    listed = types(tree, content)
    assert listed == TYPES
    assert vgpu(tree).unlisted == ""


@pytest.mark.parametrize("content", [VGPU_HEADER, "", "\n", "ID : vGPU Name"])
def test_a_full_card_lists_nothing(tree: HostTree, content: str) -> None:
    tree.set_vgpu(VF, 1147, content)
    assert (vgpu(tree).type, vgpu(tree).creatable, vgpu(tree).unlisted) == (1147, (), "")


@pytest.mark.parametrize(
    ("line", "listed"),
    [
        ("1149  : NVIDIA RTX Pro 6000 Blackwell DC-3Q", "NVIDIA RTX Pro 6000 Blackwell DC-3Q"),
        ("NVIDIA RTX Pro 6000 Blackwell DC-3Q 1149", "NVIDIA RTX Pro 6000 Blackwell DC-3Q"),
        ("1149  : NVIDIA H200X-1-18C", "NVIDIA H200X-1-18C"),
        ("1149: GRID T4-1Q : 2", "GRID T4-1Q : 2"),
    ],
)
def test_names_with_digits_and_colons(tree: HostTree, line: str, listed: str) -> None:
    assert types(tree, REAL + line)[-1] == (1149, listed)


@pytest.mark.parametrize(
    "line", ["garbage", "1149", ": NVIDIA L40S-1Q", "0 : None", "4294967296 : Big", "9 : \xb2"]
)
def test_a_line_that_is_no_type_is_reported_and_the_rest_is_used(tree: HostTree, line: str) -> None:
    assert types(tree, (REAL + line + "\n").encode("latin-1")) == TYPES
    assert repr(line) in vgpu(tree).unlisted
    assert found(tree).fault is None, "the function can be used all the same"


def test_a_number_with_two_names_has_none(tree: HostTree) -> None:
    assert types(tree, REAL + "1147  : NVIDIA L40S-1B\n") == TYPES[1:]
    assert "1147" in vgpu(tree).unlisted


def test_the_last_line_of_a_list_that_the_kernel_cuts_is_left_out(tree: HostTree) -> None:
    lines = "".join(f"{n}  : NVIDIA B200X-{n}Q\n" for n in range(1000, 1300)).encode()
    cut = lines[:4095]
    assert not cut.endswith(b"\n")
    listed = types(tree, cut)
    assert [*listed] == [(n, f"NVIDIA B200X-{n}Q") for n in range(1000, 1000 + cut.count(b"\n"))]
    assert vgpu(tree).unlisted == ""


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"-1\n", b"1147 NVIDIA\n", b"4294967296\n", b"\xb2\n", b"0x47b\n"]
)
def test_a_type_that_makes_no_sense_is_a_fault(tree: HostTree, content: bytes) -> None:
    tree.set_attribute(VF, "nvidia/current_vgpu_type", content)
    function = found(tree)
    assert function.vgpu is not None
    assert function.vgpu.type is None
    assert function.fault is not None
    assert "current_vgpu_type reads" in function.fault


@pytest.mark.parametrize("error", [errno.ENXIO, errno.EIO, errno.EBUSY, errno.ENODEV])
def test_what_the_driver_refuses_is_a_fault_of_that_file(
    tree: HostTree, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    refused = ""
    real = os.open

    def refuse(path: str, *args: int, **kwargs: int) -> int:
        if path == refused:
            raise OSError(error, os.strerror(error))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    refused = "nvidia/creatable_vgpu_types"
    tree.set_vgpu(VF, 1147, REAL)
    assert (vgpu(tree).type, vgpu(tree).creatable) == (1147, ())
    assert os.strerror(error) in vgpu(tree).unlisted
    assert found(tree).fault is None
    refused = "nvidia/current_vgpu_type"
    function = found(tree)
    assert function.vgpu is not None
    assert function.vgpu.type is None
    assert function.fault is not None
    assert os.strerror(error) in function.fault


def test_a_shortage_is_no_fault(tree: HostTree, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def short(path: str, *args: int, **kwargs: int) -> int:
        if path.startswith("nvidia/"):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", short)
    with pytest.raises(HostError, match="EMFILE"):
        found(tree)


def test_the_attributes_that_an_inspection_must_not_touch(
    tree: HostTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    real = os.open

    def watched(path: str, *args: int, **kwargs: int) -> int:
        opened.append(str(path))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", watched)
    for name in ("gpu_instance_id", "placement_id", "vgpu_params"):
        tree.set_attribute(VF, f"nvidia/{name}", b"1\n")
    opened.clear()
    found(tree)
    of_driver = {name for name in opened if "nvidia/" in name}
    assert of_driver == {"nvidia/current_vgpu_type", "nvidia/creatable_vgpu_types"}


# --- the bind of the physical function ---------------------------------------------------------------------------


def test_a_new_bind_of_the_physical_function_is_another(tree: HostTree) -> None:
    before = vgpu(tree).driver_bind
    link = tree.device_dir(PF.address) / "driver"
    os.rename(link, tree.root / "kept")  # so that its inode is not given again, as in kernfs
    os.symlink(os.readlink(tree.root / "kept"), link)
    assert vgpu(tree).driver_bind not in (0, before)
    link.unlink()
    assert vgpu(tree).driver_bind == 0, "on no driver"


def test_a_list_that_was_read_across_a_bind_is_of_neither(
    tree: HostTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree.set_vgpu(VF, 1147, REAL)
    link, real = tree.device_dir(PF.address) / "driver", os.open

    def bound_meanwhile(path: str, *args: int, **kwargs: int) -> int:
        if path == "nvidia/creatable_vgpu_types":
            os.rename(link, tree.root / "kept")
            os.symlink(os.readlink(tree.root / "kept"), link)
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", bound_meanwhile)
    assert vgpu(tree) == VendorVgpu(1147)


def test_a_scan_reads_the_same(tree: HostTree) -> None:
    reader = SysfsReader(HostRoot(str(tree.root)), (parse_selector("vendor=10de"),), PciIds.open(None))
    assert {f.address: f.vgpu for f in reader.scan()}[PciAddress(VF)] == vgpu(tree)
