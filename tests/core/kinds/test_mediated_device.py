"""Mediated devices as devices: through both APIs, while they and their parents come, go and change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from msgspec.structs import replace

from gpuactors.core.claims.files import contents_of
from gpuactors.core.claims.pool import wanted_pool
from gpuactors.core.events.deviceplugin import AllocateAsked, PreStartAsked
from gpuactors.core.events.host import GroupsObserved, HostChanged
from gpuactors.core.events.kubelet import KubeletAppeared
from gpuactors.core.host.inspections import UNSETTLED_INSPECTIONS_S
from gpuactors.core.kinds.mediated_device import MEDIATED_DEVICE
from gpuactors.core.reports.snapshot import PollTarget, project
from gpuactors.core.step import step
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.claim import AllocatedDevice, Prepared, Unprepared
from gpuactors.core.values.claim_states import ClaimState
from gpuactors.core.values.effects import Grant, Granted, Ready, Refused
from gpuactors.core.values.inventory import Device
from gpuactors.core.values.mediated import MediatedDevice
from gpuactors.core.values.model import (
    CachedAnswer,
    DeviceId,
    DeviceKey,
    Holder,
    PciAddress,
    PciFunction,
    ResourceName,
    device_key,
)
from gpuactors.core.values.naming import MEDIATED_ENV_PREFIX, env_name, mediated_resource, profile_resource
from gpuactors.core.values.selector import parse_selector
from gpuactors.core.values.slices import Attribute, ServerKeeps
from gpuactors.core.values.vfio import BackendPolicy, VfioConfig
from tests.core.builders import SETTINGS, gpu, mediated_device
from tests.core.gpus.claim_core import DRIVER, ClaimCore, allocated, name
from tests.observe.recording import RecordedSteps, write
from tests.replay.replayed import replayed
from tests.support.edits import nodes_of
from tests.support.mdev_files import OTHER_UUID, UUID

A10_24Q = ResourceName("nvidia.com/NVIDIA_A10-24Q")
A10_12Q = ResourceName("nvidia.com/NVIDIA_A10-12Q")
PARENT = PciAddress("0000:23:00.0")
VF = PciAddress("0000:23:00.4")
CONTAINER = "/dev/vfio/vfio"


class Recorded(RecordedSteps, ClaimCore):
    """`ClaimCore`, whose steps are kept."""

    opened: Mapping[int, bool] = MappingProxyType({})
    """Whether opening a group fails, where that is tried (`--holders open`)."""

    def poll_event(self, poll: int) -> GroupsObserved:
        """What a poll of the groups sees now."""
        event = super().poll_event(poll)
        assert isinstance(event, GroupsObserved)
        uses = [replace(use, open_refused=self.opened.get(use.group)) for use in event.uses]
        return replace(event, uses=tuple(uses))


def card(driver: str | None = "nvidia") -> PciFunction:
    return gpu(
        PARENT, 35, device="2236", model="GA102GL [A10]", driver=driver, numa_node=1, pcie_root="pci0000:20"
    )


def virtual(driver: str | None = "nvidia") -> PciFunction:
    return replace(card(driver), address=VF, iommu_group=36, physical=PARENT)


def mdev(
    key: DeviceKey = UUID,
    group: int = 70,
    profile: str = "NVIDIA A10-24Q",
    type_id: str = "nvidia-593",
    parent: PciAddress | None = PARENT,
    presence: int = 1,
) -> MediatedDevice:
    return mediated_device(
        key, group, parent, profile, type_id=type_id, numa_node=1, pcie_root="pci0000:20", presence=presence
    )


def serial() -> MediatedDevice:
    """One of the kernel's sample driver, whose parent is no PCI function."""
    return replace(mdev(profile="Dual port serial", type_id="mtty-2", parent=None), driver="mtty")


