"""KubeVirt: which devices its custom resource must permit, with the exact names. It is not read here."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from gpuactors.cli.doctor.facts import Facts, Unknown
from gpuactors.cli.doctor.finding import Check, Finding, passed
from gpuactors.core.values.inventory import is_selected, named


class PermittedDevice(Struct, frozen=True, order=True):
    """One entry of `permittedHostDevices.pciHostDevices`."""

    resource: str
    selector: str
    """pciVendorSelector: `10DE:2330`."""


def permitted(facts: Facts) -> tuple[PermittedDevice, ...]:
    """One for each model of this node; none where only claims are offered, which need no permission."""
    if isinstance(facts.devices, Unknown) or facts.config.device_plugin == "off":
        return ()
    found = {
        PermittedDevice(named(f), f"{f.vendor}:{f.device}".upper())
        for f in facts.devices.functions
        if is_selected(facts.config.selectors, f)
    }
    return tuple(sorted(found))


def yaml(devices: tuple[PermittedDevice, ...]) -> str:
    """The part of the custom resource KubeVirt, as YAML; names and ids hold no character that YAML would mistake."""
    lines = ["spec:", "  configuration:", "    permittedHostDevices:", "      pciHostDevices:"]
    for device in devices:
        lines += [
            f'      - pciVendorSelector: "{device.selector}"',
            f"        resourceName: {device.resource}",
            "        externalResourceProvider: true",
        ]
    return "\n".join(lines)


def check(facts: Facts) -> Iterator[Finding]:
    """Never more than a hint: whether KubeVirt is used, and what it permits, is not known here."""
    if devices := permitted(facts):
        resources = len({device.resource for device in devices})
        yield passed(
            Check.PERMITTED_HOST_DEVICES,
            f"{resources} resource{'s' * (resources > 1)} to be permitted in the custom resource KubeVirt: the YAML is "
            "at the end",
        )
