"""Virtual functions as a kind: which functions are such devices, and what its answers have beside those of whole
functions. Both APIs: `test_virtual_functions.py` of the core."""

from __future__ import annotations

from typing import Final

import pytest
from msgspec.structs import replace

from gpuactors.core.kinds import table
from gpuactors.core.kinds.kind import Act, HostFacts, Kind
from gpuactors.core.kinds.pci_function import PCI_FUNCTION
from gpuactors.core.kinds.virtual_function import VIRTUAL_FUNCTION
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.claim import AllocatedDevice, BoundFunction
from gpuactors.core.values.inventory import Device
from gpuactors.core.values.model import PciAddress, PciFunction, by_group, device_key
from gpuactors.core.values.own_resources import parse_model_rule
from gpuactors.core.values.slices import Attribute
from gpuactors.core.values.vfio import VfioConfig
from tests.core.builders import H100, SETTINGS, audio, gpu

PF, VF, VF2 = map(PciAddress, ("0000:01:00.0", "0000:01:00.4", "0000:01:00.5"))
OF_PF, OF_VF, OF_VF2 = map(device_key, (PF, VF, VF2))
PHYSICAL: Final = replace(gpu(PF, 1, driver="xe"), has_virtual_functions=True)
VIRTUAL: Final = replace(gpu(VF, 9, numa_node=1), physical=PF)


def facts(*functions: PciFunction) -> HostFacts:
    by_address = {f.address: f for f in sorted(functions, key=lambda f: f.address)}
    return HostFacts(by_address, by_group(by_address), SETTINGS.selectors)


def device(*functions: PciFunction) -> Device:
    """The one virtual function among these."""
    (only,) = VIRTUAL_FUNCTION.devices(facts(*functions))
    return only


def test_each_function_is_a_device_of_one_kind() -> None:
    host = facts(PHYSICAL, VIRTUAL)
    assert [d.key for d in VIRTUAL_FUNCTION.devices(host)] == [OF_VF]
    assert [d.key for d in PCI_FUNCTION.devices(host)] == [OF_PF]
    devices = table.devices(host)
    assert [*devices] == [OF_PF, OF_VF], "sorted by key"
    assert {key: table.kind_of(d) for key, d in devices.items()} == {
        OF_PF: PCI_FUNCTION,
        OF_VF: VIRTUAL_FUNCTION,
    }


def test_a_function_keeps_its_names_when_it_turns_out_to_be_a_virtual_one() -> None:
    """Its uevent `add` comes before the link that says so."""
    assert VIRTUAL_FUNCTION.is_key(OF_VF)
    assert VIRTUAL_FUNCTION.slice_name(OF_VF) == PCI_FUNCTION.slice_name(OF_VF) == table.slice_name(OF_VF)
    assert (
        VIRTUAL_FUNCTION.key_of("gpu-0000-01-00-4") == VIRTUAL_FUNCTION.key_of("vfio-0000-01-00-4") == OF_VF
    )
    assert VIRTUAL_FUNCTION.acts == {Act.BIND}


def test_it_depends_on_itself_and_its_physical_function() -> None:
    assert device(PHYSICAL, VIRTUAL).units == (VIRTUAL, PHYSICAL)
    assert device(VIRTUAL).units == (VIRTUAL,)
    assert device(VIRTUAL).parent == device(PHYSICAL, VIRTUAL).parent == OF_PF


NAMES: Final = {
    "the ids of the physical one": (VIRTUAL, f"{H100}_VF"),
    "ids of its own, and a name of its own": (
        replace(VIRTUAL, device="2331", model="H100 VF"),
        "nvidia.com/H100_VF",
    ),
    "ids of its own with the name of the physical one": (replace(VIRTUAL, device="2331"), f"{H100}_VF"),
}


@pytest.mark.parametrize("what", NAMES)
def test_its_resource_is_never_that_of_its_physical_function(what: str) -> None:
    virtual, name = NAMES[what]
    assert device(PHYSICAL, virtual).resource == name


def test_the_operator_may_give_its_model_one_name() -> None:
    host = facts(PHYSICAL, VIRTUAL)
    rules = (*host.selectors, parse_model_rule(f"10de:2330={H100}"))
    (named,) = VIRTUAL_FUNCTION.devices(replace(host, selectors=rules))
    assert named.resource == H100


def test_of_its_group_and_its_slot_it_is_bound_alone() -> None:
    own = replace(VIRTUAL, driver=None, vfio_bound=False)
    beside = replace(gpu(VF2, 9, driver=None), physical=PF)
    sound = audio("0000:01:00.1", 9, driver=None)
    for functions in ((PHYSICAL, own), (PHYSICAL, own, sound)):
        assert VIRTUAL_FUNCTION.to_bind(device(*functions)) == (own,)
    both = {
        d.key: VIRTUAL_FUNCTION.to_bind(d) for d in VIRTUAL_FUNCTION.devices(facts(PHYSICAL, own, beside))
    }
    assert both == {OF_VF: (own,), OF_VF2: (beside,)}


