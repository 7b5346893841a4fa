"""Resources of an operator's own: rules that name what a selector chooses, such as
`example.com/big=vendor=10de,device=2330`, and which devices KubeVirt cannot use under one name.

Must not read a host: the rules are compared with facts, or with each other.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from gpuactors.core.values.model import PciFunction, ResourceName
from gpuactors.core.values.naming import parse_own_name, parse_resource
from gpuactors.core.values.selector import Selector, matches, parse_selector

_NVIDIA: Final = "10de"

_GRACE: Final = frozenset({"2342", "2348", "2941"})
"""The GPUs of Grace superchips that KubeVirt knows by their ids (GH200, GB200; feature gate GraceIOVirtualization). It
gives their virtual machines another virtual IOMMU."""

Rules = Iterable[tuple[ResourceName, Selector]]
"""Resources with the selectors of their devices."""


def parse_rule(text: str) -> Selector:
    """Read `DOMAIN/NAME=SELECTOR`, a resource of the operator's own and the devices that are of it. Raises ValueError
    with a sentence that says what is wrong and how to write it."""
    name, equals, selector = text.partition("=")
    if not equals or "/" not in name:
        raise ValueError(
            f"{text!r} is not DOMAIN/NAME=SELECTOR; write for example example.com/big=vendor=10de,device=2330"
        )
    resource, chosen = parse_resource(name), parse_selector(selector)
    if chosen.exclude:
        raise ValueError(f"{text!r} names what it excludes: exclude devices by a selector of --select")
    return Selector(
        vendor=chosen.vendor,
        device=chosen.device,
        class_prefix=chosen.class_prefix,
        address=chosen.address,
        mdev=chosen.mdev,
        resource=resource,
    )


def parse_model_rule(text: str) -> Selector:
    """Read `VENDOR:DEVICE=DOMAIN/NAME`, an operator's own resource of one model, which chooses nothing. Raises
    ValueError as `parse_own_name`."""
    (vendor, device), resource = parse_own_name(text)
    return Selector(vendor=vendor, device=device, resource=resource, names_only=True)


def resource_of(selectors: Iterable[Selector], function: PciFunction) -> ResourceName | None:
    """Return the operator's resource of this function, by the first rule that names it; None if none does."""
    for selector in selectors:
        if selector.resource is not None and matches(
            selector,
            vendor=function.vendor,
            device=function.device,
            class_code=function.class_code,
            address=function.address,
        ):
            return ResourceName(selector.resource)
    return None


def is_grace(model: str) -> bool:
    """Return whether KubeVirt takes a device of this model (`10de:2342`) for the GPU of a Grace superchip."""
    vendor, _, device = model.partition(":")
    return vendor == _NVIDIA and device in _GRACE


def conflict_of_rules(rules: Rules) -> str | None:
    """Return which rules give one name to devices that KubeVirt cannot use under one, as a sentence; None if none do.

    Only what the selectors say can be seen here: a class or an address may choose any device, which is judged when it
    is there (`devices/mixed.py`).
    """
    by_name: dict[ResourceName, list[Selector]] = {}
    for resource, selector in rules:
        by_name.setdefault(resource, []).append(selector)
    for resource, selectors in by_name.items():
        mediated = [s for s in selectors if s.mdev is not None]
        functions = [s for s in selectors if s.mdev is None]
        grace = [s for s in functions if _is_grace(s)]
        others = [s for s in functions if _is_other(s)]
        for some, of_some, rest, of_rest in (
            (mediated, "mediated devices", functions, "PCI functions"),
            (grace, "GPUs of Grace superchips", others, "other devices"),
        ):
            if some and rest:
                return (
                    f"{resource} would have {of_some} ({_chosen(some[0])}) and {of_rest} ({_chosen(rest[0])}), which "
                    "KubeVirt cannot use under one name: give them two (resource, resource_name)"
                )
    return None


def _chosen(selector: Selector) -> str:
    return str(selector).removeprefix(f"{selector.resource}=")


def _is_grace(selector: Selector) -> bool:
    return selector.vendor in (None, _NVIDIA) and selector.device in _GRACE


def _is_other(selector: Selector) -> bool:
    """Return whether it chooses no GPU of a Grace superchip, by what it says."""
    return selector.vendor not in (None, _NVIDIA) or (
        selector.device is not None and selector.device not in _GRACE
    )
