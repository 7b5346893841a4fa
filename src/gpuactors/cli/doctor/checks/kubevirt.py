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
    """The value of `pciVendorSelector`: `10DE:2330`."""


def permitted(facts: Facts) -> tuple[PermittedDevice, ...]:
    """Return one entry for each model of this node; none where only claims are offered, which need no permission."""
    if isinstance(facts.devices, Unknown) or facts.config.device_plugin == "off":
        return ()
    entries = {
        PermittedDevice(named(f), f"{f.vendor}:{f.device}".upper())
        for f in facts.devices.functions
        if is_selected(facts.config.selectors, f)
    }
    return tuple(sorted(entries))


def yaml(devices: tuple[PermittedDevice, ...]) -> str:
    """Write the part of the custom resource KubeVirt as YAML; names and IDs hold no character that YAML would
    mistake."""
    lines = ["spec:", "  configuration:", "    permittedHostDevices:", "      pciHostDevices:"]
    for device in devices:
        lines += [
            f'      - pciVendorSelector: "{device.selector}"',
            f"        resourceName: {device.resource}",
            "        externalResourceProvider: true",
        ]
    return "\n".join(lines)


def check(facts: Facts) -> Iterator[Finding]:
    """Count the resources to permit: a hint, as whether KubeVirt is used, and what it permits, is not known here."""
    if devices := permitted(facts):
        resources = len({device.resource for device in devices})
        yield passed(
            Check.PERMITTED_HOST_DEVICES,
            f"{resources} resource{'s' * (resources > 1)} to be permitted in the custom resource KubeVirt: the YAML is "
            "at the end",
        )