def test_neither_a_virtual_function_nor_one_that_has_some_is_a_companion() -> None:
    whole = gpu("0000:01:00.0", 9, driver="nvidia")
    sound = audio("0000:01:00.1", 9, driver="snd_hda_intel")
    physical = replace(gpu("0000:01:00.2", 9, driver="nvidia"), has_virtual_functions=True)
    host = facts(whole, sound, physical, replace(VIRTUAL, physical=physical.address))
    by_key = {d.key: d for d in PCI_FUNCTION.devices(host)}
    assert PCI_FUNCTION.to_bind(by_key[OF_PF]) == (whole, sound)


READY: Final = {
    "its physical function is on its host's driver": (PHYSICAL, None),
    "on vfio-pci": (replace(PHYSICAL, driver="vfio-pci", vfio_bound=True), Cause.PHYSICAL_FUNCTION_ON_VFIO),
    "on a vfio driver of any name": (
        replace(PHYSICAL, driver="xe-vfio-pci", vfio_bound=True),
        Cause.PHYSICAL_FUNCTION_ON_VFIO,
    ),
    "on no driver": (replace(PHYSICAL, driver=None), Cause.PHYSICAL_FUNCTION_NOT_READY),
    "unreadable": (replace(PHYSICAL, fault="no"), Cause.PHYSICAL_FUNCTION_NOT_READY),
    "on vfio-pci, and unreadable": (
        replace(PHYSICAL, driver="vfio-pci", vfio_bound=True, fault="no"),
        Cause.PHYSICAL_FUNCTION_ON_VFIO,
    ),
}


@pytest.mark.parametrize("why", READY)
@pytest.mark.parametrize("driver", ["vfio-pci", "xe-vfio-pci", None])
def test_its_physical_function_decides_first(why: str, driver: str | None) -> None:
    physical, cause = READY[why]
    of_kind = device(physical, replace(VIRTUAL, driver=driver, vfio_bound=driver is not None))
    blocker, never = VIRTUAL_FUNCTION.blocker(of_kind, None), VIRTUAL_FUNCTION.never_given(of_kind)
    assert (never and never.cause) is cause
    assert (blocker and blocker.cause) is (Cause.NOT_BOUND if cause is None and driver is None else cause)
    if driver is None:
        assert VIRTUAL_FUNCTION.not_backed(of_kind) == (never or PCI_FUNCTION.not_backed(of_kind))


def test_one_that_lost_its_selector_is_told_so() -> None:
    on_vfio = device(replace(PHYSICAL, driver="vfio-pci", vfio_bound=True), VIRTUAL)
    assert VIRTUAL_FUNCTION.not_backed(on_vfio).cause is Cause.NOT_SELECTED


def test_the_hosts_fabric_does_not_keep_it() -> None:
    """Its physical function stays with the host."""
    fabric = "NVSwitch 0000:05:00.0 is on nvidia"
    assert VIRTUAL_FUNCTION.of_the_hosts_fabric(device(PHYSICAL, VIRTUAL), fabric) is None


def test_a_slice_says_that_it_is_a_virtual_function_and_of_which() -> None:
    of_kind = device(PHYSICAL, VIRTUAL)
    offered = VIRTUAL_FUNCTION.offer(of_kind, claimed=False)
    as_whole = PCI_FUNCTION.offer(of_kind, claimed=False)
    own = {"isVF": Attribute("bool", True), "parent": Attribute("string", PF)}
    assert offered == replace(as_whole, attributes={**as_whole.attributes, **own})
    assert VIRTUAL_FUNCTION.env_prefix == PCI_FUNCTION.env_prefix


@pytest.mark.parametrize("kind", [PCI_FUNCTION, VIRTUAL_FUNCTION], ids=lambda kind: kind.name)
def test_the_metadata_has_its_address_and_where_it_is_as_far_as_that_is_known(kind: Kind) -> None:
    result = AllocatedDevice("main", "node-1", "gpu-0000-01-00-4")
    bound = (BoundFunction(VF, "vfio-pci", 9, None, vfio=True),)
    of_kind, standard = device(PHYSICAL, VIRTUAL), "resource.kubernetes.io/"
    edits = kind.edits(result, of_kind, bound, VfioConfig())
    assert edits.attributes == {
        f"{standard}pciBusID": VF,
        f"{standard}numaNode": 1,
        f"{standard}pcieRoot": "pci0000:00",
    }
    nowhere = replace(of_kind, numa_node=None, pcie_root=None)
    for absent in (None, nowhere):
        assert kind.edits(result, absent, bound, VfioConfig()).attributes == {f"{standard}pciBusID": VF}
    assert (
        kind.edits(result, replace(of_kind, numa_node=0), bound, VfioConfig()).attributes[
            f"{standard}numaNode"
        ]
        == 0
    )
