"""Each transition of a partition, its orders, and what is said of it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gpuactors.core.events.partitions import (
    PartitionActDone,
    PartitionIntentsRead,
    PartitionIntentsUnwritten,
    PartitionIntentsWritten,
    PartitionQueryFailed,
)
from gpuactors.core.partitions import machine
from gpuactors.core.partitions.outputs import conflict, of_others, partitions_wanted
from gpuactors.core.state.partitions import NO_PARTITIONS, PartitionOwner, Users
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.partition import (
    INTENTS,
    PARTITION_TRANSITIONS,
    Goal,
    Intent,
    NoPartitionTransitionError,
    PartitionRequest,
    PartitionState,
    PartitionTrigger,
    follow,
)
from tests.core.partitions.fabric import (
    DEVICES,
    P1,
    P2,
    THEM,
    US,
    A,
    B,
    C,
    Fabric,
    Owner,
    closes,
    comes,
    crashes,
    done,
    fabric,
    fabric_manager_restarts,
    failed,
    is_acting,
    leaves,
    opens,
    others_activate,
    pretended,
    queried,
    settled,
    starts_again,
    state_of,
    ticked,
    written,
)

S = PartitionState
ACTIVATE_1 = Intent(P1, DEVICES[P1], Goal.ACTIVATE)
DEACTIVATE_1 = Intent(P1, DEVICES[P1], Goal.DEACTIVATE)


def cause_of(world: Fabric, key: str = P1) -> Cause | None:
    """Why the call of the partition's owner is not answered."""
    why = conflict(world.partitions, f"owner of {key}")
    return why.why.cause if why is not None else None


def active() -> Fabric:
    """Its owner has been answered."""
    world = settled(comes(fabric(), P1))
    assert (state_of(world, P1), world.active, world.owners[P1].asks) == (S.ACTIVE, {P1: US}, 0)
    return world


def releasing() -> Fabric:
    world = leaves(active(), P1)
    assert state_of(world, P1) is S.RELEASING
    return world


def failed_query(world: Fabric) -> Fabric:
    return world.stepped(PartitionQueryFailed(world.partitions.query, "it printed no JSON"))


# --- the way up and down ----------------------------------------------------------------------------------------------


def test_it_is_checked_reserved_written_activated_queried_and_only_then_answered() -> None:
    world = queried(comes(fabric(), P1))
    assert state_of(world, P1) is S.CHECKING, (
        "the list names it; a query that was asked for earlier proves nothing"
    )
    world = queried(queried(world))
    assert state_of(world, P1) is S.RESERVED
    assert not is_acting(world), "nothing is done without the intent on disk"
    world = written(world)
    assert (state_of(world, P1), world.disk) == (S.ACTIVATING, (ACTIVATE_1,))
    world = done(world)
    assert (state_of(world, P1), cause_of(world)) == (S.ACTIVATING, Cause.PARTITION_LATE)
    world = queried(world)
    assert (state_of(world, P1), cause_of(world)) == (S.ACTIVE, None)


def test_it_is_deactivated_when_its_owner_has_gone_and_the_virtual_machine_has_ended() -> None:
    world = leaves(opens(active(), P1), P1)
    assert state_of(world, P1) is S.ACTIVE, "a process has it open"
    world = closes(world, P1)
    assert (state_of(world, P1), is_acting(world)) == (S.RELEASING, False)
    world = written(world)
    assert (state_of(world, P1), world.disk) == (S.DEACTIVATING, (DEACTIVATE_1,))
    world = queried(done(world))
    assert (state_of(world, P1), world.active) == (S.ABSENT, {})
    assert settled(world).disk == ()


def test_an_owner_that_leaves_before_the_act_leaves_nothing() -> None:
    checking = queried(comes(fabric(), P1))
    assert state_of(leaves(checking, P1), P1) is S.ABSENT
    reserved = queried(queried(checking))
    assert state_of(reserved, P1) is S.RESERVED
    world = settled(leaves(reserved, P1))
    assert (state_of(world, P1), world.disk, world.partitions.acts) == (S.ABSENT, (), 0)


def test_an_owner_that_leaves_during_the_act_has_it_undone() -> None:
    world = written(queried(queried(queried(comes(fabric(), P1)))))
    world = leaves(world, P1)
    assert (state_of(world, P1), is_acting(world)) == (S.RELEASING, True)
    world = settled(world, ticks=2)
    assert (state_of(world, P1), world.active, world.disk) == (S.ABSENT, {}, ())


def test_an_owner_that_comes_during_the_release_waits_and_gets_it_anew() -> None:
    world = comes(releasing(), P1)
    assert (state_of(world, P1), cause_of(world)) == (S.RELEASING, Cause.PARTITION_LATE)
    world = settled(world)
    assert (state_of(world, P1), world.active, world.partitions.acts) == (S.ACTIVE, {P1: US}, 3)


