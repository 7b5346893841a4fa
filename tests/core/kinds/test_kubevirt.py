"""KubeVirt takes the answers of both APIs, for every kind of device and for several at once."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations, product
from pathlib import Path
from typing import Final

import pytest
from msgspec.structs import replace

from gpuactors.acts.disk import RealDisk
from gpuactors.acts.files import ClaimFiles
from gpuactors.core.claims import cdi
from gpuactors.core.claims.files import contents_of
from gpuactors.core.events.deviceplugin import AllocateAsked
from gpuactors.core.values.effects import Grant, Granted
from gpuactors.core.values.mediated import MediatedDevice
from gpuactors.core.values.model import DeviceId, DeviceKey, PciAddress, PciFunction, ResourceName
from gpuactors.core.values.own_resources import parse_model_rule
from gpuactors.core.values.selector import Selector, parse_selector
from gpuactors.core.values.vgpu import VendorVgpu
from tests.core.builders import H100, SETTINGS, gpu, mediated_device
from tests.core.gpus import cards
from tests.core.gpus.claim_core import DRIVER, ClaimCore, allocated, name
from tests.support.edits import nodes_of
from tests.support.kubevirt import HostDevice, NotReadableError, host_device, host_devices, start_container

GPUS: Final = ("0000:01:00.0", "0000:02:00.0")
PF, VFS = "0000:03:00.0", ("0000:03:00.4", "0000:03:00.5")
CARD, VGPUS = "0000:04:00.0", ("0000:04:00.4", "0000:04:00.5")
PARENT, MEDIATED = (
    "0000:05:00.0",
    ("83b8f4f2-509f-382f-3c1e-e6bfe0fa1001", "83b8f4f2-509f-382f-3c1e-e6bfe0fa1002"),
)
SERIAL: Final = ("83b8f4f2-509f-382f-3c1e-e6bfe0fa1003", "83b8f4f2-509f-382f-3c1e-e6bfe0fa1004")

PFS: Final = {PF: "xe", CARD: "nvidia"}

KINDS: Final[Mapping[str, tuple[str, str, tuple[str, str]]]] = {
    "whole functions": ("pci", H100, GPUS),
    "virtual functions": ("pci", f"{H100}_VF", VFS),
    "vGPUs by vendor VFIO": ("pci", "nvidia.com/NVIDIA_L40S-1Q", VGPUS),
    "mediated devices": ("mdev", "nvidia.com/NVIDIA_H100-4C", MEDIATED),
    "mediated devices without a PCI parent": ("mdev", "mdev-mtty/Dual_port_serial", SERIAL),
}
"""What KubeVirt makes of a device of the kind, with the resource and the two devices of the node."""


def _virtual(address: str, group: int, of: str) -> PciFunction:
    return replace(gpu(address, group), physical=PciAddress(of))


def _mediated(key: str, group: int, parent: str = PARENT) -> MediatedDevice:
    return mediated_device(DeviceKey(key), group, PciAddress(parent), cards.PROFILE)


def _serial(key: str, group: int) -> MediatedDevice:
    made = replace(_mediated(key, group), parent=None, parent_name="mtty", pcie_root=None)
    return replace(made, type_id="mtty-2", type_name="Dual port serial")


@pytest.fixture
def core() -> ClaimCore:
    return node()


def node(profile: str = "NVIDIA L40S-1Q", *selectors: Selector) -> ClaimCore:
    """A node with two devices of each kind, and these selectors beside the usual ones."""
    vgpu = VendorVgpu(1147, ((1147, profile),), driver_bind=1)
    functions = [
        *(gpu(address, n) for n, address in enumerate(GPUS, 1)),
        *(
            replace(gpu(pf, 30 + n, driver=d), has_virtual_functions=True)
            for n, (pf, d) in enumerate(PFS.items())
        ),
        *(_virtual(address, n, PF) for n, address in enumerate(VFS, 10)),
        *(replace(_virtual(a, n, CARD), driver="nvidia", vgpu=vgpu) for n, a in enumerate(VGPUS, 20)),
        gpu(PARENT, 40, driver="nvidia"),
    ]
    mediated = [
        *(_mediated(key, n) for n, key in enumerate(MEDIATED, 70)),
        *(_serial(key, n) for n, key in enumerate(SERIAL, 80)),
    ]
    core = ClaimCore(
        settings=replace(SETTINGS, selectors=(*SETTINGS.selectors, parse_selector("mdev=mtty-2"), *selectors))
    )
    core.functions = {f.address: f for f in functions}
    core.mediated = {device.key: device for device in mediated}
    core.scanned()
    return core


def grant(core: ClaimCore, resource: str, *devices: str) -> Grant:
    ids = tuple(map(DeviceId, devices))
    (answer,) = core.answers(AllocateAsked(core.token(), ResourceName(resource), (ids,)))
    assert isinstance(answer, Granted), answer
    return answer.containers[0]


def variables(*grants: Grant) -> Mapping[str, str]:
    """The variables of a container, which no two resources may have in common."""
    envs = [env for of_one in grants for env in of_one.envs]
    assert len({variable for variable, _ in envs}) == len(envs)
    return dict(envs)


# --- the device plugin ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 2])
def test_each_unit_is_one_device_of_the_vm_by_one_variable(core: ClaimCore, kind: str, count: int) -> None:
    of, resource, devices = KINDS[kind]
    answer = grant(core, resource, *devices[:count])
    assert len(answer.envs) == 1
    found = host_devices(variables(answer), [resource] * count)
    assert found == [HostDevice(of, address) for address in devices[:count]]
    assert len(answer.nodes) == len(set(answer.nodes)) == 1 + count, "/dev/vfio/vfio, and a group for each"
    with pytest.raises(NotReadableError):
        host_devices(variables(answer), [resource] * (count + 1))


def test_an_address_in_both_variables_would_fail_the_vm() -> None:
    """Why each kind has one variable alone."""
    both = {
        f"{prefix}_NVIDIA_COM_GH100_H100_SXM5_80GB": GPUS[0]
        for prefix in ("PCI_RESOURCE", "MDEV_PCI_RESOURCE")
    }
    with pytest.raises(NotReadableError, match="1 GPUs and 2 devices"):
        host_devices(both, [H100])


def test_a_vm_may_have_any_mix_of_kinds(core: ClaimCore) -> None:
    one = {kind: grant(core, resource, devices[0]) for kind, (_, resource, devices) in KINDS.items()}
    two = {kind: grant(core, resource, *devices) for kind, (_, resource, devices) in KINDS.items()}
    mixes = [mix for n in range(2, len(KINDS) + 1) for mix in combinations(KINDS, n)]
    for mix in mixes:
        for counts in product((1, 2), repeat=len(mix)):
            answers = [(one if count == 1 else two)[kind] for kind, count in zip(mix, counts, strict=True)]
            units = [(kind, n) for kind, count in zip(mix, counts, strict=True) for n in range(count)]
            gpus = [KINDS[kind][1] for kind, _ in units]
            found = host_devices(variables(*answers), gpus)
            assert {(d.kind, d.address) for d in found} == {(KINDS[k][0], KINDS[k][2][n]) for k, n in units}
            assert len(found) == len(units)


def test_a_profile_that_both_kinds_of_vgpu_have_is_one_resource_whose_units_may_be_mixed() -> None:
    core = node(cards.PROFILE)
    mixed = (VGPUS[0], MEDIATED[0], MEDIATED[1])
    answer = grant(core, cards.OF_PROFILE, *mixed)
    assert dict(answer.envs) == {
        "PCI_RESOURCE_NVIDIA_COM_NVIDIA_H100-4C": VGPUS[0],
        "MDEV_PCI_RESOURCE_NVIDIA_COM_NVIDIA_H100-4C": ",".join(MEDIATED),
    }
    assert answer.nodes == ("/dev/vfio/vfio", "/dev/vfio/20", "/dev/vfio/70", "/dev/vfio/71")
    found = host_devices(variables(answer), [cards.OF_PROFILE] * 3)
    assert [(d.kind, d.address) for d in found] == [("pci", VGPUS[0])] + [("mdev", key) for key in MEDIATED]


def test_functions_that_an_operator_gives_one_name_are_in_one_variable() -> None:
    own = ResourceName("example.com/any")
    core = node("NVIDIA L40S-1Q", *(parse_model_rule(f"10de:{model}={own}") for model in ("2330", "2331")))
    core.changed(replace(core.functions[PciAddress(GPUS[1])], device="2331"))
    answer = grant(core, own, *GPUS)
    assert answer.envs == (("PCI_RESOURCE_EXAMPLE_COM_ANY", ",".join(GPUS)),)


# --- claims -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kinds", [(kind,) for kind in KINDS] + [tuple(KINDS)], ids=" and ".join)
def test_a_claim_is_read_as_the_devices_that_it_has(
    core: ClaimCore, kinds: tuple[str, ...], tmp_path: Path
) -> None:
    """By the UUID of a mediated device, though it has a parent with a PCI address; else by the function's address."""
    claim = allocated(
        name("gpus", "0f1e2d3c-0000-4000-8000-000000000001"), *(KINDS[kind][2][0] for kind in kinds)
    )
    core.held_back = {"files"}
    core.prepare(claim)
    (act,) = core.wanted.files.values()
    assert claim.results is not None
    directories = {"cdi_dir": str(tmp_path / "cdi"), "plugin_dir": str(tmp_path / "plugins" / DRIVER)}
    ClaimFiles(RealDisk(), driver=DRIVER, **directories).write(contents_of(DRIVER, claim, act.devices))
    ids = [i for of_device in cdi.cdi_ids(DRIVER, claim.name.uid, claim.results) for i in of_device]
    nodes = start_container(tmp_path / "cdi", ids, tmp_path / "container")
    found = [
        host_device(tmp_path / "container", vmi_claim="x", request=result.request, resource_claim_name="gpus")
        for result in claim.results
    ]
    assert found == [HostDevice(KINDS[kind][0], KINDS[kind][2][0]) for kind in kinds]
    assert set(nodes) == {node for key in act.devices for node in nodes_of(key)}
    assert "/dev/vfio/vfio" in nodes
