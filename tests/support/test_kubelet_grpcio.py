"""The stand-in against the smallest plugin that grpcio can make: does it do what kubelet was seen to do?"""

from __future__ import annotations

import json
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.support.kubelet_grpcio import EndpointStopped, KubeletStandIn
from tests.support.kubelet_seen import DeviceNode, PluginOptions
from tests.support.pod_resources_grpcio import PROTO as POD_RESOURCES
from tests.support.tiny_plugin import RESOURCE, WAIT_S, TinyPlugin


@pytest.fixture
def kubelet(tmp_path: Path) -> Iterator[KubeletStandIn]:
    with KubeletStandIn(tmp_path, dial_timeout_s=0.5) as standin:
        yield standin


@pytest.fixture
def plugin(kubelet: KubeletStandIn) -> Iterator[TinyPlugin]:
    tiny = TinyPlugin(kubelet.socket_dir)
    yield tiny
    tiny.server.stop(grace=None).wait()


def test_each_frame_replaces_the_list(kubelet: KubeletStandIn, plugin: TinyPlugin) -> None:
    plugin.register()
    plugin.frames.put([("a", "Healthy"), ("b", "Healthy")])
    assert kubelet.wait_for(lambda books: RESOURCE in books, WAIT_S)[RESOURCE] == {
        "a": "Healthy",
        "b": "Healthy",
    }
    plugin.frames.put([("b", "Unhealthy")])
    kubelet.wait_for(lambda books: books.get(RESOURCE) == {"b": "Unhealthy"}, WAIT_S)
    first, second = kubelet.frames(RESOURCE)
    assert first.ids == ("a", "b")
    assert [device.numa_nodes for device in first.devices] == [None, (1,)]
    assert first.at_ns < second.at_ns
    (registration,) = kubelet.registrations
    assert (registration.resource, registration.error) == (RESOURCE, None)
    assert kubelet.options(RESOURCE) == PluginOptions(False, True)


def test_calls_reach_the_plugin(kubelet: KubeletStandIn, plugin: TinyPlugin) -> None:
    plugin.register()
    plugin.frames.put([("a", "Healthy")])
    kubelet.wait_for(lambda books: RESOURCE in books, WAIT_S)
    allocated = kubelet.allocate(RESOURCE, ["a"])
    assert allocated.envs == {"IDS": "a"}
    assert allocated.devices == (DeviceNode("/dev/c", "/dev/h", "mrw"),)
    assert kubelet.preferred(RESOURCE, ["c", "a", "b"], [], 2) == ("a", "b")
    with pytest.raises(grpc.RpcError, match="not yet"):
        kubelet.prestart(RESOURCE, ["a"])
    with pytest.raises(EndpointStopped):
        kubelet.allocate("example.org/other", ["a"])


def test_stream_end_makes_devices_unhealthy_and_is_not_dialled_again(
    kubelet: KubeletStandIn, plugin: TinyPlugin
) -> None:
    plugin.register()
    plugin.frames.put([("a", "Healthy")])
    kubelet.wait_for(lambda books: RESOURCE in books, WAIT_S)
    plugin.frames.put(None)
    kubelet.wait_for(lambda books: books[RESOURCE] == {"a": "Unhealthy"}, WAIT_S)
    (end,) = kubelet.stream_ends(RESOURCE)
    assert (end.code, end.noticed) == ("OK", True)
    with pytest.raises(EndpointStopped):
        kubelet.allocate(RESOURCE, ["a"])
    plugin.register()
    plugin.frames.put([("a", "Healthy")])
    kubelet.wait_for(lambda books: books[RESOURCE] == {"a": "Healthy"}, WAIT_S)
    assert [frame.client for frame in kubelet.frames(RESOURCE)] == [0, 1]


