"""Inspecting the host: requested inspections, and the functions and mediated devices as their results show them.

Theory of operation. Every inspection and every scan gets a number when it is *requested*. A result with number n shows
the host as it was at some moment after number n was issued. So a result changes nothing at an address
that an inspection with a larger number has seen. At most one inspection per function and one scan are outstanding; a
hint that comes meanwhile requests another one after it. So in whatever order results come in, every change on the host
is followed by an inspection that was requested after it (or, if its hint is lost, by the next scan), and a storm of
hints costs two inspections. The address of a function that is gone keeps its number as long as a result with a smaller
one may still come in and bring the function back.

A mediated device is inspected by its key as a function is by its address, and below "function" means either. The known
ones are stored apart from the times of their inspections: an inspection that finds nothing new keeps the objects that
other values are derived from.

Must not decide what a function means for kubelet.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Set
from typing import Final, TypeVar

from msgspec.structs import replace

from gpuactors.core.events.host import (
    FunctionInspected,
    HostChanged,
    HostScanned,
    InspectionFailed,
    ScanFailed,
)
from gpuactors.core.host.dead_signs import remembered, signed, with_function, with_sign
from gpuactors.core.host.vgpu_names import learned
from gpuactors.core.requests import Refresh, asked
from gpuactors.core.state import Host, NodeState
from gpuactors.core.values.dead_signs import DeadSigns
from gpuactors.core.values.mediated import HostPart, MediatedDevice
from gpuactors.core.values.model import (
    DeviceKey,
    InspectedKey,
    Inspections,
    PciAddress,
    PciFunction,
    Retry,
    Seen,
)
from gpuactors.core.values.vgpu import VendorVgpu

_K = TypeVar("_K", bound=str)
_V = TypeVar("_V")

UNSETTLED_INSPECTIONS_S: Final = (0.2, 1.0, 5.0, 30.0)
"""When to repeat an inspection of a function that failed or was incomplete (a missing node, an unreadable attribute);
the last one repeats. udev's own rules finish in well under a second."""

VGPU_INSPECTION_S: Final = 10.0
"""The interval between two inspections of a virtual function of NVIDIA's vGPU driver, in seconds: no uevent reports
that a vGPU type was set or removed. A pod that waits for the type gets it in a few seconds more."""

VGPU_SLOTS: Final = 10
"""The parts of VGPU_INSPECTION_S: a function is inspected in the part that its address decides, so that 256 of them are
26 in each second, and those of a part are one wake-up."""

SHORTAGE_INSPECTION_S: Final = 1.0
"""The wait after an inspection that failed for lack of descriptors, memory or threads: an Allocate may wait for the
next one, and has CALL_DEADLINE_S."""

UEVENTS_END_S: Final = 2.0
"""How long a call or a claim waits for an inspection that was requested after the last hint of its device: each hint of
a storm makes one more, and it would wait for ever. Then one that comes back counts whatever hints came meanwhile."""

