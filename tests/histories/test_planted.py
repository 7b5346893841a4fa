"""Tests of the test: the field's own bugs are planted, and histories find them; and so is what only a world can do."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence, Set

import pytest
import trio
from msgspec.structs import replace

from gpuactors.core.deviceplugin import allocation, calls, device_lists
from gpuactors.core.events.deviceplugin import PreferenceRequest
from gpuactors.core.state import NodeState
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.effects import Grant, Refusal, Refused
from gpuactors.core.values.inventory import Device
from gpuactors.core.values.model import (
    AdvertisedDevice,
    DeviceId,
    DeviceKey,
    Pod,
    ResourceName,
    function_address,
)
from gpuactors.core.values.owner import Allocation
from gpuactors.kubelet import device_plugin
from gpuactors.kubelet.device_plugin import LIST_FIRST_S
from gpuactors.kubelet.list_messages import ListMessages
from gpuactors.kubelet.pb.deviceplugin import v1beta1 as pb
from gpuactors.process.logger import get_logger
from gpuactors_simulation.kubelet.values import DoubleHandOut
from tests.histories import play as playing
from tests.histories import refusals
from tests.histories.answers import UNREADABLE
from tests.histories.draw import drawn
from tests.histories.events import KINDS
from tests.histories.found import FOUND, known
from tests.histories.move_events import SWAPPED
from tests.histories.play import Played, play, play_chosen
from tests.histories.refusals import failed_for_nothing
from tests.histories.script import Step, parse_script
from tests.histories.shrink import shrink
from tests.histories.world import World
from tests.support.planted_status import plant_allocated_is_unhealthy


def by_seed(seed: int) -> Played:
    return play_chosen(drawn(random.Random(seed)), seed)


def _drop_what_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork v2: busy GPUs are left out of the list."""
    listed = device_lists._listed

    def is_busy(state: NodeState, device: DeviceKey) -> bool:
        function = state.host.functions.get(function_address(device))
        group = function.iommu_group if function is not None else None
        use = state.host.polls.groups.get(group) if group is not None else None
        return use is not None and use.in_use

    def without_busy(
        state: NodeState, ids: Mapping[DeviceKey, DeviceId], given: Mapping[ResourceName, Set[DeviceId]]
    ) -> dict[ResourceName, dict[DeviceId, AdvertisedDevice]]:
        return {
            resource: {i: a for i, a in devices.items() if not is_busy(state, a.key)}
            for resource, devices in listed(state, ids, given).items()
        }

    monkeypatch.setattr(device_lists, "_listed", without_busy)
    monkeypatch.setattr(device_lists, "_broken", lambda *_: [])


def _mark_what_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork v2b: GPUs in use are Unhealthy, whatever process holds them."""
    plant_allocated_is_unhealthy(monkeypatch)
    monkeypatch.setattr(device_lists, "_broken", lambda *_: [])


def _swap_what_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fork of today: Allocate gives another GPU than the one that kubelet asked for."""
    grant = calls._grant
    others: dict[str, Device] = {}
    devices_by_id = calls.devices_by_id

    def swapped(state: NodeState, devices: Sequence[Device]) -> Grant:
        return grant(state, [others.get(d.key, d) for d in devices])

    def remember(state: NodeState, resource: ResourceName) -> Mapping[DeviceId, Device]:
        found = devices_by_id(state, resource)
        devices = sorted(found.values(), key=lambda d: d.key)
        others.update({a.key: b for a, b in zip(devices, reversed(devices), strict=True)})
        return found

    monkeypatch.setattr(calls, "devices_by_id", remember)
    monkeypatch.setattr(calls, "_grant", swapped)


Plant = Callable[[pytest.MonkeyPatch], None]

PLANTED: dict[Plant, set[str]] = {
    _drop_what_is_busy: {
        "a list shrank",
        "capacity below allocated",
        "free is negative",
        "kubelet crashed",
        "kubelet's view does not settle",
    },
    _mark_what_is_busy: {"free is negative", "kubelet's view does not settle"},
    _swap_what_is_busy: {
        "swapped",
        UNREADABLE,
        "the daemon misbehaved",  # a container has been started with another GPU's node
    },
}