def test_cut_stream(kubelet: KubeletStandIn, plugin: TinyPlugin) -> None:
    plugin.register()
    plugin.frames.put([("a", "Healthy")])
    kubelet.wait_for(lambda books: RESOURCE in books, WAIT_S)
    kubelet.cut_stream(RESOURCE)
    kubelet.wait_for(lambda books: books[RESOURCE] == {"a": "Unhealthy"}, WAIT_S)
    assert kubelet.stream_ends(RESOURCE)[0].code == "CANCELLED"


def test_the_end_of_an_old_stream_cuts_off_the_new_one(kubelet: KubeletStandIn, plugin: TinyPlugin) -> None:
    successor = TinyPlugin(kubelet.socket_dir, "successor.sock")
    plugin.register()
    plugin.frames.put([("a", "Healthy")])
    kubelet.wait_for(lambda books: RESOURCE in books, WAIT_S)
    successor.register()
    successor.frames.put([("a", "Healthy")])
    kubelet.wait_for(lambda books: len(kubelet.frames(RESOURCE)) == 2, WAIT_S)
    plugin.frames.put(None)
    kubelet.wait_for(lambda books: len(kubelet.stream_ends(RESOURCE)) == 2, WAIT_S)
    assert kubelet.snapshot()[RESOURCE] == {"a": "Unhealthy"}
    assert [end.client for end in kubelet.stream_ends(RESOURCE)] == [0, 1]
    successor.server.stop(grace=None).wait()


def test_a_failed_register_makes_it_forget_the_current_client(
    kubelet: KubeletStandIn, plugin: TinyPlugin
) -> None:
    plugin.register()
    plugin.frames.put([("a", "Healthy")])
    kubelet.wait_for(lambda books: RESOURCE in books, WAIT_S)
    kubelet.fail_registers(1)
    with pytest.raises(grpc.RpcError, match="failed to dial"):
        plugin.register()
    assert kubelet.registrations[1].error == "failed to dial device plugin"
    plugin.frames.put(None)
    kubelet.wait_for(lambda books: bool(kubelet.stream_ends(RESOURCE)), WAIT_S)
    assert not kubelet.stream_ends(RESOURCE)[0].noticed
    assert kubelet.snapshot()[RESOURCE] == {"a": "Healthy"}


@pytest.mark.parametrize(
    ("version", "resource", "sentence"),
    [
        ("v1alpha", RESOURCE, "not supported"),
        ("v1beta1", "no-slash", "is invalid"),
        ("v1beta1", "example.org/ends_in_", "is invalid"),
        ("v1beta1", "example.org/" + 64 * "x", "is invalid"),
        ("v1beta1", "node.kubernetes.io/x", "is invalid"),
    ],
)
def test_register_is_refused(
    kubelet: KubeletStandIn, plugin: TinyPlugin, version: str, resource: str, sentence: str
) -> None:
    with pytest.raises(grpc.RpcError, match=sentence):
        plugin.register(version, resource)
    assert sentence in str(kubelet.registrations[0].error)


def test_nobody_at_the_endpoint(kubelet: KubeletStandIn, plugin: TinyPlugin) -> None:
    plugin.name = "nobody.sock"
    with pytest.raises(grpc.RpcError, match="failed to dial device plugin"):
        plugin.register()


def test_held_reply(kubelet: KubeletStandIn, plugin: TinyPlugin) -> None:
    kubelet.hold_register_replies()
    with pytest.raises(grpc.RpcError) as caught:
        plugin.register(timeout_s=0.3)
    error: Any = caught.value
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    kubelet.wait_for(lambda books: bool(kubelet.registrations), WAIT_S)
    kubelet.release_register_replies()
    assert kubelet.registrations[0].error == "the caller gave up"
    plugin.register()
    plugin.frames.put([])
    assert kubelet.wait_for(lambda books: RESOURCE in books, WAIT_S)[RESOURCE] == {}


