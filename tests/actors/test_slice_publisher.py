"""The slice publisher against a fake API server, by the daemon's own client: each trap of the contract.

In each test the server must come to have what is offered, and must then be left in peace: `settled` waits until nothing
runs any more, and an hour later nothing but the watch and the question about taints has been asked.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest
import trio
from msgspec.structs import replace
from trio.testing import MockClock, wait_all_tasks_blocked

from gpuactors import limits
from gpuactors.actors import slice_publisher
from gpuactors.actors.api_retry import API_BACKOFF_JITTER, API_BACKOFF_S
from gpuactors.actors.slice_publisher import (
    RESTORE_BACKOFF_S,
    SLICE_SETTLE_MAX_S,
    SLICE_SETTLE_S,
    WRITE_SEEN_S,
    PublisherPorts,
)
from gpuactors.concurrency.latest import Latest
from gpuactors.core.values.slices import (
    BlockKind,
    BlockReason,
    Offer,
    OfferedDevice,
    Publication,
    ServerKeeps,
)
from gpuactors_simulation.kube.server import ApiFault, FakeApiServer
from gpuactors_simulation.kube.status import NODES, SLICES, Cause, Object, invalid
from tests.kube.cluster import DRIVER, NODE, Cluster, cluster
from tests.support.offered import offered_gpu

HELD = BlockReason(BlockKind.HELD, "HeldByOther")
HOUR_S = 3600.0


def device(number: int = 0x23, blocked: BlockReason | None = None, *, claimed: bool = False) -> OfferedDevice:
    gpu = offered_gpu(f"0000:{number // 8:02x}:{number % 8:02x}.0", number)
    return replace(gpu, blocked=blocked, claimed=claimed)


def offer(*devices: OfferedDevice) -> Offer:
    return Offer(DRIVER, NODE, devices)


A, B, C = device(1), device(2), device(3)


@dataclass
class Published:
    """A publisher that runs, and its server."""

    at: Cluster
    offers: Latest[Offer | None]
    told: list[Publication] = field(default_factory=list)

    @property
    def server(self) -> FakeApiServer:
        return self.at.server

    @property
    def last(self) -> Publication:
        return self.told[-1]

    async def tell(self, told: Publication) -> None:
        await trio.lowlevel.checkpoint()
        self.told.append(told)

    async def settled(self, within_s: float = 60.0) -> None:
        """Until the publisher says so."""
        with trio.fail_after(within_s):
            while True:
                await wait_all_tasks_blocked(0.001)
                if self.told and self.last.settled and not self.last.problem:
                    break
                await trio.sleep(0.1)
        self.expect_whole()

    async def change(self, new: Offer | None) -> None:
        self.offers.set(new)
        await self.settled()

    def expect_whole(self) -> None:
        """As the scheduler reads a pool: those of the highest generation, as many as each of them says."""
        specs = [s["spec"] for s in self.server.slices(DRIVER) if s["spec"]["nodeName"] == NODE]
        top = max(spec["pool"]["generation"] for spec in specs)
        pools = [spec["pool"] for spec in specs if spec["pool"]["generation"] == top]
        assert {pool["resourceSliceCount"] for pool in pools} == {len(pools)} == {len(specs)}

    def devices(self) -> list[Object]:
        return [d for s in self.server.slices() for d in s["spec"].get("devices", [])]

    def names(self) -> list[str]:
        return [d["name"] for d in self.devices()]

    def tainted(self) -> dict[str, str]:
        return {d["name"]: t["value"] for d in self.devices() for t in d.get("taints", [])}

    async def expect_peace(self) -> None:
        """For an hour nothing is asked but to renew the watch, and once about taints."""
        self.at.asked()
        await trio.sleep(HOUR_S)
        assert set(self.at.asked()) <= {"WATCH resourceslices", "DRY-RUN resourceslices"}
        await self.settled()


@asynccontextmanager
async def published(first: Offer | None, server: FakeApiServer | None = None) -> AsyncIterator[Published]:
    async with cluster(server) as at, trio.open_nursery() as nursery:
        found = Published(at, Latest(first))
        ports = PublisherPorts(at.slices, at.node, found.tell)
        nursery.start_soon(slice_publisher.run, found.offers.subscribe(), ports)
        yield found
        nursery.cancel_scope.cancel()


def names(*devices: OfferedDevice) -> list[str]:
    return [device.name for device in devices]


def gate_off() -> FakeApiServer:
    return FakeApiServer(device_taints=False)


# --- what is published ------------------------------------------------------------------------------------


async def test_devices_are_published_in_the_pool_of_the_node(autojump_clock: MockClock) -> None:
    async with published(offer(B, A)) as found:
        await found.settled()
        (stored,) = found.server.slices()
        assert stored["metadata"]["generateName"] == "00000-gpu.nvidia.com-node-1-"
        (owner,) = stored["metadata"]["ownerReferences"]
        assert owner == {
            "apiVersion": "v1", "kind": "Node", "name": NODE, "uid": found.at.node_uid, "controller": True,
        }  # fmt: skip
        assert stored["spec"]["nodeName"] == stored["spec"]["pool"]["name"] == NODE
        assert found.names() == names(A, B)
        kept = ServerKeeps.YES
        whole = Publication(DRIVER, kept, settled=True, generation=1, slices=1, keeps_counters=kept)
        assert found.last == whole


async def test_a_change_is_one_request(autojump_clock: MockClock) -> None:
    async with published(offer(A)) as found:
        await found.settled()
        found.at.asked()
        await found.change(offer(A, B))
        assert found.at.asked() == ["PUT resourceslices"]
        assert found.names() == names(A, B)


async def test_what_changes_within_milliseconds_is_one_write(autojump_clock: MockClock) -> None:
    """A process opens a GPU, and a moment later kubelet's ledger says that it is no pod's."""
    async with published(offer(A, B)) as found:
        await found.settled()
        found.at.asked()
        for cause in ("HolderUnknown", "HeldByOther"):
            found.offers.set(offer(device(1, BlockReason(BlockKind.HELD, cause)), B))
            await trio.sleep(0.01)
        await found.settled()
        assert found.tainted() == {names(A)[0]: "HeldByOther"}
        assert len([a for a in found.at.asked() if a == "PUT resourceslices"]) == 1


async def test_what_has_passed_before_it_is_written_is_not_written(autojump_clock: MockClock) -> None:
    async with published(offer(A, B)) as found:
        await found.settled()
        found.at.asked()
        found.offers.set(offer(device(1, HELD), B))
        await trio.sleep(0.06)
        found.offers.set(offer(A, B))
        await found.settled()
        await trio.sleep(1.0)
        assert found.at.asked() == []
        found.offers.set(offer(device(1, HELD), B))
        await trio.sleep(SLICE_SETTLE_S / 2)
        assert found.at.asked() == [], "it settles again"


@pytest.mark.parametrize("shown_after_s", [0.0, 0.1])
async def test_what_changes_on_and_on_is_written_all_the_same(
    shown_after_s: float, autojump_clock: MockClock
) -> None:
    """Also where the offer changes while the watch has not shown a write yet."""

    async def late(_: Object) -> bool:
        await trio.sleep(shown_after_s)
        return True

    server = FakeApiServer()
    watched(server, late)
    async with published(offer(A, B), server) as found:
        await found.settled()
        found.at.asked()
        for number in range(60):
            found.offers.set(offer(device(1, BlockReason(BlockKind.HELD, f"Cause{number}")), B))
            await trio.sleep(0.05)
        asked = found.at.asked()
        assert 5 <= asked.count("PUT resourceslices") <= 6, "3 s, one write each half second"
        assert asked.count("DRY-RUN resourceslices") <= 1


async def test_a_start_asks_once_for_each_thing(autojump_clock: MockClock) -> None:
    async with published(offer(A)) as found:
        await found.settled()
        asked = found.at.asked()
        assert sorted(asked) == [
            "DRY-RUN resourceslices", "GET nodes", "GET resourceslices", "POST resourceslices", "WATCH resourceslices",
        ]  # fmt: skip


async def test_an_idle_hour_costs_one_watch_and_one_question(autojump_clock: MockClock) -> None:
    async with published(offer(A, device(5, HELD))) as found:
        await found.settled()
        found.at.asked()
        await trio.sleep(24 * HOUR_S)
        asked = found.at.asked()
        for what in ("WATCH resourceslices", "DRY-RUN resourceslices"):
            assert 20 <= asked.count(what) <= 28, "one an hour, at no fixed time of it"
        assert set(asked) == {"WATCH resourceslices", "DRY-RUN resourceslices"}


async def test_a_restart_writes_nothing_that_is_there(autojump_clock: MockClock) -> None:
    async with published(offer(A, device(5, HELD))) as found:
        await found.settled()
        found.at.asked()
        found.offers.set(None)
        await wait_all_tasks_blocked()
        found.told.clear()
        await found.change(offer(A, device(5, HELD)))
        assert not {"PUT resourceslices", "POST resourceslices", "DELETE resourceslices"} & {
            *found.at.asked()
        }


async def test_without_an_offer_nothing_is_asked(autojump_clock: MockClock) -> None:
    async with published(None) as found:
        await trio.sleep(HOUR_S)
        assert found.at.asked() == []
        await found.change(offer(A))
        found.offers.set(None)
        await wait_all_tasks_blocked()
        found.at.asked()
        found.server.delete_slices()
        await trio.sleep(2 * HOUR_S)
        assert found.at.asked() == []
        assert found.server.slices() == []


async def test_a_node_without_devices_has_an_empty_slice(autojump_clock: MockClock) -> None:
    async with published(offer()) as found:
        await found.settled()
        assert len(found.server.slices()) == 1
        assert found.names() == []
        await found.expect_peace()


async def test_two_hundred_devices_are_two_slices_and_four_with_a_taint(autojump_clock: MockClock) -> None:
    many = [device(n) for n in range(200)]
    async with published(offer(*many)) as found:
        await found.settled()
        assert [len(s["spec"]["devices"]) for s in found.server.slices()] == [128, 72]
        await found.change(offer(replace(many[150], blocked=HELD), *many[:150], *many[151:]))
        assert [len(s["spec"]["devices"]) for s in found.server.slices()] == [64, 64, 64, 8]
        assert {s["spec"]["pool"]["generation"] for s in found.server.slices()} == {2}
        assert found.names() == names(*many)
        await found.change(offer(*many))
        assert [len(s["spec"]["devices"]) for s in found.server.slices()] == [128, 72]
        await found.expect_peace()


# --- what others do ---------------------------------------------------------------------------------------


async def test_slices_that_kubelet_deletes_are_there_again_at_once(autojump_clock: MockClock) -> None:
    """Kubelet deletes the node's slices at its start (contract; seen)."""
    async with published(offer(A, device(5, HELD))) as found:
        await found.settled()
        before = found.tainted()
        found.server.delete_slices()
        await wait_all_tasks_blocked(0.001)
        assert len(found.server.slices()) == 1
        await found.settled()
        assert found.tainted() == before
        await found.expect_peace()


