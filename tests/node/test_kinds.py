"""Every kind of part that a card is given away as, on a real node: what scheduler, kubelet and the pods see of each.

A virtual function on vfio-pci, a vGPU by vendor VFIO, and a mediated device: a pod and a claim of each, several kinds
on one node, parts that are made late or get another type, and 256 of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import pytest

from gpuactors_simulation.host.mediated import MdevType
from gpuactors_simulation.host.vgpu import VgpuType
from tests.node import pods
from tests.node.books import key_of
from tests.node.claims import (
    IDLE,
    ClaimNode,
    by_address,
    claims,
    device_name,
    from_template,
    request,
    slices_of,
)
from tests.node.cluster import eventually
from tests.node.fake_host import H100, L40S, NVIDIA, FakeHost
from tests.node.node import Node
from tests.node.test_counters import counter_sets
from tests.node.test_device_plugin import wait_insufficient
from tests.node.versions import of_node
from tests.support.patience import patient

__all__ = ["claims"]

VF_RESOURCE: Final = "nvidia.com/GH100_H100_SXM5_80GB_VF"
VF_CLASS: Final = "vf.gpu.nvidia.com"
VGPU_CLASS: Final = "vgpu.gpu.nvidia.com"

A10: Final = "2236"

L40S_12Q: Final = VgpuType(1150, "NVIDIA L40S-12Q", 4)
L40S_12C: Final = VgpuType(1170, "NVIDIA L40S-12C", 4)
A10_8Q: Final = MdevType("nvidia-591", "NVIDIA A10-8Q", 3)
A10_8C: Final = MdevType("nvidia-601", "NVIDIA A10-8C", 3)

UUIDS: Final = ("83b8f4f2-509f-382f-3c1e-e6bfe0fa1001", "83b8f4f2-509f-382f-3c1e-e6bfe0fa1002")

CARDS: Final = 8
PARTS_OF_A_CARD: Final = 32


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of part: how an administrator makes two of a card, and what each is to Kubernetes."""

    card: Callable[[FakeHost, int], str]
    """Plugs a card in, and prepares it for its parts."""
    make: Callable[[FakeHost, str], list[str]]
    """Makes two parts of a card: their keys."""
    resource: str
    variable: str
    device_class: str
    driver: str | None
    """Which the parts are on; None: they are no PCI functions."""
    selector: str | None = None

    def made(self, host: FakeHost, slot: int) -> list[str]:
        """Two parts of a new card."""
        return self.make(host, self.card(host, slot))

    def variables(self, *keys: str) -> dict[str, str]:
        """Those of a container with these parts, and with no other device."""
        return {self.variable: ",".join(sorted(keys))}


@dataclass(frozen=True, slots=True)
class Retyped:
    """Another type for a part that is not open."""

    kind: Kind
    retype: Callable[[FakeHost, str], None]
    resource: str
    """That of the other type."""


def of_profile(profile: str) -> str:
    """A CEL expression that selects the vGPUs of one profile."""
    return f'device.attributes["gpu.nvidia.com"].profile == "{profile}"'


def virtual_card(host: FakeHost, slot: int) -> str:
    return host.plug(slot, H100, driver=NVIDIA, total_vfs=2)


def virtual_functions(host: FakeHost, card: str) -> list[str]:
    return host.virtualize(card, 2)


def vgpu_card(host: FakeHost, slot: int) -> str:
    """Its virtual functions are there, on NVIDIA's driver, and have no type."""
    card = host.plug(slot, L40S, driver=NVIDIA, total_vfs=2, vgpu_types=(L40S_12Q, L40S_12C))
    host.virtualize(card, 2, NVIDIA)
    return card


def vgpus(host: FakeHost, card: str) -> list[str]:
    with host.lock:
        parts = sorted(host.tree.virtual_functions(card))
    for part in parts:
        host.set_vgpu_type(part, L40S_12Q.number)
    return parts


def retype_vgpu(host: FakeHost, part: str) -> None:
    host.set_vgpu_type(part, 0)
    host.set_vgpu_type(part, L40S_12C.number)


