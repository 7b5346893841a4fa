"""The node's label: held by the claims that live, put back when it is lost, never taken from somebody else."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gpuactors import limits
from gpuactors.core.claims.stored import decoded_entry, encoded_entry
from gpuactors.core.domains.label import (
    LABEL_CONFLICTS_MAX,
    LABEL_LINGERS_S,
    LABEL_READ_S,
    LABEL_RETRY_S,
    LABELS_KEPT,
    _with_removable,
)
from gpuactors.core.domains.reads import DOMAIN_READ_S
from gpuactors.core.events.domains import DomainsTouched, LabelPatched
from gpuactors.core.values.claim import Prepared, Unprepared
from gpuactors.core.values.claim_states import ClaimState
from gpuactors.core.values.domain import DomainMode
from gpuactors.core.values.effects import Level
from gpuactors.observe.journal_format import LineWriter, StateLine
from gpuactors.replay.journal_lines import read_line, read_state
from tests.core.domains.domain_core import (
    BLUE,
    DAEMON,
    DOMAIN_SETTINGS,
    RED,
    DomainCore,
    channel,
    daemon,
    found_by_files,
    name,
    with_daemon,
)

ONE, TWO = name("one"), name("two")
STRANGER = "99999999-9999-9999-9999-999999999999"


def prepared() -> DomainCore:
    """ONE has the channel of RED, whose daemon runs."""
    core = with_daemon(channel(ONE), channel(TWO))
    assert isinstance(core.answer(core.prepare(ONE)), Prepared)
    return core


def test_it_comes_with_the_first_claim_and_goes_with_the_last() -> None:
    core = prepared()
    assert core.history == [None, RED]
    assert isinstance(core.answer(core.unprepare(ONE)), Unprepared)
    assert core.history == [None, RED]
    core.lingered()
    assert core.history == [None, RED, None]


def test_it_stays_for_the_claim_that_gets_the_channel_next_and_no_longer_than_that() -> None:
    """The scheduler gives the channel away when it is free: 50 to 500 ms later."""
    core = prepared()
    core.unprepare(ONE)
    core.pass_time(0.5)
    assert isinstance(core.answer(core.prepare(TWO)), Prepared)
    core.pass_time(60.0)
    assert core.history == [None, RED]
    core.unprepare(TWO)
    core.pass_time(LABEL_LINGERS_S - 0.1)
    assert core.history == [None, RED]
    core.pass_time(0.1)
    assert core.history == [None, RED, None]


def test_after_a_restart_it_stays_as_long_again_and_then_goes() -> None:
    core = prepared()
    core.unprepare(ONE)
    core.pass_time(LABEL_LINGERS_S - 0.1)
    core = core.restarted()
    core.pass_time(LABEL_LINGERS_S - 0.1)
    assert core.history == [None, RED]
    core.pass_time(0.1)
    assert core.history == [None, RED, None]


def test_a_claim_of_another_domain_does_not_wait_for_it() -> None:
    core = prepared()
    core.created(channel(TWO, BLUE))
    core.unprepare(ONE)
    core.prepare(TWO)
    assert core.history == [None, RED, None, BLUE]


def test_a_domain_that_is_being_deleted_gets_no_label_back() -> None:
    core = prepared()
    core.deleted()
    for _ in range(8):  # the controller takes it away again and again
        core.labelled(None)
    core.pass_time(60.0)
    assert core.history == [None, RED, None, *[None] * 8]
    assert core.claim_state(ONE) is ClaimState.PREPARED


def test_a_domain_that_is_gone_gets_no_label_back_also_after_a_restart() -> None:
    core = prepared()
    core.domains.clear()
    core.labelled(None)
    core = core.restarted()
    core.pass_time(60.0)
    assert core.history == [None, RED, None]


def test_it_is_not_put_back_before_the_domain_has_been_read_again() -> None:
    core = prepared()
    core.held_back = {"domain"}
    core.labelled(None)
    assert core.history == [None, RED, None]
    core.release("domain")
    assert core.history == [None, RED, None, RED]


def test_it_is_put_back_when_the_server_that_did_not_answer_does() -> None:
    core = prepared()
    core.held_back = {"domain"}
    core.labelled(None)
    core.away = True
    core.release("domain")
    assert core.history == [None, RED, None]
    core.away = False
    core.pass_time(DOMAIN_READ_S)
    assert core.history == [None, RED, None, RED]


def test_it_goes_only_when_the_end_of_the_last_claim_is_on_disk() -> None:
    """A daemon that is killed before that has the claim again, under a pod that may follow it."""
    core = prepared()
    core.held_back = {"files"}
    core.unprepare(ONE)
    core.held_back = {"checkpoint"}
    core.release("files")
    assert core.claim_state(ONE) is ClaimState.TOMBSTONE
    assert core.history == [None, RED]
    core.pass_time(LABEL_LINGERS_S * 2)
    assert core.history == [None, RED]
    core.release("checkpoint")
    assert core.history == [None, RED, None]


def test_a_stale_one_goes_also_where_a_claim_waits_already_when_it_is_first_read() -> None:
    """A daemon that starts may be asked before it has read the label."""
    for stale in (RED, BLUE):
        core = DomainCore()
        core.label = stale
        core = core.restarted("label-read")
        token = core.prepare(channel(ONE))
        core.release("label-read")
        assert core.label == RED
        core.unprepare(ONE)
        core.lingered()
        assert core.answer(token) is not None
        assert core.label is None


def test_one_that_a_release_held_when_it_was_first_read_goes_with_it() -> None:
    core = prepared()
    core.held_back = {"files"}
    core.unprepare(ONE)
    core = core.restarted("files")
    core.release("files")
    core.lingered()
    assert core.label is None


def test_where_the_checkpoint_is_lost_it_is_stale_or_somebody_s_when_every_claim_has_been_read() -> None:
    """It has another value than that of the claim that has the channel: it was not left by that, or by one before."""
    core = prepared()
    core.set_label(STRANGER)
    core.disk = found_by_files(DAEMON, ONE)
    core = core.restarted("read")
    assert core.logged("label.foreign") == []
    token = core.prepare(ONE)
    core.release("read")
    assert core.label == STRANGER
    assert len(core.logged("label.foreign")) == 1
    assert STRANGER in core.problem(ONE)
    core.labelled(None)
    assert core.label == RED
    core.settled()
    assert isinstance(core.answer(token), Prepared)


@pytest.mark.parametrize("left", [RED, STRANGER])
def test_where_the_checkpoint_is_lost_and_only_a_daemon_is_found_it_is_stale(left: str) -> None:
    core = prepared()
    core.unprepare(ONE)
    core.lingered()
    core.set_label(left)
    core.disk = found_by_files(DAEMON)
    core = core.restarted("read")
    assert core.history == [None, RED, None, left]
    core.release("read")
    core.lingered()
    assert core.history == [None, RED, None, left, None]
    assert core.logged("label.foreign") == []


def test_the_daemon_s_claim_does_not_hold_it() -> None:
    core = DomainCore(daemon(DAEMON))
    core.prepare(DAEMON)
    assert core.claim_state(DAEMON) is ClaimState.PREPARED
    assert core.label is None


def test_it_is_added_only_when_the_intent_is_on_disk() -> None:
    core = DomainCore(channel(ONE))
    core.held_back = {"checkpoint"}
    core.prepare(ONE)
    assert (core.claim_state(ONE), core.label) == (ClaimState.RESERVED, None)
    core.release("checkpoint")
    assert core.label == RED


def test_it_is_put_back_when_it_is_lost_while_a_claim_lives() -> None:
    core = prepared()
    core.labelled(None)
    assert core.history == [None, RED, None, RED]


def test_a_loss_that_no_watch_has_told_is_found_by_itself() -> None:
    core = prepared()
    core.label = None
    core.pass_time(LABEL_READ_S + 0.1)
    assert core.label == RED


def test_a_label_edited_by_an_operator_stays_is_named_and_is_put_right_when_they_remove_it() -> None:
    core = prepared()
    core.labelled(STRANGER)
    (line,) = core.logged("label.foreign")
    assert (line.level, line.fields["value"]) == (Level.WARNING, STRANGER)
    core.pass_time(60.0)
    assert core.label == STRANGER
    assert isinstance(core.answer(core.unprepare(ONE)), Unprepared)
    token = core.prepare(TWO)
    core.pass_time(limits.CLAIM_ANSWER_S)
    assert f"is {STRANGER}, which no claim here has set" in core.refusal(token)
    token = core.prepare(TWO)
    core.labelled(None)
    core.settled()
    assert isinstance(core.answer(token), Prepared)
    assert core.history == [None, RED, STRANGER, None, RED]


def test_an_edit_while_the_last_claim_ends_is_left_alone() -> None:
    core = prepared()
    core.held_back = {"label-read"}
    core.label = STRANGER
    core.unprepare(ONE)
    core.release("label-read")
    core.pass_time(30.0)
    assert core.label == STRANGER, "the removal tests the value"


@pytest.mark.parametrize("mode", [DomainMode.ON, DomainMode.HOST_MANAGED])
def test_a_stale_one_is_removed_at_the_start_also_in_mode_host_managed(mode: DomainMode) -> None:
    core = DomainCore()
    core.label = RED
    core = core.restarted(settings=replace(DOMAIN_SETTINGS, mode=mode))
    assert core.label == (RED if mode is DomainMode.ON else None)
    core.lingered()
    assert core.label is None


def test_a_stale_one_of_a_domain_that_is_gone_is_removed_at_the_start_at_once() -> None:
    core = DomainCore()
    core.label = STRANGER
    assert core.restarted().label is None


def test_it_goes_at_once_when_its_domain_is_deleted_after_the_last_claim() -> None:
    """NVIDIA's controller takes it away as well, where it runs."""
    core = prepared()
    core.unprepare(ONE)
    core.pass_time(60.0)
    assert core.history == [None, RED]
    assert core.wanted.watched == (RED,)
    core.domains[RED] = replace(core.domains[RED], is_deleted=True)
    core.feed(DomainsTouched())
    assert core.history == [None, RED, None]
    assert not core.wanted.watched


