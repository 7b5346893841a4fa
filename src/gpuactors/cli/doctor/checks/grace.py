"""Variant drivers of vfio-pci, and the EGMs of Grace superchips, before a virtual machine is to get them."""

from __future__ import annotations

from collections.abc import Iterator

from gpuactors.cli.doctor.facts import Facts, Unknown
from gpuactors.cli.doctor.finding import Check, Finding, passed, warned
from gpuactors.core.kinds.sets import DeviceSet
from gpuactors.core.values.quote import first_of, quoted_id
from gpuactors.host.variants import EGM_MODULE, Variant


def check(facts: Facts) -> Iterator[Finding]:
    """Check both; nothing on a host that has neither."""
    if not isinstance(facts.variants, Unknown) and facts.variants:
        yield from _variants(facts, facts.variants)
        if facts.egm_module is True:
            yield warned(
                Check.EGM,
                f"the module {EGM_MODULE} is not loaded, so that no virtual machine gets the memory of its superchip",
                f"As root: modprobe {EGM_MODULE}, and at each boot: echo {EGM_MODULE} > "
                f"/etc/modules-load.d/{EGM_MODULE}.conf",
            )
    if isinstance(facts.egms, Unknown):
        yield warned(Check.EGM, facts.egms.reason, "Look for hung tasks in the kernel's log (dmesg).")
        return
    for problem in facts.egms.problems:
        yield warned(Check.EGM, problem, "Its GPUs are given away without it.")
    yield from map(_egm, facts.egms.sets)


def _variants(facts: Facts, variants: tuple[Variant, ...]) -> Iterator[Finding]:
    functions = () if isinstance(facts.devices, Unknown) else facts.devices.functions
    drivers = {function.address: function.driver for function in functions}
    loads = facts.config.dra == "on" and facts.config.load_modules == "on"
    for name in sorted({variant.driver for variant in variants}):
        own = [variant for variant in variants if variant.driver == name]
        plain = [variant.address for variant in own if drivers.get(variant.address) == "vfio-pci"]
        if plain:
            yield warned(
                Check.VARIANT_DRIVER,
                f"{', '.join(first_of(plain))} on vfio-pci, but the kernel has the variant {quoted_id(name)} for it: a "
                "virtual machine lacks what only the variant gives, as the memory of a Grace superchip",
                f"As root: modprobe {name}; and bind it to that driver, for instance by driverctl set-override.",
            )
        elif not own[0].is_loaded and not loads:
            yield warned(
                Check.VARIANT_DRIVER,
                f"{quoted_id(name)} is not loaded, the kernel's variant of vfio-pci for "
                f"{', '.join(first_of([variant.address for variant in own]))}",
                f"As root: modprobe {name}, and at each boot: echo {name} > /etc/modules-load.d/{name}.conf",
            )
        else:
            state = "is loaded" if own[0].is_loaded else "will be loaded for the first claim"
            yield passed(
                Check.VARIANT_DRIVER,
                f"{quoted_id(name)} {state}, the variant of vfio-pci for {len(own)} GPUs",
            )


def _egm(egm: DeviceSet) -> Finding:
    gpus = ", ".join(egm.devices)
    if not egm.node:
        return warned(
            Check.EGM,
            f"{egm.name} of {gpus} has no device node /dev/{egm.name}, so that no virtual machine gets it",
            "Load the module that makes it, and see the kernel's log; in a pod check the mount of the host's /dev.",
        )
    return passed(Check.EGM, f"{egm.node} goes with all of {gpus}")
