"""Kubelet 1.36's device manager, and the scheduler's arithmetic over it, as one plain object.

All that kubelet decides and records is here: which devices a resource has, which pod has which device, what is posted
as capacity and allocatable, which pods the scheduler places on the node. Must not know of a clock (times come in as
`at`, seconds of the caller's clock), of tasks, of files or of gRPC: `fake.py` makes the calls and reports their results
here.

An admission has four steps, because kubelet releases its lock for each call to the plugin: `choose` →
(GetPreferredAllocation) → `take` → (Allocate) → `commit` or `roll_back`. Between them a list may come, a stream may
end or the pod may be deleted, and this object then does what kubelet does, its crash included.

A pod is deleted in one of two ways. `terminate` is the normal one: the pod keeps its devices until `delete`, when its
container has ended. A forced deletion is `delete` at once, even if the container runs on.

Sources: pkg/kubelet/cm/devicemanager/manager.go, endpoint.go, pod_devices.go and plugin/v1beta1 of kubelet
1.36.
"""

from __future__ import annotations

import json
import random
import re
import uuid
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from msgspec.structs import replace

from gpuactors.core.values.model import PodLife
from gpuactors.replay.counts import Counts
from gpuactors_simulation.kubelet.values import (
    AdmissionError,
    Allocated,
    Checkpoint,
    Choice,
    Claim,
    DeviceRow,
    Endpoint,
    KubeletPanicError,
    KubeletView,
    LedgerEntry,
    ListedDevice,
    Phase,
    Pod,
    PodListing,
)

__all__ = [
    "STOP_GRACE_S",
    "AdmissionError",
    "Allocated",
    "Checkpoint",
    "Choice",
    "DeviceManager",
    "DeviceRow",
    "Endpoint",
    "KubeletPanicError",
    "KubeletView",
    "LedgerEntry",
    "ListedDevice",
    "Phase",
    "Pod",
    "PodListing",
    "go_quoted",
    "resource_name_problem",
]

STOP_GRACE_S: Final = 300.0
"""How long kubelet counts a resource's devices after its plugin has gone (endpointStopGracePeriod)."""

_NAME_PART = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
_DOMAIN = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")
_DOMAIN_MAX: Final = 253 - len("requests.")

_COUNTED: Final = frozenset({Phase.ADMITTING, Phase.STARTING, Phase.RUNNING, Phase.TERMINATING})
"""Pods whose requests the scheduler subtracts from allocatable."""

_ENDED: Final = frozenset({Phase.FAILED, Phase.SUCCEEDED})
"""Pods whose devices are free: for kubelet they are not active any more."""


_DAEMON_PODS: Final = tuple(
    Pod(name, (), Phase.RUNNING, "", uid, namespace="kube-system")
    for name, uid in (("kube-proxy-x7k2p", "4a1d"), ("cni-node-9qz4d", "77c0"))
)
"""The pods that any node has besides, and PodResources lists: pods of DaemonSets, without devices."""