def a_core(*functions: PciFunction, mediated: Sequence[MediatedDevice] = (), **settings: Any) -> Recorded:
    core = Recorded(settings=replace(SETTINGS, **settings))
    core.functions = {f.address: f for f in functions or (card(),)}
    core.mediated = {device.key: device for device in mediated}
    core.scanned()
    core.feed(KubeletAppeared("kubelet"))
    return core


@pytest.fixture
def core() -> Recorded:
    return a_core(mediated=(mdev(), mdev(OTHER_UUID, 71)))


def allocate(core: Recorded, *devices: DeviceKey, resource: ResourceName = A10_24Q) -> Any:
    (answer,) = core.answers(AllocateAsked(core.token(), resource, (tuple(map(DeviceId, devices)),)))
    return answer


def have(core: Recorded, pod: str = "vm-1", key: DeviceKey = UUID) -> None:
    """A pod has the device."""
    core.others[A10_24Q, key] = pod
    core.pass_time(40)


def resources(core: Recorded) -> set[str]:
    return set(core.state.index.names.values())


def selecting(*texts: str) -> Mapping[str, Any]:
    return {"selectors": tuple(map(parse_selector, texts))}


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("profile", "named"),
    [
        ("NVIDIA A10-24Q", "nvidia.com/NVIDIA_A10-24Q"),
        ("GRID T4-1Q", "nvidia.com/GRID_T4-1Q"),
        ("GRID P40-1Q", "nvidia.com/GRID_P40-1Q"),
        ("GRID RTX6000-3Q", "nvidia.com/GRID_RTX6000-3Q"),
        ("NVIDIA A100-1-5CME", "nvidia.com/NVIDIA_A100-1-5CME"),
        ("i915-GVTg_V5.4", "nvidia.com/i915-GVTg_V5.4"),
        (" tab\tand  spaces ", "nvidia.com/tab_and_spaces"),
        ("(odd) n/ame*.", "nvidia.com/odd_name"),
        ("x" * 70, "nvidia.com/" + "x" * 63),
        ("é", "nvidia.com/unknown"),
    ],
)
def test_a_profile_is_named_as_nvidias_plugin_and_kubevirt_name_it(profile: str, named: str) -> None:
    assert profile_resource("10de", profile) == named


def test_the_variable_is_that_of_mediated_devices() -> None:
    assert env_name(A10_24Q, MEDIATED_ENV_PREFIX) == "MDEV_PCI_RESOURCE_NVIDIA_COM_NVIDIA_A10-24Q"


@pytest.mark.parametrize(
    ("type_id", "domain"),
    [("mtty-2", "mdev-mtty"), ("Odd_driver-x", "mdev-odd-driver"), ("", "mdev-unknown")],
)
def test_without_a_pci_parent_the_driver_is_the_domain(type_id: str, domain: str) -> None:
    assert mediated_resource(type_id, "Dual port serial") == f"{domain}/Dual_port_serial"


def test_the_name_in_a_slice_depends_on_the_key_alone() -> None:
    assert MEDIATED_DEVICE.slice_name(UUID) == f"mdev-{UUID}"
    assert MEDIATED_DEVICE.key_of(f"mdev-{UUID}") == UUID
    for other in (UUID, "mdev-0000-23-00-0", f"mdev-{UUID.upper()}", "gpu-0000-23-00-0"):
        assert MEDIATED_DEVICE.key_of(other) is None
    assert not MEDIATED_DEVICE.is_key(UUID.upper())


# --- the device plugin API --------------------------------------------------------------------------------------------


def test_each_profile_is_a_resource_and_the_parent_is_not_offered(core: Recorded) -> None:
    core.made(mdev(DeviceKey(UUID[:-1] + "9"), 72, "NVIDIA A10-12Q", "nvidia-592"))
    assert core.device_list(A10_24Q) == {UUID: "Healthy", OTHER_UUID: "Healthy"}
    assert [*core.device_list(A10_12Q).values()] == ["Healthy"]
    assert set(core.state.published.device_lists) == {A10_24Q, A10_12Q}
    assert core.state.index.devices[UUID].parent == device_key(PARENT)


