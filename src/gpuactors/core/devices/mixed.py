"""Devices to which the operator has given one resource, and which KubeVirt cannot use under one name.

A virtual machine that asks for a resource gets any device of it. A whole function is no replacement for a virtual one
of a card; KubeVirt gives the virtual machines of Grace superchips another virtual IOMMU; and it counts mediated devices
by a variable of their own. One family of devices keeps the name, and the others of the resource are refused, whatever
driver they are on: a bind or an unbind changes nothing. Must not judge names that no operator has given.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import IntEnum

from msgspec.structs import replace

from gpuactors.core.kinds.table import kind_of
from gpuactors.core.values.inventory import Device
from gpuactors.core.values.memo import memoized_each
from gpuactors.core.values.model import DeviceKey, ResourceName
from gpuactors.core.values.naming import MEDIATED_ENV_PREFIX
from gpuactors.core.values.own_resources import is_grace
from gpuactors.core.values.selector import Selector


class _Family(IntEnum):
    """Devices that KubeVirt can use under one name. The first family of a resource keeps it."""

    GRACE = 0
    WHOLE = 1
    PART = 2
    MEDIATED = 3


_WORDS = {
    _Family.GRACE: "the GPU of a Grace superchip",
    _Family.WHOLE: "a whole function",
    _Family.PART: "a virtual function",
    _Family.MEDIATED: "a mediated device",
}


def without_mixed(
    present: Mapping[DeviceKey, Device], selectors: Iterable[Selector]
) -> Mapping[DeviceKey, Device]:
    """Return the devices, with `Device.mixed` set for those that KubeVirt cannot use beside others under a name of the
    operator's."""
    own = {s.resource for s in selectors if s.resource is not None}
    if not own:
        return present
    by_resource: dict[ResourceName, dict[_Family, list[Device]]] = {}
    for device in present.values():
        if device.resource in own and device.is_selected and (family := _family_of(device)) is not None:
            by_resource.setdefault(device.resource, {}).setdefault(family, []).append(device)
    mixed = {
        device.key: (device, _sentence(families[min(families)][0], min(families), family))
        for families in by_resource.values()
        for family, devices in families.items()
        if family != min(families)
        for device in devices
    }
    return {**present, **_mixed(mixed)} if mixed else present


def _family_of(device: Device) -> _Family | None:
    """Return the device's family; None for a card that parts were made of, which nobody is given as a whole."""
    if kind_of(device).env_prefix == MEDIATED_ENV_PREFIX:
        return _Family.MEDIATED
    if device.parent is not None:
        return _Family.PART
    if device.parts:
        return None
    return _Family.GRACE if is_grace(device.model) else _Family.WHOLE


def _sentence(other: Device, of_other: _Family, family: _Family) -> str:
    return (
        f"{_WORDS[family]}, and {other.resource} has {other.key}, {_WORDS[of_other]}: KubeVirt cannot use both under "
        "one name; give one of them another name (--resource)"
    )


@memoized_each
def _mixed(inputs: tuple[Device, str]) -> Device:
    device, sentence = inputs
    return replace(device, mixed=sentence)
