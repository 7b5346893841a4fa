"""Inspecting the host: which inspections are wanted, and how their results change the facts.

Theory of operation. Every inspection and every scan gets a number when it is *requested*. A result with number n shows
the host as it was at some moment after number n was issued. So a result replaces a fact only if the fact's number is
not larger. At most one inspection per function and one scan are outstanding; a hint that comes meanwhile requests
another one after it. So in whatever order results come in, every change on the host is followed by an inspection that
was requested after it (or, if its hint is lost, by the next scan), and a storm of hints costs two inspections. A
function that is gone keeps its number as long as a result with a smaller one may still come in and bring it back.

Must not decide what a fact means for kubelet.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from gpuactors import limits
from gpuactors.core.events import FunctionInspected, HostChanged, HostScanned, InspectionFailed, ScanFailed
from gpuactors.core.requests import Refresh
from gpuactors.core.state import NodeState
from gpuactors.core.values.model import Fact, Inspections, PciAddress, PciFunction, Retry


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
        last, single[address] = asked(last, single.get(address, Refresh()))
    return replace(inspections, last=last, single=single)


def asked(last: int, refresh: Refresh) -> tuple[int, Refresh]:
    """The last issued number and the refresh, after a request."""
    after = refresh.asked(last + 1)
    return (last if after.outstanding == refresh.outstanding else last + 1), after


def hinted(state: NodeState, event: HostChanged) -> frozenset[PciAddress]:
    """The addresses that a hint concerns: the function it names, or the known members of the group it names."""
    if event.address is not None:
        return frozenset((event.address, *_without_uevent(state, event.address)))
    return frozenset(
        a for a, f in state.host.facts.items() if f.function and f.function.iommu_group == event.iommu_group
    )


def _without_uevent(state: NodeState, address: PciAddress) -> list[PciAddress]:
    """The physical function of a hinted virtual one: there is no uevent of it when its virtual functions go
    (drivers/pci/iov.c, sriov_disable). A function that is not known may be a virtual one of any that has some."""
    facts = state.host.facts
    fact = facts.get(address)
    if fact is None or fact.function is None:
        return [a for a, f in facts.items() if f.function is not None and f.function.has_virtual_functions]
    physical = fact.function.physical
    return [physical] if physical is not None else []


def scanned(state: NodeState, event: HostScanned, at: float) -> NodeState:
    """A full scan came back: a function that it does not name is gone."""
    if event.inspection != state.host.inspections.scan:
        return state
    facts = _merge(state.host.facts, event.functions, event.inspection, at)
    named = {function.address for function in event.functions}
    for address, fact in state.host.facts.items():
        if address not in named and fact.inspection <= event.inspection:
            facts[address] = _found(event.inspection, None, fact, at)
    inspections = _scan_back(
        replace(state.host.inspections, scan_failures=0), at + state.daemon.settings.resync_interval_s
    )
    return _settle(
        replace(state, host=replace(state.host, facts=facts, inspections=inspections, scanned=True)),
        named,
        event.inspection,
        at,
    )


def scan_failed(state: NodeState, event: ScanFailed, at: float) -> NodeState:
    """A failed scan changes no fact and is requested again, after a wait that grows each time."""
    if event.inspection != state.host.inspections.scan:
        return state
    failures = state.host.inspections.scan_failures
    wait_s = limits.SCAN_BACKOFF_S[min(failures, len(limits.SCAN_BACKOFF_S) - 1)]
    inspections = replace(state.host.inspections, scan_failures=failures + 1)
    inspections = replace(inspections, whole=inspections.whole.answered(at + wait_s))
    return replace(state, host=replace(state.host, inspections=inspections))


def inspected(state: NodeState, event: FunctionInspected, at: float) -> NodeState:
    """One inspection came back: the function at its address and the other members of its group."""
    if event.inspection != state.host.inspections.functions.get(event.address):
        return state
    facts = _merge(state.host.facts, event.functions, event.inspection, at)
    named = {function.address for function in event.functions}
    before = state.host.facts.get(event.address)
    if event.address not in named and (before is None or before.inspection <= event.inspection):
        facts[event.address] = _found(event.inspection, None, before, at)
    inspections = _inspection_back(state.host.inspections, event.address)
    return _settle(
        replace(state, host=replace(state.host, facts=facts, inspections=inspections)),
        named | {event.address},
        event.inspection,
        at,
    )


def inspection_failed(state: NodeState, event: InspectionFailed, at: float) -> NodeState:
    """An inspection that failed as a whole: the function keeps its known attributes, with the failure as its fault.

    A shortage is no fault: the fact keeps its number, and records why there is no newer one.
    """
    if event.inspection != state.host.inspections.functions.get(event.address):
        return state
    facts = dict(state.host.facts)
    before = facts.get(event.address)
    if before is not None and before.function is not None and before.inspection <= event.inspection:
        facts[event.address] = (
            replace(before, short=event.reason)
            if event.shortage
            else _found(event.inspection, replace(before.function, fault=event.reason), before, at)
        )
    inspections = _inspection_back(state.host.inspections, event.address)
    state = _settle(
        replace(state, host=replace(state.host, facts=facts, inspections=inspections)),
        {event.address},
        event.inspection,
        at,
        failed=True,
    )
    return _again_soon(state, event, at) if event.shortage else state


def _scan_back(inspections: Inspections, due_at: float) -> Inspections:
    """The outstanding scan is back; the next one is due at `due_at`, or at once if it is wanted again."""
    again = inspections.whole.again
    inspections = replace(inspections, whole=inspections.whole.answered(due_at))
    return ask_scan(inspections) if again else inspections


def _inspection_back(inspections: Inspections, address: PciAddress) -> Inspections:
    """The outstanding inspection of `address` is back; another one is requested if it is wanted again."""
    refresh = inspections.single[address]
    inspections = _with(inspections, address, refresh.answered(refresh.due_at))
    return ask_inspections(inspections, (address,)) if refresh.again else inspections


def _with(inspections: Inspections, address: PciAddress, refresh: Refresh) -> Inspections:
    """`inspections` with that refresh of the address; one that is neither outstanding nor due is left out."""
    single = {a: r for a, r in inspections.single.items() if a != address}
    return replace(inspections, single=single if refresh == Refresh() else {**single, address: refresh})


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
    return min([inspections.whole.deadline, *(refresh.due_at for refresh in inspections.single.values())])


def _merge(
    facts: Mapping[PciAddress, Fact], functions: Iterable[PciFunction], number: int, at: float
) -> dict[PciAddress, Fact]:
    merged = dict(facts)
    for function in functions:
        before = merged.get(function.address)
        if before is None or before.inspection <= number:
            found = _with_identity(function, before)
            # The known object, if it is equal: so derived values need only a comparison by identity.
            known = before.function if before is not None else None
            merged[function.address] = _found(number, known if known == found else found, before, at)
    return merged


def _found(number: int, function: PciFunction | None, before: Fact | None, at: float) -> Fact:
    """The fact of an inspection that came back at `at`."""
    is_known = before is not None and (before.function is function or before.function == function)
    return Fact(
        number, function, seen_at=at, changed_at=before.changed_at if before is not None and is_known else at
    )


def _with_identity(function: PciFunction, before: Fact | None) -> PciFunction:
    """A function whose attributes cannot be read just now keeps its known identity.

    A GPU must not fall out of its resource, or out of kubelet's list, because one read failed.
    """
    known = before.function if before is not None else None
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
    state: NodeState, inspected: Iterable[PciAddress], inspection: int, at: float, *, failed: bool = False
) -> NodeState:
    """Removes the facts of functions that are gone for good, and plans another inspection of those that came back
    incomplete from this one, or failed."""
    inspections, retries = state.host.inspections, dict(state.host.inspections.retries)
    outstanding = [*inspections.functions.values(), *([inspections.scan] if inspections.scan else [])]
    oldest = min(outstanding, default=math.inf)
    facts = {a: f for a, f in state.host.facts.items() if f.function is not None or f.inspection > oldest}
    for address in inspected:
        before = retries.get(address)
        if before is not None and before.inspection > inspection:
            continue  # that inspection was requested later and failed: a change may have come after this one
        retries.pop(address, None)
        fact = facts.get(address)
        complete = fact is None or fact.function is None or _is_complete(fact.function)
        due_at = math.inf
        if failed or not complete:  # with growing waits, without end
            attempt = before.attempt + 1 if before is not None else 0
            waits_s = limits.UNSETTLED_INSPECTIONS_S
            due_at = at + waits_s[min(attempt, len(waits_s) - 1)]
            retries[address] = Retry(attempt, inspection)
        inspections = _due(inspections, address, due_at)
    inspections = replace(inspections, retries=retries)
    return replace(state, host=replace(state.host, facts=facts, inspections=inspections))


def _due(inspections: Inspections, address: PciAddress, at: float) -> Inspections:
    refresh = inspections.single.get(address, Refresh())
    return inspections if refresh.due_at == at else _with(inspections, address, replace(refresh, due_at=at))


def _again_soon(state: NodeState, failed: InspectionFailed, at: float) -> NodeState:
    """A shortage passes, and another inspection costs next to nothing."""
    retries = {**state.host.inspections.retries, failed.address: Retry(0, failed.inspection)}
    inspections = _due(state.host.inspections, failed.address, at + limits.SHORTAGE_INSPECTION_S)
    return replace(state, host=replace(state.host, inspections=replace(inspections, retries=retries)))


def _is_complete(function: PciFunction) -> bool:
    """Nothing is missing that may still appear: every attribute was read, and a bound function has its node."""
    return function.fault is None and (not function.vfio_bound or function.has_node)
