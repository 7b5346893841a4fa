"""What a script's steps use: calls, polls, and the observations that are compared.

An observation is a plain value: without times, process numbers and UIDs, and sorted where kubelet has no order.
"""

from __future__ import annotations

import base64
import copy
import json
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, Final

import grpc

from tests.node.originals.kubelets import PREFIX, Counts, Kubelet, PodState
from tests.node.originals.node import WITHIN_S, until
from tests.node.originals.plugin import WAIT_S, Device, Plugin
from tests.support.device_plugin_grpcio import message
from tests.support.pod_resources_grpcio import PROTO as POD_RESOURCES

RESOURCES: Final = "script.example/"
"""Prefix of the script's resources."""

Observation = dict[str, Any]
Observations = dict[str, Observation]
"""By step."""

Healthy = list[tuple[str, list[str], list[int] | None]]
"""GetAllocatableResources: resource, device IDs and NUMA nodes of each message."""


class Play:
    """One group of steps on one kubelet."""

    def __init__(self, kubelet: Kubelet, stack: ExitStack) -> None:
        self.kubelet = kubelet
        self.socket_dir = kubelet.directory / "device-plugins"
        self.observations: Observations = {}
        self._stack = stack

    def note(self, step: str, **observation: Any) -> None:
        """Records what a step has shown."""
        assert step not in self.observations, step
        self.observations[step] = copy.deepcopy(observation)

    # --- plugins ----------------------------------------------------------------------------------------------

    def plugin(self, name: str, resource: str) -> Plugin:
        """A plugin that serves and has not registered. It stops with the group."""
        plugin = Plugin(self.socket_dir, f"script-{name}.sock", RESOURCES + resource)
        self._stack.callback(plugin.stop)
        return plugin

    def registered(self, plugin: Plugin, *devices: Device) -> str:
        """Registers and sends a first list, until kubelet has it. Returns the error of Register."""
        opened = plugin.streams
        error = plugin.register()
        if until(lambda: plugin.streams > opened):
            self.sent(plugin, *devices)
        return error

    def sent(self, plugin: Plugin, *devices: Device) -> Healthy:
        """Sends a list; returns what is allocatable as soon as kubelet has the list and has written it to its file, or
        at the deadline."""
        plugin.send(*devices)
        wanted = {device.id for device in devices if device.health == "Healthy"}
        listed = {
            d.id for d in devices if d.health == "Healthy" and d.nodes != ()
        }  # kubelet leaves those out
        found = self.until_healthy(plugin, listed)
        until(lambda: set(self.file()["registered"].get(plugin.resource) or ()) == wanted)
        return found

    def until_healthy(self, plugin: Plugin, wanted: Iterable[str]) -> Healthy:
        """What is allocatable as soon as these devices of the plugin's resource are, or at the deadline."""
        found: Healthy = []
        ids = set(wanted)

        def reached() -> bool:
            nonlocal found
            found = self.allocatable()
            return {
                i for resource, devices, _ in found if resource == plugin.resource for i in devices
            } == ids

        until(reached)
        return found

    # --- PodResources -----------------------------------------------------------------------------------------

    def pod_resources(self, method: str, request: str, **fields: Any) -> Any:
        """One call. Raises `grpc.RpcError`."""
        path = self.kubelet.directory / "pod-resources" / "kubelet.sock"
        with grpc.insecure_channel(f"unix:{path}") as channel:
            lister = POD_RESOURCES.stub(channel, "PodResourcesLister")
            return lister[method](POD_RESOURCES.message(request)(**fields), timeout=WITHIN_S)

    def allocatable(self) -> Healthy:
        """GetAllocatableResources, one entry for each message."""
        answer = self.pod_resources("GetAllocatableResources", "AllocatableResourcesRequest")
        return sorted(_devices(answer.devices), key=str)

    def listed(self) -> dict[str, Any]:
        """List: the script's pods, with the devices of each container."""
        answer = self.pod_resources("List", "ListPodResourcesRequest")
        return {
            pod.name.removeprefix(PREFIX): _containers(pod)
            for pod in answer.pod_resources
            if pod.namespace == "default" and pod.name.startswith(PREFIX)
        }

    def got(self, pod: str) -> Any:
        """Get: a pod's containers, or code and text of the error."""
        try:
            answer = self.pod_resources(
                "Get", "GetPodResourcesRequest", pod_name=PREFIX + pod, pod_namespace="default"
            )
        except grpc.RpcError as error:
            status: Any = error
            return f"{status.code().name}: {status.details()}"
        return _containers(answer.pod_resources)

    def until_written(self) -> dict[str, Any]:
        """Kubelet's file as soon as it has an entry, or at the deadline: List is ahead of it."""
        until(lambda: bool(self.file()["entries"]))
        return self.file()

    def until_listed(self, *pods: str) -> dict[str, Any]:
        """What List answers as soon as it names exactly these pods, or at the deadline."""
        found: dict[str, Any] = {}

        def reached() -> bool:
            nonlocal found
            found = self.listed()
            return found.keys() == set(pods)

        until(reached)
        return found

    # --- the file ---------------------------------------------------------------------------------------------

    def file(self) -> dict[str, Any]:
        """The ledger's file: its entries, and the devices that are registered."""
        try:
            data = self.raw_file()["Data"]
        except (FileNotFoundError, json.JSONDecodeError) as error:
            return {"entries": type(error).__name__, "registered": {}}
        entries = data["PodDeviceEntries"]
        return {
            "entries": None if entries is None else sorted(map(_entry, entries), key=str),
            "registered": {name: ids and sorted(ids) for name, ids in data["RegisteredDevices"].items()},
        }

    def raw_file(self) -> Any:
        """The file as JSON."""
        return json.loads((self.socket_dir / "kubelet_internal_checkpoint").read_text(encoding="utf-8"))

    # --- pods -------------------------------------------------------------------------------------------------

    def create(self, pod: str, plugin: Plugin, size: int = 1, *, ignores_sigterm: bool = False) -> None:
        """Creates a pod that asks for devices of a plugin."""
        self.kubelet.create(PREFIX + pod, plugin.resource, size, ignores_sigterm=ignores_sigterm)

    def state(self, pod: str) -> PodState | None:
        """The pod now."""
        return self.kubelet.state(PREFIX + pod)

    def settled(self, pod: str, phase: str = "") -> PodState | None:
        """The pod as soon as it has this phase, or else as soon as it runs, has ended or says what it waits for."""
        found: PodState | None = None

        def reached() -> bool:
            nonlocal found
            found = self.state(pod)
            if found is None or phase:
                return found is not None and found.phase == phase
            return found.phase != "Pending" or bool(found.reason)

        until(reached)
        return found

    def run(self, pod: str, plugin: Plugin, size: int = 1) -> PodState | None:
        """Creates a pod and waits until it is settled."""
        self.create(pod, plugin, size)
        return self.settled(pod)

    def admit(self, pod: str, plugin: Plugin, size: int = 1) -> PodState | str | None:
        """Creates a pod and waits until it has its devices, or has been refused: sooner than its container runs."""
        self.create(pod, plugin, size)
        found: PodState | str | None = None

        def reached() -> bool:
            nonlocal found
            if any(self.listed().get(pod, {}).values()):
                found = "admitted"
                return True
            found = self.state(pod)
            return found is not None and found.phase == "Failed"

        until(reached)
        return found

    def force_delete(self, pod: str) -> None:
        """Deletes a pod by force and waits until there is none."""
        self.kubelet.force_delete(PREFIX + pod)
        until(lambda: self.state(pod) is None)

    def counts(self, plugin: Plugin, wanted: Counts) -> Counts:
        """The node's capacity and allocatable as soon as they are these, or at the deadline."""
        found = wanted

        def reached() -> bool:
            nonlocal found
            found = self.kubelet.counts(plugin.resource)
            return found == wanted

        until(reached)
        return found

    # --- kubelet ----------------------------------------------------------------------------------------------

    def restart(self) -> None:
        """Stops and starts kubelet."""
        self.kubelet.stop()
        self.kubelet.start()

    def sockets(self) -> dict[str, str]:
        """What lies below the device-plugins directory: name → kind and permissions. Without drafts of the file, which
        have random names and are left by a kubelet that crashes."""
        found = {}
        for path in sorted(self.socket_dir.rglob("[!.]*")):
            mode = path.lstat().st_mode
            found[str(path.relative_to(self.socket_dir))] = stat.filemode(mode)
        return found


