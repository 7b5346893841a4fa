"""The selected GPUs: what stops a virtual machine from opening them, in the words of the causes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final

from gpuactors.cli.doctor.facts import Devices, Facts, Known, NoDaemon, Unknown
from gpuactors.cli.doctor.finding import Check, Finding, Level, failed, passed, sentence
from gpuactors.config import Config
from gpuactors.control.client import Running
from gpuactors.control.view import DeviceView
from gpuactors.core.assessment.blockers import HARMLESS_DRIVERS, without_group
from gpuactors.core.values.cause import MEANINGS, Cause
from gpuactors.core.values.inventory import is_selected
from gpuactors.core.values.model import PciFunction
from gpuactors.core.values.quote import quoted_id

_FINE: Final = frozenset({Cause.FREE, Cause.ALLOCATED, Cause.JUST_ALLOCATED, Cause.GROUP_IN_USE})
"""A virtual machine could open it, or has it."""

_PASSING: Final = frozenset(
    {
        Cause.NOT_BOUND,
        Cause.CLAIMED_ELSEWHERE,
        Cause.ORPHANED,
        Cause.HELD_BY_OTHER,
        Cause.HOLDER_UNKNOWN,
        Cause.UNBINDING,
        Cause.FABRIC_OF_HOST,
        Cause.VIRTUAL_FUNCTION,
        Cause.VIRTUAL_FUNCTIONS,
    }
)
"""It cannot now, and nothing on the node is broken."""

_IN_USE: Final = frozenset({Cause.HELD_BY_OTHER, Cause.HOLDER_UNKNOWN})
"""A process has it open, and kubelet has given it to no pod."""

_HOW: Final = (
    " For instance: driverctl set-override ADDRESS vfio-pci, which lasts across restarts of the node."
)


def check(facts: Facts) -> Iterator[Finding]:
    """Each GPU once, those with one reason together."""
    if isinstance(facts.devices, Unknown):
        yield failed(
            Check.HOST_READABLE,
            facts.devices.reason,
            "Run this as root on the node; in a pod check --host-root and the mounts of the host's /sys and /dev.",
        )
        return
    devices = _selected(facts.devices)
    unreadable = list(_unreadable(facts.devices))
    yield from unreadable
    if not (devices or unreadable):
        yield failed(
            Check.GPUS_SELECTED,
            "no PCI function on this node matches the selectors",
            "Compare `gpuactors config show` (select) with `lspci -nn`; without GPUs here, keep the daemon off this "
            "node by its nodeSelector.",
        )
    if not devices:
        return
    yield passed(Check.GPUS_SELECTED, f"selected: {_models(devices)}; on {_drivers(devices)}")
    yield from _usable(facts, facts.devices, devices)


def _selected(devices: Devices) -> list[DeviceView]:
    return [device for device in devices.view.devices if device.present]


def _unreadable(devices: Devices) -> Iterator[Finding]:
    """Functions that the core leaves out: what they are could not be read, so that they may be GPUs."""
    known = {device.address for device in devices.view.devices}
    for function in devices.functions:
        if function.fault is not None and function.address not in known:
            yield Finding(
                Check.GPUS_USABLE,
                Level.FAIL,
                function.fault,
                MEANINGS[Cause.UNREADABLE].remedy,
                Cause.UNREADABLE,
                (function.address,),
            )


def _models(devices: Iterable[DeviceView]) -> str:
    counts = Counter(f"{d.model or 'unknown model'} ({d.vendor}:{d.device})" for d in devices)
    return ", ".join(f"{count} × {model}" for model, count in sorted(counts.items()))


def _drivers(devices: Iterable[DeviceView]) -> str:
    counts = Counter(quoted_id(device.driver or "no driver") for device in devices)
    return ", ".join(f"{driver} ({count})" for driver, count in sorted(counts.items()))


def _usable(facts: Facts, devices: Devices, views: list[DeviceView]) -> Iterator[Finding]:
    functions = {str(function.address): function for function in devices.functions}
    by_claim = facts.config.dra == "on"
    bound = sum(functions[view.address].vfio_bound for view in views)
    found = list[Finding]()
    for own_view in views:
        view = _as_the_daemon_knows_it(own_view, facts.daemon)
        function = functions[view.address]
        if function.vfio_bound or view.cause != Cause.NOT_BOUND:
            found += _by_cause(view)
        elif (blocker := without_group(function)) is not None:
            found.append(_finding(view, Level.FAIL, blocker.cause, blocker.message))
        elif not by_claim:
            found.append(_finding(view, Level.WARN if bound else Level.FAIL, Cause.NOT_BOUND, view.reason))
            found += _beside(view, function, devices, facts.config)
    fine = len(views) - len({address for finding in found for address in finding.devices})
    if fine:
        how = "; a claim binds those that are on no vfio driver" if by_claim and bound < len(views) else ""
        yield passed(Check.GPUS_USABLE, f"{fine} of {len(views)} could be given to virtual machines{how}")
    yield from _together(found)


def _as_the_daemon_knows_it(view: DeviceView, daemon: Known[Running] | NoDaemon | None) -> DeviceView:
    """With the daemon's cause and words for a GPU that is in use: the core is the same, but only the daemon has seen
    whose it was before."""
    if not isinstance(daemon, Running) or view.cause not in _IN_USE:
        return view
    for known in daemon.view.devices:
        if (known.address, known.driver, known.cause) == (view.address, view.driver, Cause.ORPHANED):
            return replace(view, cause=known.cause, reason=known.reason)
    return view


def _by_cause(view: DeviceView) -> Iterator[Finding]:
    """The finding of a device with a cause that needs attention."""
    cause = Cause(view.cause)
    if cause not in _FINE:
        yield _finding(view, Level.WARN if cause in _PASSING else Level.FAIL, cause, view.reason)


def _beside(view: DeviceView, function: PciFunction, devices: Devices, config: Config) -> Iterator[Finding]:
    """Of a GPU that is still to be bound: the functions of its group that must leave their drivers as well."""
    others = [
        other
        for other in devices.functions
        if other.iommu_group == function.iommu_group
        and not is_selected(config.selectors, other)
        and other.driver is not None
        and not other.vfio_bound
        and other.driver not in HARMLESS_DRIVERS
    ]
    for other in others:
        yield _finding(
            view,
            Level.WARN,
            Cause.GROUP_NOT_VIABLE,
            f"IOMMU group {function.iommu_group} will not be viable while {other.address} is bound to "
            f"{quoted_id(other.driver or '')}; bind it to vfio-pci or to no driver as well",
        )


def _finding(view: DeviceView, level: Level, cause: Cause, message: str) -> Finding:
    remedy = sentence(view.remedy) if view.remedy and cause == view.cause else MEANINGS[cause].remedy
    if cause in (Cause.NOT_BOUND, Cause.GROUP_NOT_VIABLE):
        remedy += _HOW
    return Finding(Check.GPUS_USABLE, level, message, remedy, cause, (view.address,))


def _together(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Those that differ only in the device are one."""
    found: dict[Finding, tuple[str, ...]] = {}
    for finding in findings:
        key = replace(finding, devices=())
        found[key] = (*found.get(key, ()), *finding.devices)
    for key, devices in found.items():
        yield replace(key, devices=devices)
