"""One owner per GPU and IOMMU group: across claims, and across the device plugin's pods."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gpuactors import limits
from gpuactors.core.claims.progress import CLAIM_TOMBSTONE_S
from gpuactors.core.events import Event
from gpuactors.core.events.daemon import Ticked
from gpuactors.core.events.host import HostChanged, InspectionFailed, UeventsLost, UeventsOpened
from gpuactors.core.events.kubelet import LedgerRead
from gpuactors.core.host import schedule
from gpuactors.core.host.inspections import SHORTAGE_INSPECTION_S, UEVENTS_END_S
from gpuactors.core.host.usage import POLL_S
from gpuactors.core.ledger.ledger import LEDGER_SETTLING_S
from gpuactors.core.reports.kube_events import PodsOf, kube_events
from gpuactors.core.state.claims import gpus_of
from gpuactors.core.values.claim import Prepared, Target, Unprepared
from gpuactors.core.values.claim_states import ClaimState
from gpuactors.core.values.effects import Granted, Refused
from gpuactors.core.values.model import (
    ClaimedDevice,
    DeviceId,
    Holder,
    LedgerEntry,
    LedgerFile,
    PciAddress,
    PciFunction,
    Pod,
    RunningKubelet,
    Token,
)
from tests.core.builders import H100, A, B, audio, gpu
from tests.core.gpus.claim_core import ON_HOST, PRE_BOUND, ClaimCore, allocated, core_with, name
from tests.support.edits import nodes_of

AUDIO = "0000:01:00.1"


# --- forced deletion ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [ON_HOST, PRE_BOUND], ids=["on its host driver", "pre-bound"])
def test_a_new_claim_waits_in_its_call_and_is_woken_by_the_release(function: PciFunction) -> None:
    core = core_with(function, old=(A,), new=(A,))
    core.prepare(name("old"))
    new = core.prepare(name("new"))
    assert core.claim_state(name("new")) is ClaimState.WAITING
    core.pass_time(limits.CLAIM_ANSWER_S - 1)
    assert core.answer(new) is None
    core.unprepare(name("old"))
    core.pass_time(0.5)
    assert isinstance(core.answer(new), Prepared)
    assert core.driver(A) == "vfio-pci"
    assert core.claim_state(name("old")) is ClaimState.TOMBSTONE


def test_after_35_s_the_error_names_the_claim_that_has_the_gpu() -> None:
    core = core_with(ON_HOST, old=(A,), new=(A,))
    core.prepare(name("old"))
    new = core.prepare(name("new"))
    core.pass_time(limits.CLAIM_ANSWER_S - 0.1)
    assert core.answer(new) is None
    core.pass_time(0.2)
    assert "belongs to the claim default/old" in core.refusal(new)
    assert core.claim_state(name("new")) is ClaimState.ABSENT
    assert core.claim_state(name("old")) is ClaimState.PREPARED


def test_a_claim_that_waits_while_the_release_is_under_way_is_told_so() -> None:
    core = core_with(ON_HOST, old=(A,), new=(A,))
    core.prepare(name("old"))
    core.held_back = {"device"}
    core.unprepare(name("old"))
    new = core.prepare(name("new"))
    core.pass_time(limits.CLAIM_ANSWER_S)
    assert "is being released from the claim default/old" in core.refusal(new)
    assert [a.number for a in core.wanted.devices.values()], "the release goes on"


def test_a_claim_waits_for_the_virtual_machine_of_a_pre_bound_gpu_to_let_go() -> None:
    core = core_with(PRE_BOUND, old=(A,), new=(A,))
    core.prepare(name("old"))
    core.enabled[A] = 1
    core.pass_time(POLL_S)
    new = core.prepare(name("new"))
    core.unprepare(name("old"))
    assert core.answer(new) is None, "its process is still there"
    core.enabled[A] = 0
    core.pass_time(POLL_S)
    assert isinstance(core.answer(new), Prepared)


def test_a_claim_of_the_same_name_waits_until_the_old_one_is_unprepared() -> None:
    core = core_with(ON_HOST, one=(A,))
    core.prepare(name("one"))
    replacing = name("one", uid="uid-2")
    new = core.prepare(allocated(replacing, A))
    assert core.answer(new) is None
    core.unprepare(name("one"))
    assert isinstance(core.answer(new), Prepared)
    assert core.claim_state(name("one")) is ClaimState.TOMBSTONE


# --- both APIs ------------------------------------------------------------------------------------------------


def test_allocate_first_the_claim_waits_for_the_pod() -> None:
    core = core_with(PRE_BOUND, one=(A,))
    assert isinstance(core.allocation(core.allocate(A)), Granted)
    prepare = core.prepare(name("one"))
    assert core.answer(prepare) is None
    core.ledger[A] = "vm-1"
    core.pass_time(limits.LEDGER_S)
    assert core.answer(prepare) is None
    core.ledger.clear()
    core.pass_time(limits.LEDGER_S + POLL_S)
    assert isinstance(core.answer(prepare), Prepared)


def test_a_claim_gets_no_gpu_by_an_inspection_that_a_uevent_has_outdated() -> None:
    """The GPU is found again in the IOMMU group of a pod's GPU while a slow inspection of it is outstanding."""
    core = core_with(ON_HOST, gpu(B, 2), one=(A,))
    core.ledger[B] = "vm-1"
    core.held_back = {"inspection"}
    core.prepare(name("one"))
    core.changed(gpu(A, 2, driver="nvidia"))
    core.feed(core.inspected(A, ON_HOST))
    assert core.problem(name("one")) == f"{A}: sysfs has not answered yet for {A}"
    core.release("inspection")
    core.pass_time(POLL_S)
    assert core.problem(name("one")) == (
        f"{A}: IOMMU group 2 is in use: {B} is allocated to pod default/vm-1 as {H100}{WAITS}"
    )
    assert core.driver(A) == "nvidia"


