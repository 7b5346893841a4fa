"""Kubelet's ledger for the grpcio stand-in: PodResources (v1) as it was seen to answer, and the file beside it.

Seen on kubelet 1.36: a pod is listed as soon as its Allocate is answered; a normal deletion leaves List 0.1 s after the
container's process ended, a forced one at once; the file is rewritten by a frame or an allocation alone, so that it
names ended pods until then. Must not import gpuactors, and must not be kinder than kubelet.
"""

from __future__ import annotations

import base64
import json
import os
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, final

import grpc

from tests.support.grpcio_proto import ProtoFile

RELEASE_S: Final = 0.1
NAMESPACE: Final = "default"
CONTAINER: Final = "compute"

PROTO: Final = ProtoFile("podresources.proto", "v1")

DAEMON_PODS: Final = ("kube-proxy-x7k2p", "cni-node-9qz4d")
"""What any node has besides, and List names as soon as kubelet has heard of its pods: pods without devices."""


@dataclass(slots=True, eq=False)
class _Pod:
    uid: str
    given: dict[str, tuple[tuple[str, ...], bytes]] = field(default_factory=dict)
    """By resource: devices, and the container's part of AllocateResponse."""
    gone_at: float | None = None
    """On time.monotonic()."""
    known: bool = True
    """Kubelet has heard of it since its start; until then only its ledger has it, and the file."""


@final
class PodLedger:
    """Which pod has which devices. `List` and `GetAllocatableResources` are the gRPC methods. All methods may be called
    from any thread."""

    def __init__(
        self, file: Path, *, healthy: Callable[[], Mapping[str, Collection[str]]] = dict, synced: bool = False
    ) -> None:
        """`healthy`: kubelet's own list, by resource. `synced`: the file is on the disk before it has its name, as
        kubelet has it (pkg/kubelet/util/store); only a power cut shows the difference."""
        self._file = file
        self._synced = synced
        self._lock = threading.Lock()
        self._pods: dict[str, _Pod] = {}
        self._healthy: dict[str, tuple[str, ...]] = {}
        self._allocatable = healthy
        self._besides: tuple[Any, ...] = ()
        self._failures: list[tuple[grpc.StatusCode, str]] = []
        self._disabled: tuple[grpc.StatusCode, str] | None = None
        self._asked = 0
        self._heard = True

    def given(self, pod: str, resource: str, ids: Collection[str], response: bytes) -> None:
        """Allocate was answered. Raises ValueError for a device that another pod has: kubelet would not choose it."""
        with self._lock:
            self._collect()
            for name, other in self._pods.items():
                taken = set(ids) & set(other.given.get(resource, ((), b""))[0])
                if taken and name != pod:
                    raise ValueError(f"{', '.join(sorted(taken))} of {resource} belongs to pod {name}")
            found = self._pods.setdefault(pod, _Pod(str(uuid.uuid4())))
            found.given[resource] = tuple(ids), response
            self._write()

    def frame(self, resource: str, healthy: Collection[str]) -> None:
        """A frame came."""
        with self._lock:
            self._healthy[resource] = tuple(healthy)
            self._write()

    def end(self, pod: str) -> None:
        """The pod's process has ended. Raises KeyError if there is no such pod."""
        with self._lock:
            self._pods[pod].gone_at = time.monotonic() + RELEASE_S

    def restore(self) -> None:
        """Take over the file of a former kubelet, as kubelet does when it starts. List does not name its pods before
        `hear_of_pods`. Their names are not in it: here they are their UIDs. Raises OSError, ValueError."""
        data = json.loads(self._file.read_text(encoding="utf-8"))["Data"]
        with self._lock:
            self._heard = False
            for entry in data["PodDeviceEntries"] or ():
                pod = self._pods.setdefault(entry["PodUID"], _Pod(entry["PodUID"], known=False))
                ids = tuple(device for node in entry["DeviceIDs"].values() for device in node)
                pod.given[entry["ResourceName"]] = ids, base64.b64decode(entry["AllocResp"])

    def hear_of_pods(self) -> None:
        """The API server has told which pods there are: all that were restored."""
        with self._lock:
            self._heard = True
            for pod in self._pods.values():
                pod.known = True

    def force_delete(self, pod: str) -> None:
        """The pod is gone, whatever its process does. Raises KeyError if there is no such pod."""
        with self._lock:
            del self._pods[pod]

    def list_besides(self, pods: Sequence[Any]) -> None:
        """From now on List names these as well: whole `PodResources` messages, of other plugins' pods."""
        with self._lock:
            self._besides = tuple(pods)

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
        with self._lock:
            self._asked += 1
            failure = self._failures.pop(0) if self._failures else None
            self._collect()
            pods = [self._listed(name, pod) for name, pod in self._pods.items() if pod.known]
            pods += self._besides
            if self._heard:
                pods += [
                    PROTO.message("PodResources")(name=name, namespace="kube-system") for name in DAEMON_PODS
                ]
        if failure is not None:
            context.abort(*failure)
        return PROTO.message("ListPodResourcesResponse")(pod_resources=pods)

    def GetAllocatableResources(self, request: Any, context: grpc.ServicerContext) -> Any:
        """One message per healthy device, and none for a resource that has no healthy one."""
        if self._disabled is not None:
            context.abort(*self._disabled)
        return PROTO.message("AllocatableResourcesResponse")(
            devices=[
                PROTO.message("ContainerDevices")(resource_name=resource, device_ids=[device])
                for resource, ids in self._allocatable().items()
                for device in ids
            ]
        )

    def _listed(self, name: str, pod: _Pod) -> Any:
        devices = [
            PROTO.message("ContainerDevices")(resource_name=resource, device_ids=[device])
            for resource, (ids, _) in pod.given.items()
            for device in ids
        ]
        container = PROTO.message("ContainerResources")(name=CONTAINER, devices=devices)
        return PROTO.message("PodResources")(name=name, namespace=NAMESPACE, containers=[container])

    def _collect(self) -> None:
        now = time.monotonic()
        self._pods = {n: p for n, p in self._pods.items() if p.gone_at is None or now < p.gone_at}

    def _write(self) -> None:
        """The checksum is left at 0: whoever reads the file from outside cannot rely on it."""
        entries = [
            {
                "PodUID": pod.uid,
                "ContainerName": CONTAINER,
                "ResourceName": resource,
                "DeviceIDs": {"-1": list(ids)},
                "AllocResp": base64.b64encode(response).decode("ascii"),
            }
            for pod in self._pods.values()
            for resource, (ids, response) in pod.given.items()
        ]
        registered = {resource: list(ids) for resource, ids in self._healthy.items()}
        data = {"PodDeviceEntries": entries or None, "RegisteredDevices": registered}
        draft = self._file.with_name(f".{self._file.name}")
        with suppress(OSError):  # kubelet logs that and goes on; a test may have taken the directory away
            with draft.open("w", encoding="utf-8") as file:
                json.dump({"Data": data, "Checksum": 0}, file)
                if self._synced:
                    file.flush()
                    os.fsync(file.fileno())
            draft.rename(self._file)