SCAN_BACKOFF_S: Final = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""The waits after scans that failed as a whole (sysfs not mounted yet); the last one repeats."""

_NEVER: Final = Refresh()
"""A refresh that is neither outstanding nor due."""


def first_inspections() -> Inspections:
    """Return the inspections at start: one full scan is requested."""
    return Inspections(
        last=1,
        whole=Refresh().asked(1),
        single={},
        scan_failures=0,
        retries={},
    )


def ask_scan(inspections: Inspections) -> Inspections:
    """Request a full scan; if one is outstanding, another one after it."""
    last, whole = asked(inspections.last, inspections.whole)
    return replace(inspections, last=last, whole=whole)


def ask_inspections(inspections: Inspections, addresses: Iterable[InspectedKey]) -> Inspections:
    """Request an inspection of each address or key; if one is outstanding, another one after it."""
    single, last = dict(inspections.single), inspections.last
    for address in addresses:
        last, single[address] = asked(last, single.get(address, _NEVER))
    return replace(inspections, last=last, single=single)


def last_seen(host: Host, device: DeviceKey) -> Seen | None:
    """Return the last inspection of a device; None if there was none."""
    return host.seen.get(device)


def known(host: Host, key: InspectedKey) -> HostPart | None:
    """Return the known function of an address, or mediated device of a key."""
    return host.functions.get(PciAddress(key)) or host.mediated.get(DeviceKey(key))


def never_seen(host: Host, devices: Set[DeviceKey]) -> Set[DeviceKey]:
    """Return the devices that were never inspected."""
    return devices - host.seen.keys()


def is_unseen(host: Host, key: InspectedKey, since: int, since_at: float) -> bool:
    """Return whether the last inspection of a function is too old for what has waited since `since_at`, when the last
    number was `since`, and a newer one is to come back: it is older, or a hint may have outdated it."""
    if host.short.get(key):
        return True
    if (wanted := host.inspections.single.get(key)) is None or wanted.outstanding is None:
        return False
    if (seen := host.seen.get(key)) is None or seen.inspection <= since:
        return True
    is_outdated = wanted.again or wanted.outstanding > seen.inspection
    return is_outdated and seen.at < since_at + UEVENTS_END_S


def hinted(state: NodeState, event: HostChanged) -> frozenset[InspectedKey]:
    """Return what a hint concerns: the function it names, with the known virtual functions and mediated devices that
    are parts of it; the mediated device it names; or the known members of the group it names."""
    host = state.host
    if event.address is not None:
        virtual = [a for a, f in host.functions.items() if f.physical == event.address]
        parts = [key for key, device in host.mediated.items() if device.parent == event.address]
        return frozenset((event.address, *virtual, *_without_uevent(state, event.address), *parts))
    if event.mediated is not None:
        return frozenset((event.mediated,))
    members = [address for address, f in host.functions.items() if f.iommu_group == event.iommu_group]
    devices = [key for key, device in host.mediated.items() if device.iommu_group == event.iommu_group]
    return frozenset((*members, *devices))


def _without_uevent(state: NodeState, address: PciAddress) -> list[PciAddress]:
    """Return the physical function of a hinted virtual one: it has no uevent when its virtual functions go
    (drivers/pci/iov.c, sriov_disable). A function that is unknown, or has no link to it, may belong to any function
    with virtual ones, and to any that an outstanding inspection may have found with them."""
    function = state.host.functions.get(address)
    if function is None or function.unlinked:
        outstanding = state.host.inspections.functions
        return [a for a, f in state.host.functions.items() if f.has_virtual_functions or a in outstanding]
    return [function.physical] if function.physical is not None else []


def scanned(state: NodeState, event: HostScanned, at: float) -> NodeState:
    """Record a full scan: a function that it does not name is gone."""
    if event.inspection != state.host.inspections.whole.outstanding:
        return state
    named = _parts(event)
    host = _with_results(state.host, [(event.inspection, {**dict.fromkeys(state.host.seen), **named})], at)
    inspections = _scan_back(
        replace(state.host.inspections, scan_failures=0), at + state.daemon.settings.resync_interval_s
    )
    if inspections.last > event.inspection:
        # The removal of a virtual function that was not known yet says nothing of its physical one.
        cards = [f.address for f in event.functions if f.has_virtual_functions]
        inspections = ask_inspections(inspections, cards)
    host = replace(host, inspections=inspections, scanned=True)
    return _settle(replace(state, host=host), [(event.inspection, named)], at)


def scan_failed(state: NodeState, event: ScanFailed, at: float) -> NodeState:
    """Request a failed scan again, after a wait that grows each time."""
    if event.inspection != state.host.inspections.whole.outstanding:
        return state
    failures = state.host.inspections.scan_failures
    wait_s = SCAN_BACKOFF_S[min(failures, len(SCAN_BACKOFF_S) - 1)]
    inspections = replace(state.host.inspections, scan_failures=failures + 1)
    inspections = replace(inspections, whole=inspections.whole.answered(at + wait_s))
    return replace(state, host=replace(state.host, inspections=inspections))


def inspected(state: NodeState, events: Iterable[FunctionInspected], at: float) -> NodeState:
    """Record inspections: each shows the function at its address and the other members of its group."""
    single = state.host.inspections.single
    results = [
        (
            event.inspection,
            {event.address: None, **_parts(event)},
        )
        for event in {event.address: event for event in events}.values()
        if (asked := single.get(event.address)) is not None and asked.outstanding == event.inspection
    ]
    if not results:
        return state
    host = _with_results(state.host, results, at)
    back = [next(iter(functions)) for _, functions in results]
    host = replace(host, inspections=_inspections_back(host.inspections, back))
    return _settle(replace(state, host=host), results, at)


def inspection_failed(state: NodeState, event: InspectionFailed, at: float) -> NodeState:
    """Record an inspection that failed as a whole: the function keeps its attributes, with the failure as its fault.

    A shortage is no fault: the function was not seen again, and `Host.short` has the reason.
    """
    asked = state.host.inspections.single.get(event.address)
    if asked is None or asked.outstanding != event.inspection:
        return state
    host, last = state.host, known(state.host, event.address)
    if last is not None and host.seen[event.address].inspection <= event.inspection:
        if event.shortage:
            host = replace(host, short={**host.short, event.address: event.reason})
        else:
            host = _with_results(
                host, [(event.inspection, {event.address: replace(last, fault=event.reason)})], at
            )
            failed = replace(host.seen[event.address], has_failed=True)
            host = replace(host, seen={**host.seen, event.address: failed})
    host = replace(host, inspections=_inspections_back(host.inspections, (event.address,)))
    state = _settle(replace(state, host=host), [(event.inspection, {event.address})], at, failed=True)
    return _again_soon(state, event, at) if event.shortage else state


def with_remembered_signs(host: Host, before: DeadSigns) -> Host:
    """Return the host with the signs that an earlier daemon has kept."""
    signs = remembered(host.dead_signs, before, host.functions)
    return _with_changed(
        replace(host, dead_signs=signs), {f.address: f for f in signed(host.functions, signs)}
    )


def _scan_back(inspections: Inspections, due_at: float) -> Inspections:
    """End the outstanding scan; the next one is due at `due_at`, or at once if one was requested meanwhile."""
    again = inspections.whole.again
    inspections = replace(inspections, whole=inspections.whole.answered(due_at))
    return ask_scan(inspections) if again else inspections


def _inspections_back(inspections: Inspections, addresses: Iterable[InspectedKey]) -> Inspections:
    """End the outstanding inspections of these addresses, and begin those that were requested meanwhile."""
    single, again = dict(inspections.single), []
    for address in addresses:
        refresh = single.pop(address)
        if refresh.again:
            again.append(address)
        if (after := refresh.answered(refresh.due_at)) != _NEVER:
            single[address] = after
    inspections = replace(inspections, single=single)
    return ask_inspections(inspections, again) if again else inspections


def due(state: NodeState, at: float) -> NodeState:
    """Request the scan and the inspections that are due."""
    inspections = state.host.inspections
    if inspections.whole.deadline <= at:
        inspections = ask_scan(inspections)
    late = [address for address, refresh in inspections.single.items() if refresh.due_at <= at]
    if late:
        inspections = ask_inspections(inspections, sorted(late))
    return replace(state, host=replace(state.host, inspections=inspections))


def deadline(inspections: Inspections) -> float:
    """Return when `due` next has something to do."""
    return min([inspections.whole.deadline, *[refresh.due_at for refresh in inspections.single.values()]])


def _parts(event: HostScanned | FunctionInspected) -> Mapping[InspectedKey, HostPart]:
    """Return what a scan or an inspection found, by address and key."""
    parts: dict[InspectedKey, HostPart] = {function.address: function for function in event.functions}
    return parts | {device.key: device for device in event.mediated}


def _with_results(
    host: Host, results: Iterable[tuple[int, Mapping[InspectedKey, HostPart | None]]], at: float
) -> Host:
    """Apply the results of inspections, by their numbers, one after the other. None: no function is at that address."""
    seen, short, signs = dict(host.seen), host.short, host.dead_signs
    changed: dict[InspectedKey, HostPart | None] = {}
    for number, functions_seen in results:
        for address, function in functions_seen.items():
            seen_before = seen.get(address)
            function_before = changed[address] if address in changed else known(host, address)
            if seen_before is not None and seen_before.inspection > number:
                continue
            now = _with_identity(function, function_before, signs) if function is not None else None
            if isinstance(now, PciFunction):
                signs = with_function(signs, now)
            is_unchanged = seen_before is not None and now == function_before
            seen[address] = Seen(
                number, at, seen_before.changed_at if seen_before is not None and is_unchanged else at
            )
            if address in short:
                short = {a: why for a, why in short.items() if a != address}
            if now != function_before:
                changed[address] = now
    host = _with_changed(host, changed) if changed else host
    return replace(host, seen=seen, short=short, dead_signs=signs)


def _with_changed(host: Host, changed: Mapping[InspectedKey, HostPart | None]) -> Host:
    """Return the host with these functions and mediated devices; None: it is gone."""
    functions = {PciAddress(k): part for k, part in changed.items() if not isinstance(part, MediatedDevice)}
    mediated = {DeviceKey(k): part for k, part in changed.items() if not isinstance(part, PciFunction)}
    after = replace(
        host, functions=_updated(host.functions, functions), mediated=_updated(host.mediated, mediated)
    )
    types = learned(host.vgpu_types, after.functions, functions.values())
    return replace(after, vgpu_types=types)


def _updated(known: Mapping[_K, _V], changed: Mapping[_K, _V | None]) -> Mapping[_K, _V]:
    """Return the known values with the changed ones, sorted by key; the same object if none differs."""
    if all(known.get(key) == value for key, value in changed.items()):
        return known
    present = {key: value for key, value in {**known, **changed}.items() if value is not None}
    return present if present.keys() <= known.keys() else dict(sorted(present.items()))


def _with_identity(part: HostPart, last: HostPart | None, signs: DeadSigns) -> HostPart:
    """Keep the last identity of what cannot be read just now: a GPU must not fall out of its resource, or out of
    kubelet's list, because one read failed. A function gets the sign that it is dead."""
    if isinstance(part, MediatedDevice):
        return _with_type(part, last) if isinstance(last, MediatedDevice) else part
    before = last if isinstance(last, PciFunction) else None
    return _with_ids(with_sign(part, before, signs), before)


