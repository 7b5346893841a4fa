"""What kubelet was seen to do, asked of both fake kubelets: the shipped one and the stand-in that is made with grpcio.

The plugin and the client of PodResources are grpcio's; the ledger's file is read as it lies there. Not here, because
the stand-in has neither scheduler nor container nor mock clock: who is placed, the five minutes of grace, when
PreStartContainer is tried for the third time, and a container that must be started anew. The stand-in
writes no checksum.
"""

from __future__ import annotations

import base64
import json
import stat
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import grpc
import pytest
import trio

from tests.simulation.kubelet.drivers import KUBELETS, Devices, Driver
from tests.support.device_plugin_grpcio import message
from tests.support.pod_resources_grpcio import PROTO as POD_RESOURCES
from tests.support.tiny_plugin import RESOURCE, WAIT_S, TinyPlugin

OTHER: Final = "example.org/other"
CLOSING: Final = "the client connection is closing"

A, B, C = (("a", "Healthy"), ("b", "Healthy"), ("c", "Healthy"))


NO_LISTENER_FOR_S: Final = 2.0
"""How long kubelet dials an endpoint without a listener, in place of its 10 s."""


@pytest.fixture
def dial_deadline_s() -> float:
    return WAIT_S


@pytest.fixture(params=KUBELETS)
async def kubelet(
    request: pytest.FixtureRequest, tmp_path: Path, dial_deadline_s: float
) -> AsyncIterator[Driver]:
    async with KUBELETS[request.param](tmp_path, dial_deadline_s) as driver:
        yield driver


@contextmanager
def serving(kubelet_dir: Path, name: str) -> Iterator[TinyPlugin]:
    plugin = TinyPlugin(kubelet_dir / "device-plugins", name)
    try:
        yield plugin
    finally:
        plugin.stop()


@pytest.fixture
async def plugin(kubelet: Driver, tmp_path: Path) -> AsyncIterator[TinyPlugin]:
    with serving(tmp_path, "tiny.sock") as found:
        yield found


@pytest.fixture
async def other(kubelet: Driver, tmp_path: Path) -> AsyncIterator[TinyPlugin]:
    with serving(tmp_path, "other.sock") as found:
        yield found


async def register(
    plugin: TinyPlugin, *, resource: str = RESOURCE, version: str = "v1beta1", endpoint: str = ""
) -> None:
    await trio.to_thread.run_sync(plugin.register, version, resource, WAIT_S, endpoint)


async def refused(plugin: TinyPlugin, **change: str) -> str:
    """The error of Register."""
    with pytest.raises(grpc.RpcError) as caught:
        await register(plugin, **change)
    error: Any = caught.value
    assert error.code() is grpc.StatusCode.UNKNOWN
    return str(error.details())


async def lists(
    kubelet: Driver, plugin: TinyPlugin, *devices: tuple[str, str], resource: str = RESOURCE
) -> None:
    """The plugin sends a list, and kubelet has it."""
    plugin.lists.put(list(devices))
    await kubelet.until(lambda listed: listed.get(resource) == dict(devices))


async def registered(
    kubelet: Driver, plugin: TinyPlugin, *devices: tuple[str, str], resource: str = RESOURCE
) -> None:
    await register(plugin, resource=resource)
    await lists(kubelet, plugin, *devices, resource=resource)


def unhealthy(resource: str = RESOURCE) -> Callable[[Devices], bool]:
    return lambda listed: set(listed[resource].values()) == {"Unhealthy"}


# --- Register ---------------------------------------------------------------------------------------------