def mediated_card(host: FakeHost, slot: int) -> str:
    card = host.plug(slot, A10, driver=NVIDIA)
    host.offer_mediated(card, A10_8Q, A10_8C)
    return card


def mediated_devices(host: FakeHost, card: str) -> list[str]:
    for uuid in UUIDS:
        host.make_mediated(uuid, card, A10_8Q.id)
    return list(UUIDS)


def retype_mediated(host: FakeHost, part: str) -> None:
    """Its UUID comes back with another type."""
    with host.lock:
        card = host.tree.mediated.device_dir(part).parent.name
    host.remove_mediated(part)
    host.make_mediated(part, card, A10_8C.id)


VIRTUAL_FUNCTION: Final = Kind(
    virtual_card, virtual_functions, VF_RESOURCE, "PCI_RESOURCE_NVIDIA_COM_GH100_H100_SXM5_80GB_VF",
    VF_CLASS, "vfio-pci",
)  # fmt: skip
VGPU: Final = Kind(
    vgpu_card, vgpus, "nvidia.com/NVIDIA_L40S-12Q", "PCI_RESOURCE_NVIDIA_COM_NVIDIA_L40S-12Q",
    VGPU_CLASS, NVIDIA, of_profile("NVIDIA L40S-12Q"),
)  # fmt: skip
MEDIATED: Final = Kind(
    mediated_card, mediated_devices, "nvidia.com/NVIDIA_A10-8Q", "MDEV_PCI_RESOURCE_NVIDIA_COM_NVIDIA_A10-8Q",
    VGPU_CLASS, None, of_profile("NVIDIA A10-8Q"),
)  # fmt: skip

each_kind = pytest.mark.parametrize("kind", [VIRTUAL_FUNCTION, VGPU, MEDIATED], ids=("vf", "vgpu", "mdev"))
each_typed_kind = pytest.mark.parametrize(
    "retyped",
    [
        Retyped(VGPU, retype_vgpu, "nvidia.com/NVIDIA_L40S-12C"),
        Retyped(MEDIATED, retype_mediated, "nvidia.com/NVIDIA_A10-8C"),
    ],
    ids=("vgpu", "mdev"),
)


def nodes_of(host: FakeHost, *keys: str) -> frozenset[str]:
    """The names in /dev/vfio of a container with these parts, and with no other device."""
    return frozenset({"vfio", *(str(host.group_of(key)) for key in keys)})


def metadata_of(claims: ClaimNode, pod: str) -> Mapping[str, str]:
    """What names the one device of a pod's claim in its metadata."""
    (requests,) = claims.metadata(pod).values()
    ((device,),) = (one["devices"] for one in requests)
    names = ("resource.kubernetes.io/pciBusID", "resource.kubernetes.io/mdevUUID", "mdevUUID")
    return {name: device["attributes"][name]["string"] for name in names if name in device["attributes"]}


# --- a pod and a claim ------------------------------------------------------------------------------------------------


@each_kind
def test_a_pod_gets_a_part_with_its_variable_and_its_nodes(node: Node, kind: Kind) -> None:
    node.install()
    parts = kind.made(node.host, 0x21)
    node.settled({kind.resource: 2})
    pods.start(node.api, "vm-1", {kind.resource: 1})
    (its,) = node.devices_of("vm-1")
    assert its in parts
    assert pods.variables_in("vm-1") == kind.variables(its)
    assert pods.nodes_in("vm-1") == nodes_of(node.host, its)
    node.check_open("vm-1")
    assert node.settled({kind.resource: 2}, {kind.resource: 2}).requests == {kind.resource: 1}
    pods.start(node.api, "vm-2", {kind.resource: 1})
    assert node.devices_of("vm-2") == {*parts} - {its}
    pods.create(node.api, pods.tenant("vm-3", {kind.resource: 1}))
    wait_insufficient(node, "vm-3")
    pods.stop(node.api, "vm-1")
    pods.wait_running(node.api, "vm-3")
    node.settled({kind.resource: 2}, {kind.resource: 2})
    node.check_open("vm-2", "vm-3")


