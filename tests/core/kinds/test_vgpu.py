"""vGPUs by NVIDIA's vendor VFIO, over both APIs: typed late, retyped, untyped, and with names that are lost."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
from msgspec.structs import replace

from gpuactors.control.node_view import view_of
from gpuactors.core.claims.files import contents_of
from gpuactors.core.claims.pool import wanted_pool
from gpuactors.core.events.daemon import PredecessorGone
from gpuactors.core.events.deviceplugin import AllocateAsked, PreStartAsked
from gpuactors.core.events.host import GroupsObserved, HostChanged
from gpuactors.core.events.kubelet import KubeletAppeared
from gpuactors.core.host.inspections import UNSETTLED_INSPECTIONS_S, VGPU_INSPECTION_S, VGPU_SLOTS
from gpuactors.core.host.usage import POLL_S
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.claim import Prepared, Unprepared
from gpuactors.core.values.claim_states import ClaimState
from gpuactors.core.values.effects import Grant, Granted, Ready, Refused
from gpuactors.core.values.model import (
    DeviceId,
    Health,
    Holder,
    PciAddress,
    PciFunction,
    ResourceName,
    Role,
    device_key,
    pci_address,
)
from gpuactors.core.values.slices import Attribute, BlockKind, BlockReason, ServerKeeps
from gpuactors.core.values.vgpu import CardTypes, OwnVgpuType, VendorVgpu
from gpuactors.limits import GRANT_GRACE_S, LEDGER_S
from tests.core.builders import H100, SETTINGS, gpu
from tests.core.gpus.claim_core import DRIVER, ClaimCore, allocated, name
from tests.observe.recording import RecordedSteps, write
from tests.replay.replayed import replayed
from tests.support.edits import nodes_of

PF, OTHER_PF = pci_address("0000:3b:00.0"), pci_address("0000:5e:00.0")
VF, SECOND = "0000:3b:00.4", "0000:3b:00.5"
BIND: Final = 4711
ONE_Q, TWO_Q = (1147, "NVIDIA L40S-1Q"), (1148, "NVIDIA L40S-2Q")
ONE, TWO = ResourceName("nvidia.com/NVIDIA_L40S-1Q"), ResourceName("nvidia.com/NVIDIA_L40S-2Q")
L40S = ResourceName("nvidia.com/AD102GL_L40S")
UNTYPED = ResourceName(f"{L40S}_VF")
GUID: Final = "GPU-6b8a2c14-93f0-4f8e-9d3a-0f5f6a1c7e21"


class Recorded(RecordedSteps, ClaimCore):
    """`ClaimCore`, whose steps are kept."""


def card(address: PciAddress = PF, driver: str | None = "nvidia") -> PciFunction:
    function = gpu(address, int(address[5:7], 16), device="26b9", model="AD102GL [L40S]", driver=driver)
    return replace(function, has_virtual_functions=True, gpu_uuid=GUID)


def vf(
    type_: int | None,
    *creatable: tuple[int, str],
    address: str = VF,
    bind: int = BIND,
    driver: str = "nvidia",
) -> PciFunction:
    """A virtual function that NVIDIA's driver has registered with vfio."""
    group = 100 + int(address[-1]) + int(address[5:7], 16)
    function = gpu(address, group, device="26b9", model="AD102GL [L40S]", numa_node=1)
    vgpu = VendorVgpu(type_, creatable, driver_bind=bind) if driver == "nvidia" else None
    return replace(function, driver=driver, physical=PciAddress(f"{address[:-1]}0"), vgpu=vgpu)


def core_with(*functions: PciFunction) -> Recorded:
    core = Recorded(gpu("01:00.0", 1), card(), *functions)
    core.feed(KubeletAppeared("kubelet"))
    return core


@pytest.fixture
def core() -> Recorded:
    """Two vGPUs of one profile; the card has room for more."""
    return core_with(vf(1147, ONE_Q, TWO_Q), vf(1147, ONE_Q, TWO_Q, address=SECOND))


def retyped(core: ClaimCore, *functions: PciFunction) -> None:
    """An administrator writes a type; no uevent says so."""
    for function in functions:
        core.functions[function.address] = function
    core.pass_time(VGPU_INSPECTION_S + 1)


def lists(core: ClaimCore) -> Mapping[str, Mapping[str, str]]:
    """All lists but those of whole functions."""
    return {
        resource: {entry.id: str(entry.health) for entry in entries}
        for resource, entries in core.state.published.device_lists.items()
        if entries and resource not in (H100, L40S)
    }