def test_a_storm_of_uevents_of_its_gpu_delays_a_claim_for_a_bounded_time() -> None:
    core = core_with(PRE_BOUND, one=(A,))
    core.held_back = {"inspection"}
    prepare = core.prepare(name("one"))
    for waited in range(int(UEVENTS_END_S / 0.25)):
        assert core.answer(prepare) is None, f"after {waited / 4} s"
        core.feed(HostChanged(PRE_BOUND.address, None, "change pci"), after_s=0.25)
        core.feed(core.inspected(A, PRE_BOUND))
    assert isinstance(core.answer(prepare), Prepared)


@pytest.mark.parametrize("missed", [UeventsLost("ENOBUFS"), UeventsOpened()])
def test_a_claim_gets_no_gpu_by_an_inspection_after_which_uevents_were_missed(
    missed: UeventsLost | UeventsOpened,
) -> None:
    core = core_with(ON_HOST, gpu(B, 2), one=(A,))
    core.held_back = {"inspection"}
    core.prepare(name("one"))
    core.feed(missed)
    core.feed(core.inspected(A, ON_HOST))
    assert core.claim_state(name("one")) is ClaimState.WAITING
    assert PciAddress(B) not in core.state.host.inspections.functions, (
        "the scan finds what no claim waits for"
    )
    core.feed(core.inspected(A, ON_HOST))
    assert core.claim_state(name("one")) is not ClaimState.WAITING


def test_a_claim_waits_for_an_inspection_as_long_as_there_is_a_shortage() -> None:
    core = core_with(PRE_BOUND, one=(A,))
    core.held_back = {"inspection"}
    prepare = core.prepare(name("one"))
    number = core.state.host.inspections.functions[PRE_BOUND.address]
    core.feed(InspectionFailed(number, PRE_BOUND.address, "no file descriptors are left", shortage=True))
    assert core.problem(name("one")) == f"{A}: no file descriptors are left"
    core.release("inspection")
    core.pass_time(SHORTAGE_INSPECTION_S)
    assert isinstance(core.answer(prepare), Prepared)


