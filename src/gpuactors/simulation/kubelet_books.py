"""The bookkeeping of kubelet 1.36's device manager, and the scheduler's arithmetic over it, as one plain
object.

What kubelet decides and remembers is here: which devices a resource has, who was given what, what is posted
as capacity and allocatable, whom the scheduler lets on to the node. Must not know of a clock (times come in
as `at`, seconds of the caller's clock), of tasks or of gRPC: `fake_kubelet.py` makes the calls and tells the
books how they went.

An admission is a conversation of four steps, because kubelet lets go of its lock for each call to the plugin:
`choose` → (GetPreferredAllocation) → `take` → (Allocate) → `commit` or `roll_back`. Between them a frame may
come in or a stream may end, and the books behave then as kubelet's do, its crash included.

Sources: pkg/kubelet/cm/devicemanager/manager.go, endpoint.go, pod_devices.go and plugin/v1beta1 of kubelet
1.36.
"""

from __future__ import annotations

import base64
import json
import random
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

STOP_GRACE_S: Final = 300.0
"""How long kubelet keeps counting a resource's devices after its plugin went away
(endpointStopGracePeriod)."""

NODE_WITHOUT_TOPOLOGY: Final = -1
"""The key of devices without NUMA nodes in kubelet's ledger (nodeWithoutTopology)."""

_NAME_PART = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")


class AdmissionError(Exception):
    """Kubelet does not admit the pod; the text is kubelet's own."""


class KubeletPanicError(Exception):
    """Here kubelet 1.36 dereferences a nil pointer and its process ends."""


@dataclass(frozen=True, slots=True)
class ListedDevice:
    """One device of a ListAndWatch frame."""

    id: str
    healthy: bool
    numa_nodes: tuple[int, ...] = ()


class Phase(StrEnum):
    """Where a pod stands. Kubernetes' words, except that Pending is split by what the pod waits for."""

    PENDING = "Pending"
    """No room for it by the scheduler's arithmetic."""
    ADMITTING = "Admitting"
    """Placed on the node; kubelet is choosing and allocating devices."""
    STARTING = "ContainerCreating"
    """It has its devices; its container is about to start (PreStartContainer)."""
    RUNNING = "Running"
    FAILED = "Failed"


_COUNTED: Final = frozenset({Phase.ADMITTING, Phase.STARTING, Phase.RUNNING})
"""Pods whose requests the scheduler subtracts from allocatable."""


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod of one container, as the API server would show it."""

    name: str
    requests: tuple[tuple[str, int], ...]
    """Resource name and number of devices."""
    phase: Phase
    message: str
    """Why it is where it is, as `kubectl describe pod` would say."""


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """What kubelet remembers of one allocation (podDevices, and the checkpoint file)."""

    devices: tuple[str, ...]
    numa_nodes: Mapping[str, tuple[int, ...]]
    envs: Mapping[str, str]
    nodes: tuple[str, ...]
    """Device nodes that the container got, as paths of the host."""
    response: bytes
    """The container's part of AllocateResponse, encoded."""


@dataclass(frozen=True, slots=True)
class Allocated:
    """What the plugin answered to Allocate for one container."""

    envs: Mapping[str, str]
    nodes: tuple[str, ...]
    response: bytes = b""


@dataclass(frozen=True, slots=True)
class Figures:
    """One resource as the scheduler sees it."""

    capacity: int
    """All devices listed."""
    allocatable: int
    """The Healthy ones."""
    allocated: int
    """What the pods on the node ask for."""

    @property
    def free(self) -> int:
        """What the scheduler believes it may still hand out. Negative means that the books are broken."""
        return self.allocatable - self.allocated


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """One device as kubelet knows it, and the pod that has it."""

    resource: str
    id: str
    health: str
    """`Healthy`, `Unhealthy`, or `not listed` for a device that a pod was given and that the plugin lists no
    more."""
    numa_nodes: tuple[int, ...]
    pod: str | None


@dataclass(frozen=True, slots=True)
class BooksView:
    """Everything that can be seen of the books at one moment."""

    running: bool
    """Kubelet's process lives. While it does not, the figures are its last ones."""
    resources: Mapping[str, Figures]
    devices: tuple[DeviceRow, ...]
    pods: Mapping[str, Pod]
    holdings: Mapping[tuple[str, str], LedgerEntry]
    """(pod, resource) → what a pod that is not deleted was given."""
    connected: frozenset[str]
    """Resources with a plugin that kubelet has not seen leave."""
    registrations: int
    """Register calls that succeeded, ever."""
    frames: int
    """Frames received, ever."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What kubelet keeps of a resource's plugin."""

    client: int | None
    """Number of the connection; None for the placeholder that a restart makes out of the checkpoint."""
    pre_start_required: bool
    preferred_allocation: bool
    stopped_at: float | None


