"""The sysfs reader against a real tree, sound and broken."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Thread

import pytest
from msgspec.structs import replace

from gpuactors.core.values.inventory import named
from gpuactors.core.values.model import PciAddress, PciFunction
from gpuactors.core.values.own_resources import parse_model_rule, resource_of
from gpuactors.core.values.selector import parse_selector
from gpuactors.host.group import GroupReader
from gpuactors.host.pci_ids import PciIds
from gpuactors.host.root import HostRoot
from gpuactors.host.sysfs import SysfsReader
from gpuactors.ports.errors import HostError
from gpuactors_simulation.host.tree import HostTree, PciSpec, Uevent

DEFAULT = ("vendor=10de,class=03", "vendor=10de,class=0680")

GPU = PciSpec(
    "0000:23:00.0", "10de", "2330", "030200", 51, numa_node=1, pcie_root="pci0000:20", driver="vfio-pci"
)
AUDIO = PciSpec("0000:23:00.1", "10de", "22ba", "040300", 51)
NIC = PciSpec("0000:01:00.0", "8086", "1572", "020000", 7, pcie_root="pci0000:00", driver="i40e")
SWITCH = PciSpec("0000:c1:00.0", "10de", "22a3", "068000", 60, pcie_root="pci0000:c0")


def reader(tree: HostTree, selectors: Sequence[str] = DEFAULT) -> SysfsReader:
    root = HostRoot(str(tree.root))
    return SysfsReader(root, tuple(map(parse_selector, selectors)), PciIds.open(None))


def addresses(functions: Sequence[PciFunction]) -> list[str]:
    return [function.address for function in functions]


def inspect(tree: HostTree, address: str = GPU.address) -> PciFunction:
    """The function itself, out of an inspection of it."""
    return next(f for f in reader(tree).inspect(PciAddress(address)) if f.address == address)


@pytest.fixture
def tree(tmp_path: Path) -> HostTree:
    return HostTree(tmp_path)


# --- sound ------------------------------------------------------------------------------------------------------


def test_all_facts_of_a_bound_gpu(tree: HostTree) -> None:
    tree.plug(replace(GPU, bridges=("0000:20:01.0",)))
    assert reader(tree).scan() == (
        PciFunction(
            address=PciAddress("0000:23:00.0"),
            vendor="10de",
            device="2330",
            class_code="030200",
            driver="vfio-pci",
            vfio_bound=True,
            iommu_group=51,
            numa_node=1,
            pcie_root="pci0000:20",
            nodes=("/dev/vfio/vfio", "/dev/vfio/51"),
            model="GH100 [H100 SXM5 80GB]",
            fault=None,
            presence=tree.device_dir("0000:23:00.0").stat().st_ino,
            reset_methods=("flr", "bus"),
            port_fatal_errors=0,
        ),
    )


def test_cdev_nodes_in_order(tmp_path: Path) -> None:
    tree = HostTree(tmp_path, cdev=True)
    tree.plug(GPU)
    assert inspect(tree).nodes == ("/dev/vfio/vfio", "/dev/vfio/51", "/dev/vfio/devices/vfio0", "/dev/iommu")


def test_only_nodes_that_exist(tmp_path: Path) -> None:
    tree = HostTree(tmp_path, cdev=True)
    tree.plug(GPU)
    tree.remove_node("/dev/vfio/51")
    tree.remove_node("/dev/iommu")
    function = inspect(tree)
    assert function.nodes == ("/dev/vfio/vfio", "/dev/vfio/devices/vfio0")
    assert function.vfio_bound
    assert function.fault is None


def test_unbound_and_bound_to_a_host_driver(tree: HostTree) -> None:
    tree.plug(replace(GPU, driver=None))
    unbound = inspect(tree)
    assert (unbound.driver, unbound.vfio_bound, unbound.nodes) == (None, False, ())
    tree.bind(GPU.address, "nvidia")
    bound = inspect(tree)
    assert (bound.driver, bound.vfio_bound, bound.nodes) == ("nvidia", False, ())


def test_a_vfio_driver_that_nobody_knows_by_name(tree: HostTree) -> None:
    tree.plug(replace(GPU, driver="some_vfio_pci"))
    assert not inspect(tree).vfio_bound
    (tree.device_dir(GPU.address) / "vfio-dev" / "vfio3").mkdir(parents=True)
    assert inspect(tree).vfio_bound


@pytest.mark.parametrize("waits_silently", [True, False])
def test_an_unbind_that_waits_shows_in_the_groups_node_and_holds_up_no_look(
    tmp_path: Path, waits_silently: bool
) -> None:
    tree = HostTree(tmp_path, waits_silently=waits_silently)
    tree.plug(GPU)
    tree.open_group(51, 4711)
    tree.unbind(GPU.address)
    function = inspect(tree)
    assert (function.driver, function.vfio_bound, function.nodes) == (None, False, ("/dev/vfio/51",))
    assert reader(tree).scan() == (function,)
    tree.kill(4711)
    assert inspect(tree).nodes == ()


def test_the_scan_is_what_is_chosen_and_its_companions(tree: HostTree) -> None:
    for spec in (SWITCH, NIC, GPU, AUDIO):
        tree.plug(spec)
    assert addresses(reader(tree).scan()) == [GPU.address, AUDIO.address, SWITCH.address]
    assert addresses(reader(tree, ["vendor=8086"]).scan()) == [NIC.address]
    assert addresses(reader(tree, [f"address={AUDIO.address}"]).scan()) == [GPU.address, AUDIO.address]
    assert addresses(reader(tree, ["device=22a3", "class=02"]).scan()) == [NIC.address, SWITCH.address]
    assert reader(tree, []).scan() == ()
    assert addresses(reader(tree, [*DEFAULT, "!class=03"]).scan()) == [SWITCH.address]


def test_what_is_left_out_is_so_by_what_can_be_read_of_it_alone(tree: HostTree) -> None:
    """Else a GPU would seem to be gone whenever one of its files cannot be read."""
    for spec in (GPU, AUDIO):
        tree.plug(spec)
    sysfs = reader(tree, [*DEFAULT, "!device=2331"])
    (tree.root / f"sys/bus/pci/devices/{GPU.address}/device").write_text("nonsense")
    assert addresses(sysfs.scan()) == [GPU.address, AUDIO.address]


def test_an_inspection_is_of_the_function_and_its_group(tree: HostTree) -> None:
    for spec in (NIC, GPU, AUDIO, SWITCH):
        tree.plug(spec)
    sysfs = reader(tree)
    assert addresses(sysfs.inspect(PciAddress(GPU.address))) == [GPU.address, AUDIO.address]
    assert addresses(sysfs.inspect(PciAddress(AUDIO.address))) == [GPU.address, AUDIO.address]
    assert sysfs.inspect(PciAddress(NIC.address)) == ()
    assert sysfs.inspect(PciAddress("0000:99:00.0")) == ()


def test_names_are_read_for_what_is_chosen_alone(tree: HostTree) -> None:
    tree.plug(NIC)
    missing = PciIds(tree.root / "no-such-file")
    sysfs = SysfsReader(HostRoot(str(tree.root)), (parse_selector("vendor=10de"),), missing)
    assert sysfs.inspect(PciAddress(NIC.address)) == ()
    tree.plug(GPU)
    with pytest.raises(HostError, match="no-such-file"):
        sysfs.inspect(PciAddress(GPU.address))


def test_an_own_name_is_that_of_its_ids_alone_and_selects_nothing(tree: HostTree) -> None:
    tree.plug(GPU)
    tree.plug(AUDIO)
    own = parse_model_rule("10de:2330=example.com/h100")
    root, names = HostRoot(str(tree.root)), PciIds.open(None)
    selectors = (parse_selector("vendor=10de"), own)
    gpu, audio = SysfsReader(root, selectors, names).scan()
    assert (named(gpu, selectors), gpu.model) == ("example.com/h100", "GH100 [H100 SXM5 80GB]")
    assert resource_of(selectors, audio) is None
    assert SysfsReader(root, (own,), names).scan() == ()


def test_a_reader_of_other_selectors(tree: HostTree) -> None:
    tree.plug(GPU)
    tree.plug(NIC)
    by_nobody = SysfsReader(HostRoot(str(tree.root)), (parse_selector("vendor=1002"),), PciIds.open(None))
    assert by_nobody.choosing(None) is by_nobody
    assert by_nobody.choosing((parse_selector("vendor=1002"),)) is by_nobody
    other = by_nobody.choosing((parse_selector("vendor=10de"),))
    (found,) = other.scan()
    assert (found.address, by_nobody.scan()) == (GPU.address, ())
    assert by_nobody.choosing((parse_selector("vendor=10de"),)) is other, "each scan asks for the same"
    (nic,) = by_nobody.choosing((parse_selector("vendor=8086"),)).scan()
    assert nic.address == NIC.address


def test_a_host_without_an_iommu(tree: HostTree) -> None:
    tree.plug(replace(GPU, group=None, driver=None))
    function = inspect(tree)
    assert (function.iommu_group, function.fault) == (None, None)


def test_what_can_block_is_not_read(tree: HostTree) -> None:
    """On kernel 6.1 these hang while an unbind waits; here they would hang for ever."""
    tree.plug(GPU)
    for name in ("uevent", "driver_override"):
        os.mkfifo(tree.device_dir(GPU.address) / name)
    assert reader(tree).scan() == reader(tree).inspect(PciAddress(GPU.address))


def test_the_real_bus_can_be_read() -> None:
    sysfs = SysfsReader(HostRoot("/"), (parse_selector("class=06"),), PciIds.open(None))
    if not os.path.isdir("/sys/bus/pci/devices"):
        pytest.skip("this machine has no PCI bus")
    for function in sysfs.scan():
        assert function in sysfs.inspect(function.address)
        assert function.fault is None


# --- broken -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["vendor", "device", "class"])
@pytest.mark.parametrize(
    "how", ["unreadable", "missing", b"", b"garbage\n", b"0x\n", b"0x10DE\n", b"\xff\x00" * 9]
)
def test_an_attribute_without_sense_is_a_fault_that_names_it(
    tree: HostTree, name: str, how: bytes | str
) -> None:
    tree.plug(GPU)
    match how:
        case "unreadable":
            tree.make_unreadable(GPU.address, name)
        case "missing":
            tree.remove_attribute(GPU.address, name)
        case bytes():
            tree.set_attribute(GPU.address, name, how)
    (function,) = reader(tree).scan()
    assert reader(tree).inspect(PciAddress(GPU.address)) == (function,)
    assert function.fault is not None
    assert f"{GPU.address}/{name} " in function.fault
    assert f"lspci -vs {GPU.address}" in function.fault
    unread = {"vendor": function.vendor, "device": function.device, "class": function.class_code}.pop(name)
    assert unread == ""
    assert (function.driver, function.iommu_group) == ("vfio-pci", 51)


def test_what_is_certainly_not_chosen_is_left_out_even_if_broken(tree: HostTree) -> None:
    tree.plug(NIC)
    tree.make_unreadable(NIC.address, "class")
    tree.make_unreadable(NIC.address, "device")
    assert reader(tree).scan() == ()


def test_a_broken_neighbour_spoils_nothing(tree: HostTree) -> None:
    tree.plug(GPU)
    tree.plug(SWITCH)
    tree.make_unreadable(SWITCH.address, "vendor")
    faults = {function.address: function.fault is not None for function in reader(tree).scan()}
    assert faults == {GPU.address: False, SWITCH.address: True}


@pytest.mark.parametrize("content", [b"-1\n", b"", b"nonsense\n", b"\xff", b"9" * 400, None])
def test_without_a_numa_node_a_gpu_is_usable(tree: HostTree, content: bytes | None) -> None:
    tree.plug(GPU)
    if content is None:
        tree.make_unreadable(GPU.address, "numa_node")
    else:
        tree.set_attribute(GPU.address, "numa_node", content)
    function = inspect(tree)
    assert (function.numa_node, function.fault) == (None, None)


def test_a_dangling_driver_link_still_names_the_driver(tree: HostTree) -> None:
    tree.plug(GPU)
    shutil.rmtree(tree.root / "sys/bus/pci/drivers/vfio-pci")
    assert inspect(tree).driver == "vfio-pci"


@pytest.mark.parametrize("link", ["driver", "iommu_group"])
def test_a_link_that_is_no_link_is_a_fault(tree: HostTree, link: str) -> None:
    tree.plug(GPU)
    tree.make_unreadable(GPU.address, link)
    fault = inspect(tree).fault
    assert fault is not None
    assert f"{GPU.address}/{link} cannot be read as a link" in fault


def test_a_group_that_is_no_number_is_a_fault(tree: HostTree) -> None:
    tree.plug(GPU)
    path = tree.device_dir(GPU.address) / "iommu_group"
    path.unlink()
    path.symlink_to("../nonsense")
    function = inspect(tree)
    assert function.iommu_group is None
    assert function.fault is not None
    assert "'nonsense'" in function.fault


def test_a_group_that_cannot_be_listed_is_a_fault(tree: HostTree) -> None:
    """Otherwise a GPU would be offered without anybody knowing who else is in its group."""
    tree.plug(GPU)
    shutil.rmtree(tree.root / "sys/kernel/iommu_groups")
    function = inspect(tree)
    assert function.iommu_group == 51
    assert function.fault is not None
    assert "iommu_groups/51/devices cannot be listed" in function.fault


def test_a_missing_group_link_is_no_fault_here(tree: HostTree) -> None:
    tree.plug(GPU)
    tree.remove_attribute(GPU.address, "iommu_group")
    function = inspect(tree)
    assert (function.iommu_group, function.fault) == (None, None)


def test_a_node_that_cannot_be_read_is_a_fault(tree: HostTree) -> None:
    tree.plug(GPU)
    node = tree.root / "dev/vfio/51"
    node.unlink()
    node.symlink_to(node)
    function = inspect(tree)
    assert function.nodes == ("/dev/vfio/vfio",)
    assert function.fault is not None
    assert str(node) in function.fault


def test_a_directory_that_cannot_be_opened_is_a_fault(tree: HostTree) -> None:
    tree.plug(GPU)
    link = tree.root / f"sys/bus/pci/devices/{GPU.address}"
    link.unlink()
    link.symlink_to(link.name)
    (function,) = reader(tree).scan()
    assert reader(tree).inspect(PciAddress(GPU.address)) == (function,)
    assert (function.vendor, function.driver) == ("", None)
    assert function.fault is not None
    assert f"{link} cannot be opened" in function.fault


def test_a_group_is_listed_once_a_look(tree: HostTree, monkeypatch: pytest.MonkeyPatch) -> None:
    second = replace(GPU, address="0000:24:00.0")
    for spec in (GPU, AUDIO, second):
        tree.plug(spec)
    listed: list[str] = []
    listdir = os.listdir

    def listing(path: str) -> list[str]:
        listed.append(path)
        return listdir(path)

    monkeypatch.setattr(os, "listdir", listing)
    group = f"{tree.root}/sys/kernel/iommu_groups/51/devices"
    sysfs = reader(tree)
    assert addresses(sysfs.scan()) == [GPU.address, AUDIO.address, second.address]
    assert listed.count(group) == 1
    assert addresses(sysfs.inspect(PciAddress(GPU.address))) == [GPU.address, AUDIO.address, second.address]
    assert listed.count(group) == 2
    look = sysfs.look()
    for address in (GPU.address, second.address):
        assert sysfs.inspect(PciAddress(address), (), look) == sysfs.scan()
    assert listed.count(group) == 2 + 1 + 2, "once by both inspections, and by each scan"


def test_what_vanishes_during_the_scan_is_not_there(tree: HostTree) -> None:
    tree.plug(GPU)
    tree.plug(SWITCH)
    tree.hollow(GPU.address)
    assert addresses(reader(tree).scan()) == [SWITCH.address]
    assert reader(tree).inspect(PciAddress(GPU.address)) == ()


@pytest.mark.parametrize("moment", ["vendor", "device", "class", "numa_node"])
def test_what_vanishes_while_it_is_read_is_not_there(tree: HostTree, moment: str) -> None:
    """Nor is it a fault, or a function that has lost its driver."""
    tree.plug(GPU)
    content = (tree.device_dir(GPU.address) / moment).read_bytes()
    tree.make_hang(GPU.address, moment)
    attribute = tree.device_dir(GPU.address) / moment
    assert look_during(reader(tree), attribute, content, lambda: tree.unplug(GPU.address)) == ()


def test_a_group_that_vanishes_with_its_function_is_no_fault(tree: HostTree) -> None:
    tree.plug(GPU)
    bars = tree.device_dir(GPU.address) / "resource"  # read after its presence and before its group
    bars.unlink(missing_ok=True)
    os.mkfifo(bars)
    assert look_during(reader(tree), bars, H100_BARS.encode(), lambda: tree.unplug(GPU.address)) == ()


def look_during(
    sysfs: SysfsReader, fifo: Path, content: bytes, act: Callable[[], object]
) -> tuple[PciFunction, ...]:
    """Inspects the GPU; does `act` while the inspection waits for what it reads from `fifo`, then gives it
    `content`."""
    with ThreadPoolExecutor(max_workers=1) as threads:
        inspecting = threads.submit(sysfs.inspect, PciAddress(GPU.address))
        with fifo.open("wb") as end:  # waits until the inspection has opened the other end
            act()
            end.write(content)
        return inspecting.result(timeout=10)


def test_a_companion_that_vanishes_is_not_there(tree: HostTree) -> None:
    tree.plug(GPU)
    tree.plug(AUDIO)
    tree.hollow(AUDIO.address)
    assert addresses(reader(tree).inspect(PciAddress(GPU.address))) == [GPU.address]


def test_at_every_moment_of_a_life_an_inspection_finds_a_whole_function(tree: HostTree) -> None:
    """Uevent by uevent: nothing that an inspection finds half way is a fault."""
    tree.plug(AUDIO)
    steps: tuple[Callable[[], Iterator[Uevent]], ...] = (
        lambda: tree.plug_steps(GPU),
        lambda: tree.unbind_steps(GPU.address),
        lambda: tree.bind_steps(GPU.address, "vfio-pci"),
        lambda: tree.unplug_steps(GPU.address),
    )
    seen = 0
    for step in steps:
        for _ in step():
            for function in reader(tree).inspect(PciAddress(GPU.address)):
                seen += 1
                assert function.fault is None
    assert seen > 10
    assert reader(tree).inspect(PciAddress(GPU.address)) == ()


def test_strange_names_on_the_bus_are_ignored(tree: HostTree) -> None:
    tree.plug(GPU)
    (tree.root / "sys/bus/pci/devices/README").write_text("?")
    (tree.root / "sys/kernel/iommu_groups/51/devices/fsl_mc.0").write_text("?")
    assert addresses(reader(tree).scan()) == [GPU.address]


def test_names_that_are_no_utf_8_are_escaped(tree: HostTree) -> None:
    """Issue 10, 5: such a driver's name stopped the journal, and every answer that named it was INTERNAL."""
    tree.plug(replace(GPU, driver=None))
    tree.plug(replace(AUDIO, group=None))
    os.symlink(b"../../../bus/pci/drivers/n\xffvidia", tree.device_dir(GPU.address) / "driver")
    os.symlink(b"../../../kernel/iommu_groups/f\xfcnf", tree.device_dir(AUDIO.address) / "iommu_group")
    os.makedirs(os.fsencode(tree.device_dir(GPU.address)) + b"/vfio-dev/vfio\xff")
    gpu = inspect(tree)
    assert (gpu.driver, gpu.vfio_bound, gpu.nodes) == (r"n\xffvidia", True, ("/dev/vfio/vfio",))
    (audio,) = reader(tree, [f"address={AUDIO.address}"]).inspect(PciAddress(AUDIO.address))
    assert audio.iommu_group is None
    assert audio.fault is not None
    assert r"f\\xfcnf" in audio.fault


