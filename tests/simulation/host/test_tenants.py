"""Tenants of a fake node: they open and close groups as the kernel lets them."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuactors_simulation.host.tree import HostTree, PciSpec, Uevent

GPU = PciSpec("0000:23:00.0", "10de", "2330", "030200", 51, driver="vfio-pci")
AUDIO = replace(GPU, address="0000:23:00.1", device="22ba", class_code="040300")
OTHER = replace(GPU, address="0000:24:00.0", group=52)


@pytest.fixture
def tree(tmp_path: Path) -> HostTree:
    tree = HostTree(tmp_path)
    tree.plug(GPU)
    return tree


def names(uevents: tuple[Uevent, ...]) -> list[str]:
    return [f"{uevent.action} {uevent.subsystem}" for uevent in uevents]


def state(tree: HostTree, address: str) -> tuple[str, str]:
    directory = tree.device_dir(address)
    return (directory / "enable").read_text().strip(), (
        directory / "power/runtime_status"
    ).read_text().strip()


FREE, USED = ("0", "suspended"), ("1", "active")


def open_says(tree: HostTree, group: int) -> int | None:
    """The error of a probe's open."""
    try:
        tree.open_node(str(tree.root / f"dev/vfio/{group}"))
    except OSError as error:
        return error.errno
    return None


def test_the_kernels_table(tree: HostTree) -> None:
    assert (state(tree, GPU.address), open_says(tree, 51)) == (FREE, None)
    tree.open_group(51, 4711, device=False)
    assert (state(tree, GPU.address), open_says(tree, 51), tree.holder_of(51)) == (FREE, errno.EBUSY, 4711)
    tree.open_device(GPU.address, 4711)
    assert (state(tree, GPU.address), open_says(tree, 51)) == (USED, errno.EBUSY)
    assert tree.close_group(51, 4711) == ()
    assert (state(tree, GPU.address), open_says(tree, 51), tree.holder_of(51)) == (FREE, None, None)
    assert tree.probed == ("/dev/vfio/51",) * 4


def test_a_group_opens_once(tree: HostTree) -> None:
    tree.open_group(51, 4711)
    for pid in (4711, 4712):
        with pytest.raises(OSError, match="/dev/vfio/51") as caught:
            tree.open_group(51, pid)
        assert caught.value.errno == errno.EBUSY
    assert not (tree.root / "proc/4712").exists()
    with pytest.raises(FileNotFoundError):
        tree.open_group(99, 4711)
    tree.kill(4711)
    tree.open_group(51, 4712)
    assert tree.holder_of(51) == 4712


def test_a_group_of_two_functions(tree: HostTree) -> None:
    tree.plug(AUDIO)
    tree.open_group(51, 4711, device=False)
    tree.open_device(AUDIO.address, 4711)
    assert (state(tree, GPU.address), state(tree, AUDIO.address)) == (FREE, USED)
    tree.kill(4711)
    tree.open_group(51, 4711)
    assert (state(tree, GPU.address), state(tree, AUDIO.address)) == (USED, USED)


def test_what_cannot_be_done(tree: HostTree) -> None:
    tree.plug(OTHER)
    tree.open_group(51, 4711)
    with pytest.raises(ValueError, match="open already"):
        tree.open_device(GPU.address, 4711)
    with pytest.raises(ValueError, match="does not hold its group"):
        tree.open_device(OTHER.address, 4711)
    with pytest.raises(ValueError, match="does not hold group 51"):
        tree.close_group(51, 4712)
    with pytest.raises(ValueError, match="no process 4712"):
        tree.kill(4712)


def test_enable_is_a_count(tree: HostTree) -> None:
    tree.set_attribute(GPU.address, "enable", b"1\n")
    tree.open_group(51, 4711)
    assert state(tree, GPU.address) == ("2", "active")
    tree.kill(4711)
    assert state(tree, GPU.address) == ("1", "suspended")


def test_proc_shows_it(tree: HostTree) -> None:
    tree.open_group(51, 4711, "a-name-of-many-characters", "0f3c1f0e-8a4b-4c57-9d3e-5b6a7c8d9e0f")
    process = tree.root / "proc/4711"
    assert (process / "comm").read_text() == "a-name-of-many-\n"
    assert (
        "kubepods-burstable-pod0f3c1f0e_8a4b_4c57_9d3e_5b6a7c8d9e0f.slice" in (process / "cgroup").read_text()
    )
    links = {name: os.readlink(process / "fd" / name) for name in os.listdir(process / "fd")}
    node, container = str(tree.root / "dev/vfio/51"), str(tree.root / "dev/vfio/vfio")
    assert [links[n] for n in ("3", "4", "5")] == [node, container, "anon_inode:[vfio-device]"]
    assert len(links) == 6
    tree.close_group(51, 4711)
    assert sorted(os.listdir(process / "fd")) == ["0", "1", "2"]  # it lives on
    tree.kill(4711)
    assert os.listdir(tree.root / "proc") == []


def test_on_the_older_kernel_an_unbind_waits_and_says_nothing(tmp_path: Path) -> None:
    tree = HostTree(tmp_path, waits_silently=True)
    tree.plug(GPU)
    tree.open_group(51, 4711)
    assert tree.unbind(GPU.address) == ()
    assert tree.is_waiting(GPU.address)
    directory = tree.device_dir(GPU.address)
    assert not (directory / "driver").is_symlink()
    assert (directory / "vfio-dev").is_dir()
    assert (directory / "uevent").is_fifo(), "its readers sleep"
    assert (directory / "driver_override").is_fifo()
    assert (tree.driver_of(GPU.address), open_says(tree, 51)) == (None, errno.EBUSY)
    assert state(tree, GPU.address) == USED
    assert names(tree.kill(4711)) == ["remove vfio-dev", "remove vfio", "unbind pci"]
    assert not tree.is_waiting(GPU.address)
    assert not (directory / "uevent").exists()
    assert not (tree.root / "dev/vfio/51").exists()
    tree.bind(GPU.address, "vfio-pci")
    tree.open_group(51, 4712)
    assert tree.unplug(GPU.address) == ()
    assert names(tree.kill(4712)) == ["remove vfio-dev", "remove vfio", "unbind pci", "remove pci"]
    assert tree.functions == {}


