"""Inspecting the host: the inspections that are requested, and the changes of the known functions by their results.

Theory of operation. Every inspection and every scan gets a number when it is *requested*. A result with number n shows
the host as it was at some moment after number n was issued. So a result changes nothing at an address
that an inspection with a larger number has seen. At most one inspection per function and one scan are outstanding; a
hint that comes meanwhile requests another one after it. So in whatever order results come in, every change on the host
is followed by an inspection that was requested after it (or, if its hint is lost, by the next scan), and a storm of
hints costs two inspections. The address of a function that is gone keeps its number as long as a result with a smaller
one may still come in and bring the function back.

The known functions are stored apart from the times of their inspections: an inspection that finds nothing new leaves
the very objects that other values are derived from.

Must not decide what a function means for kubelet.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Set
from typing import Final

from msgspec.structs import replace

from gpuactors.core.events.host import (
    FunctionInspected,
    HostChanged,
    HostScanned,
    InspectionFailed,
    ScanFailed,
)
from gpuactors.core.requests import Refresh, asked
from gpuactors.core.state import Host, NodeState
from gpuactors.core.values.model import (
    DeviceKey,
    Inspections,
    PciAddress,
    PciFunction,
    Retry,
    Seen,
    device_key,
    function_address,
)

UNSETTLED_INSPECTIONS_S: Final = (0.2, 1.0, 5.0, 30.0)
"""When to repeat an inspection of a function that failed or was incomplete (a missing node, an unreadable attribute);
the last one repeats. udev's own rules finish in well under a second."""

SHORTAGE_INSPECTION_S: Final = 1.0
"""How long after an inspection that failed for want of descriptors, memory or threads the next one is requested: an
Allocate may wait for it, and has CALL_DEADLINE_S."""

