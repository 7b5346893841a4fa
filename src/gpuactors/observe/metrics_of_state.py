"""The metrics that are read off the state when they are asked for: nothing is kept, so none can be out of date.

Each is a gauge. Labels are causes, names and states, never sentences. A series of a resource, a cause or a state exists
at zero, so that an alert sees the change and not the absence.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Final, TypeAlias

from msgspec import Struct

from gpuactors.core.deviceplugin import registration
from gpuactors.core.kinds.dead import dead
from gpuactors.core.ledger.ledger import allocated_ids
from gpuactors.core.reports.readiness import unmet_prerequisites
from gpuactors.core.state import NodeState
from gpuactors.core.values.cause import AS_BEFORE, CALL, MEANINGS
from gpuactors.core.values.model import (
    ClaimedDevice,
    DeviceKey,
    Health,
    PluginState,
    Pod,
    Role,
    device_key,
)
from gpuactors.core.values.owner import Allocation
from gpuactors.core.values.partition import PartitionState
from gpuactors.core.values.virtual_machine import virtual_machine

if TYPE_CHECKING:
    from gpuactors.core.state.claims import Claims

Sample: TypeAlias = tuple[tuple[str, ...], float]
"""The values of the labels, in the order in which they are declared, and the value."""


class Moment(Struct, frozen=True):
    """One moment on two clocks: that of the state's events, and the time of day in seconds since 1970."""

    at: float
    wall: float

    def timestamp(self, at: float) -> float:
        """Return the time of day at another moment of the state's clock; 0 if that never was."""
        return self.wall + at - self.at if math.isfinite(at) else 0.0


class Gauge(Struct, frozen=True):
    """A metric of the state."""

    name: str
    help: str
    labels: tuple[str, ...]
    samples: Callable[[NodeState, Moment], Iterable[Sample]]


def _devices(state: NodeState, _: Moment) -> Iterator[Sample]:
    for resource, entries in state.published.device_lists.items():
        counts = Counter((str(entry.health), str(entry.cause)) for entry in entries)
        yield from (((resource, health, cause), counts.get((health, cause), 0)) for health, cause in _HEALTHS)


def _healths() -> Iterator[tuple[str, str]]:
    for cause, meaning in MEANINGS.items():
        if meaning.health == AS_BEFORE:
            yield from ((str(health), str(cause)) for health in Health)
        elif meaning.health != CALL:
            yield meaning.health, str(cause)


_HEALTHS: Final = tuple(_healths())
"""The causes of a device, each with the health that goes with it."""


def _allocated(state: NodeState, _: Moment) -> Iterator[Sample]:
    allocated = allocated_ids(state, state.published.device_lists)
    yield from (((resource,), len(allocated.get(resource, ()))) for resource in state.published.device_lists)


def _unhealthy(state: NodeState, _: Moment) -> Iterator[Sample]:
    # A GPU may be listed by two IDs; a series must not be there twice.
    series = dict.fromkeys(
        (str(device.key), resource, str(device.cause))
        for resource, devices in state.published.device_lists.items()
        for device in devices
        if device.health is Health.UNHEALTHY
    )
    return ((labels, 1) for labels in series)


def _dead(state: NodeState, _: Moment) -> Iterator[Sample]:
    devices = state.index.devices.items()
    return (((key, device.resource), 1) for key, device in devices if dead(device) is not None)


def _resets(state: NodeState, _: Moment) -> Iterator[Sample]:
    for key, device in state.index.devices.items():
        if device.units and device.units[0].vfio_bound and device_key(device.units[0].address) == key:
            methods = device.units[0].reset_methods
            yield (key, "unknown" if methods is None else methods[0] if methods else "none"), 1


def _owners(state: NodeState, _: Moment) -> Iterator[Sample]:
    owners = state.index.owners.items()
    # Kubelet's ledger may have one GPU of a pod by several IDs; a series must not be there twice.
    named = dict.fromkeys(_owner(device, entry) for device, owner in owners for entry in owner.entries)
    return ((labels, 1) for labels in named)


def _owner(device: DeviceKey, allocation: Allocation) -> tuple[str, ...]:
    match allocation.to:
        case Pod(namespace, name, uid):
            return device, allocation.resource or "", "", namespace, name, uid, virtual_machine(name)
        case ClaimedDevice(pod=Pod(namespace, name, uid)):
            return device, "", allocation.to.claim, namespace, name, uid, virtual_machine(name)
        case ClaimedDevice():
            return device, "", allocation.to.claim, "", "", "", ""
        case None:
            return device, allocation.resource or "", "", "", "", "", ""