async def test_a_late_deletion_in_the_background_is_repaired_as_well(autojump_clock: MockClock) -> None:
    """At a kubelet start the deletion comes in the background, up to minutes after it."""
    async with published(offer(A)) as found:
        for wait_s in (0.0, 1.0, 2.0, 4.0, 8.0, 300.0):
            await found.settled()
            await trio.sleep(wait_s)
            found.server.delete_slices()
        await found.settled()
        await found.expect_peace()


async def test_a_kubelet_that_restarts_again_and_again_leaves_no_node_without_slices_for_long(
    autojump_clock: MockClock,
) -> None:
    """Seen in a soak: the seventh deletion within ten minutes was answered after 45 s."""
    async with published(offer(A)) as found:
        for _ in range(20):
            await found.settled(RESTORE_BACKOFF_S[-1] + 1.0)
            await trio.sleep(7.0)
            found.server.delete_slices()
        await found.settled(30.0 + 1.0)


def _another_attribute(stored: Object) -> None:
    stored["spec"]["devices"][0]["attributes"]["type"] = {"string": "gpu"}


def _unknown_field(stored: Object) -> None:
    stored["spec"]["devices"][0]["allowMultipleAllocations"] = True


def _no_execute(stored: Object) -> None:
    stored["spec"]["devices"][1]["taints"][0]["effect"] = "NoExecute"