class DeviceManager:
    """Owned by one fake kubelet. Every method is synchronous and leaves the state consistent."""

    def __init__(self, rng: random.Random, *, get_tells_ended: bool = False) -> None:
        """`get_tells_ended`: as `Release.get_tells_ended` of the DRA manager's values."""
        self._rng = rng
        self._get_tells_ended = get_tells_ended
        self._running = False
        self._knows_pods = False
        self._known: dict[str, None] = {}
        self._listed: dict[str, tuple[ListedDevice, ...]] = {}
        self._endpoints: dict[str, Endpoint] = {}
        self._pods: dict[str, Pod] = {}
        self._ledger: dict[tuple[str, str], LedgerEntry] = {}
        """By pod UID and resource."""
        self._allocated: dict[str, set[str]] = {}
        """By resource (allocatedDevices): a set beside the ledger, and not always the same. See `_made_anew`."""
        self._with_cgroup: set[str] = set()
        """The UIDs of pods that were admitted and have not ended."""
        self._adopted: set[str] = set()
        """The UIDs of pods whose container is another runtime's."""
        self._checkpoint = Checkpoint()
        self._registrations = 0
        self._lists = 0

    # --- the life of kubelet's process -----------------------------------------------------------------

    def boot(self, at: float, checkpoint: Checkpoint | None = None) -> tuple[str, ...]:
        """Kubelet starts with the contents of its checkpoint file (None: there is none, or it is damaged): the ledger
        is what it was when the file was last written, and lists are empty until the plugins register again.

        Returns the pods that kubelet admits anew: those whose container is not running. ("Container detected
        running, nothing to do" holds for the others.)
        """
        kept = checkpoint or Checkpoint()
        self._running = True
        self._knows_pods = not self._pods
        self._checkpoint = kept
        self._ledger = dict(kept.entries)
        self._made_anew()
        self._listed = dict.fromkeys(kept.registered, ())
        self._endpoints = {r: Endpoint(None, False, False, stopped_at=at) for r in kept.registered}
        return tuple(p.name for p in self._pods.values() if p.phase in (Phase.ADMITTING, Phase.STARTING))

    @property
    def knows_pods(self) -> bool:
        """Kubelet has its pods from the API server. Until then PodResources lists none."""
        return self._knows_pods

    def learn_pods(self) -> None:
        """Let kubelet learn its pods from the API server."""
        self._knows_pods = True

    def power_off(self) -> None:
        """The node has gone down: no container runs, and those that were ending have ended."""
        self._with_cgroup.clear()
        for pod in list(self._pods.values()):
            if pod.phase is Phase.TERMINATING:
                del self._pods[pod.name]
            elif pod.phase is Phase.RUNNING:
                self._set(pod.name, Phase.STARTING, "")

    def halt(self) -> None:
        """End kubelet's process. What it has posted stays posted."""
        self._running = False

    # --- plugins -----------------------------------------------------------------------------------------

    def connected(self, resource: str, client: int, *, pre_start: bool, preferred: bool) -> None:
        """A plugin was dialled and returned its options (PluginConnected). Its devices come with the first list."""
        self._known[resource] = None
        self._listed.setdefault(resource, ())
        self._endpoints[resource] = Endpoint(client, pre_start, preferred, stopped_at=None)
        self._registrations += 1

    def disconnected(self, resource: str, at: float) -> None:
        """Kubelet saw a stream of this resource end (PluginDisconnected): every device turns Unhealthy and the time of
        grace begins. It does not matter *whose* stream it was: kubelet finds the plugin by the resource's name."""
        endpoint = self._endpoints.get(resource)
        if endpoint is None:
            return
        listed = {device.id: replace(device, healthy=False) for device in self._listed[resource]}
        self._listed[resource] = tuple(listed.values())
        self._endpoints[resource] = replace(endpoint, stopped_at=at)

    def list_received(self, resource: str, devices: Iterable[ListedDevice]) -> None:
        """A list of ListAndWatch replaces the one before, from any stream. Kubelet has a set of Healthy devices and one
        of others: a device that is listed twice may be in both, and counts twice."""
        self._known[resource] = None
        self._listed[resource] = tuple({(device.id, device.healthy): device for device in devices}.values())
        self._lists += 1
        self._write_checkpoint()

    def expire(self, at: float) -> None:
        """Remove the devices of plugins that have been away for longer than the grace (GetCapacity)."""
        expired = [r for r in self._listed if self._expired(r, at)]
        for resource in expired:
            self._endpoints.pop(resource, None)
            del self._listed[resource]
        if expired:
            self._write_checkpoint()

    def endpoint(self, resource: str) -> Endpoint | None:
        """Return the plugin that kubelet would call for this resource."""
        return self._endpoints.get(resource)

    def _expired(self, resource: str, at: float) -> bool:
        endpoint = self._endpoints.get(resource)
        if endpoint is None:
            return True
        return endpoint.stopped_at is not None and at - endpoint.stopped_at >= STOP_GRACE_S

    # --- pods ----------------------------------------------------------------------------------------------

    def submit(
        self,
        name: str,
        requests: Mapping[str, int],
        at: float,
        claims: tuple[Claim, ...] = (),
        uses: tuple[str, ...] = (),
        namespace: str = "default",
        bound: bool = False,
    ) -> Pod:
        """A pod is created. It stays Pending until `place` finds room for it, unless it is `bound` to this node.

        Raises `ValueError` if there is a pod of that name already.
        """
        if name in self._pods:
            raise ValueError(f"pod {name} exists already; delete it first or choose another name")
        uid = str(uuid.UUID(int=self._rng.getrandbits(128), version=4))
        pod = Pod(
            name, tuple(requests.items()), Phase.PENDING, "", uid, namespace, claims, uses=uses, bound=bound
        )
        self._pods[name] = pod
        return self._explain_pending(pod, at)

    def adopt(
        self,
        name: str,
        devices: Mapping[str, tuple[str, ...]],
        claims: tuple[Claim, ...] = (),
        nodes: tuple[str, ...] = (),
    ) -> Pod:
        """A pod runs with devices that were allocated without a call here: any IDs of another plugin, under its
        resources, and claims of another driver.

        Raises `ValueError` if there is a pod of that name already, or if a pod that has not ended has one of the IDs:
        kubelet offers no ID of a resource twice.
        """
        if name in self._pods:
            raise ValueError(f"pod {name} exists already; delete it first or choose another name")
        active = self._active()
        for (owner, resource), entry in self._ledger.items():
            if owner in active and (shared := {*entry.devices}.intersection(devices.get(resource, ()))):
                raise ValueError(
                    f"pod {active[owner].name} has {min(shared)} of {resource}; delete it first or choose another ID"
                )
        uid = str(uuid.UUID(int=self._rng.getrandbits(128), version=4))
        requests = tuple((resource, len(ids)) for resource, ids in devices.items())
        pod = self._pods[name] = Pod(name, requests, Phase.RUNNING, "", uid, claims=claims)
        for resource, ids in devices.items():
            self._ledger[uid, resource] = LedgerEntry(ids, dict.fromkeys(ids, ()), {}, nodes, b"")
            self._allocated.setdefault(resource, set()).update(ids)
        self._with_cgroup.add(uid)
        self._adopted.add(uid)
        self._write_checkpoint()
        return pod

    def place(self, at: float) -> Pod | None:
        """Return the scheduler's next pod for this node: the oldest one that fits. It counts as allocated from now on.

        The pods that do not fit get the reason as their message.
        """
        for pod in [p for p in self._pods.values() if p.phase is Phase.PENDING]:
            if not self._explain_pending(pod, at).message:
                return self._set(pod.name, Phase.ADMITTING, "")
        return None

    def pod(self, name: str) -> Pod | None:
        """Return the pod, if it is not deleted."""
        return self._pods.get(name)

    def is_wanted(self, pod: Pod) -> bool:
        """It is neither deleted nor being deleted nor ended, and not another one of the same name."""
        current = self._pods.get(pod.name)
        return (
            current is not None
            and current.uid == pod.uid
            and current.phase not in _ENDED
            and current.phase is not Phase.TERMINATING
        )

    def admitted(self, name: str) -> None:
        """Note that the pod has all its devices; its container may start."""
        self._with_cgroup.add(self._set(name, Phase.STARTING, "").uid)

    def not_started(self, name: str, why: str) -> None:
        """PreStartContainer refused; kubelet will try again."""
        self._set(name, Phase.STARTING, why)

    def noted(self, pod: Pod, why: str) -> None:
        """The pod's end is held up; kubelet will try again. Nothing if it is gone meanwhile."""
        current = self._pods.get(pod.name)
        if current is not None and current.uid == pod.uid:
            self._set(pod.name, current.phase, why)

    def started(self, name: str) -> None:
        """Note that the pod's container runs."""
        self._set(name, Phase.RUNNING, "")

    def failed(self, name: str, why: str, asked_for: tuple[str, ...] = ()) -> None:
        """The pod is not admitted. Kubelet never tries again; the devices that it had picked are free. `asked_for` are
        the devices of the Allocate that failed, if it was one."""
        pod = self._set(
            name, Phase.FAILED, f"UnexpectedAdmissionError: Allocate failed due to {why}, which is unexpected"
        )
        self._pods[name] = replace(pod, asked_for=asked_for)

    def ended(self, name: str, why: str | None) -> None:
        """The pod's container has ended by itself, with an error if there is a reason; it is not started again."""
        pod = self._set(name, Phase.SUCCEEDED if why is None else Phase.FAILED, why or "")
        self._with_cgroup.discard(pod.uid)

    def terminate(self, name: str) -> bool:
        """A pod is to end. Returns whether there is a container, or a start of one, to wait for: then it is
        Terminating until `delete`; else it is gone. Raises `KeyError` if there is no such pod.
        """
        if self._pods[name].phase in _ENDED | {Phase.PENDING}:
            del self._pods[name]
            return False
        self._set(name, Phase.TERMINATING, "")
        return True

    def delete(self, name: str) -> None:
        """A pod is gone, whether its container has ended or not. At its next allocation, or its next answer to List,
        kubelet takes the pod's devices for free.

        Raises `KeyError` if there is no such pod.
        """
        self._with_cgroup.discard(self._pods.pop(name).uid)

    def _set(self, name: str, phase: Phase, message: str) -> Pod:
        pod = replace(self._pods[name], phase=phase, message=message)
        self._pods[name] = pod
        return pod

    def _explain_pending(self, pod: Pod, at: float) -> Pod:
        if not self._running:
            return self._set(pod.name, Phase.PENDING, "0/1 nodes are available: kubelet is not running.")
        short = [r for r, count in pod.requests if count > self._counts(r, at).free and not pod.bound]
        short_of = ", ".join(f"1 Insufficient {resource}" for resource in short)
        return self._set(pod.name, Phase.PENDING, f"0/1 nodes are available: {short_of}." if short else "")

    # --- one admission -------------------------------------------------------------------------------------

    def choose(self, pod: str, resource: str, size: int) -> Choice | None:
        """The devices to choose from for one resource of a pod; None if the pod has its devices already, or if kubelet
        knows no plugin of the resource: it then admits the pod without them.

        Raises `AdmissionError` in kubelet's words (devicesToAllocate), `KeyError` if there is no such pod.
        """
        uid = self._pods[pod].uid
        self._collect()
        entry = self._ledger.get((uid, resource))
        listed = self._listed.get(resource)
        if listed is None:
            if not self._in_use(resource):
                return None
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
        return Choice(pod, uid, resource, endpoint, self._shuffled(available), size)

    def take(self, choice: Choice, preferred: Iterable[str]) -> tuple[str, ...]:
        """Pick devices: first what the plugin prefers out of what was offered, then any others.

        They count as in use until kubelet makes its set of allocated devices anew. Kubelet keeps sets, so their order
        means nothing.
        """
        preferred_ids = set(preferred)
        first = [device for device in choice.available if device in preferred_ids]
        others = [device for device in choice.available if device not in preferred_ids]
        taken = (first + others)[: choice.size]
        self._allocated.setdefault(choice.resource, set()).update(taken)
        return self._shuffled(taken)

    def commit(self, choice: Choice, devices: tuple[str, ...], allocated: Allocated) -> None:
        """Allocate succeeded: the ledger has it, though the pod may be gone meanwhile. The set of allocated devices has
        it since `take`, or has lost it meanwhile: it is not made anew now.

        Raises `KubeletPanicError` if a device is not listed any more: kubelet reads its topology through a nil pointer.
        """
        listed = {device.id: device for device in self._listed.get(choice.resource, ())}
        for device in devices:
            if device not in listed:
                raise KubeletPanicError(
                    f"{device} of {choice.resource} left the list while an Allocate that had picked it was in flight"
                )
        self._ledger[choice.uid, choice.resource] = LedgerEntry(
            devices=tuple(sorted(devices)),
            numa_nodes={device: listed[device].numa_nodes for device in devices},
            envs=dict(allocated.envs),
            nodes=allocated.nodes,
            response=allocated.response,
            cdi_ids=allocated.cdi_ids,
        )
        self._write_checkpoint()

    def roll_back(self) -> None:
        """Allocate failed: the picked devices are free again, and so is all that kubelet has lost before
        (`allocatedDevices` is made anew from the ledger)."""
        self._made_anew()

    def holding(self, pod: str, resource: str) -> LedgerEntry | None:
        """Return the devices of a resource that a pod has by the ledger."""
        current = self._pods.get(pod)
        return None if current is None else self._ledger.get((current.uid, resource))

    def _in_use(self, resource: str) -> set[str]:
        return self._allocated.get(resource, set())

    def _collect(self) -> None:
        """Remove the entries of pods that are gone (UpdateAllocatedDevices), once kubelet knows its pods. Where there
        are any, kubelet finds again what it has lost, and forgets the device of an Allocate in flight: that is not in
        the ledger yet (kubernetes pull request 137534)."""
        if self._knows_pods:
            active = self._active()
            kept = {key: entry for key, entry in self._ledger.items() if key[0] in active}
            is_anew = len(kept) < len(self._ledger)
            self._ledger = kept
            if is_anew:
                self._made_anew()

    def _made_anew(self) -> None:
        """The set of allocated devices is what the ledger has (`m.allocatedDevices = m.podDevices.devices()`)."""
        self._allocated.clear()
        for (_, resource), entry in self._ledger.items():
            self._allocated.setdefault(resource, set()).update(entry.devices)

    def lives(self, running: Collection[str]) -> Mapping[str, PodLife]:
        """Each pod that has a cgroup, as the kernel shows it. `running`: the UIDs of those whose container runs, which
        a pod that was deleted by force may outlive."""
        lives = dict.fromkeys(running, PodLife.RUNNING)
        for pod in self._pods.values():
            if pod.uid not in self._with_cgroup or pod.uid in lives:
                continue
            if pod.uid in self._adopted:
                lives[pod.uid] = PodLife.RUNNING
            else:
                lives[pod.uid] = PodLife.STARTING if pod.phase is Phase.STARTING else PodLife.STOPPED
        return lives

    @property
    def active(self) -> frozenset[str] | None:
        """The UIDs of the pods that have not ended; None while kubelet does not know its pods."""
        return frozenset(self._active()) if self._knows_pods else None

    @property
    def uids(self) -> frozenset[str]:
        """Those of every pod that is not deleted."""
        return frozenset(pod.uid for pod in self._pods.values())

    def _active(self) -> dict[str, Pod]:
        """By UID."""
        return {pod.uid: pod for pod in self._pods.values() if pod.phase not in _ENDED}

    def _shuffled(self, devices: Iterable[str]) -> tuple[str, ...]:
        """Go's maps have no order; the seed makes ours repeatable."""
        ordered = sorted(devices)
        self._rng.shuffle(ordered)
        return tuple(ordered)

    # --- what can be seen -----------------------------------------------------------------------------------

    @property
    def checkpoint(self) -> Checkpoint:
        """The last contents of kubelet's file, which is written after a list, an allocation or the end of a grace. A
        release writes nothing, so it still names pods that have ended."""
        return self._checkpoint

    def _write_checkpoint(self) -> None:
        healthy = {r: tuple(d.id for d in devices if d.healthy) for r, devices in self._listed.items()}
        self._checkpoint = Checkpoint(dict(self._ledger), healthy)

    def listing(self) -> tuple[PodListing, ...]:
        """Return the answer of PodResources.List: every active pod on the node that kubelet knows of. One that is being
        admitted has no device yet."""
        if not self._knows_pods:
            return ()
        self._collect()
        listed = [PodListing(pod, ()) for pod in _DAEMON_PODS]
        listed += [self._listing(pod) for pod in self._active().values() if pod.phase is not Phase.PENDING]
        return tuple(listed)

    def listing_of(self, name: str, namespace: str) -> PodListing | None:
        """The answer of PodResources.Get for one pod, an active one unless `get_tells_ended`; None if kubelet does not
        know it."""
        pods = self._pods.values() if self._get_tells_ended else self._active().values()
        on_node = (pod for pod in pods if pod.phase is not Phase.PENDING)
        for pod in (*_DAEMON_PODS, *on_node) if self._knows_pods else ():
            if (pod.name, pod.namespace) == (name, namespace):
                return self._listing(pod)
        return None

    def _listing(self, pod: Pod) -> PodListing:
        return PodListing(
            pod, tuple((r, entry) for (uid, r), entry in self._ledger.items() if uid == pod.uid)
        )

    def allocatable(self) -> tuple[tuple[str, ListedDevice], ...]:
        """The Healthy devices of every resource, but for those with an empty topology: kubelet has one message for each
        NUMA node."""
        return tuple(
            (r, d)
            for r, devices in self._listed.items()
            for d in devices
            if d.healthy and not d.empty_topology
        )

    def _counts(self, resource: str, at: float) -> Counts:
        """The scheduler counts as allocated what the pods on the node ask for."""
        listed = () if self._expired(resource, at) else self._listed.get(resource, ())
        return Counts(
            capacity=len(listed),
            allocatable=sum(device.healthy for device in listed),
            allocated=sum(
                n for p in self._pods.values() if p.phase in _COUNTED for r, n in p.requests if r == resource
            ),
        )

    def view(self, at: float) -> KubeletView:
        """Kubelet's view now. A resource whose plugin is gone for good keeps its name, with zeros, as in a node's
        status."""
        names = sorted({*self._known, *(r for p in self._pods.values() for r, _ in p.requests)})
        active = self._active()
        holdings = {
            (active[uid].name, resource): entry
            for (uid, resource), entry in self._ledger.items()
            if uid in active
        }
        return KubeletView(
            running=self._running,
            resources={name: self._counts(name, at) for name in names},
            devices=tuple(row for name in names for row in self._rows(name, holdings)),
            pods=dict(self._pods),
            holdings=holdings,
            connected=frozenset(r for r, e in self._endpoints.items() if e.stopped_at is None),
            registrations=self._registrations,
            lists=self._lists,
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


def go_quoted(text: str) -> str:
    """Quote as Go's `%q`."""
    return json.dumps(text)


def resource_name_problem(name: str) -> str | None:
    """Return why kubelet refuses a resource name in Register, or None (IsExtendedResourceName, IsQualifiedName)."""
    prefix, slash, part = name.partition("/")
    if (
        not slash
        or prefix.endswith("kubernetes.io")
        or name.startswith("requests.")
        or len(prefix) > _DOMAIN_MAX
        or not _DOMAIN.fullmatch(prefix)
        or not _NAME_PART.fullmatch(part)
    ):
        return f"the ResourceName {go_quoted(name)} is invalid"
    return None