def test_a_missing_bus_is_an_error_with_its_remedy(tmp_path: Path) -> None:
    root = HostRoot(f"{tmp_path}/")
    sysfs = SysfsReader(root, (parse_selector("vendor=10de"),), PciIds.open(None))
    with pytest.raises(HostError, match=rf"{tmp_path}/sys/bus/pci/devices .*--host-root"):
        sysfs.scan()
    with pytest.raises(HostError, match="--host-root"):
        sysfs.inspect(PciAddress(GPU.address))


@pytest.mark.parametrize("cdev", [True, False])
@pytest.mark.parametrize("driver", ["nvidia", "vfio-pci", None])
def test_whether_the_node_has_iommufd_does_not_depend_on_the_driver(
    tmp_path: Path, cdev: bool, driver: str | None
) -> None:
    with_or_without = HostTree(tmp_path, cdev=cdev)
    with_or_without.plug(replace(GPU, driver=driver))
    assert inspect(with_or_without).iommufd is cdev


def test_virtual_functions_and_the_function_that_has_them(tree: HostTree) -> None:
    tree.plug(replace(GPU, driver="nvidia", total_vfs=2))
    assert (inspect(tree).physical, inspect(tree).has_virtual_functions) == (None, False)
    tree.virtualize(GPU.address, 2, "vfio-pci")
    assert (inspect(tree).physical, inspect(tree).has_virtual_functions) == (None, True)
    first, second = (inspect(tree, address) for address in tree.virtual_functions(GPU.address))
    assert [f.physical for f in (first, second)] == [GPU.address] * 2
    assert [f.vfio_bound for f in (first, second)] == [True, True]
    assert [f.has_virtual_functions for f in (first, second)] == [False, False]
    tree.remove_attribute(GPU.address, "virtfn0")
    assert inspect(tree).has_virtual_functions, "its removal waits, and the next one is still there"
    tree.virtualize(GPU.address, 0)
    assert not inspect(tree).has_virtual_functions
    assert addresses(reader(tree).scan()) == [GPU.address]