def _with_type(device: MediatedDevice, last: MediatedDevice) -> MediatedDevice:
    """Keep the type and group of a device that is still the same, and cannot be read just now."""
    if device.fault is None or device.presence not in (0, last.presence):
        return device
    return replace(
        device,
        type_id=device.type_id or last.type_id,
        type_name=device.type_name or last.type_name,
        iommu_group=last.iommu_group if device.iommu_group is None else device.iommu_group,
    )


def _with_ids(function: PciFunction, last: PciFunction | None) -> PciFunction:
    """Keep the last identity of a function whose attributes cannot be read just now."""
    if last is not None and function.gpu_uuid is None and _is_of_model(function, last):
        # Only its host's driver shows the UUID; it is the same GPU as long as it is there.
        function = replace(function, gpu_uuid=last.gpu_uuid)
    if last is not None and not function.host_nodes and function.presence == last.presence:
        function = replace(function, former_nodes=last.host_nodes or last.former_nodes)
    if last is not None and function.physical is None and function.presence == last.presence != 0:
        # Both links go first when a virtual function is removed; it is there until no process has it open.
        function = replace(function, physical=last.physical)
    if function.fault is None or last is None:
        return function
    return replace(
        function,
        vendor=function.vendor or last.vendor,
        device=function.device or last.device,
        class_code=function.class_code or last.class_code,
        model=function.model or last.model,
        iommu_group=last.iommu_group if function.iommu_group is None else function.iommu_group,
        physical=function.physical or last.physical,
        vfio_bound=function.vfio_bound or (function.driver is None and last.vfio_bound),
        vgpu=_with_vgpu_type(function, last),
    )


