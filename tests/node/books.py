"""What everybody believes about the GPUs, and whether it can be true: node, requests, kubelet, claims, processes.

`Books.look` reads; `broken` and `unsettled` judge, and read nothing. `Sampler` looks all the time between two steps.
What must hold at any time: no device with two owners, no group open in two pods, no device of a pod unknown to kubelet,
capacity ≥ allocated, free ≥ 0. What must hold once everything has settled: free is what a new pod could really have.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, final

import grpc

from tests.node.cluster import CLAIMS, NODES, PODS, SLICES, Api, ApiError, Object, kubelet_dir, node_name
from tests.support.grpcio_proto import ProtoFile

if TYPE_CHECKING:  # it loads libfuse, which whoever only judges does not need
    from tests.node.fake_host import FakeHost

PREFIX: Final = "nvidia.com/"
DRIVER: Final = "gpu.nvidia.com"
VFIO: Final = frozenset({"vfio-pci", "nvgrace_gpu_vfio_pci"})
_PROTO: Final = ProtoFile("podresources.proto", "v1")
_CALL_S: Final = 5.0
_SAMPLE_S: Final = 0.2
_ENDED: Final = frozenset({"Succeeded", "Failed"})


@dataclass(frozen=True, slots=True)
class Look:
    """What one look has seen; None: it was not to be had just then (kubelet or the API server is away)."""

    at: float
    capacity: Mapping[str, int]
    """By resource, as the node's status has it."""
    allocatable: Mapping[str, int]
    requests: Mapping[str, int]
    """Of the pods on the node that have not ended."""
    allocated: Mapping[str, tuple[tuple[str, str], ...]] | None
    """PodResources List: resource → (pod, device)."""
    healthy: Mapping[str, frozenset[str]] | None
    """PodResources GetAllocatableResources: the devices of each resource that kubelet may give."""
    claimed: tuple[tuple[str, str], ...]
    """(claim, device) of the claims that a pod has reserved, admin access left out."""
    offered: frozenset[str]
    """The devices in the slices of the DRA driver that have no taint."""
    owners: Mapping[int, frozenset[str]]
    """Who has each group open: pods, and processes of none."""
    usable: Mapping[str, bool]
    """Each function of the host: it is on vfio, its group is viable and open in no process."""


class Books:
    """Reads all that is believed. Not for use from several threads at once."""

    def __init__(self, host: FakeHost) -> None:
        self._host = host
        self._api = Api()

    def look(self) -> Look:
        """Raises ApiError or OSError while the API server is away."""
        node = self._api.get(f"{NODES}/{node_name()}")["status"]
        pods = self._api.items(PODS, fieldSelector=f"spec.nodeName={node_name()}")
        claims = self._api.items(CLAIMS)
        slices = self._api.items(SLICES)
        owners = self._host.owners()
        return Look(
            time.monotonic(), _amounts(node.get("capacity", {})), _amounts(node.get("allocatable", {})),
            _requests(pods), _allocated(), _healthy(), tuple(_claimed(claims)), frozenset(_offered(slices)),
            owners, self._usable(owners),
        )  # fmt: skip

    def _usable(self, owners: Mapping[int, frozenset[str]]) -> dict[str, bool]:
        with self._host.lock:
            tree = self._host.tree
            found: dict[str, bool] = {}
            for name, spec in tree.functions.items():
                members = tree.group_members(spec.group) if spec.group is not None else frozenset()
                viable = all(tree.driver_of(member) in {None, *VFIO} for member in members)
                found[name] = tree.driver_of(name) in VFIO and viable and spec.group not in owners
            return found


# --- what must hold -------------------------------------------------------------------------------------------------


def broken(look: Look) -> list[str]:
    """What can never be true, as sentences."""
    wrong = [
        f"free {resource} is {look.allocatable[resource]} - {look.requests.get(resource, 0)} < 0"
        for resource in look.allocatable
        if look.allocatable[resource] < look.requests.get(resource, 0)
    ]
    owners: dict[str, set[str]] = {}
    for pairs in (look.allocated or {}).values():
        for pod, device in pairs:
            owners.setdefault(device, set()).add(f"pod {pod}")
    for claim, device in look.claimed:
        owners.setdefault(device, set()).add(f"claim {claim}")
    wrong += [f"{device} belongs to {sorted(by)}" for device, by in owners.items() if len(by) > 1]
    wrong += [f"group {group} is open in {sorted(by)}" for group, by in look.owners.items() if len(by) > 1]
    for resource, pairs in (look.allocated or {}).items():
        if resource in look.capacity and len(pairs) > look.capacity[resource]:
            wrong.append(
                f"{len(pairs)} of {resource} are allocated, and its capacity is {look.capacity[resource]}"
            )
    return wrong


