"""NVSwitches on trees: default selectors keep them, as one set. Boards whose switches are no functions have none."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import trio
from msgspec.structs import replace

from gpuactors.config.settings import DEFAULT_SELECTORS
from gpuactors.core.deviceplugin.allocation import prefer
from gpuactors.core.deviceplugin.calls import devices_by_id
from gpuactors.core.events.deviceplugin import PreferenceRequest
from gpuactors.core.events.host import SetsObserved
from gpuactors.core.kinds.sets import NO_SETS, DeviceSet, KnownSets, SetSource
from gpuactors.core.state.gpus import GpuSettings
from gpuactors.core.values.model import DeviceId, DeviceKey, PciAddress, PciFunction, ResourceName
from gpuactors.core.values.selector import parse_selector
from gpuactors.core.values.slices import BlockKind, BlockReason
from gpuactors.host.nvlink_bridges import BRIDGES_READ_S, NvlinkBridges
from gpuactors.host.pci_ids import PciIds
from gpuactors.host.root import HostRoot
from gpuactors.host.sysfs import SysfsReader
from gpuactors.ports.errors import HostError
from gpuactors_simulation.host.tree import HostTree, PciSpec
from tests.core.builders import Core
from tests.core.gpus.claim_core import ClaimCore, allocated, name

A100 = ("20b2", "1af1", "nvidia.com/GA100_A100_NVSWITCH")
H100 = ("2330", "22a3", "nvidia.com/GH100_H100_NVSWITCH")


def plugged(directory: Path, *specs: PciSpec) -> tuple[PciFunction, ...]:
    """What a scan finds of these by the default selectors."""
    tree = HostTree(directory)
    for spec in specs:
        tree.plug(spec)
    selectors = tuple(map(parse_selector, DEFAULT_SELECTORS))
    return SysfsReader(HostRoot(str(tree.root)), selectors, PciIds.open(None)).scan()


def gpus(model: str) -> list[PciSpec]:
    return [PciSpec(f"0000:{n:02x}:00.0", "10de", model, "030200", n, driver="vfio-pci") for n in range(1, 9)]


def switches(model: str, driver: str | None = "vfio-pci") -> list[PciSpec]:
    return [
        PciSpec(f"0000:{n:02x}:00.0", "10de", model, "068000", n, driver=driver) for n in range(0xC1, 0xC5)
    ]


KEYS = tuple(DeviceKey(s.address) for s in switches("22a3"))


@pytest.mark.parametrize("board", [A100, H100], ids=["A100", "H100"])
def test_the_switches_of_a_board_are_offered_and_are_one_set(
    tmp_path: Path, board: tuple[str, str, str]
) -> None:
    gpu, switch, name = board
    core = Core(*plugged(tmp_path, *gpus(gpu), *switches(switch)))
    resource = ResourceName(name)
    assert core.device_list(resource).keys() == set(KEYS)
    assert core.state.sets == (DeviceSet(KEYS, SetSource.SWITCHES, "nvswitches"),)
    ids = tuple(map(DeviceId, KEYS))
    chosen = prefer(PreferenceRequest(ids, (), 4), devices_by_id(core.state, resource), sets=core.state.sets)
    assert chosen == ids


def test_gpus_are_chosen_as_before_beside_the_switches(tmp_path: Path) -> None:
    core = Core(*plugged(tmp_path, *gpus("2330"), *switches("22a3")))
    (resource,) = (r for r in core.state.published.device_lists if "SWITCH" not in r)
    ids = tuple(DeviceId(s.address) for s in gpus("2330"))
    chosen = prefer(PreferenceRequest(ids, (), 2), devices_by_id(core.state, resource), sets=core.state.sets)
    assert chosen == ids[:2]


def test_switches_that_the_host_has_are_a_set_too(tmp_path: Path) -> None:
    core = Core(*plugged(tmp_path, *switches("22a3", "nvidia-nvswitch")))
    assert [s.devices for s in core.state.sets] == [KEYS]
    assert len(core.state.index.switches) == 4


def b200(directory: Path, vpd: bytes, driver: str = "mlx5_core", class_code: str = "020700") -> HostTree:
    """A board whose NVSwitches are no PCI functions: two bridges of a network card's ids, with this VPD."""
    tree = HostTree(directory)
    for spec in gpus("2901"):
        tree.plug(replace(spec, driver="nvidia"))
    for number in (0xC8, 0xC9):
        address = f"0000:{number:02x}:00.0"
        tree.plug(PciSpec(address, "15b3", "1021", class_code, number, driver=driver))
        tree.set_attribute(address, "vpd", vpd)
        if driver == "mlx5_core":
            port = tree.root / f"sys/class/infiniband/mlx5_{number}"
            port.mkdir(parents=True)
            (port / "device").symlink_to(tree.device_dir(address))
    return tree


BRIDGE = b"\x82\x14\x00NVIDIA HGX switch mgmt\x90\x20\x00V0\x0bSMDL=SW_MNG"
CARD = b"\x82\x14\x00NVIDIA ConnectX-7 HCA\x90\x20\x00PN\x08MCX75310"


