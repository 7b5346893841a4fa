"""Virtual functions of the fake node come, go and wait as those of QEMU's igb did on the kernels 6.1 and 6.12."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpuactors_simulation.host.kernel import FakeKernel, SleepsError
from gpuactors_simulation.host.tree import HostTree, PciSpec, Uevent

PF = PciSpec("0000:41:00.0", "8086", "10c9", "020000", 71, driver="igb", total_vfs=7, vf_device="10ca")
FIRST, SECOND = "0000:41:00.4", "0000:41:00.5"


def seen(uevents: tuple[Uevent, ...]) -> list[str]:
    return [f"{u.action} {u.subsystem} {u.devpath.rpartition('/')[2]}" for u in uevents]


@pytest.fixture
def tree(tmp_path: Path) -> HostTree:
    tree = HostTree(tmp_path)
    tree.plug(PF)
    return tree


def link(tree: HostTree, address: str, name: str) -> str | None:
    path = tree.device_dir(address) / name
    return path.readlink().name if path.is_symlink() else None


def test_the_links_come_after_add_and_before_change(tree: HostTree) -> None:
    at: dict[str, tuple[str | None, str | None]] = {}
    for uevent in tree.virtualize_steps(PF.address, 2):
        for name in seen((uevent,)):
            if FIRST in name:
                at[name] = (link(tree, FIRST, "physfn"), link(tree, PF.address, "virtfn0"))
    assert at == {f"add pci {FIRST}": (None, None), f"change pci {FIRST}": (PF.address, FIRST)}


@pytest.mark.parametrize("silent", [False, True])
def test_one_file_that_only_they_have_is_there_from_the_first_uevent_to_the_last(
    tmp_path: Path, silent: bool
) -> None:
    tree = HostTree(tmp_path, waits_silently=silent)
    tree.plug(PF)

    def has_file(address: str) -> bool:
        return (tree.device_dir(address) / "sriov_vf_msix_count").exists()

    assert not has_file(PF.address)
    made = tree.virtualize_steps(PF.address, 1, "vfio-pci")
    assert seen((next(made),)) == [f"add pci {FIRST}"]
    assert has_file(FIRST)
    list(made)
    tree.open_group(72, 4711)
    tree.virtualize(PF.address, 0)
    assert (link(tree, FIRST, "physfn"), has_file(FIRST)) == (None, True), "its removal waits"


def test_each_is_added_changed_and_bound_before_the_next_one(tree: HostTree) -> None:
    uevents = tree.virtualize(PF.address, 2, "vfio-pci")
    one = [
        f"add pci {FIRST}",
        f"change pci {FIRST}",
        "add vfio 72",
        "add vfio-dev vfio0",
        f"bind pci {FIRST}",
    ]
    two = [
        f"add pci {SECOND}",
        f"change pci {SECOND}",
        "add vfio 73",
        "add vfio-dev vfio1",
        f"bind pci {SECOND}",
    ]
    assert seen(uevents) == [*one, *two, f"change pci {PF.address}"]
    assert [tree.functions[vf].device for vf in (FIRST, SECOND)] == ["10ca", "10ca"]
    assert not (tree.device_dir(FIRST) / "sriov_totalvfs").exists()
    assert (tree.device_dir(PF.address) / "sriov_numvfs").read_text() == "2\n"


def test_a_write_of_zero_takes_all_and_names_no_physical_function(tree: HostTree) -> None:
    tree.virtualize(PF.address, 2)
    assert seen(tree.virtualize(PF.address, 0)) == [f"remove pci {FIRST}", f"remove pci {SECOND}"]
    assert tree.virtual_functions(PF.address) == ()
    assert link(tree, PF.address, "virtfn0") is None


@pytest.mark.parametrize("silent", [False, True])
def test_a_removal_waits_for_a_holder_and_the_next_ones_with_it(tmp_path: Path, silent: bool) -> None:
    """While it waits it has neither driver nor `physfn`, and the next one is as it was."""
    tree = HostTree(tmp_path, waits_silently=silent)
    tree.plug(PF)
    tree.virtualize(PF.address, 2, "vfio-pci")
    tree.open_group(72, 4711)
    assert seen(tree.virtualize(PF.address, 0)) == ([] if silent else ["remove vfio-dev vfio0"])
    assert tree.is_waiting(PF.address)
    assert (tree.driver_of(FIRST), link(tree, FIRST, "physfn")) == (None, None)
    assert (tree.driver_of(SECOND), link(tree, SECOND, "physfn")) == ("vfio-pci", PF.address)
    hangs = [name for name in ("sriov_numvfs", "uevent") if (tree.device_dir(PF.address) / name).is_fifo()]
    assert hangs == ["sriov_numvfs", "uevent"][: 1 + silent], "their readers wait"
    assert seen(tree.kill(4711)) == [
        *["remove vfio-dev vfio0"] * silent, "remove vfio 72", f"unbind pci {FIRST}", f"remove pci {FIRST}",
        "remove vfio-dev vfio1", "remove vfio 73", f"unbind pci {SECOND}", f"remove pci {SECOND}",
    ]  # fmt: skip
    assert not tree.is_waiting(PF.address)
    assert (tree.device_dir(PF.address) / "sriov_numvfs").read_text() == "0\n"


@pytest.mark.parametrize("act", ["unbind", "unplug"])
def test_their_removal_waits_for_an_unbind_that_is_under_way(tree: HostTree, act: str) -> None:
    """The writer of `sriov_numvfs` sleeps on the lock of the one whose holder is waited for."""
    tree.virtualize(PF.address, 2, "vfio-pci")
    tree.open_group(72, 4711)
    assert seen(tree.unbind(FIRST) if act == "unbind" else tree.unplug(FIRST)) == ["remove vfio-dev vfio0"]
    assert seen(tree.virtualize(PF.address, 0)) == []
    assert tree.is_waiting(PF.address)
    assert (tree.driver_of(SECOND), link(tree, SECOND, "physfn")) == ("vfio-pci", PF.address)
    assert seen(tree.kill(4711)) == [
        "remove vfio 72", f"unbind pci {FIRST}", f"remove pci {FIRST}",
        "remove vfio-dev vfio1", "remove vfio 73", f"unbind pci {SECOND}", f"remove pci {SECOND}",
    ]  # fmt: skip
    assert not tree.is_waiting(PF.address)
    assert tree.virtual_functions(PF.address) == ()


def test_the_driver_of_the_physical_function_takes_them_with_it(tree: HostTree) -> None:
    """Its link goes first, its `unbind` is the last."""
    tree.virtualize(PF.address, 2, "vfio-pci")
    tree.open_group(73, 4711)
    uevents = tree.unbind(PF.address)
    assert seen(uevents) == [
        "remove vfio-dev vfio0", "remove vfio 72", f"unbind pci {FIRST}", f"remove pci {FIRST}",
        "remove vfio-dev vfio1",
    ]  # fmt: skip
    assert tree.driver_of(PF.address) is None
    assert tree.is_waiting(PF.address)
    rest = ["remove vfio 73", f"unbind pci {SECOND}", f"remove pci {SECOND}", f"unbind pci {PF.address}"]
    assert seen(tree.close_group(73, 4711)) == rest
    assert not tree.is_waiting(PF.address)


def test_an_unplug_of_the_physical_function_takes_them_with_it(tree: HostTree) -> None:
    tree.virtualize(PF.address, 1, "vfio-pci")
    assert seen(tree.unplug(PF.address))[-3:] == [
        f"remove pci {FIRST}", f"unbind pci {PF.address}", f"remove pci {PF.address}",
    ]  # fmt: skip
    assert not tree.functions


def test_a_driver_that_leaves_sriov_on_leaves_them(tmp_path: Path) -> None:
    """pci-pf-stub: then vfio-pci refuses the physical function, and without a driver nobody switches SR-IOV off."""
    tree = HostTree(tmp_path)
    kernel = FakeKernel(tree)
    kernel.sriov_drivers["pci-pf-stub"] = None
    kernel.plug(replace(PF, driver="pci-pf-stub"))
    path = f"{tree.root}/sys/bus/pci/devices/{PF.address}"
    kernel.write(f"{path}/sriov_numvfs", "2\n")
    tree.unbind(PF.address)
    assert tree.virtual_functions(PF.address) == (FIRST, SECOND)
    kernel.write(f"{path}/driver_override", "vfio-pci\n")
    with pytest.raises(OSError, match="busy"):
        kernel.write(f"{tree.root}/sys/bus/pci/drivers/vfio-pci/bind", PF.address)
    with pytest.raises(OSError, match="No such") as caught:
        kernel.write(f"{path}/sriov_numvfs", "0\n")
    assert caught.value.errno == errno.ENOENT


def test_of_a_physical_function_on_vfio_pci_they_are_on_it_and_want_a_token(tmp_path: Path) -> None:
    """`enable_sriov`: each gets the override vfio-pci, and a device of it is refused (EACCES)."""
    tree = HostTree(tmp_path)
    kernel = FakeKernel(tree)
    kernel.sriov_drivers["vfio-pci"] = "vfio-pci"
    kernel.plug(replace(PF, driver="vfio-pci"))
    path = f"{tree.root}/sys/bus/pci/devices/{PF.address}"
    kernel.write(f"{path}/sriov_numvfs", "2\n")
    assert [kernel.override(vf) for vf in (FIRST, SECOND)] == ["vfio-pci", "vfio-pci"]
    assert [tree.driver_of(vf) for vf in (FIRST, SECOND)] == ["vfio-pci", "vfio-pci"]
    with pytest.raises(OSError, match="denied") as caught:
        tree.open_group(72, 4711)
    assert caught.value.errno == errno.EACCES
    tree.open_group(71, 4711)
    with pytest.raises(SleepsError):
        kernel.write(f"{tree.root}/sys/bus/pci/drivers/vfio-pci/unbind", PF.address)
    assert tree.virtual_functions(PF.address) == (), "they go before the driver waits for its own holder"


def test_half_of_them_are_removed_by_hand(tree: HostTree) -> None:
    """drivers/pci/iov.c, pci_iov_remove_virtfn: their links stay on the physical function, for good."""
    tree.virtualize(PF.address, 2)
    assert seen(tree.unplug(FIRST)) == [f"remove pci {FIRST}"]
    assert tree.virtual_functions(PF.address) == (SECOND,)
    assert link(tree, PF.address, "virtfn0") == FIRST
    assert seen(tree.virtualize(PF.address, 0)) == [f"remove pci {SECOND}"]
    assert link(tree, PF.address, "virtfn0") == FIRST
    with pytest.raises(ValueError, match="removed by hand"):
        tree.virtualize(PF.address, 2)


def test_without_acs_they_share_a_group(tmp_path: Path) -> None:
    tree = HostTree(tmp_path)
    tree.plug(replace(PF, vfs_share_group=True))
    tree.virtualize(PF.address, 2, "vfio-pci")
    assert tree.group_members(72) == {FIRST, SECOND}
    tree.open_group(72, 4711)
    assert tree.is_open(SECOND)


def test_thirty_two_of_them_have_addresses_in_the_next_slots(tmp_path: Path) -> None:
    tree = HostTree(tmp_path)
    tree.plug(replace(PF, total_vfs=32))
    tree.virtualize(PF.address, 32)
    virtual = tree.virtual_functions(PF.address)
    assert (len(virtual), virtual[0], virtual[4], virtual[-1]) == (32, FIRST, "0000:41:01.0", "0000:41:04.3")