@dataclass(frozen=True, slots=True)
class Choice:
    """What is left to decide about one resource of one pod."""

    pod: str
    resource: str
    endpoint: Endpoint
    available: tuple[str, ...]
    """Healthy devices that nobody has, in no order."""
    size: int


class KubeletBooks:
    """Owned by one fake kubelet. Every method is synchronous and leaves the books consistent."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._running = False
        self._known: dict[str, None] = {}
        self._listed: dict[str, tuple[ListedDevice, ...]] = {}
        self._endpoints: dict[str, Endpoint] = {}
        self._pods: dict[str, Pod] = {}
        self._ledger: dict[tuple[str, str], LedgerEntry] = {}
        self._picked: dict[str, set[str]] = {}
        self._registrations = 0
        self._frames = 0

    # --- the life of kubelet's process -----------------------------------------------------------------

    def boot(self, at: float) -> tuple[str, ...]:
        """Kubelet starts: lists are empty until the plugins register again, the ledger is what it was.

        Returns the pods that kubelet admits anew: those whose container is not running. ("Container detected
        running, nothing to do" holds for the others.)
        """
        self._running = True
        self._picked.clear()
        for resource in self._known:
            self._listed[resource] = ()
            self._endpoints[resource] = Endpoint(None, False, False, stopped_at=at)
        return tuple(p.name for p in self._pods.values() if p.phase in (Phase.ADMITTING, Phase.STARTING))

    def halt(self) -> None:
        """Kubelet's process ends. What it has posted stays posted."""
        self._running = False

    # --- plugins -----------------------------------------------------------------------------------------

    def connected(self, resource: str, client: int, *, pre_start: bool, preferred: bool) -> None:
        """A plugin was dialled and gave its options (PluginConnected). Its devices come with the first
        frame."""
        self._known[resource] = None
        self._listed.setdefault(resource, ())
        self._endpoints[resource] = Endpoint(client, pre_start, preferred, stopped_at=None)
        self._registrations += 1

    def disconnected(self, resource: str, at: float) -> None:
        """Kubelet saw a stream of this resource end (PluginDisconnected): every device turns Unhealthy and
        the time of grace begins. Nothing here asks *whose* stream it was: kubelet looks the plugin up by
        name."""
        endpoint = self._endpoints.get(resource)
        if endpoint is None:
            return
        self._listed[resource] = tuple(replace(device, healthy=False) for device in self._listed[resource])
        self._endpoints[resource] = replace(endpoint, stopped_at=at)

    def frame(self, resource: str, devices: Iterable[ListedDevice]) -> None:
        """A ListAndWatch frame replaces the whole list, from whichever stream it comes."""
        self._known[resource] = None
        self._listed[resource] = tuple({device.id: device for device in devices}.values())
        self._frames += 1

    def expire(self, at: float) -> None:
        """Forgets the devices of plugins that have been away for longer than the grace (GetCapacity)."""
        for resource in [r for r in self._listed if self._expired(r, at)]:
            self._endpoints.pop(resource, None)
            del self._listed[resource]

    def endpoint(self, resource: str) -> Endpoint | None:
        """The plugin that kubelet would call for this resource."""
        return self._endpoints.get(resource)

    def _expired(self, resource: str, at: float) -> bool:
        endpoint = self._endpoints.get(resource)
        if endpoint is None:
            return True
        return endpoint.stopped_at is not None and at - endpoint.stopped_at >= STOP_GRACE_S

    # --- pods ----------------------------------------------------------------------------------------------

    def submit(self, name: str, requests: Mapping[str, int], at: float) -> Pod:
        """A pod is created. It stays Pending until `place` finds room for it.

        Raises `ValueError` if there is a pod of that name already.
        """
        if name in self._pods:
            raise ValueError(f"pod {name} exists already; delete it first or choose another name")
        pod = Pod(name, tuple(requests.items()), Phase.PENDING, "")
        self._pods[name] = pod
        return self._explain_pending(pod, at)

    def place(self, at: float) -> Pod | None:
        """The scheduler's next pod for this node: the oldest one that fits. It counts as allocated from now
        on.

        The pods that do not fit learn why.
        """
        for pod in [p for p in self._pods.values() if p.phase is Phase.PENDING]:
            if not self._explain_pending(pod, at).message:
                return self._set(pod.name, Phase.ADMITTING, "")
        return None

    def delete(self, name: str) -> None:
        """A pod ends. Kubelet notices at its next allocation that the pod's devices are free.

        Raises `KeyError` if there is no such pod.
        """
        del self._pods[name]

    def started(self, name: str) -> None:
        """The pod's container runs."""
        self._set(name, Phase.RUNNING, "")

    def not_started(self, name: str, why: str) -> None:
        """PreStartContainer refused; kubelet will try again."""
        self._set(name, Phase.STARTING, why)

    def failed(self, name: str, why: str) -> None:
        """The pod is not admitted, for good. Kubelet never tries again; what it had picked is free."""
        self._set(
            name, Phase.FAILED, f"UnexpectedAdmissionError: Allocate failed due to {why}, which is unexpected"
        )

    def _set(self, name: str, phase: Phase, message: str) -> Pod:
        pod = replace(self._pods[name], phase=phase, message=message)
        self._pods[name] = pod
        return pod

    def _explain_pending(self, pod: Pod, at: float) -> Pod:
        if not self._running:
            return self._set(pod.name, Phase.PENDING, "0/1 nodes are available: kubelet is not running.")
        short = [r for r, wanted in pod.requests if wanted > self._figures(r, at).free]
        lacking = ", ".join(f"1 Insufficient {resource}" for resource in short)
        return self._set(pod.name, Phase.PENDING, f"0/1 nodes are available: {lacking}." if short else "")

    # --- one admission -------------------------------------------------------------------------------------

    def choose(self, pod: str, resource: str, size: int) -> Choice | None:
        """What there is to choose from for one resource of a pod; None if the pod has its devices already.

        Raises `AdmissionError` in kubelet's words (devicesToAllocate).
        """
        self._collect()
        entry = self._ledger.get((pod, resource))
        listed = self._listed.get(resource)
        if listed is None:
            raise AdmissionError(f"cannot allocate unregistered device {resource}")
        healthy = {device.id for device in listed if device.healthy}
        if not healthy:
            raise AdmissionError(f"no healthy devices present; cannot allocate unhealthy devices {resource}")
        if entry is not None:
            if not healthy.issuperset(entry.devices):
                raise AdmissionError(
                    f"previously allocated devices are no longer healthy; cannot allocate unhealthy devices {resource}"
                )
            return None
        available = healthy - self._in_use(resource)
        if len(available) < size:
            raise AdmissionError(
                f"requested number of devices unavailable for {resource}. "
                f"Requested: {size}, Available: {len(available)}"
            )
        endpoint = self._endpoints.get(resource)
        if endpoint is None:
            raise AdmissionError(f"unknown Device Plugin {resource}")
        return Choice(pod, resource, endpoint, self._shuffled(available), size)

    def take(self, choice: Choice, preferred: Iterable[str]) -> tuple[str, ...]:
        """Picks devices: first what the plugin prefers out of what was offered, then whatever there is.

        They count as in use until `commit` or `roll_back`. Kubelet keeps sets, so nobody may rely on their
        order.
        """
        wanted = set(preferred)
        first = [device for device in choice.available if device in wanted]
        rest = [device for device in choice.available if device not in wanted]
        taken = (first + rest)[: choice.size]
        self._picked.setdefault(choice.resource, set()).update(taken)
        return self._shuffled(taken)

    def commit(self, choice: Choice, devices: tuple[str, ...], allocated: Allocated) -> None:
        """Allocate succeeded: the ledger has it.

        Raises `KubeletPanicError` if a device is listed no more: kubelet looks up its topology through a nil
        pointer.
        """
        listed = {device.id: device for device in self._listed.get(choice.resource, ())}
        for device in devices:
            if device not in listed:
                raise KubeletPanicError(
                    f"{device} of {choice.resource} left the list while an Allocate that had picked it was in flight"
                )
        self._ledger[choice.pod, choice.resource] = LedgerEntry(
            devices=tuple(sorted(devices)),
            numa_nodes={device: listed[device].numa_nodes for device in devices},
            envs=dict(allocated.envs),
            nodes=allocated.nodes,
            response=allocated.response,
        )
        self._unpick(choice.resource, devices)

    def roll_back(self, choice: Choice, devices: tuple[str, ...]) -> None:
        """Allocate failed: what was picked is free again."""
        self._unpick(choice.resource, devices)

    def admitted(self, pod: str) -> None:
        """The pod has all its devices; its container may start."""
        self._set(pod, Phase.STARTING, "")

    def pod(self, name: str) -> Pod | None:
        """The pod, if it is not deleted."""
        return self._pods.get(name)

    def holding(self, pod: str, resource: str) -> LedgerEntry | None:
        """What the ledger says a pod was given of a resource."""
        return self._ledger.get((pod, resource))

    def _unpick(self, resource: str, devices: Iterable[str]) -> None:
        self._picked.get(resource, set()).difference_update(devices)

    def _in_use(self, resource: str) -> set[str]:
        in_ledger = {d for (_, r), entry in self._ledger.items() if r == resource for d in entry.devices}
        return in_ledger | self._picked.get(resource, set())

    def _collect(self) -> None:
        """Drops the entries of pods that are no more (UpdateAllocatedDevices)."""
        for key in [k for k in self._ledger if not self._active(k[0])]:
            del self._ledger[key]

    def _active(self, pod: str) -> bool:
        found = self._pods.get(pod)
        return found is not None and found.phase is not Phase.FAILED

    def _shuffled(self, devices: Iterable[str]) -> tuple[str, ...]:
        """Go's maps have no order; the seed makes ours repeatable."""
        ordered = sorted(devices)
        self._rng.shuffle(ordered)
        return tuple(ordered)

    # --- what can be seen -----------------------------------------------------------------------------------

    def _figures(self, resource: str, at: float) -> Figures:
        listed = () if self._expired(resource, at) else self._listed.get(resource, ())
        return Figures(
            capacity=len(listed),
            allocatable=sum(device.healthy for device in listed),
            allocated=sum(
                n for p in self._pods.values() if p.phase in _COUNTED for r, n in p.requests if r == resource
            ),
        )

    def view(self, at: float) -> BooksView:
        """The books now. A resource whose plugin is gone for good keeps its name, with zeros, as in a node's
        status."""
        names = sorted({*self._known, *(r for p in self._pods.values() for r, _ in p.requests)})
        holdings = {key: entry for key, entry in self._ledger.items() if self._active(key[0])}
        return BooksView(
            running=self._running,
            resources={name: self._figures(name, at) for name in names},
            devices=tuple(row for name in names for row in self._rows(name, holdings)),
            pods=dict(self._pods),
            holdings=holdings,
            connected=frozenset(r for r, e in self._endpoints.items() if e.stopped_at is None),
            registrations=self._registrations,
            frames=self._frames,
        )

    def _rows(self, resource: str, holdings: Mapping[tuple[str, str], LedgerEntry]) -> list[DeviceRow]:
        pods = {d: pod for (pod, r), entry in holdings.items() if r == resource for d in entry.devices}
        rows = [
            DeviceRow(
                resource,
                device.id,
                "Healthy" if device.healthy else "Unhealthy",
                device.numa_nodes,
                pods.pop(device.id, None),
            )
            for device in self._listed.get(resource, ())
        ]
        lost = [DeviceRow(resource, device, "not listed", (), pod) for device, pod in pods.items()]
        return sorted(rows + lost, key=lambda row: row.id)

    def checkpoint(self) -> str:
        """The ledger as `kubelet_internal_checkpoint` has it. Like the file, it still names pods that have
        ended until the next allocation. (The checksum of the real file is a hash of Go's own memory layout;
        here it is 0.)"""
        entries = []
        for (pod, resource), entry in sorted(self._ledger.items()):
            by_node: dict[str, list[str]] = {}
            for device in entry.devices:
                for node in entry.numa_nodes[device] or (NODE_WITHOUT_TOPOLOGY,):
                    by_node.setdefault(str(node), []).append(device)
            entries.append(
                {
                    "PodUID": pod,
                    "ContainerName": "compute",
                    "ResourceName": resource,
                    "DeviceIDs": by_node,
                    "AllocResp": base64.b64encode(entry.response).decode("ascii"),
                }
            )
        healthy = {r: [d.id for d in devices if d.healthy] for r, devices in self._listed.items()}
        return json.dumps(
            {"Data": {"PodDeviceEntries": entries, "RegisteredDevices": healthy}, "Checksum": 0}
        )


def resource_name_problem(name: str) -> str | None:
    """Why kubelet refuses a resource name in Register, or None (IsExtendedResourceName, IsQualifiedName)."""
    prefix, slash, part = name.partition("/")
    if (
        not slash
        or prefix.endswith("kubernetes.io")
        or name.startswith("requests.")
        or not _NAME_PART.fullmatch(part)
    ):
        return f"the ResourceName {name!r} is invalid"
    return None
