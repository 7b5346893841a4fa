"""What a prepare is answered with, what an unprepare meets, and what fails."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from gpuactors import limits
from gpuactors.core.claims.opaque_config import API_VERSION
from gpuactors.core.claims.progress import CLAIM_TOMBSTONE_S
from gpuactors.core.events.claims import (
    ActDone,
    ActFailed,
    CheckpointWritten,
    ClaimRead,
)
from gpuactors.core.events.daemon import ShutdownRequested
from gpuactors.core.events.deviceplugin import CallAbandoned
from gpuactors.core.events.host import InspectionFailed
from gpuactors.core.gpus.config import KIND
from gpuactors.core.state.claims import gpus_of
from gpuactors.core.values import claim_states as table
from gpuactors.core.values.claim import (
    ActFault,
    AllocatedDevice,
    Claim,
    ClaimName,
    ClaimsOf,
    ClaimUid,
    Json,
    OpaqueConfig,
    Prepared,
    PreparedDevice,
    Target,
    Unprepared,
)
from gpuactors.core.values.claim_states import (
    TRANSITIONS,
    ClaimState,
    ClaimTrigger,
    NoTransitionError,
    Request,
    follow,
)
from gpuactors.core.values.effects import Log
from gpuactors.core.values.model import Holder, PciFunction, device_key
from tests.core.builders import SETTINGS, A, B, audio, gpu
from tests.core.gpus.claim_core import ON_HOST, POOL, PRE_BOUND, ClaimCore, allocated, core_with, name
from tests.support.edits import nodes_of

ONE = name("one")
GPU_A, GPU_B = "gpu-0000-01-00-0", "gpu-0000-02-00-0"


def core_of(*results: AllocatedDevice, configs: tuple[OpaqueConfig, ...] = ()) -> ClaimCore:
    core = ClaimCore(ON_HOST, gpu(B, 2))
    core.created(Claim(ONE, None, 1, results, configs))
    return core


# --- the answer -------------------------------------------------------------------------------------------------


def test_a_repeated_prepare_joins_and_each_answer_is_the_same() -> None:
    """Kubelets before July 2026 append what they are given (kubernetes issue 140471)."""
    core = core_of(AllocatedDevice("b", POOL, GPU_B), AllocatedDevice("a", POOL, GPU_A))
    core.held_back = {"device"}
    first, second = core.prepare(ONE), core.prepare(ONE)
    assert (core.answer(first), core.answer(second)) == (None, None)
    core.release("device")
    third = core.prepare(ONE)
    answers = [core.answer(token) for token in (first, second, third)]
    assert isinstance(answers[0], Prepared)
    assert [d.device for d in answers[0].devices] == [GPU_B, GPU_A]
    assert answers[0] == answers[1] == answers[2]
    assert core.answer(core.restarted().prepare(ONE)) is None
    after = core.restarted()
    assert after.answer(after.prepare(ONE)) == answers[0]
    assert sorted(core.acts) == [(Target.VFIO, A), (Target.VFIO, B)]


def test_a_share_id_is_echoed_and_the_request_is_the_base_name() -> None:
    core = core_of(AllocatedDevice("main/sub", POOL, GPU_A, share_id="7f0e"))
    answer = core.answer(core.prepare(ONE))
    assert isinstance(answer, Prepared)
    assert answer.devices == (
        PreparedDevice(
            ("main",),
            POOL,
            GPU_A,
            (f"k8s.gpu.nvidia.com/claim=uid-one-{GPU_A}", "gpu.nvidia.com/metadata=uid-one_main"),
            "7f0e",
        ),
    )


def test_a_config_for_a_request_covers_its_subrequests() -> None:
    iommu: Json = {"apiVersion": API_VERSION, "kind": KIND, "iommu": {"enableAPIDevice": False}}
    core = core_of(AllocatedDevice("main/sub", POOL, GPU_A), configs=(OpaqueConfig(False, ("main",), iommu),))
    core.held_back = {"files"}
    core.prepare(ONE)
    (act,) = core.wanted.files.values()
    (device,) = act.devices
    assert nodes_of(device) == ("/dev/vfio/1",), "without /dev/vfio/vfio"


def test_the_claim_of_an_extended_resource_is_a_claim_as_any() -> None:
    core = core_of(AllocatedDevice("container-0-request-0", POOL, GPU_A))
    extended = ClaimName("default", "pod-extended-resources-x7k", ClaimUid("uid-x"))
    core.api[str(extended)] = replace(core.api[str(ONE)], name=extended)
    answer = core.answer(core.prepare(extended))
    assert isinstance(answer, Prepared)
    assert answer.devices[0].requests == ("container-0-request-0",)


def test_a_device_in_two_results_is_bound_once_and_answered_twice() -> None:
    core = core_of(AllocatedDevice("a", POOL, GPU_A), AllocatedDevice("b", POOL, GPU_A))
    answer = core.answer(core.prepare(ONE))
    assert isinstance(answer, Prepared)
    assert [d.requests for d in answer.devices] == [("a",), ("b",)]
    assert core.acts == [(Target.VFIO, A)]


# --- what cannot be given ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("mig-1g", "no device of this driver"),
        ("gpu-0000-09-00-0", "gone from this node"),
        ("gpu-0000-03-00-0", "no selector matches it"),
        ("gpu-0000-04-00-0", "no IOMMU group"),
    ],
)
def test_a_device_that_this_node_cannot_give_is_refused_at_once(device: str, words: str) -> None:
    other = replace(gpu("0000:03:00.0", 3, driver="nvidia"), vendor="1002")
    ungrouped = replace(gpu("0000:04:00.0", 4, driver="nvidia"), iommu_group=None)
    core = ClaimCore(ON_HOST, other, ungrouped)
    token = core.prepare(Claim(ONE, None, 1, (AllocatedDevice("a", POOL, device),)))
    assert words in core.refusal(token)
    assert core.claim_state(ONE) is ClaimState.ABSENT
    assert core.wanted.disk.checkpoint is None


@pytest.mark.parametrize(
    ("claim", "words"),
    [
        (Claim(ONE, None, 1, None), "not allocated"),
        (Claim(ONE, None, 1, ()), "no device of this driver"),
        (
            Claim(
                ONE,
                None,
                1,
                (AllocatedDevice("a", POOL, GPU_A),),
                (
                    OpaqueConfig(
                        False, (), {"apiVersion": API_VERSION, "kind": KIND, "iommu": {"policy": "x"}}
                    ),
                ),
            ),
            "iommu.policy",
        ),
        (allocated(name("one", uid="uid-2"), A), "UID uid-one"),
    ],
    ids=["not allocated", "nothing of ours", "an unknown field", "replaced"],
)
def test_a_claim_that_cannot_be_prepared_is_refused_at_once(claim: Claim, words: str) -> None:
    core = ClaimCore(ON_HOST)
    core.created(claim)
    assert words in core.refusal(core.prepare(ONE))
    assert core.claim_state(ONE) is ClaimState.ABSENT


def test_names_of_which_no_path_can_be_made_are_refused() -> None:
    core = ClaimCore(ON_HOST)
    for bad in (
        ClaimName("default", "one", ClaimUid("../../etc")),
        ClaimName("default", "a/b", ClaimUid("uid")),
        ClaimName("", "one", ClaimUid("uid")),
    ):
        assert "no path can be made of that" in core.refusal(core.prepare(bad))
        assert "no path can be made of that" in core.refusal(core.unprepare(bad))
    assert core.state.gpus.claims.entries == {}


def test_a_claim_that_came_before_the_first_scan_waits_for_it() -> None:
    core = ClaimCore()
    core.functions = {ON_HOST.address: ON_HOST}
    core.created(allocated(ONE, A))
    core.feed_answers()
    token = core.prepare(ONE)
    assert core.answer(token) is None
    core.scanned()
    assert isinstance(core.answer(token), Prepared)


# --- the API server is away ---------------------------------------------------------------------------------------


def test_while_the_api_server_is_away_a_prepare_gets_the_reason_at_35_s() -> None:
    core = core_with(ON_HOST, one=(A,))
    core.held_back = {"read"}
    token = core.prepare(ONE)
    reads = 0
    while core.answer(token) is None:
        for wanted in core.wanted.reads:
            reads += 1
            core.feed(ClaimRead(wanted.number, "the API server does not answer", ClaimsOf.GPUS))
        core.pass_time(0.5)
    assert "the API server does not answer" in core.refusal(token)
    assert 2 < reads < 30
    assert core.claim_state(ONE) is ClaimState.ABSENT
    assert core.wanted.reads == ()


def test_an_unprepare_needs_no_api_server() -> None:
    core = core_with(ON_HOST, one=(A,))
    core.prepare(ONE)
    core.held_back = {"read"}
    core.api.clear()
    assert isinstance(core.answer(core.unprepare(ONE)), Unprepared)
    assert core.wanted.reads == ()
    assert core.driver(A) == "nvidia"


def test_a_read_that_comes_back_after_the_unprepare_changes_nothing() -> None:
    """It made the tombstone last ten minutes; one that came back later still found no claim, and ended the daemon."""
    core = core_with(ON_HOST, one=(A,))
    core.held_back = {"read"}
    core.prepare(ONE)
    (read,) = core.wanted.reads
    assert isinstance(core.answer(core.unprepare(ONE)), Unprepared)
    assert core.wanted.reads == ()
    core.feed(ClaimRead(read.number, core.api[str(ONE)], ClaimsOf.GPUS))
    core.pass_time(CLAIM_TOMBSTONE_S + 1)
    assert core.claim_state(ONE) is ClaimState.ABSENT
    core.feed(ClaimRead(read.number, core.api[str(ONE)], ClaimsOf.GPUS))
    assert core.claim_state(ONE) is ClaimState.ABSENT


# --- unprepare ----------------------------------------------------------------------------------------------------


def test_an_unprepare_before_the_prepare_touches_nothing() -> None:
    core = core_with(ON_HOST, one=(A,))
    assert isinstance(core.answer(core.unprepare(ONE)), Unprepared)
    assert core.disk is None
    assert core.acts == []
    assert isinstance(core.answer(core.prepare(ONE)), Prepared), "its next pod's"


@pytest.mark.parametrize(
    ("held", "state"),
    [
        ("read", ClaimState.FETCHING),
        ("inspection", ClaimState.WAITING),
        ("checkpoint", ClaimState.RESERVED),
        ("device", ClaimState.BINDING),
        ("files", ClaimState.WRITING),
        ("commit", ClaimState.COMMITTING),
        ("", ClaimState.PREPARED),
        ("stop", ClaimState.STOPPED),
    ],
)
@pytest.mark.parametrize("function", [ON_HOST, PRE_BOUND], ids=["on its host driver", "pre-bound"])
def test_an_unprepare_in_each_state_leaves_nothing(
    held: str, state: ClaimState, function: PciFunction
) -> None:
    core = core_with(function, one=(A,))
    core.held_back = {held} if held not in ("commit", "stop") else {"files", "device"}
    prepare = core.prepare(ONE)
    if held == "commit":
        core.release("device")
        core.held_back |= {"checkpoint"}
        core.release("files")
    if held == "stop":
        (act,) = core.wanted.devices.values()
        core.feed(ActFailed(act.number, "the kernel refused it", ActFault.REFUSED, driver_kind=ClaimsOf.GPUS))
    assert core.claim_state(ONE) is state
    unprepare = core.unprepare(ONE)
    if state not in (ClaimState.PREPARED, ClaimState.STOPPED):
        assert "unprepared while it was being prepared" in core.refusal(prepare)
    core.release(*core.held_back)
    assert isinstance(core.answer(unprepare), Unprepared)
    assert core.driver(A) == ("nvidia" if function is ON_HOST else "vfio-pci")
    assert core.disk is None or core.disk.entries == ()
    assert not core.wanted.files
    assert isinstance(core.answer(core.prepare(ONE)), Prepared)


def test_a_second_unprepare_joins_the_first_one() -> None:
    core = core_with(ON_HOST, one=(A,))
    core.prepare(ONE)
    core.held_back = {"device"}
    first, second = core.unprepare(ONE), core.unprepare(ONE)
    assert (core.answer(first), core.answer(second)) == (None, None)
    core.release("device")
    assert core.answer(first) == core.answer(second) == Unprepared()


def test_a_prepare_during_the_release_waits_and_is_read_anew() -> None:
    core = core_with(ON_HOST, one=(A,))
    core.prepare(ONE)
    core.held_back = {"device"}
    core.unprepare(ONE)
    token = core.prepare(ONE)
    assert core.answer(token) is None
    core.release("device")
    assert isinstance(core.answer(token), Prepared)
    assert core.driver(A) == "vfio-pci"


def test_an_unprepare_is_answered_in_time_whatever_hangs() -> None:
    """An error would keep the pod from ending for ever (kubernetes issue 129402)."""
    core = core_with(ON_HOST, one=(A,))
    core.prepare(ONE)
    core.held_back = {"device"}
    token = core.unprepare(ONE)
    core.pass_time(limits.CLAIM_ANSWER_S - 1)
    assert core.answer(token) is None
    core.pass_time(1.5)
    assert isinstance(core.answer(token), Unprepared)
    assert core.claim_state(ONE) is ClaimState.RELEASING, "the GPU is still the claim's"
    assert core.answer(core.prepare(allocated(name("two"), A))) is None


def test_a_cancelled_call_ends_the_wait_and_not_the_bookkeeping() -> None:
    core = core_with(ON_HOST, one=(A,))
    core.held_back = {"device"}
    token = core.prepare(ONE)
    core.feed(CallAbandoned(token))
    core.release("device")
    assert core.claim_state(ONE) is ClaimState.PREPARED
    assert core.answer(token) is None
    assert isinstance(core.answer(core.unprepare(ONE)), Unprepared)
    assert core.driver(A) == "nvidia"


@pytest.mark.parametrize("held", ["read", "inspection"])
def test_a_cancelled_call_that_has_nothing_yet_leaves_nothing(held: str) -> None:
    core = core_with(ON_HOST, one=(A,))
    core.held_back = {held}
    core.feed(CallAbandoned(core.prepare(ONE)))
    assert core.claim_state(ONE) is ClaimState.ABSENT
    core.release(held)
    assert core.driver(A) == "nvidia"
    assert core.state.gpus.claims.reads == {}


# --- what fails -----------------------------------------------------------------------------------------------------


def stopped() -> ClaimCore:
    core = core_with(ON_HOST, one=(A,))
    core.held_back = {"device"}
    token = core.prepare(ONE)
    (act,) = core.wanted.devices.values()
    core.feed(ActFailed(act.number, "the kernel refused it", ActFault.REFUSED, driver_kind=ClaimsOf.GPUS))
    assert core.refusal(token) == "the kernel refused it"
    return core


def test_after_a_failed_act_the_next_prepare_goes_on_from_where_the_device_is() -> None:
    core = stopped()
    assert core.claim_state(ONE) is ClaimState.STOPPED
    assert (Target.ORIGINAL_DRIVER, A) not in core.acts, "upstream returns it between its tries"
    token = core.prepare(ONE)
    core.release("device")
    assert isinstance(core.answer(token), Prepared)


def test_after_a_failed_act_the_unprepare_returns_the_device() -> None:
    core = stopped()
    core.functions[ON_HOST.address] = replace(ON_HOST, driver=None)  # unbound, and not bound again
    core.held_back.clear()
    assert isinstance(core.answer(core.unprepare(ONE)), Unprepared)
    assert core.driver(A) == "nvidia"


def test_one_of_two_acts_fails_and_all_devices_are_returned() -> None:
    core = core_with(ON_HOST, gpu(B, 2, driver="nvidia"), one=(A, B))
    core.held_back = {"device"}
    core.prepare(ONE)
    acts = core.wanted.devices
    core.feed(core.act_event(acts[device_key(ON_HOST.address)]))
    core.feed(
        ActFailed(acts[device_key(gpu(B).address)].number, "the kernel refused it", driver_kind=ClaimsOf.GPUS)
    )
    assert core.claim_state(ONE) is ClaimState.STOPPED
    core.held_back.clear()
    core.unprepare(ONE)
    assert (core.driver(A), core.driver(B)) == ("nvidia", "nvidia")


def test_the_end_of_an_act_that_nobody_wants_any_more_changes_nothing() -> None:
    core = core_with(ON_HOST, one=(A,))
    core.held_back = {"device"}
    core.prepare(ONE)
    (act,) = core.wanted.devices.values()
    core.unprepare(ONE)
    core.feed(ActDone(act.number, driver_kind=ClaimsOf.GPUS))
    core.feed(ActFailed(act.number, "late", driver_kind=ClaimsOf.GPUS))
    assert core.claim_state(ONE) is ClaimState.RELEASING
    core.release("device")
    assert core.claim_state(ONE) is ClaimState.TOMBSTONE


def test_a_release_that_failed_is_tried_again() -> None:
    core = core_with(ON_HOST, one=(A,))
    core.prepare(ONE)
    core.held_back = {"device"}
    token = core.unprepare(ONE)
    (act,) = core.wanted.devices.values()
    core.feed(ActFailed(act.number, "the kernel refused it", ActFault.REFUSED, driver_kind=ClaimsOf.GPUS))
    assert core.wanted.devices == {}
    core.pass_time(limits.CLAIM_RETRY_S)
    (again,) = core.wanted.devices.values()
    assert again.number > act.number
    core.release("device")
    assert isinstance(core.answer(token), Unprepared)
    assert core.driver(A) == "nvidia"


def test_a_claim_that_waits_for_a_failing_release_is_told_why_it_fails() -> None:
    core = core_with(ON_HOST, one=(A,), two=(A,))
    core.prepare(ONE)
    core.held_back = {"device"}
    core.unprepare(ONE)
    token = core.prepare(name("two"))
    for _ in range(10):
        for act in core.wanted.devices.values():
            core.feed(
                ActFailed(act.number, "the kernel refused it", ActFault.REFUSED, driver_kind=ClaimsOf.GPUS)
            )
        core.pass_time(limits.CLAIM_RETRY_S)
    assert "released from the claim default/one (the kernel refused it)" in core.refusal(token)


def test_a_disk_that_takes_no_checkpoint_is_the_error_at_35_s_and_nothing_was_done() -> None:
    core = core_with(ON_HOST, one=(A,))
    core.held_back = {"checkpoint"}
    token = core.prepare(ONE)
    checkpoint = core.wanted.disk.checkpoint
    assert checkpoint is not None
    core.feed(CheckpointWritten(checkpoint.number, ClaimsOf.GPUS, "no space left on device: free some"))
    core.pass_time(limits.CLAIM_ANSWER_S)
    assert core.refusal(token) == "no space left on device: free some"
    assert core.acts == []
    core.feed(CheckpointWritten(checkpoint.number, ClaimsOf.GPUS))
    assert core.state.gpus.claims.unwritten == ""


def test_a_stopping_daemon_refuses_new_calls() -> None:
    core = core_with(ON_HOST, one=(A,))
    core.prepare(ONE)
    core.feed(ShutdownRequested())
    assert "stopping" in core.refusal(core.unprepare(ONE))
    assert not core.wanted.serving.is_serving


# --- an unprepare of a claim that is not known ----------------------------------------------------------------------


def test_an_unprepare_of_an_unknown_claim_removes_its_files_before_it_is_answered() -> None:
    """The checkpoint is lost, or of another boot: what the daemon before it wrote for the claim may still be there."""
    core = core_with(ON_HOST, two=(A,))
    core.held_back = {"files"}
    token = core.unprepare(ONE)
    ((claim, act),) = core.wanted.files.items()
    assert (claim, act.claim) == (ONE.uid, None)
    assert core.answer(token) is None
    assert core.disk is None, "it needs no intent"
    core.release("files")
    assert isinstance(core.answer(token), Unprepared)
    assert core.acts == [], "no device is touched"


@pytest.mark.parametrize("held_back", ["read", "inspection"], ids=["read", "waiting"])
def test_an_unprepare_of_a_claim_that_has_no_device_yet_removes_files_of_an_earlier_life(
    held_back: str,
) -> None:
    core = core_with(ON_HOST, one=(A,))
    core.held_back = {held_back, "files"}
    core.prepare(ONE)
    token = core.unprepare(ONE)
    assert core.answer(token) is None
    assert [act.claim for act in core.wanted.files.values()] == [None]
    core.release("files")
    assert isinstance(core.answer(token), Unprepared)


def test_files_of_an_unknown_claim_that_cannot_be_removed_are_tried_again_and_its_pod_may_end() -> None:
    core = core_with(ON_HOST, one=(A,))
    core.held_back = {"files"}
    token = core.unprepare(ONE)
    core.feed(
        ActFailed(core.wanted.files[ONE.uid].number, "the disk is read-only", driver_kind=ClaimsOf.GPUS)
    )
    assert core.wanted.files == {}
    core.pass_time(limits.CLAIM_RETRY_S)
    assert [act.claim for act in core.wanted.files.values()] == [None]
    core.pass_time(limits.CLAIM_ANSWER_S)
    assert isinstance(core.answer(token), Unprepared)
    assert core.claim_state(ONE) is ClaimState.CLEARING


def test_a_prepare_waits_until_the_files_of_an_earlier_life_are_removed() -> None:
    core = core_with(ON_HOST, one=(A,))
    core.held_back = {"files"}
    core.unprepare(ONE)
    token = core.prepare(ONE)
    assert core.claim_state(ONE) is ClaimState.CLEARING
    core.release("files")
    assert isinstance(core.answer(token), Prepared)


# --- a GPU that is unplugged ------------------------------------------------------------------------------------------


def test_a_gpu_that_is_unplugged_while_it_is_bound_fails_the_prepare() -> None:
    core = core_with(ON_HOST, one=(A,))
    core.held_back = {"device"}
    token = core.prepare(ONE)
    core.unplugged(A)
    core.release("device")
    assert "not there" in core.refusal(token)
    assert isinstance(core.answer(core.unprepare(ONE)), Unprepared)
    assert core.disk is not None
    assert core.disk.entries == ()


@pytest.mark.parametrize("again", [False, True], ids=["gone", "back on its host driver"])
def test_a_gpu_that_is_unplugged_under_its_claim_is_let_go_at_the_unprepare(again: bool) -> None:
    core = core_with(ON_HOST, one=(A,))
    core.prepare(ONE)
    core.unplugged(A)
    assert core.claim_state(ONE) is ClaimState.DRIFTED
    if again:
        core.changed(ON_HOST)
    assert isinstance(core.answer(core.unprepare(ONE)), Unprepared)
    assert not again or core.driver(A) == "nvidia"


def test_a_gpu_that_is_unplugged_during_its_return_ends_the_release() -> None:
    core = core_with(ON_HOST, one=(A,))
    core.prepare(ONE)
    core.held_back = {"device"}
    token = core.unprepare(ONE)
    core.unplugged(A)
    core.release("device")
    assert isinstance(core.answer(token), Unprepared)


# --- a prepare of a claim that is prepared ----------------------------------------------------------------------------


def prepared_core(*functions: PciFunction) -> ClaimCore:
    core = core_with(*(functions or (ON_HOST,)), one=(A,))
    assert isinstance(core.answer(core.prepare(ONE)), Prepared)
    return core


def rebound_by_hand(core: ClaimCore) -> None:
    core.changed(ON_HOST)
    assert core.driver(A) == "nvidia"


def plugged_in_again(core: ClaimCore) -> None:
    core.unplugged(A)
    core.changed(ON_HOST)


@pytest.mark.parametrize("happens", [rebound_by_hand, plugged_in_again])
def test_a_gpu_that_is_back_on_its_host_driver_is_bound_again_before_the_claim_is_prepared(
    happens: Callable[[ClaimCore], None],
) -> None:
    core = prepared_core()
    happens(core)
    core.held_back = {"checkpoint"}
    token = core.prepare(ONE)
    assert core.claim_state(ONE) is ClaimState.RESERVED
    assert core.wanted.devices == {}, "the intent is not on disk yet"
    core.held_back = {"files"}
    core.release()
    assert core.driver(A) == "vfio-pci"
    assert core.answer(token) is None, "its files are not seen yet"
    core.release("files")
    assert isinstance(core.answer(token), Prepared)
    assert any(e.name == "claim.astray" for e in core.effects if isinstance(e, Log))
    core.unprepare(ONE)
    assert core.driver(A) == "nvidia"


def test_an_inspection_that_fails_after_the_act_does_not_say_that_the_gpu_is_on_its_host_driver() -> None:
    """Found by a history: what was known before the act counted as what the inspection has seen. The claim was reserved
    again, and its GPU, on vfio-pci by then, was never returned."""
    core = core_with(ON_HOST, one=(A,))
    core.held_back = {"device"}
    core.prepare(ONE)
    (act,) = core.wanted.devices.values()
    core.held_back = {"inspection"}
    core.feed(core.act_event(act))
    for _ in range(2):
        number = core.state.host.inspections.functions[ON_HOST.address]
        core.feed(InspectionFailed(number, ON_HOST.address, "Input/output error"))
        core.pass_time(1.0)
        assert core.logged("claim.astray") == []
    core.release("inspection")
    core.pass_time(60.0)
    assert core.claim_state(ONE) is ClaimState.PREPARED
    core.unprepare(ONE)
    assert core.driver(A) == "nvidia"


def test_a_repeated_prepare_of_a_gpu_in_its_place_writes_nothing_but_missing_files() -> None:
    core = prepared_core()
    written, acts = core.disk, list(core.acts)
    assert isinstance(core.answer(core.prepare(ONE)), Prepared)
    assert core.disk is written
    assert core.acts == acts


def test_a_repeated_prepare_is_answered_by_a_look_that_was_asked_for_after_it_came() -> None:
    """The GPU has been bound to its host driver, and no uevent has said so."""
    core = prepared_core()
    core.functions[ON_HOST.address] = ON_HOST
    core.held_back = {"inspection"}
    token = core.prepare(ONE)
    assert core.answer(token) is None
    assert core.claim_state(ONE) is ClaimState.VERIFYING
    core.release("inspection")
    assert isinstance(core.answer(token), Prepared)
    assert core.driver(A) == "vfio-pci"


def test_a_repeated_prepare_is_not_answered_from_a_look_that_a_uevent_has_outdated() -> None:
    """The GPU was found again in another group: the files name a node that another GPU may have now."""
    core = prepared_core(PRE_BOUND)
    core.held_back = {"inspection"}
    token = core.prepare(ONE)
    core.changed(gpu(A, 7))
    core.feed(core.inspected(A, PRE_BOUND))
    assert core.claim_state(ONE) is ClaimState.VERIFYING
    assert core.answer(token) is None
    core.release("inspection")
    assert isinstance(core.answer(token), Prepared)
    entry = core.entry(ONE)
    assert entry is not None
    assert gpus_of(entry).bound[PRE_BOUND.address].iommu_group == 7


def test_a_repeated_prepare_of_a_gpu_that_is_gone_is_refused() -> None:
    core = prepared_core()
    core.unplugged(A)
    assert "is gone from this node" in core.refusal(core.prepare(ONE))
    assert core.claim_state(ONE) is ClaimState.DRIFTED, "it is the claim's until its unprepare"


def test_a_gpu_in_another_iommu_group_gets_other_files() -> None:
    """It was plugged in again, and a udev rule bound it to vfio-pci: the container's node would be the old group's."""
    core = prepared_core(PRE_BOUND)
    core.unplugged(A)
    core.held_back = {"files"}
    core.changed(gpu(A, 7))
    (act,) = core.wanted.files.values()
    (device,) = act.devices
    assert "/dev/vfio/7" in nodes_of(device)


def test_a_companion_that_was_plugged_in_is_bound_to_vfio_with_its_gpu() -> None:
    """A group that is not viable is refused by the kernel when the virtual machine opens it."""
    core = prepared_core()
    core.changed(audio("0000:01:00.1", 1, driver="snd_hda_intel"))
    assert isinstance(core.answer(core.prepare(ONE)), Prepared)
    assert core.driver("0000:01:00.1") == "vfio-pci"
    core.unprepare(ONE)
    assert (core.driver(A), core.driver("0000:01:00.1")) == ("nvidia", "snd_hda_intel")


def test_nothing_is_written_while_the_pod_of_the_claim_still_runs() -> None:
    """QEMU has the group open, and a companion was bound to its host driver by hand: the claim's other pod waits."""
    core = prepared_core(ON_HOST, audio("0000:01:00.1", 1, driver="snd_hda_intel"))
    core.listed(ONE, A)
    core.enabled[A], core.holders[1] = 1, (Holder(77, "qemu-system-x86", None),)
    assert isinstance(core.answer(core.prepare(ONE)), Prepared), "all is in its place"
    core.changed(audio("0000:01:00.1", 1, driver="snd_hda_intel"))
    written, acts = core.disk, list(core.acts)
    token = core.prepare(ONE)
    assert core.answer(token) is None
    core.pass_time(limits.CLAIM_ANSWER_S)
    assert "77" in core.refusal(token)
    assert core.disk is written
    assert core.acts == acts
    assert core.claim_state(ONE) is ClaimState.DRIFTED


