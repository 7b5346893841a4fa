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
from gpuactors.core.ledger.ledger import allocated_ids
from gpuactors.core.reports.readiness import unmet_prerequisites
from gpuactors.core.state import NodeState
from gpuactors.core.values.cause import AS_BEFORE, CALL, MEANINGS
from gpuactors.core.values.model import ClaimedDevice, DeviceKey, Health, Pod, Role
from gpuactors.core.values.owner import Allocation

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


def _owners(state: NodeState, _: Moment) -> Iterator[Sample]:
    owners = state.index.owners.items()
    # Kubelet's ledger may have one GPU of a pod by several IDs; a series must not be there twice.
    named = dict.fromkeys(_owner(device, entry) for device, owner in owners for entry in owner.entries)
    return ((labels, 1) for labels in named)


def _owner(device: DeviceKey, allocation: Allocation) -> tuple[str, ...]:
    match allocation.to:
        case Pod(namespace, name, uid):
            return device, allocation.resource or "", "", namespace, name, uid
        case ClaimedDevice(pod=Pod(namespace, name, uid)):
            return device, "", allocation.to.claim, namespace, name, uid
        case ClaimedDevice():
            return device, "", allocation.to.claim, "", "", ""
        case None:
            return device, allocation.resource or "", "", "", "", ""


def _in_use(state: NodeState, _: Moment) -> Iterator[Sample]:
    index = state.index
    for resource, entries in state.published.device_lists.items():
        groups = {index.group_of.get(entry.key) for entry in entries}
        yield (resource,), len(groups & index.in_use)


def _registered(state: NodeState, _: Moment) -> Iterator[Sample]:
    plugins = state.published.plugins
    return (((r,), int(registration.is_registered(p))) for r, p in plugins.items())


def _contested(state: NodeState, _: Moment) -> Iterator[Sample]:
    plugins = state.published.plugins
    return (((r,), int(registration.is_contested(p))) for r, p in plugins.items())


def _disagreements(state: NodeState, _: Moment) -> Iterator[Sample]:
    return (((r,), p.listing.against) for r, p in state.published.plugins.items())


def _streams(state: NodeState, now: Moment) -> Iterator[Sample]:
    for resource, plugin in state.published.plugins.items():
        is_open = plugin.kubelet_stream in plugin.streams
        yield (resource,), now.timestamp(plugin.stream_opened_at) if is_open else 0.0


def _lists(state: NodeState, now: Moment) -> Iterator[Sample]:
    plugins = state.published.plugins
    return (((r,), now.timestamp(p.listing.changed_at)) for r, p in plugins.items())


def _compared(state: NodeState, now: Moment) -> Iterator[Sample]:
    plugins = state.published.plugins
    return (((r,), now.timestamp(p.listing.compared_at)) for r, p in plugins.items())


def _one(value: Callable[[NodeState, Moment], float]) -> Callable[[NodeState, Moment], Iterable[Sample]]:
    return lambda state, now: [((), value(state, now))]


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


def _published(state: NodeState, _: Moment) -> Iterator[Sample]:
    for driver, claims in _served(state).items():
        publication = claims.publication
        yield (driver,), int(publication is not None and publication.settled)


def _written(state: NodeState, _: Moment) -> Iterator[Sample]:
    for driver, claims in _served(state).items():
        yield (driver,), int(claims.loaded and not claims.unserved and not claims.unwritten)


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
        "gpuactors_device_owner_info",
        "1 for each pod or claim that kubelet has given a GPU to, by the GPU's PCI address. A pod has its name, or its "
        "UID where only kubelet's checkpoint file can be read.",
        ("gpu", "resource", "claim", "pod_namespace", "pod_name", "pod_uid"),
        _owners,
    ),
    Gauge(
        "gpuactors_groups_in_use",
        "IOMMU groups that some process had open when they were last polled, by resource.",
        ("resource",),
        _in_use,
    ),
    Gauge(
        "gpuactors_resource_registered",
        "Whether kubelet has accepted the resource, holds our stream open, and has no other plugin's list.",
        ("resource",),
        _registered,
    ),
    Gauge(
        "gpuactors_resource_contested",
        "Whether kubelet has another plugin's devices under our resource's name.",
        ("resource",),
        _contested,
    ),
    Gauge(
        "gpuactors_device_list_disagreements",
        "Reads in a row that showed another list in kubelet than ours; two are a contest.",
        ("resource",),
        _disagreements,
    ),
    Gauge(
        "gpuactors_stream_opened_timestamp_seconds",
        "When kubelet opened the ListAndWatch stream that is open, in seconds since 1970; 0 if none is.",
        ("resource",),
        _streams,
    ),
    Gauge(
        "gpuactors_device_list_changed_timestamp_seconds",
        "When the resource's device list last changed, in seconds since 1970; 0 if it never did.",
        ("resource",),
        _lists,
    ),
    Gauge(
        "gpuactors_device_list_compared_timestamp_seconds",
        "When kubelet's own list was last compared with ours, in seconds since 1970; 0 if it never was.",
        ("resource",),
        _compared,
    ),
    Gauge(
        "gpuactors_serving",
        "Whether this daemon serves: 0 while it waits for its predecessor, and after it has handed over.",
        (),
        _one(lambda state, _: int(state.daemon.role is Role.SERVING and not state.daemon.stopping)),
    ),
    Gauge(
        "gpuactors_ready",
        "Whether kubelet can allocate what is offered, as /readyz has it.",
        (),
        _one(lambda state, _: int(not unmet_prerequisites(state))),
    ),
    Gauge(
        "gpuactors_kubelet_found",
        "Whether kubelet's socket is there.",
        (),
        _one(lambda state, _: int(state.kubelet.socket is not None)),
    ),
    Gauge(
        "gpuactors_ledger_readable",
        "Whether the last read of kubelet's ledger succeeded.",
        (),
        _one(lambda state, _: int(bool(state.kubelet.ledger.read) and not state.kubelet.ledger.problem)),
    ),
    Gauge(
        "gpuactors_ledger_read_timestamp_seconds",
        "When the read of the known entries of kubelet's ledger was requested, in seconds since 1970; 0 before it.",
        (),
        _one(_ledger_read),
    ),
    Gauge(
        "gpuactors_uevents_received",
        "Whether the kernel's uevents are received; without them only the periodic scan finds changes.",
        (),
        _one(lambda state, _: int(not state.host.uevents)),
    ),
    Gauge(
        "gpuactors_functions",
        "PCI functions of the node whose files are known.",
        (),
        _one(lambda state, _: len(state.host.functions)),
    ),
    Gauge(
        "gpuactors_calls_waiting",
        "Calls of kubelet about devices that wait for their answer.",
        (),
        _one(lambda state, _: len(state.calls.waiting)),
    ),
    Gauge("gpuactors_claims", "Claims on this node, by their state.", ("driver", "state"), _claims),
    Gauge(
        "gpuactors_claims_served",
        "Whether claims are served: their checkpoint has been read, and can be written.",
        ("driver",),
        _written,
    ),
    Gauge(
        "gpuactors_slices_published",
        "Whether the API server's ResourceSlices are what is offered.",
        ("driver",),
        _published,
    ),
)
"""Every metric of the state."""
