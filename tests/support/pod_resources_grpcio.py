"""Kubelet's ledger for the grpcio stand-in: PodResources (v1) as it was seen to answer, and the file beside it.

Seen on kubelet 1.35.3 and 1.36: a pod is listed while it is admitted, and with its devices as soon as its Allocate is
answered; a normal deletion leaves List 0.1 s after the
container's process ended, a forced one at once; what an ended pod has stays in kubelet's ledger until List or an
allocation asks, and in the file until the next frame or allocation after that; a kubelet that has just started lists
no pod before it hears from the API server which it has. Must not import gpuactors, and must not be kinder than kubelet.
"""

from __future__ import annotations

import base64
import json
import os
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import grpc

from tests.support.grpcio_proto import ProtoFile

RELEASE_S: Final = 0.1
HEARS_AFTER_S: Final = 0.1
"""From kubelet's start to what the API server tells it: seen from 0.03 s on."""

QUERIES_PER_S: Final = 100.0
"""Of all clients of PodResources together."""

BURST: Final = 10.0

FILE_MODE: Final = 0o600
"""Only root reads the file."""

NAMESPACE: Final = "default"
CONTAINER: Final = "compute"
WITHOUT_TOPOLOGY: Final = -1
"""The NUMA node in the file of a device that has none."""

PROTO: Final = ProtoFile("podresources.proto", "v1")

DAEMON_PODS: Final = ("kube-proxy-x7k2p", "cni-node-9qz4d")
"""What any node has besides, and List names as soon as kubelet has heard of its pods: pods without devices."""

Nodes = tuple[int, ...]
"""A device's NUMA nodes; none where the plugin sent no topology."""

Healthy = Mapping[str, Mapping[str, Nodes]]
"""The Healthy devices of each resource, as GetAllocatableResources has them."""


@dataclass(slots=True, eq=False)
class _Pod:
    """As the API server has it."""

    uid: str
    gone_at: float | None = None
    """On time.monotonic()."""
    failed: bool = False
    """It was not admitted: kubelet does not count it as active."""

    def is_active(self, now: float) -> bool:
        """Whether List names it at this time."""
        return not self.failed and (self.gone_at is None or now < self.gone_at)


@dataclass(frozen=True, slots=True)
class _Allocation:
    """One entry of kubelet's ledger. `response` is the container's part of AllocateResponse."""

    devices: Mapping[str, Nodes]
    response: bytes

    def by_node(self) -> dict[int, list[str]]:
        """A device with two nodes is there twice."""
        found: dict[int, list[str]] = {}
        for device, nodes in self.devices.items():
            for node in nodes or (WITHOUT_TOPOLOGY,):
                found.setdefault(node, []).append(device)
        return found


