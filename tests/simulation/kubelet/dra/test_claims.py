"""The fake kubelet's claims: when prepare and unprepare come, in which order, and what a restart leaves.

The times are those that a kubelet 1.35.3 was seen to take. All in memory, on trio's mock clock.
"""

from __future__ import annotations

import itertools

import pytest
import trio
from trio.testing import MockClock

from gpuactors.grpc_trio import open_channel
from gpuactors.kubelet.pb.podresources import v1 as pod_resources
from gpuactors_simulation.kubelet.dra.values import KUBELET_1_34, KUBELET_1_36, KUBELET_1_37, Release
from gpuactors_simulation.kubelet.transport import POD_RESOURCES_SOCKET
from gpuactors_simulation.kubelet.values import Phase
from tests.simulation.kubelet.dra.rig import DRIVER, Core, Rig, registered

SEEDS = range(1, 6)
KILL_S = 1.3
"""A container that is ended with a grace of 1 s."""


def between(times: list[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(times)]


# --- prepare ----------------------------------------------------------------------------------------------------


async def test_a_pods_claims_are_prepared_in_one_call_before_it_runs(autojump_clock: MockClock) -> None:
    async with registered() as (r, plugin):
        r.node.add("a", "uid-a")
        r.node.add("b", "uid-b")
        began = trio.current_time()
        r.kubelet.submit("vm", {}, uses=("a", "b"))
        assert await r.runs("vm") - began <= 0.11
        (call,) = r.kubelet.dra_calls
        assert (call.call, call.driver, call.endpoint, call.error) == ("prepare", DRIVER, plugin.path, "")
        assert set(call.claims) == {"uid-a", "uid-b"}
        assert all(claim.prepared for claim in r.kubelet.view.dra.claims)


@pytest.mark.parametrize("seed", SEEDS)
async def test_a_refused_prepare_is_tried_again_after_60_to_90_s(
    seed: int, autojump_clock: MockClock
) -> None:
    core = Core(prepare_errors=["another claim has it"] * 3)
    async with registered(core, seed=seed) as (r, _):
        r.submit("vm")
        assert await r.message("vm", "FailedPrepare") == (
            "FailedPrepareDynamicResources: Failed to prepare dynamic resources: prepare dynamic resources: "
            "NodePrepareResources failed for ResourceClaim a: another claim has it"
        )
        await r.runs("vm")
        waits = between(core.times("prepare"))
        assert len(waits) == 3
        assert all(60 <= wait <= 90 for wait in waits)


async def test_a_core_that_hangs_is_answered_for_before_kubelets_45_s(autojump_clock: MockClock) -> None:
    """So that the user sees a reason; kubelet's own is only DeadlineExceeded."""
    async with registered(Core(prepare_s=100)) as (r, plugin):
        r.submit("vm")
        message = await r.message("vm", "claim default/a was not answered within 40 s")
        assert "DeadlineExceeded" not in message
        plugin.core.prepare_s = 0
        began = trio.current_time()
        assert 60 <= await r.runs("vm") - began <= 90.2


async def test_a_claim_that_is_gone_or_not_allocated_holds_up_its_pod(autojump_clock: MockClock) -> None:
    async with registered() as (r, plugin):
        r.kubelet.submit("vm", {}, uses=("a",))
        await r.message("vm", 'fetch ResourceClaim a: resourceclaims.resource.k8s.io "a" not found')
        r.node.api_is_away = True
        await r.message("vm", "connection refused")
        r.node.api_is_away = False
        r.node.add("a", "uid-a")
        await r.runs("vm")
        assert plugin.core.order == [("prepare", "uid-a")]


async def test_a_pod_waits_for_a_driver_that_is_not_registered(autojump_clock: MockClock) -> None:
    async with registered() as (r, _):
        r.node.add("a", "uid-a", "tpu.example")
        r.kubelet.submit("vm", {}, uses=("a",))
        await r.message("vm", "DRA driver tpu.example is not registered")
        async with r.plugin(Core(), driver="tpu.example"):
            await r.runs("vm")


async def test_a_claim_of_two_drivers_is_prepared_by_both(autojump_clock: MockClock) -> None:
    async with registered() as (r, plugin), r.plugin(Core(), driver="nic.example") as other:
        r.node.add("a", "uid-a", DRIVER, "nic.example")
        await r.registered(plugin.path, other.path)
        r.kubelet.submit("vm", {}, uses=("a",))
        await r.runs("vm")
        (claim,) = r.kubelet.view.dra.claims
        assert {device.driver for device in claim.devices} == {DRIVER, "nic.example"}
        r.kubelet.delete("vm")
        await r.gone("vm")
        for core in (plugin.core, other.core):
            assert core.order == [("prepare", "uid-a"), ("unprepare", "uid-a")]


async def test_a_pod_that_is_deleted_during_its_prepare_cancels_it_and_is_unprepared(
    autojump_clock: MockClock,
) -> None:
    async with registered(Core(prepare_s=30)) as (r, plugin):
        r.submit("vm")
        await trio.sleep(5)
        began = trio.current_time()
        r.kubelet.delete("vm")
        assert await r.gone("vm") - began < 1
        assert plugin.core.order == [("prepare", "uid-a"), ("unprepare", "uid-a")]
        prepare, unprepare = r.kubelet.dra_calls
        assert prepare.error == "the call was cancelled"
        assert (unprepare.call, unprepare.error) == ("unprepare", "")
        assert not r.kubelet.view.dra.claims


async def test_a_container_whose_cdi_file_is_missing_is_not_started(autojump_clock: MockClock) -> None:
    """No prepare heals it: kubelet has prepared the claim."""
    async with registered() as (r, plugin):
        r.node.add("a", "uid-a")
        r.node.cdi_files = set()
        r.kubelet.submit("vm", {}, uses=("a",))
        await r.message("vm", f"unresolvable CDI devices k8s.{DRIVER}/claim=uid-a-gpu")
        await trio.sleep(100)
        assert plugin.core.order == [("prepare", "uid-a")]
        r.node.cdi_files = None
        await r.runs("vm")


# --- unprepare --------------------------------------------------------------------------------------------------


async def test_a_claim_is_unprepared_when_the_container_is_gone(autojump_clock: MockClock) -> None:
    async with registered() as (r, plugin):
        await r.runs_with_claim("vm")
        began = trio.current_time()
        r.kubelet.delete("vm", dies_after_s=KILL_S)
        gone = await r.gone("vm")
        (at,) = plugin.core.times("unprepare")
        assert KILL_S <= at - began <= KILL_S + 0.2
        assert gone >= at
        assert not r.kubelet.view.dra.claims


@pytest.mark.parametrize("seed", SEEDS)
async def test_a_failed_unprepare_is_tried_again_after_10_to_15_s_and_the_pod_stays(
    seed: int, autojump_clock: MockClock
) -> None:
    core = Core(unprepare_errors=["its write hangs"] * 5)
    async with registered(core, seed=seed) as (r, _):
        await r.runs_with_claim("vm")
        r.kubelet.delete("vm")
        assert "its write hangs" in await r.message("vm", "unprepare")
        assert r.kubelet.view.pods["vm"].phase is Phase.TERMINATING
        gone = await r.gone("vm")
        times = core.times("unprepare")
        assert len(times) == 6
        assert all(10 <= wait <= 15.4 for wait in between(times))
        assert gone == pytest.approx(times[-1], abs=0.2)


async def test_a_pod_that_ends_by_itself_is_unprepared(autojump_clock: MockClock) -> None:
    async with registered() as (r, plugin):
        await r.runs_with_claim("vm")
        r.kubelet.end_process("vm")
        await r.kubelet.until(lambda view: view.pods["vm"].phase is Phase.SUCCEEDED)
        assert plugin.core.order == [("prepare", "uid-a"), ("unprepare", "uid-a")]


@pytest.mark.parametrize("seed", SEEDS)
async def test_a_driver_that_was_away_is_asked_10_to_15_s_after_it_is_back(
    seed: int, autojump_clock: MockClock
) -> None:
    async with registered(seed=seed) as (r, plugin):
        await r.runs_with_claim("vm")
        await plugin.endpoint.close()
        await r.registered()
        r.kubelet.delete("vm")
        await r.message("vm", f"DRA driver {DRIVER} is not registered")
        core = Core()
        async with r.plugin(core) as back:
            await r.registered(back.path)
            began = trio.current_time()
            assert await r.gone("vm") - began <= 15.4 + 0.2
            assert core.order == [("unprepare", "uid-a")]


# --- two pods, two claims ---------------------------------------------------------------------------------------


async def test_a_shared_claim_is_prepared_once_and_unprepared_after_the_last_pod(
    autojump_clock: MockClock,
) -> None:
    async with registered() as (r, plugin):
        r.node.add("a", "uid-a")
        for name in ("one", "two"):
            r.kubelet.submit(name, {}, uses=("a",))
            await r.runs(name)
        assert plugin.core.order == [("prepare", "uid-a")]
        r.kubelet.delete("one")
        await r.gone("one")
        assert plugin.core.order == [("prepare", "uid-a")]
        r.kubelet.delete("two")
        await r.gone("two")
        assert plugin.core.order == [("prepare", "uid-a"), ("unprepare", "uid-a")]


async def test_after_a_forced_deletion_the_next_claims_prepare_comes_before_the_old_ones_unprepare(
    autojump_clock: MockClock,
) -> None:
    """Seen: 0.11 s after it; the scheduler has given the GPU to the waiting pod's claim at once."""
    async with registered() as (r, plugin):
        r.node.add("old", "uid-old")
        r.kubelet.submit("vm", {}, uses=("old",))
        await r.runs("vm")
        r.node.add("new", "uid-new")
        began = trio.current_time()
        r.kubelet.force_delete("vm", dies_after_s=KILL_S)
        r.kubelet.submit("next", {}, uses=("new",))
        await r.runs("next")
        assert trio.current_time() - began <= 1.0
        await r.calls(3)
        assert plugin.core.order == [
            ("prepare", "uid-old"),
            ("prepare", "uid-new"),
            ("unprepare", "uid-old"),
        ]
        assert plugin.core.times("prepare")[1] - began <= 0.11
        assert plugin.core.times("unprepare")[0] - began >= KILL_S


async def test_a_new_claim_of_an_old_name_waits_until_the_old_one_is_unprepared(
    autojump_clock: MockClock,
) -> None:
    async with registered() as (r, plugin):
        r.node.add("a", "uid-old")
        r.kubelet.submit("vm", {}, uses=("a",))
        await r.runs("vm")
        r.node.add("a", "uid-new")
        r.kubelet.force_delete("vm", dies_after_s=KILL_S)
        r.kubelet.submit("next", {}, uses=("a",))
        await r.message("next", "old ResourceClaim with same name a and different UID uid-old still exists")
        await r.runs("next")
        assert plugin.core.order == [
            ("prepare", "uid-old"),
            ("unprepare", "uid-old"),
            ("prepare", "uid-new"),
        ]


async def test_the_claims_of_a_pod_that_is_gone_are_unprepared_within_60_s_though_its_container_runs(
    autojump_clock: MockClock,
) -> None:
    """The loop looks at pods that are active, not at containers."""
    async with registered() as (r, plugin):
        r.submit("vm")
        began = await r.runs("vm")
        r.kubelet.force_delete("vm", dies_after_s=None)
        await r.calls(2)
        assert trio.current_time() - began <= 60
        assert r.kubelet.containers, "the virtual machine runs on"
        assert plugin.core.order == [("prepare", "uid-a"), ("unprepare", "uid-a")]


async def two_pods_of_which_the_second_is_not_admitted(r: Rig) -> None:
    """They share the claim `a`; the second one's other claim does not exist."""
    await r.runs_with_claim("one")
    r.kubelet.submit("two", {}, uses=("a", "lost"))
    await r.message("two", "fetch ResourceClaim lost")
    r.kubelet.delete("two")
    await r.gone("two")


@pytest.mark.parametrize(("release", "unprepared"), [(KUBELET_1_34, True), (KUBELET_1_37, False)])
async def test_an_old_kubelet_unprepares_a_claim_under_the_pod_that_uses_it(
    release: Release, unprepared: bool, autojump_clock: MockClock
) -> None:
    """The deleted pod names the claim and never got it (kubernetes pull request 140212)."""
    async with registered(release=release) as (r, plugin):
        await two_pods_of_which_the_second_is_not_admitted(r)
        assert (("unprepare", "uid-a") in plugin.core.order) is unprepared
        assert r.kubelet.containers[0].name == "one", "it runs"


@pytest.mark.parametrize(("release", "joins"), [(KUBELET_1_34, True), (KUBELET_1_37, False)])
async def test_an_old_kubelet_lets_a_pod_join_a_claim_that_is_being_unprepared(
    release: Release, joins: bool, autojump_clock: MockClock
) -> None:
    """Kubernetes pull request 140527: the pod runs without a prepare, and its claim is gone."""
    async with registered(Core(unprepare_s=5), release=release) as (r, plugin):
        await r.runs_with_claim("one")
        r.kubelet.delete("one")
        await trio.sleep(1)
        r.kubelet.submit("two", {}, uses=("a",))
        if not joins:
            await r.message("two", "ResourceClaim a is being unprepared")
        await r.runs("two")
        assert plugin.core.order[:2] == [("prepare", "uid-a"), ("unprepare", "uid-a")]
        assert (plugin.core.order[2:] == []) is joins


@pytest.mark.parametrize(
    ("release", "passed_over"), [(KUBELET_1_34, True), (KUBELET_1_36, False), (KUBELET_1_37, False)]
)
async def test_an_old_kubelet_passes_over_what_comes_after_a_prepared_claim(
    release: Release, passed_over: bool, autojump_clock: MockClock
) -> None:
    async with registered(release=release) as (r, plugin):
        r.node.add("a", "uid-a")
        r.node.add("b", "uid-b")
        r.kubelet.submit("one", {}, uses=("a",))
        await r.runs("one")
        r.kubelet.submit("two", {}, uses=("a", "b"))
        await r.runs("two")
        assert (("prepare", "uid-b") not in plugin.core.order) is passed_over


async def test_the_driver_of_a_prepared_claim_is_needed_for_its_next_pod_too(
    autojump_clock: MockClock,
) -> None:
    async with registered() as (r, plugin):
        await r.runs_with_claim("one")
        await plugin.endpoint.close()
        await r.kubelet.until(lambda view: not view.dra.instances)
        r.kubelet.submit("two", {}, uses=("a",))
        await r.message("two", f"DRA driver {DRIVER} is not registered")


# --- restarts ---------------------------------------------------------------------------------------------------


async def restart(r: Rig) -> None:
    await r.kubelet.stop()
    await trio.sleep(1)
    await r.kubelet.start()


async def test_a_restart_prepares_nothing_for_a_pod_that_runs_and_remembers_its_claim(
    autojump_clock: MockClock,
) -> None:
    """It registers the driver again within 2 s, and deletes its slices."""
    async with registered() as (r, plugin):
        await r.runs_with_claim("vm")
        r.node.wiped.clear()
        await restart(r)
        began = trio.current_time()
        await r.registered(plugin.path)
        assert trio.current_time() - began <= 2.0
        await trio.sleep(200)
        assert [driver for _, driver in r.node.wiped] == [None]
        assert plugin.core.order == [("prepare", "uid-a")]
        r.kubelet.delete("vm")
        await r.gone("vm")
        assert plugin.core.order == [("prepare", "uid-a"), ("unprepare", "uid-a")]


async def test_the_claims_of_a_pod_deleted_while_kubelet_was_away_are_unprepared_by_the_loop(
    autojump_clock: MockClock,
) -> None:
    async with registered() as (r, plugin):
        await r.runs_with_claim("vm")
        await r.kubelet.stop()
        r.kubelet.force_delete("vm")
        r.kubelet.end_process("vm")
        await r.kubelet.start()
        began = trio.current_time()
        await r.calls(2)
        assert trio.current_time() - began <= 60 + 2
        assert plugin.core.order == [("prepare", "uid-a"), ("unprepare", "uid-a")]


async def test_a_shared_claim_is_prepared_again_for_the_next_pod_after_a_restart(
    autojump_clock: MockClock,
) -> None:
    async with registered() as (r, plugin):
        await r.runs_with_claim("one")
        await restart(r)
        await r.registered(plugin.path)
        r.kubelet.submit("two", {}, uses=("a",))
        await r.runs("two")
        assert plugin.core.order == [("prepare", "uid-a"), ("prepare", "uid-a")]


@pytest.mark.parametrize(("release", "devices"), [(KUBELET_1_34, 2), (KUBELET_1_37, 1)])
async def test_an_old_kubelet_appends_the_devices_of_a_repeated_answer(
    release: Release, devices: int, autojump_clock: MockClock
) -> None:
    """Kubernetes issue 140471."""
    async with registered(release=release) as (r, plugin):
        await r.runs_with_claim("one")
        await restart(r)
        await r.registered(plugin.path)
        r.kubelet.submit("two", {}, uses=("a",))
        await r.runs("two")
        (claim,) = r.kubelet.view.dra.claims
        assert len(claim.devices) == devices


async def test_after_a_power_cut_the_same_claim_is_prepared_again(autojump_clock: MockClock) -> None:
    async with registered() as (r, plugin):
        await r.runs_with_claim("vm")
        await r.kubelet.stop()
        r.kubelet.power_off()
        await r.kubelet.start()
        await r.runs("vm")
        assert plugin.core.order == [("prepare", "uid-a"), ("prepare", "uid-a")]


async def test_a_lost_state_file_unprepares_nothing_ever(autojump_clock: MockClock) -> None:
    async with registered() as (r, plugin):
        await r.runs_with_claim("vm")
        await r.kubelet.stop()
        r.kubelet.lose_claims()
        await r.kubelet.start()
        await r.registered(plugin.path)
        r.kubelet.delete("vm")
        await r.gone("vm")
        await trio.sleep(600)
        assert plugin.core.order == [("prepare", "uid-a")]


# --- PodResources -----------------------------------------------------------------------------------------------


async def listed(r: Rig) -> dict[str, list[pod_resources.DynamicResource]]:
    stream = await r.transport.dial(POD_RESOURCES_SOCKET)
    async with open_channel(stream) as channel:
        stub = pod_resources.PodResourcesListerStub(channel)
        answer = await stub.list(pod_resources.ListPodResourcesRequest())
    return {
        pod.name: [claim for container in pod.containers for claim in container.dynamic_resources]
        for pod in answer.pod_resources
        if pod.namespace == "default"
    }


async def test_pod_resources_lists_the_devices_of_a_pods_claims(autojump_clock: MockClock) -> None:
    async with registered() as (r, _):
        await r.runs_with_claim("vm")
        ((claim,),) = (await listed(r)).values()
        assert (claim.claim_namespace, claim.claim_name) == ("default", "a")
        (device,) = claim.claim_resources
        assert (device.driver_name, device.pool_name, device.device_name) == (
            DRIVER,
            "node-1",
            "gpu-of-uid-a",
        )
        assert [cdi.name for cdi in device.cdi_devices] == [f"k8s.{DRIVER}/claim=uid-a-gpu"]
        r.kubelet.delete("vm")
        await r.gone("vm")
        assert not await listed(r)