def allocate(core: ClaimCore, *devices: str, resource: ResourceName = ONE) -> object:
    (answer,) = core.answers(AllocateAsked(core.token(), resource, (tuple(map(DeviceId, devices)),)))
    return answer


def refused(core: ClaimCore, *devices: str, resource: ResourceName = ONE) -> Cause:
    answer = allocate(core, *devices, resource=resource)
    assert isinstance(answer, Refused)
    (cause,) = answer.causes
    return cause


def blocked(core: ClaimCore, address: str = VF) -> BlockReason | None:
    return core.state.offered.devices[device_key(PciAddress(address))].blocked


HEALTHY: Final = {VF: "Healthy", SECOND: "Healthy"}


# --- the device plugin API --------------------------------------------------------------------------------------------


def test_each_profile_is_a_resource_of_its_own() -> None:
    core = core_with(vf(1147, ONE_Q, TWO_Q), vf(1148, address=SECOND))
    assert lists(core) == {ONE: {VF: "Healthy"}, TWO: {SECOND: "Healthy"}}
    assert core.state.index.devices[device_key(PciAddress(VF))].numa_node == vf(1147).numa_node


def test_allocate_names_the_virtual_function_as_a_pci_device(core: Recorded) -> None:
    group = vf(1147).iommu_group
    grant = Grant((("PCI_RESOURCE_NVIDIA_COM_NVIDIA_L40S-1Q", VF),), ("/dev/vfio/vfio", f"/dev/vfio/{group}"))
    assert allocate(core, VF) == Granted((grant,))
    core.others[ONE, VF] = "vm-1"
    core.pass_time(10)
    assert lists(core) == {ONE: HEALTHY}
    assert core.answers(PreStartAsked(core.token(), ONE, (DeviceId(VF),))) == [Ready()]
    assert refused(core, "0000:3b:00.7") is Cause.UNKNOWN_ID


def test_one_that_is_typed_later_is_found_by_the_clock() -> None:
    core = core_with(vf(0, ONE_Q), vf(0, ONE_Q, address=SECOND))
    assert lists(core) == {}, "they would be listed as virtual functions of no use"
    retyped(core, vf(1147, ONE_Q))
    assert lists(core) == {ONE: {VF: "Healthy"}}


def test_one_without_a_type_is_given_to_nobody(core: Recorded) -> None:
    retyped(core, vf(0, ONE_Q))
    assert lists(core) == {ONE: {SECOND: "Healthy"}}
    core.functions[PciAddress(SECOND)] = vf(0, ONE_Q, address=SECOND)
    assert refused(core, SECOND) is Cause.REPLACED_BY_ANOTHER, "Allocate reads the type again"
    (view,) = [v for v in view_of(core.state, core.at).devices if v.address == VF]
    assert view.cause == Cause.VIRTUAL_FUNCTION
    assert "no vGPU type is set" in view.reason
    core.pass_time(60)
    assert core.acts == []
    assert core.state.gpus.fitness == {}, "nobody asks whether a claim could bind one of them"


def test_one_that_is_retyped_while_it_is_free_changes_the_resource(core: Recorded) -> None:
    retyped(core, vf(1148, ONE_Q))
    assert lists(core) == {ONE: {SECOND: "Healthy"}, TWO: {VF: "Healthy"}}


@pytest.mark.parametrize("type_", [1148, 0])
def test_one_that_is_retyped_under_a_pod_stays_listed_until_the_pod_ends(core: Recorded, type_: int) -> None:
    core.others[ONE, VF] = "vm-1"
    core.pass_time(40)
    retyped(core, vf(type_, ONE_Q))
    old = {ONE: {VF: "Unhealthy", SECOND: "Healthy"}}
    assert lists(core) == (old | {TWO: {VF: "Unhealthy"}} if type_ else old)
    if type_:
        assert "vm-1" in core.reason(VF, TWO)
        assert refused(core, VF, resource=TWO) is Cause.CLAIMED_ELSEWHERE
    del core.others[ONE, VF]
    core.pass_time(40)
    new = {ONE: {SECOND: "Healthy"}}
    assert lists(core) == (new | {TWO: {VF: "Healthy"}} if type_ else new)


def test_a_retype_during_an_allocate_refuses_it(core: Recorded) -> None:
    core.functions[PciAddress(VF)] = vf(1148, ONE_Q)
    assert refused(core, VF) is Cause.REPLACED_BY_ANOTHER


