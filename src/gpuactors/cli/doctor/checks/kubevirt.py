"""KubeVirt: which devices its custom resource must permit, with the exact names, and whether one that the operator has
given (`--kubevirt`) permits them.

The rules are those of KubeVirt 1.9: an entry permits a resource by its name alone, in either list. Without
`externalResourceProvider: true` virt-handler serves the resource itself. It deletes each mediated device that it was
not told to make, unless its type is listed as external (pkg/virt-handler/device-manager/mediated_devices_types.go).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Final

from msgspec import Struct

from gpuactors.cli.doctor.facts import Facts, KubeVirt, PermittedDevice, Unknown
from gpuactors.cli.doctor.finding import Check, Finding, failed, passed, warned
from gpuactors.control.view import DeviceView
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.inventory import is_selected, named
from gpuactors.core.values.model import is_pci_address
from gpuactors.core.values.quote import first_of

MEDIATED: Final = "mediatedDevices"
PCI: Final = "pciHostDevices"
"""The two lists of `permittedHostDevices`."""

_NAMELESS: Final = frozenset({Cause.VIRTUAL_FUNCTION, Cause.VGPU_UNNAMED})
"""The causes of a virtual function that has no vGPU type, or one without a name: it is of no resource yet."""

_ADD: Final = "Add the entries at the end of this report: kubectl -n kubevirt edit kubevirt."


class Needed(Struct, frozen=True):
    """The entries that KubeVirt needs for the devices of this node."""

    pci: tuple[PermittedDevice, ...]
    mediated: tuple[PermittedDevice, ...]

    @property
    def all(self) -> tuple[PermittedDevice, ...]:
        """The entries of both lists."""
        return self.pci + self.mediated


def permitted(facts: Facts) -> Needed:
    """Return one entry for each model and vGPU profile of this node that is given away by the device plugin API; none
    where only claims are offered, which need no permission."""
    if isinstance(facts.devices, Unknown) or facts.config.device_plugin == "off":
        return Needed((), ())
    views = [v for v in facts.devices.view.devices if v.present and v.resource and v.cause not in _NAMELESS]
    divided = {view.parent for view in views}
    parts = [view for view in views if view.address not in divided and (view.parent or view.profile)]
    whole = {
        PermittedDevice(named(f, facts.config.selectors), f"{f.vendor}:{f.device}".upper(), is_external=True)
        for f in facts.devices.functions
        if is_selected(facts.config.selectors, f)
        and not f.is_virtual
        and not f.has_virtual_functions
        and f.address not in divided
    }
    pci = whole | {_of_pci(view) for view in parts if is_pci_address(view.address)}
    mediated = {_of_mediated(view) for view in parts if not is_pci_address(view.address)}
    return Needed(tuple(sorted(pci)), tuple(sorted(mediated)))


def _of_pci(view: DeviceView) -> PermittedDevice:
    return PermittedDevice(view.resource, f"{view.vendor}:{view.device}".upper(), is_external=True)


def _of_mediated(view: DeviceView) -> PermittedDevice:
    return PermittedDevice(view.resource, view.profile or "", is_external=True)


def yaml(needed: Needed) -> str:
    """Write the part of the custom resource KubeVirt as YAML. A selector is quoted as JSON, which YAML reads; a
    resource's name holds no character that YAML would mistake."""
    lines = ["spec:", "  configuration:", "    permittedHostDevices:"]
    for name, selector, devices in (
        (PCI, "pciVendorSelector", needed.pci),
        (MEDIATED, "mdevNameSelector", needed.mediated),
    ):
        if devices:
            lines.append(f"      {name}:")
        for device in devices:
            lines += [
                f"      - {selector}: {json.dumps(device.selector)}",
                f"        resourceName: {device.resource}",
                "        externalResourceProvider: true",
            ]
    return "\n".join(lines)


def check(facts: Facts) -> Iterator[Finding]:
    """Judge the custom resource that was given; without one, count the resources to permit: a hint, as whether KubeVirt
    is used, and what it permits, is not known then."""
    if not (needed := permitted(facts)).all:
        return
    match facts.kubevirt:
        case None:
            resources = len({device.resource for device in needed.all})
            yield passed(
                Check.PERMITTED_HOST_DEVICES,
                f"{resources} resource{'s' * (resources > 1)} to be permitted in the custom resource KubeVirt: the "
                "YAML is at the end; --kubevirt FILE compares it with yours",
            )
        case Unknown(reason=reason):
            yield failed(
                Check.PERMITTED_HOST_DEVICES,
                reason,
                "Give --kubevirt the output of: kubectl -n kubevirt get kubevirt kubevirt -o yaml",
            )
        case KubeVirt() as custom_resource:
            findings = list(_compared(needed, custom_resource))
            yield from findings
            if not findings:
                yield passed(Check.PERMITTED_HOST_DEVICES, "KubeVirt permits every resource of this node")


def _compared(needed: Needed, has: KubeVirt) -> Iterator[Finding]:
    entries = has.pci + has.mediated
    names = {entry.resource for entry in entries}
    served = sorted({e.resource for e in entries if not e.is_external} & {e.resource for e in needed.all})
    if served:
        yield failed(
            Check.PERMITTED_HOST_DEVICES,
            f"KubeVirt serves {_listed(served)} itself: an entry has no externalResourceProvider: true",
            "Set it in each entry of this name, so that virt-handler ends its own device plugin.",
        )
    refused = sorted({e.resource for e in needed.all} - names) if has.permits_by_list else []
    if refused:
        yield warned(
            Check.PERMITTED_HOST_DEVICES,
            f"KubeVirt refuses a virtual machine with {_listed(refused)}: permittedHostDevices does not list it",
            _ADD,
        )
    kept = {_type_name(entry.selector) for entry in has.mediated if entry.is_external}
    deleted = [e.selector for e in needed.mediated if _type_name(e.selector) not in kept]
    if deleted and has.deletes_mediated:
        yield failed(
            Check.PERMITTED_HOST_DEVICES,
            f"KubeVirt deletes the mediated devices of the type {_listed(deleted)}: no entry of mediatedDevices with "
            "externalResourceProvider: true has this mdevNameSelector",
            _ADD,
        )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(first_of(tuple(dict.fromkeys(names))))


def _type_name(selector: str) -> str:
    """Return the name as KubeVirt compares it."""
    return selector.strip().replace(" ", "_")
