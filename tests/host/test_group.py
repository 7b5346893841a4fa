"""A GPU's group as an act must know it, and every process that uses it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpuactors.core.values.claim import BoundFunction
from gpuactors.core.values.model import Holder, PciAddress, is_bridge
from gpuactors.host.boot import boot_id, command_line
from gpuactors.host.group import GroupReader
from gpuactors.host.modules import best, loaded, vfio_driver
from gpuactors.host.procfs import ProcReader
from gpuactors.host.root import HostRoot
from gpuactors_simulation.host.kernel import FakeKernel
from gpuactors_simulation.host.tree import HostTree, PciSpec

GPU, AUDIO, BRIDGE = PciAddress("0000:23:00.0"), PciAddress("0000:23:00.1"), PciAddress("0000:22:00.0")


@pytest.fixture
def tree(tmp_path: Path) -> HostTree:
    return HostTree(tmp_path, cdev=True)


@pytest.fixture
def kernel(tree: HostTree) -> FakeKernel:
    kernel = FakeKernel(tree)
    kernel.plug(PciSpec(BRIDGE, "8086", "352a", "060400", 51, driver="pcieport"))
    kernel.plug(PciSpec(GPU, "10de", "2330", "030200", 51, driver="nvidia"))
    kernel.plug(PciSpec(AUDIO, "10de", "22ba", "040300", 51, driver="vfio-pci"))
    return kernel


def root(tree: HostTree) -> HostRoot:
    return HostRoot(str(tree.root))


def test_a_group_has_all_its_functions_and_says_which_are_bridges(tree: HostTree, kernel: FakeKernel) -> None:
    group = GroupReader(root(tree)).read(GPU)
    assert group is not None
    assert (group.iommu_group, group.has_node) == (51, True)
    assert [(f.address, is_bridge(f.class_code)) for f in group.functions] == [
        (BRIDGE, True),
        (GPU, False),
        (AUDIO, False),
    ]
    assert [f.bound.presence for f in group.functions[1:]] == [
        tree.device_dir(address).stat().st_ino for address in (GPU, AUDIO)
    ]
    assert [replace(f.bound, presence=0) for f in group.functions][1:] == [
        BoundFunction(GPU, "nvidia", 51, None),
        BoundFunction(AUDIO, "vfio-pci", 51, "vfio0", vfio=True),
    ]
    assert kernel.override(GPU) == ""


@pytest.mark.parametrize("number", ["²:1", "195:²", "195:99999999999999999999", "195", ":", "a:b", ""])
def test_a_device_number_that_makes_no_sense_is_nobodys(
    tree: HostTree, kernel: FakeKernel, number: str
) -> None:
    reader = GroupReader(root(tree))
    group = reader.read(GPU)
    assert group is not None
    before = reader.nodes(group)
    device = tree.device_dir(GPU) / "odd/odd0"
    device.mkdir(parents=True)
    (device / "dev").write_text(f"{number}\n")
    assert reader.nodes(group) == before


@pytest.mark.parametrize(
    ("class_code", "expected"),
    [("060000", True), ("060400", True), ("068000", False), ("030200", False), ("040300", False)],
)
def test_host_bridges_are_bridges_and_an_nvswitch_is_none(
    tree: HostTree, class_code: str, expected: bool
) -> None:
    tree.plug(PciSpec("0000:30:00.0", "10de", "22a3", class_code, 60))
    group = GroupReader(root(tree)).read(PciAddress("0000:30:00.0"))
    assert group is not None
    assert is_bridge(group.functions[0].class_code) is expected


def test_reading_a_group_never_reads_what_can_block(tree: HostTree, kernel: FakeKernel) -> None:
    assert kernel.override(GPU) == ""
    for name in ("uevent", "driver_override", "sriov_numvfs"):
        for address in (GPU, AUDIO):
            tree.make_hang(address, name)
    group = GroupReader(root(tree)).read(GPU)
    assert group is not None
    assert GroupReader(root(tree)).nodes(group)


def test_a_group_says_which_functions_are_virtual_and_which_have_such(tmp_path: Path) -> None:
    tree = HostTree(tmp_path)
    tree.plug(PciSpec(GPU, "10de", "2330", "030200", 51, driver="nvidia", total_vfs=1))
    tree.virtualize(GPU, 1)
    (virtual,) = tree.virtual_functions(GPU)
    for address, physical, has_virtual in ((GPU, None, True), (virtual, GPU, False)):
        group = GroupReader(root(tree)).read(PciAddress(address))
        assert group is not None
        assert [(f.physical, f.has_virtual_functions) for f in group.functions] == [(physical, has_virtual)]


def test_a_modalias_is_read_or_made_of_the_ids(tree: HostTree, kernel: FakeKernel) -> None:
    reader = GroupReader(root(tree))
    group = reader.read(GPU)
    assert group is not None
    expected = "pci:v000010DEd00002330sv000010DEsd00002330bc03sc02i00"
    assert group.functions[1].modalias == expected
    tree.remove_attribute(GPU, "modalias")
    tree.set_attribute(GPU, "subsystem_vendor", b"0x10de\n")
    tree.set_attribute(GPU, "subsystem_device", b"0x2330\n")
    again = reader.read(GPU)
    assert again is not None
    assert again.functions[1].modalias == expected
    assert kernel.override(GPU) == ""


def users(tree: HostTree) -> dict[int, frozenset[PciAddress]]:
    reader = GroupReader(root(tree))
    group = reader.read(GPU)
    assert group is not None
    found = ProcReader(root(tree)).users(reader.nodes(group))
    assert found.unseen == ""
    return {holder.pid: held for holder, held in found.by_process.items()}


def test_the_users_of_a_gpu_on_the_hosts_driver_and_of_its_group(tree: HostTree, kernel: FakeKernel) -> None:
    assert users(tree) == {}
    kernel.use(GPU, 99, pod_uid="aaaaaaaa-0000-4000-8000-000000000001")
    tree.open_file("/dev/vfio/51", 100, "qemu")
    tree.open_file("/dev/vfio/devices/vfio0", 101, "qemu")
    tree.open_file("/dev/iommu", 102, "qemu")
    found = users(tree)
    assert sorted(found) == [99, 100, 101]
    assert (found[99], found[101]) == (frozenset({GPU}), frozenset({AUDIO}))


@pytest.mark.parametrize(
    ("below", "node"),
    [
        ("drm/card1", "dri/card1"),
        ("drm/renderD129", "dri/renderD129"),
        ("sound/card2/pcmC2D3p", "snd/pcmC2D3p"),
    ],
)
def test_a_node_that_sysfs_shows_below_the_function_is_one_of_its_users(
    tree: HostTree, kernel: FakeKernel, below: str, node: str
) -> None:
    directory = tree.device_dir(GPU) / below
    directory.mkdir(parents=True)
    (directory / "dev").write_text("226:1\n")
    path = tree.root / "dev" / node
    path.parent.mkdir(parents=True)
    path.write_text("")
    tree.open_file(f"/dev/{node}", 99, "Xorg")
    assert users(tree) == {99: frozenset({GPU})}
    assert kernel.override(GPU) == ""


def test_a_node_counts_by_its_device_number_whatever_its_name(tree: HostTree, kernel: FakeKernel) -> None:
    # /dev/null stands for the GPU's: a container has nodes of its own, with other inodes.
    number = os.stat("/dev/null").st_rdev
    directory = tree.device_dir(GPU) / "drm/card1"
    directory.mkdir(parents=True)
    (directory / "dev").write_text(f"{os.major(number)}:{os.minor(number)}\n")
    kernel.use(GPU, 99, "bash")  # every fake process has /dev/null open
    kernel.close(GPU, 99)
    assert users(tree) == {99: frozenset({GPU})}


def test_a_users_name_and_pod_are_known(tree: HostTree, kernel: FakeKernel) -> None:
    kernel.use(GPU, 99, "python3", pod_uid="aaaaaaaa-0000-4000-8000-000000000001")
    reader = GroupReader(root(tree))
    group = reader.read(GPU)
    assert group is not None
    (holder,) = ProcReader(root(tree)).users(reader.nodes(group)).by_process
    assert holder == Holder(99, "python3", "aaaaaaaa-0000-4000-8000-000000000001")


# --- the variant driver -------------------------------------------------------------------------------------------

MODALIAS = "pci:v000010DEd00002342sv000010DEsd000016EBbc03sc02i00"
ANY = "alias vfio_pci:v*d*sv*sd*bc*sc*i* vfio_pci"
GRACE = "alias vfio_pci:v000010DEd00002342sv*sd*bc*sc*i* nvgrace_gpu_vfio_pci"
NVIDIA = "alias vfio_pci:v000010DEd*sv*sd*bc03sc*i* some_vfio_pci"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([ANY, GRACE], "nvgrace_gpu_vfio_pci"),
        ([GRACE, ANY], "nvgrace_gpu_vfio_pci"),
        ([ANY, NVIDIA], "some_vfio_pci"),
        ([ANY], "vfio-pci"),
        ([], "vfio-pci"),
        (["alias vfio_pci:v000010DEd00002345sv*sd*bc*sc*i* nvgrace_gpu_vfio_pci"], "vfio-pci"),
        (["alias pci:v000010DEd*sv*sd*bc03sc02i00* nvidia"], "vfio-pci"),
        (["alias vfio_pci:nonsense x", "vfio_pci:v*", "\xff\xfe"], "vfio-pci"),
        (
            [
                "alias vfio_pci:v000010DEd00002342sv000010DEsd000016EBbc*sc*i* exact",
                "alias vfio_pci:v000010DEd00002342sv000010DEsd*bc*sc*i* near",
            ],
            "exact",
        ),
    ],
)
def test_the_most_specific_alias_names_the_driver(lines: list[str], expected: str) -> None:
    assert best("".join(f"{line}\n" for line in lines).encode("latin-1"), MODALIAS) == expected


def test_an_unknown_modalias_is_for_vfio_pci() -> None:
    assert best(f"{GRACE}\n".encode(), "") == "vfio-pci"


def test_the_aliases_are_those_of_the_kernel_that_runs(tree: HostTree) -> None:
    proc, modules = tree.root / "proc/sys/kernel", tree.root / "lib/modules"
    proc.mkdir(parents=True)
    for release, line in (("6.1.0", GRACE), ("6.12.0", ANY)):
        (modules / release).mkdir(parents=True)
        (modules / release / "modules.alias").write_text(f"{line}\n")
    for release, expected in (
        ("6.1.0", "nvgrace_gpu_vfio_pci"),
        ("6.12.0", "vfio-pci"),
        ("../modules/6.1.0", "vfio-pci"),
        ("none", "vfio-pci"),
    ):
        (proc / "osrelease").write_text(f"{release}\n")
        assert vfio_driver(root(tree), MODALIAS) == expected


def test_a_drivers_name_may_differ_from_its_modules(tree: HostTree, kernel: FakeKernel) -> None:
    kernel.load("nvgrace_gpu_vfio_pci")
    assert loaded(root(tree), "vfio_pci") == "vfio-pci"
    assert loaded(root(tree), "nvgrace-gpu-vfio-pci") == "nvgrace_gpu_vfio_pci"
    assert loaded(root(tree), "xe_vfio_pci") is None
    assert loaded(root(tree), "..") is None


# --- the boot -----------------------------------------------------------------------------------------------------


def test_the_boot_and_its_command_line_are_read_below_the_root_or_from_this_kernel(tree: HostTree) -> None:
    assert boot_id(root(tree)) == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    (tree.root / "proc/sys/kernel/random").mkdir(parents=True)
    (tree.root / "proc/sys/kernel/random/boot_id").write_text("b1\n")
    (tree.root / "proc/cmdline").write_bytes(b"ro vfio-pci.ids=10de:2330 x=\xff\n")
    assert boot_id(root(tree)) == "b1"
    assert command_line(root(tree)) == "ro vfio-pci.ids=10de:2330 x=\\xff"