@final
class PodLedger:
    """Which pod has which devices. `List`, `Get` and `GetAllocatableResources` are the gRPC methods. All methods may be
    called from any thread."""

    def __init__(
        self,
        file: Path,
        *,
        healthy: Callable[[], Healthy] = dict,
        synced: bool = False,
        get_tells_ended: bool = False,
    ) -> None:
        """`healthy`: kubelet's own list. `synced`: the file is on the disk before it has its name, as kubelet has it
        (pkg/kubelet/util/store); only a power cut shows the difference. `get_tells_ended`: Get answers for pods that
        have ended as well, as before 1.36."""
        self._file = file
        self._synced = synced
        self._get_tells_ended = get_tells_ended
        self._lock = threading.Lock()
        self._pods: dict[str, _Pod] = {}
        self._given: dict[tuple[str, str], _Allocation] = {}
        """By pod UID and resource."""
        self._registered: dict[str, tuple[str, ...]] = {}
        self._healthy = healthy
        self._hears_at = 0.0
        self._tokens, self._counted_at = BURST, time.monotonic()
        self._besides: tuple[Any, ...] = ()
        self._failures: list[tuple[grpc.StatusCode, str]] = []
        self._disabled: tuple[grpc.StatusCode, str] | None = None
        self._asked = 0

    # --- kubelet's life -----------------------------------------------------------------------------------

    def boot(self, *, hears: bool) -> None:
        """Kubelet starts: its ledger is what the file says, and it has no device of any plugin. It hears of its pods in
        a moment; if not `hears`, when `hear_of_pods` is called."""
        with self._lock:
            self._given, self._registered = {}, {}
            with suppress(
                OSError, ValueError, LookupError, TypeError
            ):  # kubelet starts with an empty ledger then
                self._given, self._registered = self._read()
            wait_s = HEARS_AFTER_S if self._pods else 0.0
            self._hears_at = time.monotonic() + wait_s if hears else float("inf")

    def restore(self) -> None:
        """Before `boot`, on a node that had a kubelet: the API server has a pod for each entry of the file. Their names
        are not in it: here they are their UIDs. Raises OSError, ValueError."""
        given, _ = self._read()
        with self._lock:
            for uid, _ in given:
                self._pods.setdefault(uid, _Pod(uid))

    def hear_of_pods(self) -> None:
        """The API server has told which pods there are."""
        with self._lock:
            self._hears_at = 0.0

    # --- kubelet's device manager -------------------------------------------------------------------------

    def given(self, pod: str, resource: str, devices: Mapping[str, Nodes], response: bytes) -> None:
        """Allocate was answered. Raises ValueError for a device that another pod has: kubelet would not choose it."""
        with self._lock:
            self._collect()
            found = self._pods.get(pod, _Pod(str(uuid.uuid4())))
            names = {other.uid: name for name, other in self._pods.items()}
            for (uid, theirs), entry in self._given.items():
                taken = entry.devices.keys() & devices.keys()
                if taken and theirs == resource and uid != found.uid:
                    raise ValueError(
                        f"{', '.join(sorted(taken))} of {resource} belongs to pod {names.get(uid, uid)}"
                    )
            self._pods[pod] = found
            self._given[found.uid, resource] = _Allocation(dict(devices), response)
            self._write()

    def taken(self, resource: str) -> set[str]:
        """What kubelet would give to no other pod."""
        with self._lock:
            self._collect()
            return {d for (_, r), entry in self._given.items() if r == resource for d in entry.devices}

    def frame(self, resource: str, healthy: Collection[str]) -> None:
        """A frame came."""
        with self._lock:
            self._registered[resource] = tuple(healthy)
            self._write()

    def stream_ended(self, resource: str) -> None:
        """Nothing of a resource is Healthy any more; the file says so when it is written the next time."""
        with self._lock:
            self._registered[resource] = ()

    # --- pods ---------------------------------------------------------------------------------------------

    def begin(self, pod: str) -> None:
        """A pod comes to the node; one of that name that has failed is replaced."""
        with self._lock:
            found = self._pods.get(pod)
            if found is None or found.failed:
                self._pods[pod] = _Pod(str(uuid.uuid4()))

    def fail_pod(self, pod: str) -> None:
        """The pod is not admitted. Raises KeyError if there is no such pod."""
        with self._lock:
            self._pods[pod].failed = True

    def uid(self, pod: str) -> str:
        """Raises KeyError if there is no such pod."""
        with self._lock:
            return self._pods[pod].uid

    def end(self, pod: str) -> None:
        """The pod's process has ended. Raises KeyError if there is no such pod."""
        with self._lock:
            self._pods[pod].gone_at = time.monotonic() + RELEASE_S

    def force_delete(self, pod: str) -> None:
        """The pod is gone, whatever its process does. Raises KeyError if there is no such pod."""
        with self._lock:
            del self._pods[pod]

    def list_besides(self, pods: Sequence[Any]) -> None:
        """From now on List names these as well: whole `PodResources` messages, of other plugins' pods."""
        with self._lock:
            self._besides = tuple(pods)

    # --- PodResources -------------------------------------------------------------------------------------

    def fail(self, times: int, code: grpc.StatusCode, details: str) -> None:
        """Refuse the next `times` calls of List."""
        with self._lock:
            self._failures += [(code, details)] * times

    def disable_allocatable(self, code: grpc.StatusCode, details: str) -> None:
        """Refuse GetAllocatableResources from now on."""
        self._disabled = code, details

    @property
    def asked(self) -> int:
        """How often List was called."""
        with self._lock:
            return self._asked

    def List(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Every active pod that kubelet has heard of, and the devices that it has; one message per device and NUMA
        node."""
        self._count(context)
        with self._lock:
            self._asked += 1
            failure = self._failures.pop(0) if self._failures else None
            self._collect()
            pods = [*self._besides]
            if self._hears_at <= time.monotonic():
                pods += [self._listed(name, pod) for name, pod in self._pods.items() if not pod.failed]
                pods += [
                    PROTO.message("PodResources")(name=name, namespace="kube-system") for name in DAEMON_PODS
                ]
        if failure is not None:
            context.abort(*failure)
        return PROTO.message("ListPodResourcesResponse")(pod_resources=pods)

    def Get(self, request: Any, context: grpc.ServicerContext) -> Any:
        """One active pod that kubelet has heard of."""
        self._count(context)
        with self._lock:
            now = time.monotonic()
            pod = self._pods.get(request.pod_name) if self._hears_at <= now else None
            if pod is not None and not self._get_tells_ended and not pod.is_active(now):
                pod = None
            found = None if pod is None else self._listed(request.pod_name, pod)
        if found is None or request.pod_namespace != NAMESPACE:
            context.abort(
                grpc.StatusCode.UNKNOWN,
                f"pod {request.pod_name} in namespace {request.pod_namespace} not found",
            )
        return PROTO.message("GetPodResourcesResponse")(pod_resources=found)

    def GetAllocatableResources(self, request: Any, context: grpc.ServicerContext) -> Any:
        """One message per healthy device and NUMA node, and none for a resource that has no healthy one."""
        self._count(context)
        if self._disabled is not None:
            context.abort(*self._disabled)
        return PROTO.message("AllocatableResourcesResponse")(
            devices=[
                _device(resource, device, node)
                for resource, devices in self._healthy().items()
                for device, nodes in devices.items()
                for node in nodes or (WITHOUT_TOPOLOGY,)
            ]
        )

    def _count(self, context: grpc.ServicerContext) -> None:
        """A token bucket (golang.org/x/time/rate)."""
        with self._lock:
            now = time.monotonic()
            self._tokens = min(BURST, self._tokens + (now - self._counted_at) * QUERIES_PER_S)
            self._counted_at = now
            refused = self._tokens < 1
            if not refused:
                self._tokens -= 1
        if refused:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit")

    def _listed(self, name: str, pod: _Pod) -> Any:
        devices = [
            _device(resource, device, node)
            for (uid, resource), entry in self._given.items()
            if uid == pod.uid
            for node, ids in entry.by_node().items()
            for device in ids
        ]
        container = PROTO.message("ContainerResources")(name=CONTAINER, devices=devices)
        return PROTO.message("PodResources")(name=name, namespace=NAMESPACE, containers=[container])

    def _collect(self) -> None:
        """Drops what ended pods had, once it is known which those are (UpdateAllocatedDevices)."""
        now = time.monotonic()
        self._pods = {n: p for n, p in self._pods.items() if p.gone_at is None or now < p.gone_at}
        if self._hears_at <= now:
            active = {pod.uid for pod in self._pods.values() if not pod.failed}
            self._given = {key: entry for key, entry in self._given.items() if key[0] in active}

    # --- the file -----------------------------------------------------------------------------------------

    def _read(self) -> tuple[dict[tuple[str, str], _Allocation], dict[str, tuple[str, ...]]]:
        data = json.loads(self._file.read_text(encoding="utf-8"))["Data"]
        given = {}
        for entry in data["PodDeviceEntries"] or ():
            devices: dict[str, Nodes] = {}
            for node, device in _devices_in(entry):
                devices[device] = devices.get(device, ()) + ((node,) if node != WITHOUT_TOPOLOGY else ())
            response = base64.b64decode(entry["AllocResp"])
            given[entry["PodUID"], entry["ResourceName"]] = _Allocation(devices, response)
        return given, dict.fromkeys(data["RegisteredDevices"], ())

    def _write(self) -> None:
        """The checksum is left at 0: whoever reads the file from outside cannot rely on it."""
        entries = [
            {
                "PodUID": uid,
                "ContainerName": CONTAINER,
                "ResourceName": resource,
                "DeviceIDs": {str(node): devices for node, devices in sorted(entry.by_node().items())},
                "AllocResp": base64.b64encode(entry.response).decode("ascii"),
            }
            for (uid, resource), entry in self._given.items()
        ]
        registered = {resource: list(ids) for resource, ids in self._registered.items()}
        data = {"PodDeviceEntries": entries or None, "RegisteredDevices": registered}
        draft = self._file.with_name(f".{self._file.name}")
        with suppress(OSError):  # kubelet logs that and goes on; a test may have taken the directory away
            with draft.open("w", encoding="utf-8") as file:
                json.dump({"Data": data, "Checksum": 0}, file)
                if self._synced:
                    file.flush()
                    os.fsync(file.fileno())
            draft.chmod(FILE_MODE)
            draft.rename(self._file)


def _devices_in(entry: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    for node, devices in entry["DeviceIDs"].items():
        for device in devices:
            yield int(node), device


def _device(resource: str, device: str, node: int) -> Any:
    topology = None
    if node != WITHOUT_TOPOLOGY:
        topology = PROTO.message("TopologyInfo")(nodes=[PROTO.message("NUMANode")(ID=node)])
    return PROTO.message("ContainerDevices")(resource_name=resource, device_ids=[device], topology=topology)
