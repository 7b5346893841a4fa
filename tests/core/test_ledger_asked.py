"""No Allocate is answered from an old ledger: kubelet gives away what is free by its own now, and others give away
what ours do not show yet (issue 10, items 6 and 7)."""

from __future__ import annotations

import pytest

from gpuactors import limits
from gpuactors.core.events import Event
from gpuactors.core.events.daemon import Ticked
from gpuactors.core.events.deviceplugin import (
    PreferenceAsked,
    PreferenceRequest,
)
from gpuactors.core.events.host import FunctionInspected, GroupsObserved, HostScanned
from gpuactors.core.events.kubelet import LedgerUnreadable
from gpuactors.core.values.effects import Answer, Granted, Log, Preferred, Ready, Refusal, Refused, Reply
from gpuactors.core.values.model import (
    CachedAnswer,
    ClaimedDevice,
    DeviceId,
    LedgerFile,
    Pod,
    Token,
)
from tests.core.builders import (
    H100,
    A,
    B,
    Core,
    allocate_call,
    gpu,
    ledger_read,
    node,
    only,
    pre_start_call,
    read_of_young,
)

ALONE = (gpu(A), gpu(B))
TOGETHER = (gpu(A, 7), gpu(B, 7))
CLAIM = "gpu-0000-01-00-0"
T = Token(1)


def ask(core: Core, *devices: str, token: Token = T) -> list[Answer]:
    """Allocate; all that it asks for comes back at once, the inspections last."""
    return answered(core, allocate_call(*devices, token=token))


def answered(core: Core, call: Event) -> list[Answer]:
    core.feed(call)
    functions = tuple(core.state.host.functions.values())
    inspections = [
        FunctionInspected(n, a, functions) for a, n in core.state.host.inspections.functions.items()
    ]
    return core.answers(*inspections)


def reads(core: Core, seconds: float) -> int:
    """How often the ledger is read in so long."""
    seen: set[int] = set()
    end = core.at + seconds
    while core.at < end:
        seen.add(core.state.kubelet.ledger.done)
        core.pass_time(1.0)
    return len(seen) - 1


def by_hand(core: Core) -> int:
    """From here on nothing answers by itself. Returns the number of the read that is outstanding."""
    core.silent = True
    return core.read


# --- a quiet node -----------------------------------------------------------------------------------------


def test_on_a_quiet_node_the_ledger_is_read_all_the_same() -> None:
    core = node(*ALONE)
    assert 118 <= reads(core, 3600) <= 121
    core.claims = {CLAIM: "train"}
    core.pass_time(limits.LEDGER_QUIET_S)
    assert core.device_list() == {A: "Unhealthy", B: "Healthy"}
    assert "in use by the claim default/train" in core.reason(A)


def test_what_a_claim_took_since_the_last_read_is_not_handed_out() -> None:
    core = node(*ALONE)
    core.pass_time(1)
    core.claims = {CLAIM: "train"}
    answer = only(Refused, ask(core, A))
    assert "in use by the claim default/train of pod default/train" in answer.reason


@pytest.mark.parametrize("asked", [0.0, limits.LEDGER_FRESH_S / 2])
def test_a_read_asked_for_just_before_the_call_counts(asked: float) -> None:
    """Kubelet answers 100 reads a second for all its clients, ten of them at once."""
    core = node(*ALONE)
    core.pass_time(limits.LEDGER_QUIET_S)
    done = core.state.kubelet.ledger.done
    core.at += asked
    assert isinstance(ask(core, A)[0], Granted)
    assert core.state.kubelet.ledger.done == done


def test_an_older_read_does_not_count() -> None:
    core = node(*ALONE)
    core.pass_time(limits.LEDGER_QUIET_S)
    core.at += limits.LEDGER_FRESH_S * 2
    core.feed(allocate_call(A))
    assert core.state.kubelet.ledger.read > core.state.calls.waiting[T].since


def test_a_read_that_was_out_already_when_the_call_came_is_followed_by_another() -> None:
    core = node(*ALONE)
    core.silent = True
    core.pass_time(limits.LEDGER_QUIET_S)
    first = by_hand(core)
    core.at += 1
    assert ask(core, A) == []
    core.feed(GroupsObserved(core.state.host.polls.refresh.outstanding or 0, ()))
    core.feed(core.poll_event(core.state.host.polls.refresh.outstanding or 0))
    assert core.answers(core.ledger_event(first)) == [], "it may have been answered before the claim was made"
    second = by_hand(core)
    assert second > core.state.calls.waiting[T].since
    claimed = ClaimedDevice("gpu.nvidia.com", "node", CLAIM, "default/train", Pod("default", "train", ""))
    core.feed(Ticked(), after_s=0.0)
    (answer,) = core.answers(ledger_read(second, claims=(claimed,)))
    assert isinstance(answer, Refused)


