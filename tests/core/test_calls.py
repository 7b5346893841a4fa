"""The gate: a device is handed out from facts read after the call came, or refused with its reason."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gpuactors import limits
from gpuactors.core.events.daemon import ShutdownRequested, Ticked
from gpuactors.core.events.deviceplugin import (
    AllocateAsked,
    CallAbandoned,
    PreferenceAsked,
    PreferenceRequest,
    PreStartAsked,
)
from gpuactors.core.events.host import HostChanged, InspectionFailed, UeventsLost, UeventsOpened
from gpuactors.core.events.kubelet import KubeletAppeared
from gpuactors.core.host.inspections import SHORTAGE_INSPECTION_S, UEVENTS_END_S
from gpuactors.core.step import CALL_SETTLE_S
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.effects import Grant, Granted, Preferred, Ready, Refusal, Refused
from gpuactors.core.values.model import DeviceId, PciFunction, Token, pci_address
from tests.core.builders import H100, A, B, C, Core, audio, gpu, only, pre_start_call

T = Token(1)


def allocate(*containers: tuple[str, ...], token: Token = T) -> AllocateAsked:
    return AllocateAsked(token, H100, tuple(tuple(map(DeviceId, ids)) for ids in containers))


def test_an_answer_waits_for_an_inspection_that_was_asked_for_after_the_call() -> None:
    core = Core(gpu(A), gpu(B))
    core.feed(HostChanged(A, None, "change pci"))
    assert core.answers(allocate((A,))) == []
    assert core.answers(core.inspected(A, gpu(A))) == [], "this inspection may have read before the call came"
    assert core.answers(core.inspected(A, gpu(A))) == [
        Granted(
            (
                Grant(
                    (("PCI_RESOURCE_NVIDIA_COM_GH100_H100_SXM5_80GB", A),), ("/dev/vfio/vfio", "/dev/vfio/1")
                ),
            )
        )
    ]
    assert core.state.calls.waiting == {}


@pytest.mark.parametrize("asked", [allocate((A,)), pre_start_call(A)])
def test_a_call_is_not_answered_from_an_inspection_that_a_uevent_has_outdated(
    asked: AllocateAsked | PreStartAsked,
) -> None:
    """The GPU is found again in another group while a slow inspection of it is outstanding."""
    core = Core(gpu(A), gpu(B))
    core.feed(asked, HostChanged(A, None, "bind pci"))
    assert core.answers(core.inspected(A, gpu(A))) == [], "it may have read before the uevent"
    answer = only(Refused, core.answers(core.inspected(A, gpu(A, 9))))
    assert answer.reason == f"{A}: its IOMMU group changed from 1 to 9; ask again"


def test_a_storm_of_uevents_of_its_device_delays_a_call_for_a_bounded_time() -> None:
    core = Core(gpu(A))
    core.feed(allocate((A,)))
    answers: list[object] = []
    for waited in range(int(UEVENTS_END_S / 0.25)):
        assert answers == [], f"after {waited / 4} s"
        answers += core.answers(HostChanged(A, None, "change pci"), after_s=0.25)
        answers += core.answers(core.inspected(A, gpu(A)))
    assert [type(answer) for answer in answers] == [Granted]


def test_a_call_is_not_answered_from_an_outdated_inspection_while_the_next_one_hangs() -> None:
    core = Core(gpu(A))
    core.feed(allocate((A,)), HostChanged(A, None, "bind pci"))
    core.feed(core.inspected(A, gpu(A)))
    assert core.answers(Ticked(), after_s=UEVENTS_END_S) == []
    answer = only(Refused, core.answers(Ticked(), after_s=limits.CALL_DEADLINE_S - UEVENTS_END_S))
    assert answer.causes == (Cause.INSPECTION_LATE,)
    assert A in answer.reason


def test_a_uevent_of_another_device_delays_no_call() -> None:
    core = Core(gpu(A), gpu(B))
    core.feed(pre_start_call(A), HostChanged(B, None, "bind pci"))
    assert core.answers(core.inspected(A, gpu(A))) == [Ready()]


@pytest.mark.parametrize("missed", [UeventsLost("ENOBUFS"), UeventsOpened()])
def test_a_call_is_not_answered_from_an_inspection_after_which_uevents_were_missed(
    missed: UeventsLost | UeventsOpened,
) -> None:
    core = Core(gpu(A), gpu(B))
    core.feed(pre_start_call(A), missed)
    assert core.answers(core.inspected(A, gpu(A))) == []
    answer = only(Refused, core.answers(core.inspected(A, gpu(A, 9))))
    assert answer.causes == (Cause.GROUP_CHANGED,)
    assert B not in core.state.host.inspections.functions, "the scan finds what no call waits for"


def test_the_inspection_of_a_device_shows_the_others_of_its_group() -> None:
    both = (gpu(A, 7), gpu(B, 7))
    core = Core(*both)
    core.feed(pre_start_call(A, B))
    assert core.answers(core.inspected(B, *both)) == [Ready()]


def granted(core: Core, *functions: PciFunction) -> Granted:
    """The answer to an Allocate of A."""
    core.feed(allocate((A,)))
    return only(Granted, core.answers(core.inspected(A, *functions)))


def test_a_grant_in_a_shared_group_names_the_lists_that_kubelet_must_have_first() -> None:
    """Issue 24, 20: the other GPU is Unhealthy from now on, whatever resource it is of."""
    mates = (gpu(A, 7), gpu(B, 7))
    assert granted(Core(*mates, gpu(C)), *mates).lists == (H100,)
    of_two = (gpu(A, 7), gpu(B, 7, device="20b0", model="GA100 [A100 PCIe 40GB]"))
    (other,) = granted(Core(*of_two, gpu(C)), *of_two).lists
    assert other != H100


def test_a_grant_that_changes_no_other_device_waits_for_no_list() -> None:
    assert granted(Core(gpu(A), gpu(B)), gpu(A)).lists == ()
    mates = (gpu(A, 7), gpu(B, 7))
    core = Core(*mates)
    core.feed(allocate((A, B)))
    answers = core.answers(core.inspected(A, *mates), core.inspected(B, *mates))
    assert [answer.lists for answer in answers if isinstance(answer, Granted)] == [()], "both are the pod's"


def test_a_device_of_the_call_that_gets_healthy_by_it_is_no_other_pods() -> None:
    """A pod that is gone still has it, so it was listed Unhealthy: kubelet needs no list to know that the pod of this
    call has it now."""
    core = Core(gpu(A))
    core.ledger, core.enabled = {A: "gone"}, {A: 1}
    core.feed(KubeletAppeared("1"))
    core.pass_time(limits.LEDGER_S)
    core.ledger = {}
    core.pass_time(limits.LEDGER_QUIET_S)
    assert core.device_list() == {A: "Unhealthy"}
    assert granted(core, gpu(A)).lists == ()
    assert core.device_list() == {A: "Healthy"}


def test_each_container_gets_its_own_devices_sorted() -> None:
    core = Core(gpu(A), gpu(B), gpu(C))
    core.feed(allocate((C, A), (B,)))
    answer = only(Granted, core.answers(*(core.inspected(a, gpu(a)) for a in (A, B, C))))
    assert [g.envs[0][1] for g in answer.containers] == [f"{A},{C}", B]
    assert answer.containers[0].nodes == ("/dev/vfio/vfio", "/dev/vfio/1", "/dev/vfio/3")


def test_the_group_node_serves_the_companions_and_iommufd_needs_each_ones_cdev() -> None:
    both = ("/dev/vfio/vfio", "/dev/vfio/7", "/dev/iommu")
    card = (
        replace(gpu(A, 7), nodes=(*both, "/dev/vfio/devices/vfio3")),
        replace(audio("01:00.1", 7), nodes=(*both, "/dev/vfio/devices/vfio12")),
    )
    core = Core(*card)
    core.feed(allocate((A,)))
    answer = only(Granted, core.answers(core.inspected(A, *card)))
    assert answer.containers[0].envs == (("PCI_RESOURCE_NVIDIA_COM_GH100_H100_SXM5_80GB", A),)
    assert answer.containers[0].nodes == (
        "/dev/vfio/vfio",
        "/dev/vfio/7",
        "/dev/vfio/devices/vfio3",
        "/dev/vfio/devices/vfio12",
        "/dev/iommu",
    )


def short(core: Core, address: str) -> InspectionFailed:
    where = pci_address(address)
    return InspectionFailed(
        core.state.host.inspections.functions[where], where, "no file descriptors left", shortage=True
    )


@pytest.mark.parametrize("asked", [allocate((A,)), pre_start_call(A)])
def test_a_call_waits_for_an_inspection_as_long_as_there_is_a_shortage(
    asked: AllocateAsked | PreStartAsked,
) -> None:
    """Issue 10, 4: nothing is granted without an inspection, and nothing refused because it could not be inspected."""
    core = Core(gpu(A), gpu(B))
    core.feed(asked)
    assert core.answers(short(core, A)) == []
    core.pass_time(SHORTAGE_INSPECTION_S)
    assert core.answers(short(core, A)) == []
    core.pass_time(SHORTAGE_INSPECTION_S)
    (answer,) = core.answers(core.inspected(A, gpu(A)))
    assert isinstance(answer, Granted | Ready)


def test_a_shortage_that_lasts_is_why_a_call_is_refused() -> None:
    core = Core(gpu(A), gpu(B))
    core.feed(allocate((A,)))
    core.feed(short(core, A))
    core.silent = True
    (answer,) = core.answers(Ticked(), after_s=limits.CALL_DEADLINE_S)
    assert answer == Refused(Refusal.UNAVAILABLE, f"{A}: no file descriptors left", (Cause.SHORTAGE,))
    assert core.device_list() == {A: "Healthy", B: "Healthy"}


@pytest.mark.parametrize(
    ("now", "said"),
    [
        ((), "the PCI function is gone from this node"),
        ((gpu(A, driver=None),), "bound to no driver"),
        ((gpu(A, driver="nvidia"),), "bound to nvidia, which is no vfio driver"),
        ((gpu(A, 9),), "its IOMMU group changed from 1 to 9"),
        ((gpu(A, has_node=False),), "/dev/vfio/1 does not exist"),
        ((gpu(A, device="2331"),), "another device is there now (10de:2331, not 10de:2330)"),
        ((gpu(A), audio("01:00.1", 1, driver="snd_hda_intel")), "0000:01:00.1 is bound to snd_hda_intel"),
        ((gpu(A, fault="cannot read /sys/x: I/O error"),), "cannot read /sys/x"),
    ],
)
@pytest.mark.parametrize("kind", ["allocate", "pre-start"])
def test_a_device_that_changed_since_is_refused_with_its_reason(
    kind: str, now: tuple[PciFunction, ...], said: str
) -> None:
    core = Core(gpu(A), gpu(B))
    core.feed(allocate((A,)) if kind == "allocate" else pre_start_call(A))
    answer = only(Refused, core.answers(core.inspected(A, *now)))
    assert answer.status is Refusal.FAILED_PRECONDITION
    assert answer.reason.startswith(f"{A}: ")
    assert said in answer.reason
    refusals = core.logged("call.refused")
    assert [e.fields["reason"] for e in refusals] == [answer.reason], "the log has the same words"


def test_a_device_that_is_just_being_plugged_in_again_is_no_other_device() -> None:
    """Seen in a virtual machine: an inspection met a function before its attributes, after one that had met none at
    all."""
    core = Core(gpu(A), gpu(B))
    core.feed(HostChanged(A, None, "remove pci"))
    core.feed(allocate((A,)))
    core.feed(core.inspected(A))
    nameless = replace(gpu(A, driver=None), vendor="", device="", model=None, fault="cannot read vendor")
    answer = only(Refused, core.answers(core.inspected(A, nameless)))
    assert answer.reason == f"{A}: cannot read vendor"


def test_a_changed_group_is_refused_once_and_granted_when_asked_again() -> None:
    core = Core(gpu(A))
    core.feed(allocate((A,)))
    assert isinstance(core.answers(core.inspected(A, gpu(A, 9)))[0], Refused)
    core.feed(allocate((A,)))
    answer = only(Granted, core.answers(core.inspected(A, gpu(A, 9))))
    assert answer.containers[0].nodes == ("/dev/vfio/vfio", "/dev/vfio/9")


def test_one_bad_device_refuses_the_whole_call_and_every_reason_is_given() -> None:
    core = Core(gpu(A), gpu(B), gpu(C))
    core.feed(allocate((A, B, C)))
    answer = only(
        Refused,
        core.answers(core.inspected(A), core.inspected(B, gpu(B)), core.inspected(C, gpu(C, driver=None))),
    )
    assert f"{A}: the PCI function is gone" in answer.reason
    assert f"{C}: bound to no driver" in answer.reason
    assert B not in answer.reason


def test_pre_start_is_ready_when_the_devices_can_be_opened() -> None:
    core = Core(gpu(A), gpu(B))
    core.feed(pre_start_call(A, B))
    assert core.answers(core.inspected(A, gpu(A)), core.inspected(B, gpu(B))) == [Ready()]


@pytest.mark.parametrize(
    ("ids", "status", "said"),
    [
        (
            ("0000:09:00.0",),
            Refusal.NOT_FOUND,
            "no such device of nvidia.com/GH100_H100_SXM5_80GB on this node",
        ),
        (("51",), Refusal.NOT_FOUND, "51: no such device"),
        ((), Refusal.INVALID_ARGUMENT, "no device of nvidia.com/GH100_H100_SXM5_80GB was requested"),
        ((A, A), Refusal.INVALID_ARGUMENT, f"requested twice in one call: {A}"),
    ],
)
def test_what_cannot_be_is_refused_without_an_inspection(
    ids: tuple[str, ...], status: Refusal, said: str
) -> None:
    core = Core(gpu(A))
    answer = only(Refused, core.answers(allocate(ids)))
    assert answer.status is status
    assert said in answer.reason
    assert core.state.host.inspections.functions == {}


def test_a_device_that_is_gone_is_refused_for_that_and_not_for_who_had_it() -> None:
    """Kubelet gives it to the next pod: by what it has itself, the pod that our ledger still names has left."""
    core = Core(gpu(A), gpu(B))
    core.ledger = {A: "vm-1", "²": "vm-1"}
    core.feed(KubeletAppeared("1"), HostChanged(A, None, "remove pci"))
    core.feed(core.inspected(A))
    assert "vm-1" in core.reason(A)
    answer = only(Refused, core.answers(allocate((A, "²"))))
    assert answer.reason == (
        f"{A}: the PCI function is gone from this node; "
        f"²: no device of {H100} on this node is known by this ID"
    )


def test_inspections_that_do_not_come_back_refuse_the_call_in_time_and_name_the_device() -> None:
    core = Core(gpu(A), gpu(B))
    core.feed(allocate((A, B)))
    core.feed(core.inspected(B, gpu(B)))
    assert core.state.calls.waiting[T].deadline == core.at + limits.CALL_DEADLINE_S
    answer = only(Refused, core.answers(Ticked(), after_s=limits.CALL_DEADLINE_S))
    assert answer.status is Refusal.UNAVAILABLE
    assert A in answer.reason
    assert B not in answer.reason


def test_an_inspection_that_fails_refuses_the_call_with_that_reason() -> None:
    core = Core(gpu(A))
    core.feed(allocate((A,)))
    answer = only(
        Refused, core.answers(InspectionFailed(core.state.host.inspections.functions[A], A, "sysfs hangs"))
    )
    assert answer.reason == f"{A}: sysfs hangs"


def test_a_stuck_device_does_not_hold_up_calls_for_the_others() -> None:
    core = Core(gpu(A), gpu(B))
    core.feed(allocate((A,), token=Token(1)), allocate((B,), token=Token(2)))
    assert isinstance(core.answers(core.inspected(B, gpu(B)))[0], Granted)
    assert set(core.state.calls.waiting) == {Token(1)}


def test_an_abandoned_call_is_forgotten() -> None:
    core = Core(gpu(A))
    core.feed(allocate((A,)), CallAbandoned(T))
    assert core.state.calls.waiting == {}
    assert core.answers(core.inspected(A, gpu(A))) == []


def test_no_list_shrinks_while_a_call_is_in_flight_nor_right_after_it() -> None:
    core = Core(gpu(A), gpu(B))
    core.feed(allocate((B,)), HostChanged(A, None, "remove pci"))
    core.feed(core.inspected(A))
    assert core.device_list() == {A: "Unhealthy", B: "Healthy"}
    assert core.reason(A) == "the PCI function is gone from this node"
    core.feed(core.inspected(B, gpu(B)))
    assert core.device_list() == {A: "Unhealthy", B: "Healthy"}, "kubelet is still working with our answer"
    core.feed(Ticked(), after_s=CALL_SETTLE_S)
    assert core.device_list() == {B: "Healthy"}


def test_no_list_shrinks_right_after_a_preference() -> None:
    core = Core(gpu(A), gpu(B))
    request = PreferenceRequest(available=(DeviceId(A), DeviceId(B)), must_include=(), size=1)
    assert core.answers(PreferenceAsked(T, H100, (request,))) == [Preferred(((DeviceId(A),),))]
    core.feed(HostChanged(A, None, "unbind pci"))
    core.feed(core.inspected(A, gpu(A, driver=None)))
    assert core.device_list() == {A: "Unhealthy", B: "Healthy"}
    assert core.reason(A).startswith("bound to no driver")
    core.feed(Ticked(), after_s=CALL_SETTLE_S)
    assert core.device_list() == {B: "Healthy"}


def test_a_device_listed_for_a_call_only_is_refused_with_the_reason_it_is_listed_with() -> None:
    core = Core(gpu(A), gpu(B))
    core.feed(allocate((B,)), HostChanged(A, None, "remove pci"))
    core.feed(core.inspected(A))
    answer = only(Refused, core.answers(allocate((A,), token=Token(2))))
    assert answer.reason == f"{A}: the PCI function is gone from this node"


def test_new_calls_are_refused_while_stopping_and_those_in_flight_are_answered() -> None:
    core = Core(gpu(A), gpu(B))
    core.feed(allocate((A,)), ShutdownRequested())
    assert core.state.published.plugins == {}
    refused = only(Refused, core.answers(allocate((B,), token=Token(2))))
    assert refused.status is Refusal.UNAVAILABLE
    assert isinstance(core.answers(core.inspected(A, gpu(A)))[0], Granted)


def test_a_call_whose_facts_do_not_come_is_refused_before_the_streams_of_a_stopping_daemon_end() -> None:
    """Found by histories: kubelet got a broken connection, and the pod no reason."""
    core = Core(gpu(A))
    core.feed(allocate((A,)), ShutdownRequested())
    assert core.answers(Ticked(), after_s=limits.DRAIN_S / 2) == []
    late = only(Refused, core.answers(Ticked(), after_s=limits.DRAIN_S / 2 - limits.LATE_CALL_S))
    assert late.causes == (Cause.INSPECTION_LATE,)
