"""The fake kubelet's DRA plugins: found, asked, connected, chosen, wiped and listened to.

The times are those that a kubelet 1.35.3 was seen to take. All in memory, on trio's mock clock; a plugin that does
what ours never does is written here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import trio
from grpclib.const import Handler
from trio.testing import MockClock

from gpuactors import limits
from gpuactors.core.values.claim import DeviceHealth, DraHealth
from gpuactors.grpc_trio import Server
from gpuactors.kubelet.dra.health import HEALTH_AGAIN_S
from gpuactors.kubelet.dra.service import PACKAGES, in_package
from gpuactors.kubelet.pb.dra_v1.k8s.io.kubelet.pkg.apis.dra import v1
from gpuactors.kubelet.pb.pluginregistration import pluginregistration as registration
from gpuactors.ports.claims import PluginStatus
from gpuactors_simulation.kubelet.dra.values import KUBELET_1_34, KUBELET_1_36, KUBELET_1_37, Release
from gpuactors_simulation.kubelet.values import Phase
from tests.simulation.kubelet.dra.rig import DRIVER, WITHIN_S, Core, Rig, registered, rig

SEEDS = range(1, 6)
ENDPOINT = "/plugins/odd/dra.sock"


@dataclass
class Odd(registration.RegistrationBase):
    """A plugin that answers as a test says."""

    versions: tuple[str, ...] = ("v1.DRAPlugin",)
    type: str = "DRAPlugin"
    endpoint: str = ENDPOINT
    get_info_s: list[float] = field(default_factory=list)
    """How long its next answers take."""
    asked_at: list[float] = field(default_factory=list)
    told: list[PluginStatus] = field(default_factory=list)

    async def get_info(self, message: registration.InfoRequest) -> registration.PluginInfo:
        self.asked_at.append(trio.current_time())
        if self.get_info_s:
            await trio.sleep(self.get_info_s.pop(0))
        return registration.PluginInfo(
            type=self.type, name=DRIVER, endpoint=self.endpoint, supported_versions=list(self.versions)
        )

    async def notify_registration_status(
        self, message: registration.RegistrationStatus
    ) -> registration.RegistrationStatusResponse:
        self.told.append(PluginStatus(message.plugin_registered, message.error))
        return registration.RegistrationStatusResponse()


class Hangs(v1.DraPluginBase):
    """Answers no prepare, and each unprepare by what a test has put there."""

    def __init__(self, answers: dict[str, str] | None = None) -> None:
        self.answers = answers

    async def node_prepare_resources(
        self, message: v1.NodePrepareResourcesRequest
    ) -> v1.NodePrepareResourcesResponse:
        if self.answers is None:
            await trio.sleep_forever()
        return v1.NodePrepareResourcesResponse(
            claims={
                uid: v1.NodePrepareResourceResponse(error=error)
                for uid, error in (self.answers or {}).items()
            }
        )


class Old(v1.DraPluginBase):
    """Knows v1beta1 only."""

    def __mapping__(self) -> dict[str, Handler]:
        return {in_package(PACKAGES[1], path): handler for path, handler in super().__mapping__().items()}

    async def node_prepare_resources(
        self, message: v1.NodePrepareResourcesRequest
    ) -> v1.NodePrepareResourcesResponse:
        device = v1.Device(device_name="old")
        return v1.NodePrepareResourcesResponse(
            claims={c.uid: v1.NodePrepareResourceResponse(devices=[device]) for c in message.claims}
        )


@asynccontextmanager
async def odd(
    r: Rig,
    plugin: Odd,
    api: v1.DraPluginBase | None = None,
    name: str = "odd-reg.sock",
) -> AsyncIterator[trio.Event]:
    """Serves both sockets; that of the registration is removed when the event is set."""
    gone = trio.Event()

    async def remove(listener: trio.abc.Listener[trio.abc.Stream]) -> None:
        await gone.wait()
        await listener.aclose()

    async with (
        trio.open_nursery() as nursery,
        r.transport.listen_at(ENDPOINT[1:]) as endpoint,
        r.transport.listen_at(f"plugins_registry/{name}") as registry,
    ):
        await nursery.start(Server([api or Hangs()], drain_s=0.1).serve, endpoint)
        await nursery.start(Server([plugin], drain_s=0.1).serve, registry)
        nursery.start_soon(remove, registry)
        yield gone
        nursery.cancel_scope.cancel()


async def until_told(plugin: Odd, count: int = 1) -> None:
    with trio.fail_after(WITHIN_S):
        while len(plugin.told) < count:  # noqa: ASYNC110 the mock clock jumps
            await trio.sleep(0.05)


# --- registration -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
async def test_sockets_that_appear_are_registered_within_a_second(
    seed: int, autojump_clock: MockClock
) -> None:
    async with rig(seed=seed) as r:
        await trio.sleep(10)
        began = trio.current_time()
        async with r.plugin(Core()) as served:
            await r.registered(served.path)
            assert 0.15 <= trio.current_time() - began <= 0.8
            await trio.sleep(0.1)
            assert served.told == [PluginStatus(True)]
            (instance,) = r.kubelet.view.dra.instances
            assert (instance.driver, instance.version) == (DRIVER, "v1.DRAPlugin")


async def test_a_get_info_of_1_5_s_is_asked_again_after_17_6_and_50_8_s(autojump_clock: MockClock) -> None:
    plugin = Odd(get_info_s=[1.5, 1.5])
    async with rig() as r, odd(r, plugin):
        await until_told(plugin)
        assert plugin.told == [PluginStatus(True)]
        first, second, third = plugin.asked_at
        assert second - first == pytest.approx(17.6, abs=1.1)
        assert third - first == pytest.approx(50.8, abs=2.2)
        assert len(r.kubelet.dra_errors) == 2


async def test_only_v1beta1_registers_and_is_called(autojump_clock: MockClock) -> None:
    plugin = Odd(versions=("v1beta1.DRAPlugin",))
    async with rig() as r, odd(r, plugin, Old()):
        await r.registered(ENDPOINT)
        await r.runs_with_claim("vm")
        assert r.kubelet.view.dra.instances[0].version == "v1beta1.DRAPlugin"


@pytest.mark.parametrize(
    ("plugin", "words"),
    [
        (Odd(versions=("v7.DRAPlugin",)), "none of services supported by the plugin"),
        (Odd(versions=()), "empty list of supported gRPC services"),
        (
            Odd(type="Magic"),
            "RegisterPlugin error -- no handler registered for plugin type: Magic at socket /",
        ),
    ],
)
async def test_what_kubelet_does_not_take_is_told_so(
    plugin: Odd, words: str, autojump_clock: MockClock
) -> None:
    async with rig() as r, odd(r, plugin):
        await until_told(plugin)
        assert not plugin.told[0].registered
        assert words in plugin.told[0].error
        assert not r.kubelet.view.dra.instances


async def test_without_an_endpoint_the_socket_of_the_registration_counts(autojump_clock: MockClock) -> None:
    plugin = Odd(endpoint="")
    async with rig() as r, odd(r, plugin):
        await until_told(plugin)
        assert plugin.told == [PluginStatus(True)]
        assert [i.endpoint for i in r.kubelet.view.dra.instances] == ["/plugins_registry/odd-reg.sock"]


async def test_a_plugin_is_connected_when_it_is_told_that_it_is_registered(autojump_clock: MockClock) -> None:
    plugin = Odd()
    async with rig() as r, odd(r, plugin):
        await until_told(plugin)
        assert [i.connected for i in r.kubelet.view.dra.instances] == [True]


async def test_two_instances_at_one_endpoint_are_refused(autojump_clock: MockClock) -> None:
    async with rig() as r:
        first, second = Odd(), Odd()
        async with odd(r, first):
            await until_told(first)
            async with (
                trio.open_nursery() as nursery,
                r.transport.listen_at("plugins_registry/second-reg.sock") as registry,
            ):
                await nursery.start(Server([second], drain_s=0.1).serve, registry)
                await until_told(second)
                assert f"endpoint {ENDPOINT} already registered" in second.told[0].error
                nursery.cancel_scope.cancel()


async def test_names_that_begin_with_a_dot_are_not_asked(autojump_clock: MockClock) -> None:
    plugin = Odd()
    async with rig() as r, odd(r, plugin, name=".odd-reg.sock"):
        await trio.sleep(100)
        assert not plugin.asked_at
        assert not r.kubelet.dra_errors


@pytest.mark.parametrize("seed", SEEDS)
async def test_a_restarted_kubelet_finds_the_plugin_by_itself_within_2_s(
    seed: int, autojump_clock: MockClock
) -> None:
    async with registered(seed=seed) as (r, plugin):
        await r.kubelet.stop()
        await r.kubelet.start()
        began = trio.current_time()
        await r.registered(plugin.path)
        assert trio.current_time() - began <= 2.0
        await trio.sleep(0.1)
        assert plugin.told == [PluginStatus(True), PluginStatus(True)]


# --- several instances ------------------------------------------------------------------------------------------


async def test_the_last_registered_instance_is_used_and_the_older_one_when_it_is_gone(
    autojump_clock: MockClock,
) -> None:
    """One may get the unprepare of the other's prepare."""
    old, new = Core(), Core()
    async with rig() as r, r.plugin(old, "old") as first:
        await r.registered(first.path)
        async with r.plugin(new, "new") as second:
            await r.registered(first.path, second.path)
            await r.runs_with_claim("vm")
            assert (old.order, new.order) == ([], [("prepare", "uid-a")])
        await r.registered(first.path)
        r.kubelet.delete("vm")
        await r.gone("vm")
        assert old.order == [("unprepare", "uid-a")]
        assert not [driver for _, driver in r.node.wiped if driver], (
            "the driver was never without an instance"
        )