def test_allocate_gives_its_own_nodes_and_one_variable(core: Recorded) -> None:
    nodes = (CONTAINER, "/dev/vfio/70", "/dev/vfio/71")
    variable = "MDEV_PCI_RESOURCE_NVIDIA_COM_NVIDIA_A10-24Q"
    assert allocate(core, OTHER_UUID, UUID) == Granted((Grant(((variable, f"{UUID},{OTHER_UUID}"),), nodes),))


def test_allocate_reads_it_again(core: Recorded) -> None:
    core.mediated[UUID] = mdev(group=90)  # made anew, and no uevent has come yet
    granted = allocate(core, UUID)
    assert isinstance(granted, Granted)
    assert granted.containers[0].nodes == (CONTAINER, "/dev/vfio/90")
    core.mediated[OTHER_UUID] = mdev(OTHER_UUID, 71, "NVIDIA A10-12Q", "nvidia-592")
    refused = allocate(core, OTHER_UUID)
    assert isinstance(refused, Refused), "it is of another profile now"
    del core.mediated[OTHER_UUID]
    refused = allocate(core, OTHER_UUID, resource=A10_12Q)
    assert isinstance(refused, Refused)


def test_one_of_another_type_among_several_refuses_them_all(core: Recorded) -> None:
    """A virtual machine would start with one device fewer than it asked for, or not at all."""
    small = DeviceKey(UUID[:-1] + "9")
    core.made(mdev(small, 72, "NVIDIA A10-12Q", "nvidia-592"))
    refused = allocate(core, UUID, small)
    assert isinstance(refused, Refused)
    assert small in refused.reason
    core.mediated[OTHER_UUID] = mdev(OTHER_UUID, 71, "NVIDIA A10-12Q", "nvidia-592")
    refused = allocate(core, UUID, OTHER_UUID)
    assert isinstance(refused, Refused)
    assert OTHER_UUID in refused.reason


def test_before_a_start_it_is_looked_at_again(core: Recorded) -> None:
    allocate(core, UUID)
    core.others[A10_24Q, UUID] = "vm-1"
    assert core.answers(PreStartAsked(core.token(), A10_24Q, (DeviceId(UUID),))) == [Ready()]
    del core.mediated[UUID]
    (refused,) = core.answers(PreStartAsked(core.token(), A10_24Q, (DeviceId(UUID),)))
    assert isinstance(refused, Refused)
    assert UUID in refused.reason


def test_its_container_starts_again_with_the_nodes_that_kubelet_has_kept(core: Recorded) -> None:
    core.cached = (CachedAnswer(A10_24Q, DeviceId(UUID), (CONTAINER, "/dev/vfio/70")),)
    have(core)
    assert core.answers(PreStartAsked(core.token(), A10_24Q, (DeviceId(UUID),))) == [Ready()]
    core.removed(UUID)
    core.made(mdev(group=80))
    core.made(mdev(OTHER_UUID, 70))
    core.pass_time(40)
    (refused,) = core.answers(PreStartAsked(core.token(), A10_24Q, (DeviceId(UUID),)))
    assert isinstance(refused, Refused)
    assert f"/dev/vfio/70 belongs to {OTHER_UUID} now; {UUID} is behind /dev/vfio/80 now" in refused.reason


@pytest.mark.parametrize("refused", [True, False])
def test_the_last_known_use_applies_while_its_group_is_not_opened(core: Recorded, refused: bool) -> None:
    """With `--holders open` nothing else shows it, and none is opened while the ledger is read: it must not flap."""
    core.opened = {70: True, 71: False}
    core.pass_time(10)
    assert core.device_list(A10_24Q) == {UUID: "Unhealthy", OTHER_UUID: "Healthy"}
    core.opened = {}
    core.pass_time(10)
    assert core.device_list(A10_24Q) == {UUID: "Unhealthy", OTHER_UUID: "Healthy"}
    core.opened = {70: refused}
    core.pass_time(10)
    assert core.device_list(A10_24Q)[UUID] == ("Unhealthy" if refused else "Healthy")


