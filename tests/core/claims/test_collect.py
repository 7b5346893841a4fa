"""A claim whose unprepare never comes (kubernetes issues 139845, 139876; NVIDIA issue 1278)."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gpuactors import limits
from gpuactors.core.claims.machine import CLAIM_FOUND_S
from gpuactors.core.events import Event
from gpuactors.core.events.claims import ActFailed, ClaimRead
from gpuactors.core.events.deviceplugin import CallAbandoned
from gpuactors.core.events.kubelet import LedgerRead
from gpuactors.core.host.asking import LIST_S
from gpuactors.core.reports.snapshot import project
from gpuactors.core.values.claim import ActFault, ClaimsOf, Prepared, Target
from gpuactors.core.values.claim_states import ClaimState
from gpuactors.core.values.model import ClaimedDevice, Pod, SeenPods
from tests.core.builders import NO_FILE, A
from tests.core.gpus.claim_core import ON_HOST, ClaimCore, allocated, core_with, name


def prepared() -> ClaimCore:
    """A prepared claim that kubelet lists for a pod."""
    core = core_with(ON_HOST, one=(A,))
    core.prepare(name("one"))
    core.listed(name("one"), A)
    core.pass_time(limits.LEDGER_QUIET_S)
    return core


def test_a_claim_that_is_missing_twice_and_not_listed_is_released() -> None:
    core = prepared()
    core.claims.clear()
    core.api.clear()
    core.pass_time(limits.LEDGER_QUIET_S + limits.CLAIM_COLLECT_S)
    assert core.claim_state(name("one")) is ClaimState.PREPARED, "once is not enough"
    core.pass_time(limits.CLAIM_COLLECT_S)
    assert core.claim_state(name("one")) is ClaimState.TOMBSTONE
    assert core.driver(A) == "nvidia"


class Asked(ClaimCore):
    """A kubelet that lists its pods only where it is asked for that."""

    def ledger_event(self, read: int) -> Event:
        event = super().ledger_event(read)
        assert isinstance(event, LedgerRead)
        event = replace(event, pods=SeenPods({}, 1))
        if project(self.state).ledger.lists:
            self.lists += 1
            return event
        return replace(event, listed=(), claims=(), passive=True)

    lists = 0


def test_a_claim_that_was_prepared_after_the_last_list_is_listed_once_more() -> None:
    """Kubelet is asked for its list before a claim gets a GPU, and lists the claim only after it is prepared."""
    core = Asked(ON_HOST)
    core.prepare(allocated(name("one"), A))
    core.listed(name("one"), A)
    before = core.lists
    core.held_back = {"read"}
    core.pass_time(LIST_S / 2)
    assert core.lists == before + 1
    assert core.wanted.reads == (), "the API server is not asked for a claim that kubelet lists"


def test_a_claim_that_was_prepared_after_the_last_list_and_is_listed_for_no_pod_is_released() -> None:
    core = Asked(ON_HOST)
    core.prepare(allocated(name("one"), A))
    core.claims.clear()
    core.api.clear()
    core.pass_time(limits.LEDGER_QUIET_S + 3 * limits.CLAIM_COLLECT_S)
    assert core.claim_state(name("one")) is ClaimState.TOMBSTONE


def test_the_two_answers_are_60_s_apart() -> None:
    core = prepared()
    core.claims.clear()
    core.api.clear()
    core.held_back = {"read"}
    asked: list[float] = []
    while len(asked) < 2:
        core.pass_time(1.0)
        if wanted := core.wanted.reads:
            asked.append(core.at)
            core.feed(core.read_event(wanted[0]))
    assert asked[1] - asked[0] >= limits.CLAIM_COLLECT_S - 1


def test_a_claim_that_kubelet_lists_is_not_asked_for() -> None:
    core = prepared()
    core.api.clear()
    core.held_back = {"read"}
    core.pass_time(1000.0)
    assert core.wanted.reads == ()
    assert core.claim_state(name("one")) is ClaimState.PREPARED


def test_a_claim_of_that_name_that_kubelet_lists_for_another_driver_is_not_this_one() -> None:
    """It was deleted, and made anew with a device of another driver: kubelet has ours for no pod."""
    core = prepared()
    core.claims.clear()
    core.api.clear()
    pod = Pod("default", "next", "")
    core.strangers = (ClaimedDevice("other.example", "node", "nic-0", str(name("one")), pod),)
    core.pass_time(limits.LEDGER_QUIET_S + 2 * limits.CLAIM_COLLECT_S)
    assert core.claim_state(name("one")) is ClaimState.TOMBSTONE
    assert core.driver(A) == "nvidia"


def test_a_claim_that_was_replaced_by_another_one_of_its_name_is_released() -> None:
    core = prepared()
    core.claims.clear()
    core.api["default/one"] = core.api["default/one"].__class__(name("one", uid="uid-2"), None, 1, ())
    core.pass_time(limits.LEDGER_QUIET_S + 2 * limits.CLAIM_COLLECT_S)
    assert core.claim_state(name("one")) is ClaimState.TOMBSTONE


@pytest.mark.parametrize("reason", ["403 Forbidden", "503 Service Unavailable", "timeout"])
def test_any_other_answer_releases_nothing(reason: str) -> None:
    core = prepared()
    core.claims.clear()
    core.held_back = {"read"}
    for _ in range(40):
        core.pass_time(limits.CLAIM_COLLECT_S / 2)
        for wanted in core.wanted.reads:
            core.feed(ClaimRead(wanted.number, reason, ClaimsOf.GPUS))
    assert core.claim_state(name("one")) is ClaimState.PREPARED


def test_a_claim_that_exists_is_asked_for_seldom() -> None:
    """Kubelet lists no claim that no container uses."""
    core = prepared()
    core.claims.clear()
    core.held_back = {"read"}
    asked = 0
    for _ in range(round(3600 / limits.LEDGER_S)):
        core.pass_time(limits.LEDGER_S)
        for wanted in core.wanted.reads:
            asked += 1
            core.feed(core.read_event(wanted))
    assert 1 < asked <= 3600 / CLAIM_FOUND_S + 1


def test_kubelets_last_list_does_not_count_while_it_cannot_be_read() -> None:
    """Kubelet is away: whether a pod has the claim cannot be known."""
    core = prepared()
    core.claims.clear()
    core.api.clear()
    core.pass_time(limits.LEDGER_QUIET_S)
    core.ledger_problem = "kubelet is away"
    core.pass_time(10 * limits.CLAIM_COLLECT_S)
    assert core.claim_state(name("one")) is ClaimState.PREPARED
    core.ledger_problem = None
    core.listed(name("one"), A)
    core.pass_time(10 * limits.CLAIM_COLLECT_S)
    assert core.claim_state(name("one")) is ClaimState.PREPARED


def test_kubelets_file_names_no_claim_so_it_releases_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kubelet runs, and there is only the file of its device manager, in which no claim ever is."""

    def of_file(_core: ClaimCore, read: int) -> LedgerRead:
        return LedgerRead(read, None, (), (), file=NO_FILE)

    core = prepared()
    core.api.clear()
    monkeypatch.setattr(ClaimCore, "ledger_event", of_file)
    core.pass_time(10 * limits.CLAIM_COLLECT_S)
    assert core.claim_state(name("one")) is ClaimState.PREPARED