def _no_taint(stored: Object) -> None:
    del stored["spec"]["devices"][1]["taints"]


def _no_devices(stored: Object) -> None:
    del stored["spec"]["devices"]


def _no_owner(stored: Object) -> None:
    del stored["metadata"]["ownerReferences"]


def _another_count(stored: Object) -> None:
    stored["spec"]["pool"]["resourceSliceCount"] = 3


@pytest.mark.parametrize(
    "edit",
    [_another_attribute, _unknown_field, _no_execute, _no_taint, _no_devices, _no_owner, _another_count],
)
async def test_an_edit_by_others_is_undone(edit: Callable[[Object], None], autojump_clock: MockClock) -> None:
    async with published(offer(A, device(5, HELD))) as found:
        await found.settled()
        (before,) = found.server.slices()
        found.server.edit_slice(before["metadata"]["name"], edit)
        await found.settled()
        (after,) = found.server.slices()
        assert after["spec"]["devices"] == before["spec"]["devices"]
        assert after["spec"]["pool"]["resourceSliceCount"] == 1
        assert after["metadata"]["ownerReferences"] == before["metadata"]["ownerReferences"]
        await found.expect_peace()


async def test_somebody_who_edits_for_ever_costs_two_writes_a_minute(autojump_clock: MockClock) -> None:
    async with published(offer(A)) as found:
        await found.settled()
        numbers = count()

        async def edit_for_ever() -> None:
            while True:
                for stored in found.server.slices():
                    found.server.edit_slice(
                        stored["metadata"]["name"],
                        lambda s: s["spec"]["pool"].update(resourceSliceCount=10 + next(numbers)),
                    )
                await trio.sleep(0.5)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(edit_for_ever)
            await trio.sleep(HOUR_S / 6)
            writes = [a for a in found.at.asked() if a.startswith("PUT")]
            assert len(writes) <= HOUR_S / 6 / RESTORE_BACKOFF_S[-1] + len(RESTORE_BACKOFF_S)
            nursery.cancel_scope.cancel()
        await found.settled(120.0)
        await found.expect_peace()