@pytest.mark.parametrize("has_node", [False, True])
def test_one_that_is_made_later_is_listed_when_the_kernel_has_linked_its_type(
    core: Recorded, has_node: bool
) -> None:
    """Its node is there from the uevent of its group on; no uevent comes after the link."""
    late = DeviceKey(UUID[:-1] + "9")
    made = mdev(late, 72)
    core.made(replace(made, type_id=None, type_name="", nodes=made.nodes if has_node else (CONTAINER,)))
    assert late not in core.device_list(A10_24Q)
    assert set(core.state.published.device_lists) == {A10_24Q}, "it is listed under no other name"
    core.mediated[late] = made
    core.pass_time(UNSETTLED_INSPECTIONS_S[0] + 0.01)
    assert core.device_list(A10_24Q)[late] == "Healthy"


def test_one_that_is_removed_leaves_the_list_and_stays_while_a_pod_has_it(core: Recorded) -> None:
    core.removed(OTHER_UUID)
    assert core.device_list(A10_24Q) == {UUID: "Healthy"}
    have(core)
    core.removed(UUID)
    assert core.device_list(A10_24Q) == {UUID: "Unhealthy"}
    assert core.reason(UUID, A10_24Q).endswith(", but the mediated device is gone from this node")
    del core.others[A10_24Q, UUID]
    core.pass_time(40)
    assert {a.key for a in core.state.published.device_lists.get(A10_24Q, ())} == set()


def test_one_that_is_being_removed_leaves_the_list_with_its_type(core: Recorded) -> None:
    """The kernel removes the link to its type first, then the driver, and then the device."""
    core.made(replace(mdev(), type_id=None, type_name=""))
    assert core.device_list(A10_24Q) == {OTHER_UUID: "Healthy"}
    assert isinstance(allocate(core, UUID), Refused)
    have(core, key=OTHER_UUID)
    core.made(replace(mdev(OTHER_UUID, 71), type_id=None, type_name=""))
    assert core.device_list(A10_24Q)[OTHER_UUID] == "Unhealthy", "a pod has it"
    assert set(core.state.published.device_lists) == {A10_24Q}


def test_one_that_comes_back_is_not_started_before_its_type_is_known(core: Recorded) -> None:
    """The kernel links its type after the last uevent, and it may be another one."""
    assert isinstance(allocate(core, UUID), Granted)
    have(core)
    start = PreStartAsked(core.token(), A10_24Q, (DeviceId(UUID),))
    core.mediated[UUID] = replace(mdev(presence=2, profile=""), type_id=None)
    (answer,) = core.answers(start)
    assert isinstance(answer, Refused)
    assert answer.reason == f"{UUID}: its type is not known yet"
    core.mediated[UUID] = mdev(presence=2)
    core.pass_time(UNSETTLED_INSPECTIONS_S[0])
    assert core.answers(replace(start, token=core.token())) == [Ready()]


def test_a_uuid_that_comes_back_with_another_type_is_another_device(core: Recorded) -> None:
    have(core)
    assert core.device_list(A10_24Q)[UUID] == "Healthy"
    core.removed(UUID)
    core.made(mdev(group=80, profile="NVIDIA A10-12Q", type_id="nvidia-592", presence=2))
    assert core.device_list(A10_24Q)[UUID] == "Unhealthy", "the pod's is gone"
    assert "another device is there now (NVIDIA A10-12Q)" in core.reason(UUID, A10_24Q)
    del core.others[A10_24Q, UUID]
    core.pass_time(40)
    assert core.device_list(A10_12Q)[UUID] == "Healthy"


