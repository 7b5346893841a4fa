"""Which daemon counts as ready: one of the label that is there, by its clique. And a domain that is deleted."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gpuactors.core.domains.exclusion import DAEMON_SETTLES_S, STATUS_SETTLES_S
from gpuactors.core.domains.reads import DOMAIN_READ_S
from gpuactors.core.events.domains import DomainsTouched
from gpuactors.core.values.claim import Prepared, Unprepared
from gpuactors.core.values.claim_states import ClaimState
from gpuactors.core.values.domain import Clique, DomainMode
from tests.core.domains.domain_core import (
    BLUE,
    DAEMON,
    NAMESPACE,
    NODE,
    RED,
    DomainCore,
    channel,
    daemon,
    name,
    with_daemon,
)

ONE, TWO = name("one"), name("two")
NEXT_DAEMON = name("next-daemon", NAMESPACE)
DELETED = "the ComputeDomain default/red is being deleted"


def waiting() -> DomainCore:
    """ONE has the channel of RED reserved, and waits for its daemon."""
    core = DomainCore(channel(ONE), channel(TWO), daemon(DAEMON), daemon(NEXT_DAEMON))
    core.prepare(ONE)
    assert (core.claim_state(ONE), core.label) == (ClaimState.BINDING, RED)
    return core


# --- the clique and the status --------------------------------------------------------------------------------------


@pytest.mark.parametrize("others", [(), ("node-2",)], ids=["empty", "of another node"])
def test_a_clique_without_the_node_does_not_outrank_a_status_that_goes_on_to_say_ready(
    others: tuple[str, ...],
) -> None:
    """NVIDIA's driver changes from the one to the other: the clique is that of other nodes, or left over. A daemon that
    ends leaves its clique at once, and the status is made of the cliques every 2 s."""
    core = waiting()
    core.prepare(DAEMON)
    core.pass_time(60.0)
    core.cliques[RED] = Clique(frozenset(others))
    core.says_ready()
    core.pass_time(STATUS_SETTLES_S - 0.1)
    assert core.claim_state(ONE) is ClaimState.BINDING
    assert "does not say yet" in core.problem(ONE)
    core.pass_time(2 * DOMAIN_READ_S)
    assert core.claim_state(ONE) is ClaimState.PREPARED


def test_a_status_that_follows_the_clique_which_has_lost_the_node_makes_nothing_ready() -> None:
    core = waiting()
    core.prepare(DAEMON)
    core.pass_time(60.0)
    core.cliques[RED] = Clique()
    core.says_ready()
    core.pass_time(2.0)  # the controller's next turn
    core.says_ready("node-2")
    core.pass_time(60.0)
    assert core.claim_state(ONE) is ClaimState.BINDING
    core.cliques[RED] = Clique(frozenset({NODE}))
    core.feed(DomainsTouched())
    assert core.claim_state(ONE) is ClaimState.PREPARED


def test_a_clique_that_says_ready_outranks_a_status_that_does_not_say_so_yet() -> None:
    core = waiting()
    core.cliques[RED] = Clique(frozenset({NODE}))
    core.prepare(DAEMON)
    core.feed(DomainsTouched())
    assert core.claim_state(ONE) is ClaimState.PREPARED


def test_a_status_without_a_clique_counts_once_it_cannot_be_of_the_daemon_before() -> None:
    core = waiting()
    core.says_ready()
    core.prepare(DAEMON)
    core.pass_time(STATUS_SETTLES_S - 0.1)
    assert core.claim_state(ONE) is ClaimState.BINDING
    core.pass_time(DOMAIN_READ_S)
    assert core.claim_state(ONE) is ClaimState.PREPARED


def test_off_the_fabric_a_status_counts_at_once() -> None:
    core = DomainCore()
    core.imex = replace(core.imex, clique_id="")
    core.created(channel(ONE), daemon(DAEMON))
    core.says_ready()
    token = core.prepare(ONE)
    core.prepare(DAEMON)
    core.feed(DomainsTouched())
    assert isinstance(core.answer(token), Prepared)


# --- the daemon of the label before -----------------------------------------------------------------------------------


def test_a_daemon_that_was_there_before_the_label_does_not_count() -> None:
    """The label was away for a moment: Kubernetes ends this daemon, and starts another one."""
    core = with_daemon(channel(ONE), channel(TWO))
    core.prepare(ONE)
    core.unprepare(ONE)
    core.labelled(None)
    token = core.prepare(TWO)
    assert (core.answer(token), core.label) == (None, RED)
    assert "no prepared claim on this node yet" in core.problem(TWO)
    core.created(daemon(NEXT_DAEMON))
    core.unprepare(DAEMON)
    core.prepare(NEXT_DAEMON)
    core.feed(DomainsTouched())
    assert isinstance(core.answer(token), Prepared)


@pytest.mark.parametrize("restarts", [False, True])
def test_a_daemon_that_nobody_ends_counts_some_time_later(restarts: bool) -> None:
    core = with_daemon(channel(ONE), channel(TWO))
    core.prepare(ONE)
    core.unprepare(ONE)
    if restarts:
        core.set_label(None)
        core = core.restarted()
    else:
        core.labelled(None)
    token = core.prepare(TWO)
    core.pass_time(DAEMON_SETTLES_S - 0.1)
    assert core.answer(token) is None
    core.pass_time(DOMAIN_READ_S)
    assert isinstance(core.answer(token), Prepared)


def test_a_daemon_whose_label_outlived_a_restart_counts_at_once() -> None:
    core = with_daemon(channel(ONE), channel(TWO))
    core.prepare(ONE)
    core = core.restarted()
    core.unprepare(ONE)
    assert isinstance(core.answer(core.prepare(TWO)), Prepared)


def test_a_daemon_whose_claim_is_being_unprepared_does_not_count() -> None:
    core = with_daemon(channel(ONE), channel(TWO))
    core.prepare(ONE)
    core.unprepare(ONE)
    core.held_back = {"files"}
    core.unprepare(DAEMON)
    token = core.prepare(TWO)
    assert core.answer(token) is None
    assert "no prepared claim on this node yet" in core.problem(TWO)


# --- a domain that is deleted ---------------------------------------------------------------------------------------


def test_a_claim_that_waits_for_the_daemon_of_a_deleted_domain_is_refused_at_once() -> None:
    core = waiting()
    token = core.prepare(ONE)
    core.deleted()
    core.feed(DomainsTouched())
    assert DELETED in core.refusal(token)
    assert core.history == [None, RED, None]
    assert DELETED in core.refusal(core.prepare(ONE)), "kubelet asks again"
    assert isinstance(core.answer(core.unprepare(ONE)), Unprepared)
    assert core.claim_state(ONE) is ClaimState.TOMBSTONE


def test_a_claim_that_waits_for_the_channel_of_a_deleted_domain_is_refused_at_once() -> None:
    core = with_daemon(channel(ONE), channel(TWO))
    core.prepare(ONE)
    token = core.prepare(TWO)
    core.deleted()
    core.feed(DomainsTouched())
    assert DELETED in core.refusal(token)
    assert core.claim_state(ONE) is ClaimState.PREPARED


def test_a_new_claim_of_a_deleted_domain_is_refused_and_sets_no_label() -> None:
    core = DomainCore(channel(ONE), daemon(DAEMON))
    core.deleted()
    assert DELETED in core.refusal(core.prepare(ONE))
    assert DELETED in core.refusal(core.prepare(DAEMON))
    assert core.history == [None]


def test_a_deleted_domain_leaves_the_node_to_another_one() -> None:
    core = with_daemon(channel(ONE), channel(TWO, BLUE))
    core.prepare(ONE)
    core.deleted()
    core.prepare(TWO)
    core.unprepare(ONE)
    assert core.history == [None, RED, None, BLUE]


def test_host_managed_claims_of_a_deleted_domain_are_refused_too() -> None:
    core = DomainCore(
        channel(ONE), settings=replace(DomainCore().domain_settings, mode=DomainMode.HOST_MANAGED)
    )
    core.deleted()
    assert DELETED in core.refusal(core.prepare(ONE))