async def test_a_surplus_slice_of_a_lost_answer_is_deleted(autojump_clock: MockClock) -> None:
    """Two slices of one generation where the pool says one: the scheduler ignores the whole pool (seen)."""
    async with published(offer(A)) as found:
        await found.settled()
        (stored,) = found.server.slices()
        double = found.server.store.named(SLICES, stored | {"metadata": {"generateName": "00000-x-"}})
        found.server.store.put(SLICES, double)
        await found.settled()
        assert len(found.server.slices()) == 1
        await found.expect_peace()


async def test_slices_of_another_driver_and_of_other_nodes_stay(autojump_clock: MockClock) -> None:
    async with published(None) as found:
        for name, driver, node in (
            ("other-driver", "nic.example.com", NODE),
            ("other-node", DRIVER, "node-2"),
        ):
            pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
            spec = {"driver": driver, "nodeName": node, "pool": pool}
            found.server.store.put(
                SLICES, found.server.store.named(SLICES, {"metadata": {"name": name}, "spec": spec})
            )
        await found.change(offer(A))
        await found.change(offer(A, B))
        assert {"other-driver", "other-node"} <= {s["metadata"]["name"] for s in found.server.slices()}


async def test_a_node_that_was_made_anew_owns_the_slices(autojump_clock: MockClock) -> None:
    """The old Node object's slices are deleted by the garbage collector: those after it need the new one's UID."""
    async with published(offer(A)) as found:
        await found.settled()
        found.server.store.delete(NODES, "", NODE)
        uid = found.server.add_node(NODE)["metadata"]["uid"]
        found.server.delete_slices()
        await found.settled()
        (stored,) = found.server.slices()
        assert [o["uid"] for o in stored["metadata"]["ownerReferences"]] == [uid]