def test_the_group_number_of_one_that_is_gone_may_be_anothers(core: Recorded) -> None:
    core.holders[70] = (Holder(4711, "qemu", None),)
    core.pass_time(10)
    assert core.device_list(A10_24Q) == {UUID: "Unhealthy", OTHER_UUID: "Healthy"}
    assert "process 4711 (qemu)" in core.reason(UUID, A10_24Q)
    core.holders = {}
    core.removed(UUID)
    core.made(mdev(OTHER_UUID, 70))
    core.pass_time(10)
    assert core.device_list(A10_24Q) == {OTHER_UUID: "Healthy"}
    granted = allocate(core, OTHER_UUID)
    assert isinstance(granted, Granted)
    assert granted.containers[0].nodes == (CONTAINER, "/dev/vfio/70")


def test_a_call_has_its_group_polled_at_once_and_never_opened(core: Recorded) -> None:
    core.pass_time(10)
    state, _ = step(core.state, AllocateAsked(core.token(), A10_24Q, ((DeviceId(UUID),),)), core.at)
    (target,) = project(state).inspections.poll.targets
    assert target == PollTarget(70, (), may_open=False, urgent=True, cdevs=("vfio70",))


def test_its_parent_is_not_given_to_a_claim(core: Recorded) -> None:
    answer = core.answer(core.prepare(allocated(name("whole"), PARENT)))
    assert answer is not None
    assert not isinstance(answer, Prepared)
    assert f"its part {UUID} and 1 more would go with its driver" in str(answer)
    assert core.acts == []


def test_when_its_parent_goes_it_is_gone_or_cannot_be_used(core: Recorded) -> None:
    have(core)
    core.changed(card(driver=None))
    assert core.device_list(A10_24Q)[UUID] == "Unhealthy"
    assert f"its parent {PARENT} is bound to no driver" in core.reason(UUID, A10_24Q)
    core.removed(UUID, OTHER_UUID)
    core.unplugged(PARENT)
    assert core.device_list(A10_24Q) == {UUID: "Unhealthy"}
    core.changed(card())
    core.made(mdev(presence=3))
    assert core.device_list(A10_24Q) == {UUID: "Healthy"}


def test_a_hint_about_the_parent_looks_at_its_devices_as_well(core: Recorded) -> None:
    del core.mediated[UUID]
    core.feed(HostChanged(PARENT, None, "change pci"))
    assert core.device_list(A10_24Q) == {OTHER_UUID: "Healthy"}


def test_a_virtual_function_may_be_the_parent() -> None:
    core = a_core(card(), virtual(), mediated=(mdev(parent=VF),), **selecting(f"address={PARENT}"))
    assert core.device_list(A10_24Q) == {UUID: "Healthy"}, "the physical function is selected"
    device = core.state.index.devices[UUID]
    assert [unit.address for unit in device.units] == [VF, PARENT]
    assert device.ancestors == (device_key(VF), device_key(PARENT))
    assert slices(core)[0]["parent"] == Attribute("string", PARENT), "the card"


def test_without_a_pci_parent_it_is_offered_by_its_type() -> None:
    assert resources(a_core(mediated=(serial(),))) == {"nvidia.com/GA102GL_A10"}
    core = a_core(mediated=(serial(),), **selecting("mdev=mtty-2"))
    mtty = ResourceName("mdev-mtty/Dual_port_serial")
    assert core.device_list(mtty) == {UUID: "Healthy"}
    granted = allocate(core, UUID, resource=mtty)
    assert isinstance(granted, Granted)
    assert granted.containers[0].envs == (("MDEV_PCI_RESOURCE_MDEV-MTTY_DUAL_PORT_SERIAL", UUID),)
    (shown,) = slices(core)
    assert {"resource.kubernetes.io/pciBusID", "resource.kubernetes.io/pcieRoot", "parent"}.isdisjoint(shown)
    assert shown["vgpuFramework"] == Attribute("string", "mdev")