@each_kind
def test_a_claim_gets_a_part_by_class_and_profile(claims: ClaimNode, kind: Kind) -> None:
    parts = kind.made(claims.host, 0x21)
    claims.offered(*parts)
    drivers = {part: kind.driver for part in parts if kind.driver is not None}
    claims.template("part", request(selector=kind.selector, device_class=kind.device_class))
    claims.create("vm-1", from_template("part"))
    pods.wait_running(claims.api, "vm-1")
    (its,) = map(key_of, claims.devices_of("vm-1"))
    assert its in parts
    claims.runs("vm-1", its, driver=kind.driver)
    uid = claims.uid_of("vm-1")
    claims.is_prepared(uid)
    assert pods.nodes_in("vm-1") == nodes_of(claims.host, its)
    assert pods.variables_in("vm-1") == {}
    if kind.driver is None:
        assert metadata_of(claims, "vm-1") == {"resource.kubernetes.io/mdevUUID": its, "mdevUUID": its}
    else:
        assert metadata_of(claims, "vm-1") == {"resource.kubernetes.io/pciBusID": its}
    claims.settled({kind.resource: 1})
    pods.stop(claims.api, "vm-1")
    claims.is_released(uid)
    claims.nothing_is_left(drivers)
    claims.settled({kind.resource: 2})


def test_three_kinds_on_one_node_by_both_apis(claims: ClaimNode) -> None:
    """A pod with a virtual function and a mediated device, and one whose claim has a virtual function and a vGPU. Both
    keep them over a restart of the daemon."""
    host = claims.host
    # A card's group is its slot, and its parts have the next free ones.
    virtual, typed, mediated = (
        kind.made(host, slot) for kind, slot in ((VIRTUAL_FUNCTION, 0x21), (VGPU, 0x29), (MEDIATED, 0x31))
    )
    all_counts = {VF_RESOURCE: 2, VGPU.resource: 2, MEDIATED.resource: 2}
    claims.offered(*virtual, *typed, *mediated)
    claims.settled(all_counts)
    pods.start(claims.api, "vm-1", {VF_RESOURCE: 1, MEDIATED.resource: 1})
    its = claims.node.devices_of("vm-1")
    (its_function,) = its & {*virtual}
    (its_mediated,) = its & {*mediated}
    wanted = VIRTUAL_FUNCTION.variables(its_function) | MEDIATED.variables(its_mediated)
    assert pods.variables_in("vm-1") == wanted
    assert pods.nodes_in("vm-1") == nodes_of(host, its_function, its_mediated)
    claims.template(
        "two",
        request("function", device_class=VF_CLASS),
        request("vgpu", VGPU.selector, device_class=VGPU_CLASS),
    )
    claims.create("vm-2", from_template("two"))
    (other_function,) = {*virtual} - its
    claims.runs("vm-2", other_function)
    (its_vgpu,) = {key_of(name) for name in claims.devices_of("vm-2")} - {other_function}
    assert its_vgpu in typed
    claims.runs("vm-2", its_vgpu, driver=NVIDIA)
    assert pods.nodes_in("vm-2") == nodes_of(host, other_function, its_vgpu)
    counts = {VF_RESOURCE: 1, VGPU.resource: 1, MEDIATED.resource: 2}
    claims.settled(counts)
    claims.renew_daemon()
    claims.settled(counts)
    claims.node.check_open("vm-1")
    assert claims.node.devices_of("vm-1") == its
    claims.is_prepared(claims.uid_of("vm-2"))
    claims.runs("vm-2", other_function)
    claims.runs("vm-2", its_vgpu, driver=NVIDIA)
    pods.stop(claims.api, "vm-2")
    pods.stop(claims.api, "vm-1")
    claims.nothing_is_left(dict.fromkeys(virtual, "vfio-pci") | dict.fromkeys(typed, NVIDIA))
    claims.settled(all_counts)


# --- made late, and another type --------------------------------------------------------------------------------------


@each_kind
def test_parts_that_are_made_late_are_allocatable(node: Node, kind: Kind) -> None:
    node.install()
    card = kind.card(node.host, 0x21)
    node.settled({})
    parts = kind.make(node.host, card)
    node.settled({kind.resource: 2})
    pods.start(node.api, "vm-1", {kind.resource: 2})
    assert node.devices_of("vm-1") == {*parts}
    assert pods.variables_in("vm-1") == kind.variables(*parts)
    node.settled({kind.resource: 2}, {kind.resource: 2})