def test_the_use_of_a_gpu_is_determined_anew_once_its_pod_is_gone() -> None:
    """A pod that is deleted by force while it starts opens its GPU later: what was seen while it had it is no fact."""
    core = core_with(PRE_BOUND, one=(A,))
    core.allocate(A)
    core.ledger[A] = "vm-1"
    prepare = core.prepare(name("one"))
    core.pass_time(limits.LEDGER_S)
    polled = core.state.host.polls.seen[1].poll
    core.enabled[A] = 1
    core.ledger.clear()
    core.state = schedule.ask_ledger(core.state, core.at)
    core.feed(Ticked())
    assert core.state.host.polls.seen[1].poll > polled
    assert core.answer(prepare) is None
    core.enabled[A] = 0
    core.pass_time(POLL_S)
    assert isinstance(core.answer(prepare), Prepared)


def test_after_35_s_the_error_names_the_pod_that_has_the_gpu() -> None:
    core = core_with(PRE_BOUND, one=(A,))
    core.allocate(A)
    core.ledger[A] = "vm-1"
    prepare = core.prepare(name("one"))
    core.pass_time(limits.CLAIM_ANSWER_S)
    assert "allocated to pod default/vm-1" in core.refusal(prepare)


WAITS = (
    "; it is free when its pod has ended: wait, or delete one of the two pods, so that it is scheduled anew"
)


def told(core: ClaimCore, claim: str) -> str:
    """The event for the pods of a claim."""
    (event,) = [e for e in kube_events(core.state) if e.about == PodsOf(name(claim))]
    return event.message


def check_event_and_refusal(core: ClaimCore, claim: str, prepare: Token, why: str) -> None:
    """Both say why a claim waits: the event at once, the refusal when kubelet waits no longer."""
    assert told(core, claim) == f"claim default/{claim}: {why}"
    core.pass_time(limits.CLAIM_ANSWER_S)
    assert core.refusal(prepare).endswith(f": {why}; kubelet asks again")


def test_event_and_refusal_name_the_pod_that_has_the_gpu_for_weeks_by_which_resource_and_what_to_do() -> None:
    core = core_with(PRE_BOUND, one=(A,))
    core.allocate(A)
    core.ledger[A] = "vm-1"
    prepare = core.prepare(name("one"))
    core.pass_time(limits.LEDGER_S)
    why = f"{A}: allocated to pod default/vm-1 as {H100}{WAITS}"
    check_event_and_refusal(core, "one", prepare, why)


def test_event_and_refusal_name_the_pod_of_another_claim() -> None:
    core = core_with(ON_HOST, old=(A,), new=(A,))
    core.prepare(name("old"))
    core.listed(name("old"), A)
    new = core.prepare(name("new"))
    core.pass_time(limits.LEDGER_S)
    why = f"{A}: it belongs to the claim default/old of pod default/old{WAITS}"
    check_event_and_refusal(core, "new", new, why)


def test_of_a_companion_the_pod_has_the_event_names_it() -> None:
    core = core_with(gpu(A, 1), gpu("0000:01:00.1", 1), one=(A,))
    core.allocate("0000:01:00.1")
    core.ledger["0000:01:00.1"] = "vm-1"
    core.prepare(name("one"))
    core.pass_time(limits.LEDGER_S)
    held = f"0000:01:00.1 is allocated to pod default/vm-1 as {H100}; "
    assert f"{A}: IOMMU group 1 is in use: {held}" in told(core, "one")


class LonelyKubelet(ClaimCore):
    """Of a node without pods, for hours: List is empty, and its file still names the pod that was the last."""

    def ledger_event(self, read: int) -> Event:
        old = RunningKubelet("kubelet-of-a-node-without-pods", limits.LEDGER_SETTLE_S)
        ended = LedgerEntry(H100, DeviceId(A), Pod("", "", "uid-of-an-ended-pod"))
        names_end = "vm-1" if self.state.gpus.claims.entries else None
        return LedgerRead(read, old, (), (), names_end, file=LedgerFile((ended,)))


