"""SR-IOV: a virtual function is given away alone, while its physical function is on a driver of its host. A physical
function with virtual ones is not given away; who has it keeps it, and kubelet's books stay right."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gpuactors import limits
from gpuactors.core.claims.pool import wanted_pool
from gpuactors.core.claims.progress import CLAIM_TOMBSTONE_S
from gpuactors.core.events.claims import ActFailed
from gpuactors.core.events.deviceplugin import AllocateAsked
from gpuactors.core.events.host import FunctionInspected, HostChanged, HostScanned
from gpuactors.core.host.usage import POLL_S
from gpuactors.core.reports.snapshot import report
from gpuactors.core.step import step
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.claim import ActFault, ClaimsOf, DraHealth, Prepared, Target, Unprepared
from gpuactors.core.values.claim_states import ClaimState
from gpuactors.core.values.effects import Grant, Granted, Ready, Refused
from gpuactors.core.values.model import DeviceId, PciAddress, PciFunction, ResourceName, device_key
from gpuactors.core.values.own_resources import parse_model_rule
from gpuactors.core.values.slices import Attribute, BlockKind, BlockReason, ServerKeeps
from tests.core.builders import H100, SETTINGS, Core, audio, gpu, pre_start_call
from tests.core.gpus.claim_core import ClaimCore, allocated, name

PF, VF, VF2, OTHER = "0000:01:00.0", "0000:01:00.4", "0000:01:00.5", "0000:02:00.0"
OF_VFS = ResourceName(f"{H100}_VF")


def physical(driver: str | None = "xe", *, virtual: bool = True) -> PciFunction:
    return replace(gpu(PF, 1, driver=driver), has_virtual_functions=virtual)


def virtual(driver: str | None = "vfio-pci", address: str = VF, group: int = 9) -> PciFunction:
    return replace(gpu(address, group, driver=driver), physical=PciAddress(PF))


def causes(core: ClaimCore) -> dict[str, Cause]:
    return {device.key: device.cause for device in report(core.state)}


def blocked(core: ClaimCore) -> dict[str, BlockReason | None]:
    return {key: device.blocked for key, device in core.state.offered.devices.items()}


def allocate(core: ClaimCore, *devices: str) -> object:
    """The answer to an Allocate of virtual functions."""
    token = core.token()
    core.feed(AllocateAsked(token, OF_VFS, (tuple(map(DeviceId, devices)),)))
    return core.allocation(token)


# --- the device plugin API --------------------------------------------------------------------------------------------


def test_the_device_plugin_gives_a_virtual_function_away_and_not_its_physical_one() -> None:
    core = ClaimCore(physical(), virtual(), gpu(OTHER, 2))
    assert core.device_list(OF_VFS) == {VF: "Healthy"}
    assert core.device_list() == {OTHER: "Healthy"}
    granted = Grant(
        (("PCI_RESOURCE_NVIDIA_COM_GH100_H100_SXM5_80GB_VF", VF),), ("/dev/vfio/vfio", "/dev/vfio/9")
    )
    assert allocate(core, VF) == Granted((granted,))
    core.others[OF_VFS, VF] = "vm-1"
    core.pass_time(limits.LEDGER_S)
    assert core.device_list(OF_VFS) == {VF: "Healthy"}
    assert causes(core)[VF] is Cause.ALLOCATED


def test_neither_is_given_away_while_the_physical_one_is_on_vfio() -> None:
    core = ClaimCore(physical("vfio-pci"), virtual(), gpu(OTHER, 2))
    assert core.device_list() == {PF: "Unhealthy", OTHER: "Healthy"}
    assert core.device_list(OF_VFS) == {VF: "Unhealthy"}
    of_vf, of_pf = Cause.PHYSICAL_FUNCTION_ON_VFIO, Cause.VIRTUAL_FUNCTIONS
    assert causes(core) == {PF: of_pf, VF: of_vf, OTHER: Cause.FREE}
    for answer, cause in ((core.allocation(core.allocate(PF)), of_pf), (allocate(core, VF), of_vf)):
        assert isinstance(answer, Refused)
        assert answer.causes == (cause,)
    assert f"{PF}, which is on vfio-pci" in core.reason(VF, OF_VFS)
    assert "neither KubeVirt nor Kata" in core.reason(VF, OF_VFS)
    assert "write 0 to its sriov_numvfs" in core.reason(PF)


UNFIT = {
    "it is on no driver": (physical(None),),
    "it cannot be read": (replace(physical(), fault="its class cannot be read"),),
    "it cannot be found": (),
}
"""The physical function of one that nobody gets, and why."""


@pytest.mark.parametrize("why", UNFIT)
def test_one_whose_physical_function_is_not_ready_is_not_given_away(why: str) -> None:
    core = ClaimCore(*UNFIT[why], virtual(), gpu(OTHER, 2))
    resource = OF_VFS if UNFIT[why] else H100
    assert core.device_list(resource)[VF] == "Unhealthy"
    assert causes(core)[VF] is Cause.PHYSICAL_FUNCTION_NOT_READY
    assert PF in core.reason(VF, resource)
    refused = core.refused(core.prepare(allocated(name("one"), VF)))
    assert refused.causes == (Cause.PHYSICAL_FUNCTION_NOT_READY,)
    core.changed(physical())
    core.changed(virtual())
    assert core.device_list(OF_VFS) == {VF: "Healthy"}
    assert isinstance(core.answer(core.prepare(allocated(name("two"), VF))), Prepared)


def test_a_hint_about_the_physical_function_is_one_about_its_virtual_ones() -> None:
    """A virtual function has no uevent when its physical one is bound to another driver."""
    core = ClaimCore(physical(), virtual())
    requested = core.state.host.seen[PciAddress(VF)].inspection
    core.changed(physical("vfio-pci"))
    assert core.state.host.seen[PciAddress(VF)].inspection > requested
    assert core.device_list(OF_VFS) == {VF: "Unhealthy"}


def test_a_hint_about_an_unknown_function_is_one_about_what_is_being_inspected() -> None:
    """The inspection may have found virtual functions that the core has not heard of, and that are gone by now."""
    core = ClaimCore(physical(virtual=False), gpu(OTHER, 2))
    state, _ = step(core.state, HostChanged(PciAddress(PF), None, "change pci"), core.at)
    asked = state.host.inspections.functions[PciAddress(PF)]
    state, _ = step(state, HostChanged(PciAddress(VF), None, "remove pci"), core.at)
    state, _ = step(state, FunctionInspected(asked, PciAddress(PF), (physical(),)), core.at)
    assert state.host.inspections.functions[PciAddress(PF)] > asked
    assert PciAddress(OTHER) not in state.host.inspections.functions


@pytest.mark.parametrize("vfio", [False, True])
def test_one_on_nvidias_driver_is_a_vgpu_and_is_never_given_away(vfio: bool) -> None:
    core = ClaimCore(physical("nvidia"), replace(virtual("nvidia"), vfio_bound=vfio))
    assert causes(core) == {VF: Cause.VIRTUAL_FUNCTION, PF: Cause.VIRTUAL_FUNCTIONS}
    assert core.refused(core.prepare(allocated(name("one"), VF))).causes == (Cause.VIRTUAL_FUNCTION,)
    assert core.acts == []
    assert core.wanted.offer is not None
    pool = wanted_pool(core.wanted.offer, ServerKeeps.YES)
    assert [d.name for d in pool.devices] == ["gpu-0000-01-00-0"]
    assert "on NVIDIA's driver" in pool.left_out["gpu-0000-01-00-4"]


def test_the_operator_may_give_both_one_name() -> None:
    own = ResourceName("example.com/any")
    rules = (*SETTINGS.selectors, parse_model_rule(f"10de:2330={own}"))
    core = ClaimCore(physical(), virtual(), settings=replace(SETTINGS, selectors=rules))
    assert core.device_list(own) == {VF: "Healthy"}


# --- slices and claims ------------------------------------------------------------------------------------------------


def test_a_slice_has_both_and_the_physical_one_with_a_taint() -> None:
    core = ClaimCore(physical(), replace(virtual(), numa_node=1), gpu(OTHER, 2))
    assert core.wanted.offer is not None
    pool = wanted_pool(core.wanted.offer, ServerKeeps.YES)
    taints = {d.name: [t.value for t in d.taints] for d in pool.devices}
    assert taints == {
        "gpu-0000-01-00-0": ["VirtualFunctions"],
        "gpu-0000-01-00-4": [],
        "gpu-0000-02-00-0": [],
    }
    (attributes,) = (d.attributes for d in pool.devices if d.name == "gpu-0000-01-00-4")
    assert attributes["isVF"] == Attribute("bool", True)
    assert attributes["parent"] == Attribute("string", PF)
    assert attributes["type"] == Attribute("string", "vfio")
    assert attributes["resource.kubernetes.io/pciBusID"] == Attribute("string", VF)
    assert attributes["resource.kubernetes.io/numaNode"] == Attribute("int", 1)


@pytest.mark.parametrize("driver", ["xe", "vfio-pci", None])
def test_no_claim_gets_a_physical_function_with_virtual_ones_and_nothing_is_touched(
    driver: str | None,
) -> None:
    core = ClaimCore(physical(driver), virtual(None))
    refused = core.refused(core.prepare(allocated(name("one"), PF)))
    assert refused.causes == (Cause.VIRTUAL_FUNCTIONS,)
    assert PF in refused.reason
    assert core.acts == []


@pytest.mark.parametrize("driver", ["xe", None])
def test_a_claim_binds_a_virtual_function_alone_and_returns_it(driver: str | None) -> None:
    """Another one is in its slot, and of its vendor."""
    core = ClaimCore(physical(), virtual(driver), virtual(driver, VF2, 10))
    assert isinstance(core.answer(core.prepare(allocated(name("one"), VF))), Prepared)
    assert core.acts == [(Target.VFIO, VF)]
    assert (core.driver(VF), core.driver(VF2), core.driver(PF)) == ("vfio-pci", driver, "xe")
    assert core.device_list(OF_VFS) == {VF: "Unhealthy"}, "it is the claim's"
    after = core.restarted()
    assert after.claim_state(name("one")) is ClaimState.PREPARED
    assert isinstance(after.answer(after.unprepare(name("one"))), Unprepared)
    assert after.acts == [(Target.ORIGINAL_DRIVER, VF)]
    assert after.driver(VF) == driver


def test_one_that_an_administrator_has_bound_stays_bound() -> None:
    core = ClaimCore(physical(), virtual())
    core.prepare(allocated(name("one"), VF))
    core.unprepare(name("one"))
    assert core.driver(VF) == "vfio-pci"
    assert core.device_list(OF_VFS) == {VF: "Healthy"}


def test_of_a_group_of_virtual_functions_one_holder_has_all() -> None:
    core = ClaimCore(physical(), virtual(), virtual(address=VF2))
    assert isinstance(allocate(core, VF), Granted)
    core.others[OF_VFS, VF] = "vm-1"
    core.pass_time(limits.LEDGER_S)
    assert causes(core)[VF2] is Cause.GROUP_IN_USE
    refused = allocate(core, VF2)
    assert isinstance(refused, Refused)
    assert refused.causes == (Cause.GROUP_IN_USE,)
    assert blocked(core)[VF2] == BlockReason(BlockKind.HELD, "GroupInUse")
    waiting = core.prepare(allocated(name("one"), VF2))
    assert core.claim_state(name("one")) is ClaimState.WAITING
    assert "pod default/vm-1" in core.problem(name("one"))
    core.others.clear()
    core.pass_time(limits.LEDGER_S + POLL_S)
    assert isinstance(core.answer(waiting), Prepared)
    assert core.device_list(OF_VFS) == {VF: "Unhealthy", VF2: "Unhealthy"}
    refused = allocate(core, VF)
    assert isinstance(refused, Refused)
    assert "claim default/one" in refused.reason


def test_one_of_a_group_with_another_on_a_driver_of_the_host_is_not_given_away() -> None:
    core = ClaimCore(physical(), virtual(), virtual("igbvf", VF2))
    assert causes(core)[VF] is Cause.GROUP_NOT_VIABLE
    assert f"{VF2} is bound to igbvf and is no part of the GPU" in core.reason(VF, OF_VFS)
    refused = core.refused(core.prepare(allocated(name("one"), VF)))
    assert refused.causes == (Cause.GROUP_NOT_VIABLE,)
    assert core.acts == []


# --- restarts of the daemon -------------------------------------------------------------------------------------------


def test_a_pods_virtual_function_is_known_after_a_restart() -> None:
    core = ClaimCore(physical(), virtual(), virtual(address=VF2, group=10))
    allocate(core, VF)
    core.others[OF_VFS, VF] = "vm-1"
    core.pass_time(limits.LEDGER_S)
    after = core.restarted()
    after.others = core.others
    after.pass_time(limits.LEDGER_QUIET_S)
    assert after.device_list(OF_VFS) == {VF: "Healthy", VF2: "Healthy"}
    assert after.reason(VF, OF_VFS) == "allocated to pod default/vm-1"
    assert after.answer(after.prepare(allocated(name("whole"), PF))) is not None, "refused, for its parts"
    assert after.answer(after.prepare(allocated(name("one"), VF))) is None
    assert "pod default/vm-1" in after.problem(name("one"))


def test_a_pods_virtual_function_that_went_while_no_daemon_ran_keeps_the_card() -> None:
    core = ClaimCore(physical(), virtual())
    core.others[OF_VFS, VF] = "vm-1"
    core.pass_time(limits.LEDGER_S)
    core.functions = {PciAddress(PF): physical("vfio-pci", virtual=False)}
    after = core.restarted()
    after.others = core.others
    after.state = replace(after.state, published=replace(after.state.published, served={OF_VFS: frozenset()}))
    after.pass_time(limits.LEDGER_QUIET_S)
    assert after.device_list(OF_VFS) == {VF: "Unhealthy"}


@pytest.mark.parametrize("driver", ["xe", "vfio-pci"])
def test_a_claims_virtual_function_is_known_after_a_restart_and_compared_with_what_is_there(
    driver: str,
) -> None:
    core = ClaimCore(physical(), virtual(driver))
    core.prepare(allocated(name("one"), VF))
    same = core.restarted()
    assert same.claim_state(name("one")) is ClaimState.PREPARED
    assert same.device_list(OF_VFS) == {VF: "Unhealthy"}
    core.functions = {PciAddress(PF): physical(virtual=False)}
    gone = core.restarted()
    assert gone.claim_state(name("one")) is ClaimState.DRIFTED
    assert VF in gone.problem(name("one"))
    assert isinstance(gone.answer(gone.unprepare(name("one"))), Unprepared)
    assert gone.claim_state(name("one")) is ClaimState.TOMBSTONE


# --- they come and go -------------------------------------------------------------------------------------------------


def test_virtual_functions_are_listed_when_they_are_made_and_gone_when_they_go() -> None:
    """drivers/pci/iov.c: `add` comes before the links that say what it is; no uevent names the physical one as the
    virtual ones go."""
    core = ClaimCore(physical(virtual=False))
    core.functions[PciAddress(VF)] = replace(virtual(None), physical=None)
    core.feed(HostChanged(PciAddress(VF), None, "add pci"))
    core.functions |= {PciAddress(VF): virtual(None), PciAddress(PF): physical()}
    core.feed(HostChanged(PciAddress(VF), None, "change pci"))
    assert causes(core)[PF] is Cause.VIRTUAL_FUNCTIONS
    core.functions[PciAddress(VF)] = virtual()
    core.feed(HostChanged(PciAddress(VF), None, "bind pci"))
    assert core.device_list(OF_VFS) == {VF: "Healthy"}
    core.feed(HostChanged(PciAddress(PF), None, "change pci"))
    assert core.device_list(OF_VFS) == {VF: "Healthy"}
    core.functions[PciAddress(PF)] = physical(virtual=False)
    core.unplugged(VF)
    assert core.state.published.device_lists.get(OF_VFS, ()) == ()
    assert causes(core) == {PF: Cause.NOT_BOUND}


def test_a_pod_and_a_claim_whose_virtual_functions_go_with_the_driver_of_the_physical_one() -> None:
    core = ClaimCore(physical(), virtual(), virtual(None, VF2, 10))
    allocate(core, VF)
    core.others[OF_VFS, VF] = "vm-1"
    core.pass_time(limits.LEDGER_S)
    core.prepare(allocated(name("one"), VF2))
    core.functions[PciAddress(PF)] = physical("vfio-pci", virtual=False)
    core.unplugged(VF, VF2)
    assert causes(core)[PF] is Cause.CARD_IN_USE, "whole again, and others have parts of it"
    assert core.device_list(OF_VFS) == {VF: "Unhealthy"}
    (entry,) = core.state.published.device_lists[OF_VFS]
    assert entry.cause is Cause.GONE
    assert core.claim_state(name("one")) is ClaimState.DRIFTED
    assert isinstance(core.answer(core.unprepare(name("one"))), Unprepared)
    core.pass_time(CLAIM_TOMBSTONE_S)
    assert core.device_list() == {PF: "Unhealthy"}
    assert core.reason(PF) == f"its virtual function {VF} is allocated to pod default/vm-1 as {OF_VFS}"
    core.others.clear()
    core.pass_time(limits.LEDGER_S + POLL_S)
    assert core.device_list() == {PF: "Healthy"}


def test_virtual_functions_that_appear_during_the_act_on_their_physical_one_end_it() -> None:
    core = ClaimCore(physical(virtual=False))
    core.held_back = {"device"}
    waiting = core.prepare(allocated(name("one"), PF))
    (act,) = core.wanted.devices.values()
    core.changed(virtual("xe"), physical())
    fault = ActFault.VIRTUAL_FUNCTIONS
    core.feed(ActFailed(act.number, f"{PF} has active virtual functions", fault, driver_kind=ClaimsOf.GPUS))
    assert core.driver(PF) == "xe"
    assert core.answer(waiting) is None or isinstance(core.answer(waiting), Refused)
    assert "virtual functions" in core.problem(name("one"))
    assert blocked(core)[VF] == BlockReason(BlockKind.HELD, "CardInUse"), "the claim is not over"
    core.unprepare(name("one"))
    core.release("device")
    assert blocked(core)[VF] is None


def test_a_pod_keeps_a_gpu_whose_virtual_functions_appear_and_the_books_stay_right() -> None:
    core = ClaimCore(physical("vfio-pci", virtual=False), gpu(OTHER, 2))
    assert isinstance(core.allocation(core.allocate(PF)), Granted)
    core.ledger[PF] = "vm-1"
    core.pass_time(limits.LEDGER_S)
    core.changed(physical("vfio-pci"), virtual())
    assert core.device_list() == {PF: "Healthy", OTHER: "Healthy"}
    assert core.device_list(OF_VFS) == {VF: "Unhealthy"}
    assert causes(core)[PF] is Cause.ALLOCATED
    token = core.token()
    core.feed(pre_start_call(PF, token=token))
    assert isinstance(core.allocation(token), Ready), "its container may start again"
    core.ledger.clear()
    core.pass_time(limits.LEDGER_S + POLL_S)
    assert core.device_list()[PF] == "Unhealthy"
    core.changed(physical("vfio-pci", virtual=False))
    assert core.device_list()[PF] == "Healthy"


def test_a_claim_keeps_a_gpu_whose_virtual_functions_appear() -> None:
    core = ClaimCore(physical("nvidia", virtual=False))
    core.prepare(allocated(name("one"), PF))
    core.changed(physical("vfio-pci"))
    assert [h.health for h in core.wanted.health] == [DraHealth.HEALTHY]
    assert core.wanted.offer is not None
    (offered,) = core.wanted.offer.devices
    assert (offered.claimed, offered.blocked) == (True, None)
    assert isinstance(core.answer(core.prepare(name("one"))), Prepared)
    assert core.claim_state(name("one")) is ClaimState.PREPARED


def test_a_physical_function_is_whole_again_when_its_virtual_ones_go_without_a_uevent_of_it() -> None:
    """One of its virtual functions may be none that is selected, and so not known."""
    for known in (virtual(), replace(audio(VF, 9), physical=PciAddress(PF))):
        core = ClaimCore(physical("vfio-pci"), known)
        assert core.device_list()[PF] == "Unhealthy"
        core.functions[PciAddress(PF)] = physical("vfio-pci", virtual=False)
        del core.functions[PciAddress(VF)]
        core.feed(HostChanged(PciAddress(VF), None, "remove pci"))
        assert core.device_list() == {PF: "Healthy"}


def test_one_that_is_removed_while_a_process_has_it_stays_a_virtual_function() -> None:
    """Its links go at once, it and its group's node stay: by links alone it would be a whole function."""
    held = replace(virtual(), presence=7)
    core = ClaimCore(physical("nvidia"), held)
    core.ledger[VF] = "vm-1"
    core.changed(
        physical("nvidia", virtual=False), replace(held, physical=None, driver=None, vfio_bound=False)
    )
    assert core.state.index.devices[device_key(PciAddress(VF))].resource == OF_VFS
    refused = core.refused(core.prepare(allocated(name("one"), PF)))
    assert refused.causes == (Cause.VIRTUAL_FUNCTIONS,)
    assert core.acts == []
    core.changed(replace(held, physical=None, driver=None, vfio_bound=False, presence=8))
    assert core.state.host.functions[PciAddress(VF)].physical is None, "another function came there"