def _in_use(state: NodeState, _: Moment) -> Iterator[Sample]:
    index = state.index
    for resource, entries in state.published.device_lists.items():
        groups = {index.group_of.get(entry.key) for entry in entries}
        yield (resource,), len(groups & index.in_use)


def _stream_opened(plugin: PluginState, now: Moment) -> float:
    return now.timestamp(plugin.stream_opened_at) if plugin.kubelet_stream in plugin.streams else 0.0


def _ledger_read(state: NodeState, now: Moment) -> float:
    ledger = state.kubelet.ledger
    return now.timestamp(ledger.read_at) if ledger.read else 0.0


def _served(state: NodeState) -> Mapping[str, Claims]:
    return {claims.settings.driver: claims for claims in state.all_claims if claims.settings is not None}


def _claims(state: NodeState, _: Moment) -> Iterator[Sample]:
    if not state.serves_claims:
        return
    from gpuactors.core.values.claim_states import ClaimState

    for driver, claims in _served(state).items():
        counts = Counter(entry.state for entry in claims.entries.values())
        yield from (((driver, str(s)), counts.get(s, 0)) for s in ClaimState if s is not ClaimState.ABSENT)


def _pending_since(state: NodeState, now: Moment) -> Iterator[Sample]:
    for driver, claims in _served(state).items():
        oldest = min((entry.pending_since for entry in claims.entries.values()), default=math.inf)
        yield (driver,), now.timestamp(oldest)


def _partitions(state: NodeState, _: Moment) -> Iterator[Sample]:
    if (partitions := state.partitions) is not None:
        counts = Counter(record.state for record in partitions.records.values())
        states = (s for s in PartitionState if s is not PartitionState.ABSENT)
        yield from (((str(s),), counts.get(s, 0)) for s in states)


def _publishes(claims: Claims) -> bool:
    return claims.publication is not None and claims.publication.settled


def _serves(claims: Claims) -> bool:
    return claims.loaded and not claims.unserved and not claims.unwritten


def _node_gauge(name: str, text: str, value: Callable[[NodeState, Moment], float]) -> Gauge:
    """Return a metric of the whole node."""
    return Gauge(name, text, (), lambda state, now: [((), value(state, now))])


def _resource_gauge(name: str, text: str, value: Callable[[PluginState, Moment], float]) -> Gauge:
    """Return a metric of each resource's plugin."""

    def samples(state: NodeState, now: Moment) -> Iterator[Sample]:
        return (((r,), value(plugin, now)) for r, plugin in state.published.plugins.items())

    return Gauge(name, text, ("resource",), samples)


def _driver_gauge(name: str, text: str, value: Callable[[Claims], bool]) -> Gauge:
    """Return a metric, 0 or 1, of each DRA driver that is served."""

    def samples(state: NodeState, _: Moment) -> Iterator[Sample]:
        return (((driver,), int(value(claims))) for driver, claims in _served(state).items())

    return Gauge(name, text, ("driver",), samples)