def test_it_goes_at_once_where_its_domain_was_deleted_in_use() -> None:
    core = prepared()
    core.domains[RED] = replace(core.domains[RED], is_deleted=True)
    core.unprepare(ONE)
    assert core.history == [None, RED, None]


def test_while_its_domain_cannot_be_read_it_stays_for_its_time() -> None:
    core = prepared()
    core.away = True
    core.unprepare(ONE)
    core.pass_time(LABEL_LINGERS_S - 0.1)
    core.away = False
    assert core.history == [None, RED]
    core.pass_time(0.1)
    assert core.history == [None, RED, None]


def test_a_change_to_host_managed_removes_the_label_of_the_claims_that_live() -> None:
    core = prepared().restarted(settings=replace(DOMAIN_SETTINGS, mode=DomainMode.HOST_MANAGED))
    assert core.claim_state(ONE) is ClaimState.PREPARED
    assert core.label is None


def test_at_a_start_with_a_live_claim_another_value_is_a_stranger_s() -> None:
    core = prepared()
    core.label = STRANGER
    core = core.restarted()
    core.pass_time(30.0)
    assert core.label == STRANGER


def test_nothing_is_removed_before_the_checkpoint_is_read() -> None:
    core = prepared().restarted("load")
    core.pass_time(60.0)
    assert core.label == RED
    core.release("load")
    assert (core.label, core.history) == (RED, [None, RED])