FLEX = PciSpec(
    "0000:4d:00.0",
    "8086",
    "56c0",
    "038000",
    70,
    numa_node=1,
    pcie_root="pci0000:4c",
    driver="i915",
    total_vfs=4,
)
"""A card whose virtual functions have its ids."""
FLEX_VFS = ("0000:4d:00.4", "0000:4d:00.5", "0000:4d:00.6", "0000:4d:00.7")


def test_all_facts_of_a_virtual_function(tree: HostTree) -> None:
    """Its NUMA node and its IOMMU group are its own; its ids may be those of the physical one."""
    tree.plug(FLEX)
    tree.virtualize(FLEX.address, 1, "xe-vfio-pci")
    own = tree.device_dir(FLEX_VFS[0])
    group = int((own / "iommu_group").readlink().name)
    tree.set_attribute(FLEX_VFS[0], "numa_node", b"0\n")
    (_, virtual) = reader(tree, ["vendor=8086"]).scan()
    assert virtual == PciFunction(
        address=PciAddress(FLEX_VFS[0]),
        vendor="8086",
        device="56c0",
        class_code="038000",
        driver="xe-vfio-pci",
        vfio_bound=True,
        iommu_group=group,
        numa_node=0,
        pcie_root="pci0000:4c",
        nodes=("/dev/vfio/vfio", f"/dev/vfio/{group}"),
        model="ATS-M [Data Center GPU Flex 170]",
        fault=None,
        presence=own.stat().st_ino,
        physical=PciAddress(FLEX.address),
        reset_methods=("flr", "bus"),
    )
    assert group != FLEX.group