def test_a_prepare_after_the_first_answer_begins_the_count_anew() -> None:
    core = prepared()
    claim = core.api["default/one"]
    core.claims.clear()
    core.api.clear()
    core.pass_time(limits.LEDGER_QUIET_S + limits.CLAIM_COLLECT_S)
    core.api["default/one"] = claim
    assert isinstance(core.answer(core.prepare(name("one"))), Prepared)
    core.listed(name("one"), A)
    core.pass_time(10 * limits.CLAIM_COLLECT_S)
    assert core.claim_state(name("one")) is ClaimState.PREPARED


def test_a_claim_that_is_stopped_is_collected_as_well() -> None:
    """Its pod is gone, and its GPU would never be anybody's again."""
    core = core_with(ON_HOST, one=(A,))
    core.held_back = {"device"}
    core.prepare(name("one"))
    (act,) = core.wanted.devices.values()
    core.feed(ActFailed(act.number, "the kernel refused it", driver_kind=ClaimsOf.GPUS))
    assert core.claim_state(name("one")) is ClaimState.STOPPED
    core.held_back.clear()
    core.api.clear()
    core.pass_time(limits.LEDGER_QUIET_S + 2 * limits.CLAIM_COLLECT_S)
    assert core.claim_state(name("one")) is ClaimState.TOMBSTONE