async def test_one_that_was_killed_is_passed_over_though_its_sockets_files_are_there(
    autojump_clock: MockClock,
) -> None:
    old, new = Core(), Core()
    async with rig() as r, r.plugin(old, "old") as first:
        await r.registered(first.path)
        plugin = Odd()
        async with odd(r, plugin, Hangs()):
            await r.registered(first.path, ENDPOINT)
            r.transport.kill("plugin")
            await r.registered(first.path)
            await r.runs_with_claim("vm")
            assert old.order == [("prepare", "uid-a")]
            assert not new.order


async def test_after_a_restart_the_order_of_two_instances_is_by_chance(autojump_clock: MockClock) -> None:
    orders = set()
    for seed in range(8):
        async with rig(seed=seed, start=False) as r, r.plugin(Core(), "x") as x, r.plugin(Core(), "y") as y:
            await r.kubelet.start()
            with trio.fail_after(WITHIN_S):
                view = await r.kubelet.until(lambda view: sum(i.connected for i in view.dra.instances) == 2)
            orders.add(tuple(i.endpoint for i in view.dra.instances))
            assert orders <= {(x.path, y.path), (y.path, x.path)}
    assert len(orders) == 2


# --- slices -----------------------------------------------------------------------------------------------------


async def test_a_removed_registration_deletes_the_drivers_slices_after_30_s(
    autojump_clock: MockClock,
) -> None:
    async with registered() as (r, plugin):
        r.node.wiped.clear()
        began = trio.current_time()
        await plugin.endpoint.withdraw(limits.DRAIN_S)
        await trio.sleep(100)
        ((at, driver),) = r.node.wiped
        assert driver == DRIVER
        assert at - began == pytest.approx(30.4, abs=0.5)