async def test_kubelet_dials_and_asks_for_options_inside_register_and_each_frame_replaces_the_list(
    kubelet: Driver, plugin: TinyPlugin
) -> None:
    await register(plugin)
    assert plugin.calls("GetDevicePluginOptions") == [()]
    await lists(kubelet, plugin, A, B)
    await lists(kubelet, plugin, ("b", "Unhealthy"), C)
    await lists(kubelet, plugin)
    assert plugin.calls("ListAndWatch") == [()]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (
            {"version": "v1alpha"},
            'requested API version "v1alpha" is not supported by kubelet. Supported version is ["v1beta1"]',
        ),
        *(
            ({"resource": name}, f'the ResourceName "{name}" is invalid')
            for name in (
                "no-slash",
                "example.org/",
                "example.org/two/slashes",
                "example.org/ends_in_",
                "example.org/" + 64 * "x",
                "Example.org/x",
                "-example.org/x",
                ".".join(["d" * 49] * 5) + "/x",
                "/x",
                "node.kubernetes.io/x",
                "kubernetes.io/x",
                "requests.example.org/x",
            )
        ),
    ],
)
async def test_a_version_or_a_name_is_refused_and_the_endpoint_not_dialled(
    kubelet: Driver, plugin: TinyPlugin, change: dict[str, str], error: str
) -> None:
    assert await refused(plugin, **change) == error
    assert plugin.asked == []


@pytest.mark.parametrize("name", ["example.org/" + 63 * "x", "a/b.C_d-e", ".".join(["d" * 60] * 4) + "/x"])
async def test_names_at_the_limit_are_accepted(kubelet: Driver, plugin: TinyPlugin, name: str) -> None:
    await registered(kubelet, plugin, A, resource=name)


@pytest.mark.parametrize("dial_deadline_s", [NO_LISTENER_FOR_S])
@pytest.mark.parametrize("absolute", [False, True])
async def test_an_endpoint_is_below_the_directory_and_one_without_a_listener_is_refused(
    kubelet: Driver, plugin: TinyPlugin, tmp_path: Path, absolute: bool
) -> None:
    endpoint = str(tmp_path / "device-plugins" / "tiny.sock") if absolute else "none.sock"
    error = await refused(plugin, endpoint=endpoint)
    assert error == "failed to dial device plugin: context deadline exceeded"
    assert plugin.asked == []


async def test_an_endpoint_in_a_directory_below_is_accepted(kubelet: Driver, tmp_path: Path) -> None:
    (tmp_path / "device-plugins" / "sub").mkdir()
    with serving(tmp_path, "sub/x.sock") as plugin:
        await registered(kubelet, plugin, A)


@pytest.mark.parametrize("dial_deadline_s", [NO_LISTENER_FOR_S])
@pytest.mark.parametrize("why", ["no listener at the endpoint", "no options"])
async def test_a_failed_register_makes_kubelet_forget_the_current_plugin_whose_end_it_does_not_notice(
    kubelet: Driver, plugin: TinyPlugin, other: TinyPlugin, why: str
) -> None:
    await registered(kubelet, plugin, A, B)
    if why == "no options":
        other.refusals["GetDevicePluginOptions"] = [(grpc.StatusCode.INTERNAL, "none today")]
        error = await refused(other)
        assert error == "failed to get device plugin options: rpc error: code = Internal desc = none today"
    else:
        await refused(other, endpoint="none.sock")
    await lists(kubelet, plugin, A)  # its stream goes on
    assert other.calls("ListAndWatch") == []

    await trio.to_thread.run_sync(plugin.stop)
    admitted = await kubelet.admit("to-none", 1)
    assert not admitted.runs
    assert admitted.message.startswith("UnexpectedAdmissionError: Allocate failed due to "), admitted
    await kubelet.until_a_stream_ended()  # else it may cut off the next one
    await kubelet.until(lambda listed: listed[RESOURCE] == {"a": "Healthy"})

    await registered(kubelet, other, A, B)  # which heals it
    other.lists.put(None)
    await kubelet.until(unhealthy())


