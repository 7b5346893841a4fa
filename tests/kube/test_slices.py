"""The slices over the API: list, watch and write, and when all are listed anew."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from math import inf

import msgspec
import pytest
import trio
from msgspec.structs import replace
from trio.testing import MockClock, wait_all_tasks_blocked

from gpuactors import limits
from gpuactors.core.claims.pool import has_counters, has_taints, probe_spec
from gpuactors.core.values.slices import Attribute, CounterSet, SliceDevice, StoredSlice, Taint
from gpuactors.kube import objects
from gpuactors.kube import watch as kube_watch
from gpuactors.kube.slices import KubeSlices
from gpuactors.kube.watch import WATCH_AGAIN_S, WATCH_S, WATCH_SILENT_S
from gpuactors.ports.kube import (
    ApiAway,
    ApiMalformed,
    ApiRefused,
    SliceDeleted,
    SliceEvent,
    SlicesListed,
    SliceStored,
)
from gpuactors_simulation.kube.server import ApiAnswer, ApiFault, ApiRequest, FakeApiServer
from gpuactors_simulation.kube.status import Object
from tests.kube.cluster import DRIVER, NODE, Cluster, cluster, device, spec
from tests.kube.test_recorded import NAMES, recorded


class Followed:
    """The events that came."""

    def __init__(self) -> None:
        self.events: list[SliceEvent] = []
        self.failed: Exception | None = None

    async def run(self, slices: KubeSlices) -> None:
        try:
            async with slices.follow() as events:
                async for event in events:
                    self.events.append(event)  # they are looked at meanwhile
        except Exception as exc:
            self.failed = exc

    async def next(self) -> list[SliceEvent]:
        """What came since the last time, when nothing runs any more."""
        await wait_all_tasks_blocked(0.001)
        found, self.events = self.events, []
        return found


@asynccontextmanager
async def followed(server: FakeApiServer | None = None) -> AsyncIterator[tuple[Cluster, Followed]]:
    async with cluster(server) as at, trio.open_nursery() as nursery:
        found = Followed()
        nursery.start_soon(found.run, at.slices)
        await wait_all_tasks_blocked(0.001)
        yield at, found
        nursery.cancel_scope.cancel()


async def silence(seconds: float) -> AsyncIterator[Object]:
    """A watch that says nothing."""
    await trio.sleep(seconds)
    for event in list[Object]():
        yield event


def kinds(events: list[SliceEvent]) -> list[type[SliceEvent]]:
    return [type(event) for event in events]


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """No wait of a watch is random."""
    monkeypatch.setattr(limits, "API_HOUR_JITTER", 0.0)
    monkeypatch.setattr(kube_watch, "WATCH_AGAIN_JITTER", 0.0)


# --- following --------------------------------------------------------------------------------------------


async def test_what_is_there_is_listed_and_every_change_follows(autojump_clock: MockClock) -> None:
    async with cluster() as at, trio.open_nursery() as nursery:
        one = await at.slices.create(spec("gpu-a"), 0, at.node_uid)
        found = Followed()
        nursery.start_soon(found.run, at.slices)
        assert await found.next() == [SlicesListed((one,))]
        two = await at.slices.create(spec("gpu-b"), 1, at.node_uid)
        changed = await at.slices.update(one, spec("gpu-c"), at.node_uid)
        await at.slices.delete(two)
        assert await found.next() == [SliceStored(two), SliceStored(changed), SliceDeleted(two.name)]
        nursery.cancel_scope.cancel()


async def test_only_our_drivers_slices_of_our_node_are_followed(autojump_clock: MockClock) -> None:
    async with followed() as (at, found):
        await found.next()
        elsewhere = KubeSlices(at.client, DRIVER, "node-2")
        await elsewhere.create(replace(spec("gpu-a"), node="node-2", pool="node-2"), 0, at.node_uid)
        assert await found.next() == []


@pytest.mark.usefixtures("steady")
async def test_a_watch_is_renewed_from_where_it_ended(autojump_clock: MockClock) -> None:
    async with followed() as (at, found):
        await found.next()
        at.asked()
        await trio.sleep(3 * WATCH_S)
        assert at.asked() == ["WATCH resourceslices"] * 2
        await at.slices.create(spec("gpu-a"), 0, at.node_uid)
        assert kinds(await found.next()) == [SliceStored]


@pytest.mark.usefixtures("steady")
async def test_bookmarks_move_the_version_on(autojump_clock: MockClock) -> None:
    """Others write, and the server forgets: a watch that is renewed from its last bookmark is not too old."""
    async with followed() as (at, found):
        await found.next()
        await trio.sleep(WATCH_S - 10.0)
        at.server.add_node("node-2")
        await trio.sleep(9.0)
        at.server.store.forget()
        at.asked()
        await trio.sleep(10.0)
        assert at.asked() == ["WATCH resourceslices"]
        assert await found.next() == []


async def test_an_event_moves_the_version_on(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server without bookmarks: what was shown once is not shown by the next watch again."""
    monkeypatch.setattr("gpuactors_simulation.kube.server._bookmark_first_at", lambda *_: inf)
    async with followed() as (at, found):
        await found.next()
        await trio.sleep(WATCH_SILENT_S - 10.0)
        for number in range(14):
            await at.slices.create(spec(f"gpu-{number}"), number, at.node_uid)
            assert kinds(await found.next()) == [SliceStored]
            await trio.sleep(WATCH_SILENT_S - 10.0)
        assert await found.next() == []
        assert found.failed is None