def test_a_gpu_that_another_pod_has_meanwhile_is_not_bound_again() -> None:
    """By kubelet's ledger it is that pod's: another driver's claim."""
    core = prepared_core()
    plugged_in_again(core)
    core.ledger[A] = "other"
    acts = list(core.acts)
    token = core.prepare(ONE)
    core.pass_time(limits.CLAIM_ANSWER_S)
    assert "other" in core.refusal(token)
    assert core.acts == acts


def test_an_unprepare_during_the_look_releases_the_claim() -> None:
    core = prepared_core()
    core.held_back = {"inspection"}
    prepare = core.prepare(ONE)
    unprepare = core.unprepare(ONE)
    assert "unprepared while" in core.refusal(prepare)
    core.release("inspection")
    assert isinstance(core.answer(unprepare), Unprepared)
    assert core.driver(A) == "nvidia"


def test_a_look_that_nobody_waits_for_ends() -> None:
    core = prepared_core()
    core.held_back = {"inspection"}
    core.feed(CallAbandoned(core.prepare(ONE)))
    assert core.claim_state(ONE) is ClaimState.PREPARED


def test_a_restart_during_the_second_bind_goes_on_with_it() -> None:
    core = prepared_core()
    rebound_by_hand(core)
    core.held_back = {"device"}
    core.prepare(ONE)
    core = core.restarted()
    assert core.driver(A) == "vfio-pci"
    assert isinstance(core.answer(core.prepare(ONE)), Prepared)


