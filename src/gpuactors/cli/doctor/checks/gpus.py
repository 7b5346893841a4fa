"""The selected GPUs: what stops a virtual machine from opening them, in the words of the causes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from msgspec.structs import replace

from gpuactors.cli.doctor.facts import Devices, Facts, Known, NoDaemon, Unknown
from gpuactors.cli.doctor.finding import Check, Finding, Level, failed, passed, sentence
from gpuactors.config import Config
from gpuactors.control.client import Running
from gpuactors.control.view import DeviceView
from gpuactors.core.kinds.kind import Act
from gpuactors.core.kinds.pci_function import without_group
from gpuactors.core.kinds.presence import NO_GPU_HERE
from gpuactors.core.kinds.table import KINDS
from gpuactors.core.kinds.viability import is_companion, is_in_the_way, not_viable, with_companions
from gpuactors.core.values.cause import MEANINGS, Cause
from gpuactors.core.values.inventory import is_selected
from gpuactors.core.values.model import PciFunction
from gpuactors.core.values.quote import first_of, quoted_id

_FINE: Final = frozenset(
    {Cause.FREE, Cause.ALLOCATED, Cause.JUST_ALLOCATED, Cause.GROUP_IN_USE, Cause.CARD_IN_USE}
)
"""The causes of a GPU that a virtual machine could open, or has."""

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
        Cause.VGPU_UNNAMED,
        Cause.RESOURCE_MIXED,
        Cause.PHYSICAL_FUNCTION_ON_VFIO,
        Cause.PHYSICAL_FUNCTION_NOT_READY,
    }
)
"""The causes of a GPU that no virtual machine can open now, though nothing on the node is broken."""

_BOUND_BY_CLAIMS: Final = frozenset(kind.name for kind in KINDS if Act.BIND in kind.acts)
"""The kinds whose devices must be on a vfio driver; all others are usable on the driver that makes them."""

_MAKER: Final = "Load the vendor's vGPU driver; the kernel's log has its errors."

_BY_USE: Final = frozenset({*_FINE, Cause.HELD_BY_OTHER, Cause.HOLDER_UNKNOWN, Cause.ORPHANED})
"""The causes that only a GPU's use and kubelet's ledger decide; the daemon knows their past."""

_OF_OWNER: Final = frozenset({*_FINE, Cause.CLAIMED_ELSEWHERE})
"""The causes of a GPU whose owner has it open. The daemon knows its claims; this command sees a process alone."""


def check(facts: Facts) -> Iterator[Finding]:
    """Report each GPU once, those with one reason together."""
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
            f"{NO_GPU_HERE} (--select {';'.join(facts.config.select)})",
            "Compare `gpuactors config show` (select) with `lspci -Dnn -d 10de:`. On a node without GPUs the daemon "
            "has nothing to do: keep it off by its nodeSelector.",
        )
    if not devices:
        return
    yield passed(Check.GPUS_SELECTED, f"selected: {_models(devices)}; on {_drivers(devices)}")
    yield from _usable(facts, facts.devices, devices)


def _selected(devices: Devices) -> list[DeviceView]:
    return [device for device in devices.view.devices if device.present]


def _unreadable(devices: Devices) -> Iterator[Finding]:
    """Report the functions that the core leaves out: what they are could not be read, so they may be GPUs."""
    addresses = {device.address for device in devices.view.devices}
    for function in devices.functions:
        if function.fault is not None and function.address not in addresses:
            yield Finding(
                Check.GPUS_USABLE,
                Level.FAIL,
                function.fault,
                MEANINGS[Cause.UNREADABLE].remedy,
                Cause.UNREADABLE,
                (function.address,),
            )


def _models(devices: Iterable[DeviceView]) -> str:
    counts = Counter(d.profile or f"{d.model or 'unknown model'} ({d.vendor}:{d.device})" for d in devices)
    return ", ".join(f"{count} × {model}" for model, count in sorted(counts.items()))


def _drivers(devices: Iterable[DeviceView]) -> str:
    counts = Counter(quoted_id(device.driver or "no driver") for device in devices)
    return ", ".join(f"{driver} ({count})" for driver, count in sorted(counts.items()))


def _usable(facts: Facts, devices: Devices, views: list[DeviceView]) -> Iterator[Finding]:
    functions = {str(function.address): function for function in devices.functions}
    by_claim = facts.config.dra == "on"
    bound = sum(view.address in functions and functions[view.address].vfio_bound for view in views)
    findings = list[tuple[Finding, tuple[str, ...]]]()
    divided = _divided(views, by_claim=by_claim)
    for own_view in views:
        view = _as_the_daemon_knows_it(own_view, facts.daemon)
        function = functions.get(view.address)
        if view.address in divided:
            pass
        elif view.dead is not None:
            findings.append((_finding(view, Level.FAIL, Cause.DEAD, view.dead), ()))
        elif view.cause == Cause.VIRTUAL_FUNCTION and view.parent in divided:
            untyped = Finding(Check.GPUS_USABLE, Level.PASS, view.reason, "", None, (view.address,))
            findings.append((untyped, ()))
        elif function is None or view.kind not in _BOUND_BY_CLAIMS:
            findings += ((finding, ()) for finding in _of_part(view))
        elif function.vfio_bound or view.cause != Cause.NOT_BOUND:
            is_blocked = view.cause == Cause.GROUP_NOT_VIABLE
            others = _to_bind_with(function, devices, facts.config) if is_blocked else []
            findings += ((finding, tuple(other.address for other in others)) for finding in _by_cause(view))
        elif (blocker := without_group(function)) is not None:
            findings.append((_finding(view, Level.FAIL, blocker.cause, blocker.message), ()))
        elif by_claim:
            own = {companion.address for companion in with_companions(function, _group(function, devices))}
            if (blocker := not_viable(function, function, _group(function, devices), own)) is not None:
                findings.append((_finding(view, Level.FAIL, blocker.cause, blocker.message), ()))
        else:
            level = Level.WARN if bound else Level.FAIL
            findings.append((_finding(view, level, Cause.NOT_BOUND, view.reason), (view.address,)))
            findings += _beside(view, function, devices, facts.config)
    if divided:
        named = ", ".join(first_of(sorted(divided)))
        yield passed(Check.GPUS_USABLE, f"given away in parts, and so not whole: {named}")
    whole = len(views) - len(divided)
    fine = whole - len({address for finding, _ in findings for address in finding.devices})
    if fine:
        how = "; a claim binds those that are on no vfio driver" if by_claim and bound < whole else ""
        yield passed(Check.GPUS_USABLE, f"{fine} of {whole} could be given to virtual machines{how}")
    yield from _together(findings)


def _divided(views: Sequence[DeviceView], *, by_claim: bool) -> set[str]:
    """Return the functions of which a virtual machine could have a part now: to bind one would remove its parts."""
    parents = {view.address: view.parent for view in views}
    divided = set[str]()
    for view in views:
        is_bound_by_claim = by_claim and view.cause == Cause.NOT_BOUND and view.kind in _BOUND_BY_CLAIMS
        address = view.parent if view.cause in _BY_USE or is_bound_by_claim else None
        while address in parents and address not in divided:
            divided.add(address)
            address = parents[address]
    return divided


def _of_part(view: DeviceView) -> Iterator[Finding]:
    """Report a device that nothing binds: its vendor's driver makes it."""
    for finding in _by_cause(view):
        if finding.cause == Cause.NOT_BOUND:
            yield replace(finding, remedy=_MAKER)
        else:
            yield finding


