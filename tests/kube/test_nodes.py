"""Our Node object: its metadata, its label, and the watch of it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from gpuactors.core.values.domain import LABEL
from gpuactors.kube.client import ApiClient
from gpuactors.kube.config import FileAccess, Server
from gpuactors.kube.nodes import KubeNode
from gpuactors.kube.watch import WATCH_S
from gpuactors.ports.kube import ApiAway, ApiRefused, LabelConflict, NodeMetadata
from gpuactors_simulation.kube.http import serve_loopback
from gpuactors_simulation.kube.server import ApiAnswer, ApiFault, ApiRequest, FakeApiServer
from gpuactors_simulation.kube.status import NODES, Cause, invalid
from tests.kube.cluster import NODE, Cluster, cluster
from tests.kube.test_recorded import recorded
from tests.support.patience import patient


@pytest.fixture
async def at() -> AsyncIterator[Cluster]:
    async with cluster() as found:
        yield found


async def labelled(at: Cluster, value: str | None, expected: str | None = None) -> str | None:
    """The label after it was set."""
    found = await at.node.set_label(LABEL, expected=expected, value=value)
    assert isinstance(found, NodeMetadata)
    return found.labels.get(LABEL)


# --- the label --------------------------------------------------------------------------------------------


async def test_the_node_is_read_without_its_status(at: Cluster) -> None:
    found = await at.node.read()
    assert found.uid == at.node_uid
    assert found.labels == {"kubernetes.io/hostname": NODE}


async def test_a_label_is_set_and_removed_if_it_is_as_expected(at: Cluster) -> None:
    assert await labelled(at, "a") == "a"
    assert await labelled(at, "b", expected="a") == "b"
    assert await labelled(at, None, expected="b") is None
    assert (await at.node.read()).labels == {"kubernetes.io/hostname": NODE}


@pytest.mark.parametrize(("expected", "value"), [(None, "other"), ("other", None), ("other", "x")])
async def test_a_label_that_is_not_as_expected_stays_and_that_is_an_answer(
    at: Cluster, expected: str | None, value: str | None
) -> None:
    """A failed test of a JSON patch is 422, never 409."""
    await labelled(at, "mine")
    assert await at.node.set_label(LABEL, expected=expected, value=value) == LabelConflict()
    assert (await at.node.read()).labels[LABEL] == "mine"


@pytest.mark.parametrize(
    ("recording", "expected", "value"),
    [
        ("label-add-when-absent", None, "11111111-2222-3333-4444-555555555555"),
        ("label-add-when-present", None, "other"),
        ("label-remove", "11111111-2222-3333-4444-555555555555", None),
        ("label-remove-other-value", "other", None),
    ],
)
async def test_a_patch_is_what_a_real_server_was_asked(
    at: Cluster, recording: str, expected: str | None, value: str | None
) -> None:
    asked: list[ApiRequest] = []
    answer = at.server.answer

    async def answering(request: ApiRequest) -> ApiAnswer:
        asked.append(request)
        return await answer(request)

    at.server.answer = answering  # type: ignore[method-assign]
    await at.node.set_label(LABEL, expected=expected, value=value)
    (request,), real = asked, recorded(recording)["request"]
    assert (request.method, request.target) == (real["method"], real["path"])
    assert request.headers["content-type"] == real["headers"]["Content-Type"]
    assert json.loads(request.body) == real["body"]


async def test_a_label_that_is_absent_cannot_be_removed(at: Cluster) -> None:
    assert await at.node.set_label(LABEL, expected="gone", value=None) == LabelConflict()


async def test_a_policy_that_forbids_the_label_is_no_conflict(at: Cluster) -> None:
    """It answers 422 as well, for ever; read anew and tried again, its sentence would never be seen."""

    forbidden = invalid(
        NODES, NODE, [Cause("metadata.labels", "FieldValueForbidden", "our nodes keep theirs")]
    )
    answer = at.server.answer

    async def answering(request: ApiRequest) -> ApiAnswer:
        if request.method == "PATCH":
            return ApiAnswer(forbidden.code, json.dumps(forbidden.status).encode())
        return await answer(request)

    at.server.answer = answering  # type: ignore[method-assign]
    with pytest.raises(ApiRefused, match="our nodes keep theirs"):
        await at.node.set_label(LABEL, expected=None, value="mine")


async def test_a_write_on_a_node_that_is_gone_is_refused(at: Cluster) -> None:
    at.server.store.delete(NODES, "", NODE)
    with pytest.raises(ApiRefused) as refused:
        await at.node.set_label(LABEL, expected=None, value="mine")
    assert (refused.value.code, refused.value.refusal.name) == (404, NODE)


async def test_over_a_socket_a_label_is_set_and_a_conflict_is_told() -> None:
    server = FakeApiServer()
    server.add_node(NODE)
    with trio.fail_after(patient(10.0)):
        async with serve_loopback(server) as port:
            node = KubeNode(ApiClient(FileAccess(Server("http", "127.0.0.1", port))), NODE)
            found = await node.set_label(LABEL, expected=None, value="mine")
            assert isinstance(found, NodeMetadata)
            assert await node.set_label(LABEL, expected=None, value="other") == LabelConflict()
            async with node.watch_node() as seen:
                assert await anext(seen) == found


# --- the watch --------------------------------------------------------------------------------------------


class Seen:
    """The values of the label that came."""

    def __init__(self) -> None:
        self.labels: list[str | None] = []
        self.failed: Exception | None = None

    async def run(self, node: KubeNode) -> None:
        try:
            async with node.watch_node() as found:
                async for metadata in found:
                    self.labels.append(metadata.labels.get(LABEL))
        except Exception as exc:
            self.failed = exc

    async def next(self) -> list[str | None]:
        """What came since the last time, when nothing runs any more."""
        await wait_all_tasks_blocked(0.001)
        found, self.labels = self.labels, []
        return found


@asynccontextmanager
async def watched() -> AsyncIterator[tuple[Cluster, Seen]]:
    async with cluster() as at, trio.open_nursery() as nursery:
        seen = Seen()
        nursery.start_soon(seen.run, at.node)
        yield at, seen
        nursery.cancel_scope.cancel()


async def test_the_label_as_it_is_and_each_change_of_it_is_seen(autojump_clock: MockClock) -> None:
    async with watched() as (at, seen):
        assert await seen.next() == [None]
        await labelled(at, "mine")
        at.server.label_node(NODE, LABEL, "an operator's")
        at.server.label_node(NODE, LABEL, None)
        assert await seen.next() == ["mine", "an operator's", None]


async def test_nothing_but_our_nodes_metadata_is_asked_for_and_nodes_are_not_listed(
    autojump_clock: MockClock,
) -> None:
    async with watched() as (at, seen):
        await seen.next()
        at.server.add_node("node-2", {LABEL: "theirs"})
        assert await seen.next() == []
        await trio.sleep(3 * WATCH_S)
        assert {*at.asked()} == {"WATCH nodes"}
        assert await seen.next() == [], "a watch that is renewed goes on from where it ended"


async def test_a_watch_that_is_too_old_begins_from_what_is(autojump_clock: MockClock) -> None:
    async with watched() as (at, seen):
        assert await seen.next() == [None]
        at.server.label_node(NODE, LABEL, "meanwhile")
        at.server.store.forget()
        await trio.sleep(10.0)
        assert await seen.next() == ["meanwhile"]
        at.server.label_node(NODE, LABEL, "later")
        assert await seen.next() == ["later"]
        assert seen.failed is None


async def test_a_node_that_goes_and_comes_back_is_seen_again(autojump_clock: MockClock) -> None:
    async with watched() as (at, seen):
        await seen.next()
        at.server.store.delete(NODES, "", NODE)
        assert await seen.next() == []
        at.server.add_node(NODE, {LABEL: "anew"})
        assert await seen.next() == ["anew"]


async def test_a_watch_that_breaks_or_is_forbidden_is_told(autojump_clock: MockClock) -> None:
    async with watched() as (at, seen):
        await seen.next()
        at.server.go_away()
        await seen.next()
        assert isinstance(seen.failed, ApiAway)
    async with cluster() as at:
        at.server.order(ApiFault.FORBIDDEN)
        with pytest.raises(ApiRefused, match=r"could not watch the node .*RBAC"):
            async with at.node.watch_node() as found:
                await anext(found)