# --- taints -----------------------------------------------------------------------------------------------


async def test_a_held_device_has_a_taint_and_loses_it_again(autojump_clock: MockClock) -> None:
    async with published(offer(A, B)) as found:
        await found.settled()
        await found.change(offer(A, replace(B, blocked=HELD)))
        assert found.names() == names(A, B)
        assert found.tainted() == {names(B)[0]: "HeldByOther"}
        assert found.last.tainted == (*names(B),)
        await found.expect_peace()
        await found.change(offer(A, B))
        assert found.tainted() == {}
        await found.expect_peace()


async def test_the_time_of_a_taint_stays_when_something_else_changes(autojump_clock: MockClock) -> None:
    """The server would set it anew at each write that leaves it out."""
    async with published(offer(A, replace(B, blocked=HELD))) as found:
        await found.settled()
        before = [t["timeAdded"] for d in found.devices() for t in d.get("taints", [])]
        await trio.sleep(100.0)
        await found.change(offer(A, replace(B, blocked=HELD), C))
        assert [t["timeAdded"] for d in found.devices() for t in d.get("taints", [])] == before


async def test_where_taints_are_dropped_a_held_device_is_withdrawn(autojump_clock: MockClock) -> None:
    async with published(offer(A, replace(B, blocked=HELD)), gate_off()) as found:
        await found.settled()
        assert found.names() == names(A)
        assert found.last.keeps_taints is ServerKeeps.NO
        assert found.last.withdrawn == (*names(B),)
        await found.expect_peace()
        await found.change(offer(A, B))
        assert found.names() == names(A, B)


async def test_a_live_claims_device_is_never_withdrawn(autojump_clock: MockClock) -> None:
    async with published(offer(A, replace(B, blocked=HELD, claimed=True)), gate_off()) as found:
        await found.settled()
        assert found.names() == names(A, B)
        assert found.tainted() == {}
        await found.expect_peace()


async def test_a_server_that_stops_keeping_taints_is_found_out(autojump_clock: MockClock) -> None:
    """It restarts with the gate off, and keeps those that it has: only a create in a dry run shows it. Its watches end
    with it, so it is asked when they are renewed."""
    async with published(offer(A, replace(B, blocked=HELD))) as found:
        await found.settled()
        assert found.tainted()
        found.server.device_taints = False
        found.server.break_connections()
        await trio.sleep(60.0)
        await found.settled()
        assert found.names() == names(A)
        await found.expect_peace()


async def test_a_server_that_begins_to_keep_taints_is_found_out_within_an_hour(
    autojump_clock: MockClock,
) -> None:
    async with published(offer(A, replace(B, blocked=HELD)), gate_off()) as found:
        await found.settled()
        found.server.device_taints = True
        await trio.sleep(HOUR_S * (1 + limits.API_HOUR_JITTER) + 60.0)
        assert found.names() == names(A, B)
        assert [*found.tainted()] == names(B)
        await found.expect_peace()