def test_a_burst_of_calls_costs_one_read() -> None:
    functions = tuple(gpu(f"{n:02x}:00.0") for n in range(1, 33))
    core = node(*functions)
    core.at += 1
    done = core.state.kubelet.ledger.done
    seen = set()
    for n, function in enumerate(functions):
        assert isinstance(ask(core, function.address, token=Token(n + 1))[0], Granted)
        seen.add(core.state.kubelet.ledger.done)
        core.at += 0.001
    assert seen == {min(seen)}
    assert min(seen) > done


def test_a_ledger_that_cannot_be_read_after_the_call_leaves_what_was_known() -> None:
    core = node(*TOGETHER, ledger={A: "vm-1"})
    core.at += 1
    core.ledger_problem = "kubelet does not answer"
    refused = only(Refused, ask(core, B))
    assert "0000:01:00.0 is allocated to pod default/vm-1" in refused.reason


def test_a_fresh_read_that_fails_is_tried_again_for_the_call() -> None:
    """It was out already, and new enough, had it not failed."""
    core = node(*ALONE)
    core.silent = True
    core.pass_time(limits.LEDGER_QUIET_S)
    first = by_hand(core)
    ask(core, A)
    core.feed(LedgerUnreadable(first, "rejected by rate limit"))
    assert by_hand(core) > core.state.calls.waiting[T].since


def test_a_ledger_that_never_answers_is_what_the_refusal_names() -> None:
    core = node(*ALONE)
    core.at += 1
    core.silent = True
    core.feed(allocate_call(A))
    core.feed(core.poll_event(core.state.host.polls.refresh.outstanding or 0))
    ((a, number),) = core.state.host.inspections.functions.items()
    core.feed(FunctionInspected(number, a, ALONE[:1]))
    answer = only(Refused, core.answers(Ticked(), after_s=limits.CALL_DEADLINE_S))
    assert answer.status is Refusal.UNAVAILABLE
    assert answer.reason == (
        "kubelet's ledger could not be read in time; check whether kubelet, or the disk of its file, hangs"
    )


def test_a_container_start_has_a_read_of_its_own_as_well() -> None:
    """What the container will get is told by the file that is read with the ledger."""
    core = node(*ALONE, ledger={A: "vm-1"})
    core.at += 1
    core.feed(pre_start_call(A))
    assert core.state.kubelet.ledger.done > core.state.calls.waiting[T].since
    number = core.state.host.inspections.functions[A]
    assert core.answers(FunctionInspected(number, A, ALONE[:1])) == [Ready()]


# --- the other GPU of the group ---------------------------------------------------------------------------


@pytest.mark.parametrize("after_s", [0.0, 0.01, 0.1, 1.0, 4.9])
def test_a_group_member_whose_pod_has_ended_does_not_refuse(after_s: float) -> None:
    """A pod had both; kubelet gives one of them to the next pod at once. However new our last read is."""
    core = node(*TOGETHER, ledger={A: "vm-1", B: "vm-1"})
    core.pass_time(limits.LEDGER_S)
    core.at += after_s
    core.ledger = {}
    assert isinstance(ask(core, A)[0], Granted)


def test_a_device_that_another_resource_had_does_not_refuse() -> None:
    core = node(*ALONE)
    core.claims = {CLAIM: "train"}
    core.pass_time(limits.LEDGER_QUIET_S)
    core.claims = {}
    assert isinstance(ask(core, A)[0], Granted)


def granted(core: Core, *devices: str) -> None:
    assert isinstance(ask(core, *devices, token=Token(99))[0], Granted)


def test_a_group_member_that_was_handed_out_and_released_at_once_does_not_refuse() -> None:
    """Its pod ended before any read had named it."""
    core = node(*TOGETHER)
    granted(core, A)
    core.at += 0.3
    assert ask(core, B) == [], "kubelet may be about to list it"
    (answer,) = [e.answer for e in core.pass_time(limits.GRANT_LEDGER_S) if isinstance(e, Reply)]
    assert isinstance(answer, Granted)
    assert core.state.calls.waiting == {}


def test_a_group_member_that_was_handed_out_and_is_listed_refuses() -> None:
    core = node(*TOGETHER)
    granted(core, A)
    core.at += 0.3
    assert ask(core, B) == []
    core.ledger = {A: "vm-1"}
    (answer,) = [e.answer for e in core.pass_time(limits.GRANT_LEDGER_S) if isinstance(e, Reply)]
    assert isinstance(answer, Refused)
    assert f"{A} is allocated to pod default/vm-1" in answer.reason