def test_the_type_that_cannot_be_read_just_now_stays(core: Recorded) -> None:
    retyped(core, replace(vf(None), fault="current_vgpu_type cannot be read"))
    assert lists(core) == {ONE: {VF: "Unhealthy", SECOND: "Healthy"}}
    retyped(core, vf(1147, ONE_Q))
    core.pass_time(UNSETTLED_INSPECTIONS_S[-1])
    assert lists(core) == {ONE: HEALTHY}


def test_a_process_that_has_its_group_open_is_seen(core: Recorded) -> None:
    group = vf(1147).iommu_group
    assert group is not None
    core.holders[group] = (Holder(4711, "qemu", None),)
    core.pass_time(10)
    assert lists(core) == {ONE: {VF: "Unhealthy", SECOND: "Healthy"}}
    assert refused(core, VF) is Cause.HELD_BY_OTHER


def test_one_whose_unbind_may_wait_stays_in_its_list_until_a_poll_has_seen_its_group(core: Recorded) -> None:
    """Its type goes with its driver: it is an untyped one then, and joins their list only if its unbind waits."""
    core.silent = True
    unbound = replace(vf(None, driver=""), driver=None, vfio_bound=False)
    core.feed(HostChanged(unbound.address, None, "unbind pci"))
    core.feed(core.inspected(VF, unbound, card()))
    assert lists(core) == {ONE: {VF: "Unhealthy", SECOND: "Healthy"}}, "whether it is open is not known yet"
    core.feed(GroupsObserved(core.poll, ()))
    assert lists(core) == {ONE: {VF: "Unhealthy", SECOND: "Healthy"}}, "the poll was blind"
    core.enabled[VF] = 1
    core.silent = False
    core.pass_time(POLL_S)
    assert lists(core) == {ONE: {SECOND: "Healthy"}, UNTYPED: {VF: "Unhealthy"}}
    core.enabled[VF] = 0
    core.pass_time(POLL_S)
    assert lists(core) == {ONE: {SECOND: "Healthy"}}


def test_one_whose_unbind_waits_for_its_pod_says_so_in_the_pods_resource(core: Recorded) -> None:
    """The pod's resource has lost it: it has no type without NVIDIA's driver. To bind it would wait as well."""
    assert isinstance(allocate(core, VF), Granted)
    core.pass_time(GRANT_GRACE_S + LEDGER_S)
    core.others[ONE, VF] = "vm-1"
    core.enabled[VF] = 1
    core.pass_time(40)
    core.changed(replace(vf(None, driver=""), driver=None, vfio_bound=False))
    core.pass_time(POLL_S)
    (entry,) = [e for e in core.state.published.device_lists[ONE] if e.key == VF]
    assert (entry.health, entry.cause) == (Health.UNHEALTHY, Cause.UNBINDING)
    assert "bind it" not in entry.reason
    assert "end the process that has /dev/vfio/" in entry.reason


def test_one_that_nobody_had_open_leaves_its_list_and_makes_no_other(core: Recorded) -> None:
    core.changed(replace(vf(None, driver=""), driver=None, vfio_bound=False))
    assert lists(core) == {ONE: {SECOND: "Healthy"}}
    assert UNTYPED not in core.state.published.device_lists


def test_of_vgpus_in_one_iommu_group_one_holder_has_all() -> None:
    """Without ACS between the virtual functions."""
    second = replace(vf(1147, address=SECOND), iommu_group=vf(1147).iommu_group, nodes=vf(1147).nodes)
    core = core_with(vf(1147, ONE_Q), second)
    assert lists(core) == {ONE: HEALTHY}
    assert isinstance(allocate(core, VF, SECOND), Granted), "one container may have both"
    core.pass_time(GRANT_GRACE_S + LEDGER_S)
    core.others[ONE, VF] = "vm-1"
    core.pass_time(40)
    assert lists(core) == {ONE: {VF: "Healthy", SECOND: "Unhealthy"}}
    assert refused(core, SECOND) is Cause.GROUP_IN_USE
    assert blocked(core, SECOND) == BlockReason(BlockKind.HELD, "GroupInUse")
    waiting = core.prepare(allocated(name("one"), SECOND))
    assert core.answer(waiting) is None
    core.others.clear()
    core.pass_time(40)
    assert isinstance(core.answer(waiting), Prepared)
    assert refused(core, VF) is Cause.GROUP_IN_USE