def test_a_virtual_function_without_a_numa_node_has_none_nor_that_of_its_physical_one(tree: HostTree) -> None:
    tree.plug(FLEX)
    tree.virtualize(FLEX.address, 1, "vfio-pci")
    tree.set_attribute(FLEX_VFS[0], "numa_node", b"-1\n")
    physical, virtual = reader(tree, ["vendor=8086"]).scan()
    assert (physical.numa_node, virtual.numa_node, virtual.fault) == (1, None, None)


def test_the_physical_function_is_read_with_a_virtual_one_whatever_is_selected(tree: HostTree) -> None:
    tree.plug(FLEX)
    tree.virtualize(FLEX.address, 2, "vfio-pci")
    first, second = FLEX_VFS[:2]
    chosen = reader(tree, [f"address={first}"])
    scanned = chosen.scan()
    assert addresses(scanned) == [FLEX.address, first]
    physical = scanned[0]
    assert (physical.driver, physical.has_virtual_functions, physical.iommu_group) == ("i915", True, 70)
    assert chosen.inspect(PciAddress(first)) == scanned
    assert chosen.inspect(PciAddress(second)) == ()
    assert chosen.inspect(PciAddress(FLEX.address)) == (physical,), "as a scan shows it"
    assert reader(tree).inspect(PciAddress(FLEX.address)) == (), "nobody has its virtual functions"
    given = {PciAddress(second)}
    assert addresses(reader(tree).scan(given)) == [FLEX.address, second]
    assert addresses(reader(tree).inspect(PciAddress(second), given)) == [FLEX.address, second]
    assert addresses(reader(tree).inspect(PciAddress(FLEX.address), given)) == [FLEX.address]
    tree.virtualize(FLEX.address, 0)
    assert chosen.scan() == chosen.inspect(PciAddress(FLEX.address)) == ()


