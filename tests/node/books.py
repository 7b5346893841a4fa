"""What everybody believes about the GPUs: `Books` reads it, `rules.py` judges it.

`Sampler` looks all the time, between two steps as well: while the API server is away at what kubelet and the host say.
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from typing import TYPE_CHECKING, Any, Final, final

import grpc

from gpuactors_simulation.host.kernel import NVIDIA, uuid_of
from tests.node.cluster import CLAIMS, NODES, PODS, SLICES, Api, ApiError, Object, kubelet_dir, node_name
from tests.node.rules import Fault, Look, Record
from tests.support.background import in_background
from tests.support.grpcio_proto import ProtoFile

if TYPE_CHECKING:  # it loads libfuse, which whoever only judges does not need
    from tests.node.fake_host import FakeHost

PREFIX: Final = "nvidia.com/"
DRIVER: Final = "gpu.nvidia.com"
VFIO: Final = frozenset({"vfio-pci", "nvgrace_gpu_vfio_pci"})
_PROTO: Final = ProtoFile("podresources.proto", "v1")
_CALL_S: Final = 5.0
_SAMPLE_S: Final = 0.2
_NO_ANSWER: Final = (ApiError, OSError, HTTPException, ValueError)
_THEIRS: Final = re.compile(r"gpu-(vfio-)?\d+$")
"""The names of NVIDIA's DRA driver; what it offers is not judged."""
_ENDED: Final = frozenset({"Succeeded", "Failed"})


@dataclass(frozen=True, slots=True)
class _Published:
    """What the API server has of a look."""

    capacity: Mapping[str, int]
    allocatable: Mapping[str, int]
    requests: Mapping[str, int]
    claimed: tuple[tuple[str, str], ...]
    offered: frozenset[str]


class Books:
    """Reads all that is believed. Not for use from several threads at once."""

    def __init__(self, host: FakeHost) -> None:
        self._host = host
        self._api = Api()
        self._published: _Published | None = None

    def look(self) -> Look:
        """Raises ApiError, OSError or HTTPException while the API server is away."""
        self._published = self._publications()
        return self._with(self._published, api_answers=True)

    def look_even_so(self) -> Look:
        """With what the API server has said last, while it is away: until it is back nobody can change that. Raises as
        `look` if it has never answered."""
        try:
            return self.look()
        except _NO_ANSWER:
            if self._published is None:
                raise
            return self._with(self._published, api_answers=False)

    def _publications(self) -> _Published:
        before = self._status()
        pods = self._api.items(PODS, fieldSelector=f"spec.nodeName={node_name()}")
        after = self._status()
        claims = self._api.items(CLAIMS)
        slices = self._api.items(SLICES)
        # The scheduler has bound these pods by one of the two, or by one between them.
        capacity, allocatable = (
            {
                name: max(before[part].get(name, 0), after[part].get(name, 0))
                for name in before[part] | after[part]
            }
            for part in ("capacity", "allocatable")
        )
        return _Published(
            capacity, allocatable, _requests(pods), tuple(self._claimed(claims, slices)), frozenset(_offered(slices)),
        )  # fmt: skip

    def _claimed(self, claims: list[Object], slices: list[Object]) -> Iterator[tuple[str, str]]:
        addresses = _addresses_of(slices)
        for claim in claims:
            status = claim.get("status", {})
            if not status.get("reservedFor"):
                continue
            for result in status.get("allocation", {}).get("devices", {}).get("results", ()):
                driver, device = str(result["driver"]), str(result["device"])
                key = key_of(device) or addresses.get((driver, device)) or self._key_of_theirs(driver, device)
                if key and not result.get("adminAccess"):
                    yield f"{claim['metadata']['namespace']}/{claim['metadata']['name']}", key

    def _key_of_theirs(self, driver: str, device: str) -> str:
        """The PCI address of a name by NVIDIA's driver, whose slice is gone: by the GPU's node, or by the order of
        sysfs."""
        if driver != DRIVER or not _THEIRS.match(device):
            return ""
        with self._host.lock:
            if device.startswith("gpu-vfio-"):
                return self._host.gpus()[int(device.removeprefix("gpu-vfio-"))]
            minors = {minor: address for address, minor in self._host.kernel.minors.items()}
            return minors.get(int(device.removeprefix("gpu-")), device)

    def _status(self) -> dict[str, dict[str, int]]:
        status = self._api.get(f"{NODES}/{node_name()}")["status"]
        return {part: _amounts(status.get(part, {})) for part in ("capacity", "allocatable")}

    def _with(self, published: _Published, *, api_answers: bool) -> Look:
        owners = self._host.owners()
        return Look(
            time.monotonic(), published.capacity, published.allocatable, published.requests, _allocated(), _healthy(),
            published.claimed, published.offered, owners, self._usable(owners), api_answers, self._addresses(),
        )  # fmt: skip

    def _addresses(self) -> dict[str, str]:
        """By the IDs of NVIDIA's device plugin for containers."""
        with self._host.lock:
            return {uuid_of(name): name for name in self._host.tree.functions}

    def _usable(self, owners: Mapping[int, frozenset[str]]) -> dict[str, bool]:
        with self._host.lock:
            tree = self._host.tree
            found: dict[str, bool] = {}
            for name, spec in tree.functions.items():
                if tree.vgpu_type(name):  # its group is its own
                    found[name] = tree.vfio_number(name) is not None and spec.group not in owners
                    continue
                members = tree.group_members(spec.group) if spec.group is not None else frozenset()
                viable = all(tree.driver_of(member) in {None, *VFIO} for member in members)
                found[name] = tree.driver_of(name) in VFIO and viable and spec.group not in owners
                found[uuid_of(name)] = tree.driver_of(name) == NVIDIA
            for device in tree.mediated.devices:
                found[device.name] = device.vfio is not None and device.group not in owners
            return found


