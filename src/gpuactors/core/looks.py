"""Looking at the host: which looks are wanted, and what their results do to the facts.

Theory of operation. Every look and every scan gets a number when it is *asked for*. A result with number n shows the
host as it was at some moment after n was given out. So a result replaces a fact only if the fact's number is not
larger. At most one look per function and one scan are outstanding; a hint that comes meanwhile asks for another one
after it. So in whatever order results come in, every change on the host is followed by a look that was asked for after
it (or, if its hint is lost, by the next scan), and a storm of hints costs two looks. A function that is gone keeps its
number as long as a result with a smaller one may still come in and bring it back.

Must not decide what a fact means for kubelet.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from gpuactors import limits
from gpuactors.core.events import FunctionInspected, HostChanged, HostScanned, InspectionFailed, ScanFailed
from gpuactors.core.model import Fact, Looks, PciAddress, PciFunction, Retry
from gpuactors.core.refresh import Refresh

if TYPE_CHECKING:
    from gpuactors.core.state import NodeState


def first_looks() -> Looks:
    """At start: one full scan is wanted."""
    return Looks(
        last=1,
        whole=Refresh().asked(1),
        single={},
        scan_failures=0,
        retries={},
    )


def ask_scan(looks: Looks) -> Looks:
    """Asks for a full scan; if one is outstanding, for another one after it."""
    last, whole = asked(looks.last, looks.whole)
    return replace(looks, last=last, whole=whole)


def ask_looks(looks: Looks, addresses: Iterable[PciAddress]) -> Looks:
    """Asks for a look at each address; where one is outstanding, for another one after it."""
    single, last = dict(looks.single), looks.last
    for address in addresses:
        last, single[address] = asked(last, single.get(address, Refresh()))
    return replace(looks, last=last, single=single)


def asked(last: int, refresh: Refresh) -> tuple[int, Refresh]:
    """The last number that was given out then, and what was asked for."""
    after = refresh.asked(last + 1)
    return (last if after.outstanding == refresh.outstanding else last + 1), after


def hinted(state: NodeState, event: HostChanged) -> frozenset[PciAddress]:
    """The addresses that a hint is about: the function it names, or the known members of the group it names."""
    if event.address is not None:
        return frozenset((event.address,))
    return frozenset(
        a for a, f in state.facts.items() if f.function and f.function.iommu_group == event.iommu_group
    )


def scanned(state: NodeState, event: HostScanned, at: float) -> NodeState:
    """A full scan came back: what it does not name is gone."""
    if event.look != state.looks.scan:
        return state
    facts = _merge(state.facts, event.functions, event.look)
    named = {function.address for function in event.functions}
    for address, fact in state.facts.items():
        if address not in named and fact.look <= event.look:
            facts[address] = Fact(event.look, None)
    looks = _scan_back(replace(state.looks, scan_failures=0), at + state.settings.resync_interval_s)
    return _settle(replace(state, facts=facts, looks=looks, scanned=True), named, event.look, at)


def scan_failed(state: NodeState, event: ScanFailed, at: float) -> NodeState:
    """A scan that could not be done changes no fact and is asked for again, ever more slowly."""
    if event.look != state.looks.scan:
        return state
    failures = state.looks.scan_failures
    wait_s = limits.SCAN_BACKOFF_S[min(failures, len(limits.SCAN_BACKOFF_S) - 1)]
    looks = replace(state.looks, scan_failures=failures + 1)
    return replace(state, looks=replace(looks, whole=looks.whole.answered(at + wait_s)))


def inspected(state: NodeState, event: FunctionInspected, at: float) -> NodeState:
    """One look came back: the function at its address and the other members of its group."""
    if event.look != state.looks.functions.get(event.address):
        return state
    facts = _merge(state.facts, event.functions, event.look)
    named = {function.address for function in event.functions}
    before = state.facts.get(event.address)
    if event.address not in named and (before is None or before.look <= event.look):
        facts[event.address] = Fact(event.look, None)
    looks = _look_back(state.looks, event.address)
    return _settle(replace(state, facts=facts, looks=looks), named | {event.address}, event.look, at)


def inspection_failed(state: NodeState, event: InspectionFailed, at: float) -> NodeState:
    """A look that failed as a whole: the function keeps what was known, with the failure as its fault.

    A shortage is none: the fact stays as old as it is, and says why there is no newer one.
    """
    if event.look != state.looks.functions.get(event.address):
        return state
    facts = dict(state.facts)
    before = facts.get(event.address)
    if before is not None and before.function is not None and before.look <= event.look:
        facts[event.address] = (
            replace(before, short=event.reason)
            if event.shortage
            else Fact(event.look, replace(before.function, fault=event.reason))
        )
    looks = _look_back(state.looks, event.address)
    state = _settle(replace(state, facts=facts, looks=looks), {event.address}, event.look, at, failed=True)
    return _again_soon(state, event, at) if event.shortage else state


def _scan_back(looks: Looks, due_at: float) -> Looks:
    """The outstanding scan is back; the next one is due at `due_at`, or at once if it is wanted again."""
    again = looks.whole.again
    looks = replace(looks, whole=looks.whole.answered(due_at))
    return ask_scan(looks) if again else looks


def _look_back(looks: Looks, address: PciAddress) -> Looks:
    """The outstanding look at `address` is back; another one is asked for if it is wanted again."""
    refresh = looks.single[address]
    looks = _with(looks, address, refresh.answered(refresh.due_at))
    return ask_looks(looks, (address,)) if refresh.again else looks


def _with(looks: Looks, address: PciAddress, refresh: Refresh) -> Looks:
    """What is neither outstanding nor due is not in there."""
    single = {a: r for a, r in looks.single.items() if a != address}
    return replace(looks, single=single if refresh == Refresh() else {**single, address: refresh})


def due(state: NodeState, at: float) -> NodeState:
    """Asks for the scan and the looks whose time has come."""
    looks = state.looks
    if looks.whole.deadline <= at:
        looks = ask_scan(looks)
    late = [address for address, refresh in looks.single.items() if refresh.due_at <= at]
    return replace(state, looks=ask_looks(looks, sorted(late)) if late else looks)


def deadline(looks: Looks) -> float:
    """When `due` will next have something to do."""
    return min([looks.whole.deadline, *(refresh.due_at for refresh in looks.single.values())])


def _merge(
    facts: Mapping[PciAddress, Fact], functions: Iterable[PciFunction], number: int
) -> dict[PciAddress, Fact]:
    merged = dict(facts)
    for function in functions:
        before = merged.get(function.address)
        if before is None or before.look <= number:
            found = _with_identity(function, before)
            # The very one that is known, if it is what it was: what follows from it is then told by identity.
            known = before.function if before is not None else None
            merged[function.address] = Fact(number, known if known == found else found)
    return merged


def _with_identity(function: PciFunction, before: Fact | None) -> PciFunction:
    """A function whose attributes cannot be read just now keeps the identity that it is known by.

    A GPU must not fall out of its resource, or out of kubelet's list, because one read failed.
    """
    known = before.function if before is not None else None
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


def _settle(
    state: NodeState, looked_at: Iterable[PciAddress], look: int, at: float, *, failed: bool = False
) -> NodeState:
    """Forgets what is gone for good, and plans another look at what came back incomplete from this one, or failed."""
    outstanding = [*state.looks.functions.values(), *([state.looks.scan] if state.looks.scan else [])]
    oldest = min(outstanding, default=math.inf)
    facts = {a: f for a, f in state.facts.items() if f.function is not None or f.look > oldest}
    looks, retries = state.looks, dict(state.looks.retries)
    for address in looked_at:
        before = retries.get(address)
        if before is not None and before.look > look:
            continue  # what made that look fail may be hiding a change that this one is too old for
        retries.pop(address, None)
        fact = facts.get(address)
        complete = fact is None or fact.function is None or _is_complete(fact.function)
        due_at = math.inf
        if failed or not complete:  # ever later, for ever
            attempt = before.attempt + 1 if before is not None else 0
            due_at = at + limits.UNSETTLED_LOOKS_S[min(attempt, len(limits.UNSETTLED_LOOKS_S) - 1)]
            retries[address] = Retry(attempt, look)
        looks = _due(looks, address, due_at)
    return replace(state, facts=facts, looks=replace(looks, retries=retries))


def _due(looks: Looks, address: PciAddress, at: float) -> Looks:
    refresh = looks.single.get(address, Refresh())
    return looks if refresh.due_at == at else _with(looks, address, replace(refresh, due_at=at))


def _again_soon(state: NodeState, failed: InspectionFailed, at: float) -> NodeState:
    """A shortage passes, and looking again costs next to nothing."""
    retries = {**state.looks.retries, failed.address: Retry(0, failed.look)}
    looks = _due(state.looks, failed.address, at + limits.SHORTAGE_LOOK_S)
    return replace(state, looks=replace(looks, retries=retries))


def _is_complete(function: PciFunction) -> bool:
    """Nothing is missing that may still be on its way: every attribute read, and a bound function has its node."""
    return function.fault is None and (not function.vfio_bound or function.has_node)