async def test_two_replicas_of_which_one_drops_taints_make_no_loop(autojump_clock: MockClock) -> None:
    """The dry run says yes, and the write drops them: an upgrade of the control plane that stopped in the middle."""
    async with published(offer(A)) as found:
        await found.settled()
        server, answer = found.server, found.server.answer

        async def of_two(request):  # type: ignore[no-untyped-def]
            server.device_taints = "dryRun" in request.target
            return await answer(request)

        server.answer = of_two  # type: ignore[method-assign]
        await found.change(offer(A, replace(B, blocked=HELD)))
        assert found.names() == names(A)
        found.at.asked()
        await trio.sleep(4 * HOUR_S)
        assert len([a for a in found.at.asked() if a.startswith("PUT")]) <= 3 * 4
        await found.settled()


CARD = "pf-0000-3b-00-0-counter-set"
PHYSICAL = replace(A, counter_set=CARD, is_whole=True)
VIRTUAL = replace(B, counter_set=CARD)


def counters(found: Published) -> tuple[list[Object], dict[str, Any]]:
    """The counter sets of the pool, and what each device consumes."""
    sets = [s for stored in found.server.slices() for s in stored["spec"].get("sharedCounters", [])]
    return sets, {d["name"]: d["consumesCounters"] for d in found.devices() if "consumesCounters" in d}


async def test_a_card_and_its_parts_consume_the_counters_of_a_slice_of_its_own(
    autojump_clock: MockClock,
) -> None:
    async with published(offer(PHYSICAL, VIRTUAL)) as found:
        await found.settled()
        one = {"counters": {"vf-slots": {"value": "1"}}}
        sets, consumed = counters(found)
        assert sets == [{"name": CARD, **one}]
        assert consumed == {name: [{"counterSet": CARD, **one}] for name in names(PHYSICAL, VIRTUAL)}
        assert len(found.server.slices()) == 2
        assert found.last.keeps_counters is ServerKeeps.YES
        await found.expect_peace()
        await found.change(offer(replace(A, claimed=True)))
        assert counters(found) == ([], {})
        assert len(found.server.slices()) == 1


async def test_a_server_that_drops_counters_gets_none(autojump_clock: MockClock) -> None:
    async with published(offer(PHYSICAL, VIRTUAL), FakeApiServer(partitionable_devices=False)) as found:
        await found.settled()
        assert counters(found) == ([], {})
        assert (found.last.keeps_taints, found.last.keeps_counters) == (ServerKeeps.YES, ServerKeeps.NO)
        await found.expect_peace()
        found.server.partitionable_devices = True
        await trio.sleep(HOUR_S * (1 + limits.API_HOUR_JITTER) + 60.0)
        await found.settled()
        assert [s["name"] for s in counters(found)[0]] == [CARD]


async def test_a_server_that_stops_keeping_counters_is_found_out(autojump_clock: MockClock) -> None:
    """It keeps those that it has, as taints."""
    async with published(offer(PHYSICAL, VIRTUAL)) as found:
        await found.settled()
        found.server.partitionable_devices = False
        found.server.break_connections()
        await trio.sleep(60.0)
        await found.settled()
        assert counters(found) == ([], {})
        await found.expect_peace()


async def test_a_server_with_another_layout_of_counters_gets_none_and_keeps_taints(
    autojump_clock: MockClock,
) -> None:
    """Kubernetes 1.34 with the gate on refuses a device whose set is in another slice."""
    async with published(None) as found:
        prepare = found.server._prepare_slice

        def of_1_34(new: Object, old: Object | None) -> None:
            for device in new["spec"].get("devices", ()):
                if "consumesCounters" in device:
                    wrong = Cause(
                        "spec.devices[0].consumesCounters[0]", "FieldValueInvalid", "counterSet not found"
                    )
                    raise invalid(SLICES, "", [wrong])
            prepare(new, old)

        found.server._prepare_slice = of_1_34  # type: ignore[method-assign]
        await found.change(offer(PHYSICAL, VIRTUAL))
        assert found.names() == names(A, B)
        assert (found.last.keeps_taints, found.last.keeps_counters) == (ServerKeeps.YES, ServerKeeps.NO)
        await found.expect_peace()