def test_the_selectors_choose_the_virtual_function() -> None:
    core = core_with(replace(vf(1147, ONE_Q), class_code="0b4000"), vf(1147, address=SECOND))
    assert lists(core) == {ONE: {SECOND: "Healthy"}}


@pytest.mark.parametrize(
    ("driver", "cause"),
    [("vfio-pci", Cause.PHYSICAL_FUNCTION_ON_VFIO), (None, Cause.PHYSICAL_FUNCTION_NOT_READY)],
)
def test_its_physical_function_must_be_on_its_driver(
    core: Recorded, driver: str | None, cause: Cause
) -> None:
    core.changed(card(driver=driver))
    assert lists(core) == {ONE: dict.fromkeys((VF, SECOND), "Unhealthy")}
    assert refused(core, VF) is cause


def test_one_that_the_driver_has_not_registered_with_vfio_is_not_listed(core: Recorded) -> None:
    core.changed(replace(vf(1147, ONE_Q), vfio_bound=False, nodes=()))
    assert lists(core) == {ONE: {SECOND: "Healthy"}}
    (view,) = [v for v in view_of(core.state, core.at).devices if v.address == VF]
    assert "vfio-dev/ is missing" in view.reason


def test_256_functions_are_inspected_in_ten_parts() -> None:
    vfs = [
        vf(0, address=f"0000:{bus:02x}:{slot:02x}.{n}")
        for bus in (0x40, 0x41)
        for slot in range(16)
        for n in range(1, 8)
    ]
    core = core_with(*vfs)
    core.pass_time(VGPU_INSPECTION_S)
    due = [refresh.due_at for refresh in core.state.host.inspections.single.values()]
    assert len(due) == len(vfs)
    assert len(set(due)) == VGPU_SLOTS
    assert max(due.count(at) for at in set(due)) < len(vfs) // 4
    assert max(due) - core.at <= VGPU_INSPECTION_S


def test_one_that_nvidias_driver_has_typed_for_a_claim_is_its(core: Recorded) -> None:
    """Its claim has it from NodePrepareResources on; kubelet names the claim later, and not the virtual function."""
    typed = vf(1147, ONE_Q)
    assert typed.vgpu is not None
    core.functions[PciAddress(VF)] = replace(typed, vgpu=replace(typed.vgpu, made_by="NVIDIA's DRA driver"))
    assert refused(core, VF) is Cause.CLAIMED_ELSEWHERE, "Allocate reads it again"
    assert lists(core) == {ONE: {VF: "Unhealthy", SECOND: "Healthy"}}
    assert "NVIDIA's DRA driver has made it for a claim of its own" in core.reason(VF, ONE)
    assert core.refused(core.prepare(allocated(name("one"), VF))).causes == (Cause.CLAIMED_ELSEWHERE,)
    retyped(core, vf(0, ONE_Q))
    retyped(core, typed)
    assert lists(core) == {ONE: HEALTHY}


# --- names ------------------------------------------------------------------------------------------------------------


def test_a_name_is_learned_from_another_function_of_the_card_and_stays_when_the_card_is_full() -> None:
    core = core_with(vf(1147), vf(0, ONE_Q, address=SECOND))
    assert lists(core) == {ONE: {VF: "Healthy"}}
    retyped(core, vf(1147), vf(1147, address=SECOND))
    assert lists(core) == {ONE: HEALTHY}


def test_two_cards_of_one_model_may_number_differently() -> None:
    other = "0000:5e:00.4"
    core = core_with(vf(1147, ONE_Q), card(OTHER_PF), vf(1147, (1147, TWO_Q[1]), address=other))
    assert lists(core) == {ONE: {VF: "Healthy"}, TWO: {other: "Healthy"}}


def test_one_without_a_known_name_is_in_no_list_and_the_reason_has_the_remedy() -> None:
    core = core_with(vf(1147))
    assert lists(core) == {}
    assert core.state.published.served.keys() == {H100}
    (view,) = [v for v in view_of(core.state, core.at).devices if v.address == VF]
    assert view.cause == Cause.VGPU_UNNAMED
    assert f"--vgpu-type='{PF}/1147=NAME'" in view.reason
    assert core.wanted.offer is not None
    names = [d.name for d in wanted_pool(core.wanted.offer, ServerKeeps.YES).devices]
    assert names == ["gpu-0000-01-00-0", "gpu-0000-3b-00-0"]
    retyped(core, vf(1147, ONE_Q))
    assert lists(core) == {ONE: {VF: "Healthy"}}


