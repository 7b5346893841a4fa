"""The order of prepare and unprepare: NVIDIA issues 641 and 1162, half-prepared claims, restarts, forced deletion."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpuactors import limits
from gpuactors.core.claims.progress import CLAIM_TOMBSTONE_S
from gpuactors.core.events.claims import ClaimRead
from gpuactors.core.values.claim import ClaimsOf, Prepared, Unprepared
from gpuactors.core.values.claim_states import ClaimState
from tests.core.domains.domain_core import (
    BLUE,
    DAEMON,
    NAMESPACE,
    NODE,
    RED,
    DomainCore,
    channel,
    daemon,
    found_by_files,
    name,
    with_daemon,
)

OLD, NEW = name("old"), name("new")


def prepared() -> DomainCore:
    """OLD has the channel of RED, whose daemon runs."""
    core = with_daemon(channel(OLD), channel(NEW))
    assert isinstance(core.answer(core.prepare(OLD)), Prepared)
    return core


def test_the_timeline_of_641() -> None:
    """A pod was deleted by force. 40.462: its replacement is prepared. 41.014: the old claim is unprepared. Upstream
    removed the label then, the domain's daemon went for good, and the job failed with CUDA_ERROR_NOT_SUPPORTED."""
    core = prepared()
    core.at = 40.462
    new = core.prepare(NEW)
    assert core.answer(new) is None
    assert core.problem(NEW) == "channel-0: it belongs to the claim default/old"
    core.pass_time(41.014 - 40.462)
    old = core.unprepare(OLD)
    assert isinstance(core.answer(old), Unprepared)
    assert isinstance(core.answer(new), Prepared), "within its call"
    assert core.history == [None, RED], "the label was never gone"
    core.pass_time(300.0)
    assert core.claim_state(NEW) is ClaimState.PREPARED
    assert core.label == RED
    core.unprepare(NEW)
    core.lingered()
    assert core.history == [None, RED, None]


def test_an_old_claim_that_is_never_unprepared_is_named_after_35_s() -> None:
    core = prepared()
    new = core.prepare(NEW)
    core.pass_time(limits.CLAIM_ANSWER_S)
    assert "channel-0: it belongs to the claim default/old" in core.refusal(new)
    core.unprepare(OLD)
    assert isinstance(core.answer(core.prepare(NEW)), Prepared)


# --- 1162: a prepare that comes after the unprepare of its claim ------------------------------------------------


def test_a_late_prepare_of_a_claim_that_is_gone_is_refused_and_leaves_nothing() -> None:
    core = prepared()
    core.unprepare(OLD)
    del core.api[str(OLD)]
    token = core.prepare(OLD)
    assert "no claim default/old" in core.refusal(token)
    core.lingered()
    assert (core.claim_state(OLD), core.label, OLD.uid in core.files) == (ClaimState.ABSENT, None, False)


def test_a_late_prepare_of_a_claim_never_seen_before_is_refused_after_a_fresh_read() -> None:
    core = DomainCore(channel(NEW))
    assert isinstance(core.answer(core.unprepare(OLD)), Unprepared)
    assert core.claim_state(OLD) is ClaimState.TOMBSTONE
    core.held_back = {"read"}
    token = core.prepare(OLD)
    assert (core.claim_state(OLD), core.label) == (ClaimState.FETCHING, None)
    core.release("read")
    assert "no claim default/old" in core.refusal(token)
    assert core.history == [None]


def test_a_prepare_that_was_under_way_ends_with_the_unprepare_and_changes_nothing_afterwards() -> None:
    core = DomainCore(channel(OLD))
    core.held_back = {"read"}
    token = core.prepare(OLD)
    unprepare = core.unprepare(OLD)
    assert "unprepared while it was being prepared" in core.refusal(token)
    core.release("read")
    assert isinstance(core.answer(unprepare), Unprepared)
    core.pass_time(200.0)
    assert (core.history, core.files) == ([None], {})


