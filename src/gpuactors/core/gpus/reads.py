"""The reads of GPUs that claims and acts ask for: inspections, polls, and kubelet's ledger."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from gpuactors.core.events.claims import ActDone
from gpuactors.core.gpus import returns
from gpuactors.core.host import inspections, schedule
from gpuactors.core.kinds.table import kind_of
from gpuactors.core.state import NodeState, with_inspections
from gpuactors.core.state.claims import ClaimedGpu
from gpuactors.core.state.gpus import Gpus, Returned
from gpuactors.core.values.claim import ClaimName, OriginalDriver
from gpuactors.core.values.inventory import inspected_keys
from gpuactors.core.values.model import DeviceKey, InspectedKey, PciAddress, function_address


def read_at_once(state: NodeState) -> NodeState:
    """Request inspections of the functions that the checkpoint names: another daemon may have acted on them since the
    last ones."""
    gpus, seen, since = state.gpus, state.host.seen, state.host.inspections.last
    settled = {a: since if n == returns.UNSEEN else n for a, n in gpus.settled.items() if a in seen}
    requested = inspections.ask_inspections(state.host.inspections, sorted(settled))
    return with_inspections(replace(state, gpus=replace(gpus, settled=settled)), requested)


def with_left_out(state: NodeState, claimed: Iterable[PciAddress]) -> NodeState:
    """Request inspections of the devices of restored claims that no scan has had: one that began before leaves out
    those that no selector chooses."""
    left_out = frozenset(a for a in claimed if a not in state.host.seen)
    requested = inspections.ask_inspections(state.host.inspections, sorted(left_out))
    return with_inspections(replace(state, gpus=replace(state.gpus, left_out=left_out)), requested)


def looked_for(state: NodeState, gpus: Gpus) -> Gpus:
    """Remove the devices that have been inspected from `Gpus.left_out`."""
    host = state.host
    left_out = gpus.left_out & host.inspections.single.keys() - host.seen.keys()
    return replace(gpus, left_out=left_out) if len(left_out) < len(gpus.left_out) else gpus


def read_again(
    state: NodeState, claim: ClaimName, gpus: Iterable[ClaimedGpu], event: ActDone, *, returned: bool
) -> NodeState:
    """Request inspections of the functions of an act, and polls of the groups of `gpus` that were in use at their last
    poll. `gpus` are not offered before."""
    group_in_use = {g.key: group for g in gpus if (group := _group_in_use(state, g.key)) is not None}
    changed = sorted({*(b.address for b in event.bound), *map(function_address, group_in_use)})
    after, since = returns.settled_by(state, event.bound, returned=returned), state.host.inspections.last
    by_device = {g.key: Returned(claim, since) for g in gpus if function_address(g.key) in changed}
    after = replace(after, returned={**after.returned, **by_device}) if by_device else after
    state = schedule.ask_poll(state, frozenset(group_in_use.values())) if group_in_use else state
    requested = inspections.ask_inspections(state.host.inspections, changed)
    return with_inspections(replace(state, gpus=after), requested)


def seen_again(state: NodeState, gpus: Gpus) -> Gpus:
    """Remove the returned devices that were inspected since, and polled if they were in use."""
    polled = state.host.polls.seen
    unseen = {
        a: r
        for a, r in gpus.returned.items()
        if (last := inspections.last_seen(state.host, a)) is not None
        and (
            last.inspection <= r.since
            or ((group := _group_in_use(state, a)) is not None and polled[group].poll <= r.since)
        )
    }
    return replace(gpus, returned=unseen) if len(unseen) < len(gpus.returned) else gpus


def _group_in_use(state: NodeState, device: DeviceKey) -> int | None:
    """Return the IOMMU group of a device if it was in use at its last poll."""
    index = state.index
    group = index.group_number(device)
    return group if group in index.in_use and group in index.polled else None


def keys_of(state: NodeState, devices: Iterable[DeviceKey]) -> Iterator[InspectedKey]:
    """Yield what to inspect for these devices: themselves, their functions, and their companions."""
    for key in devices:
        if (device := state.index.present.get(key)) is not None:
            yield from inspected_keys(key, (*device.units, *kind_of(device).to_bind(device)))


def with_reads(
    state: NodeState, devices: Iterable[DeviceKey], others: Iterable[OriginalDriver], at: float
) -> NodeState:
    """Request inspections of these devices, their companions and other functions, polls of the devices' groups, and a
    read of the ledger with kubelet's list: only that has the claims of other drivers."""
    devices = tuple(devices)
    if not devices:
        return state
    looked_for = {*keys_of(state, devices), *(f.address for f in others)}
    state = with_inspections(state, inspections.ask_inspections(state.host.inspections, sorted(looked_for)))
    groups = state.index.group_numbers(devices)
    return schedule.ask_ledger(schedule.ask_poll(state, groups) if groups else state, at, lists=True)