@final
class Sampler:
    """Looks all the time, in a thread, whoever is away."""

    def __init__(self, host: FakeHost) -> None:
        self._books = Books(host)
        self._record = Record()
        self._lock = threading.Lock()
        self._stopped: Counter[str] = Counter()
        self.looks = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Samples while the context is open."""
        with in_background(self._watch, "sampler"):
            yield

    @contextmanager
    def without(self, components: Collection[str]) -> Iterator[None]:
        """While the context is open a scenario has stopped these: that they do not answer is no fault."""
        with self._lock:
            self._stopped.update(components)
        try:
            yield
        finally:
            with self._lock:
                self._stopped.subtract(components)

    def faults(self) -> list[Fault]:
        """What was seen since the last call of `forget`."""
        with self._lock:
            return self._record.faults()

    def forget(self) -> None:
        """A new scenario begins."""
        with self._lock:
            self._record = Record()
            self.looks = 0

    def _watch(self, over: threading.Event) -> None:
        while not over.wait(_SAMPLE_S):
            try:
                look = self._books.look_even_so()
            except _NO_ANSWER:
                continue  # there was no API server yet, or kubelet has answered half a page
            with self._lock:
                self.looks += 1
                self._record.add(look, [name for name, count in self._stopped.items() if count])


# --- reading --------------------------------------------------------------------------------------------------------


def _amounts(amounts: Mapping[str, str]) -> dict[str, int]:
    return {name: int(amount) for name, amount in amounts.items() if name.startswith(PREFIX)}


def _requests(pods: list[Object]) -> Mapping[str, int]:
    total: Counter[str] = Counter()
    for pod in pods:
        if pod["status"].get("phase") in _ENDED:
            continue
        for container in pod["spec"]["containers"]:
            total.update(_amounts(container.get("resources", {}).get("limits", {})))
    return dict(total)


def _addresses_of(slices: list[Object]) -> dict[tuple[str, str], str]:
    """The PCI address of each device that a driver says it of, by driver and name."""
    found: dict[tuple[str, str], str] = {}
    for one in slices:
        for device in one["spec"].get("devices", ()):
            said = device.get("attributes", {}).get("resource.kubernetes.io/pciBusID", {}).get("string", "")
            found[one["spec"]["driver"], device["name"]] = said
    return found


def _offered(slices: list[Object]) -> Iterator[str]:
    for one in slices:
        for device in one["spec"].get("devices", ()):
            if (key := key_of(device["name"])) and not device.get("taints"):
                yield key


def key_of(device: str) -> str:
    """What kubelet has for a device of gpuactors in a slice: the PCI address of `gpu-0000-23-00-0`, the UUID of
    `mdev-83b8f4f2-509f-382f-3c1e-e6bfe0fa1001`. Empty for a name by another driver."""
    if device.startswith("mdev-"):
        return device.removeprefix("mdev-")
    match = re.fullmatch(r"gpu-([0-9a-f]{4,})-([0-9a-f]{2})-([0-9a-f]{2})-([0-7])", device)
    return f"{match[1]}:{match[2]}:{match[3]}.{match[4]}" if match is not None else ""


@final
class _PodResources:
    """Kubelet's PodResources. The connection is kept, as a look comes each 0.2 s; after a failure the next call makes
    another one, as kubelet may have started again. For use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: tuple[grpc.Channel, Mapping[str, Any]] | None = None

    def call(self, method: str, request: object) -> Any:
        """Raises grpc.RpcError."""
        with self._lock:
            if self._kept is None:
                channel = grpc.insecure_channel(f"unix:{kubelet_dir()}/pod-resources/kubelet.sock")
                self._kept = channel, _PROTO.stub(channel, "PodResourcesLister")
            kept = self._kept
        try:
            return kept[1][method](request, timeout=_CALL_S)
        except grpc.RpcError:
            with self._lock:
                if self._kept is kept:
                    self._kept = None  # closed when the last call of another thread over it has ended
            raise


_POD_RESOURCES: Final = _PodResources()


def pod_resources(method: str, request: object | None = None) -> Any:
    """One call of kubelet's PodResources. Raises grpc.RpcError."""
    name = {"List": "ListPodResourcesRequest", "GetAllocatableResources": "AllocatableResourcesRequest"}
    return _POD_RESOURCES.call(method, request or _PROTO.message(name[method])())


def _allocated() -> Mapping[str, tuple[tuple[str, str], ...]] | None:
    try:
        answer = pod_resources("List")
    except grpc.RpcError:
        return None
    found: dict[str, list[tuple[str, str]]] = {}
    for pod in answer.pod_resources:
        for container in pod.containers:
            for devices in container.devices:
                if devices.resource_name.startswith(PREFIX):
                    found.setdefault(devices.resource_name, []).extend(
                        (f"{pod.namespace}/{pod.name}", device) for device in devices.device_ids
                    )
    return {resource: tuple(pairs) for resource, pairs in found.items()}


def _healthy() -> Mapping[str, frozenset[str]] | None:
    try:
        answer = pod_resources("GetAllocatableResources")
    except grpc.RpcError:
        return None
    found: dict[str, set[str]] = {}
    for devices in answer.devices:
        if devices.resource_name.startswith(PREFIX):
            found.setdefault(devices.resource_name, set()).update(devices.device_ids)
    return {resource: frozenset(names) for resource, names in found.items()}


__all__ = ["Books", "Sampler", "key_of", "pod_resources"]