def test_without_a_pci_parent_it_excludes_nothing_but_itself() -> None:
    other = replace(serial(), key=OTHER_UUID, iommu_group=71, nodes=(CONTAINER, "/dev/vfio/71"))
    core = a_core(card("vfio-pci"), mediated=(serial(), other), **selecting("mdev=mtty-2", "vendor=10de"))
    mtty = ResourceName("mdev-mtty/Dual_port_serial")
    assert [core.state.index.relatives(key) for key in (UUID, OTHER_UUID, device_key(PARENT))] == [set()] * 3
    assert isinstance(core.answer(core.prepare(allocated(name("one"), UUID))), Prepared)
    assert core.device_list(mtty) == {UUID: "Unhealthy", OTHER_UUID: "Healthy"}
    assert isinstance(allocate(core, UUID, resource=mtty), Refused)
    assert isinstance(allocate(core, OTHER_UUID, resource=mtty), Granted)
    assert core.answer(core.prepare(allocated(name("two"), OTHER_UUID))) is None
    assert f"{OTHER_UUID}: just allocated as {mtty}" in core.problem(name("two"))
    assert isinstance(core.answer(core.prepare(allocated(name("card"), PARENT))), Prepared)


@pytest.mark.parametrize(
    ("selectors", "is_chosen"),
    [
        (("vendor=10de,class=03",), True),
        (("vendor=10de,class=03", "!mdev=nvidia-593"), False),
        (("vendor=10de,class=03", "!mdev=NVIDIA A10-24Q"), False),
        (("vendor=10de,class=03", "!mdev=nvidia-592"), True),
        (("vendor=10de,class=03", f"!address={PARENT}"), False),
        (("mdev=nvidia_a10-24q",), True),
        (("vendor=8086,mdev=nvidia-593",), False),
        (("vendor=10de,mdev=nvidia-593",), True),
        (("vendor=8086",), False),
    ],
)
def test_it_is_chosen_by_its_parent_or_by_its_type(selectors: tuple[str, ...], is_chosen: bool) -> None:
    assert (UUID in a_core(mediated=(mdev(),), **selecting(*selectors)).state.index.devices) == is_chosen


def test_a_selector_of_a_type_chooses_no_function() -> None:
    core = a_core(card("vfio-pci"), **selecting("mdev=nvidia-593"))
    assert core.state.index.devices == {}


@pytest.mark.parametrize(
    ("now", "cause", "why"),
    [
        (replace(mdev(), driver=None), None, "not listed"),
        (replace(mdev(), nodes=(CONTAINER,)), Cause.NODE_MISSING, "/dev/vfio/70 does not exist"),
        (replace(mdev(), nodes=()), Cause.NODE_MISSING, "/dev/vfio/vfio does not exist"),
        (replace(mdev(), iommu_group=None), Cause.NO_IOMMU_GROUP, "in no IOMMU group"),
        (
            replace(mdev(), made_by="NVIDIA's DRA driver"),
            Cause.CLAIMED_ELSEWHERE,
            "NVIDIA's DRA driver has made it",
        ),
    ],
)
def test_why_a_virtual_machine_could_not_open_it(
    core: Recorded, now: MediatedDevice, cause: Cause | None, why: str
) -> None:
    core.made(now)
    if cause is None:
        assert UUID not in core.device_list(A10_24Q)
        return
    assert core.device_list(A10_24Q)[UUID] == "Unhealthy"
    assert why in core.reason(UUID, A10_24Q)
    refused = allocate(core, UUID)
    assert isinstance(refused, Refused)
    assert cause in refused.causes


def test_a_read_that_fails_once_changes_nothing(core: Recorded) -> None:
    core.made(replace(mdev(), type_id=None, type_name="", fault="torn"))
    assert core.state.index.devices[UUID].resource == A10_24Q
    core.made(replace(mdev(presence=2), type_id=None, type_name="", fault="torn"))
    assert UUID not in core.state.index.devices, "another device, of an unknown type"