LEAVING = replace(gpu(VF, 9, driver=None, has_node=True), unlinked=True)
"""A virtual function whose removal waits for a process, and whose links are gone."""


def test_one_that_is_first_seen_while_its_removal_waits_is_offered_to_nobody() -> None:
    core = ClaimCore(physical("nvidia", virtual=False), LEAVING, gpu(OTHER, 2))
    core.enabled[VF] = 1
    core.pass_time(POLL_S)
    lists = core.state.published.device_lists
    assert {entry.key for of_resource in lists.values() for entry in of_resource} == {OTHER}
    assert causes(core).keys() == {PF, OTHER}
    assert core.wanted.offer is not None
    names = {d.name for d in wanted_pool(core.wanted.offer, ServerKeeps.YES).devices}
    assert names == {"gpu-0000-01-00-0", "gpu-0000-02-00-0"}
    refused = core.refused(core.prepare(allocated(name("one"), VF)))
    assert refused.causes == (Cause.PHYSICAL_FUNCTION_NOT_READY,)
    assert "it is being removed" in refused.reason
    assert core.acts == []


def test_one_that_a_pod_has_is_listed_by_a_daemon_that_starts_while_its_removal_waits() -> None:
    core = Core(served={OF_VFS: frozenset({"10de:2330"})})
    core.others[OF_VFS, VF] = "vm-1"
    core.enabled[VF] = 1
    core.feed(HostScanned(core.scan, (physical("nvidia", virtual=False), LEAVING, gpu(OTHER, 2))))
    assert core.device_list(OF_VFS) == {VF: "Unhealthy"}
    assert core.device_list() == {OTHER: "Healthy"}
    assert "its unbind or unplug waits" in core.reason(VF, OF_VFS)


def test_one_that_was_just_added_is_a_device_when_it_has_its_link() -> None:
    core = ClaimCore(physical(), replace(LEAVING, driver="vfio-pci", vfio_bound=True))
    assert causes(core).keys() == {PF}
    core.changed(virtual())
    assert core.device_list(OF_VFS) == {VF: "Healthy"}


def test_the_removal_of_one_without_its_link_is_a_hint_about_the_card() -> None:
    core = ClaimCore(physical("vfio-pci"), LEAVING)
    assert core.device_list()[PF] == "Unhealthy"
    core.functions[PciAddress(PF)] = physical("vfio-pci", virtual=False)
    core.unplugged(VF)
    assert core.device_list() == {PF: "Healthy"}
