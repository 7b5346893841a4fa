"""The pool that is to be published: which devices are in it, with which attributes and taints, in which slices.

The order of slices by name and of devices in a slice is the scheduler's preference, so it follows from the names of the
devices alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from gpuactors import limits
from gpuactors.core.values.slices import (
    AnyOffer,
    Attribute,
    OfferedDevice,
    ServerKeepsTaints,
    SliceDevice,
    SliceSpec,
    Taint,
)

_NOT_OF_A_LABEL = re.compile(r"[^A-Za-z0-9_.-]")


class Pool(Struct, frozen=True):
    """The wanted content of all slices of one driver on this node; its generation is `slice_writes.py`'s."""

    driver: str
    node: str
    slices: tuple[tuple[SliceDevice, ...], ...]
    """At least one; the only one may be empty."""
    withdrawn: tuple[str, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def devices(self) -> tuple[SliceDevice, ...]:
        """The devices of all slices."""
        return tuple(device for devices in self.slices for device in devices)


def wanted_pool(offer: AnyOffer, keeps: ServerKeepsTaints) -> Pool:
    """The pool that offers what may be given to claims.

    A blocked device gets a taint where the server keeps taints. Elsewhere it is withdrawn, unless a live claim has it;
    so while it is not known, no device is offered that must not be taken.
    """
    devices: list[SliceDevice] = []
    withdrawn: list[str] = []
    left_out: dict[str, str] = {}
    for offered in sorted(offer.devices, key=lambda device: device.name):
        if offered.invalid:
            left_out[offered.name] = offered.invalid
        elif offered.blocked is None or keeps is ServerKeepsTaints.YES:
            devices.append(_device(offered, offer.driver, tainted=True))
        elif offered.claimed:
            devices.append(_device(offered, offer.driver, tainted=False))
        else:
            withdrawn.append(offered.name)
    return Pool(offer.driver, offer.node, _split(devices), tuple(withdrawn), left_out)


def probe_spec(driver: str, node: str) -> SliceSpec:
    """A slice with one tainted device. Created in a dry run, it shows whether the server keeps taints."""
    taint = Taint(f"{driver}/unhealthy", "Probe")
    device = SliceDevice("probe", {"type": Attribute("string", "vfio")}, (taint,))
    return SliceSpec(driver, node, node, 1, 1, (device,))


def has_taints(spec: SliceSpec) -> bool:
    """Whether any device of the slice has a taint."""
    return any(device.taints for device in spec.devices)


def _split(devices: Sequence[SliceDevice]) -> tuple[tuple[SliceDevice, ...], ...]:
    tainted = any(device.taints for device in devices)
    size = limits.SLICE_TAINTED_DEVICES_MAX if tainted else limits.SLICE_DEVICES_MAX
    return tuple(tuple(devices[at : at + size]) for at in range(0, len(devices), size)) or ((),)


def _device(offered: OfferedDevice, driver: str, *, tainted: bool) -> SliceDevice:
    device = SliceDevice(offered.name, offered.attributes, capacity=offered.capacity)
    if offered.blocked is None or not tainted:
        return device
    taint = Taint(f"{driver}/{offered.blocked.kind}", _label_value(offered.blocked.cause))
    return replace(device, taints=(taint,))


def _label_value(text: str) -> str:
    """`text` as a taint's value, which has the rules of a label's."""
    plain = _NOT_OF_A_LABEL.sub("-", text).strip("_.-")
    return plain[: limits.TAINT_VALUE_MAX_CHARS].rstrip("_.-")