# --- streams ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [None, (grpc.StatusCode.INTERNAL, "broken")], ids=["in order", "an error"])
async def test_the_end_of_a_stream_makes_all_unhealthy_and_kubelet_does_not_dial_again(
    kubelet: Driver,
    plugin: TinyPlugin,
    other: TinyPlugin,
    tmp_path: Path,
    end: tuple[grpc.StatusCode, str] | None,
) -> None:
    await registered(kubelet, plugin, A, B)
    assert (await kubelet.admit("one", 1)).runs
    plugin.lists.put(end)
    await kubelet.until(unhealthy())
    assert await allocatable(tmp_path) == []
    assert not (await kubelet.admit("two", 1)).runs
    await registered(kubelet, other, C, resource=OTHER)
    assert await allocatable(tmp_path) == [(OTHER, "c", None)]
    assert plugin.calls("ListAndWatch") == [()]
    await registered(kubelet, plugin, A, B)
    assert (await kubelet.admit("three", 1)).runs


async def test_when_the_old_stream_ends_kubelet_cuts_off_who_registered_meanwhile(
    kubelet: Driver, plugin: TinyPlugin, other: TinyPlugin
) -> None:
    await registered(kubelet, plugin, A, B)
    await registered(kubelet, other, A, B, C)
    plugin.lists.put(None)
    await kubelet.until(unhealthy())
    assert await trio.to_thread.run_sync(other.cut_off.wait, WAIT_S)
    assert not plugin.cut_off.is_set()
    assert not (await kubelet.admit("one", 1)).runs


async def test_of_two_plugins_each_frame_counts_and_the_newer_is_asked(
    kubelet: Driver, plugin: TinyPlugin, other: TinyPlugin
) -> None:
    await registered(kubelet, plugin, A)
    await registered(kubelet, other, B)
    await lists(kubelet, plugin, A, B)
    assert (await kubelet.admit("one", 1)).runs
    assert (plugin.calls("Allocate"), len(other.calls("Allocate"))) == ([], 1)
    await registered(kubelet, plugin, A, B, C)
    assert (await kubelet.admit("two", 1)).runs
    assert (len(plugin.calls("Allocate")), len(other.calls("Allocate"))) == (1, 1)


async def test_a_frame_of_the_older_plugin_brings_back_the_list_of_the_newer_that_went_and_no_endpoint(
    kubelet: Driver, plugin: TinyPlugin, other: TinyPlugin, tmp_path: Path
) -> None:
    await registered(kubelet, plugin, A)
    await registered(kubelet, other, B)
    other.lists.put(None)
    await kubelet.until(unhealthy())
    assert await allocatable(tmp_path) == []
    await lists(kubelet, plugin, A)
    assert await allocatable(tmp_path) == [(RESOURCE, "a", None)]
    pod = await kubelet.admit("one", 1)
    assert (pod.runs, plugin.calls("Allocate")) == (False, [])
    assert f"Allocate failed due to endpoint {RESOURCE} has been stopped" in pod.message


async def test_an_allocate_in_flight_when_the_stream_ends_fails_its_pod(
    kubelet: Driver, plugin: TinyPlugin
) -> None:
    await registered(kubelet, plugin, A)
    token = trio.lowlevel.current_trio_token()

    def end_and_wait() -> None:
        plugin.lists.put(None)
        trio.from_thread.run(kubelet.until, unhealthy(), trio_token=token)

    plugin.on_allocate = end_and_wait
    pod = await kubelet.admit("one", 1)
    assert not pod.runs
    assert CLOSING in pod.message


async def test_a_device_that_leaves_the_list_during_its_allocate_is_kubelets_crash(
    kubelet: Driver, plugin: TinyPlugin
) -> None:
    await registered(kubelet, plugin, A, B)
    token = trio.lowlevel.current_trio_token()
    left = [A]

    def leave() -> None:
        plugin.lists.put(left)
        trio.from_thread.run(kubelet.until, lambda listed: listed[RESOURCE] == dict(left), trio_token=token)

    plugin.on_allocate = leave
    plugin.prefer = lambda ids, size: ["a"]
    assert (await kubelet.admit("one", 1)).runs
    assert kubelet.panics == []
    await lists(kubelet, plugin, A, B)
    await kubelet.admit("two", 1)
    await kubelet.until(lambda _: len(kubelet.panics) == 1)
    assert "b" in kubelet.panics[0]