def test_an_unbind_waits_for_the_holder(tree: HostTree) -> None:
    tree.open_group(51, 4711)
    assert names(tree.unbind(GPU.address)) == ["remove vfio-dev"]
    assert tree.is_waiting(GPU.address)
    assert not (tree.device_dir(GPU.address) / "driver").is_symlink()
    assert (tree.root / "dev/vfio/51").exists()
    assert (tree.driver_of(GPU.address), open_says(tree, 51)) == (None, errno.EBUSY)
    with pytest.raises(ValueError, match="waits for its holder"):
        tree.bind(GPU.address, "nvidia")
    with pytest.raises(ValueError, match="waits for its holder"):
        tree.unplug(GPU.address)
    assert names(tree.kill(4711)) == ["remove vfio", "unbind pci"]
    assert not tree.is_waiting(GPU.address)
    assert not (tree.root / "dev/vfio/51").exists()
    assert state(tree, GPU.address) == ("0", "active")
    tree.bind(GPU.address, "vfio-pci")
    assert state(tree, GPU.address) == FREE


def test_an_unplug_waits_for_the_holder(tree: HostTree) -> None:
    tree.open_group(51, 4711)
    assert names(tree.unplug(GPU.address)) == ["remove vfio-dev"]
    assert tree.device_dir(GPU.address).is_dir()
    assert names(tree.close_group(51, 4711)) == ["remove vfio", "unbind pci", "remove pci"]
    assert tree.functions == {}
    assert not (tree.root / "sys/bus/pci/devices" / GPU.address).is_symlink()


def test_the_node_stays_for_the_function_that_waits(tree: HostTree) -> None:
    tree.plug(AUDIO)
    tree.open_group(51, 4711, device=False)
    tree.open_device(GPU.address, 4711)
    assert names(tree.unbind(GPU.address)) == ["remove vfio-dev"]
    assert names(tree.unbind(AUDIO.address)) == ["remove vfio-dev", "unbind pci"]
    assert (tree.root / "dev/vfio/51").exists()
    assert names(tree.kill(4711)) == ["remove vfio", "unbind pci"]


def test_an_unbind_does_not_wait_for_an_open_node_alone(tree: HostTree) -> None:
    tree.open_group(51, 4711, device=False)
    assert names(tree.unbind(GPU.address)) == ["remove vfio-dev", "remove vfio", "unbind pci"]
    assert tree.holder_of(51) is None
    tree.bind(GPU.address, "vfio-pci")
    links = [os.readlink(tree.root / "proc/4711/fd" / n) for n in os.listdir(tree.root / "proc/4711/fd")]
    assert f"{tree.root}/dev/vfio/51 (deleted)" in links
    assert str(tree.root / "dev/vfio/51") not in links
    assert open_says(tree, 51) is None
    tree.kill(4711)


@settings(max_examples=40, deadline=None)
@given(
    order=st.lists(
        st.tuples(
            st.sampled_from(["open", "open group", "close", "kill", "plug", "unplug", "bind", "unbind"]),
            st.sampled_from([GPU, AUDIO, OTHER]),
            st.sampled_from([1, 2]),
        ),
        max_size=30,
    )
)
def test_in_any_order_one_holder_and_its_marks(order: list[tuple[str, PciSpec, int]]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        tree = HostTree(Path(directory))
        for act, spec, pid in order:
            try:
                do(tree, act, spec, pid)
            except (ValueError, OSError):
                continue
            check(tree)


def do(tree: HostTree, act: str, spec: PciSpec, pid: int) -> None:
    assert spec.group is not None
    match act:
        case "open" | "open group":
            tree.open_group(spec.group, pid, device=act == "open")
        case "close":
            tree.close_group(spec.group, pid)
        case "kill":
            tree.kill(pid)
        case "plug":
            tree.plug(spec)
        case "unplug":
            tree.unplug(spec.address)
        case "bind":
            tree.bind(spec.address, "vfio-pci")
        case _:
            tree.unbind(spec.address)


def check(tree: HostTree) -> None:
    """Whatever was done before: who holds a group is to be seen where the kernel shows it, and nowhere else."""
    shown: dict[int, list[int]] = {}
    devices: dict[int, int] = {}
    for pid in map(int, os.listdir(tree.root / "proc")):
        links = [os.readlink(entry.path) for entry in os.scandir(tree.root / f"proc/{pid}/fd")]
        devices[pid] = links.count("anon_inode:[vfio-device]")
        for group in (51, 52):
            if str(tree.root / f"dev/vfio/{group}") in links:
                shown.setdefault(group, []).append(pid)
    for group in (51, 52):
        holder = tree.holder_of(group)
        assert shown.get(group, []) == ([] if holder is None else [holder])
        if holder is not None:
            assert (tree.root / f"dev/vfio/{group}").exists()
    enabled = [a for a in tree.functions if state(tree, a)[0] == "1"]
    assert sum(devices.values()) == len(enabled)
    for address, spec in tree.functions.items():
        if address in enabled:
            assert spec.group is not None
            assert tree.holder_of(spec.group) is not None
            assert state(tree, address) == USED
        else:
            assert not tree.is_waiting(address)