def test_a_claim_waits_for_no_pod_that_only_kubelets_file_still_names() -> None:
    """Seen with `--device-plugin off`: 36 s, which is a refusal and a minute's wait."""
    core = LonelyKubelet(ON_HOST)
    core.created(allocated(name("one"), A))
    core.pass_time(600)
    token = core.prepare(name("one"))
    assert "pod with UID uid-of-an-ended-pod" in core.state.gpus.claims.entries[name("one").uid].problem
    core.pass_time(limits.LEDGER_CALLED_S + 2 * LEDGER_SETTLING_S)
    assert isinstance(core.answer(token), Prepared)


def test_prepare_first_allocate_is_refused_with_the_claims_name() -> None:
    core = core_with(PRE_BOUND, one=(A,))
    core.prepare(name("one"))
    refused = core.allocation(core.allocate(A))
    assert isinstance(refused, Refused)
    assert "default/one" in refused.reason


def test_an_allocate_that_waits_is_refused_when_a_claim_reserves_the_gpu_first() -> None:
    core = core_with(PRE_BOUND, one=(A,))
    core.silent = True
    token = core.allocate(A)
    core.silent = False
    core.prepare(name("one"))
    # Whichever was first, there is one owner.
    granted = isinstance(core.allocation(token), Granted)
    assert granted != (core.claim_state(name("one")) is ClaimState.PREPARED)


def test_a_claimed_gpu_is_listed_unhealthy_until_it_is_released() -> None:
    core = core_with(PRE_BOUND, one=(A,))
    assert core.device_list() == {A: "Healthy"}
    core.held_back = {"checkpoint"}
    core.prepare(name("one"))
    assert core.device_list() == {A: "Unhealthy"}
    assert "default/one" in core.reason(A)
    core.release("checkpoint")
    core.unprepare(name("one"))
    assert core.device_list() == {A: "Healthy"}


def test_a_gpu_that_was_returned_is_not_offered_before_it_is_seen_on_its_driver() -> None:
    """Until an inspection sysfs was last seen with the GPU on vfio-pci, and kubelet would allocate it."""
    core = core_with(ON_HOST, one=(A,))
    core.prepare(name("one"))
    core.changed(*core.functions.values())
    core.held_back = {"inspection"}
    core.unprepare(name("one"))
    assert core.driver(A) == "nvidia"
    assert core.device_list() in ({}, {A: "Unhealthy"})
    core.release("inspection")
    core.pass_time(CLAIM_TOMBSTONE_S)
    assert core.device_list().get(A) is None


# --- several devices and claims -------------------------------------------------------------------------------


def test_two_claims_that_want_each_others_devices_meet_no_deadlock() -> None:
    core = core_with(gpu(A, 1, driver="nvidia"), gpu(B, 2, driver="nvidia"), one=(A, B), two=(B, A))
    core.held_back = {"read"}
    first, second = core.prepare(name("one")), core.prepare(name("two"))
    core.release("read")
    states = {core.claim_state(name("one")), core.claim_state(name("two"))}
    assert states == {ClaimState.PREPARED, ClaimState.WAITING}
    done, waits = (first, second) if core.answer(first) else (second, first)
    assert isinstance(core.answer(done), Prepared)
    core.unprepare(name("one") if done == first else name("two"))
    assert isinstance(core.answer(waits), Prepared)


def test_claims_of_devices_in_one_iommu_group_exclude_each_other() -> None:
    core = core_with(gpu(A, 1, driver="nvidia"), gpu(B, 1), one=(A,), two=(B,))
    core.prepare(name("one"))
    two = core.prepare(name("two"))
    assert core.answer(two) is None
    core.unprepare(name("one"))
    assert core.driver(A) == "nvidia"
    assert "is not viable" in core.refusal(two), "the group has a GPU of the host again"
    assert core.driver(B) == "vfio-pci"