async def bridges(tree: HostTree) -> KnownSets:
    with trio.fail_after(30):
        return await NvlinkBridges(HostRoot(str(tree.root))).read()


def claims_core(tree: HostTree, known: KnownSets, *, allowed: bool = False) -> ClaimCore:
    """The core of a node with claims that has scanned the tree and read the bridges."""
    selectors = tuple(map(parse_selector, DEFAULT_SELECTORS))
    functions = SysfsReader(HostRoot(str(tree.root)), selectors, PciIds.open(None)).scan()
    core = ClaimCore(*functions, gpu_settings=GpuSettings(nvswitch_allowed=allowed))
    core.feed(SetsObserved(SetSource.SWITCHES, known))
    return core


async def test_the_bridges_to_switches_that_are_no_functions_are_the_sign_of_the_hosts_fabric(
    tmp_path: Path,
) -> None:
    tree = b200(tmp_path, BRIDGE)
    known = await bridges(tree)
    assert known == KnownSets(bridges=(PciAddress("0000:c8:00.0"), PciAddress("0000:c9:00.0")))
    core = claims_core(tree, known)
    assert core.state.sets == (), "there is no switch to give away"
    gpu = DeviceKey("0000:01:00.0")
    assert core.state.offered.devices[gpu].blocked == BlockReason(BlockKind.UNHEALTHY, "FabricOfHost")
    reason = core.refusal(core.prepare(allocated(name("one"), gpu)))
    assert "(0000:c8:00.0 is the bridge to its NVSwitches, and on a driver of the host)" in reason
    assert "--nvswitch allow" in reason
    assert claims_core(tree, known, allowed=True).state.offered.devices[gpu].blocked is None


async def test_a_gpu_that_is_on_vfio_is_given_beside_the_bridges(tmp_path: Path) -> None:
    tree = b200(tmp_path, BRIDGE)
    tree.unbind("0000:01:00.0")
    tree.bind("0000:01:00.0", "vfio-pci")
    core = claims_core(tree, await bridges(tree))
    assert core.state.offered.devices[DeviceKey("0000:01:00.0")].blocked is None


@pytest.mark.parametrize(
    ("vpd", "driver", "class_code"),
    [(CARD, "mlx5_core", "020700"), (BRIDGE, "mlx5_core", "020000"), (BRIDGE, "vfio-pci", "020700")],
    ids=["a network card", "of Ethernet", "given to a service VM"],
)
async def test_what_looks_like_a_bridge_is_no_sign(
    tmp_path: Path, vpd: bytes, driver: str, class_code: str
) -> None:
    tree = b200(tmp_path, vpd, driver, class_code)
    assert await bridges(tree) == NO_SETS
    gpu = DeviceKey("0000:01:00.0")
    assert claims_core(tree, NO_SETS).state.offered.devices[gpu].blocked is None


async def test_the_vpd_of_a_function_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree, reader = b200(tmp_path, BRIDGE), NvlinkBridges(HostRoot(str(tmp_path)))
    known = await reader.read()
    reads: list[str] = []
    monkeypatch.setattr("gpuactors.host.nvlink_bridges.read_plain", lambda path, _: reads.append(path))
    assert await reader.read() == known
    assert reads == []
    assert len(known.bridges) == 2
    tree.unplug("0000:c8:00.0")
    assert len((await reader.read()).bridges) == 1


async def test_a_host_without_infiniband_or_with_an_unreadable_vpd_has_no_sign(tmp_path: Path) -> None:
    assert await bridges(HostTree(tmp_path / "none")) == NO_SETS
    tree = b200(tmp_path / "some", BRIDGE)
    for address in ("0000:c8:00.0", "0000:c9:00.0"):
        tree.remove_attribute(address, "vpd")
    assert await bridges(tree) == NO_SETS


async def test_a_vpd_that_hangs_is_an_error_with_a_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()

    def hanging(path: str, _: int) -> bytes:
        answers.wait(60)
        raise OSError(5, "Input/output error", path)

    tree = b200(tmp_path, BRIDGE)
    assert BRIDGES_READ_S == 5.0
    monkeypatch.setattr("gpuactors.host.nvlink_bridges.read_plain", hanging)
    monkeypatch.setattr("gpuactors.host.nvlink_bridges.BRIDGES_READ_S", 0.05)
    with pytest.raises(HostError, match="it is not known whether the host runs an NVLink fabric"):
        await bridges(tree)
    answers.set()


def test_bridges_that_were_never_there_are_no_news_and_their_end_is() -> None:
    core = Core()
    core.feed(SetsObserved(SetSource.SWITCHES, NO_SETS))
    assert core.state.host.sets == {}
    bridge = KnownSets(bridges=(PciAddress("0000:c8:00.0"),))
    for known in (bridge, NO_SETS):
        core.feed(SetsObserved(SetSource.SWITCHES, known))
        assert core.state.known_sets.bridges == known.bridges
    assert [line.fields["source"] for line in core.logged("sets.read")] == ["the NVSwitches"] * 2