def background(function: Callable[..., Any], *args: Any, **named: Any) -> Callable[[], Any]:
    """Runs a call in a thread; the result waits for it."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function(*args, **named)), daemon=True)
    thread.start()

    def result() -> Any:
        thread.join(WAIT_S)
        return results[0] if results else "not answered"

    return result


def _devices(found: Iterable[Any]) -> Iterator[tuple[str, list[str], list[int] | None]]:
    for devices in found:
        if devices.resource_name.startswith(RESOURCES):
            nodes = [node.ID for node in devices.topology.nodes] if devices.HasField("topology") else None
            yield devices.resource_name, sorted(devices.device_ids), nodes


def _containers(pod: Any) -> dict[str, Any]:
    return {
        container.name: sorted(_devices(container.devices), key=str)
        + [_dynamic(found) for found in container.dynamic_resources]
        for container in pod.containers
    }


def _dynamic(found: Any) -> Mapping[str, Any]:
    return {
        "claim": found.claim_name,
        "namespace": found.claim_namespace,
        "devices": [
            {
                "cdi": [device.name for device in resource.cdi_devices],
                "driver": resource.driver_name,
                "pool": resource.pool_name,
                "device": resource.device_name,
                "share": resource.HasField("share_id"),
            }
            for resource in found.claim_resources
        ],
    }


def _entry(entry: Mapping[str, Any]) -> dict[str, Any]:
    answer = message("ContainerAllocateResponse").FromString(base64.b64decode(entry["AllocResp"]))
    return {
        "keys": sorted(entry),
        "container": entry["ContainerName"],
        "resource": entry["ResourceName"],
        "devices": {node: sorted(ids) for node, ids in entry["DeviceIDs"].items()},
        "envs": dict(answer.envs),
        "nodes": [(n.container_path, n.host_path, n.permissions) for n in answer.devices],
    }
