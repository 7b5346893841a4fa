"""What the stand-in has and does that only a test wants, against the smallest plugin that grpcio can make. Whether it
is a kubelet is asked in `tests/simulation/kubelet/test_alike.py`."""

from __future__ import annotations

import json
import socket
import stat
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


def connected(kubelet: KubeletStandIn, plugin: TinyPlugin) -> None:
    """The plugin is registered, and kubelet has its list of one device."""
    plugin.register()
    plugin.lists.put([("a", "Healthy")])
    kubelet.wait_for(lambda lists: RESOURCE in lists, WAIT_S)


def test_each_frame_replaces_the_list(kubelet: KubeletStandIn, plugin: TinyPlugin) -> None:
    plugin.register()
    plugin.lists.put([("a", "Healthy"), ("b", "Healthy")])
    assert kubelet.wait_for(lambda lists: RESOURCE in lists, WAIT_S)[RESOURCE] == {
        "a": "Healthy",
        "b": "Healthy",
    }
    plugin.lists.put([("b", "Unhealthy")])
    kubelet.wait_for(lambda lists: lists.get(RESOURCE) == {"b": "Unhealthy"}, WAIT_S)
    first, second = kubelet.frames(RESOURCE)
    assert first.ids == ("a", "b")
    assert [device.numa_nodes for device in first.devices] == [None, (1,)]
    assert first.at_ns < second.at_ns
    (registration,) = kubelet.registrations
    assert (registration.resource, registration.error) == (RESOURCE, None)
    assert kubelet.options(RESOURCE) == PluginOptions(False, True)


def test_calls_reach_the_plugin(kubelet: KubeletStandIn, plugin: TinyPlugin) -> None:
    connected(kubelet, plugin)
    allocated = kubelet.allocate(RESOURCE, ["a"])
    assert allocated.envs == {"IDS": "a"}
    assert allocated.devices == (DeviceNode("/dev/c", "/dev/h", "mrw"),)
    assert kubelet.preferred(RESOURCE, ["c", "a", "b"], [], 2) == ("a", "b")
    plugin.refusals["PreStartContainer"] = [(grpc.StatusCode.FAILED_PRECONDITION, "not yet")]
    with pytest.raises(grpc.RpcError, match="not yet"):
        kubelet.prestart(RESOURCE, ["a"])
    with pytest.raises(EndpointStopped):
        kubelet.allocate("example.org/other", ["a"])


def test_stream_end_makes_devices_unhealthy_and_is_not_dialled_again(
    kubelet: KubeletStandIn, plugin: TinyPlugin
) -> None:
    connected(kubelet, plugin)
    plugin.lists.put(None)
    kubelet.wait_for(lambda lists: lists[RESOURCE] == {"a": "Unhealthy"}, WAIT_S)
    (end,) = kubelet.stream_ends(RESOURCE)
    assert (end.code, end.noticed) == ("OK", True)
    with pytest.raises(EndpointStopped):
        kubelet.allocate(RESOURCE, ["a"])
    plugin.register()
    plugin.lists.put([("a", "Healthy")])
    kubelet.wait_for(lambda lists: lists[RESOURCE] == {"a": "Healthy"}, WAIT_S)
    assert [frame.client for frame in kubelet.frames(RESOURCE)] == [0, 1]


def test_cut_stream(kubelet: KubeletStandIn, plugin: TinyPlugin) -> None:
    connected(kubelet, plugin)
    kubelet.cut_stream(RESOURCE)
    kubelet.wait_for(lambda lists: lists[RESOURCE] == {"a": "Unhealthy"}, WAIT_S)
    assert kubelet.stream_ends(RESOURCE)[0].code == "CANCELLED"