@pytest.mark.usefixtures("steady")
async def test_a_version_that_is_too_old_is_a_new_list(autojump_clock: MockClock) -> None:
    """watch-too-old: an answer of 200, and an ERROR event with code 410."""
    async with followed() as (at, found):
        await found.next()
        at.server.break_connections = lambda: None  # type: ignore[method-assign]
        await trio.sleep(WATCH_S - 1.0)
        at.server.add_node("node-2")
        at.server.store.forget()
        await trio.sleep(10.0)
        assert kinds(await found.next()) == [SlicesListed]
        await at.slices.create(spec("gpu-a"), 0, at.node_uid)
        assert kinds(await found.next()) == [SliceStored]


async def test_a_watch_that_ends_without_a_word_is_a_new_list(autojump_clock: MockClock) -> None:
    """watch-future-version: of a version that is still to come the server says nothing, not even that."""
    server = FakeApiServer()
    answer = server.answer

    async def silent(request: ApiRequest) -> ApiAnswer:
        if "watch=true" not in request.target:
            return await answer(request)

        return ApiAnswer(200, lines=silence(60.0))

    server.answer = silent  # type: ignore[method-assign]
    async with followed(server) as (_, found):
        await found.next()
        await trio.sleep(200.0)
        assert kinds(await found.next()) == [SlicesListed] * 3


async def test_a_watch_that_says_nothing_for_long_has_ended(autojump_clock: MockClock) -> None:
    """A proxy that has lost the server keeps the connection; the server's bookmark comes each minute."""
    server = FakeApiServer()
    answer = server.answer

    async def silent(request: ApiRequest) -> ApiAnswer:
        if "watch=true" not in request.target:
            return await answer(request)

        return ApiAnswer(200, lines=silence(inf))

    server.answer = silent  # type: ignore[method-assign]
    async with followed(server) as (_, found):
        await trio.sleep(WATCH_SILENT_S + 1.0)
        assert isinstance(found.failed, ApiAway)


@pytest.mark.usefixtures("steady")
async def test_a_proxy_that_cuts_every_watch_short_is_asked_twice_a_minute(autojump_clock: MockClock) -> None:
    async with followed() as (at, found):
        await found.next()

        async def cut() -> AsyncIterator[Object]:
            yield {
                "type": "BOOKMARK",
                "object": {"metadata": {"resourceVersion": str(at.server.store.version)}},
            }

        watch = at.server._watch
        at.server._watch = lambda *_: cut()  # type: ignore[method-assign]
        await trio.sleep(WATCH_S)
        at.asked()
        await trio.sleep(600.0)
        assert len(at.asked()) <= 600.0 / WATCH_AGAIN_S[-1] + len(WATCH_AGAIN_S)
        at.server._watch = watch  # type: ignore[method-assign]