def test_a_claim_whose_gpu_stays_in_use_is_collected_as_well() -> None:
    core = core_with(ON_HOST, one=(A,))
    core.held_back = {"device"}
    core.feed(CallAbandoned(core.prepare(name("one"))))
    core.api.clear()
    for _ in range(60):
        core.pass_time(limits.CLAIM_RETRY_S)
        for act in core.wanted.devices.values():
            if act.target is Target.VFIO:
                core.feed(
                    ActFailed(act.number, "a process has it open", ActFault.IN_USE, driver_kind=ClaimsOf.GPUS)
                )
    core.release("device")
    assert core.claim_state(name("one")) is ClaimState.TOMBSTONE
    assert core.driver(A) == "nvidia"


def test_files_that_could_not_be_written_are_tried_again_while_kubelet_lists_the_claim() -> None:
    """The next try and the next question were one time: a read of kubelet's ledger put off both."""
    core = prepared().restarted("files")
    (act,) = core.wanted.files.values()
    core.feed(ActFailed(act.number, "no space left on device", driver_kind=ClaimsOf.GPUS))
    core.pass_time(limits.LEDGER_QUIET_S)
    (again,) = core.wanted.files.values()
    assert again.number > act.number
    core.release("files")
    assert core.entry(name("one")) is not None
    assert isinstance(core.answer(core.prepare(name("one"))), Prepared)


def test_files_that_could_not_be_written_do_not_keep_a_claim_from_being_collected() -> None:
    core = prepared().restarted("files")
    core.claims.clear()
    core.api.clear()
    for _ in range(60):
        core.pass_time(limits.CLAIM_RETRY_S)
        for act in core.wanted.files.values():
            if act.claim is not None:
                core.feed(ActFailed(act.number, "no space left on device", driver_kind=ClaimsOf.GPUS))
    assert core.claim_state(name("one")) is ClaimState.RELEASING


def test_a_claim_that_exists_and_is_not_allocated_here_any_more_is_released() -> None:
    """NVIDIA's driver has answered its unprepare meanwhile: the object outlives its pod, where no template made it."""
    core = prepared()
    core.claims.clear()
    core.api["default/one"] = replace(core.api["default/one"], results=None)
    core.pass_time(limits.LEDGER_QUIET_S + limits.CLAIM_COLLECT_S)
    assert core.claim_state(name("one")) is ClaimState.PREPARED, "once is not enough"
    core.pass_time(limits.CLAIM_COLLECT_S)
    assert core.claim_state(name("one")) is ClaimState.TOMBSTONE
    assert core.driver(A) == "nvidia"


def test_a_claim_that_is_not_allocated_any_more_stays_while_kubelet_lists_it() -> None:
    core = prepared()
    core.api["default/one"] = replace(core.api["default/one"], results=None)
    core.pass_time(10 * limits.CLAIM_COLLECT_S)
    assert core.claim_state(name("one")) is ClaimState.PREPARED