def test_another_domain_follows_when_the_label_of_the_one_before_has_gone() -> None:
    core = prepared()
    core.created(channel(TWO, BLUE))
    core.held_back = {"label-patch"}
    core.unprepare(ONE)
    core.prepare(TWO)
    assert (core.claim_state(TWO), core.label) == (ClaimState.WAITING, RED)
    assert f"still names {RED}, and is being removed" in core.problem(TWO)
    core.release("label-patch")
    assert core.history == [None, RED, None, BLUE]


def test_a_restart_between_two_domains_leaves_no_label_that_nobody_removes() -> None:
    core = prepared()
    core.created(channel(TWO, BLUE))
    core.held_back = {"label-patch"}
    core.unprepare(ONE)
    core.prepare(TWO)
    core = core.restarted()
    token = core.prepare(TWO)
    assert core.label == BLUE
    assert core.answer(token) is None


# --- conflicts --------------------------------------------------------------------------------------------------


def test_three_conflicts_in_a_row_are_three_new_decisions_and_then_a_pause() -> None:
    core = DomainCore(channel(ONE))
    core.held_back = {"label-patch"}
    core.prepare(ONE)
    numbers = set()
    for _ in range(LABEL_CONFLICTS_MAX):
        patch = core.wanted.label_patch
        assert patch is not None
        numbers.add(patch.number)
        core.feed(LabelPatched(patch.number, "the server rejected our request (422)", conflict=True))
    assert len(numbers) == LABEL_CONFLICTS_MAX, "read and decided anew each time"
    assert (core.wanted.label_patch, core.wanted.label_read) == (None, 0)
    assert "422" in core.problem(ONE)
    core.release("label-patch")
    core.pass_time(LABEL_RETRY_S)
    assert core.label == RED