@pytest.mark.parametrize("plant", PLANTED)
def test_a_planted_bug_of_the_field_is_found_and_made_short(
    plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    failed = next((p for p in map(by_seed, range(40)) if p.failure is not None), None)
    assert failed is not None, "forty histories did not find the planted bug"
    assert failed.failure is not None
    assert failed.failure.check in PLANTED[plant], failed.failure
    shortest = shrink(failed, attempts=60)
    assert len(shortest.script) <= 3, shortest.script


GROUP_IN_USE_PREFERRED = "a group in use was preferred to a free one"


@pytest.mark.parametrize("knows", [True, False], ids=["the daemon knows the groups in use", "it knows none"])
def test_a_group_in_use_that_is_preferred_is_noticed(knows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubelet has not received the list yet that makes the rest of the group Unhealthy, and offers it."""
    watch = device_plugin.DevicePluginService.list_and_watch
    prefer = allocation.prefer

    async def late(self: device_plugin.DevicePluginService, message: pb.Empty) -> AsyncIterator[object]:
        async for response in watch(self, message):
            await trio.sleep(2 * LIST_FIRST_S)
            yield response

    def forgetful(request: PreferenceRequest, known: Mapping[DeviceId, Device], *_: object) -> object:
        return prefer(request, known)

    monkeypatch.setattr(device_plugin.DevicePluginService, "list_and_watch", late)
    if not knows:
        monkeypatch.setattr(calls, "prefer", forgetful)
    burst = FOUND["pods come in a burst on groups of two"]
    checks = {f.check for seed in range(4) if (f := play(burst, seed).failure) is not None}
    assert (GROUP_IN_USE_PREFERRED in checks) is not knows, checks


def test_an_answer_in_which_kubevirt_finds_other_devices_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    grant = calls._grant
    monkeypatch.setattr(calls, "_grant", lambda *given: replace(grant(*given), envs=()))
    failure = play(parse_script("a pod comes+3"), 2).failure
    assert failure is not None
    assert failure.check == UNREADABLE


def test_without_a_planted_bug_the_same_histories_pass() -> None:
    for seed in range(10):
        failure = by_seed(seed).failure
        assert failure is None or known(failure), failure


# --- what must hold is really checked ---------------------------------------------------------------------


def spoiled(spoil: Callable[[World], object]) -> Played:
    """A history in which something forbidden happens by our own hand."""

    def choose(world: World) -> Iterator[Step]:
        yield Step("a pod comes", 0, 3.0)
        spoil(world)
        yield Step("polls take long", 0, 0.1)

    return play_chosen(choose, 2)


def _double(world: World) -> None:
    world.kubelet.double_handouts.append(DoubleHandOut("vm-9", ("0000:01:00.0",), "EBUSY"))


async def _spin() -> None:
    while True:
        await trio.lowlevel.checkpoint()


def _another_owner(world: World) -> None:
    ledger = world.kubelet._manager._ledger
    ((_, resource), entry) = next(iter(ledger.items()))
    other = world.kubelet.submit("vm-9", {resource: 1})
    ledger[other.uid, resource] = entry


def _end_the_daemon(world: World) -> None:
    handle = world.daemons[0].handle
    assert handle is not None
    handle.stop()


@pytest.mark.parametrize(
    ("check", "spoil"),
    [
        ("kubelet crashed", lambda w: w.kubelet.panics.append("nil pointer")),
        ("handed out twice", _double),
        ("two owners", _another_owner),
        ("the daemon misbehaved", _end_the_daemon),
        ("an error in the log", lambda _w: get_logger().error("something.broke")),
        ("the simulation broke: ZeroDivisionError", lambda _w: 1 // 0),
    ],
)
def test_what_must_not_happen_is_noticed(check: str, spoil: Callable[[World], object]) -> None:
    failure = spoiled(spoil).failure
    assert failure is not None
    assert failure.check == check


def _abandon_a_call(world: World) -> None:
    world.cut_off.append("daemon 1 did not answer Allocate")


def _fail_a_pod(world: World) -> None:
    world.kubelet._manager.failed(
        "vm-1", "rpc error: code = Canceled desc = grpc: the client connection is closing"
    )


@pytest.mark.parametrize(
    ("check", "spoil"),
    [("a call in flight was cut off", _abandon_a_call), ("a pod failed for nothing", _fail_a_pod)],
)
def test_a_refusal_without_a_cause_is_noticed(check: str, spoil: Callable[[World], object]) -> None:
    failure = spoiled(spoil).failure
    assert failure is not None
    assert failure.check == check


def test_a_daemon_that_does_not_rest_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list for every poll, though nothing has changed."""
    message_of = ListMessages().of

    async def nervous(self: object, message: object) -> AsyncIterator[object]:
        while True:
            async with self._caller.stream(self._resource):  # type: ignore[attr-defined]
                yield message_of(self._device_lists.subscribe().value)  # type: ignore[attr-defined]
                await trio.sleep(5)

    monkeypatch.setattr(device_plugin.DevicePluginService, "list_and_watch", nervous)
    failure = play((), 0).failure
    assert failure is not None
    assert failure.check == "the daemon does not rest"


VM, OLDER, BY_UID = (
    Allocation(ResourceName("nvidia.com/H100"), DeviceId("0000:01:00.0"), pod)
    for pod in (Pod("default", "vm-1", ""), Pod("default", "older-1", ""), Pod("", "", "0b0f"))
)
SLOW = "inspections and scans take long"
OLDER_PLUGIN = "an older plugin has given a card away"


@pytest.mark.parametrize(
    ("causes", "owners", "happened", "for_nothing"),
    [
        ((Cause.UNREADABLE,), (), ["kubelet stops"], True),
        ((Cause.UNREADABLE,), (), ["inspections fail"], False),
        ((Cause.HELD_BY_OTHER,), (), ["an external process opens a card"], False),
        ((Cause.GONE,), (), ["unplug"], False),
        ((Cause.GONE, Cause.ALLOCATED), (VM,), ["unplug"], False),
        ((Cause.ALLOCATED,), (VM,), ["unplug"], True),
        ((Cause.ALLOCATED,), (OLDER,), [OLDER_PLUGIN], True),
        ((Cause.ALLOCATED,), (OLDER,), [OLDER_PLUGIN, "reads of the ledger fail"], False),
        ((Cause.ALLOCATED,), (BY_UID,), [OLDER_PLUGIN, "reads of the ledger fail"], False),
        ((Cause.ALLOCATED,), (VM,), [OLDER_PLUGIN, "reads of the ledger fail"], True),
        ((Cause.HELD_BY_OTHER,), (), [SWAPPED], False),
        ((Cause.GROUP_IN_USE,), (), [SWAPPED], True),
        ((Cause.SET_ASIDE,), (), ["unplug", "kubelet stops"], True),
        ((Cause.INSPECTION_LATE,), (), [SLOW], True),
        ((Cause.INSPECTION_LATE,), (), ["a successor starts"], True),
        ((Cause.INSPECTION_LATE,), (), [SLOW, "a successor starts"], False),
        ((Cause.USE_LATE,), (), [SLOW, "a successor starts"], True),
    ],
)
def test_a_refused_pod_needs_a_cause(
    causes: tuple[Cause, ...], owners: tuple[Allocation, ...], happened: list[str], for_nothing: bool
) -> None:
    refused = Refused(Refusal.FAILED_PRECONDITION, "any sentence", causes, owners)
    assert failed_for_nothing("any message of kubelet", refused, happened) is for_nothing


@pytest.mark.parametrize(
    ("owners", "happened", "by_older_id", "for_nothing"),
    [
        ((VM,), [OLDER_PLUGIN, "the node reboots"], True, False),
        ((VM,), [OLDER_PLUGIN, "the node reboots"], False, True),
        ((VM,), [OLDER_PLUGIN, "kubelet stops"], True, True),
        ((VM,), ["the node reboots"], True, True),
        ((), [OLDER_PLUGIN, "the node reboots"], True, True),
    ],
)
def test_a_card_that_another_pod_has_is_asked_for_by_a_groups_number_only_after_a_reboot(
    owners: tuple[Allocation, ...], happened: list[str], by_older_id: bool, for_nothing: bool
) -> None:
    refused = Refused(Refusal.FAILED_PRECONDITION, "any sentence", (Cause.ALLOCATED,), owners)
    failed = failed_for_nothing("any message of kubelet", refused, happened, by_older_id=by_older_id)
    assert failed is for_nothing


CRASHED = "0000:01:00.0: internal error: PlannedCrashError('{} crashes as planned'); please report it"


@pytest.mark.parametrize(
    ("crashed", "happened", "for_nothing"),
    [
        ("sysfs_inspector", ["the inspector crashes"], False),
        ("poll", ["the poller crashes"], False),
        ("pod_resources", ["the reader of the ledger crashes"], False),
        ("sysfs_inspector", ["unplug", "kubelet stops"], True),
        ("sysfs_inspector", ["the poller crashes"], True),
    ],
)
def test_a_planned_crash_is_a_cause_of_the_refusal_that_names_it(
    crashed: str, happened: list[str], for_nothing: bool
) -> None:
    reason = CRASHED.format(crashed)
    refused = Refused(Refusal.FAILED_PRECONDITION, reason, (Cause.SET_ASIDE,))
    assert failed_for_nothing("any message of kubelet", refused, happened) is for_nothing


def test_a_crash_excuses_no_refusal_that_does_not_name_it() -> None:
    refused = Refused(Refusal.FAILED_PRECONDITION, "internal error: KeyError(1)", (Cause.UNREADABLE,))
    assert failed_for_nothing("any message of kubelet", refused, ["the inspector crashes"])


@pytest.mark.parametrize(
    ("message", "happened", "for_nothing"),
    [
        ("code = Canceled desc = closing", [], True),
        ("code = Canceled desc = closing", ["a stream is lost"], False),
        ("something never seen before", ["unplug", "kubelet stops"], True),
        ("code = FailedPrecondition desc = the PCI function is gone", ["unplug"], True),
    ],
)
def test_a_pod_that_no_daemon_refused_needs_a_cause(
    message: str, happened: list[str], for_nothing: bool
) -> None:
    assert failed_for_nothing(message, None, happened) is for_nothing


def test_every_cause_is_a_kind_of_event() -> None:
    assert {kind for kinds in refusals._EVENTS.values() for kind in kinds} <= KINDS.keys()
    assert {kind for _, kinds in refusals._KUBELETS for kind in kinds} <= KINDS.keys()
    assert {refusals._OLDER, refusals._REBOOTS, *refusals.UNREAD, *refusals._CRASHES.values()} <= KINDS.keys()


def test_a_loop_in_which_no_time_passes_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(playing, "ROUNDS_MAX", 3000)
    failure = spoiled(lambda world: world.in_background(_spin)).failure
    assert failure is not None
    assert failure.check == "no time passes"