async def test_a_device_that_leaves_the_list_during_an_allocate_that_is_refused_costs_its_pod_alone(
    kubelet: Driver, plugin: TinyPlugin
) -> None:
    """Kubelet reads the topology of the devices of an answer, and there is none."""
    await registered(kubelet, plugin, A)
    token = trio.lowlevel.current_trio_token()

    def leave() -> None:
        plugin.lists.put([B])
        trio.from_thread.run(kubelet.until, lambda listed: listed[RESOURCE] == dict([B]), trio_token=token)
        raise LookupError("a is not listed any more")

    plugin.on_allocate = leave
    assert not (await kubelet.admit("one", 1)).runs
    plugin.on_allocate = lambda: None
    assert (await kubelet.admit("two", 1)).runs
    assert kubelet.panics == []


# --- admission --------------------------------------------------------------------------------------------


async def test_only_healthy_devices_that_no_pod_has_are_offered_and_the_plugins_choice_is_followed(
    kubelet: Driver, plugin: TinyPlugin
) -> None:
    await registered(kubelet, plugin, A, ("b", "Unhealthy"), C, ("d", "Healthy"))
    plugin.prefer = lambda ids, size: ["c"]
    assert (await kubelet.admit("one", 1)).devices == ("c",)
    assert plugin.asked[-2:] == [("GetPreferredAllocation", ("a", "c", "d")), ("Allocate", ("c",))]
    plugin.prefer = lambda ids, size: ["d"]
    assert (await kubelet.admit("two", 1)).devices == ("d",)
    assert plugin.asked[-2:] == [("GetPreferredAllocation", ("a", "d")), ("Allocate", ("d",))]
    asked = len(plugin.asked)
    assert not (await kubelet.admit("three", 2)).runs
    assert len(plugin.asked) == asked, "the plugin is not asked for what there is not"
    assert (await kubelet.admit("four", 1)).devices == ("a",)


@pytest.mark.parametrize(
    ("answer", "contained"),
    [
        (["made-up", "b", "c"], {"c"}),
        (["b"], set()),
        ([], set()),
        (["c", "c", "c"], {"c"}),
        (["a", "c", "d"], set()),
    ],
    ids=["one made up", "another pod's", "none", "one three times", "too many"],
)
async def test_of_a_wrong_preference_what_was_offered_counts(
    kubelet: Driver, plugin: TinyPlugin, answer: list[str], contained: set[str]
) -> None:
    await registered(kubelet, plugin, A, B, C, ("d", "Healthy"))
    plugin.prefer = lambda ids, size: ["b"]
    assert (await kubelet.admit("one", 1)).devices == ("b",)
    plugin.prefer = lambda ids, size: answer
    pod = await kubelet.admit("two", 2)
    assert pod.runs
    assert len(pod.devices) == 2
    assert contained <= set(pod.devices) <= {"a", "c", "d"}


async def test_a_plugin_without_preferences_is_not_asked_for_them(
    kubelet: Driver, plugin: TinyPlugin
) -> None:
    plugin.prefers = False
    await registered(kubelet, plugin, A)
    assert (await kubelet.admit("one", 1)).runs
    assert [method for method, _ in plugin.asked[2:]] == ["Allocate"]