async def test_a_gap_of_less_than_30_s_is_unseen(autojump_clock: MockClock) -> None:
    async with rig() as r:
        for _ in range(3):
            async with r.plugin(Core()) as served:
                await r.registered(served.path)
            await trio.sleep(25)
        await r.kubelet.stop()
        assert [driver for _, driver in r.node.wiped] == [None]


async def test_a_connection_that_is_lost_and_comes_back_wipes_nothing(autojump_clock: MockClock) -> None:
    async with registered() as (r, plugin):
        r.transport.cut(plugin.path[1:])
        await r.registered(plugin.path)
        await trio.sleep(100)
        assert [driver for _, driver in r.node.wiped] == [None]


async def test_kubelets_start_deletes_the_nodes_slices_and_waits_for_the_api_server(
    autojump_clock: MockClock,
) -> None:
    """The deletion comes in the background, with a backoff: minutes after the start."""
    async with rig(start=False) as r:
        r.node.api_is_away = True
        await r.kubelet.start()
        await trio.sleep(100)
        r.node.api_is_away = False
        began = trio.current_time()
        await trio.sleep(100)
        ((at, driver),) = r.node.wiped
        assert driver is None
        assert at - began == pytest.approx(27)  # 1 + 2 + … + 64 s


# --- calls ------------------------------------------------------------------------------------------------------