def _as_the_daemon_knows_it(view: DeviceView, daemon: Known[Running] | NoDaemon | None) -> DeviceView:
    """Take the daemon's cause, words and remedy for a GPU of which only the use is in question: the core is the same,
    but only the daemon has seen whose it was before. A use that only this command sees (`--holders proc`) stays."""
    if not isinstance(daemon, Running) or view.cause not in _BY_USE:
        return view
    for device in daemon.view.devices:
        if (device.address, device.driver) != (view.address, view.driver):
            continue
        knows_more = device.cause in _BY_USE - _FINE and (device.cause != view.cause or not view.holders)
        is_owners_use = view.cause not in _FINE and device.owner is not None and device.cause in _OF_OWNER
        if knows_more or is_owners_use:
            return replace(view, cause=device.cause, reason=device.reason, remedy=device.remedy)
    return view


def _by_cause(view: DeviceView) -> Iterator[Finding]:
    """Report a device whose cause needs attention."""
    cause = Cause(view.cause)
    if cause not in _FINE:
        yield _finding(view, Level.WARN if cause in _PASSING else Level.FAIL, cause, view.reason)


def _beside(
    view: DeviceView, function: PciFunction, devices: Devices, config: Config
) -> Iterator[tuple[Finding, tuple[str, ...]]]:
    """Report, for a GPU that is still to be bound, the functions that must leave their drivers as well, and what would
    keep the group from every virtual machine even then."""
    to_bind = _to_bind_with(function, devices, config)
    for other in to_bind:
        if is_selected(config.selectors, other):
            continue
        finding = _finding(
            view,
            Level.WARN,
            Cause.GROUP_NOT_VIABLE,
            f"IOMMU group {function.iommu_group} will not be viable while {other.address} is bound to "
            f"{quoted_id(other.driver or '')}; bind it to vfio-pci or to no driver as well",
        )
        yield finding, (other.address,)
    addresses = {function.address, *(other.address for other in to_bind)}
    if (blocker := not_viable(function, function, _group(function, devices), addresses)) is not None:
        yield _finding(view, Level.WARN, blocker.cause, blocker.message), ()