@pytest.mark.parametrize(
    ("method", "error"),
    [
        ("GetPreferredAllocation", "device plugin GetPreferredAllocation rpc failed with err: rpc error"),
        ("Allocate", "rpc error"),
    ],
)
async def test_an_error_fails_the_pod_for_good_and_its_device_is_free(
    kubelet: Driver, plugin: TinyPlugin, tmp_path: Path, method: str, error: str
) -> None:
    await registered(kubelet, plugin, A)
    plugin.refusals[method] = [(grpc.StatusCode.FAILED_PRECONDITION, "bound to nvidia")]
    pod = await kubelet.admit("one", 1)
    assert (pod.runs, pod.message) == (
        False,
        f"UnexpectedAdmissionError: Allocate failed due to {error}: code = FailedPrecondition "
        "desc = bound to nvidia, which is unexpected",
    )
    assert await listed(tmp_path) == {}
    assert entries(tmp_path) == []
    assert (await kubelet.admit("two", 1)).devices == ("a",)


async def test_one_pod_can_be_asked_for_while_it_is_admitted_and_after(
    kubelet: Driver, plugin: TinyPlugin, tmp_path: Path
) -> None:
    await registered(kubelet, plugin, A)
    during: list[object] = []
    token = trio.lowlevel.current_trio_token()
    plugin.on_allocate = lambda: during.append(trio.from_thread.run(got, tmp_path, "one", trio_token=token))
    assert (await kubelet.admit("one", 1)).runs
    assert during == [[]]
    assert await got(tmp_path, "one") == [(RESOURCE, "a", None)]
    assert await got(tmp_path, "none") == "UNKNOWN: pod none in namespace default not found"


async def test_an_answer_without_a_container_fails_the_pod(kubelet: Driver, plugin: TinyPlugin) -> None:
    await registered(kubelet, plugin, A)
    plugin.containers_answered = 0
    pod = await kubelet.admit("one", 1)
    assert not pod.runs
    assert "Allocate failed due to no containers return in allocation response" in pod.message


async def test_pre_start_is_called_if_asked_for_and_again_when_it_was_refused(
    kubelet: Driver, plugin: TinyPlugin, other: TinyPlugin, tmp_path: Path
) -> None:
    plugin.pre_start_required = True
    plugin.refusals["PreStartContainer"] = [(grpc.StatusCode.UNAVAILABLE, "still held")]
    await registered(kubelet, plugin, A)
    assert (await kubelet.admit("one", 1)).runs
    assert plugin.calls("Allocate") == [("a",)]
    assert plugin.calls("PreStartContainer") == [("a",), ("a",)]
    assert await listed(tmp_path) == {"one": [(RESOURCE, "a", None)]}

    await registered(kubelet, other, C, resource=OTHER)
    assert (await kubelet.admit("two", 1, OTHER)).runs
    assert other.calls("PreStartContainer") == []


# --- the ledger -------------------------------------------------------------------------------------------

Listed = tuple[str, str, int | None]
"""Resource, device, NUMA node."""


def _call(kubelet_dir: Path, method: str, request: str) -> Any:
    with grpc.insecure_channel(f"unix:{kubelet_dir / 'pod-resources' / 'kubelet.sock'}") as channel:
        lister = POD_RESOURCES.stub(channel, "PodResourcesLister")
        return lister[method](POD_RESOURCES.message(request)(), timeout=WAIT_S)


def _devices(found: Any) -> Iterator[Listed]:
    for devices in found:
        nodes = [node.ID for node in devices.topology.nodes] if devices.HasField("topology") else [None]
        for device in devices.device_ids:
            for node in nodes:
                yield devices.resource_name, device, node


async def allocatable(kubelet_dir: Path) -> list[Listed]:
    """What GetAllocatableResources returns."""
    answer = await trio.to_thread.run_sync(
        _call, kubelet_dir, "GetAllocatableResources", "AllocatableResourcesRequest"
    )
    assert all(len(devices.device_ids) == 1 for devices in answer.devices)
    return sorted(_devices(answer.devices), key=str)


