"""What the host has for passing devices through: read from a tree as the kernel makes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuactors.host.modules import is_installed
from gpuactors.host.root import HostRoot, module_parameter
from gpuactors.host.vfio import DeviceNode, read
from gpuactors.ports.errors import HostError
from gpuactors_simulation.host.tree import HostTree, PciSpec

SPEC = PciSpec("0000:23:00.0", "10de", "2330", "030200", 0x23, driver="vfio-pci")


def put(root: Path, path: str, text: str) -> None:
    file = root / path.lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_a_node_with_everything(tmp_path: Path) -> None:
    tree = HostTree(tmp_path, cdev=True)
    tree.plug(SPEC)
    put(tmp_path, "/sys/class/iommu/dmar1", "")
    put(tmp_path, "/sys/class/iommu/dmar0", "")
    put(tmp_path, "/proc/cmdline", "root=/dev/sda1 intel_iommu=on\n")
    put(tmp_path, module_parameter("vfio_pci", "disable_idle_d3"), "Y\n")
    put(tmp_path, module_parameter("vfio", "enable_unsafe_noiommu_mode"), "N\n")
    for node, mode in (
        ("vfio/vfio", 0o666),
        ("vfio/35", 0o600),
        ("vfio/devices/vfio0", 0o640),
        ("iommu", 0o660),
    ):
        (tmp_path / "dev" / node).chmod(mode)
    found = read(HostRoot(str(tmp_path)))
    assert found.groups == 1
    assert found.iommus == ("dmar0", "dmar1")
    assert found.command_line == "root=/dev/sda1 intel_iommu=on"
    assert (found.loaded, found.installed) == (True, None)
    assert (found.disable_idle_d3, found.unsafe_noiommu) == (True, False)
    assert found.container == DeviceNode("/dev/vfio/vfio", 0o666)
    assert found.iommufd == DeviceNode("/dev/iommu", 0o660)
    assert found.group_nodes == (DeviceNode("/dev/vfio/35", 0o600),)
    assert found.cdevs == (DeviceNode("/dev/vfio/devices/vfio0", 0o640),)


def test_a_host_without_any_of_it(tmp_path: Path) -> None:
    put(tmp_path, "/proc/cmdline", "quiet\n")
    found = read(HostRoot(str(tmp_path)))
    assert (found.groups, found.iommus, found.loaded, found.installed) == (0, (), False, None)
    assert (found.disable_idle_d3, found.unsafe_noiommu) == (None, None)
    assert (found.container, found.iommufd, found.group_nodes, found.cdevs) == (None, None, (), ())


def test_a_group_without_an_iommu_has_a_node_of_its_own(tmp_path: Path) -> None:
    put(tmp_path, "/dev/vfio/noiommu-0", "")
    assert [node.path for node in read(HostRoot(str(tmp_path))).group_nodes] == ["/dev/vfio/noiommu-0"]


def test_what_is_there_and_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / module_parameter("vfio_pci", "disable_idle_d3").lstrip("/")
    path.mkdir(parents=True)
    with pytest.raises(
        HostError, match=r"disable_idle_d3 cannot be read \(Is a directory\): run this as root"
    ):
        read(HostRoot(str(tmp_path)))


@pytest.mark.parametrize(
    ("name", "line", "installed"),
    [
        ("modules.dep", "kernel/drivers/vfio/pci/vfio-pci.ko.xz: kernel/drivers/vfio/vfio.ko.xz", True),
        ("modules.dep", "kernel/drivers/vfio/pci/vfio_pci.ko:", True),
        ("modules.builtin", "kernel/drivers/vfio/pci/vfio-pci.ko", True),
        ("modules.dep", "kernel/drivers/vfio/pci/vfio-pci-core.ko: kernel/drivers/vfio/vfio.ko", False),
        ("modules.dep", "kernel/net/a.ko: kernel/not-vfio-pci.ko", False),
        ("other", "kernel/drivers/vfio/pci/vfio-pci.ko", None),
    ],
)
def test_whether_the_kernel_has_the_module(
    tmp_path: Path, name: str, line: str, installed: bool | None
) -> None:
    put(tmp_path, "/proc/sys/kernel/osrelease", "6.1.0-test\n")
    put(tmp_path, f"/lib/modules/6.1.0-test/{name}", f"kernel/fs/x.ko:\n{line}\n")
    assert is_installed(HostRoot(str(tmp_path)), "vfio_pci") is installed