async def test_a_server_that_breaks_off_is_told(autojump_clock: MockClock) -> None:
    async with followed() as (at, found):
        at.server.go_away()
        await found.next()
        assert isinstance(found.failed, ApiAway)


async def test_an_error_event_that_is_no_410_is_told(autojump_clock: MockClock) -> None:
    async with followed() as (at, found):
        status = {
            "kind": "Status",
            "code": 500,
            "reason": "InternalError",
            "message": "etcdserver: timed out",
        }

        async def failing() -> AsyncIterator[Object]:
            yield {"type": "ERROR", "object": status}

        at.server._watch = lambda *_: failing()  # type: ignore[method-assign]
        await trio.sleep(2 * WATCH_S)
        assert isinstance(found.failed, ApiRefused)
        assert "etcdserver: timed out" in str(found.failed)


async def test_a_line_that_is_no_event_is_malformed(autojump_clock: MockClock) -> None:
    async with followed() as (at, found):

        async def failing() -> AsyncIterator[Object]:
            yield {"type": 7}

        at.server._watch = lambda *_: failing()  # type: ignore[method-assign]
        await trio.sleep(2 * WATCH_S)
        assert isinstance(found.failed, ApiMalformed)


# --- writing ----------------------------------------------------------------------------------------------


@pytest.fixture
async def at() -> AsyncIterator[Cluster]:
    async with cluster() as found:
        yield found


async def test_a_dry_run_stores_nothing_and_shows_what_is_kept(at: Cluster) -> None:
    for gate in (True, False):
        at.server.device_taints, at.server.partitionable_devices = gate, not gate
        probe = probe_spec(DRIVER, NODE, counters=True)
        stored = await at.slices.create(probe, 0, at.node_uid, dry_run=True)
        assert (has_taints(stored.spec), has_counters(stored.spec)) == (gate, not gate)
    assert at.server.slices() == []


async def test_counters_that_are_written_are_read(at: Cluster) -> None:
    card = CounterSet("pf-0000-3b-00-0-counter-set", {"vf-slots": "2"})
    consuming = replace(device("gpu-a"), consumes=(CounterSet(card.name, {"vf-slots": "1"}),))
    for index, wanted in enumerate(
        (replace(spec(), devices=(consuming,)), replace(spec(), counter_sets=(card,)))
    ):
        wanted = replace(wanted, devices=wanted.devices if index == 0 else ())  # noqa: PLW2901
        stored = await at.slices.create(wanted, index, at.node_uid)
        assert stored.spec == wanted


async def test_a_slice_with_counter_sets_and_devices_is_refused(at: Cluster) -> None:
    """gate-on-slice-create-sets-and-devices."""
    card = CounterSet("card", {"vf-slots": "2"})
    with pytest.raises(ApiRefused, match="only one of `sharedCounters` or `devices` is allowed"):
        await at.slices.create(replace(spec("gpu-a"), counter_sets=(card,)), 0, at.node_uid)


async def test_the_name_of_a_slice_begins_with_its_place(at: Cluster) -> None:
    stored = await at.slices.create(spec("gpu-a"), 17, at.node_uid)
    assert stored.name.startswith("00011-gpu.nvidia.com-node-1-")
    assert stored.owner == at.node_uid


async def test_what_is_written_is_what_is_read(at: Cluster) -> None:
    taint = Taint("gpu.nvidia.com/held", "HeldByOther", time_added="2026-11-21T20:27:12Z")
    attributes = {
        "b": Attribute("bool", False), "i": Attribute("int", 0), "s": Attribute("string", "x"),
        "v": Attribute("version", "1.2.3"),
    }  # fmt: skip
    wanted = replace(
        spec(), devices=(SliceDevice("gpu-a", attributes, (taint,), {"m": "128Gi"}), device("gpu-b"))
    )
    stored = await at.slices.create(wanted, 0, at.node_uid)
    assert stored.spec == wanted
    assert stored.spec.devices[0].taints[0].time_added == taint.time_added