def _get(kubelet_dir: Path, pod: str) -> Any:
    with grpc.insecure_channel(f"unix:{kubelet_dir / 'pod-resources' / 'kubelet.sock'}") as channel:
        lister = POD_RESOURCES.stub(channel, "PodResourcesLister")
        request = POD_RESOURCES.message("GetPodResourcesRequest")(pod_name=pod, pod_namespace="default")
        try:
            return lister["Get"](request, timeout=WAIT_S).pod_resources
        except grpc.RpcError as error:
            status: Any = error
            return f"{status.code().name}: {status.details()}"


async def got(kubelet_dir: Path, pod: str) -> object:
    """What Get returns for a pod: its devices, or the error."""
    found = await trio.to_thread.run_sync(_get, kubelet_dir, pod)
    return found if isinstance(found, str) else [d for c in found.containers for d in _devices(c.devices)]


async def all_listed(kubelet_dir: Path) -> dict[tuple[str, str], list[Listed]]:
    """What List returns, by namespace and pod."""
    answer = await trio.to_thread.run_sync(_call, kubelet_dir, "List", "ListPodResourcesRequest")
    for pod in answer.pod_resources:
        assert [c.name for c in pod.containers if c.devices] == ["compute"] * bool(
            pod.namespace == "default" and pod.containers[0].devices
        )
    return {
        (pod.namespace, pod.name): sorted((d for c in pod.containers for d in _devices(c.devices)), key=str)
        for pod in answer.pod_resources
    }


async def listed(kubelet_dir: Path) -> dict[str, list[Listed]]:
    """Without the node's own pods."""
    found = await all_listed(kubelet_dir)
    return {pod: devices for (namespace, pod), devices in found.items() if namespace == "default"}


async def until_listed(kubelet_dir: Path, wanted: dict[str, list[Listed]]) -> None:
    with trio.fail_after(WAIT_S):
        while await listed(kubelet_dir) != wanted:  # noqa: ASYNC110 - kubelet announces it nowhere
            await trio.sleep(0.05)


def data(kubelet_dir: Path) -> Any:
    """Of the ledger's file."""
    file = kubelet_dir / "device-plugins" / "kubelet_internal_checkpoint"
    return json.loads(file.read_text())["Data"]


def entries(kubelet_dir: Path) -> list[dict[str, list[str]]]:
    """The devices by NUMA node of each entry."""
    return [entry["DeviceIDs"] for entry in data(kubelet_dir)["PodDeviceEntries"] or ()]


async def test_the_nodes_own_pods_are_listed_without_devices(kubelet: Driver, tmp_path: Path) -> None:
    found = await all_listed(tmp_path)
    assert len(found) == 2
    assert {namespace for namespace, _ in found} == {"kube-system"}
    assert not any(found.values())


async def test_a_pod_is_listed_with_its_devices_when_its_allocate_is_answered_and_the_healthy_whoever_has_them(
    kubelet: Driver, plugin: TinyPlugin, tmp_path: Path
) -> None:
    await registered(kubelet, plugin, A, B, ("c", "Unhealthy"))
    during: list[dict[str, list[Listed]]] = []
    token = trio.lowlevel.current_trio_token()
    plugin.on_allocate = lambda: during.append(trio.from_thread.run(listed, tmp_path, trio_token=token))
    assert (await kubelet.admit("one", 2)).runs
    assert during == [{"one": []}]
    assert await listed(tmp_path) == {"one": [(RESOURCE, "a", None), (RESOURCE, "b", 1)]}
    assert await allocatable(tmp_path) == [(RESOURCE, "a", None), (RESOURCE, "b", 1)]
    await lists(kubelet, plugin, ("a", "Unhealthy"), B)
    assert await allocatable(tmp_path) == [(RESOURCE, "b", 1)]
    assert await listed(tmp_path) == {"one": [(RESOURCE, "a", None), (RESOURCE, "b", 1)]}