def unsettled(look: Look) -> list[str]:
    """What is not true yet, and must be soon, as sentences."""
    if look.allocated is None or look.healthy is None:
        return ["kubelet does not answer"]
    wrong = broken(look)
    taken = {device for pairs in look.allocated.values() for _, device in pairs}
    taken |= {device for _, device in look.claimed}
    for resource in sorted({*look.allocatable, *look.healthy}):
        healthy = look.healthy.get(resource, frozenset())
        if look.allocatable.get(resource, 0) != len(healthy):
            wrong.append(
                f"the node's status says {look.allocatable.get(resource, 0)} {resource}, kubelet {sorted(healthy)}"
            )
        mine = {device for _, device in look.allocated.get(resource, ())}
        if len(mine) != look.requests.get(resource, 0):
            wrong.append(f"pods ask for {look.requests.get(resource, 0)} {resource}, and have {sorted(mine)}")
        wrong += [f"{device} of a pod is not in kubelet's list" for device in mine - healthy]
        could_have = {d for d in healthy - mine if look.usable.get(d, False) and d not in taken}
        if could_have != healthy - mine:
            wrong.append(
                f"kubelet would give {sorted(healthy - mine - could_have)} of {resource} to a new pod"
            )
    return wrong


@dataclass(slots=True)
class Fault:
    """A sentence of `broken`, and for how long it was so."""

    said: str
    first: float
    last: float

    @property
    def seconds(self) -> float:
        """From the first look that saw it to the last one."""
        return self.last - self.first


@final
class Sampler:
    """Looks all the time, in a thread."""

    def __init__(self, host: FakeHost) -> None:
        self._books = Books(host)
        self._faults: dict[str, Fault] = {}
        self._lock = threading.Lock()
        self.looks = 0
        self.blind = 0
        """Looks that found no API server."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Samples while the context is open."""
        over = threading.Event()
        thread = threading.Thread(target=self._watch, args=(over,), name="sampler", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(timeout=30)

    def faults(self) -> list[Fault]:
        """What was seen since the last call of `forget`."""
        with self._lock:
            return list(self._faults.values())

    def forget(self) -> None:
        """A new scenario begins."""
        with self._lock:
            self._faults.clear()
            self.looks = self.blind = 0

    def _watch(self, over: threading.Event) -> None:
        while not over.wait(_SAMPLE_S):
            try:
                look = self._books.look()
            except (ApiError, OSError, ValueError):
                self.blind += 1
                continue
            with self._lock:
                self.looks += 1
                for said in broken(look):
                    fault = self._faults.setdefault(said, Fault(said, look.at, look.at))
                    fault.last = look.at


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


def _claimed(claims: list[Object]) -> Iterator[tuple[str, str]]:
    for claim in claims:
        status = claim.get("status", {})
        if not status.get("reservedFor"):
            continue
        for result in status.get("allocation", {}).get("devices", {}).get("results", ()):
            if result["driver"] == DRIVER and not result.get("adminAccess"):
                name = f"{claim['metadata']['namespace']}/{claim['metadata']['name']}"
                yield name, address_of(result["device"])


def _offered(slices: list[Object]) -> Iterator[str]:
    for one in slices:
        if one["spec"]["driver"] == DRIVER:
            yield from (address_of(d["name"]) for d in one["spec"].get("devices", ()) if not d.get("taints"))


def address_of(device: str) -> str:
    """The PCI address in the name of a device of a slice: `gpu-0000-23-00-0`."""
    domain, bus, slot, function = device.removeprefix("gpu-").split("-")
    return f"{domain}:{bus}:{slot}.{function}"


def pod_resources(method: str, request: object | None = None) -> Any:
    """One call of kubelet's PodResources. Raises grpc.RpcError."""
    with grpc.insecure_channel(f"unix:{kubelet_dir()}/pod-resources/kubelet.sock") as channel:
        call = _PROTO.stub(channel, "PodResourcesLister")[method]
        name = {"List": "ListPodResourcesRequest", "GetAllocatableResources": "AllocatableResourcesRequest"}[
            method
        ]
        return call(request or _PROTO.message(name)(), timeout=_CALL_S)


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


__all__ = ["Books", "Fault", "Look", "Sampler", "address_of", "broken", "pod_resources", "unsettled"]