async def test_a_prepare_that_hangs_is_cancelled_at_45_s(autojump_clock: MockClock) -> None:
    async with rig() as r, odd(r, Odd()):
        await r.registered(ENDPOINT)
        r.submit("vm")
        message = await r.message("vm", "FailedPrepare")
        assert message.endswith(
            "NodePrepareResources: rpc error: code = DeadlineExceeded desc = context deadline exceeded"
        )
        (call,) = r.kubelet.dra_calls
        assert call.ended_at - call.began_at == pytest.approx(45.0)
        _, again = await r.calls(2)
        assert 60 <= again.began_at - call.ended_at <= 90


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({}, "NodePrepareResources skipped 1 ResourceClaims"),
        ({"uid-a": "", "uid-z": ""}, "returned result for unknown claim UID uid-z"),
        ({"uid-z": ""}, "returned result for unknown claim UID uid-z"),
        ({"uid-a": "no"}, "NodePrepareResources failed for ResourceClaim a: no"),
    ],
)
async def test_an_answer_with_too_few_or_too_many_entries_fails_the_pod(
    answers: dict[str, str], words: str, autojump_clock: MockClock
) -> None:
    async with rig() as r, odd(r, Odd(), Hangs(answers)):
        await r.registered(ENDPOINT)
        r.submit("vm")
        await r.message("vm", words)


async def test_the_end_of_a_registration_ends_the_calls_in_flight(autojump_clock: MockClock) -> None:
    """Kubelet closes the connection when it deregisters the plugin (cm/dra/plugin, DRAPluginManager.remove)."""
    async with rig() as r, odd(r, Odd()) as gone:
        await r.registered(ENDPOINT)
        r.submit("vm")
        await trio.sleep(1)
        gone.set()
        await r.message("vm", "code = Canceled desc = grpc: the client connection is closing")


async def test_a_plugin_that_ends_lets_a_call_in_flight_finish_first(autojump_clock: MockClock) -> None:
    """Else the pod would wait for more than a minute."""
    async with registered(Core(prepare_s=1.5)) as (r, plugin):
        r.submit("vm")
        await trio.sleep(0.5)
        assert plugin.core.calls
        began = trio.current_time()
        await plugin.endpoint.withdraw(limits.DRAIN_S)
        assert trio.current_time() - began < limits.DRAIN_S + limits.DEREGISTERED_S
        assert not any(i.connected for i in r.kubelet.view.dra.instances), "it is waited for"
        assert r.kubelet.view.pods["vm"].phase is Phase.RUNNING


# --- health -----------------------------------------------------------------------------------------------------

BAD = DeviceHealth("node-1", "gpu", DraHealth.UNHEALTHY, "held by process 7")


@pytest.mark.parametrize("release", [KUBELET_1_36, KUBELET_1_37], ids=["1.36", "1.37"])
async def test_kubelet_has_the_health_of_each_device_until_the_stream_ends(
    release: Release, autojump_clock: MockClock
) -> None:
    async with registered(release=release) as (r, plugin):
        began = trio.current_time()
        plugin.health.set((BAD,))
        with trio.fail_after(WITHIN_S):
            view = await r.kubelet.until(lambda view: bool(view.dra.health))
        assert trio.current_time() == began, "at once"
        row = view.dra.health[DRIVER, "node-1", "gpu"]
        assert (row.health, row.message, row.timeout_s) == (2, BAD.message, 60)
        await trio.sleep(HEALTH_AGAIN_S * 10)
        again = r.kubelet.view.dra.health[DRIVER, "node-1", "gpu"]
        assert trio.current_time() - again.at <= HEALTH_AGAIN_S, "and again"
        assert not r.kubelet.dra_errors
        await plugin.endpoint.close()
        await r.registered()
        assert not r.kubelet.view.dra.health


async def test_1_36_opens_the_stream_to_a_plugin_that_does_not_list_it_and_logs_each_5_s(
    autojump_clock: MockClock,
) -> None:
    """Kubernetes issues 141855, 141856."""
    for release, errors in ((KUBELET_1_36, 20), (KUBELET_1_37, 0), (KUBELET_1_34, 0)):
        async with rig(release=release) as r, odd(r, Odd()):
            await r.registered(ENDPOINT)
            await trio.sleep(99)
            assert len(r.kubelet.dra_errors) == errors
