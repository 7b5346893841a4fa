"""The label keeper against a fake API server, by the daemon's own client."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

import pytest
import trio
from trio.testing import MockClock

from gpuactors.actors import label_keeper
from gpuactors.actors.api_retry import API_BACKOFF_S, API_LOST_S
from gpuactors.core.domains.outputs import NO_DOMAINS_WANTED, DomainsWanted, LabelPatchWanted
from gpuactors.core.events import Event
from gpuactors.core.events.domains import (
    LabelPatched,
    LabelRead,
    NodeTouched,
)
from gpuactors.core.values.domain import LABEL, DomainUid, LabelChange, LabelPatch, NodeLabel
from gpuactors.kube.client import API_REQUEST_S
from gpuactors_simulation.kube.server import ApiFault
from gpuactors_simulation.kube.status import NODES
from tests.actors.domain_actor import DomainActor, running, without_hints
from tests.kube.cluster import NODE

OURS = DomainUid("83479f70-e292-43d6-aa67-dd4ba8adab8f")


def reads(number: int) -> DomainsWanted:
    return DomainsWanted(label_read=number)


def patches(number: int, change: LabelChange, value: DomainUid = OURS) -> DomainsWanted:
    return DomainsWanted(label_patch=LabelPatchWanted(number, LabelPatch(change, value)))


class Kept(DomainActor):
    """A label keeper that runs, and its server."""

    @property
    def label(self) -> str | None:
        (node,) = self.at.server.store.objects(NODES)
        value: str | None = node["metadata"]["labels"].get(LABEL)
        return value


def kept() -> AbstractAsyncContextManager[Kept]:
    async def run(at: Kept, inbox: trio.MemorySendChannel[Event]) -> None:
        await label_keeper.run(at.wanted.subscribe(), at.at.node, inbox, at.unwatched.append)

    return running(Kept, run)


# --- orders -----------------------------------------------------------------------------------------------


async def test_the_label_is_read_added_and_removed_as_wanted(autojump_clock: MockClock) -> None:
    async with kept() as keeper:
        assert await keeper.answers(reads(1)) == [LabelRead(1, NodeLabel(None))]
        assert await keeper.answers(patches(2, LabelChange.ADD)) == [LabelPatched(2)]
        assert keeper.label == OURS
        assert await keeper.answers(reads(3)) == [LabelRead(3, NodeLabel(OURS))]
        assert await keeper.answers(patches(4, LabelChange.REMOVE)) == [LabelPatched(4)]
        assert keeper.label is None


async def test_an_order_is_carried_out_once_whatever_else_changes(autojump_clock: MockClock) -> None:
    async with kept() as keeper:
        await keeper.answers(patches(1, LabelChange.ADD))
        keeper.at.server.label_node(NODE, LABEL, None)
        order = LabelPatchWanted(1, LabelPatch(LabelChange.ADD, OURS))
        assert await keeper.answers(DomainsWanted(label_patch=order, imex=7)) == []
        assert await keeper.answers(NO_DOMAINS_WANTED) == []
        assert keeper.label is None


@pytest.mark.parametrize(
    ("there", "change", "was"),
    [
        ("another", LabelChange.ADD, "absent"),
        (OURS, LabelChange.ADD, "absent"),
        ("another", LabelChange.REMOVE, OURS),
        (None, LabelChange.REMOVE, OURS),
    ],
)
async def test_a_label_that_is_not_as_it_was_read_stays_and_is_a_conflict(
    autojump_clock: MockClock, there: str | None, change: LabelChange, was: str
) -> None:
    async with kept() as keeper:
        keeper.at.server.label_node(NODE, LABEL, there)
        reason = f"it was not {was} any more: somebody else has changed it"
        assert await keeper.answers(patches(1, change)) == [LabelPatched(1, reason, conflict=True)]
        assert keeper.label == there


async def test_what_fails_is_told_and_not_tried_again_by_itself(autojump_clock: MockClock) -> None:
    async with kept() as keeper:
        server = keeper.at.server
        server.order(ApiFault.BROKEN, method="PATCH")
        (failed,) = await keeper.answers(patches(1, LabelChange.ADD))
        assert isinstance(failed, LabelPatched)
        assert str(failed.failure).startswith(f"could not set the label {LABEL} of the node {NODE}: ")
        assert (failed.number, keeper.label) == (1, None)
        server.order(ApiFault.FORBIDDEN, method="GET")
        (unread,) = await keeper.answers(reads(2))
        assert isinstance(unread, LabelRead)
        assert "RBAC" in str(unread.label)
        assert await keeper.answers(reads(3)) == [LabelRead(3, NodeLabel(None))]


async def test_a_patch_whose_answer_is_lost_has_failed_though_it_was_made(autojump_clock: MockClock) -> None:
    async with kept() as keeper:
        keeper.at.server.order(ApiFault.ANSWER_LOST, method="PATCH")
        (failed,) = await keeper.answers(patches(1, LabelChange.ADD))
        assert isinstance(failed, LabelPatched)
        assert failed.failure
        assert keeper.label == OURS


async def test_a_patch_follows_a_read_that_hangs_and_never_runs_beside_it(autojump_clock: MockClock) -> None:
    async with kept() as keeper:
        await keeper.posted()  # the watch is there, and does not hang
        keeper.at.server.order(ApiFault.HANGS, method="GET")
        assert await keeper.answers(reads(1)) == []
        assert await keeper.answers(patches(2, LabelChange.ADD)) == []
        await trio.sleep(API_REQUEST_S)
        unread, done = without_hints(await keeper.posted())
        assert isinstance(unread, LabelRead)
        assert isinstance(unread.label, str)
        assert done == LabelPatched(2)


# --- the watch --------------------------------------------------------------------------------------------


async def test_a_touched_label_is_a_hint_and_another_label_is_none(autojump_clock: MockClock) -> None:
    async with kept() as keeper:
        assert await keeper.posted() == [NodeTouched()]
        keeper.at.server.label_node(NODE, LABEL, "an operator's")
        assert await keeper.posted() == [NodeTouched()]
        keeper.at.server.label_node(NODE, "topology.kubernetes.io/zone", "a")
        assert await keeper.posted() == []
        keeper.at.server.label_node(NODE, LABEL, None)
        assert await keeper.posted() == [NodeTouched()]


async def test_the_beginning_of_a_watch_is_a_hint(autojump_clock: MockClock) -> None:
    """A label that went between the last read and this watch is shown by nothing else."""
    async with kept() as keeper:
        assert (keeper.label, await keeper.posted()) == (None, [NodeTouched()])


async def test_what_changed_while_the_watch_was_away_is_a_hint_too(autojump_clock: MockClock) -> None:
    async with kept() as keeper:
        await keeper.posted()
        keeper.at.server.go_away()
        keeper.at.server.label_node(NODE, LABEL, "meanwhile")
        await keeper.posted()
        assert len(keeper.unwatched) == 1
        assert keeper.unwatched[0].startswith(f"could not watch the node {NODE}: ")
        keeper.at.server.away = False
        await trio.sleep(API_LOST_S)
        assert await keeper.posted() == [NodeTouched()]


async def test_a_node_that_may_not_be_watched_is_told_each_time_and_orders_go_on(
    autojump_clock: MockClock,
) -> None:
    async with kept() as keeper:
        await keeper.posted()
        keeper.at.server.order(ApiFault.FORBIDDEN, times=3, method="GET")
        keeper.at.server.break_connections()
        await trio.sleep(API_LOST_S + sum(API_BACKOFF_S[:4]))
        assert sum("RBAC" in reason for reason in keeper.unwatched) == 3
        assert await keeper.answers(patches(1, LabelChange.ADD)) == [LabelPatched(1)]