def test_a_claim_owns_its_iommu_group_also_where_it_has_one_function_of_it_only() -> None:
    """What is on a driver that leaves a group viable stays as it is; the group opens once nevertheless."""
    core = core_with(gpu(A, 1, driver="pci-stub"), gpu(B, 1, driver="pci-stub"), one=(A,), two=(B,))
    core.held_back = {"device"}
    core.prepare(name("one"))
    entry = core.entry(name("one"))
    assert entry is not None
    assert [f.address for one in gpus_of(entry).gpus for f in one.functions] == [A]
    two = core.prepare(name("two"))
    assert core.claim_state(name("two")) is ClaimState.WAITING
    core.pass_time(limits.CLAIM_ANSWER_S)
    assert "belongs to the claim default/one" in core.refusal(two)


def test_a_pod_with_another_device_of_the_group_conflicts() -> None:
    core = core_with(gpu(A, 1), gpu(B, 1), one=(A,))
    core.ledger[B] = "vm-1"
    core.allocate(B)
    prepare = core.prepare(name("one"))
    core.pass_time(limits.CLAIM_ANSWER_S)
    assert "allocated to pod default/vm-1" in core.refusal(prepare)


def test_two_gpus_of_one_group_are_bound_and_returned_by_one_act() -> None:
    """Two workers on one IOMMU group would be in each other's way: the second one finds the group's lock taken."""
    core = core_with(gpu(A, 1, driver="nvidia"), gpu(B, 1, driver="nvidia"), one=(A, B))
    core.held_back = {"device"}
    core.prepare(name("one"))
    assert len(core.wanted.devices) == 1
    core.release("device")
    assert core.claim_state(name("one")) is ClaimState.PREPARED
    core.held_back = {"device"}
    core.unprepare(name("one"))
    assert len(core.wanted.devices) == 1
    core.release("device")
    assert (core.driver(A), core.driver(B)) == ("nvidia", "nvidia")


def test_the_companions_in_iommu_group_0_are_found() -> None:
    core = core_with(gpu(A, 0, driver="nvidia"), audio(AUDIO, 0, driver="snd_hda_intel"), one=(A,))
    core.prepare(name("one"))
    assert core.driver(AUDIO) == "vfio-pci"


def test_a_process_of_nobody_conflicts_and_is_named() -> None:
    core = core_with(PRE_BOUND, one=(A,))
    core.enabled[A], core.holders[1] = 1, (Holder(77, "vfio-tool", None),)
    core.pass_time(POLL_S)
    prepare = core.prepare(name("one"))
    core.pass_time(limits.CLAIM_ANSWER_S)
    assert "vfio-tool" in core.refusal(prepare)


def test_a_gpu_in_a_fabric_of_the_host_is_not_taken_from_it() -> None:
    """Nothing is bound, and the error says what to do; a GPU on vfio, and admin access, take nothing from it."""
    switch = replace(gpu("0000:05:00.0", 5, device="22a3", driver="nvidia-nvswitch"), class_code="068000")
    core = core_with(ON_HOST, gpu(B, 2), switch, one=(A,), other=(B,))
    reason = core.refusal(core.prepare(name("one")))
    assert "NVSwitch 0000:05:00.0" in reason
    assert "--nvswitch allow" in reason
    assert core.acts == []
    assert isinstance(core.answer(core.prepare(name("other"))), Prepared)
    assert isinstance(core.answer(core.prepare(allocated(name("admin"), A, admin=True))), Prepared)


# --- claims that kubelet lists ----------------------------------------------------------------------------------


def test_a_claim_that_only_kubelet_knows_conflicts() -> None:
    """The checkpoint is lost, or `--dra` was off when it was prepared."""
    core = core_with(PRE_BOUND, one=(A,))
    core.claims = {"gpu-0000-01-00-0": "older"}
    core.pass_time(limits.LEDGER_QUIET_S)
    prepare = core.prepare(name("one"))
    core.pass_time(limits.CLAIM_ANSWER_S)
    assert "default/older" in core.refusal(prepare)


def test_a_claim_that_kubelet_lists_for_a_little_longer_does_not_conflict() -> None:
    core = core_with(PRE_BOUND, old=(A,), new=(A,))
    core.prepare(name("old"))
    core.listed(name("old"), A)
    core.pass_time(limits.LEDGER_QUIET_S)
    core.unprepare(name("old"))
    assert isinstance(core.answer(core.prepare(name("new"))), Prepared)