async def test_the_file_has_what_pods_were_given_and_what_is_healthy(
    kubelet: Driver, plugin: TinyPlugin, other: TinyPlugin, tmp_path: Path
) -> None:
    await registered(kubelet, plugin, A, B, ("c", "Unhealthy"))
    await registered(kubelet, other, C, resource=OTHER)
    assert data(tmp_path)["PodDeviceEntries"] is None
    assert stat.S_IMODE((tmp_path / "device-plugins" / "kubelet_internal_checkpoint").stat().st_mode) == 0o600
    assert (await kubelet.admit("one", 2)).runs
    (entry,) = data(tmp_path)["PodDeviceEntries"]
    assert entry.keys() == {"PodUID", "ContainerName", "ResourceName", "DeviceIDs", "AllocResp"}
    assert (entry["ContainerName"], entry["ResourceName"]) == ("compute", RESOURCE)
    assert entry["DeviceIDs"] == {"-1": ["a"], "1": ["b"]}
    answer = message("ContainerAllocateResponse").FromString(base64.b64decode(entry["AllocResp"]))
    assert dict(answer.envs) == {"IDS": "a,b"}
    assert [device.host_path for device in answer.devices] == ["/dev/h"]
    healthy = {name: sorted(ids) for name, ids in data(tmp_path)["RegisteredDevices"].items()}
    assert healthy == {RESOURCE: ["a", "b"], OTHER: ["c"]}

    # The end of a stream writes nothing; the next write has none of its devices as Healthy.
    plugin.lists.put(None)
    await kubelet.until(unhealthy())
    assert sorted(data(tmp_path)["RegisteredDevices"][RESOURCE]) == ["a", "b"]
    await lists(kubelet, other, A, C, resource=OTHER)
    assert data(tmp_path)["RegisteredDevices"][RESOURCE] == []


async def test_a_pod_that_has_ended_stays_in_the_ledger_until_somebody_asks_and_in_the_file_until_it_is_written(
    kubelet: Driver, plugin: TinyPlugin, tmp_path: Path
) -> None:
    await registered(kubelet, plugin, A)
    assert (await kubelet.admit("one", 1)).runs
    kubelet.force_delete("one")
    assert entries(tmp_path) == [{"-1": ["a"]}], "a release writes nothing"
    await lists(kubelet, plugin, A, C)
    assert entries(tmp_path) == [{"-1": ["a"]}], "no call has come since"
    assert await listed(tmp_path) == {}
    assert entries(tmp_path) == [{"-1": ["a"]}], "List writes nothing"
    await lists(kubelet, plugin, A)
    assert entries(tmp_path) == []
    assert (await kubelet.admit("two", 1)).devices == ("a",)
    kubelet.force_delete("two")
    assert (await kubelet.admit("three", 1)).devices == ("a",)
    assert entries(tmp_path) == [{"-1": ["a"]}]


async def test_a_deleted_pod_leaves_the_list_when_its_container_has_ended_and_another_may_have_its_device(
    kubelet: Driver, plugin: TinyPlugin, tmp_path: Path
) -> None:
    await registered(kubelet, plugin, A)
    assert (await kubelet.admit("one", 1)).runs
    kubelet.end_pod("one")
    assert await listed(tmp_path) == {"one": [(RESOURCE, "a", None)]}, "kubelet needs a moment"
    await until_listed(tmp_path, {})
    assert (await kubelet.admit("two", 1)).devices == ("a",)
    assert await listed(tmp_path) == {"two": [(RESOURCE, "a", None)]}