def test_an_unselected_physical_function_is_no_device_and_has_no_name_of_pci_ids(tree: HostTree) -> None:
    tree.plug(FLEX)
    tree.virtualize(FLEX.address, 1, "vfio-pci")
    physical, virtual = reader(tree, [f"address={FLEX_VFS[0]}"]).scan()
    assert physical.model is None
    assert virtual.model is not None


def test_a_chosen_model_that_pci_ids_does_not_know_has_an_empty_name_and_an_excluded_one_none(
    tree: HostTree,
) -> None:
    tree.plug(replace(GPU, device="29ff"))
    gpu = PciAddress(GPU.address)
    assert [function.model for function in reader(tree).scan()] == [""]
    assert [function.model for function in reader(tree, ["vendor=1002"]).scan({gpu})] == [None]


def test_a_physical_function_is_read_once_for_all_its_virtual_ones(tree: HostTree) -> None:
    tree.plug(replace(FLEX, driver="pci-pf-stub"))
    tree.virtualize(FLEX.address, 4, "vfio-pci")
    chosen = reader(tree, [f"address={address}" for address in FLEX_VFS])
    look = chosen.look()
    (tree.root / "dev/vfio/70").write_text("")
    first = chosen.inspect(PciAddress(FLEX_VFS[0]), look=look)[0]
    tree.unbind(FLEX.address)
    later = [chosen.inspect(PciAddress(address), look=look)[0] for address in FLEX_VFS[1:]]
    assert [*later] == [first] * 3
    assert chosen.inspect(PciAddress(FLEX.address), look=look)[0].driver is None, (
        "one that is asked for is read"
    )
    read: list[str] = []
    chosen.scan(reads=read.append)
    assert read.count(FLEX.address) == 2, "for its vendor, and because of the virtual ones"


