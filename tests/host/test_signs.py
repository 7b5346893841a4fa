"""The passive signs of a dead function, read from a tree: what wakes nothing, waits for nothing, and is no guess."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from gpuactors.core.values.dead_signs import NO_ERRORS, DeadSign, KnownErrors
from gpuactors.core.values.model import PciAddress, PciFunction, Sign, pci_address
from gpuactors.core.values.selector import parse_selector
from gpuactors.host import signs
from gpuactors.host.pci_ids import PciIds
from gpuactors.host.root import HostRoot
from gpuactors.host.sysfs import SysfsReader
from gpuactors_simulation.host.tree import HostTree, PciSpec

GPU = PciSpec("0000:23:00.0", "10de", "2330", "030200", 51, driver="vfio-pci", bridges=("0000:20:01.0",))
ON_HOST = replace(GPU, driver="nvidia")
PF = PciSpec("0000:3b:00.0", "10de", "26b9", "030200", 60, driver="nvidia", total_vfs=1)
VF = "0000:3b:00.4"


@pytest.fixture
def tree(tmp_path: Path) -> HostTree:
    return HostTree(tmp_path)


def reader_of(tree: HostTree) -> SysfsReader:
    return SysfsReader(HostRoot(str(tree.root)), (parse_selector("vendor=10de"),), PciIds.open(None))


def inspect(tree: HostTree, address: str = GPU.address, errors: KnownErrors = NO_ERRORS) -> PciFunction:
    reader = reader_of(tree).choosing(None, errors)
    return next(f for f in reader.inspect(PciAddress(address)) if f.address == address)


class Opened:
    """Which attributes of a function were read."""

    def __init__(self, tree: HostTree, address: str = GPU.address) -> None:
        self._directory = tree.device_dir(address)
        self.names: list[str] = []

    def __call__(self, attribute: str, bytes_max: int) -> bytes:
        self.names.append(attribute)
        with (self._directory / attribute).open("rb") as file:
            return file.read(bytes_max)


@pytest.mark.parametrize("spec", [GPU, ON_HOST], ids=["vfio", "host"])
@pytest.mark.parametrize("state", ["D0", "D3hot"])
def test_a_powered_function_that_reads_all_ones_is_silent(tree: HostTree, spec: PciSpec, state: str) -> None:
    tree.plug(spec)
    tree.suspend(GPU.address, state)
    assert not inspect(tree).is_silent
    tree.fall_silent(GPU.address)
    function = inspect(tree)
    assert (function.is_silent, function.fault) == (True, None), "a sign is no fault"
    tree.answer_again(GPU.address)
    assert not inspect(tree).is_silent, "the reader keeps nothing"


@pytest.mark.parametrize("state", ["D3cold", "unknown", "error", "D1", "", "\xff"])
def test_the_configuration_space_of_a_function_in_another_state_is_not_read(
    tree: HostTree, state: str
) -> None:
    tree.plug(GPU)
    tree.fall_silent(GPU.address)
    tree.suspend(GPU.address, state)
    opened = Opened(tree)
    assert not signs.is_silent(opened, vfio_bound=True)
    assert "config" not in opened.names, "that would wake it"
    assert not inspect(tree).is_silent


@pytest.mark.parametrize(("bridge", "is_read"), [("D0\n", True), ("D3hot\n", False), ("D3cold\n", False)])
def test_a_suspended_bridge_is_not_woken(tree: HostTree, bridge: str, is_read: bool) -> None:
    tree.plug(GPU)
    tree.fall_silent(GPU.address)
    (tree.device_dir(GPU.address).resolve().parent / "power_state").write_text(bridge)
    opened = Opened(tree)
    assert signs.is_silent(opened, vfio_bound=True) is is_read
    assert ("config" in opened.names) is is_read
    assert inspect(tree).is_silent is is_read


def test_the_configuration_space_of_an_open_function_is_not_read_as_the_kernel_may_reset_it(
    tree: HostTree,
) -> None:
    tree.plug(GPU)
    tree.fall_silent(GPU.address)
    tree.open_group(51, 4711, "qemu")
    opened = Opened(tree)
    assert not signs.is_silent(opened, vfio_bound=True)
    assert "config" not in opened.names
    tree.kill(4711)
    assert inspect(tree).is_silent


def test_one_that_is_suspended_while_it_is_read_is_not_silent(tree: HostTree) -> None:
    tree.plug(GPU)
    opened = Opened(tree)

    def read(attribute: str, bytes_max: int) -> bytes:
        if attribute == "config":
            tree.suspend(GPU.address, "D3cold")
        return opened(attribute, bytes_max)

    assert not signs.is_silent(read, vfio_bound=True)


def test_a_virtual_function_is_silent_only_where_more_than_its_ids_read_all_ones(tree: HostTree) -> None:
    tree.plug(PF)
    tree.virtualize(PF.address, 1, "vfio-pci")
    assert (tree.device_dir(VF) / "config").read_bytes().startswith(b"\xff\xff\xff\xff")
    assert not inspect(tree, VF).is_silent
    tree.fall_silent(VF)
    assert inspect(tree, VF).is_silent
    tree.suspend(PF.address, "D3hot")
    assert not inspect(tree, VF).is_silent, "a virtual function of a suspended one reads all ones"


@pytest.mark.parametrize("attribute", ["power_state", "enable", "config"])
def test_what_cannot_be_read_is_no_sign_and_no_fault(tree: HostTree, attribute: str) -> None:
    tree.plug(GPU)
    tree.fall_silent(GPU.address)
    tree.remove_attribute(GPU.address, attribute)
    assert (inspect(tree).is_silent, inspect(tree).fault) == (False, None)
    tree.make_unreadable(GPU.address, attribute)
    assert (inspect(tree).is_silent, inspect(tree).fault) == (False, None)


@pytest.mark.parametrize("length", [0, 4, signs.CONFIG_BYTES - 1])
def test_a_short_read_of_the_configuration_space_is_no_sign(tree: HostTree, length: int) -> None:
    tree.plug(GPU)
    tree.set_attribute(GPU.address, "config", b"\xff" * length)
    assert not inspect(tree).is_silent


def test_one_fatal_error_is_a_sign_until_the_function_is_enumerated_again(tree: HostTree) -> None:
    tree.plug(GPU)
    assert not inspect(tree).has_fatal_errors
    tree.fail_fatally(GPU.address)
    assert inspect(tree).has_fatal_errors
    tree.unplug(GPU.address)
    tree.plug(GPU)
    assert not inspect(tree).has_fatal_errors


def test_the_count_of_the_root_port_directly_above_is_read_and_no_other(tree: HostTree) -> None:
    below_switch, without_port = (
        replace(GPU, address="0000:24:00.0", bridges=("0000:20:02.0", "0000:21:00.0")),
        replace(GPU, address="0000:25:00.0", bridges=()),
    )
    for spec in (GPU, below_switch, without_port):
        tree.plug(spec)
    assert [inspect(tree, spec.address).port_fatal_errors for spec in (GPU, below_switch, without_port)] == [
        0, None, None,
    ]  # fmt: skip
    tree.fail_fatally(GPU.address, by_port=True)
    function = inspect(tree)
    assert (function.port_fatal_errors, function.has_fatal_errors) == (1, False), "as before Linux 6.16"
    tree.set_attribute(GPU.address, "../aer_rootport_total_err_fatal", b"nonsense\n")
    assert (inspect(tree).port_fatal_errors, inspect(tree).fault) == (None, None)


def test_an_inspection_does_not_wait_for_the_reset_after_a_fatal_error(tree: HostTree) -> None:
    tree.plug(GPU)
    address, before = pci_address(GPU.address), inspect(tree)
    assert before.port_fatal_errors == 0
    tree.fail_fatally(GPU.address, by_port=True)
    tree.fall_silent(GPU.address)
    grown = inspect(tree, errors=KnownErrors({}, {address: 0}))
    assert (grown.port_fatal_errors, grown.is_silent) == (1, False), "its configuration space was not read"
    dead = KnownErrors({address: DeadSign(before.presence, Sign.PORT)}, {address: 1})
    assert not inspect(tree, errors=dead).is_silent, "nor then: the kernel may still reset it"
    dead_before = KnownErrors({address: DeadSign(before.presence + 1, Sign.PORT)}, {address: 1})
    assert inspect(tree, errors=dead_before).is_silent, "another function was dead"
    assert inspect(tree).is_silent, "nothing is known of it"
    tree.fail_fatally(GPU.address)
    assert (inspect(tree).has_fatal_errors, inspect(tree).is_silent) == (True, False)


def test_a_scan_does_not_wait_for_the_reset_either(tree: HostTree) -> None:
    tree.plug(GPU)
    tree.fall_silent(GPU.address)
    (before,) = reader_of(tree).scan()
    assert before.is_silent
    dead = KnownErrors({pci_address(GPU.address): DeadSign(before.presence, Sign.SILENT)}, {})
    (function,) = reader_of(tree).choosing(None, dead).scan()
    assert not function.is_silent, "its configuration space was not read"


def test_a_function_that_is_enumerated_again_has_another_presence(tree: HostTree) -> None:
    seen = set[int]()
    for _ in range(5):
        tree.plug(GPU)
        seen.add(inspect(tree).presence)
        tree.unplug(GPU.address)
    assert len(seen) == 5


@pytest.mark.parametrize(
    ("content", "has_errors"),
    [
        (b"DLP 0\nTOTAL_ERR_FATAL 1\n", True),
        (b"DLP 1\nTOTAL_ERR_FATAL 0\n", False),
        (b"TOTAL_ERR_FATAL 18446744073709551615\n", True),
        (b"TOTAL_ERR_NONFATAL 7\n", False),
        (b"TOTAL_ERR_FATAL -1\n", False),
        (b"TOTAL_ERR_FATAL\n", False),
        (b"\xff\x00", False),
        (b"", False),
    ],
)
def test_the_counter_is_the_total(tree: HostTree, content: bytes, has_errors: bool) -> None:
    tree.plug(GPU)
    tree.set_attribute(GPU.address, "aer_dev_fatal", content)
    assert inspect(tree).has_fatal_errors is has_errors
    tree.make_unreadable(GPU.address, "aer_dev_fatal")
    assert (inspect(tree).has_fatal_errors, inspect(tree).fault) == (False, None)


@pytest.mark.parametrize(
    ("content", "methods"),
    [
        (b"flr bus\n", ("flr", "bus")),
        (b"device_specific\n", ("device_specific",)),
        (b"\n", ()),
        (b"", ()),
        (b"flr \xff\xff <b> bus\n", ("flr", "bus")),
        (b"a " * 100, ("a",) * 8),
    ],
)
def test_the_reset_methods_in_the_kernels_order(
    tree: HostTree, content: bytes, methods: tuple[str, ...]
) -> None:
    tree.plug(GPU)
    tree.set_attribute(GPU.address, "reset_method", content)
    assert inspect(tree).reset_methods == methods


def test_a_kernel_that_does_not_name_the_methods_leaves_them_unknown(tree: HostTree) -> None:
    tree.plug(GPU)
    tree.remove_attribute(GPU.address, "reset_method")
    assert inspect(tree).reset_methods == (), "neither file: there is no method"
    tree.set_attribute(GPU.address, "reset", b"")
    assert inspect(tree).reset_methods is None, "before Linux 5.15"
    tree.make_unreadable(GPU.address, "reset_method")
    assert inspect(tree).reset_methods is None


def test_the_methods_on_the_hosts_driver_are_not_of_interest(tree: HostTree) -> None:
    tree.plug(ON_HOST)
    assert inspect(tree).reset_methods is None