def test_an_overlapping_one_waits_for_the_release_of_the_other() -> None:
    world = comes(releasing(), P2)
    assert state_of(world, P2) is S.CHECKING
    world = queried(queried(world))
    why = conflict(world.partitions, "owner of 2")
    assert why is not None
    assert (why.why.cause, why.is_final) == (Cause.PARTITION_LATE, False)
    assert why.why.message == "partition 2 waits until partition 1 is deactivated"
    assert settled(world, ticks=1).active == {P2: US}


def test_of_two_that_overlap_one_is_reserved() -> None:
    """Also where both are wanted at once, by what the node says for a moment."""
    world = settled(fabric())
    owners = {"a": PartitionOwner(DEVICES[P1]), "b": PartitionOwner(DEVICES[P2])}
    p = machine.users_changed(world.partitions, Users(owners, frozenset()), world.at)
    for _ in range(2):
        p = machine.queried(p, p.query, world.shown(), world.at)
    assert [p.records[key].state for key in (P1, P2)] == [S.RESERVED, S.CHECKING]


def test_devices_that_are_no_partition_need_none() -> None:
    world = settled(fabric())
    users = Users({"pod": PartitionOwner(frozenset({A, C}), 7)}, frozenset())
    after = machine.users_changed(world.partitions, users, world.at)
    assert (conflict(after, "pod"), after.records) == (None, {})


def test_devices_that_are_no_partition_wait_for_the_release_of_one_that_has_a_device() -> None:
    """Its links must not change under the virtual machine, and the other GPU of it may be another tenant's next."""
    pod = {"pod": PartitionOwner(frozenset({A, C}), 7)}
    world = active()
    p = machine.users_changed(world.partitions, Users(pod, frozenset()), world.at)
    why = conflict(p, "pod")
    assert why is not None
    assert (why.why.cause, why.is_final) == (Cause.PARTITION_LATE, False)
    assert why.why.message == f"partition 1 of {A}, {B} has to be deactivated before"
    ended = settled(leaves(world, P1), ticks=1)
    p = machine.users_changed(ended.partitions, Users(pod, frozenset()), ended.at)
    assert (conflict(p, "pod"), p.records) == (None, {})


def test_an_owner_keeps_it_while_it_has_one_of_the_devices() -> None:
    world = active()
    users = Users({"owner of 1": PartitionOwner(frozenset({A}))}, frozenset())
    after = machine.users_changed(world.partitions, users, world.at)
    assert after.records[P1].state is S.ACTIVE
    other = Users({"another": PartitionOwner(frozenset({A}))}, frozenset())
    assert machine.users_changed(after, other, world.at).records[P1].state is S.RELEASING


# --- what goes wrong --------------------------------------------------------------------------------------------------


def test_one_that_somebody_else_has_activated_is_refused_with_the_remedy_and_left() -> None:
    world = queried(queried(queried(comes(others_activate(fabric(), P1), P1))))
    why = conflict(world.partitions, "owner of 1")
    assert why is not None
    assert (why.why.cause, why.is_final) == (Cause.PARTITION_IN_USE, True)
    assert "Deactivate it by the fabric manager's tool" in why.why.message
    world = settled(leaves(world, P1), ticks=3)
    assert (world.active, world.partitions.acts, of_others(world.partitions)) == ({P1: THEM}, 0, (P1,))


def test_one_that_overlaps_somebody_elses_is_refused_until_that_is_inactive() -> None:
    world = queried(queried(queried(comes(others_activate(fabric(), P2), P1))))
    assert cause_of(world) is Cause.PARTITION_IN_USE
    assert machine.deadline(world.partitions) == world.at + machine.RETRY_S
    world = settled(replace(world, active={}), ticks=1)
    assert (state_of(world, P1), of_others(world.partitions)) == (S.ACTIVE, ())


def test_an_act_that_was_killed_says_nothing_and_queries_decide() -> None:
    begun = written(queried(queried(queried(comes(fabric(), P1)))))
    world = queried(failed(begun, acts=True))
    assert state_of(world, P1) is S.ACTIVATING, "one witness against the exit of the command"
    assert state_of(queried(world), P1) is S.ACTIVE
    world = queried(queried(failed(begun, acts=False)))
    assert (state_of(world, P1), is_acting(world)) == (S.ACTIVATING, False), "not before the pause"
    why = conflict(world.partitions, "owner of 1")
    assert why is not None
    assert why.why.message == "partition 1 is Activating: it did not end within 30 s"
    assert is_acting(ticked(world))
    assert settled(world, ticks=1).active == {P1: US}


def test_a_command_that_pretends_is_not_believed() -> None:
    world = queried(pretended(written(queried(queried(queried(comes(fabric(), P1)))))))
    assert cause_of(queried(world)) is Cause.PARTITION_LATE
    assert settled(world, ticks=1).active == {P1: US}