def test_an_unprepare_is_remembered_by_uid_for_90_s() -> None:
    core = DomainCore()
    core.unprepare(OLD)
    core.pass_time(CLAIM_TOMBSTONE_S - 1.0)
    assert core.claim_state(OLD) is ClaimState.TOMBSTONE
    core.pass_time(2.0)
    assert core.claim_state(OLD) is ClaimState.ABSENT


def test_a_claim_that_is_prepared_again_for_its_next_pod_is_right() -> None:
    core = prepared()
    core.unprepare(OLD)
    assert isinstance(core.answer(core.prepare(OLD)), Prepared)
    assert core.history == [None, RED]


# --- half-prepared ----------------------------------------------------------------------------------------------

HALF: dict[str, Callable[[DomainCore], None]] = {
    "fetching": lambda core: core.held_back.add("read"),
    "waiting": lambda core: core.held_back.add("domain"),
    "waiting for the channel": lambda _core: None,
}


@pytest.mark.parametrize("half", HALF)
def test_the_unprepare_of_a_half_prepared_claim_touches_nothing_of_a_live_one(half: str) -> None:
    core = prepared()
    HALF[half](core)
    core.prepare(NEW)
    assert core.claim_state(NEW) in (ClaimState.FETCHING, ClaimState.WAITING)
    assert isinstance(core.answer(core.unprepare(NEW)), Unprepared)
    core.held_back.clear()
    core.release()
    core.pass_time(30.0)
    assert core.claim_state(OLD) is ClaimState.PREPARED
    assert (core.history, OLD.uid in core.files) == ([None, RED], True)


STEPS = ("checkpoint", "label-patch", "files")


@pytest.mark.parametrize("step", STEPS)
def test_the_unprepare_of_a_claim_that_was_begun_leaves_nothing_of_it(step: str) -> None:
    core = DomainCore(daemon(DAEMON), channel(OLD))
    core.ready()
    core.prepare(DAEMON)
    core.held_back = {step}
    core.prepare(OLD)
    token = core.unprepare(OLD)
    core.release(step)
    assert isinstance(core.answer(token), Unprepared)
    core.lingered()
    assert (core.label, OLD.uid in core.files) == (None, False)
    assert core.disk is not None
    assert [e.name for e in core.disk.entries] == [DAEMON]


# --- restarts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["read", "domain", "imex", "checkpoint", "label-patch", "files"])
def test_a_restart_at_every_step_of_a_prepare_goes_on_and_kubelet_s_next_prepare_succeeds(step: str) -> None:
    core = DomainCore(daemon(DAEMON), channel(NEW))
    core.ready()
    core.prepare(DAEMON)
    core.held_back = {step}
    core.prepare(NEW)
    core = core.restarted()
    token = core.prepare(NEW)
    core.settled()  # the daemon's claim was there before the label
    assert isinstance(core.answer(token), Prepared)
    assert core.label == RED
    core.unprepare(NEW)
    core.lingered()
    assert core.history == [None, RED, None]


@pytest.mark.parametrize("step", ["checkpoint", "files", "label-patch"])
def test_a_restart_at_every_step_of_an_unprepare_goes_on_and_the_label_goes(step: str) -> None:
    core = prepared()
    core.held_back = {step}
    core.unprepare(OLD)
    core = core.restarted()
    assert isinstance(core.answer(core.unprepare(OLD)), Unprepared)
    core.lingered()
    assert (core.history, OLD.uid in core.files) == ([None, RED, None], False)


def test_after_a_restart_the_label_of_a_live_claim_stays_while_the_api_server_is_away() -> None:
    core = prepared()
    core.away = True
    core = core.restarted()
    core.pass_time(60.0)
    assert core.history == [None, RED]
    core.away = False
    core.pass_time(10.0)
    assert core.history == [None, RED]
    assert isinstance(core.answer(core.prepare(OLD)), Prepared)


def test_a_prepared_claim_is_written_again_at_a_start_as_it_was() -> None:
    core = prepared()
    before = dict(core.files)
    core.files.clear()
    core = core.restarted()
    assert core.files == before


# --- forced deletion --------------------------------------------------------------------------------------------