GAUGES: Final = (
    Gauge(
        "gpuactors_devices",
        "Devices in the list that kubelet gets, by health and its cause.",
        ("resource", "health", "cause"),
        _devices,
    ),
    Gauge(
        "gpuactors_devices_allocated",
        "Devices that kubelet's ledger gives to pods under this resource, or that were just allocated.",
        ("resource",),
        _allocated,
    ),
    Gauge(
        "gpuactors_device_unhealthy_info",
        "1 for each device that kubelet has as Unhealthy, by its PCI address, with the cause.",
        ("gpu", "resource", "cause"),
        _unhealthy,
    ),
    Gauge(
        "gpuactors_device_dead_info",
        "1 for each device with a sign that it is dead, by its PCI address, also while a pod has it and it is Healthy.",
        ("gpu", "resource"),
        _dead,
    ),
    Gauge(
        "gpuactors_device_reset_info",
        "1 for each device on a vfio driver, by its PCI address, with the method that the kernel would try first to "
        "reset it alone: none if it has none, unknown before Linux 5.15. Whether it was reset is not known.",
        ("gpu", "method"),
        _resets,
    ),
    Gauge(
        "gpuactors_device_owner_info",
        "1 for each pod or claim that kubelet has given a GPU to, by the GPU's PCI address. A pod has its name, or its "
        "UID where only kubelet's checkpoint file can be read; `vm` is the VirtualMachineInstance that it runs.",
        ("gpu", "resource", "claim", "pod_namespace", "pod_name", "pod_uid", "vm"),
        _owners,
    ),
    Gauge(
        "gpuactors_groups_in_use",
        "IOMMU groups that some process had open when they were last polled, by resource.",
        ("resource",),
        _in_use,
    ),
    _resource_gauge(
        "gpuactors_resource_registered",
        "Whether kubelet has accepted the resource, holds gpuactors' stream open, and has no other plugin's list.",
        lambda plugin, _: int(registration.is_registered(plugin)),
    ),
    _resource_gauge(
        "gpuactors_resource_contested",
        "Whether kubelet has another plugin's devices under the resource's name.",
        lambda plugin, _: int(registration.is_contested(plugin)),
    ),
    _resource_gauge(
        "gpuactors_device_list_disagreements",
        "Reads in a row in which kubelet's list was not gpuactors'; two are a contest.",
        lambda plugin, _: plugin.listing.against,
    ),
    _resource_gauge(
        "gpuactors_stream_opened_timestamp_seconds",
        "When kubelet opened the ListAndWatch stream that is open, in seconds since 1970; 0 if none is.",
        _stream_opened,
    ),
    _resource_gauge(
        "gpuactors_device_list_changed_timestamp_seconds",
        "When the resource's device list last changed, in seconds since 1970; 0 if it never did.",
        lambda plugin, now: now.timestamp(plugin.listing.changed_at),
    ),
    _resource_gauge(
        "gpuactors_device_list_compared_timestamp_seconds",
        "When kubelet's own list was last compared with gpuactors', in seconds since 1970; 0 if it never was.",
        lambda plugin, now: now.timestamp(plugin.listing.compared_at),
    ),
    _node_gauge(
        "gpuactors_serving",
        "Whether this daemon serves: 0 while it waits for its predecessor, and after it has handed over.",
        lambda state, _: int(state.daemon.role is Role.SERVING and not state.daemon.stopping),
    ),
    _node_gauge(
        "gpuactors_ready",
        "Whether kubelet can allocate what is offered, as /readyz has it.",
        lambda state, _: int(not unmet_prerequisites(state)),
    ),
    _node_gauge(
        "gpuactors_kubelet_found",
        "Whether kubelet's socket is there.",
        lambda state, _: int(state.kubelet.socket is not None),
    ),
    _node_gauge(
        "gpuactors_ledger_readable",
        "Whether the last read of kubelet's ledger succeeded.",
        lambda state, _: int(bool(state.kubelet.ledger.read) and not state.kubelet.ledger.problem),
    ),
    _node_gauge(
        "gpuactors_ledger_read_timestamp_seconds",
        "When the read of the known entries of kubelet's ledger was requested, in seconds since 1970; 0 before it.",
        _ledger_read,
    ),
    _node_gauge(
        "gpuactors_config_file_in_use",
        "Whether the configuration file is the one in use: 0 if a changed one is refused, or needs a restart. Always 1 "
        "with --reload off, as the file is not read again.",
        lambda state, _: int(not state.daemon.config_unused),
    ),
    _node_gauge(
        "gpuactors_uevents_received",
        "Whether the kernel's uevents are received; without them only the periodic scan finds changes.",
        lambda state, _: int(not state.host.uevents),
    ),
    _node_gauge(
        "gpuactors_functions",
        "PCI functions of the node whose files are known.",
        lambda state, _: len(state.host.functions),
    ),
    _node_gauge(
        "gpuactors_calls_waiting",
        "Calls of kubelet about devices that wait for their answer.",
        lambda state, _: len(state.calls.waiting),
    ),
    Gauge("gpuactors_claims", "Claims on this node, by their state.", ("driver", "state"), _claims),
    Gauge(
        "gpuactors_claims_pending_since_timestamp_seconds",
        "Since when the claim that has been pending for longest is, in seconds since 1970; 0 if none is. Pending is a "
        "claim that is neither `Prepared` nor `TakenOver` nor `Unprepared`, since it last was or the daemon started.",
        ("driver",),
        _pending_since,
    ),
    Gauge(
        "gpuactors_partitions",
        "Partitions of the NVLink fabric that a pod or claim has or waits for, by their state.",
        ("state",),
        _partitions,
    ),
    _driver_gauge(
        "gpuactors_claims_served",
        "Whether claims are served: their checkpoint has been read, and can be written.",
        _serves,
    ),
    _driver_gauge(
        "gpuactors_slices_published",
        "Whether the API server's ResourceSlices are what is offered.",
        _publishes,
    ),
)
"""Every metric of the state."""
