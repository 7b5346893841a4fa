"""Every string that the host gives, with bytes that are no UTF-8, through the real readers: what comes out of them can
be written down (issue 10, 5). Behind them it is not checked again."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Collection
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import trio

from gpuactors.concurrency.latest import Latest
from gpuactors.config import Config
from gpuactors.control.served import ServedFile
from gpuactors.control.unix import UnixControl
from gpuactors.core.reports.snapshot import PollTarget
from gpuactors.core.values.model import PciAddress
from gpuactors.core.values.selector import parse_selector
from gpuactors.daemon.about import node_of
from gpuactors.grpc_trio import Owner
from gpuactors.host.pci_ids import PciIds
from gpuactors.host.procfs import ProcReader
from gpuactors.host.root import HostRoot
from gpuactors.host.sysfs import SysfsReader
from gpuactors.host.uevents import hint_of, parse_datagram, unix_uevents
from gpuactors.host.use import SysfsUse
from gpuactors.kubelet.kubelet import UnixKubelet
from gpuactors.ports.errors import HostError, KubeletError, PortError, StateFileError
from gpuactors_simulation.host.tree import HostTree, PciSpec

ODD = b"\xff\xc3\x28\xed\xa0\x80"
"""No start of a letter, a letter cut off, and a lone surrogate."""

GPU = PciSpec("0000:23:00.0", "10de", "2330", "030200", 51, driver="vfio-pci")
AUDIO = PciSpec("0000:23:00.1", "10de", "22ba", "040300", 51)
OTHER = PciSpec("0000:24:00.0", "10de", "2330", "030200", 52)
TARGETS = (PollTarget(51, (PciAddress(GPU.address),), may_open=False),)


def written(value: object) -> bytes:
    """As the journal writes it. Raises UnicodeEncodeError."""
    return msgspec.json.encode(value)


def odd_path(directory: Path) -> str:
    return f"{directory}/{os.fsdecode(ODD)}"


@pytest.fixture
def tree(tmp_path: Path) -> HostTree:
    tree = HostTree(tmp_path)
    for spec in (GPU, AUDIO, OTHER):
        tree.plug(spec)
    return tree


def test_sysfs(tree: HostTree, tmp_path: Path) -> None:
    names = tmp_path / "pci.ids"
    names.write_bytes(b"10de  NVIDIA " + ODD + b"\n\t2330  GH100 [H" + ODD + b"]\n")
    os.symlink(b"../drivers/" + ODD, tree.device_dir(AUDIO.address) / "driver")
    for name in ("vendor", "device", "class", "numa_node"):
        tree.set_attribute(OTHER.address, name, ODD)
    tree.remove_attribute(OTHER.address, "iommu_group")
    os.symlink(b"../../../kernel/iommu_groups/" + ODD, tree.device_dir(OTHER.address) / "iommu_group")
    for directory in (
        tree.device_dir(GPU.address) / "vfio-dev",
        tree.root / "sys/kernel/iommu_groups/51/devices",
    ):
        directory.mkdir(exist_ok=True)
        Path(os.fsdecode(os.fsencode(directory) + b"/" + ODD)).mkdir()
    Path(os.fsdecode(os.fsencode(tree.root / "sys/bus/pci/devices") + b"/" + ODD)).mkdir()
    Path(tree.root / "sys/kernel/iommu_groups/51/name").write_bytes(ODD)
    reader = SysfsReader(HostRoot(str(tree.root)), (parse_selector("vendor=10de"),), PciIds.open(names))
    found = {f.address: f for f in reader.scan()}
    assert found.keys() == {GPU.address, AUDIO.address, OTHER.address}
    assert r"\xff" in (found[PciAddress(AUDIO.address)].driver or "")
    assert found[PciAddress(OTHER.address)].fault
    assert "H" in (found[PciAddress(GPU.address)].model or "")
    written(tuple(found.values()))
    written(reader.inspect(PciAddress(GPU.address)))


def test_proc(tree: HostTree) -> None:
    tree.open_group(51, 4711)
    process = tree.root / "proc/4711"
    (process / "comm").write_bytes(b"qemu" + ODD + b"\n")
    (process / "cgroup").write_bytes(b"0::/kubepods.slice/" + ODD + b"/pod" + ODD + b"\n")
    os.symlink(b"/dev/" + ODD, process / "fd/77")
    found = ProcReader(HostRoot(str(tree.root))).find(TARGETS)
    assert found.holders[51][0].command.startswith("qemu")
    written(found)


@pytest.mark.trio
async def test_the_use_of_a_group(tree: HostTree) -> None:
    for name in ("enable", "power/runtime_status"):
        tree.set_attribute(GPU.address, name, ODD)
    with trio.fail_after(10):
        uses = await SysfsUse(HostRoot(str(tree.root)), "passive").observe(TARGETS, whole=True)
    assert uses[0].unseen
    written(uses)


@pytest.mark.parametrize(
    "field", ["ACTION", "SUBSYSTEM", "DEVPATH", "PCI_SLOT_NAME", "DEVNAME", "SEQNUM", "DRIVER"]
)
@pytest.mark.parametrize("subsystem", ["pci", "vfio", "vfio-dev"])
def test_uevents(field: str, subsystem: str) -> None:
    fields = {
        "ACTION": b"bind",
        "DEVPATH": f"/devices/pci0000:20/{GPU.address}".encode(),
        "SUBSYSTEM": subsystem.encode(),
        "PCI_SLOT_NAME": GPU.address.encode(),
        "DEVNAME": b"vfio/51",
    }
    for value in (ODD, fields.get(field, b"") + ODD):
        pairs = fields | {field: value}
        lines = [name.encode() + b"=" + content for name, content in pairs.items()]
        heard = parse_datagram(b"\0".join([pairs["ACTION"] + b"@" + pairs["DEVPATH"], *lines]))
        assert heard is not None
        written(dict(heard))
        written(hint_of(heard))


def test_a_fault_below_an_odd_host_root(tmp_path: Path) -> None:
    """A directory that an operator names need not be UTF-8 either."""
    tree = HostTree(Path(odd_path(tmp_path)))
    tree.plug(GPU)
    tree.set_attribute(GPU.address, "class", b"junk")
    reader = SysfsReader(HostRoot(str(tree.root)), (parse_selector("vendor=10de"),), PciIds.open(None))
    (found,) = reader.scan()
    assert r"\xff" in (found.fault or "")
    written(found)


def _missing_bus(directory: Path) -> None:
    SysfsReader(HostRoot(odd_path(directory)), (parse_selector("vendor=10de"),), PciIds.open(None)).scan()


def _missing_names(directory: Path) -> None:
    PciIds.open(odd_path(directory))


def _unreadable_file(directory: Path) -> None:
    os.makedirs(odd_path(directory) + "/served.json")
    trio.run(ServedFile(odd_path(directory)).read)


@pytest.mark.parametrize(
    ("read", "error"),
    [(_missing_bus, HostError), (_missing_names, HostError), (_unreadable_file, StateFileError)],
)
def test_paths_in_a_problem(read: Callable[[Path], None], error: type[PortError], tmp_path: Path) -> None:
    """As there."""
    with pytest.raises(error) as raised:
        read(tmp_path)
    assert r"\xff" in str(raised.value)
    written(str(raised.value))


@pytest.mark.trio
async def test_paths_in_a_problem_of_kubelet_or_the_uevents(tmp_path: Path) -> None:
    kubelet = UnixKubelet(odd_path(tmp_path))
    written(kubelet.absence)
    with pytest.raises(KubeletError) as no_directory:
        async with kubelet.sockets():
            pass
    with pytest.raises(HostError) as no_socket:
        async with unix_uevents(Path(odd_path(tmp_path)) / "u"):
            pass
    for raised in (no_directory, no_socket):
        assert r"\xff" in str(raised.value)
        written(str(raised.value))


@pytest.mark.trio
async def test_paths_in_the_answer_to_a_successor(tmp_path: Path) -> None:
    """What came of asking the daemon before to hand over is said in the log and kept in the journal."""
    state_dir = odd_path(tmp_path)
    os.mkdir(state_dir)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as no_stream, trio.fail_after(10):
        no_stream.bind(os.fsencode(f"{state_dir}/gpuactors.sock"))  # it cannot be dialled
        no_stream.listen()
        answer = await UnixControl(state_dir, Latest(frozenset[Owner]()), deadline_s=0.1).ask()
    assert r"\xff" in answer
    written(answer)


@pytest.mark.trio
async def test_names_beside_kubelets_socket(tmp_path: Path) -> None:
    directory = tmp_path / "device-plugins"
    directory.mkdir()
    others: Collection[str] = ()
    with socket.socket(socket.AF_UNIX) as listener, trio.fail_after(10):
        listener.bind(os.fsencode(directory) + b"/" + ODD)
        async with UnixKubelet(str(directory)).sockets() as sockets:
            async for seen in sockets:
                others = seen.others
                break
    assert len(others) == 1
    written(tuple(others))


def test_resources_that_were_served(tmp_path: Path) -> None:
    (tmp_path / "served.json").write_text('{"resources": {"nvidia.com/\\ud800": []}}')
    written(tuple(trio.run(ServedFile(str(tmp_path)).read)))


def test_the_hosts_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the node's where no other is given: in each file of the journal, and in each answer of `Status`."""
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(nodename=os.fsdecode(b"gpu-" + ODD)))
    name = node_of(Config())
    assert name.startswith(r"gpu-\xff")
    written(name)