def _group(function: PciFunction, devices: Devices) -> list[PciFunction]:
    return [other for other in devices.functions if other.iommu_group == function.iommu_group]


def _to_bind_with(function: PciFunction, devices: Devices, config: Config) -> list[PciFunction]:
    """Return the functions whose drivers keep its group from being viable, and that an operator can bind to vfio:
    companions and other GPUs. Anything else is the host's."""
    return [
        other
        for other in _group(function, devices)
        if is_in_the_way(other)
        and (is_companion(function, other) or is_selected(config.selectors, other))
        and other.address != function.address
    ]


def _finding(view: DeviceView, level: Level, cause: Cause, message: str) -> Finding:
    remedy = sentence(view.remedy) if view.remedy and cause == view.cause else MEANINGS[cause].remedy
    return Finding(Check.GPUS_USABLE, level, message, remedy, cause, (view.address,))


def _together(findings: Iterable[tuple[Finding, tuple[str, ...]]]) -> Iterator[Finding]:
    """Join the findings that differ only in the device, and add the commands that bind their functions."""
    joined: dict[Finding, tuple[tuple[str, ...], tuple[str, ...]]] = {}
    for finding, to_bind in findings:
        key = replace(finding, devices=())
        devices, functions = joined.get(key, ((), ()))
        joined[key] = (*devices, *finding.devices), (*functions, *to_bind)
    for key, (devices, to_bind) in joined.items():
        yield replace(key, devices=devices, remedy=key.remedy + _commands(to_bind))


def _commands(to_bind: Sequence[str]) -> str:
    """Return the commands that bind these functions, to be pasted into a shell; they last across restarts of the
    node."""
    if not to_bind:
        return ""
    addresses = [*dict.fromkeys(to_bind)]
    if len(addresses) == 1:
        return f" For instance, as root: driverctl set-override {addresses[0]} vfio-pci"
    return (
        f" For instance, as root: for a in {' '.join(addresses)}; do driverctl set-override $a vfio-pci; done"
    )