def test_the_reply_to_one_resource_is_held(kubelet: KubeletStandIn, plugin: TinyPlugin) -> None:
    kubelet.hold_register_replies("example.org/other")
    plugin.register()
    with pytest.raises(grpc.RpcError) as caught:
        plugin.register(resource="example.org/other", timeout_s=0.3)
    error: Any = caught.value
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    kubelet.release_register_replies()
    plugin.register(resource="example.org/other")


def test_a_device_that_leaves_during_a_call_is_a_panic(kubelet: KubeletStandIn, plugin: TinyPlugin) -> None:
    plugin.register()
    plugin.frames.put([("a", "Healthy"), ("b", "Healthy")])
    kubelet.wait_for(lambda books: RESOURCE in books, WAIT_S)

    def drop_b() -> None:
        plugin.frames.put([("a", "Healthy")])
        kubelet.wait_for(lambda books: books[RESOURCE] == {"a": "Healthy"}, WAIT_S)

    plugin.on_allocate = drop_b
    kubelet.allocate(RESOURCE, ["a"])
    assert not kubelet.panics
    plugin.frames.put([("a", "Healthy"), ("b", "Healthy")])
    kubelet.wait_for(lambda books: "b" in books[RESOURCE], WAIT_S)
    kubelet.allocate(RESOURCE, ["b"])
    assert kubelet.panics == (f"{RESOURCE}: b left the list during a call that picked it",)


@pytest.mark.parametrize("leave_sockets", [False, True])
def test_stop_and_start_again(kubelet: KubeletStandIn, plugin: TinyPlugin, leave_sockets: bool) -> None:
    plugin.register()
    plugin.frames.put([("a", "Healthy")])
    kubelet.wait_for(lambda books: RESOURCE in books, WAIT_S)
    kubelet.stop(leave_sockets=leave_sockets)
    assert kubelet.socket.exists() is leave_sockets
    with socket.socket(socket.AF_UNIX) as client, pytest.raises(OSError, match=r"refused|No such file"):
        client.connect(str(kubelet.socket))
    (kubelet.socket_dir / "keep").write_text("a file is not a socket")
    kubelet.start()
    assert kubelet.snapshot() == {}
    names = {entry.name: stat.S_ISSOCK(entry.lstat().st_mode) for entry in kubelet.socket_dir.iterdir()}
    assert names == {"kubelet.sock": True, "keep": False, "kubelet_internal_checkpoint": False}


def test_time_out_says_what_was_seen(kubelet: KubeletStandIn, plugin: TinyPlugin) -> None:
    plugin.register()
    plugin.frames.put([("a", "Healthy")])
    kubelet.wait_for(lambda books: RESOURCE in books, WAIT_S)
    with pytest.raises(TimeoutError, match=r"(?s)the moon .*'a': 'Healthy'.*Frame\("):
        kubelet.wait_for(lambda books: "moon" in books, 0.05, "the moon")


# --- two plugins on one resource ---------------------------------------------------------------------------


@pytest.fixture
def other(kubelet: KubeletStandIn) -> Iterator[TinyPlugin]:
    tiny = TinyPlugin(kubelet.socket_dir, "other.sock")
    yield tiny
    tiny.server.stop(grace=None).wait()


def test_each_frame_of_either_plugin_replaces_the_list_and_allocate_goes_to_the_newer(
    kubelet: KubeletStandIn, plugin: TinyPlugin, other: TinyPlugin
) -> None:
    plugin.register()
    plugin.frames.put([("a", "Healthy")])
    kubelet.wait_for(lambda books: books.get(RESOURCE) == {"a": "Healthy"}, WAIT_S)
    other.register()
    other.frames.put([("b", "Healthy")])
    kubelet.wait_for(lambda books: books.get(RESOURCE) == {"b": "Healthy"}, WAIT_S)
    plugin.frames.put([("a", "Healthy")])
    kubelet.wait_for(lambda books: books.get(RESOURCE) == {"a": "Healthy"}, WAIT_S)
    asked: list[str] = []
    plugin.on_allocate = lambda: asked.append("first")
    other.on_allocate = lambda: asked.append("second")
    kubelet.allocate(RESOURCE, ["a"])
    assert asked == ["second"]
    assert kubelet.stream_ends(RESOURCE) == (), "the first one is told nothing"