def test_lists_that_contradict_each_other_name_nothing() -> None:
    core = core_with(vf(1147, ONE_Q), vf(0, (1147, "NVIDIA L40S-1B"), address=SECOND))
    assert lists(core) == {}
    (view,) = [v for v in view_of(core.state, core.at).devices if v.address == VF]
    assert "several names" in view.reason


def test_the_operator_s_name_is_used_where_no_list_has_one() -> None:
    core = Recorded(
        card(),
        vf(1147),
        settings=replace(SETTINGS, vgpu_types=(OwnVgpuType(str(PF), 1147, "NVIDIA L40S-1Q"),)),
    )
    core.feed(KubeletAppeared("kubelet"))
    assert lists(core) == {ONE: {VF: "Healthy"}}


def test_a_new_bind_of_the_card_s_driver_ends_the_names(core: Recorded) -> None:
    core.changed(vf(1147, bind=BIND + 1), vf(1147, bind=BIND + 1, address=SECOND))
    assert lists(core) == {}
    core.changed(vf(1147, (1147, TWO_Q[1]), bind=BIND + 1))
    assert lists(core) == {TWO: HEALTHY}


def test_a_daemon_that_takes_over_knows_the_names_of_the_one_before() -> None:
    core = core_with(vf(1147))
    core.state = replace(core.state, daemon=replace(core.state.daemon, role=Role.TAKING_OVER))
    core.feed(PredecessorGone("handed over", {}, {PF: CardTypes(BIND, {1147: ("NVIDIA L40S-1Q",)})}))
    assert lists(core) == {ONE: {VF: "Healthy"}}


def test_a_pod_keeps_one_whose_name_was_lost(core: Recorded) -> None:
    """The state directory was lost, and the card is full: kubelet still counts it."""
    core.others[ONE, VF] = "vm-1"
    full = core_with(vf(1147), vf(1147, address=SECOND))
    full.others = core.others
    full.state = replace(full.state, published=replace(full.state.published, served={ONE: frozenset()}))
    full.pass_time(40)
    assert lists(full) == {ONE: {VF: "Healthy"}}
    assert "vm-1" in full.reason(VF, ONE)


# --- claims -----------------------------------------------------------------------------------------------------------


def test_its_slice_has_the_profile_and_what_the_card_is(core: Recorded) -> None:
    assert core.wanted.offer is not None
    devices = {d.name: d for d in wanted_pool(core.wanted.offer, ServerKeeps.YES).devices}
    shown = {n: a.value for n, a in devices["gpu-0000-3b-00-4"].attributes.items()}
    function = vf(1147)
    assert shown == {
        "type": "vgpu",
        "profile": "NVIDIA L40S-1Q",
        "profileID": 1147,
        "vgpuFramework": "vf",
        "uuid": GUID,
        "productName": "AD102GL [L40S]",
        "parent": PF,
        "vendorID": "0x10de",
        "deviceID": "0x26b9",
        "iommuGroup": function.iommu_group,
        "iommuFDEnabled": False,
        "resource.kubernetes.io/pciBusID": VF,
        "resource.kubernetes.io/pcieRoot": function.pcie_root,
        "resource.kubernetes.io/numaNode": 1,
    }
    assert devices["gpu-0000-3b-00-4"].attributes["profileID"] == Attribute("int", 1147)
    assert devices["gpu-0000-3b-00-4"].capacity == {}


def test_without_a_numa_node_neither_list_nor_slice_have_one_nor_that_of_its_card() -> None:
    core = core_with(replace(vf(1147, ONE_Q), numa_node=None), replace(card(), numa_node=1))
    (entry,) = core.state.published.device_lists[ONE]
    assert entry.numa_node is None
    assert core.wanted.offer is not None
    devices = {d.name: d for d in wanted_pool(core.wanted.offer, ServerKeeps.YES).devices}
    shown = devices["gpu-0000-3b-00-4"].attributes
    assert "resource.kubernetes.io/numaNode" not in shown