def test_a_deactivation_that_did_nothing_is_repeated_after_the_pause() -> None:
    world = queried(queried(pretended(written(releasing()))))
    assert (state_of(world, P1), world.active) == (S.DEACTIVATING, {P1: US})
    world = settled(world, ticks=1)
    assert (state_of(world, P1), world.active) == (S.ABSENT, {})


def test_no_deactivation_is_repeated_under_a_process_that_has_opened_it() -> None:
    world = opens(queried(queried(pretended(written(releasing())))), P1)
    assert not is_acting(settled(world, ticks=2))
    assert settled(closes(world, P1), ticks=2).active == {}


def test_a_query_that_failed_is_repeated_after_the_pause_and_said() -> None:
    world = failed_query(queried(comes(fabric(), P1)))
    why = conflict(world.partitions, "owner of 1")
    assert why is not None
    assert why.why.message == "partition 1 is Checking: it printed no JSON"
    assert partitions_wanted(world.partitions).query is None
    assert settled(world, ticks=1).active == {P1: US}


def test_a_file_that_cannot_be_written_is_said() -> None:
    world = queried(queried(queried(comes(fabric(), P1))))
    world = world.stepped(PartitionIntentsUnwritten("no space left"))
    why = conflict(world.partitions, "owner of 1")
    assert why is not None
    assert why.why.message == "partition 1 is Reserved: no space left"
    assert settled(world).active == {P1: US}


def test_results_of_other_numbers_change_nothing() -> None:
    world = written(queried(queried(queried(comes(fabric(), P1)))))
    p = world.partitions
    for event in (
        PartitionActDone(p.acts + 1, ""),
        PartitionQueryFailed(p.answered, "late"),
        PartitionIntentsWritten(p.durable - 1),
        PartitionIntentsRead((DEACTIVATE_1,)),
    ):
        assert machine.stepped(p, event, world.at) == p, event
    assert machine.queried(p, p.answered, world.shown(), world.at) == p


def test_a_query_from_before_the_end_of_the_act_does_not_count() -> None:
    world = written(queried(queried(queried(comes(fabric(), P1)))))
    world = replace(world, partitions=replace(world.partitions, query=world.partitions.query + 1))
    asked = world.partitions.query
    world = done(world)
    world = world.listed(asked, world.shown())
    assert state_of(world, P1) is S.ACTIVATING
    assert state_of(settled(world), P1) is S.ACTIVE


# --- the fabric manager is restarted ----------------------------------------------------------------------------------


def test_one_that_is_lost_under_a_virtual_machine_is_not_activated_again() -> None:
    world = settled(fabric_manager_restarts(opens(active(), P1)), ticks=3)
    assert (state_of(world, P1), world.active) == (S.LOST, {})
    why = conflict(world.partitions, "owner of 1")
    assert why is not None
    assert why.why.cause is Cause.PARTITION_LOST
    assert "is not active any more: the fabric manager was restarted?" in why.why.message
    world = settled(leaves(closes(world, P1), P1))
    assert (world.disk, world.partitions.acts) == ((), 1), "no act is needed"


def test_one_that_is_lost_is_activated_before_the_next_start_of_a_container() -> None:
    """Also where no query has found it since: the call requests one."""
    world = starts_again(fabric_manager_restarts(active()), P1)
    assert world.owners[P1].asks, "what was queried before the call is too old"
    world = settled(world)
    assert (state_of(world, P1), world.active, world.owners[P1]) == (S.ACTIVE, {P1: US}, Owner(0))


def test_one_query_that_lies_after_a_restart_answers_no_call() -> None:
    """The query before it is of before the restart, and no second witness."""
    world = queried(starts_again(fabric_manager_restarts(active()), P1), P1)
    assert (state_of(world, P1), bool(world.owners[P1].asks)) == (S.ACTIVE, True)
    world = settled(world)
    assert (state_of(world, P1), world.active, world.owners[P1]) == (S.ACTIVE, {P1: US}, Owner(0))


def test_a_call_for_one_that_is_active_takes_two_queries() -> None:
    world = starts_again(active(), P1)
    before = world.partitions.query
    assert settled(world).partitions.query == before + 1, "the first one is requested when the call comes"


def test_a_lost_one_without_a_call_is_left_as_it_is() -> None:
    world = settled(fabric_manager_restarts(active()), ticks=2)
    assert (state_of(world, P1), world.active) == (S.LOST, {})
    assert settled(others_activate(world, P1), ticks=2).partitions.records[P1].state is S.ACTIVE


def test_one_query_that_lies_loses_nothing() -> None:
    world = queried(ticked(active()), P1)
    assert state_of(world, P1) is S.ACTIVE
    assert cause_of(world) is Cause.PARTITION_LATE, "while it is in doubt no call is answered"
    world = queried(world)
    assert (state_of(world, P1), cause_of(world)) == (S.ACTIVE, None)