async def test_a_refused_question_about_taints_withdraws_and_is_told(autojump_clock: MockClock) -> None:
    """RBAC without create, for one: a held device is not offered while it is not known."""
    async with published(None) as found:
        found.server.order(ApiFault.FORBIDDEN, 1, "POST")
        found.offers.set(offer(A, replace(B, blocked=HELD)))
        await trio.sleep(60.0)
        assert found.names() == names(A)
        assert found.last.keeps_taints is ServerKeeps.UNKNOWN
        assert "403" in found.last.problem
        await trio.sleep(HOUR_S * (1 + limits.API_HOUR_JITTER))
        assert found.names() == names(A, B)
        assert found.last.problem == ""


# --- what the watch shows, and when ------------------------------------------------------------------------


def watched(server: FakeApiServer, shown: Callable[[Object], Awaitable[bool]]) -> None:
    """Every event of a watch waits for `shown`, and comes if that is true."""
    watch = server._watch

    async def filtered(*arguments: Any) -> AsyncIterator[Object]:
        async for event in watch(*arguments):
            if await shown(event):
                yield event

    server._watch = filtered  # type: ignore[assignment, method-assign]


async def test_nothing_is_written_again_before_the_watch_has_shown_it(autojump_clock: MockClock) -> None:
    """It is three seconds late, as an API server's cache may be."""

    async def late(_: Object) -> bool:
        await trio.sleep(3.0)
        return True

    server = FakeApiServer()
    watched(server, late)
    many = [device(n) for n in range(70)]
    async with published(offer(*many), server) as found:
        await found.settled()
        await found.change(offer(*many[1:], device(80, HELD)))
        await found.change(offer(*many[2:]))
        asked = found.at.asked()
        assert (asked.count("POST resourceslices"), asked.count("PUT resourceslices")) == (2, 2)
        assert asked.count("DELETE resourceslices") == 1
        await found.expect_peace()


async def test_a_write_that_the_watch_shows_before_it_is_answered_is_not_waited_for(
    autojump_clock: MockClock,
) -> None:
    async with published(offer(A)) as found:
        await found.settled()
        found.at.asked()
        many = offer(*[device(n) for n in range(129)])
        for new, method in ((offer(A, B), "PUT"), (many, "POST"), (offer(A), "DELETE")):
            found.server.order(ApiFault.ANSWER_SLOW, 1, method)
            found.offers.set(new)
            await found.settled(WRITE_SEEN_S / 2)
        assert "GET resourceslices" not in found.at.asked()


async def test_an_edit_between_a_write_and_its_answer_is_undone_at_once(autojump_clock: MockClock) -> None:
    """The watch has shown our version and then another one; that it has shown ours counts."""
    async with published(offer(A)) as found:
        await found.settled()
        (stored,) = found.server.slices()
        found.at.asked()
        found.server.order(ApiFault.ANSWER_SLOW, 1, "PUT")
        found.offers.set(offer(A, B))
        await trio.sleep(1.0)
        assert found.names() == names(A, B)
        found.server.edit_slice(stored["metadata"]["name"], _no_devices)
        await trio.sleep(WRITE_SEEN_S / 2)
        await found.settled(1.0)
        assert found.names() == names(A, B)
        assert "GET resourceslices" not in found.at.asked()


async def test_a_write_that_the_watch_never_shows_is_listed(autojump_clock: MockClock) -> None:
    async def all_but_ours(event: Object) -> bool:
        return bool(event["type"] != "MODIFIED")

    server = FakeApiServer()
    watched(server, all_but_ours)
    async with published(offer(A), server) as found:
        await found.settled()
        found.at.asked()
        await found.change(offer(A, B))
        assert found.at.asked()[:2] == ["PUT resourceslices", "GET resourceslices"]
        assert found.names() == names(A, B)