def test_no_inspection_reads_what_waits_for_the_lock_of_the_physical_function(tree: HostTree) -> None:
    """drivers/pci/pci-sysfs.c, sriov_numvfs_show takes the lock that an unbind holds while it waits for a user."""
    tree.plug(FLEX)
    tree.virtualize(FLEX.address, 2, "vfio-pci")
    for name in ("sriov_numvfs", "sriov_totalvfs", "uevent", "driver_override"):
        for address in (FLEX.address, *FLEX_VFS[:2]):
            tree.make_hang(address, name)
    for selectors in (["vendor=8086"], [f"address={FLEX_VFS[0]}"]):
        chosen = reader(tree, selectors)
        assert FLEX.address in addresses(answered(chosen.scan))
        for address in (FLEX.address, FLEX_VFS[0]):
            assert FLEX.address in addresses(answered(partial(chosen.inspect, PciAddress(address))))


def answered(read: Callable[[], Sequence[PciFunction]]) -> Sequence[PciFunction]:
    """What is read; fails instead of waiting for ever for what hangs."""
    found: list[Sequence[PciFunction]] = []
    reading = Thread(target=lambda: found.append(read()), daemon=True)
    reading.start()
    reading.join(10)
    assert found, "the read hangs, or has failed"
    return found[0]