def _with_vgpu_type(function: PciFunction, last: PciFunction) -> VendorVgpu | None:
    """Keep the vGPU type of a function that is still on the same driver, and cannot be read just now."""
    now, before = function.vgpu, last.vgpu
    if before is None or function.driver != last.driver or function.presence not in (0, last.presence):
        return now
    if now is None:
        return before
    if now.type is None and now.driver_bind in (0, before.driver_bind):
        return replace(now, type=before.type)
    return now


def _is_of_model(function: PciFunction, last: PciFunction) -> bool:
    """Return whether a function is of the same model, as far as its ids could be read."""
    return function.vendor in ("", last.vendor) and function.device in ("", last.device)


def _settle(
    state: NodeState,
    inspected: Iterable[tuple[int, Collection[InspectedKey]]],
    at: float,
    *,
    failed: bool = False,
) -> NodeState:
    """Forget the addresses whose functions are gone for good, and plan another inspection of those that these
    inspections found incomplete, or that `failed`."""
    host = state.host
    inspections, seen = host.inspections, host.seen
    if len(seen) != len(host.functions) + len(host.mediated):  # every function was seen once
        scan = inspections.whole.outstanding
        outstanding = [*inspections.functions.values(), *([scan] if scan else [])]
        oldest = min(outstanding, default=math.inf)
        seen = {a: s for a, s in seen.items() if known(host, a) is not None or s.inspection > oldest}
    retries, due = dict(inspections.retries), dict[InspectedKey, float]()
    for number, addresses in inspected:
        for address in addresses:
            retry = retries.get(address)
            if retry is not None and retry.inspection > number:
                continue  # a later inspection failed: a change may have come after this one
            retries.pop(address, None)
            part = known(host, address)
            is_complete = part is None or _is_complete(part)
            due_at = _due_by_clock(part, at)
            if failed or not is_complete:  # with growing waits, without end
                attempt = retry.attempt + 1 if retry is not None else 0
                waits_s = UNSETTLED_INSPECTIONS_S
                due_at = at + waits_s[min(attempt, len(waits_s) - 1)]
                retries[address] = Retry(attempt, number)
            due[address] = due_at
    inspections = _due(replace(inspections, retries=retries), due)
    return replace(state, host=replace(state.host, seen=seen, inspections=inspections))