def test_when_the_newer_plugin_goes_the_older_ones_open_stream_is_no_endpoint(
    kubelet: KubeletStandIn, plugin: TinyPlugin, other: TinyPlugin
) -> None:
    plugin.register()
    plugin.frames.put([("a", "Healthy")])
    kubelet.wait_for(lambda books: books.get(RESOURCE) == {"a": "Healthy"}, WAIT_S)
    other.register()
    other.frames.put([("b", "Healthy")])
    kubelet.wait_for(lambda books: books.get(RESOURCE) == {"b": "Healthy"}, WAIT_S)
    other.frames.put(None)
    kubelet.wait_for(lambda books: books.get(RESOURCE) == {"b": "Unhealthy"}, WAIT_S)
    assert allocatable(kubelet) == []
    plugin.frames.put([("a", "Healthy")])
    kubelet.wait_for(lambda books: books.get(RESOURCE) == {"a": "Healthy"}, WAIT_S)
    assert allocatable(kubelet) == [(RESOURCE, ["a"])]
    with pytest.raises(EndpointStopped):
        kubelet.allocate(RESOURCE, ["a"])


def test_the_first_plugin_that_registers_again_has_the_list_and_the_other_is_not_told(
    kubelet: KubeletStandIn, plugin: TinyPlugin, other: TinyPlugin
) -> None:
    plugin.register()
    other.register()
    other.frames.put([("b", "Healthy")])
    kubelet.wait_for(lambda books: books.get(RESOURCE) == {"b": "Healthy"}, WAIT_S)
    plugin.register()
    plugin.frames.put([("a", "Healthy")])
    kubelet.wait_for(lambda books: books.get(RESOURCE) == {"a": "Healthy"}, WAIT_S)
    plugin.on_allocate = lambda: plugin.frames.put([("a", "Unhealthy")])
    kubelet.allocate(RESOURCE, ["a"])
    kubelet.wait_for(lambda books: books.get(RESOURCE) == {"a": "Unhealthy"}, WAIT_S)
    assert kubelet.stream_ends(RESOURCE) == ()


def test_get_allocatable_resources_can_be_refused(kubelet: KubeletStandIn) -> None:
    assert allocatable(kubelet) == []
    kubelet.disable_allocatable()
    with pytest.raises(grpc.RpcError, match="unknown method"):
        allocatable(kubelet)


def allocatable(kubelet: KubeletStandIn) -> list[tuple[str, list[str]]]:
    with grpc.insecure_channel(f"unix:{kubelet.pod_resources_socket}") as channel:
        lister = POD_RESOURCES.stub(channel, "PodResourcesLister")
        request = POD_RESOURCES.message("AllocatableResourcesRequest")()
        answer = lister["GetAllocatableResources"](request, timeout=WAIT_S)
    return [(d.resource_name, list(d.device_ids)) for d in answer.devices]


# --- its ledger -------------------------------------------------------------------------------------------


def listed(kubelet: KubeletStandIn) -> dict[str, list[str]]:
    """What PodResources lists: devices by pod."""
    with grpc.insecure_channel(f"unix:{kubelet.pod_resources_socket}") as channel:
        lister = POD_RESOURCES.stub(channel, "PodResourcesLister")
        answer = lister["List"](POD_RESOURCES.message("ListPodResourcesRequest")(), timeout=WAIT_S)
    return {
        pod.name: [d for c in pod.containers for devices in c.devices for d in devices.device_ids]
        for pod in answer.pod_resources
        if pod.namespace != "kube-system"
    }


def in_file(kubelet: KubeletStandIn) -> list[list[str]]:
    entries = json.loads(kubelet.checkpoint.read_text())["Data"]["PodDeviceEntries"]
    return [entry["DeviceIDs"]["-1"] for entry in entries or ()]