def test_a_claim_is_prepared_and_unprepared_without_an_act(core: Recorded) -> None:
    claim = allocated(name("one"), VF)
    core.held_back = {"files"}
    token = core.prepare(claim)
    (act,) = core.wanted.files.values()
    (device,) = act.devices
    assert nodes_of(device) == (f"/dev/vfio/{vf(1147).iommu_group}", "/dev/vfio/vfio")
    contents = contents_of(DRIVER, claim, act.devices)
    document: Any = contents.metadata[0].documents[0]
    function = vf(1147)
    assert document["requests"][0]["devices"][0]["attributes"] == {
        "parent": {"string": PF},
        "resource.kubernetes.io/numaNode": {"int": 1},
        "resource.kubernetes.io/pciBusID": {"string": VF},
        "resource.kubernetes.io/pcieRoot": {"string": function.pcie_root},
    }
    core.release("files")
    assert isinstance(core.answer(token), Prepared)
    assert lists(core) == {ONE: {VF: "Unhealthy", SECOND: "Healthy"}}
    assert refused(core, VF) is Cause.CLAIMED_ELSEWHERE
    assert isinstance(core.answer(core.unprepare(name("one"))), Unprepared)
    assert lists(core) == {ONE: HEALTHY}
    assert core.acts == []
    assert core.state.gpus.fitness == {}


def test_with_iommufd_a_claim_gets_the_cdev(core: Recorded) -> None:
    function = vf(1147, ONE_Q)
    nodes = (*function.nodes, "/dev/vfio/devices/vfio3", "/dev/iommu")
    core.changed(replace(function, nodes=nodes, iommufd=True))
    answer = allocate(core, VF)
    assert isinstance(answer, Granted)
    assert answer.containers[0].nodes[-2:] == ("/dev/vfio/devices/vfio3", "/dev/iommu")


def test_what_a_pod_has_no_claim_gets(core: Recorded) -> None:
    allocate(core, VF)
    assert blocked(core) == BlockReason(BlockKind.HELD, "Allocated")
    core.others[ONE, VF] = "vm-1"
    core.pass_time(40)
    assert core.answer(core.prepare(allocated(name("one"), VF))) is None
    assert "pod default/vm-1" in core.problem(name("one"))
    del core.others[ONE, VF]
    core.pass_time(40)
    assert core.claim_state(name("one")) is ClaimState.PREPARED


@pytest.mark.parametrize("type_", [1148, 0])
def test_a_claim_whose_device_is_retyped_has_drifted(core: Recorded, type_: int) -> None:
    core.prepare(allocated(name("one"), VF))
    after = core.restarted()
    retyped(after, vf(type_, ONE_Q))
    assert after.claim_state(name("one")) is ClaimState.DRIFTED
    assert "the claim has NVIDIA L40S-1Q" in after.problem(name("one"))
    assert lists(after).get(TWO, {}).get(VF) != "Healthy", "the claim still owns it"
    retyped(after, vf(1147, ONE_Q))
    assert isinstance(after.answer(after.prepare(name("one"))), Prepared)
    assert core.acts == after.acts == []


def test_one_that_is_removed_under_its_claim_has_drifted_until_it_is_made_again(core: Recorded) -> None:
    """SR-IOV is switched off and on; what is made then has no type at first."""
    core.prepare(allocated(name("one"), VF))
    core.functions[PF] = replace(card(), has_virtual_functions=False)
    core.unplugged(VF, SECOND)
    assert core.claim_state(name("one")) is ClaimState.DRIFTED
    assert VF in core.problem(name("one"))
    assert lists(core) == {}
    assert core.state.offered.devices[device_key(PF)].blocked is not None, "the claim has a part of it"
    core.changed(card(), replace(vf(0, ONE_Q), presence=2))
    assert core.claim_state(name("one")) is ClaimState.DRIFTED
    assert isinstance(core.answer(core.unprepare(name("one"))), Unprepared)
    retyped(core, replace(vf(1147, ONE_Q), presence=2))
    assert lists(core) == {ONE: {VF: "Healthy"}}
    assert isinstance(core.answer(core.prepare(allocated(name("two"), VF))), Prepared)
    assert core.acts == []


def test_the_type_is_read_again_before_a_claim_gets_it(core: Recorded) -> None:
    core.functions[PciAddress(VF)] = vf(0, ONE_Q)
    assert isinstance(core.answer(core.prepare(allocated(name("one"), VF))), Refused)


# --- the journal ------------------------------------------------------------------------------------------------------


def test_a_journal_of_it_is_replayed_without_a_difference(core: Recorded, tmp_path: Path) -> None:
    core.others[ONE, VF] = "vm-1"
    core.pass_time(40)
    retyped(core, vf(1148))
    core.prepare(allocated(name("one"), SECOND))
    core.unplugged(VF, SECOND)
    write(tmp_path, *core.steps)
    assert "prepared gpu-0000-3b-00-5" in "\n".join(replayed(tmp_path))