async def test_all_queries_together_are_limited(kubelet: Driver, tmp_path: Path) -> None:
    def refused() -> set[tuple[grpc.StatusCode, str]]:
        with grpc.insecure_channel(f"unix:{tmp_path / 'pod-resources' / 'kubelet.sock'}") as channel:
            lister = POD_RESOURCES.stub(channel, "PodResourcesLister")
            calls = [
                lister[method].future(POD_RESOURCES.message(request)(), timeout=WAIT_S)
                for method, request in (
                    ("List", "ListPodResourcesRequest"),
                    ("GetAllocatableResources", "AllocatableResourcesRequest"),
                )
                for _ in range(500)
            ]
            return {(error.code(), error.details()) for call in calls if (error := call.exception())}

    found = await trio.to_thread.run_sync(refused)
    assert found == {(grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit")}


# --- kubelet's restart ------------------------------------------------------------------------------------


async def test_a_kubelet_that_starts_anew_has_its_ledger_and_no_device_and_lists_no_pod_before_it_hears(
    kubelet: Driver, plugin: TinyPlugin, other: TinyPlugin, tmp_path: Path
) -> None:
    directory = tmp_path / "device-plugins"
    (directory / "sub").mkdir()
    (directory / "notes.txt").write_text("kept")
    await registered(kubelet, plugin, A, B)
    await registered(kubelet, other, C, resource=OTHER)
    assert (await kubelet.admit("one", 1)).devices == ("a",)

    kubelet.lose_api_server()
    await kubelet.stop()
    with serving(tmp_path, "sub/x.sock") as again:
        await kubelet.start()
        await kubelet.until(lambda listed: not any(listed.values()))
        sockets = {entry.name for entry in directory.rglob("*") if stat.S_ISSOCK(entry.lstat().st_mode)}
        assert sockets == {"kubelet.sock", "x.sock"}
        assert (directory / "notes.txt").exists()
        assert await all_listed(tmp_path) == {}
        assert await allocatable(tmp_path) == []
        assert entries(tmp_path) == [{"-1": ["a"]}]

        await registered(kubelet, again, A, B)
        assert await all_listed(tmp_path) == {}
        assert entries(tmp_path) == [{"-1": ["a"]}]
        assert data(tmp_path)["RegisteredDevices"][OTHER] == []

        kubelet.find_api_server()
        await until_listed(tmp_path, {"one": [(RESOURCE, "a", None)]})
        assert (await kubelet.admit("two", 1)).devices == ("b",)
        assert [len(p.calls("ListAndWatch")) for p in (plugin, other, again)] == [1, 1, 1]


async def test_a_pod_that_ended_while_kubelet_was_away_is_in_the_file_until_kubelet_hears_of_it(
    kubelet: Driver, plugin: TinyPlugin, tmp_path: Path
) -> None:
    await registered(kubelet, plugin, A, C)
    for pod in ("one", "two"):
        assert (await kubelet.admit(pod, 1)).runs
    kubelet.lose_api_server()
    await kubelet.stop()
    kubelet.force_delete("one")
    await kubelet.start()
    with serving(tmp_path, "again.sock") as again:
        await registered(kubelet, again, A, C)
        assert await listed(tmp_path) == {}
        await lists(kubelet, again, A, C, ("d", "Healthy"))
        assert len(entries(tmp_path)) == 2
        kubelet.find_api_server()
        await until_listed(tmp_path, {"two": [(RESOURCE, "c", None)]})
        await lists(kubelet, again, A, C)
        assert entries(tmp_path) == [{"-1": ["c"]}]
        assert (await kubelet.admit("three", 1)).devices == ("a",)


async def test_a_kubelet_that_cannot_read_its_file_has_forgotten_what_its_pods_have(
    kubelet: Driver, plugin: TinyPlugin, tmp_path: Path
) -> None:
    await registered(kubelet, plugin, A)
    assert (await kubelet.admit("one", 1)).runs
    await kubelet.stop()
    file = tmp_path / "device-plugins" / "kubelet_internal_checkpoint"
    file.write_text(file.read_text()[:-40])
    await kubelet.start()
    await until_listed(tmp_path, {"one": []})
    with serving(tmp_path, "again.sock") as again:
        await registered(kubelet, again, A)
        assert entries(tmp_path) == []