def test_a_pods_devices_are_listed_until_it_ends_and_stay_in_the_file(
    kubelet: KubeletStandIn, plugin: TinyPlugin
) -> None:
    plugin.register()
    plugin.frames.put([("a", "Healthy"), ("b", "Healthy")])
    kubelet.wait_for(lambda books: len(books.get(RESOURCE, ())) == 2, WAIT_S)
    assert listed(kubelet) == {}
    assert in_file(kubelet) == []
    before: list[dict[str, list[str]]] = []
    plugin.on_allocate = lambda: before.append(listed(kubelet))
    kubelet.allocate(RESOURCE, ["a"], pod="one")
    kubelet.allocate(RESOURCE, ["b"], pod="two")
    assert before == [{}, {"one": ["a"]}], "an Allocate in flight is not listed"
    assert listed(kubelet) == {"one": ["a"], "two": ["b"]}
    with pytest.raises(ValueError, match=r"a of example\.org/thing belongs to pod one"):
        kubelet.allocate(RESOURCE, ["a"], pod="three")

    kubelet.force_delete("one")
    assert listed(kubelet) == {"two": ["b"]}
    kubelet.end_pod("two")
    deadline = time.monotonic() + WAIT_S
    while listed(kubelet):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert in_file(kubelet) == [["a"], ["b"]], "a release writes nothing"
    kubelet.allocate(RESOURCE, ["b"], pod="next")
    assert in_file(kubelet) == [["b"]]
    assert kubelet.lists >= 5


def test_its_ledger_outlives_it(kubelet: KubeletStandIn, plugin: TinyPlugin) -> None:
    plugin.register()
    plugin.frames.put([("a", "Healthy")])
    kubelet.wait_for(lambda books: RESOURCE in books, WAIT_S)
    kubelet.allocate(RESOURCE, ["a"], pod="one")
    kubelet.stop(leave_sockets=True)
    with pytest.raises(grpc.RpcError) as refused:
        listed(kubelet)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert in_file(kubelet) == [["a"]]
    assert stat.S_ISSOCK(kubelet.pod_resources_socket.stat().st_mode)
    kubelet.start()
    assert listed(kubelet) == {"one": ["a"]}


def test_lists_are_refused_when_it_is_told_to(kubelet: KubeletStandIn) -> None:
    kubelet.fail_lists(1)
    with pytest.raises(grpc.RpcError, match="rejected by rate limit"):
        listed(kubelet)
    assert listed(kubelet) == {}


def test_another_kubelet_takes_the_ledger_over_and_lists_its_pods_when_it_hears_of_them(
    kubelet: KubeletStandIn, plugin: TinyPlugin, tmp_path: Path
) -> None:
    plugin.register()
    plugin.frames.put([("a", "Healthy"), ("b", "Healthy")])
    kubelet.wait_for(lambda books: RESOURCE in books, WAIT_S)
    kubelet.allocate(RESOURCE, ["a", "b"], pod="one")
    (entry,) = json.loads(kubelet.checkpoint.read_text())["Data"]["PodDeviceEntries"]
    kubelet.stop(leave_sockets=True)

    other = KubeletStandIn(tmp_path, synced=True)
    other.restore_pods()
    with other:
        assert listed(other) == {}
        again = TinyPlugin(other.socket_dir)  # the sockets that were there are removed
        again.register()
        again.frames.put([("a", "Unhealthy"), ("b", "Unhealthy")])
        other.wait_for(lambda books: RESOURCE in books, WAIT_S)
        assert json.loads(other.checkpoint.read_text())["Data"]["PodDeviceEntries"] == [entry]
        other.hear_of_pods()
        assert listed(other) == {entry["PodUID"]: ["a", "b"]}
        again.server.stop(grace=None).wait()
    kubelet.start()
