"""NVSwitches on trees: default selectors keep them, as one set. Boards whose switches are no functions have none."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuactors.config.settings import DEFAULT_SELECTORS
from gpuactors.core.deviceplugin.allocation import prefer
from gpuactors.core.deviceplugin.calls import devices_by_id
from gpuactors.core.events.deviceplugin import PreferenceRequest
from gpuactors.core.kinds.sets import DeviceSet, SetSource
from gpuactors.core.values.model import DeviceId, DeviceKey, PciFunction, ResourceName
from gpuactors.core.values.selector import parse_selector
from gpuactors.host.pci_ids import PciIds
from gpuactors.host.root import HostRoot
from gpuactors.host.sysfs import SysfsReader
from gpuactors_simulation.host.tree import HostTree, PciSpec
from tests.core.builders import Core, disk

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


def test_a_board_whose_switches_are_no_pci_functions_has_no_set_of_them(tmp_path: Path) -> None:
    """HGX B200 and B300: NVLink's bridges there are functions of a network card's vendor, 15b3."""
    bridges = [
        PciSpec(f"0000:{n:02x}:00.0", "15b3", "a2dc", "020700", n, driver="mlx5_core") for n in (200, 201)
    ]
    core = Core(*plugged(tmp_path, *gpus("2901"), *bridges))
    assert core.state.sets == ()
    assert core.state.index.switches == frozenset(), (
        "no claim is refused because of a fabric that cannot be seen"
    )
    assert not {s.address for s in bridges} & core.state.host.functions.keys()
    assert Core(disk("05:00.0", 5)).state.sets == ()