def test_the_vfio_driver_of_a_virtual_function_may_have_any_name(tree: HostTree) -> None:
    tree.plug(FLEX)
    tree.virtualize(FLEX.address, 1)
    tree.bind(FLEX_VFS[0], "xe-vfio-pci")
    chosen = reader(tree, ["vendor=8086"])
    assert [(f.driver, f.vfio_bound) for f in chosen.scan()] == [("i915", False), ("xe-vfio-pci", True)]
    tree.remove_attribute(FLEX_VFS[0], "vfio-dev")
    assert [(f.driver, f.vfio_bound) for f in chosen.scan()] == [("i915", False), ("xe-vfio-pci", False)]


def test_a_physical_function_that_hangs_or_is_gone_is_told_with_its_virtual_one(tree: HostTree) -> None:
    tree.plug(FLEX)
    tree.virtualize(FLEX.address, 1, "vfio-pci")
    virtual = FLEX_VFS[0]
    chosen = reader(tree, [f"address={virtual}"])
    silent, read = chosen.scan(unanswered={FLEX.address})
    assert (silent.address, read.physical) == (FLEX.address, FLEX.address)
    assert "does not answer" in (silent.fault or "")
    silent, hanging = reader(tree, ["vendor=8086"]).scan(unanswered={FLEX.address, virtual})
    assert (silent.has_virtual_functions, hanging.physical) == (True, FLEX.address), "links do not hang"
    link = tree.device_dir(virtual) / "physfn"
    link.unlink()
    link.symlink_to("../0000:4d:00.3")
    (alone,) = chosen.inspect(PciAddress(virtual))
    assert alone.physical == "0000:4d:00.3"
    assert chosen.scan() == (alone,)


def test_a_virtual_function_without_its_link_is_known_by_the_file_that_only_such_have(tree: HostTree) -> None:
    tree.plug(replace(GPU, driver="nvidia", total_vfs=1))
    tree.virtualize(GPU.address, 1, "vfio-pci")
    (virtual,) = tree.virtual_functions(GPU.address)
    address = PciAddress(virtual)

    def read() -> dict[str, tuple[PciAddress | None, bool]]:
        return {f.address: (f.physical, f.unlinked) for f in reader(tree).inspect(address)}

    card = {GPU.address: (None, False)}
    assert read() == {**card, virtual: (GPU.address, False)}
    tree.remove_attribute(virtual, "physfn")
    assert read() == {virtual: (None, True)}
    (silent,) = (f for f in reader(tree).scan(unanswered={virtual}) if f.address == virtual)
    assert silent.unlinked, "no attribute is read"
    group = GroupReader(HostRoot(str(tree.root))).read(address)
    assert group is not None
    assert [f.unlinked for f in group.functions] == [True]
    tree.remove_attribute(virtual, "sriov_vf_msix_count")
    assert read() == {virtual: (None, False)}, "before Linux 5.13"


def test_the_link_to_a_virtual_function_that_was_removed_by_hand_is_none(tree: HostTree) -> None:
    tree.plug(replace(GPU, driver="nvidia", total_vfs=2))
    tree.virtualize(GPU.address, 2, "vfio-pci")
    first, second = tree.virtual_functions(GPU.address)
    tree.unplug(first)
    assert inspect(tree).has_virtual_functions
    assert (tree.device_dir(GPU.address) / "virtfn0").is_symlink()
    tree.unplug(second)
    assert not inspect(tree).has_virtual_functions


H100_BARS = """\
0x00000000a0000000 0x00000000a0ffffff 0x0000000000140204
0x0000000000000000 0x0000000000000000 0x0000000000000000
0x0000206000000000 0x0000207fffffffff 0x000000000014220c
0x0000000000000000 0x0000000000000000 0x0000000000000000
0x0000208042000000 0x0000208043ffffff 0x000000000014220c
0x0000000000000000 0x0000000000000000 0x0000000000000000
0x0000000000000000 0x0000000000000000 0x0000000000000000
0x0000208000000000 0x0000208003ffffff 0x000000000014220c
"""
"""A GPU with 16 MiB, 128 GiB and 32 MiB, and the virtual functions' BARs behind them."""