# --- failures ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [*ApiFault])
@pytest.mark.parametrize("method", ["POST", "PUT", ""])
async def test_after_any_fault_the_server_has_what_is_offered(
    fault: ApiFault, method: str, autojump_clock: MockClock
) -> None:
    many = [device(n) for n in range(70)]
    async with published(offer(*many)) as found:
        for wanted in (
            offer(*many[:60], replace(many[69], blocked=HELD)),
            offer(replace(A, blocked=HELD), *many[2:]),
        ):
            await found.settled()
            found.server.order(fault, 3, method)
            found.offers.set(wanted)
            await trio.sleep(600.0)
            found.server.end_faults()
            found.server.break_connections()
            await trio.sleep(60.0)
            await found.settled(120.0)
            assert found.names() == sorted(names(*wanted.devices))
        await found.expect_peace()


async def test_a_server_that_was_away_gets_what_is_offered_now(autojump_clock: MockClock) -> None:
    async with published(offer(A)) as found:
        await found.settled()
        found.server.go_away()
        await trio.sleep(10.0)
        assert "cannot be reached" in found.last.problem
        assert not found.last.settled
        found.offers.set(offer(A, B))
        await trio.sleep(HOUR_S)
        found.server.away = False
        await found.settled()
        assert found.names() == names(A, B)
        await found.expect_peace()


async def test_a_failed_write_is_not_taken_for_one_that_others_have_undone(autojump_clock: MockClock) -> None:
    """Found by a soak: after some restarts of kubelet, which deletes the slices, a write that met a restart of the API
    server was made again only after a minute, and a pod's GPU was offered to claims meanwhile."""
    async with published(offer(A)) as found:
        await found.settled()
        for _ in RESTORE_BACKOFF_S:
            found.server.delete_slices()
            await wait_all_tasks_blocked(0.001)
            await found.settled(2 * RESTORE_BACKOFF_S[-1])
        found.server.order(ApiFault.UNAVAILABLE, 1)
        held = device(5, HELD)
        found.offers.set(offer(A, held))
        await trio.sleep(SLICE_SETTLE_MAX_S + 2 * API_BACKOFF_S[0])
        assert found.tainted() == {held.name: HELD.cause}
        await found.expect_peace()


async def test_a_server_that_is_away_is_asked_four_times_a_minute_at_most(autojump_clock: MockClock) -> None:
    async with published(offer(A)) as found:
        await found.settled()
        found.at.asked()
        found.server.order(ApiFault.UNAVAILABLE, 10**6)
        found.server.break_connections()
        await trio.sleep(HOUR_S)
        shortest_s = API_BACKOFF_S[-1] * (1 - API_BACKOFF_JITTER)
        assert len(found.at.asked()) <= HOUR_S / shortest_s + 10


async def test_a_server_restored_from_an_old_backup_is_listed_anew(autojump_clock: MockClock) -> None:
    """Its versions are smaller: a watch from ours would stay silent (watch-future-version)."""
    async with published(offer(A)) as found:
        await found.settled()
        found.server.store.version -= 500
        found.server.break_connections()
        found.server.delete_slices()
        await trio.sleep(60.0)
        assert found.names() == names(A)


async def test_a_watch_that_is_too_old_is_a_list(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """410 comes as an ERROR event in an answer of 200 (watch-too-old)."""
    monkeypatch.setattr(limits, "API_HOUR_JITTER", 0.0)
    async with published(offer(A)) as found:
        await found.settled()
        await trio.sleep(HOUR_S - 1.0)
        for _ in range(3):
            found.server.add_node("node-2")
            found.server.store.delete(NODES, "", "node-2")
        found.server.store.forget()
        found.at.asked()
        await trio.sleep(60.0)
        found.server.delete_slices()
        await found.settled()
        assert found.names() == names(A)


async def test_a_node_that_is_not_there_is_told_and_waited_for(autojump_clock: MockClock) -> None:
    async with published(None) as found:
        found.server.store.delete(NODES, "", NODE)
        found.offers.set(offer(A))
        await trio.sleep(60.0)
        assert "could not read the node node-1" in found.last.problem
        assert found.server.slices() == []
        found.server.add_node(NODE)
        await found.settled()
        assert found.names() == names(A)
