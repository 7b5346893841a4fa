"""The fake kubelet: its counts as tables (as seen on a running kubelet 1.36), and the protocol with a small plugin.

The protocol tests run over real unix sockets; what takes minutes runs in memory on trio's mock clock.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path

import pytest
import trio
from grpclib import GRPCError, Status
from trio.testing import MockClock

from gpuactors.kubelet.pb.podresources.v1 import AllocatableResourcesRequest
from gpuactors.replay.counts import Counts
from gpuactors_simulation.kubelet.device_manager import (
    STOP_GRACE_S,
    AdmissionError,
    Allocated,
    DeviceManager,
    KubeletPanicError,
    ListedDevice,
    Phase,
)
from gpuactors_simulation.kubelet.fake import CHECKPOINT_FILE, open_fake_kubelet
from gpuactors_simulation.kubelet.transport import UnixTransport
from gpuactors_simulation.other_plugins import Bystander, OtherPlugin
from tests.simulation.kubelet.rig import GPU, WITHIN_S, Plugin, all_healthy, registered, rig

OTHER = "nvidia.com/AD102GL_L40S"


# --- the device manager -----------------------------------------------------------------------------------------


def listed(healthy: Iterable[str], unhealthy: Iterable[str] = ()) -> list[ListedDevice]:
    return [ListedDevice(d, True, (0,)) for d in healthy] + [ListedDevice(d, False) for d in unhealthy]


def ids(first: int, last: int) -> list[str]:
    return [f"gpu{n}" for n in range(first, last + 1)]


def manager_with(
    healthy: Iterable[str], unhealthy: Iterable[str] = (), *, pods: dict[str, int] | None = None
) -> DeviceManager:
    """A device manager with one resource and all pods running."""
    manager = DeviceManager(random.Random(1))
    manager.boot(0.0)
    manager.connected(GPU, 1, pre_start=False, preferred=False)
    manager.list_received(GPU, listed(healthy, unhealthy))
    for name, size in (pods or {}).items():
        admit(manager, name, size)
    return manager


def admit(manager: DeviceManager, name: str, size: int) -> tuple[str, ...]:
    manager.submit(name, {GPU: size}, 0.0)
    assert manager.place(0.0) is not None
    choice = manager.choose(name, GPU, size)
    assert choice is not None
    taken = manager.take(choice, ())
    manager.commit(choice, taken, Allocated({}, ()))
    manager.admitted(name)
    manager.started(name)
    return taken


def figures(manager: DeviceManager, at: float = 0.0) -> tuple[int, int, int, int]:
    f = manager.view(at).resources[GPU]
    return f.capacity, f.allocatable, f.allocated, f.free


ONE_GPU_EACH = {f"vm{n}": 1 for n in range(6)}


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        pytest.param(listed(ids(0, 7)), (8, 8, 6, 2), id="the six allocated stay Healthy"),
        pytest.param("allocated unhealthy", (8, 2, 6, -4), id="the six allocated turn Unhealthy"),
        pytest.param("free only", (2, 2, 6, -4), id="the six allocated are skipped"),
        pytest.param("one allocated gone", (7, 7, 6, 1), id="one vanishes while allocated"),
        pytest.param([], (0, 0, 6, -6), id="an empty list"),
    ],
)
def test_figures_of_eight_devices_six_of_them_allocated(
    devices: list[ListedDevice] | str, expected: tuple[int, int, int, int]
) -> None:
    manager = manager_with(ids(0, 7), pods=ONE_GPU_EACH)
    used = {row.id for row in manager.view(0).devices if row.pod}
    free = set(ids(0, 7)) - used
    if devices == "allocated unhealthy":
        devices = listed(sorted(free), sorted(used))
    elif devices == "free only":
        devices = listed(sorted(free))
    elif devices == "one allocated gone":
        devices = listed(sorted(free | used - {min(used)}))
    assert not isinstance(devices, str)
    manager.list_received(GPU, devices)
    assert figures(manager) == expected


def test_with_negative_free_a_pod_waits_although_two_devices_are_free_and_healthy() -> None:
    manager = manager_with(ids(0, 7), pods=ONE_GPU_EACH)
    used = sorted(row.id for row in manager.view(0).devices if row.pod)
    manager.list_received(GPU, listed(sorted(set(ids(0, 7)) - set(used)), used))
    pod = manager.submit("late", {GPU: 1}, 0.0)
    assert (pod.phase, pod.message) == (Phase.PENDING, f"0/1 nodes are available: 1 Insufficient {GPU}.")
    assert manager.place(0.0) is None
    manager.list_received(GPU, listed(ids(0, 7)))
    placed = manager.place(0.0)
    assert placed is not None
    assert placed.name == "late"


def test_a_stream_that_ends_makes_all_unhealthy_and_after_the_grace_there_is_nothing_but_the_name() -> None:
    manager = manager_with(ids(0, 3), pods={"vm": 1})
    manager.disconnected(GPU, 10.0)
    assert figures(manager, 10.0) == (4, 0, 1, -1)
    assert figures(manager, 10.0 + STOP_GRACE_S - 1) == (4, 0, 1, -1)
    assert figures(manager, 10.0 + STOP_GRACE_S) == (0, 0, 1, -1)
    manager.expire(10.0 + STOP_GRACE_S)
    assert manager.endpoint(GPU) is None
    manager.submit("other", {GPU: 1}, 10.0 + STOP_GRACE_S)
    with pytest.raises(AdmissionError, match=f"cannot allocate unregistered device {GPU}"):
        manager.choose("other", GPU, 1)


def test_a_restart_empties_the_lists_and_keeps_ledger_and_pods() -> None:
    manager = manager_with(ids(0, 3), pods={"vm": 2})
    before = manager.holding("vm", GPU)
    manager.halt()
    assert manager.submit("asked-meanwhile", {GPU: 1}, 5.0).message.endswith("kubelet is not running.")
    assert manager.boot(5.0, manager.checkpoint) == ()
    assert figures(manager, 5.0) == (0, 0, 2, -2)
    manager.connected(GPU, 2, pre_start=False, preferred=False)
    manager.list_received(GPU, listed(ids(0, 3)))
    assert figures(manager, 6.0) == (4, 4, 2, 2)
    assert manager.holding("vm", GPU) == before


@pytest.mark.parametrize(
    ("first_list", "message"),
    [
        pytest.param(None, "no healthy devices present; cannot allocate unhealthy devices", id="late plugin"),
        pytest.param("unhealthy", "previously allocated devices are no longer healthy", id="Unhealthy"),
        pytest.param("missing", "previously allocated devices are no longer healthy", id="missing"),
        pytest.param("healthy", None, id="Healthy"),
    ],
)
def test_after_a_restart_a_pod_that_does_not_run_needs_its_device_healthy(
    first_list: str | None, message: str | None
) -> None:
    manager = manager_with(ids(0, 1))
    (device,) = admit(manager, "vm", 1)
    manager.not_started("vm", "CreateContainerConfigError")
    other = "gpu1" if device == "gpu0" else "gpu0"
    assert manager.boot(5.0, manager.checkpoint) == ("vm",)
    manager.learn_pods()
    manager.connected(GPU, 2, pre_start=True, preferred=False)
    lists = {
        "unhealthy": listed([other], [device]),
        "missing": listed([other]),
        "healthy": listed(ids(0, 1)),
    }
    if first_list is not None:
        manager.list_received(GPU, lists[first_list])
    if message is None:
        assert manager.choose("vm", GPU, 1) is None
    else:
        with pytest.raises(AdmissionError, match=message):
            manager.choose("vm", GPU, 1)


def test_a_device_that_leaves_the_list_during_its_allocate_is_kubelets_crash() -> None:
    manager = manager_with(ids(0, 1))
    manager.submit("vm", {GPU: 1}, 0.0)
    manager.place(0.0)
    choice = manager.choose("vm", GPU, 1)
    assert choice is not None
    taken = manager.take(choice, ())
    manager.list_received(GPU, listed(set(ids(0, 1)) - set(taken)))
    with pytest.raises(KubeletPanicError, match="left the list while an Allocate"):
        manager.commit(choice, taken, Allocated({}, ()))


def test_devices_in_flight_are_given_to_no_other_pod_and_a_refusal_frees_them() -> None:
    manager = manager_with(ids(0, 1))
    for name in ("a", "b"):
        manager.submit(name, {GPU: 1}, 0.0)
        manager.place(0.0)
    first = manager.choose("a", GPU, 1)
    assert first is not None
    taken = manager.take(first, ())
    second = manager.choose("b", GPU, 1)
    assert second is not None
    assert not set(second.available) & set(taken)
    manager.roll_back()
    again = manager.choose("b", GPU, 1)
    assert again is not None
    assert set(again.available) == set(ids(0, 1))


def test_an_ended_pods_devices_come_back_at_the_next_allocation_and_the_file_names_it_until_then() -> None:
    manager = manager_with(ids(0, 0), pods={"first": 1})
    first = manager.view(0).pods["first"]
    manager.delete("first")
    assert figures(manager) == (1, 1, 0, 1)
    assert [listed for listed in manager.listing() if listed.devices] == []
    assert list(manager.checkpoint.entries) == [(first.uid, GPU)]
    assert admit(manager, "second", 1) == ("gpu0",)
    second = manager.view(0).pods["second"]
    assert list(manager.checkpoint.entries) == [(second.uid, GPU)]
    assert first.uid != second.uid


def test_the_preferred_answer_is_cut_to_what_was_offered() -> None:
    manager = manager_with(ids(0, 3), pods={"vm": 1})
    (used,) = (row.id for row in manager.view(0).devices if row.pod)
    manager.submit("two", {GPU: 2}, 0.0)
    manager.place(0.0)
    choice = manager.choose("two", GPU, 2)
    assert choice is not None
    wish = choice.available[-1]
    taken = manager.take(choice, [used, "made-up", wish])
    assert len(taken) == 2
    assert wish in taken
    assert used not in taken


def test_the_seed_orders_what_kubelet_has_in_no_order() -> None:
    def offered(seed: int) -> tuple[str, ...]:
        manager = DeviceManager(random.Random(seed))
        manager.boot(0.0)
        manager.connected(GPU, 1, pre_start=False, preferred=False)
        manager.list_received(GPU, listed(ids(0, 7)))
        manager.submit("vm", {GPU: 1}, 0.0)
        choice = manager.choose("vm", GPU, 1)
        assert choice is not None
        return choice.available

    assert offered(1) == offered(1)
    assert len({offered(seed) for seed in range(20)}) > 10


# --- registration and allocation -------------------------------------------------------------------------------------


@pytest.mark.trio
async def test_a_plugin_registers_and_pods_get_its_devices(tmp_path: Path) -> None:
    with trio.fail_after(WITHIN_S):
        plugin = Plugin(first=all_healthy(4))
        async with registered(plugin, directory=tmp_path) as r:
            pod = await r.kubelet.admit("vm-1", {GPU: 2})
            assert pod.phase is Phase.RUNNING
            await r.figures(4, 4, 2)
            holding = r.kubelet.view.holdings["vm-1", GPU]
            assert holding.devices == ("gpu0", "gpu1")
            assert holding.envs == {"GPUS": "gpu0,gpu1"}
            assert [call for call, _ in plugin.asked] == ["prefer", "allocate"]
            offered = plugin.asked[0][1]
            assert sorted(offered) == ["gpu0", "gpu1", "gpu2", "gpu3"]
            checkpoint = json.loads((r.directory / CHECKPOINT_FILE).read_text())
            assert checkpoint["Data"]["PodDeviceEntries"][0]["DeviceIDs"] == {"-1": ["gpu0", "gpu1"]}

            plugin.streams[0].send_nowait([("gpu0", "Healthy"), ("gpu9", "Unhealthy")])
            await r.figures(2, 1, 2)
            lost = [row for row in r.kubelet.view.devices if row.health == "not listed"]
            assert [(row.id, row.pod) for row in lost] == [("gpu1", "vm-1")]


@pytest.mark.trio
async def test_a_waiting_pod_runs_as_soon_as_there_is_room(tmp_path: Path) -> None:
    with trio.fail_after(WITHIN_S):
        plugin = Plugin(first=all_healthy(1))
        async with registered(plugin, directory=tmp_path) as r:
            assert (await r.kubelet.admit("vm-1", {GPU: 1})).phase is Phase.RUNNING
            waiting = await r.kubelet.admit("vm-2", {GPU: 1})
            assert (waiting.phase, waiting.message) == (
                Phase.PENDING,
                f"0/1 nodes are available: 1 Insufficient {GPU}.",
            )
            plugin.streams[0].send_nowait(all_healthy(2))
            await r.kubelet.until(lambda view: view.pods["vm-2"].phase is Phase.RUNNING)
            assert r.kubelet.view.holdings["vm-2", GPU].devices == ("gpu1",)


@pytest.mark.trio
async def test_a_stopped_kubelet_cannot_be_stopped_nor_a_running_one_started() -> None:
    with trio.fail_after(WITHIN_S):
        async with rig() as r:
            with pytest.raises(RuntimeError, match="runs already"):
                await r.kubelet.start()
            await r.kubelet.stop()
            with pytest.raises(RuntimeError, match="does not run"):
                await r.kubelet.stop()


@pytest.mark.trio
async def test_a_socket_path_that_is_too_long_is_named(tmp_path: Path) -> None:
    directory = tmp_path / ("d" * 100)
    async with open_fake_kubelet(UnixTransport(directory)) as kubelet:
        with pytest.raises(OSError, match="longer than the 107 bytes"):
            await kubelet.start()


# --- streams that end -------------------------------------------------------------------------------------------


@pytest.mark.trio
async def test_when_the_stream_ends_kubelet_closes_the_connection_and_forgets_after_five_minutes(
    autojump_clock: MockClock,
) -> None:
    plugin = Plugin(first=all_healthy(3))
    async with rig() as r, r.serving(plugin) as server:
        await r.register()
        await r.figures(3, 3)
        ended_at = trio.current_time()
        plugin.streams[0].close()
        await r.figures(3, 0)
        await server.wait_disconnected()
        assert GPU not in r.kubelet.view.connected
        refused = await r.kubelet.admit("vm", {GPU: 1})
        assert refused.phase is Phase.PENDING
        with trio.fail_after(STOP_GRACE_S + 1):
            await r.kubelet.until(lambda view: view.resources[GPU] == Counts(0, 0, 0))
        assert trio.current_time() - ended_at == pytest.approx(STOP_GRACE_S)
        assert len(plugin.streams) == 1  # it never dialled again


@pytest.mark.trio
async def test_registering_again_within_the_grace_restores_everything(autojump_clock: MockClock) -> None:
    plugin = Plugin(first=all_healthy(3))
    async with registered(plugin) as r:
        plugin.streams[0].close()
        await r.figures(3, 0)
        await trio.sleep(STOP_GRACE_S - 10)
        await r.register()
        await r.figures(3, 3)
        await trio.sleep(STOP_GRACE_S * 2)
        await r.figures(3, 3)


@pytest.mark.trio
async def test_the_re_registration_race_cuts_off_the_new_plugin(autojump_clock: MockClock) -> None:
    """Register while the old stream is open: both count; when the old one ends, kubelet disconnects the NEW one."""
    old, new = Plugin(first=all_healthy(2)), Plugin(first=all_healthy(3))
    async with (
        rig() as r,
        r.serving(old, "old.sock") as old_server,
        r.serving(new, "new.sock") as new_server,
    ):
        await r.register("old.sock")
        await r.figures(2, 2)
        await r.register("new.sock")
        await r.figures(3, 3)
        old.streams[0].send_nowait(all_healthy(1))
        await r.figures(1, 1)  # the old stream's lists count as well

        old.streams[0].close()
        await new_server.wait_disconnected()
        await r.figures(1, 0)
        assert old_server.connections == 1  # the old connection is never closed

        await r.register("new.sock")
        await r.figures(3, 3)


@pytest.mark.trio
async def test_ending_the_old_stream_before_registering_avoids_the_race(autojump_clock: MockClock) -> None:
    old, new = Plugin(first=all_healthy(2)), Plugin(first=all_healthy(3))
    async with rig() as r, r.serving(old, "old.sock") as old_server, r.serving(new, "new.sock"):
        await r.register("old.sock")
        await r.figures(2, 2)
        old.streams[0].close()
        await old_server.wait_disconnected()
        await r.register("new.sock")
        await r.figures(3, 3)
        await trio.sleep(60)
        await r.figures(3, 3)


@pytest.mark.trio
async def test_a_second_plugin_takes_the_resource_and_the_first_is_told_nothing(
    autojump_clock: MockClock,
) -> None:
    """Seen on kubelet 1.35.3: each list of either replaces the one before, Allocate goes to the newer."""
    one, two = Plugin(first=all_healthy(2)), Plugin(first=all_healthy(3))
    async with rig() as r, r.serving(one, "1.sock") as first, r.serving(two, "2.sock"):
        await r.register("1.sock")
        await r.figures(2, 2)
        await r.register("2.sock")
        await r.figures(3, 3)
        one.streams[0].send_nowait(all_healthy(1))
        await r.figures(1, 1)
        await r.kubelet.admit("vm", {GPU: 1})
        assert [kind for kind, _ in one.asked] == []
        assert ("allocate", ["gpu0"]) in two.asked
        await trio.sleep(STOP_GRACE_S)
        assert first.connections == 1


@pytest.mark.trio
async def test_when_the_newer_plugin_goes_a_frame_of_the_older_brings_the_list_and_not_the_endpoint(
    autojump_clock: MockClock,
) -> None:
    one, two = Plugin(first=all_healthy(2)), Plugin(first=all_healthy(3))
    async with rig() as r, r.serving(one, "1.sock"), r.serving(two, "2.sock"):
        await r.register("1.sock")
        await r.register("2.sock")
        await r.figures(3, 3)
        two.streams[0].close()
        await r.figures(3, 0)
        await trio.sleep(60)
        async with r.pod_resources() as stub:
            answer = await stub.get_allocatable_resources(AllocatableResourcesRequest())
        assert answer.devices == []
        one.streams[0].send_nowait(all_healthy(2))
        await r.figures(2, 2)
        pod = await r.kubelet.admit("vm", {GPU: 1})
        assert (pod.phase, one.asked) == (Phase.FAILED, [])
        one.streams[0].close()
        await r.register("1.sock")
        await r.figures(2, 2)
        assert (await r.kubelet.admit("vm-2", {GPU: 1})).phase is Phase.RUNNING


@pytest.mark.trio
async def test_the_first_plugin_that_registers_again_has_the_list_and_the_endpoint(
    autojump_clock: MockClock,
) -> None:
    one, two = Plugin(first=all_healthy(2)), Plugin(first=all_healthy(3))
    async with rig() as r, r.serving(one, "1.sock"), r.serving(two, "2.sock") as second:
        await r.register("1.sock")
        await r.register("2.sock")
        await r.figures(3, 3)
        await r.register("1.sock")
        await r.figures(2, 2)
        await r.kubelet.admit("vm", {GPU: 1})
        assert "allocate" in [kind for kind, _ in one.asked]
        await trio.sleep(60)
        assert second.connections == 1
        assert two.asked == []


@pytest.mark.trio
async def test_the_shipped_other_plugin_takes_the_resource_and_a_stubborn_one_takes_it_again(
    autojump_clock: MockClock,
) -> None:
    ours = Plugin(first=all_healthy(2))
    async with rig() as r, r.serving(ours), trio.open_nursery() as nursery:
        await r.register()
        await r.figures(2, 2)
        other = OtherPlugin(r.transport, GPU, ["x", "y", "z"], stubborn=True)
        await nursery.start(other.run)
        await r.figures(3, 3)
        await r.kubelet.admit("vm", {GPU: 1})
        assert len(other.allocated) == 1
        ours.streams[0].close()  # its end disconnects the plugin that has the name
        await r.kubelet.until(lambda view: view.registrations == 3)
        await r.figures(3, 3, 1)
        await trio.sleep(1)
        assert len(other.registrations) == 2
        other.leave()
        await r.figures(3, 0, 1)


@pytest.mark.trio
async def test_the_shipped_bystander_dials_first_when_register_takes_its_time(
    autojump_clock: MockClock,
) -> None:
    plugin = Plugin(first=all_healthy(2))
    async with rig() as r, trio.open_nursery() as nursery:
        watcher = Bystander(r.transport, "p.sock")
        await r.kubelet.stop()
        r.kubelet.slow_registers_s = 0.5
        await r.kubelet.start()
        async with r.serving(plugin):
            nursery.start_soon(r.register)
            await nursery.start(watcher.run)
            assert r.kubelet.view.registrations == 0
            await r.figures(2, 2)
            assert len(plugin.streams) == 2
        nursery.cancel_scope.cancel()


@pytest.mark.trio
@pytest.mark.parametrize("why", ["no listener at the endpoint", "options fail"])
async def test_a_failed_register_makes_kubelet_forget_the_running_plugin(
    why: str, autojump_clock: MockClock
) -> None:
    """The old stream goes on, but its end is not noticed: the devices stay Healthy without a plugin."""
    plugin = Plugin(first=all_healthy(2))
    broken = Plugin(options_error=GRPCError(Status.INTERNAL, "no options today"))
    async with rig() as r, r.serving(plugin, "good.sock"), r.serving(broken, "broken.sock"):
        await r.register("good.sock")
        await r.figures(2, 2)
        if why == "options fail":
            with pytest.raises(GRPCError, match="code = Internal desc = no options today") as refused:
                await r.register("broken.sock")
        else:
            called_at = trio.current_time()
            with pytest.raises(GRPCError, match="failed to dial device plugin") as refused:
                await r.register("nowhere.sock")
            assert trio.current_time() - called_at == pytest.approx(10.0)
        assert refused.value.status is Status.UNKNOWN

        plugin.streams[0].send_nowait(all_healthy(1))
        await r.figures(1, 1)
        plugin.streams[0].close()
        await trio.sleep(STOP_GRACE_S * 2)
        await r.figures(1, 1)

        await r.register("good.sock")  # heals it
        await r.figures(2, 2)
        plugin.streams[1].close()
        await r.figures(2, 0)


@pytest.mark.trio
async def test_a_caller_who_gives_up_on_register_makes_kubelet_forget_the_running_plugin(
    autojump_clock: MockClock,
) -> None:
    plugin = Plugin(first=all_healthy(2))
    async with registered(plugin, "good.sock") as r:
        with trio.move_on_after(1):
            await r.register("nowhere.sock")
        await trio.sleep(20)
        plugin.streams[0].close()
        await trio.sleep(STOP_GRACE_S * 2)
        await r.figures(2, 2)


@pytest.mark.trio
async def test_an_allocate_in_flight_when_the_stream_ends_fails_its_pod(autojump_clock: MockClock) -> None:
    plugin = Plugin(first=all_healthy(1), hold_allocate=trio.Event())
    async with registered(plugin) as r:
        r.kubelet.submit("vm", {GPU: 1})
        await plugin.allocating.wait()
        plugin.streams[0].close()
        pod = await r.kubelet.settled("vm")
        assert pod.phase is Phase.FAILED
        assert "code = Canceled desc = grpc: the client connection is closing" in pod.message


@pytest.mark.trio
async def test_kubelet_crashes_when_a_device_leaves_the_list_during_its_allocate(
    autojump_clock: MockClock,
) -> None:
    plugin = Plugin(first=all_healthy(2), hold_allocate=trio.Event())
    async with registered(plugin) as r:
        r.kubelet.submit("vm", {GPU: 1})
        await plugin.allocating.wait()
        plugin.streams[0].send_nowait([("gpu1", "Healthy")])
        await r.figures(1, 1, 1)
        assert plugin.hold_allocate is not None
        plugin.hold_allocate.set()
        await r.kubelet.until(lambda view: not view.running)
        (panic,) = r.kubelet.panics
        assert "gpu0" in panic
        # It is started again, and then the pod is admitted anew.
        await r.kubelet.start()
        async with r.serving(plugin, "again.sock"):
            await r.register("again.sock")
            await r.kubelet.until(lambda view: view.pods["vm"].phase is Phase.RUNNING)


# --- the start of a container -----------------------------------------------------------------------------------


@pytest.mark.trio
async def test_pre_start_is_tried_again_at_the_times_that_were_seen(autojump_clock: MockClock) -> None:
    busy = [GRPCError(Status.UNAVAILABLE, f"still held ({n})") for n in range(3)]
    plugin = Plugin(first=all_healthy(1), pre_start_required=True, pre_start_errors=busy)
    async with registered(plugin) as r:
        pod = await r.kubelet.admit("vm", {GPU: 1})
        first = trio.current_time()
        assert pod.phase is Phase.STARTING
        assert pod.message == (
            "CreateContainerConfigError: device plugin PreStartContainer rpc failed with err: "
            "rpc error: code = Unavailable desc = still held (0)"
        )
        await r.kubelet.until(lambda view: view.pods["vm"].phase is Phase.RUNNING)
        assert trio.current_time() - first == pytest.approx(27.0)
        assert [devices for call, devices in plugin.asked if call == "pre_start"] == [["gpu0"]] * 4


@pytest.mark.trio
async def test_a_pod_that_is_deleted_while_it_waits_for_its_start_leaves_nothing(
    autojump_clock: MockClock,
) -> None:
    busy = [GRPCError(Status.UNAVAILABLE, "still held")]
    plugin = Plugin(first=all_healthy(1), pre_start_required=True, pre_start_errors=busy)
    async with registered(plugin) as r:
        await r.kubelet.admit("vm", {GPU: 1})
        r.kubelet.delete("vm")
        await r.figures(1, 1, 0)
        await trio.sleep(60)
        assert (await r.kubelet.admit("next", {GPU: 1})).phase is Phase.RUNNING


@pytest.mark.trio
async def test_two_resources_do_not_touch_each_other(autojump_clock: MockClock) -> None:
    one, two = Plugin(first=all_healthy(2)), Plugin(first=[("l40s", "Healthy")])
    async with rig() as r, r.serving(one, "1.sock"), r.serving(two, "2.sock"):
        await r.register("1.sock", GPU)
        await r.register("2.sock", OTHER)
        await r.figures(2, 2)
        await r.figures(1, 1, resource=OTHER)
        pod = await r.kubelet.admit("both", {GPU: 1, OTHER: 1})
        assert pod.phase is Phase.RUNNING
        one.streams[0].close()
        await r.figures(2, 0, 1)
        await r.figures(1, 1, 1, resource=OTHER)


def test_a_device_that_is_listed_twice_is_healthy_and_not_and_counts_twice_until_the_stream_ends() -> None:
    manager = DeviceManager(random.Random(1))
    manager.boot(0.0)
    manager.connected(GPU, 1, pre_start=False, preferred=False)
    manager.list_received(GPU, [ListedDevice("a", True), ListedDevice("c", True), ListedDevice("c", False)])
    assert (manager.view(0.0).resources[GPU].capacity, manager.view(0.0).resources[GPU].allocatable) == (3, 2)
    assert [device.id for _, device in manager.allocatable()] == ["a", "c"]
    manager.disconnected(GPU, 0.0)
    assert (manager.view(0.0).resources[GPU].capacity, manager.view(0.0).resources[GPU].allocatable) == (2, 0)


def test_a_device_with_an_empty_topology_can_be_had_and_is_not_among_the_allocatable() -> None:
    manager = DeviceManager(random.Random(1))
    manager.boot(0.0)
    manager.connected(GPU, 1, pre_start=False, preferred=False)
    manager.list_received(GPU, [ListedDevice("a", True), ListedDevice("e", True, empty_topology=True)])
    assert manager.view(0.0).resources[GPU].allocatable == 2
    assert [device.id for _, device in manager.allocatable()] == ["a"]