@pytest.mark.parametrize(
    ("content", "memory"),
    [
        (H100_BARS, 256 << 30),
        ("0x1000 0x1fff 0x40101\n0xa0000000 0xa0ffffff 0x40200\n", 0),  # I/O and 32 bits
        ("0x2000000000 0x203fffffff 0x14220c\n", 1 << 30),
        ("nonsense\n", 0),
        (f"0x2000000000 0x{'f' * 300} 0x14220c\n", 0),
        ("", 0),
    ],
)
def test_the_memory_behind_the_bars_as_nvidias_driver_counts_it(
    tree: HostTree, content: str, memory: int
) -> None:
    tree.plug(GPU)
    assert inspect(tree).memory_bytes == 0, "there is no such file"
    tree.set_attribute(GPU.address, "resource", content.encode())
    assert inspect(tree).memory_bytes == memory
    tree.make_unreadable(GPU.address, "resource")
    assert (inspect(tree).memory_bytes, inspect(tree).fault) == (0, None)


def test_a_group_of_no_iommu_mode(tree: HostTree) -> None:
    tree.plug(GPU)
    assert not inspect(tree).without_iommu
    (tree.root / "sys/kernel/iommu_groups/51/name").write_text("vfio-noiommu\n")
    tree.remove_node("/dev/vfio/51")
    (tree.root / "dev/vfio/noiommu-51").write_text("")
    function = inspect(tree)
    assert function.without_iommu
    assert not function.has_node


def test_for_want_of_descriptors_nothing_is_said_of_any_device(
    tree: HostTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Issue 10, 4: every attribute became "cannot be read", and each GPU with it Unhealthy."""
    tree.plug(GPU)
    sysfs = reader(tree)
    sysfs.scan()

    def short(*_args: object) -> int:
        raise OSError(errno.ENFILE, os.strerror(errno.ENFILE))

    for name in ("open", "listdir"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, short)
            with pytest.raises(HostError, match=r"ENFILE.*fs\.file-max"):
                sysfs.scan()
            with pytest.raises(HostError, match=r"ENFILE.*fs\.file-max"):
                sysfs.inspect(PciAddress(GPU.address))


# --- what a pod has, whatever the selectors say -----------------------------------------------------------------


def test_what_a_pod_has_is_found_though_no_selector_chooses_it(tree: HostTree) -> None:
    tree.plug(GPU)
    tree.plug(AUDIO)
    tree.plug(NIC)
    narrowed = reader(tree, ("device=2bb1",))
    assert narrowed.scan() == narrowed.inspect(PciAddress(GPU.address)) == ()
    given = frozenset({PciAddress(GPU.address), PciAddress("0000:99:00.0")})
    group = [GPU.address, AUDIO.address]
    assert addresses(narrowed.scan(given)) == group
    assert addresses(narrowed.inspect(PciAddress(GPU.address), given)) == group
    assert addresses(narrowed.inspect(PciAddress(AUDIO.address), given)) == group, "it shares the group"
    assert narrowed.inspect(PciAddress(NIC.address), given) == ()


# --- the group beside its functions -------------------------------------------------------------------------------

RMRR = "0x00000000bdf6f000 0x00000000bdf7efff direct\n"
MSI = "0x00000000fee00000 0x00000000feefffff msi\n"


@pytest.mark.parametrize(
    ("regions", "direct"),
    [
        (RMRR + MSI, "0xbdf6f000 to 0xbdf7efff"),
        (MSI + RMRR, "0xbdf6f000 to 0xbdf7efff"),
        (RMRR.replace("direct", "direct-relaxable") + MSI, ""),
        (RMRR.replace("direct", "reserved"), ""),
        (MSI, ""),
        ("", ""),
        ("0xbdf6f000 direct\nnonsense\n\xff 0x1 direct\n", ""),
    ],
)
def test_a_region_that_firmware_reserves_one_to_one_is_of_the_whole_group(
    tree: HostTree, regions: str, direct: str
) -> None:
    tree.plug(GPU)
    tree.plug(AUDIO)
    assert inspect(tree).direct_region == "", "there is no such file"
    tree.reserve(51, regions)
    found = reader(tree).inspect(PciAddress(AUDIO.address))
    assert [f.direct_region for f in found] == [f.direct_region for f in reader(tree).scan()] == [direct] * 2


def test_regions_that_cannot_be_read_are_a_fault(tree: HostTree) -> None:
    tree.plug(GPU)
    (tree.root / "sys/kernel/iommu_groups/51/reserved_regions").mkdir()
    function = inspect(tree)
    assert function.fault is not None
    assert "iommu_groups/51" in function.fault


def test_members_of_the_group_that_are_no_pci_functions_are_read_with_their_drivers(tree: HostTree) -> None:
    tree.plug(GPU)
    tree.plug(AUDIO)
    tree.join_group(51, "AMDI0040:00", "sdhci-acpi")
    tree.join_group(51, "AMDI0010:01", None)
    assert [f.other_members for f in reader(tree).scan()] == [(("AMDI0040:00", "sdhci-acpi"),)] * 2
    tree.join_group(51, "AMDI0040:00", None)
    assert inspect(tree).other_members == ()