SCAN_BACKOFF_S: Final = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Waits after scans that failed as a whole (sysfs not mounted yet); the last one repeats."""

_NEVER: Final = Refresh()
"""Neither outstanding nor due."""


def first_inspections() -> Inspections:
    """At start: one full scan is wanted."""
    return Inspections(
        last=1,
        whole=Refresh().asked(1),
        single={},
        scan_failures=0,
        retries={},
    )


def ask_scan(inspections: Inspections) -> Inspections:
    """Requests a full scan; if one is outstanding, another one after it."""
    last, whole = asked(inspections.last, inspections.whole)
    return replace(inspections, last=last, whole=whole)


def ask_inspections(inspections: Inspections, addresses: Iterable[PciAddress]) -> Inspections:
    """Requests an inspection of each address; where one is outstanding, another one after it."""
    single, last = dict(inspections.single), inspections.last
    for address in addresses:
        last, single[address] = asked(last, single.get(address, _NEVER))
    return replace(inspections, last=last, single=single)


def last_seen(host: Host, device: DeviceKey) -> Seen | None:
    """The last inspection of the function that a device is; None if there was none, or the device is no function."""
    return host.seen.get(function_address(device))


def never_seen(host: Host, devices: Set[DeviceKey]) -> Set[DeviceKey]:
    """Those of the devices of which no function has been inspected."""
    return devices - {*map(device_key, host.seen)}


def hinted(state: NodeState, event: HostChanged) -> frozenset[PciAddress]:
    """The addresses that a hint concerns: the function it names, or the known members of the group it names."""
    if event.address is not None:
        return frozenset((event.address, *_without_uevent(state, event.address)))
    return frozenset(a for a, f in state.host.functions.items() if f.iommu_group == event.iommu_group)


def _without_uevent(state: NodeState, address: PciAddress) -> list[PciAddress]:
    """The physical function of a hinted virtual one: there is no uevent of it when its virtual functions go
    (drivers/pci/iov.c, sriov_disable). A function that is not known may be a virtual one of any that has some."""
    function = state.host.functions.get(address)
    if function is None:
        return [a for a, f in state.host.functions.items() if f.has_virtual_functions]
    return [function.physical] if function.physical is not None else []


def scanned(state: NodeState, event: HostScanned, at: float) -> NodeState:
    """A full scan came back: a function that it does not name is gone."""
    if event.inspection != state.host.inspections.whole.outstanding:
        return state
    named = {function.address: function for function in event.functions}
    host = _with_found(state.host, [(event.inspection, {**dict.fromkeys(state.host.seen), **named})], at)
    inspections = _scan_back(
        replace(state.host.inspections, scan_failures=0), at + state.daemon.settings.resync_interval_s
    )
    host = replace(host, inspections=inspections, scanned=True)
    return _settle(replace(state, host=host), [(event.inspection, named)], at)


def scan_failed(state: NodeState, event: ScanFailed, at: float) -> NodeState:
    """A failed scan shows nothing and is requested again, after a wait that grows each time."""
    if event.inspection != state.host.inspections.whole.outstanding:
        return state
    failures = state.host.inspections.scan_failures
    wait_s = SCAN_BACKOFF_S[min(failures, len(SCAN_BACKOFF_S) - 1)]
    inspections = replace(state.host.inspections, scan_failures=failures + 1)
    inspections = replace(inspections, whole=inspections.whole.answered(at + wait_s))
    return replace(state, host=replace(state.host, inspections=inspections))


def inspected(state: NodeState, events: Iterable[FunctionInspected], at: float) -> NodeState:
    """Inspections came back: for each the function at its address and the other members of its group."""
    single = state.host.inspections.single
    found = [
        (
            event.inspection,
            {event.address: None, **{function.address: function for function in event.functions}},
        )
        for event in {event.address: event for event in events}.values()
        if (asked := single.get(event.address)) is not None and asked.outstanding == event.inspection
    ]
    if not found:
        return state
    host = _with_found(state.host, found, at)
    back = [next(iter(of_one)) for _, of_one in found]
    host = replace(host, inspections=_inspections_back(host.inspections, back))
    return _settle(replace(state, host=host), found, at)


def inspection_failed(state: NodeState, event: InspectionFailed, at: float) -> NodeState:
    """An inspection that failed as a whole: the function keeps its known attributes, with the failure as its fault.

    A shortage is no fault: the function was not seen again, and `Host.short` has the reason.
    """
    asked = state.host.inspections.single.get(event.address)
    if asked is None or asked.outstanding != event.inspection:
        return state
    host, known = state.host, state.host.functions.get(event.address)
    if known is not None and host.seen[event.address].inspection <= event.inspection:
        if event.shortage:
            host = replace(host, short={**host.short, event.address: event.reason})
        else:
            found = {event.address: replace(known, fault=event.reason)}
            host = _with_found(host, [(event.inspection, found)], at)
    host = replace(host, inspections=_inspections_back(host.inspections, (event.address,)))
    state = _settle(replace(state, host=host), [(event.inspection, {event.address})], at, failed=True)
    return _again_soon(state, event, at) if event.shortage else state


def _scan_back(inspections: Inspections, due_at: float) -> Inspections:
    """The outstanding scan is back; the next one is due at `due_at`, or at once if it is wanted again."""
    again = inspections.whole.again
    inspections = replace(inspections, whole=inspections.whole.answered(due_at))
    return ask_scan(inspections) if again else inspections


def _inspections_back(inspections: Inspections, addresses: Iterable[PciAddress]) -> Inspections:
    """The outstanding inspections of these are back; another one is requested of each that is wanted again."""
    single, again = dict(inspections.single), []
    for address in addresses:
        refresh = single.pop(address)
        if refresh.again:
            again.append(address)
        if (after := refresh.answered(refresh.due_at)) != _NEVER:
            single[address] = after
    inspections = replace(inspections, single=single)
    return ask_inspections(inspections, again) if again else inspections


def _with(inspections: Inspections, address: PciAddress, refresh: Refresh) -> Inspections:
    """`inspections` with that refresh of the address; one that is neither outstanding nor due is left out."""
    single = {a: r for a, r in inspections.single.items() if a != address}
    return replace(inspections, single=single if refresh == _NEVER else {**single, address: refresh})


def due(state: NodeState, at: float) -> NodeState:
    """Requests the scan and the inspections that are due."""
    inspections = state.host.inspections
    if inspections.whole.deadline <= at:
        inspections = ask_scan(inspections)
    late = [address for address, refresh in inspections.single.items() if refresh.due_at <= at]
    if late:
        inspections = ask_inspections(inspections, sorted(late))
    return replace(state, host=replace(state.host, inspections=inspections))


def deadline(inspections: Inspections) -> float:
    """When `due` will next have something to do."""
    return min([inspections.whole.deadline, *[refresh.due_at for refresh in inspections.single.values()]])


def _with_found(
    host: Host, found: Iterable[tuple[int, Mapping[PciAddress, PciFunction | None]]], at: float
) -> Host:
    """`host` after the inspections of these numbers, which came back at `at`, one after the other; None: no function is
    at that address."""
    seen, short, other = dict(host.seen), host.short, dict[PciAddress, PciFunction | None]()
    for number, of_one in found:
        for address, function in of_one.items():
            before = seen.get(address)
            known = other[address] if address in other else host.functions.get(address)
            if before is not None and before.inspection > number:
                continue
            now = _with_identity(function, known) if function is not None else None
            is_known = before is not None and now == known
            seen[address] = Seen(number, at, before.changed_at if before is not None and is_known else at)
            if address in short:
                short = {a: why for a, why in short.items() if a != address}
            if now != known:
                other[address] = now
    functions = host.functions
    if other:
        there = {a: f for a, f in {**functions, **other}.items() if f is not None}
        functions = there if there.keys() <= functions.keys() else dict(sorted(there.items()))
    return replace(host, functions=functions, seen=seen, short=short)


def _with_identity(function: PciFunction, known: PciFunction | None) -> PciFunction:
    """A function whose attributes cannot be read just now keeps its known identity.

    A GPU must not fall out of its resource, or out of kubelet's list, because one read failed.
    """
    if known is not None and function.gpu_uuid is None and _is_of_model(function, known):
        # Only its host's driver says it; it is the same GPU as long as it is there.
        function = replace(function, gpu_uuid=known.gpu_uuid)
    if function.fault is None or known is None:
        return function
    return replace(
        function,
        vendor=function.vendor or known.vendor,
        device=function.device or known.device,
        class_code=function.class_code or known.class_code,
        model=function.model or known.model,
        iommu_group=known.iommu_group if function.iommu_group is None else function.iommu_group,
        vfio_bound=function.vfio_bound or (function.driver is None and known.vfio_bound),
    )


def _is_of_model(function: PciFunction, known: PciFunction) -> bool:
    """Of the same model, as far as its ids could be read."""
    return function.vendor in ("", known.vendor) and function.device in ("", known.device)


def _settle(
    state: NodeState,
    inspected: Iterable[tuple[int, Collection[PciAddress]]],
    at: float,
    *,
    failed: bool = False,
) -> NodeState:
    """Forgets the addresses whose functions are gone for good, and plans another inspection of those that came back
    incomplete from the inspections of these numbers, or failed."""
    inspections, functions, seen = state.host.inspections, state.host.functions, state.host.seen
    if len(seen) != len(functions):  # every function was seen once
        scan = inspections.whole.outstanding
        outstanding = [*inspections.functions.values(), *([scan] if scan else [])]
        oldest = min(outstanding, default=math.inf)
        seen = {a: s for a, s in seen.items() if a in functions or s.inspection > oldest}
    retries = dict(inspections.retries)
    for number, addresses in inspected:
        for address in addresses:
            before = retries.get(address)
            if before is not None and before.inspection > number:
                continue  # that inspection was requested later and failed: a change may have come after this one
            retries.pop(address, None)
            function = functions.get(address)
            complete = function is None or _is_complete(function)
            due_at = math.inf
            if failed or not complete:  # with growing waits, without end
                attempt = before.attempt + 1 if before is not None else 0
                waits_s = UNSETTLED_INSPECTIONS_S
                due_at = at + waits_s[min(attempt, len(waits_s) - 1)]
                retries[address] = Retry(attempt, number)
            inspections = _due(inspections, address, due_at)
    inspections = replace(inspections, retries=retries)
    return replace(state, host=replace(state.host, seen=seen, inspections=inspections))


def _due(inspections: Inspections, address: PciAddress, at: float) -> Inspections:
    refresh = inspections.single.get(address, _NEVER)
    return inspections if refresh.due_at == at else _with(inspections, address, replace(refresh, due_at=at))


def _again_soon(state: NodeState, failed: InspectionFailed, at: float) -> NodeState:
    """A shortage passes, and another inspection costs next to nothing."""
    retries = {**state.host.inspections.retries, failed.address: Retry(0, failed.inspection)}
    inspections = _due(state.host.inspections, failed.address, at + SHORTAGE_INSPECTION_S)
    return replace(state, host=replace(state.host, inspections=replace(inspections, retries=retries)))


def _is_complete(function: PciFunction) -> bool:
    """Nothing is missing that may still appear: every attribute was read, and a bound function has its node."""
    return function.fault is None and (not function.vfio_bound or function.has_node)