def test_an_older_plugins_id_may_be_its_group_number(core: Recorded) -> None:
    core.others[A10_24Q, "70"] = "vm-1"
    core.pass_time(40)
    assert core.device_list(A10_24Q) == {"70": "Healthy", OTHER_UUID: "Healthy"}
    refused = allocate(core, UUID)
    assert isinstance(refused, Refused)
    del core.others[A10_24Q, "70"]
    core.pass_time(40)
    assert core.device_list(A10_24Q) == {UUID: "Healthy", OTHER_UUID: "Healthy"}


# --- claims -----------------------------------------------------------------------------------------------------------


def slices(core: Recorded) -> list[Mapping[str, Attribute]]:
    """The attributes of the mediated devices in the slice."""
    assert core.wanted.offer is not None
    devices = wanted_pool(core.wanted.offer, ServerKeeps.YES).devices
    return [device.attributes for device in devices if device.name.startswith("mdev-")]


def test_its_slice_has_the_cards_place(core: Recorded) -> None:
    assert slices(core)[0] == {
        "resource.kubernetes.io/pciBusID": Attribute("string", PARENT),
        "resource.kubernetes.io/pcieRoot": Attribute("string", "pci0000:20"),
        "resource.kubernetes.io/numaNode": Attribute("int", 1),
        "type": Attribute("string", "vgpu"),
        "vgpuFramework": Attribute("string", "mdev"),
        "profile": Attribute("string", "NVIDIA A10-24Q"),
        "parent": Attribute("string", PARENT),
        "vendorID": Attribute("string", "0x10de"),
        "productName": Attribute("string", "GA102GL [A10]"),
        "iommuGroup": Attribute("int", 70),
    }


def test_without_a_numa_node_neither_list_nor_slice_nor_metadata_have_one() -> None:
    core = a_core(mediated=(replace(mdev(), numa_node=None),))
    (entry,) = core.state.published.device_lists[A10_24Q]
    assert entry.numa_node is None
    assert "resource.kubernetes.io/numaNode" not in slices(core)[0]
    edits = MEDIATED_DEVICE.edits(*_claimed(core), (), VfioConfig())
    assert "resource.kubernetes.io/numaNode" not in edits.attributes


def test_a_claim_that_prefers_iommufd_gets_the_nodes_of_the_legacy_container(core: Recorded) -> None:
    """The kernel has iommufd for an emulated IOMMU group, but KubeVirt does not use it for a mediated device."""
    core.changed(replace(card(), iommufd=True))
    edits = MEDIATED_DEVICE.edits(*_claimed(core), (), VfioConfig(BackendPolicy.PREFER_IOMMUFD))
    assert nodes_of(edits) == (CONTAINER, "/dev/vfio/70")
    assert "iommuFDEnabled" not in slices(core)[0]
    granted = allocate(core, UUID)
    assert isinstance(granted, Granted)
    assert granted.containers[0].nodes == (CONTAINER, "/dev/vfio/70")


def _claimed(core: Recorded) -> tuple[AllocatedDevice, Device]:
    return AllocatedDevice("main", "node-1", f"mdev-{UUID}"), core.state.index.devices[UUID]


def test_a_claim_has_its_uuid_in_both_spellings_and_no_pci_address(core: Recorded) -> None:
    claim = allocated(name("one"), UUID)
    core.held_back = {"files"}
    token = core.prepare(claim)
    (act,) = core.wanted.files.values()
    (device,) = act.devices
    assert nodes_of(device) == (CONTAINER, "/dev/vfio/70")
    assert device.edits["env"] == ("NVIDIA_VISIBLE_DEVICES=void",)  # type: ignore[index, call-overload]
    contents = contents_of(DRIVER, claim, act.devices)
    document: Any = contents.metadata[0].documents[0]
    (shown,) = document["requests"][0]["devices"]
    assert shown["attributes"] == {
        "mdevUUID": {"string": UUID},
        "resource.kubernetes.io/mdevUUID": {"string": UUID},
        "resource.kubernetes.io/numaNode": {"int": 1},
        "resource.kubernetes.io/pcieRoot": {"string": "pci0000:20"},
    }
    core.release("files")
    assert isinstance(core.answer(token), Prepared)
    assert isinstance(core.answer(core.unprepare(name("one"))), Unprepared)
    assert core.acts == []