def test_a_group_member_that_was_handed_out_refuses_while_the_ledger_cannot_be_read() -> None:
    core = node(*TOGETHER)
    granted(core, A)
    core.ledger_problem = "kubelet does not answer"
    core.at += 1
    answer = only(Refused, ask(core, B))
    assert f"{A} is just allocated" in answer.reason


def test_what_kubelet_does_not_list_after_it_was_handed_out_is_free() -> None:
    """Seen: kubelet lists it as soon as it has our answer. 30 s were waited for what would never come."""
    core = node(*TOGETHER)
    granted(core, A)
    assert core.device_list() == {A: "Healthy", B: "Unhealthy"}
    core.pass_time(limits.GRANT_LEDGER_S)
    assert core.device_list() == {A: "Healthy", B: "Healthy"}
    assert core.state.kubelet.pending_allocations == {}


def test_a_read_soon_after_an_allocate_that_does_not_name_it_yet_is_followed_by_another() -> None:
    """The read that is wished for after an Allocate is not lost when another one is asked for before."""
    core = node(*TOGETHER)
    granted(core, A)
    core.pass_time(limits.GRANT_LEDGER_S / 2)
    core.enabled = {A: 1}
    core.feed(core.poll_event(core.state.host.polls.refresh.outstanding or 0))
    core.at += limits.LEDGER_FRESH_S
    assert ask(core, B) == []
    assert list(core.state.kubelet.pending_allocations) == [(H100, DeviceId(A))]
    core.ledger, core.enabled = {A: "vm-1"}, {A: 1}
    core.pass_time(limits.GRANT_LEDGER_S / 2)
    assert core.state.kubelet.pending_allocations == {}
    assert core.reason(A) == "allocated to pod default/vm-1"


def test_a_kubelet_that_does_not_know_its_pods_takes_back_nothing_that_was_handed_out() -> None:
    core = node(*ALONE)
    granted(core, A)
    core.silent = True
    core.pass_time(limits.GRANT_LEDGER_S)
    core.feed(read_of_young(by_hand(core)))
    assert list(core.state.kubelet.pending_allocations) == [(H100, DeviceId(A))]


# --- which devices kubelet had better choose ----------------------------------------------------------------


def preferred(core: Core, size: int, *available: str) -> tuple[str, ...]:
    request = PreferenceRequest(tuple(map(DeviceId, available)), (), size)
    answer = only(Preferred, core.answers(PreferenceAsked(T, H100, (request,))))
    return answer.containers[0]


def test_the_other_half_of_a_group_that_was_just_handed_out_is_chosen_last() -> None:
    """Kubelet asks right after an Allocate, before it has had the list that makes the other half Unhealthy."""
    c, d = gpu("03:00.0", 8), gpu("04:00.0", 8)
    core = node(*TOGETHER, c, d)
    granted(core, A)
    assert preferred(core, 1, B, c.address, d.address) == (c.address,)
    core.enabled = {c.address: 1}
    core.pass_time(limits.GRANT_LEDGER_S / 2)
    assert preferred(core, 1, B, c.address, d.address) == (c.address,), "who may have just left comes before"
    assert len(preferred(core, 3, B, c.address, d.address)) == 3, "never fewer than asked for"


def test_the_other_half_of_a_group_that_the_predecessor_has_handed_out_is_chosen_last() -> None:
    """No ledger that this daemon has read has A, but kubelet knows its list and does not offer A any more."""
    c, d = gpu("03:00.0", 8), gpu("04:00.0", 8)
    core = node(*TOGETHER, c, d)
    assert preferred(core, 1, A, B, c.address, d.address) == (A,)
    assert preferred(core, 1, B, c.address, d.address) == (c.address,)
    assert preferred(core, 3, B, c.address, d.address) == (B, c.address, d.address)


def test_the_other_half_of_a_group_is_chosen_before_others_while_the_first_is_unhealthy() -> None:
    """Kubelet offers no Unhealthy device, whoever has it."""
    c, d = gpu("03:00.0", 8), gpu("04:00.0", 8)
    core = node(*TOGETHER, c, d)
    core.inspect(A, gpu(A, 7, fault="broken"), gpu(B, 7))
    assert core.device_list()[A] == "Unhealthy"
    assert preferred(core, 1, B, c.address, d.address) == (B,)