def test_a_failed_register_makes_it_forget_the_current_client(
    kubelet: KubeletStandIn, plugin: TinyPlugin
) -> None:
    connected(kubelet, plugin)
    kubelet.fail_registers(1)
    with pytest.raises(grpc.RpcError, match="failed to dial"):
        plugin.register()
    assert kubelet.registrations[1].error == "failed to dial device plugin"
    plugin.lists.put(None)
    kubelet.wait_for(lambda lists: bool(kubelet.stream_ends(RESOURCE)), WAIT_S)
    assert not kubelet.stream_ends(RESOURCE)[0].noticed
    assert kubelet.snapshot()[RESOURCE] == {"a": "Healthy"}


def test_held_reply(kubelet: KubeletStandIn, plugin: TinyPlugin) -> None:
    kubelet.hold_register_replies()
    with pytest.raises(grpc.RpcError) as caught:
        plugin.register(timeout_s=0.3)
    error: Any = caught.value
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    kubelet.wait_for(lambda lists: bool(kubelet.registrations), WAIT_S)
    kubelet.release_register_replies()
    assert kubelet.registrations[0].error == "the caller gave up"
    plugin.register()
    plugin.lists.put([])
    assert kubelet.wait_for(lambda lists: RESOURCE in lists, WAIT_S)[RESOURCE] == {}


def test_the_reply_to_one_resource_is_held(kubelet: KubeletStandIn, plugin: TinyPlugin) -> None:
    kubelet.hold_register_replies("example.org/other")
    plugin.register()
    with pytest.raises(grpc.RpcError) as caught:
        plugin.register(resource="example.org/other", timeout_s=0.3)
    error: Any = caught.value
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    kubelet.release_register_replies()
    plugin.register(resource="example.org/other")


@pytest.mark.parametrize("leave_sockets", [False, True])
def test_stop_and_start_again(kubelet: KubeletStandIn, plugin: TinyPlugin, leave_sockets: bool) -> None:
    connected(kubelet, plugin)
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
    connected(kubelet, plugin)
    with pytest.raises(TimeoutError, match=r"(?s)the moon .*'a': 'Healthy'.*Frame\("):
        kubelet.wait_for(lambda lists: "moon" in lists, 0.05, "the moon")


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


def test_a_device_of_a_pod_is_given_to_no_other(kubelet: KubeletStandIn, plugin: TinyPlugin) -> None:
    connected(kubelet, plugin)
    kubelet.allocate(RESOURCE, ["a"], pod="one")
    with pytest.raises(ValueError, match=r"a of example\.org/thing belongs to pod one"):
        kubelet.allocate(RESOURCE, ["a"], pod="two")
    assert listed(kubelet) == {"one": ["a"]}
    assert kubelet.lists == 1


def test_lists_are_refused_when_it_is_told_to(kubelet: KubeletStandIn) -> None:
    kubelet.fail_lists(1)
    with pytest.raises(grpc.RpcError, match="rejected by rate limit"):
        listed(kubelet)
    assert listed(kubelet) == {}


def test_another_kubelet_takes_the_ledger_over_and_lists_its_pods_when_it_hears_of_them(
    kubelet: KubeletStandIn, plugin: TinyPlugin, tmp_path: Path
) -> None:
    plugin.register()
    plugin.lists.put([("a", "Healthy"), ("b", "Healthy")])
    kubelet.wait_for(lambda lists: RESOURCE in lists, WAIT_S)
    kubelet.allocate(RESOURCE, ["a", "b"], pod="one")
    (entry,) = json.loads(kubelet.checkpoint.read_text())["Data"]["PodDeviceEntries"]
    kubelet.stop(leave_sockets=True)

    other = KubeletStandIn(tmp_path, synced=True)
    other.restore_pods()
    with other:
        assert listed(other) == {}
        again = TinyPlugin(other.socket_dir)  # the sockets that were there are removed
        again.register()
        again.lists.put([("a", "Unhealthy"), ("b", "Unhealthy")])
        other.wait_for(lambda lists: RESOURCE in lists, WAIT_S)
        assert json.loads(other.checkpoint.read_text())["Data"]["PodDeviceEntries"] == [entry]
        other.hear_of_pods()
        assert listed(other) == {entry["PodUID"]: ["a", "b"]}
        again.server.stop(grace=None).wait()
    kubelet.start()