def test_both_apis_exclude_each_other(core: Recorded) -> None:
    core.prepare(allocated(name("one"), UUID))
    refused = allocate(core, UUID)
    assert isinstance(refused, Refused)
    assert refused.causes == (Cause.CLAIMED_ELSEWHERE,)
    assert core.device_list(A10_24Q) == {UUID: "Unhealthy", OTHER_UUID: "Healthy"}
    have(core, key=OTHER_UUID)
    assert core.answer(core.prepare(allocated(name("two"), OTHER_UUID))) is None
    assert core.claim_state(name("two")) is ClaimState.WAITING
    assert "pod default/vm-1" in core.problem(name("two"))


def test_a_claim_reads_it_again_before_it_is_prepared(core: Recorded) -> None:
    core.mediated[UUID] = mdev(group=90)
    core.held_back = {"files"}
    core.prepare(allocated(name("one"), UUID))
    (act,) = core.wanted.files.values()
    assert nodes_of(act.devices[0]) == (CONTAINER, "/dev/vfio/90")


def test_one_that_is_made_anew_in_another_group_is_a_drift(core: Recorded) -> None:
    core.prepare(allocated(name("one"), UUID))
    core.made(mdev(group=90, presence=2))
    assert core.claim_state(name("one")) is not ClaimState.PREPARED
    assert "IOMMU group 90, and no longer in 70" in core.problem(name("one"))


@pytest.mark.parametrize("others", [True, False])
def test_one_of_another_type_or_none_is_a_drift(core: Recorded, others: bool) -> None:
    core.prepare(allocated(name("one"), UUID))
    if others:
        core.made(mdev(profile="NVIDIA A10-12Q", type_id="nvidia-592", presence=2))
    else:
        core.removed(UUID)
    assert core.claim_state(name("one")) is not ClaimState.PREPARED
    assert UUID in core.problem(name("one"))


def test_a_claim_is_known_after_a_restart_and_compared_with_what_is_there(core: Recorded) -> None:
    core.prepare(allocated(name("one"), UUID))
    assert core.restarted().claim_state(name("one")) is ClaimState.PREPARED
    core.mediated[UUID] = mdev(group=90, presence=2)
    after = core.restarted()
    assert after.claim_state(name("one")) is not ClaimState.PREPARED
    assert "no longer in 70" in after.problem(name("one"))


def test_a_pods_device_is_known_after_a_restart(core: Recorded) -> None:
    have(core)
    after = core.restarted()
    after.others = core.others
    after.feed(KubeletAppeared("kubelet"))
    after.pass_time(40)
    assert after.device_list(A10_24Q) == {UUID: "Healthy", OTHER_UUID: "Healthy"}
    assert after.reason(UUID, A10_24Q) == "allocated to pod default/vm-1"


# --- what an operator sees --------------------------------------------------------------------------------------------


def test_a_journal_of_it_is_replayed_without_a_difference(core: Recorded, tmp_path: Path) -> None:
    allocate(core, OTHER_UUID)
    core.prepare(allocated(name("one"), UUID))
    core.made(mdev(group=90, presence=2))
    core.removed(UUID)
    core.unprepare(name("one"))
    write(tmp_path, *core.steps)
    told = "\n".join(replayed(tmp_path))
    assert f"prepared mdev-{UUID}" in told
    assert "NVIDIA_A10-24Q" in told