def test_what_kubelet_offers_is_nobodys_any_more() -> None:
    """A pod had both, and kubelet offers both: ours still has that pod."""
    c = gpu("03:00.0", 8)
    d = gpu("04:00.0", 8)
    core = node(*TOGETHER, c, d, ledger={A: "vm-1", B: "vm-1", d.address: "vm-2"})
    assert preferred(core, 2, A, B, c.address) == (A, B)


# --- what kubelet gives a container that it makes ------------------------------------------------------------


def restarted(core: Core, *devices: str) -> list[Answer]:
    """PreStartContainer."""
    core.at += 1
    return answered(core, pre_start_call(*devices))


def kept(core: Core, **answers: tuple[str, ...]) -> None:
    """Kubelet's file holds these answers from the next read on."""
    cached = tuple(CachedAnswer(H100, DeviceId({"a": A, "b": B}[d]), nodes) for d, nodes in answers.items())
    core.cached = cached


GROUP_82 = (gpu(A, 82), gpu(B, 81))
"""Before the node's restart they had each other's number."""


def test_after_a_reboot_a_container_does_not_start_with_another_gpus_node() -> None:
    """Kubelet does not call Allocate again, and gives the container what it was answered then (item 12)."""
    core = node(*GROUP_82, ledger={A: "vm-1", B: "vm-2"})
    kept(core, a=("/dev/vfio/81", "/dev/vfio/vfio"), b=("/dev/vfio/81",))
    answer = only(Refused, restarted(core, A))
    assert answer.status is Refusal.FAILED_PRECONDITION
    assert answer.reason == (
        "the container would get /dev/vfio/81: kubelet has kept that from an Allocate before the node's restart, or "
        f"before the device was bound again; /dev/vfio/81 belongs to {B} now (allocated to pod default/vm-2); {A} is "
        "behind /dev/vfio/82 now: delete the pod, so that its devices are allocated again"
    )
    assert restarted(core, B) == [Ready()], "whose number is what it was starts"


def test_a_node_that_is_no_gpus_any_more_is_said_so() -> None:
    core = node(*GROUP_82, ledger={A: "vm-1"})
    kept(core, a=("/dev/vfio/9",))
    answer = only(Refused, restarted(core, A))
    assert "/dev/vfio/9 belongs to no GPU any more; 0000:01:00.0 is behind /dev/vfio/82 now" in answer.reason


def test_a_device_whose_node_is_in_no_answer_is_named() -> None:
    """Nothing in the answers is another GPU's, and the container would come up with one GPU of two."""
    core = node(*GROUP_82, ledger={A: "vm-1", B: "vm-1"})
    kept(core, a=("/dev/vfio/82",), b=("/dev/vfio/82",))
    answer = only(Refused, restarted(core, A, B))
    assert (
        f"node's restart, or before the device was bound again; {B} is behind /dev/vfio/81 now"
        in answer.reason
    )
    assert restarted(core, A) == [Ready()]


def test_a_cdev_that_is_another_gpus_now_is_refused_as_well() -> None:
    core = node(gpu(A, 1, cdev=4), gpu(B, 2, cdev=3), ledger={A: "vm-1"})
    kept(core, a=("/dev/iommu", "/dev/vfio/1", "/dev/vfio/devices/vfio3"))
    answer = only(Refused, restarted(core, A))
    assert f"/dev/vfio/devices/vfio3 belongs to {B} now" in answer.reason


@pytest.mark.parametrize(
    "nodes",
    [
        (),
        ("/dev/vfio/vfio",),
        ("/dev/vfio/1", "/dev/vfio/vfio"),
        ("/dev/iommu", "/dev/vfio/1", "/dev/vfio/devices/vfio4", "/dev/vfio/vfio"),
        ("/dev/iommu", "/dev/vfio/devices/vfio4"),
    ],
)
def test_a_container_that_gets_its_own_devices_starts(nodes: tuple[str, ...]) -> None:
    core = node(gpu(A, 1, cdev=4), gpu(B, 2, cdev=3), ledger={A: "vm-1"})
    kept(core, a=nodes)
    assert restarted(core, A) == [Ready()]


def test_an_answer_that_was_kept_for_the_pod_before_does_not_refuse() -> None:
    """The read that counted was before the Allocate: the file was not yet written anew."""
    core = node(*GROUP_82)
    kept(core, a=("/dev/vfio/81",))
    core.pass_time(limits.LEDGER_QUIET_S)
    kept(core, a=("/dev/vfio/82",))
    core.feed(pre_start_call(A))
    assert core.state.kubelet.ledger.done <= core.state.calls.waiting[T].since
    number = core.state.host.inspections.functions[A]
    assert core.answers(FunctionInspected(number, A, GROUP_82)) == [Ready()]