# --- the table --------------------------------------------------------------------------------------------------------


def test_a_pair_without_a_row_is_a_bug() -> None:
    with pytest.raises(NoTransitionError, match="has no transition on fetched"):
        follow(ClaimState.PREPARED, ClaimTrigger.FETCHED)


def test_a_pair_without_a_row_is_logged_in_production_and_the_rest_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = ClaimCore(ON_HOST, gpu(B, 2), settings=replace(SETTINGS, strict=False))
    core.api = {"default/one": allocated(ONE, A), "default/two": allocated(name("two"), B)}
    core.prepare(ONE)
    rows = {
        pair: row
        for pair, row in TRANSITIONS.items()
        if pair != (ClaimState.PREPARED, ClaimTrigger.UNPREPARE)
    }
    monkeypatch.setattr(table, "TRANSITIONS", rows)
    core.unprepare(ONE)
    (line,) = core.logged("claim.broken")
    assert "a claim that is Prepared has no transition on unprepare" in str(line.fields["reason"])
    assert core.claim_state(ONE) is ClaimState.PREPARED
    assert isinstance(core.answer(core.prepare(name("two"))), Prepared)


def without(monkeypatch: pytest.MonkeyPatch, *pairs: tuple[ClaimState, ClaimTrigger]) -> None:
    rows = {pair: row for pair, row in TRANSITIONS.items() if pair not in pairs}
    monkeypatch.setattr(table, "TRANSITIONS", rows)


