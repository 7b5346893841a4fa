"""The outputs of the node's state for each reader outside the core. Derived each time, never kept."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Final

from msgspec import Struct

from gpuactors.core.claims.outputs import ClaimsWanted, claims_wanted
from gpuactors.core.claims.view import view_of
from gpuactors.core.deviceplugin import listing
from gpuactors.core.deviceplugin.device_lists import is_ready
from gpuactors.core.deviceplugin.entries import is_offered
from gpuactors.core.deviceplugin.registration import PluginOrder, is_registered, order
from gpuactors.core.deviceplugin.specs import are_known
from gpuactors.core.domains.outputs import DomainsWanted, domains_wanted
from gpuactors.core.host.dead_signs import known_errors
from gpuactors.core.kinds.table import kind_of
from gpuactors.core.ledger.identity import alias_ids
from gpuactors.core.partitions.outputs import NOTHING_WANTED, PartitionsWanted, partitions_wanted
from gpuactors.core.state import NodeState
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.dead_signs import NO_ERRORS, KnownErrors
from gpuactors.core.values.memo import memoized
from gpuactors.core.values.model import (
    DeviceId,
    DeviceKey,
    DeviceList,
    Health,
    Holder,
    InspectedKey,
    PciAddress,
    Pod,
    ResourceName,
    Role,
    Transition,
    function_address,
    listed_by_key,
)
from gpuactors.core.values.selector import Selector


class PollTarget(Struct, frozen=True, gc=False):
    """One IOMMU group to poll."""

    group: int
    functions: tuple[PciAddress, ...]
    """Its functions on a vfio driver, or on none."""
    may_open: bool
    """True if a probe by open disturbs no pod: the group is not allocated, not claimed, and has no pending
    allocation."""
    urgent: bool = False
    """True if a call waits for it: no result of an earlier poll may replace an observation."""
    cdevs: tuple[str, ...] = ()
    """The names of the vfio devices of its mediated device: `vfio7`. Those of functions are found by these."""


class PollWanted(Struct, frozen=True, gc=False):
    """The outstanding poll. Each number is polled once."""

    poll: int | None
    """Its number; None while none is outstanding."""
    targets: tuple[PollTarget, ...]
    whole: bool = True
    """True if the targets are all groups that matter."""


NO_POLL: Final = PollWanted(None, ())
"""The value while no poll is outstanding."""


class InspectionsWanted(Struct, frozen=True, gc=False):
    """The outstanding reads of sysfs. Each version lists all of them, so a reader that missed one loses nothing."""

    scan: int | None
    """The number of the full scan; None without one."""
    functions: Mapping[InspectedKey, int]
    """The number of each inspection of one function or mediated device."""
    given: frozenset[PciAddress]
    """The functions of the devices that pods have by gpuactors' resources, and that claims have or are owed a return
    of: inspected whatever the selectors choose."""
    poll: PollWanted = NO_POLL
    selectors: tuple[Selector, ...] = ()
    """The operator's selectors now. Whoever changes them requests a scan, and no earlier result shows what they
    choose."""
    errors: KnownErrors = NO_ERRORS
    """The known errors of functions, so that no read waits for the reset after one."""


def asks_more(before: InspectionsWanted, now: InspectionsWanted) -> bool:
    """Return whether something is outstanding now that was not before."""
    return (
        now.scan not in (None, before.scan)
        or now.poll.poll not in (None, before.poll.poll)
        or not now.functions.items() <= before.functions.items()
    )


class LedgerWanted(Struct, frozen=True, gc=False):
    """The outstanding read of kubelet's ledger."""

    read: int | None
    """Its number; None while none is outstanding."""
    resources: tuple[ResourceName, ...] = ()
    """The resources whose own list is requested of kubelet."""
    pods: tuple[Pod, ...] = ()
    """The pods that are requested by Get."""
    lists: bool = False
    """True if all pods are requested by List."""


class PluginView(Struct, frozen=True, gc=False):
    """The input of one plugin actor."""

    device_list: DeviceList
    order: PluginOrder


class Outputs(Struct, frozen=True, gc=False):
    """Every lasting output, for the registry to put into its cells."""

    inspections: InspectionsWanted
    ledger: LedgerWanted
    plugins: Mapping[ResourceName, PluginView]
    claims: ClaimsWanted | None
    """The orders for claims of GPUs; None while DRA is off."""
    domains: DomainsWanted | None
    """The orders for compute domains; None while they are off."""
    partitions: PartitionsWanted | None
    """The orders for partitions of the NVLink fabric; None where gpuactors activates none."""
    take_over: bool
    """True if this daemon is ready to serve, so that the running one is to hand over now."""
    stopping: bool


def project(state: NodeState) -> Outputs:
    """Return the outputs that follow from the state."""
    inspections = state.host.inspections
    return Outputs(
        inspections=InspectionsWanted(
            inspections.whole.outstanding,
            inspections.functions,
            _given(state.index.inspected_always, state.gpus.reserved.keys(), state.gpus.owed.keys()),
            _poll(state),
            state.daemon.settings.selectors,
            known_errors(state.host.functions, state.host.dead_signs),
        ),
        ledger=_ledger(state),
        plugins={
            r: PluginView(state.published.device_lists[r], order(p))
            for r, p in state.published.plugins.items()
        },
        claims=_claims(state),
        domains=domains_wanted(state) if state.domains.settings is not None else None,
        partitions=_partitions(state),
        take_over=state.daemon.role is Role.TAKING_OVER and is_ready(state) and are_known(state),
        stopping=state.daemon.stopping,
    )