def _due_by_clock(part: HostPart | None, at: float) -> float:
    """Return when a part is inspected again though nothing is missing; infinite for most."""
    if not isinstance(part, PciFunction) or part.vgpu is None:
        return math.inf
    slot = int(part.address.replace(":", "").replace(".", ""), 16) % VGPU_SLOTS
    first = at - at % VGPU_INSPECTION_S + slot * (VGPU_INSPECTION_S / VGPU_SLOTS)
    return first if first > at else first + VGPU_INSPECTION_S


def _due(inspections: Inspections, due_at: Mapping[InspectedKey, float]) -> Inspections:
    """Make the next inspection of each of these due at its time."""
    changed = {
        key: replace(refresh, due_at=at)
        for key, at in due_at.items()
        if (refresh := inspections.single.get(key, _NEVER)).due_at != at
    }
    if not changed:
        return inspections
    single = {key: refresh for key, refresh in {**inspections.single, **changed}.items() if refresh != _NEVER}
    return replace(inspections, single=single)


def _again_soon(state: NodeState, failed: InspectionFailed, at: float) -> NodeState:
    """Plan another inspection soon: a shortage passes, and an inspection costs next to nothing."""
    retries = {**state.host.inspections.retries, failed.address: Retry(0, failed.inspection)}
    inspections = _due(state.host.inspections, {failed.address: at + SHORTAGE_INSPECTION_S})
    return replace(state, host=replace(state.host, inspections=replace(inspections, retries=retries)))


def _is_complete(part: HostPart) -> bool:
    """Return whether nothing is missing that may still appear: every attribute was read, a bound function has its node,
    a mediated device its type, which comes after its last uevent."""
    if isinstance(part, MediatedDevice):
        return part.fault is None and part.type_id is not None and (part.driver is None or part.has_node)
    return part.fault is None and (not part.vfio_bound or part.has_node)