async def test_a_write_of_what_is_stored_changes_nothing(at: Cluster) -> None:
    stored = await at.slices.create(spec("gpu-a"), 0, at.node_uid)
    assert await at.slices.update(stored, stored.spec, at.node_uid) == stored


async def test_an_update_of_another_version_is_refused(at: Cluster) -> None:
    stored = await at.slices.create(spec("gpu-a"), 0, at.node_uid)
    await at.slices.update(stored, spec("gpu-b"), at.node_uid)
    with pytest.raises(ApiRefused) as refused:
        await at.slices.update(stored, spec("gpu-c"), at.node_uid)
    assert refused.value.code == 409


async def test_a_deletion_names_uid_and_version(at: Cluster) -> None:
    stored = await at.slices.create(spec("gpu-a"), 0, at.node_uid)
    for other in (replace(stored, uid="another"), replace(stored, version="1")):
        with pytest.raises(ApiRefused) as refused:
            await at.slices.delete(other)
        assert refused.value.code == 409
    await at.slices.delete(stored)
    await at.slices.delete(stored)  # gone already: no error


async def test_a_404_of_a_deletion_that_is_not_of_the_slice_is_an_error(at: Cluster) -> None:
    stored = await at.slices.create(spec("gpu-a"), 0, at.node_uid)
    at.server.kinds = ()
    with pytest.raises(ApiRefused):
        await at.slices.delete(stored)


async def test_a_create_whose_answer_is_lost_may_be_carried_out(at: Cluster) -> None:
    at.server.order(ApiFault.ANSWER_LOST)
    with pytest.raises(ApiAway):
        await at.slices.create(spec("gpu-a"), 0, at.node_uid)
    assert len(at.server.slices()) == 1


# --- what a real server stored ----------------------------------------------------------------------------


def real_slices() -> list[Object]:
    found = [recorded(name)["response"].get("body") or {} for name in NAMES]
    return [body for body in found if body.get("kind") == "ResourceSlice"]


def read(stored: Object) -> StoredSlice:
    return objects.stored_slice(msgspec.convert(stored, objects.SliceObject))


@pytest.mark.parametrize("number", range(len(real_slices())))
def test_a_slice_of_a_real_server_is_understood_in_full(number: int) -> None:
    stored = real_slices()[number]
    found = read(stored)
    assert found.spec.foreign == ()
    assert len(found.spec.devices) == len(stored["spec"].get("devices", ()))
    written = msgspec.json.decode(objects.written_slice(found.spec, objects.Meta()))
    assert written["spec"] == stored["spec"]


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (("allNodes",), True, "allNodes"),
        (("sharedCounters",), [{"name": "x"}], None),
        (("devices", 0, "allowMultipleAllocations"), True, "devices[0].allowMultipleAllocations"),
        (("devices", 1, "capacity"), {"memory": {"value": "80Gi"}}, None),
        (
            ("devices", 1, "capacity"),
            {"memory": {"value": "80Gi", "requestPolicy": {"default": "1Gi"}}},
            "devices[1].capacity.memory.requestPolicy",
        ),
        (("devices", 0, "attributes", "type"), {"strings": ["a"]}, "devices[0].attributes.type.strings"),
        (("devices", 0, "basic"), None, None),
    ],
)
def test_a_field_that_we_never_write_is_named(
    path: tuple[str | int, ...], value: object, named: str | None
) -> None:
    stored = recorded("slice-create")["response"]["body"]
    inner = stored["spec"]
    for part in path[:-1]:
        inner = inner[part]
    inner[path[-1]] = value
    assert read(stored).spec.foreign == ((named,) if named is not None else ())
