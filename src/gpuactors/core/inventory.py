"""From facts to devices: which functions kubelet is told about, under which resource, and what stands around them.

Must not judge a device's health (`health.py`) and must not remember anything: everything here is read off the facts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from gpuactors.core.model import Fact, PciAddress, PciFunction, ResourceName
from gpuactors.core.naming import resource_name
from gpuactors.core.selector import Selector, matches
from gpuactors.core.state import NodeState

COMPANION_CLASSES: Final = ("0403", "0c03", "0c80")
"""Audio, USB and the USB-C controller of a card: they share the GPU's slot and group and go along with it, but are no
GPU (kubevirt-gpu-device-plugin #67). Only a selector that names a class, a device or an address chooses one."""


@dataclass(frozen=True, slots=True)
class Device:
    """A function that kubelet is (or would be) told about, with the members of its IOMMU group."""

    function: PciFunction
    resource: ResourceName
    group: tuple[PciFunction, ...]
    """All known functions of its IOMMU group, itself included, sorted by address."""


def is_selected(selectors: Iterable[Selector], function: PciFunction) -> bool:
    """Whether an operator's selectors choose this function as a device of its own.

    One whose ids could never be read is none: which resource it belongs to is not known.
    """
    if not (function.vendor and function.device):
        return False
    companion = function.class_code.startswith(COMPANION_CLASSES)
    met = [
        selector
        for selector in selectors
        if matches(
            selector,
            vendor=function.vendor,
            device=function.device,
            class_code=function.class_code,
            address=function.address,
        )
    ]
    return not any(selector.exclude for selector in met) and any(
        not (companion and selector.class_prefix is selector.device is selector.address is None)
        for selector in met
    )


def functions_of(facts: Mapping[PciAddress, Fact]) -> dict[PciAddress, PciFunction]:
    """The functions that are there, sorted by address."""
    return {address: f.function for address, f in sorted(facts.items()) if f.function is not None}


def groups_of(functions: Iterable[PciFunction]) -> dict[int, tuple[PciFunction, ...]]:
    """The functions by IOMMU group number."""
    groups: dict[int, list[PciFunction]] = {}
    for function in functions:
        if function.iommu_group is not None:
            groups.setdefault(function.iommu_group, []).append(function)
    return {number: tuple(members) for number, members in groups.items()}


def ids_of(function: PciFunction) -> str:
    """Vendor and device, which is what model it is: `10de:2330`; empty if they could not be read."""
    return f"{function.vendor}:{function.device}" if function.vendor and function.device else ""


def named(function: PciFunction) -> ResourceName:
    """The resource that it is by its model's name."""
    return resource_name(function.vendor, function.device, function.model)


def devices_of(facts: Mapping[PciAddress, Fact], selectors: Iterable[Selector]) -> tuple[Device, ...]:
    """Every selected function, whatever its driver, sorted by address. The resource name needs no driver."""
    functions, chosen = functions_of(facts), tuple(selectors)
    return _devices(functions, {a: named(f) for a, f in functions.items() if is_selected(chosen, f)})


def node_devices(state: NodeState) -> tuple[Device, ...]:
    """Every device of this node, sorted by address: the selected functions; and whatever is selected or named now, what
    a pod has been given is a device of the resource that it was given as, until the pod ends."""
    functions, chosen = functions_of(state.facts), state.settings.selectors
    names = {a: named(f) for a, f in functions.items() if is_selected(chosen, f)}
    ours = our_resources(state, names.values())
    given: dict[PciAddress, set[ResourceName]] = {}
    for (resource, _), meant in state.resolved.items():
        function = functions.get(meant.address)
        if function is not None and resource in ours and ids_of(function) in (meant.ids, ""):
            given.setdefault(meant.address, set()).add(resource)
    kept = {a: min(r) for a, r in given.items() if names.get(a) not in r}
    return _devices(functions, names | kept)


def our_resources(state: NodeState, names: Iterable[ResourceName]) -> set[ResourceName]:
    """The resources that are served here, of which `names` are those of the selected functions.

    One that a daemon before this served is ours as long as a pod has something of it by an ID of ours.
    """
    return {*names, *state.plugins, *state.frames, *(r for r, _ in state.resolved if r in state.served)}


def _devices(
    functions: Mapping[PciAddress, PciFunction], resources: Mapping[PciAddress, ResourceName]
) -> tuple[Device, ...]:
    groups = groups_of(functions.values())
    return tuple(
        Device(
            function=function,
            resource=resources[address],
            group=(function,) if function.iommu_group is None else groups[function.iommu_group],
        )
        for address, function in functions.items()
        if address in resources
    )