def test_a_forced_deletion_whose_unprepare_never_comes_is_collected_and_the_next_claim_follows() -> None:
    core = prepared()
    core.listed = {DAEMON}
    del core.api[str(OLD)]
    core.pass_time(limits.CLAIM_COLLECT_S * 4)
    assert core.claim_state(OLD) in (ClaimState.TOMBSTONE, ClaimState.ABSENT)
    core.lingered()
    assert core.label is None
    token = core.prepare(NEW)
    core.settled()
    assert isinstance(core.answer(token), Prepared)


def test_a_claim_that_kubelet_lists_is_not_collected() -> None:
    core = prepared()
    core.listed = {OLD, DAEMON}
    core.api.clear()
    core.pass_time(limits.CLAIM_COLLECT_S * 4)
    assert core.claim_state(OLD) is ClaimState.PREPARED
    assert core.label == RED


def test_the_daemon_s_claim_that_goes_makes_no_channel_ready_for_the_next_claim() -> None:
    core = prepared()
    core.unprepare(DAEMON)
    core.unprepare(OLD)
    token = core.prepare(NEW)
    assert "no prepared claim on this node yet" in core.problem(NEW)
    core.prepare(DAEMON)
    assert isinstance(core.answer(token), Prepared)
    assert NODE in core.domains[RED].ready_nodes


# --- the checkpoint is lost -------------------------------------------------------------------------------------


def test_a_lost_checkpoint_costs_neither_the_label_nor_the_files_nor_the_channel() -> None:
    core = prepared()
    before = dict(core.files)
    core.disk = found_by_files(DAEMON, OLD)
    core = core.restarted("read")
    assert core.history == [None, RED], "whose it is has not been read yet"
    core.release("read")
    assert (core.claim_state(OLD), core.claim_state(DAEMON)) == (ClaimState.PREPARED, ClaimState.PREPARED)
    assert core.files == before
    core.prepare(NEW)
    assert core.problem(NEW) == "channel-0: it belongs to the claim default/old"
    core.unprepare(OLD)
    assert core.history == [None, RED]
    assert core.claim_state(NEW) is ClaimState.PREPARED


def test_what_a_claim_of_a_lost_checkpoint_has_is_nobody_else_s_before_it_is_read() -> None:
    core = prepared()
    core.disk = found_by_files(DAEMON, OLD)
    core = core.restarted("read")
    token = core.prepare(NEW)
    (read,) = (r for r in core.wanted.claims.reads if r.claim == NEW)
    core.feed(ClaimRead(read.number, core.api[str(NEW)], ClaimsOf.DOMAINS))
    assert core.answer(token) is None
    assert (
        core.problem(NEW) == f"the devices of the claim {DAEMON} are not known yet (the checkpoint is lost)"
    )
    core.pass_time(limits.CLAIM_ANSWER_S)
    assert "the checkpoint is lost" in core.refusal(token)


# --- what a daemon has left in its directory --------------------------------------------------------------------


def test_a_directory_that_cannot_be_removed_costs_its_own_domain_only() -> None:
    """There is one `daemon-0` on a node: a claim that is released for ever would end compute domains there."""
    other, again = name("other-daemon", NAMESPACE), name("daemon-again", NAMESPACE)
    core = with_daemon(daemon(other, BLUE), daemon(again))
    core.stuck = True
    token = core.unprepare(DAEMON)
    assert core.answer(token) is None
    assert isinstance(core.answer(core.prepare(other)), Prepared)
    core.unprepare(other)
    own = core.prepare(again)
    assert core.answer(own) is None, "what is being removed is its directory"
    core.pass_time(limits.CLAIM_ANSWER_S)
    assert f"daemon-0: it is being released from the claim {DAEMON} (it is stuck)" in core.refusal(own)
    assert isinstance(core.answer(token), Unprepared), "the pod ends"
    own = core.prepare(again)
    core.stuck = False
    core.pass_time(limits.CLAIM_RETRY_S)
    assert isinstance(core.answer(own), Prepared)