LIMIT = "kubelet did not return its ledger (PodResources List: RESOURCE_EXHAUSTED)"


def test_what_kubelets_file_holds_counts_where_list_fails() -> None:
    """Another client has used kubelet's rate limit up after the reboot, and no read of this daemon has succeeded."""
    core = Core()
    core.ledger_problem = LIMIT
    kept(core, a=("/dev/vfio/81",))
    core.feed(HostScanned(1, GROUP_82))
    answer = only(Refused, restarted(core, A))
    assert answer.reason.startswith("the container would get /dev/vfio/81: kubelet has kept that")
    assert f"/dev/vfio/81 belongs to {B} now" in answer.reason
    assert (core.state.kubelet.ledger.problem, core.state.kubelet.ledger.read) == (LIMIT, 0)


def test_a_container_start_waits_for_its_own_read_and_takes_the_answers_of_one_that_fails() -> None:
    core = node(*GROUP_82, ledger={A: "vm-1"})
    core.at += 1
    core.silent = True
    core.feed(pre_start_call(A))
    core.feed(core.poll_event(core.state.host.polls.refresh.outstanding or 0))
    assert core.answers(core.inspected(A, *GROUP_82)) == []
    cached = (CachedAnswer(H100, DeviceId(A), ("/dev/vfio/81",)),)
    answer = only(Refused, core.answers(LedgerUnreadable(by_hand(core), LIMIT, LedgerFile(cached=cached))))
    assert f"/dev/vfio/81 belongs to {B} now" in answer.reason


def test_an_older_answer_is_asked_for_again_before_a_refusal_and_a_failed_read_may_clear_it() -> None:
    """The read that is fresh enough was before the Allocate; the next one cannot ask List, and reads the file."""
    core = node(*GROUP_82)
    kept(core, a=("/dev/vfio/81",))
    core.pass_time(limits.LEDGER_QUIET_S)
    kept(core, a=("/dev/vfio/82",))
    core.ledger_problem = LIMIT
    core.feed(pre_start_call(A))
    assert core.state.kubelet.ledger.done <= core.state.calls.waiting[T].since
    assert core.answers(core.inspected(A, *GROUP_82)) == [Ready()]


def test_a_file_that_cannot_be_read_either_leaves_the_answers_that_were_known() -> None:
    core = node(*GROUP_82, ledger={A: "vm-1"})
    kept(core, a=("/dev/vfio/81",))
    core.pass_time(limits.LEDGER_QUIET_S)
    kept(core)
    core.ledger_problem, core.file_readable = LIMIT, False
    assert isinstance(restarted(core, A)[0], Refused)
    core.file_readable = True
    assert restarted(core, A) == [Ready()]


def test_a_file_that_cannot_be_read_beside_list_leaves_the_answers_that_were_known() -> None:
    core = node(*GROUP_82, ledger={A: "vm-1"})
    kept(core, a=("/dev/vfio/81",))
    core.pass_time(limits.LEDGER_QUIET_S)
    kept(core)
    core.file_readable = False
    assert isinstance(restarted(core, A)[0], Refused)


def test_an_answer_that_was_known_is_not_that_of_what_we_hand_out_since() -> None:
    """Its pod has ended, and kubelet's file cannot be read any more."""
    core = node(*GROUP_82)
    kept(core, a=("/dev/vfio/81",))
    core.pass_time(limits.LEDGER_QUIET_S)
    core.file_readable = False
    assert isinstance(ask(core, A, token=Token(7))[0], Granted)
    assert restarted(core, A) == [Ready()]


def test_a_failed_read_gives_nobody_a_device_and_takes_none() -> None:
    core = node(*GROUP_82, ledger={A: "vm-1"})
    entries = core.state.kubelet.ledger.entries
    core.ledger_problem = LIMIT
    kept(core, b=("/dev/vfio/81",))
    core.pass_time(limits.LEDGER_QUIET_S)
    assert core.state.kubelet.ledger.cached == {(H100, DeviceId(B)): ("/dev/vfio/81",)}
    assert core.state.kubelet.ledger.entries is entries


@pytest.mark.parametrize("problem", [None, LIMIT])
def test_what_is_damaged_in_kubelets_file_is_said_once(problem: str | None) -> None:
    core = node(*ALONE)
    core.ledger_problem = problem
    core.damaged = "in the file an answer is damaged"
    said = [e for e in core.pass_time(limits.LEDGER_QUIET_S * 3) if isinstance(e, Log)]
    assert [e.fields for e in said if e.name == "ledger.damaged"] == [{"reason": core.damaged}]
