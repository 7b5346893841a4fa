"""The pool that is to be published: which devices are in it, with which attributes and taints, in which slices.

The order of slices by name and of devices in a slice is the scheduler's preference, so it follows from the names of the
devices alone.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from gpuactors.core.values.memo import memoized, memoized_each
from gpuactors.core.values.slices import (
    Attribute,
    CounterSet,
    Offer,
    OfferedDevice,
    ServerKeeps,
    SliceDevice,
    SliceSpec,
    Taint,
)

SLICE_DEVICES_MAX: Final = 128
"""The maximum number of devices in one ResourceSlice (resource.k8s.io/v1, ResourceSliceMaxDevices)."""

SLICE_TAINTED_DEVICES_MAX: Final = 64
"""The maximum number where any device of it has a taint or consumes counters
(ResourceSliceMaxDevicesWithTaintsOrConsumesCounters)."""

SLICE_COUNTER_SETS_MAX: Final = 8
"""The maximum number of counter sets in one ResourceSlice (ResourceSliceMaxCounterSets)."""

SLOTS: Final = "vf-slots"
"""The counter of a card's set, by the name that AMD's driver gives it: each part takes one, the whole card all."""

TAINT_VALUE_MAX_CHARS: Final = 63
"""The maximum length of a taint's value, which has the rules of a label's."""

_NOT_OF_A_LABEL = re.compile(r"[^A-Za-z0-9_.-]")


class Pool(Struct, frozen=True, gc=False):
    """The wanted content of all slices of one driver on this node, without the generation, which `slice_writes.py`
    decides."""

    driver: str
    node: str
    slices: tuple[tuple[SliceDevice, ...], ...]
    """The devices of each slice. At least one slice; the only one may be empty."""
    counter_sets: tuple[tuple[CounterSet, ...], ...] = ()
    """The counter sets of each further slice: no slice has both (from Kubernetes 1.35 on)."""
    withdrawn: tuple[str, ...] = ()
    """The names of blocked devices that no slice has, as the server does not keep taints."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Why no slice can have a device, by its name."""

    @property
    def devices(self) -> tuple[SliceDevice, ...]:
        """The devices of all slices."""
        return tuple(device for devices in self.slices for device in devices)


class _Shown(Struct, frozen=True, gc=False):
    """A device of the offer as it is in the pool."""

    name: str
    device: SliceDevice | None
    """The device in a slice; None if no slice has it."""
    left_out: str = ""
    """Why no slice can have it; empty for a withdrawn device."""


@memoized
def wanted_pool(offer: Offer, taints: ServerKeeps, counters: ServerKeeps = ServerKeeps.UNKNOWN) -> Pool:
    """Return the pool that offers what may be given to claims. `taints`, `counters`: whether the server keeps them.

    A blocked device gets a taint where the server keeps taints. Elsewhere it is withdrawn, unless a live claim has it.
    While that is unknown, no device is offered that must not be taken.
    """
    shown = _shown_each({device.name: (device, offer.driver, taints) for device in offer.devices})
    in_order = [shown[name] for name in sorted(shown)]
    devices = [entry.device for entry in in_order if entry.device is not None]
    sets = tuple[CounterSet, ...]()
    if counters is ServerKeeps.YES:
        devices, sets = _with_counters(devices, {device.name: device for device in offer.devices})
    return Pool(
        offer.driver,
        offer.node,
        _split(devices),
        tuple(sets[at : at + SLICE_COUNTER_SETS_MAX] for at in range(0, len(sets), SLICE_COUNTER_SETS_MAX)),
        tuple(entry.name for entry in in_order if entry.device is None and not entry.left_out),
        {entry.name: entry.left_out for entry in in_order if entry.left_out},
    )


@memoized_each
def _shown_each(inputs: tuple[OfferedDevice, str, ServerKeeps]) -> _Shown:
    offered, driver, keeps = inputs
    if offered.invalid:
        return _Shown(offered.name, None, offered.invalid)
    if offered.blocked is None or keeps is ServerKeeps.YES:
        return _Shown(offered.name, _device(offered, driver, tainted=True))
    if offered.claimed:
        return _Shown(offered.name, _device(offered, driver, tainted=False))
    return _Shown(offered.name, None)


def _with_counters(
    devices: Sequence[SliceDevice], offered: Mapping[str, OfferedDevice]
) -> tuple[list[SliceDevice], tuple[CounterSet, ...]]:
    """Return the devices with what they consume, and the counter sets: of each card that is in the pool with parts.

    The scheduler ignores the whole pool if a device consumes a set that is not there, and every device that consumes
    counters while any set is overdrawn. Therefore a set has as many slots as there are parts in the pool.
    """
    cards = {offered[d.name].counter_set for d in devices if offered[d.name].is_whole}
    slots = Counter(
        offer.counter_set
        for d in devices
        if not (offer := offered[d.name]).is_whole and offer.counter_set in cards
    )
    consuming: list[SliceDevice] = []
    for device in devices:
        offer = offered[device.name]
        if offer.counter_set in slots:
            taken = slots[offer.counter_set] if offer.is_whole else 1
            device = replace(device, consumes=(CounterSet(offer.counter_set, {SLOTS: str(taken)}),))  # noqa: PLW2901
        consuming.append(device)
    return consuming, tuple(CounterSet(name, {SLOTS: str(slots[name])}) for name in sorted(slots))


def probe_spec(driver: str, node: str, *, counters: bool) -> SliceSpec:
    """Return a slice with one tainted device, which consumes `counters`. Created in a dry run, it shows whether the
    server keeps them. A server before 1.35 with its gate on refuses a device without its set in the same slice."""
    taint = Taint(f"{driver}/unhealthy", "Probe")
    consumes = (CounterSet("probe", {SLOTS: "1"}),) if counters else ()
    device = SliceDevice("probe", {"type": Attribute("string", "vfio")}, (taint,), consumes=consumes)
    return SliceSpec(driver, node, node, 1, 1, (device,))


def has_taints(spec: SliceSpec) -> bool:
    """Return whether any device of the slice has a taint."""
    return any(device.taints for device in spec.devices)


def has_counters(spec: SliceSpec) -> bool:
    """Return whether the slice has counter sets, or any device of it consumes counters."""
    return bool(spec.counter_sets) or any(device.consumes for device in spec.devices)


def _split(devices: Sequence[SliceDevice]) -> tuple[tuple[SliceDevice, ...], ...]:
    is_advanced = any(device.taints or device.consumes for device in devices)
    size = SLICE_TAINTED_DEVICES_MAX if is_advanced else SLICE_DEVICES_MAX
    return tuple(tuple(devices[at : at + size]) for at in range(0, len(devices), size)) or ((),)


def _device(offered: OfferedDevice, driver: str, *, tainted: bool) -> SliceDevice:
    device = SliceDevice(offered.name, offered.attributes, capacity=offered.capacity)
    if offered.blocked is None or not tainted:
        return device
    taint = Taint(f"{driver}/{offered.blocked.kind}", _label_value(offered.blocked.cause))
    return replace(device, taints=(taint,))


def _label_value(text: str) -> str:
    """Return `text` as a taint's value, which has the rules of a label's."""
    plain = _NOT_OF_A_LABEL.sub("-", text).strip("_.-")
    return plain[:TAINT_VALUE_MAX_CHARS].rstrip("_.-")