def in_production() -> ClaimCore:
    core = ClaimCore(ON_HOST, gpu(B, 2), settings=replace(SETTINGS, strict=False))
    core.api = {"default/one": allocated(ONE, A), "default/two": allocated(name("two"), B)}
    return core


def broken_lines(core: ClaimCore) -> list[Log]:
    return core.logged("claim.broken")


@pytest.mark.parametrize(
    "pair",
    [
        (ClaimState.WAITING, ClaimTrigger.FREE),
        (ClaimState.RESERVED, ClaimTrigger.DURABLE),
        (ClaimState.BINDING, ClaimTrigger.DONE),
        (ClaimState.COMMITTING, ClaimTrigger.DURABLE),
    ],
)
def test_a_claim_whose_own_next_step_has_no_row_is_set_aside_and_the_rest_served(
    pair: tuple[ClaimState, ClaimTrigger], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = in_production()
    assert isinstance(core.answer(core.prepare(name("two"))), Prepared)
    with monkeypatch.context() as planted:
        without(planted, pair)
        assert f"has no transition on {pair[1]}" in core.refusal(core.prepare(ONE))
        core.pass_time(limits.LEDGER_QUIET_S)
        assert len(broken_lines(core)) == 1, "it is said once, and not at each event"
        assert isinstance(core.answer(core.unprepare(name("two"))), Unprepared)
    assert core.claim_state(ONE) is pair[0]
    assert isinstance(core.answer(core.unprepare(ONE)), Unprepared), "a call about it is another try"
    assert core.driver(A) == "nvidia"


def test_a_call_about_a_claim_that_has_no_row_for_it_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    core = in_production()
    core.prepare(ONE)
    without(
        monkeypatch,
        (ClaimState.PREPARED, ClaimTrigger.UNPREPARE),
        (ClaimState.PREPARED, ClaimTrigger.PREPARE),
    )
    assert "has no transition on unprepare" in core.refusal(core.unprepare(ONE))
    assert "has no transition on prepare" in core.refusal(core.prepare(ONE))


def test_what_is_due_and_has_no_row_is_set_aside_and_the_rest_served(monkeypatch: pytest.MonkeyPatch) -> None:
    core = in_production()
    core.prepare(ONE)
    core.unprepare(ONE)
    without(monkeypatch, (ClaimState.TOMBSTONE, ClaimTrigger.FORGOTTEN))
    core.pass_time(CLAIM_TOMBSTONE_S + limits.LEDGER_QUIET_S)
    assert len(broken_lines(core)) == 1
    assert isinstance(core.answer(core.prepare(name("two"))), Prepared)


def test_an_entry_on_disk_that_has_no_row_is_set_aside_and_the_others_are_restored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = in_production()
    core.prepare(ONE)
    core.held_back = {"device"}
    core.prepare(name("two"))
    without(monkeypatch, (ClaimState.RESERVED, ClaimTrigger.RESTORED))
    core = core.restarted()
    assert core.claim_state(ONE) is ClaimState.PREPARED
    assert core.claim_state(name("two")) is ClaimState.RESERVED, "its GPU is its own"
    assert len(broken_lines(core)) == 1


def test_each_state_has_a_row_for_what_may_come_in_it() -> None:
    """Calls come at any time; an act ends where one is requested; what is on disk is restored."""
    for state in ClaimState:
        assert {(state, ClaimTrigger.PREPARE), (state, ClaimTrigger.UNPREPARE)} <= TRANSITIONS.keys()
    for state, request in TRANSITIONS.values():
        if request in (Request.BIND, Request.WRITE, Request.UNDO):
            assert {(state, ClaimTrigger.DONE), (state, ClaimTrigger.FAILED)} <= TRANSITIONS.keys()
    for state in (ClaimState.RESERVED, ClaimState.PREPARED, ClaimState.RELEASING):
        assert (state, ClaimTrigger.RESTORED) in TRANSITIONS