def test_the_release_leaves_a_gpu_alone_that_another_drivers_claim_has() -> None:
    """Kubelet compares no devices of two drivers: another one may have named the same GPU."""
    core = core_with(ON_HOST, one=(A,))
    core.prepare(name("one"))
    core.strangers = (ClaimedDevice("other.example", "node", "gpu-0000-01-00-0", "default/theirs", None),)
    core.pass_time(limits.LEDGER_QUIET_S)
    assert "default/theirs" in core.reason(A)
    core.unprepare(name("one"))
    assert (Target.ORIGINAL_DRIVER, A) not in core.acts
    assert core.driver(A) == "vfio-pci"
    assert core.claim_state(name("one")) is ClaimState.TOMBSTONE


def test_the_release_leaves_a_gpu_alone_that_a_pod_has() -> None:
    core = core_with(ON_HOST, one=(A,))
    core.prepare(name("one"))
    core.changed(*core.functions.values())
    core.ledger[A] = "vm-1"
    core.pass_time(limits.LEDGER_QUIET_S)
    core.unprepare(name("one"))
    assert core.driver(A) == "vfio-pci"
    assert core.claim_state(name("one")) is ClaimState.TOMBSTONE


# --- admin access -----------------------------------------------------------------------------------------------


def admin_core(function: PciFunction) -> ClaimCore:
    core = core_with(function, one=(A,))
    core.created(allocated(name("admin"), A, admin=True))
    return core


def test_admin_access_binds_nothing_reserves_nothing_and_undoes_nothing() -> None:
    core = admin_core(ON_HOST)
    answer = core.answer(core.prepare(name("admin")))
    assert isinstance(answer, Prepared)
    assert core.driver(A) == "nvidia"
    assert core.state.gpus.reserved == {}
    assert isinstance(core.answer(core.prepare(name("one"))), Prepared)
    assert core.driver(A) == "vfio-pci"
    assert isinstance(core.answer(core.unprepare(name("admin"))), Unprepared)
    assert core.driver(A) == "vfio-pci"
    assert core.acts == [(Target.VFIO, A)]


def test_admin_access_gets_no_node_of_a_gpu_that_a_claim_holds() -> None:
    core = admin_core(ON_HOST)
    core.prepare(name("one"))
    core.held_back = {"files"}
    core.prepare(name("admin"))
    (act,) = core.wanted.files.values()
    (device,) = act.devices
    assert nodes_of(device) == ()


def test_admin_access_that_kubelet_lists_is_in_nobodys_way() -> None:
    core = admin_core(PRE_BOUND)
    core.prepare(name("admin"))
    core.listed(name("admin"), A)
    core.pass_time(limits.LEDGER_QUIET_S)
    assert core.device_list() == {A: "Healthy"}
    assert isinstance(core.answer(core.prepare(name("one"))), Prepared)


def test_admin_access_that_kubelet_lists_does_not_keep_a_gpu_from_its_return() -> None:
    core = admin_core(ON_HOST)
    core.prepare(name("one"))
    core.prepare(name("admin"))
    core.listed(name("admin"), A)
    core.pass_time(limits.LEDGER_QUIET_S)
    core.unprepare(name("one"))
    assert core.driver(A) == "nvidia"


def test_admin_access_that_has_ended_does_not_make_the_gpu_unhealthy_while_kubelet_lists_it() -> None:
    core = admin_core(PRE_BOUND)
    core.prepare(name("admin"))
    core.listed(name("admin"), A)
    core.pass_time(limits.LEDGER_QUIET_S)
    core.unprepare(name("admin"))
    assert core.claim_state(name("admin")) is ClaimState.TOMBSTONE
    assert core.device_list() == {A: "Healthy"}


def test_admin_access_to_a_device_that_is_gone_is_refused() -> None:
    core = core_with(ON_HOST)
    assert f"{B} is gone" in core.refusal(core.prepare(allocated(name("admin"), B, admin=True)))