def test_a_list_without_the_partition_shows_nothing_of_it() -> None:
    world = ticked(active())
    world = world.listed(world.partitions.query, {})
    assert state_of(world, P1) is S.ACTIVE
    assert partitions_wanted(world.partitions).query is None, "it is queried by the clock"


# --- a start of the daemon --------------------------------------------------------------------------------------------


def test_nothing_is_done_before_the_intents_have_been_read() -> None:
    users = Users({"owner of 1": PartitionOwner(DEVICES[P1], 1)}, frozenset())
    p = machine.users_changed(NO_PARTITIONS, users, 0.0)
    why = conflict(p, "owner of 1")
    assert why is not None
    assert why.why.cause is Cause.PARTITION_LATE
    assert (p.query, machine.deadline(p)) == (0, float("inf"))


def test_one_that_runs_is_found_by_queries_and_never_activated_again() -> None:
    world = crashes(opens(active(), P1), acts=False)
    assert state_of(world, P1) is S.VERIFYING
    assert cause_of(world) is Cause.PARTITION_LATE
    world = settled(world)
    assert (state_of(world, P1), world.partitions.acts) == (S.ACTIVE, 0)


def test_one_that_was_lost_meanwhile_is_said_under_its_virtual_machine() -> None:
    world = settled(crashes(fabric_manager_restarts(opens(active(), P1)), acts=False), ticks=2)
    assert (state_of(world, P1), world.partitions.acts) == (S.LOST, 0)
    assert cause_of(world) is Cause.PARTITION_LOST


def test_one_without_an_owner_is_deactivated_once_all_users_are_known() -> None:
    world = replace(fabric((ACTIVATE_1,), active={P1: US}), owners={})
    world = world.after(machine.users_changed(world.partitions, None, world.at))
    world = settled(world)
    assert (state_of(world, P1), world.active) == (S.ACTIVE, {P1: US}), "who has it is not known"
    assert settled(world.changed()).active == {}


def test_an_intent_to_deactivate_is_no_proof_for_a_new_owner() -> None:
    world = fabric((DEACTIVATE_1,), active={P1: US}, owners={P1: Owner(1)})
    assert state_of(world, P1) is S.DEACTIVATING
    world = queried(queried(world))
    assert (is_acting(world), cause_of(world)) == (True, Cause.PARTITION_LATE)
    assert settled(world).active == {P1: US}


def test_an_intent_to_deactivate_what_is_inactive_needs_no_act() -> None:
    world = settled(fabric((DEACTIVATE_1,)))
    assert (world.disk, world.partitions.acts) == ((), 0)


def test_without_an_intent_an_active_one_is_somebodys_decision() -> None:
    """So after a reboot, when no intent counts."""
    world = settled(fabric((), active={P1: US}), ticks=3)
    assert (world.active, of_others(world.partitions)) == ({P1: US}, (P1,))


# --- the table --------------------------------------------------------------------------------------------------------


def test_a_pair_without_a_row_is_a_bug() -> None:
    with pytest.raises(NoPartitionTransitionError, match="Reserved has no transition on shown active"):
        follow(S.RESERVED, PartitionTrigger.SHOWN_ACTIVE)


def test_an_act_and_an_intent_that_is_kept_go_together() -> None:
    for (before, _), (state, request) in PARTITION_TRANSITIONS.items():
        if request is PartitionRequest.ACT:
            assert state in INTENTS
        if INTENTS.get(before) is not INTENTS.get(state):
            assert request is PartitionRequest.WRITE, (before, state)


def test_every_row_is_followed_by_these_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    followed = set()

    def noted(state: PartitionState, trigger: PartitionTrigger) -> tuple[PartitionState, PartitionRequest]:
        followed.add((state, trigger))
        return follow(state, trigger)

    monkeypatch.setattr(machine, "follow", noted)
    for test in (
        test_it_is_deactivated_when_its_owner_has_gone_and_the_virtual_machine_has_ended,
        test_an_owner_that_leaves_before_the_act_leaves_nothing,
        test_an_owner_that_leaves_during_the_act_has_it_undone,
        test_an_act_that_was_killed_says_nothing_and_queries_decide,
        test_a_deactivation_that_did_nothing_is_repeated_after_the_pause,
        test_one_that_is_lost_under_a_virtual_machine_is_not_activated_again,
        test_one_that_is_lost_is_activated_before_the_next_start_of_a_container,
        test_a_lost_one_without_a_call_is_left_as_it_is,
        test_one_that_runs_is_found_by_queries_and_never_activated_again,
        test_one_that_was_lost_meanwhile_is_said_under_its_virtual_machine,
    ):
        test()
    assert followed == set(PARTITION_TRANSITIONS)