@memoized
def _given(
    of_pods: frozenset[PciAddress], of_claims: Set[DeviceKey], owed: Set[DeviceKey]
) -> frozenset[PciAddress]:
    """Derive `InspectionsWanted.given`."""
    return of_pods | frozenset(map(function_address, of_claims | owed))


def _ledger(state: NodeState) -> LedgerWanted:
    ledger = state.kubelet.ledger
    if ledger.refresh.outstanding is None:
        return LedgerWanted(None)
    asking = ledger.asking
    return LedgerWanted(ledger.refresh.outstanding, listing.asked(state), asking.pods, asking.lists)


def _claims(state: NodeState) -> ClaimsWanted | None:
    if state.gpus.claims.settings is None:
        return None
    from gpuactors.core.gpus.driver import GPUS

    return claims_wanted(view_of(state, GPUS))


def _partitions(state: NodeState) -> PartitionsWanted | None:
    """Return the orders for partitions. Only a daemon that serves has the file of intents."""
    if state.partitions is None:
        return None
    is_serving = state.daemon.role is Role.SERVING and not state.daemon.stopping
    return partitions_wanted(state.partitions) if is_serving else NOTHING_WANTED


def _poll(state: NodeState) -> PollWanted:
    if state.host.polls.refresh.outstanding is None:
        return NO_POLL
    return PollWanted(
        state.host.polls.refresh.outstanding, _targets(state), whole=state.host.polls.asked_groups is None
    )


def _targets(state: NodeState) -> tuple[PollTarget, ...]:
    """Return the groups to poll. A group with an owner is never opened as a probe. A daemon opens none before it serves
    and has read the whole of kubelet's ledger, nor while it reads the ledger: it does not know the owners then."""
    ledger = state.kubelet.ledger
    knows = (
        ledger.source.is_whole
        and state.daemon.role is Role.SERVING
        and ledger.asking.listed > 0
        and ledger.refresh.outstanding is None
    )
    seen = [item for call in state.calls.waiting.values() for item in call.seen.items()]
    asked = {f.address for _, units in seen for f in units}
    asked_parts = state.index.group_numbers(device for device, _ in seen if device in state.host.mediated)
    cdevs = {d.iommu_group: d.cdevs for d in state.host.mediated.values() if d.cdevs}
    index, targets = state.index, list[PollTarget]()
    polled = index.polled
    for group in polled if state.host.polls.asked_groups is None else sorted(state.host.polls.asked_groups):
        functions = polled.get(group)
        if functions is None:
            continue
        urgent = group in asked_parts or not asked.isdisjoint(functions)
        # By all members: an allocated function may have lost its driver and is not polled then, but its group is still
        # the pod's.
        may_open = (
            knows
            and not urgent
            and group not in index.owned
            and not any(member.address in asked for member in index.groups.get(group, ()))
        )
        targets.append(PollTarget(group, functions, may_open, urgent, cdevs.get(group, ())))
    return tuple(targets)


class DeviceReport(Struct, frozen=True, gc=False):
    """One selected device as an operator sees it."""

    id: DeviceId
    key: DeviceKey
    resource: ResourceName
    health: Health
    cause: Cause
    reason: str
    owner: str | None
    """The name of the pod or claim that kubelet has given it to; None without one."""
    vm: str
    """The virtual machine that its owner runs; empty if none is known."""
    holders: tuple[Holder, ...]
    history: tuple[Transition, ...]
    listed: bool
    """True if it is in the device list that kubelet gets."""


def report(state: NodeState) -> tuple[DeviceReport, ...]:
    """Return every selected device, offered or not, with its one reason, sorted by key."""
    index, ids = state.index, alias_ids(state)
    assessments, reports = state.assessments, []
    entries = listed_by_key(state.published.device_lists)
    for key, device in index.devices.items():
        listed = entries.get((device.resource, key))
        status = assessments[key].status
        if listed is not None:
            health, cause, reason = listed.health, listed.cause, listed.reason
        elif is_offered(state, device):
            health, cause, reason = status.health, status.cause, status.message
        else:
            why = kind_of(device).not_backed(device)
            health, cause, reason = Health.UNHEALTHY, why.cause, why.message
        reports.append(
            DeviceReport(
                id=ids.get(key, DeviceId(key)),
                key=key,
                resource=device.resource,
                health=health,
                cause=cause,
                reason=reason,
                owner=status.owner.name if status.owner is not None else None,
                vm=status.owner.vm if status.owner is not None else "",
                holders=status.holders,
                history=state.published.history.get(key, ()),
                listed=listed is not None,
            )
        )
    return tuple(reports)


def registered(state: NodeState) -> Mapping[ResourceName, bool]:
    """Return which resources are registered: accepted by kubelet, with an open stream."""
    return {resource: is_registered(plugin) for resource, plugin in state.published.plugins.items()}