def test_after_a_conflict_the_label_is_read_and_decided_anew_and_a_stranger_s_is_not_overwritten() -> None:
    core = DomainCore(channel(ONE))
    core.held_back = {"label-patch"}
    core.prepare(ONE)
    core.label = STRANGER
    core.release("label-patch")
    core.pass_time(20.0)
    assert core.label == STRANGER
    assert f"is {STRANGER}, which no claim here has set" in core.problem(ONE)


def test_a_patch_that_was_made_though_it_failed_is_found_by_a_read() -> None:
    core = DomainCore(channel(ONE))
    core.held_back = {"label-patch"}
    core.prepare(ONE)
    core.label = RED
    core.away = True
    core.release("label-patch")
    core.away = False
    core.pass_time(LABEL_RETRY_S)
    assert core.state.domains.label.value == RED


def test_a_late_answer_to_a_patch_that_is_not_outstanding_counts_for_nothing() -> None:
    core = prepared()
    before = core.state
    core.feed(LabelPatched(1))
    assert core.state.domains.label == before.domains.label


def test_a_read_and_a_patch_are_never_wanted_at_the_same_time() -> None:
    core = DomainCore(channel(ONE))
    core.held_back = {"label-patch"}
    core.prepare(ONE)
    assert core.wanted.label_patch is not None
    core.labelled(None)
    assert (core.wanted.label_read, core.wanted.label_patch is not None) == (0, True)
    core.release("label-patch")
    assert core.label == RED


def test_a_removal_of_unknown_outcome_makes_no_channel_ready_before_the_label_is_read_again() -> None:
    core = prepared()
    core.held_back = {"label-patch", "label-read"}
    core.unprepare(ONE)
    core.lingered()
    patch = core.wanted.label_patch
    assert patch is not None
    core.set_label(None)  # it was made, and its answer is lost
    core.feed(LabelPatched(patch.number, "timed out"))
    token = core.prepare(TWO)
    assert core.answer(token) is None
    assert "has not been read yet: timed out" in core.problem(TWO)
    core.release("label-patch", "label-read")
    core.pass_time(LABEL_RETRY_S)
    assert core.label == RED
    core.settled()
    assert isinstance(core.answer(token), Prepared)


def test_a_journal_has_the_whole_state_of_compute_domains() -> None:
    core = prepared()
    core.labelled(STRANGER)
    line = read_line(LineWriter().state_line(core.state, core.at, 0))
    assert isinstance(line, StateLine)
    assert read_state(line).domains == core.state.domains


def test_the_checkpoint_s_entry_of_a_channel_and_a_daemon_is_read_as_it_was_written() -> None:
    core = prepared()
    assert core.disk is not None
    for entry in core.disk.entries:
        assert decoded_entry(entry.name.uid, encoded_entry(entry)) == entry


def test_the_last_values_of_the_label_that_were_ours_are_remembered_and_no_more_than_the_bound() -> None:
    """A value that was ours long ago is somebody's decision; one of an hour ago is what a daemon has left."""
    domains = [f"{n:08}-1111-1111-1111-111111111111" for n in range(LABELS_KEPT + 3)]
    core = DomainCore()
    core.ready()
    label = core.state.domains.label
    for domain in (*domains, domains[-2]):
        label = replace(label, removable=_with_removable(label, domain))
    assert label.removable == (*domains[3:-2], domains[-1], domains[-2])