@each_typed_kind
def test_a_part_that_gets_another_type_under_a_pod_is_counted_right(node: Node, retyped: Retyped) -> None:
    """It stays in the list of its old type, Unhealthy, until its pod has ended, and is of the new type after that."""
    kind, old, new = retyped.kind, retyped.kind.resource, retyped.resource
    node.install()
    parts = kind.made(node.host, 0x21)
    node.settled({old: 2})
    pods.start(node.api, "vm-1", {old: 1}, command=IDLE)
    (its,) = node.devices_of("vm-1")
    (free,) = {*parts} - {its}
    node.excuse(f"{its} of a pod is not in kubelet's list", 120.0)
    retyped.retype(node.host, its)

    def is_unhealthy() -> bool:
        look = node.books.look()
        assert (look.capacity[old], look.allocatable[old], look.requests) == (2, 1, {old: 1}), look
        assert look.allocatable.get(new, 0) == 0, look
        return look.healthy is not None and look.healthy[old] == {free}

    eventually(is_unhealthy, "a part that is listed, and Unhealthy", patient(30.0))
    pods.create(node.api, pods.tenant("vm-2", {old: 1}))
    pods.create(node.api, pods.tenant("vm-3", {new: 1}))
    wait_insufficient(node, "vm-2")
    wait_insufficient(node, "vm-3")
    until = time.monotonic() + patient(3)
    while time.monotonic() < until:
        assert is_unhealthy()
        time.sleep(0.2)
    assert node.devices_of("vm-1") == {its}
    assert pods.phase(pods.get(node.api, "vm-1")) == "Running"
    pods.stop(node.api, "vm-1")
    pods.wait_running(node.api, "vm-2")
    pods.wait_running(node.api, "vm-3")
    assert node.devices_of("vm-2") == {free}
    assert node.devices_of("vm-3") == {its}
    node.settled({old: 1, new: 1}, {old: 1, new: 1})


# --- many -------------------------------------------------------------------------------------------------------------


def test_256_parts_are_allocatable_and_in_the_slices(claims: ClaimNode) -> None:
    """Eight cards with 32 virtual functions each, which are made late."""
    node, host, many = claims.node, claims.host, CARDS * PARTS_OF_A_CARD
    cards = [host.plug(0x21 + n, driver=NVIDIA, total_vfs=PARTS_OF_A_CARD) for n in range(CARDS)]
    claims.offered(*cards)
    began = time.monotonic()
    parts = [part for card in cards for part in host.virtualize(card, PARTS_OF_A_CARD)]
    node.settled({VF_RESOURCE: many}, within_s=patient(60.0))
    claims.offered(*parts)
    node.said(f"{many} parts are there after {time.monotonic() - began:.1f} s")
    listed = {device["name"] for spec in slices_of(claims.api) for device in spec.get("devices", ())}
    assert listed == {device_name(key) for key in (*cards, *parts)}
    if of_node().dra_by_default:
        assert sorted(counter_sets(claims).values()) == [str(PARTS_OF_A_CARD)] * CARDS
    claims.template("first", request(selector=by_address(parts[0]), device_class=VF_CLASS))
    claims.create("vm-1", from_template("first"))
    claims.runs("vm-1", parts[0])
    claims.settled({VF_RESOURCE: many - 1})
    pods.start(claims.api, "vm-2", {VF_RESOURCE: 8}, command=IDLE)
    its = node.devices_of("vm-2")
    assert len(its) == 8
    assert its < {*parts} - {parts[0]}
    assert pods.variables_in("vm-2") == VIRTUAL_FUNCTION.variables(*its)
    assert pods.nodes_in("vm-2") == nodes_of(host, *its)
    claims.settled({VF_RESOURCE: many - 1})
    pods.stop(claims.api, "vm-1")
    pods.stop(claims.api, "vm-2")
    claims.nothing_is_left(dict.fromkeys(parts, "vfio-pci"))
    claims.settled({VF_RESOURCE: many})
