"""The assessment of every device, derived once when something of the device changes, and carried in the state.

Like an index (`devices/index.py`), they are carried with the objects that they are derived from. So a comparison by
identity shows whether they belong to this state, and a stale one is never read. Must not decide: that is `assess.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from gpuactors.core.assessment.assess import assessment_of
from gpuactors.core.devices.index import index_of
from gpuactors.core.state import NodeState
from gpuactors.core.state.assessments import NO_ASSESSMENTS, Assessments
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.inventory import Device
from gpuactors.core.values.model import (
    AdvertisedDevice,
    Health,
    Observed,
    PciAddress,
    ResourceName,
    listed_by_address,
)
from gpuactors.core.values.remade import changed_keys, other_keys


def assessments_of(state: NodeState) -> Assessments:
    """The assessments of exactly this state."""
    carried, index, ledger = state.assessments, index_of(state), state.kubelet.ledger
    if (
        carried.devices is index.devices
        and carried.owners is index.owners
        and carried.short is state.host.short
        and carried.uses is state.host.polls.groups
        and carried.orphans is state.kubelet.orphans
        and carried.read == ledger.read
        and carried.problem == ledger.problem
        and carried.device_lists is state.published.device_lists
    ):
        return carried
    return _refreshed(carried, state)


def assessed(state: NodeState) -> NodeState:
    """`state` with its assessments, for later readers."""
    assessments = assessments_of(state)
    return state if assessments is state.assessments else replace(state, assessments=assessments)


def check_assessments(state: NodeState) -> None:
    """Raises AssertionError if the carried assessments differ from those of a full derivation: a bug. Tests and
    simulation check this after every step."""
    carried, fresh = state.assessments.of, assessments_of(replace(state, assessments=NO_ASSESSMENTS)).of
    stale = sorted(a for a in carried.keys() | fresh.keys() if carried.get(a) != fresh.get(a))
    assert not stale, f"the assessment of {', '.join(stale)} is stale"


def _refreshed(before: Assessments, state: NodeState) -> Assessments:
    index = index_of(state)
    touched = _touched(before, state)
    assessments = replace(
        before,
        devices=index.devices,
        owners=index.owners,
        short=state.host.short,
        uses=state.host.polls.groups,
        orphans=state.kubelet.orphans,
        read=state.kubelet.ledger.read,
        problem=state.kubelet.ledger.problem,
        device_lists=state.published.device_lists,
    )
    if not touched:
        return assessments
    listed, found = _listed(state), {}
    for address in touched & index.devices.keys():
        old, new = before.of.get(address), assessment_of(state, index.devices[address], listed)
        found[address] = old if old is not None and old == new else new
    of = {a: assessment for a, assessment in before.of.items() if a not in touched} | found
    same = len(of) == len(before.of) and all(
        before.of.get(a) is assessment for a, assessment in found.items()
    )
    unknown = (before.unknown - touched) | {
        a for a, assessment in found.items() if assessment.status.cause is Cause.HOLDER_UNKNOWN
    }
    return replace(assessments, of=before.of if same else of, unknown=unknown)


def _touched(before: Assessments, state: NodeState) -> set[PciAddress]:
    """The devices of which something has changed: of itself, of another function of its group, or of their use."""
    index = index_of(state)
    touched = changed_keys(before.devices, index.devices) | changed_keys(before.short, state.host.short)
    groups = _with_other_use(before, state)
    for address in _with_other_owner(before, state):
        touched.add(address)
        function = index.functions.get(address)
        if function is not None and function.iommu_group is not None:
            groups.add(function.iommu_group)
    touched.update(m.address for group in groups for m in index.groups.get(group, ()))
    if before.device_lists is not state.published.device_lists:
        touched |= before.unknown
    return touched & (index.devices.keys() | before.of.keys())


def _with_other_owner(before: Assessments, state: NodeState) -> Iterable[PciAddress]:
    """Devices whose owner changed, or that a pod that left the ledger may still hold."""
    changed = changed_keys(before.owners, index_of(state).owners) | changed_keys(
        before.orphans, state.kubelet.orphans
    )
    # Whether a pod that has left holds it depends on which came later, the read or the poll.
    return changed if before.uses is state.host.polls.groups else changed | state.kubelet.orphans.keys()


def _with_other_use(before: Assessments, state: NodeState) -> set[int]:
    """The groups whose use changed in a part that an assessment is derived from."""
    uses, ledger = state.host.polls.groups, state.kubelet.ledger
    same_ledger = (before.read, before.problem) == (ledger.read, ledger.problem)
    if before.uses is uses and same_ledger:
        return set()
    groups = set() if before.uses.keys() <= uses.keys() else before.uses.keys() - uses.keys()
    seen = {*other_keys(before.uses, uses)}
    if not same_ledger:
        seen |= {group for group, use in uses.items() if use.in_use}
    for group in seen:
        was, use = before.uses.get(group), uses[group]
        if (
            was is None
            or _seen(was, before.read) != _seen(use, ledger.read)
            or (use.in_use and before.problem != ledger.problem)
        ):
            groups.add(group)
    return groups


def _seen(use: Observed, read: int) -> tuple[object, ...]:
    """The parts of a group's use that an assessment is derived from, where kubelet's ledger is that of `read`."""
    return use.in_use, use.in_use and read > use.since, use.evidence, use.holders, use.open, use.unseen


def _listed(state: NodeState) -> Callable[[Device], Health | None]:
    """The last advertised health of a device. The table is made on demand, which is rare."""
    entries: dict[tuple[ResourceName, PciAddress], AdvertisedDevice] = {}

    def health(device: Device) -> Health | None:
        if not entries:
            entries.update(listed_by_address(state.published.device_lists))
        entry = entries.get((device.resource, device.function.address))
        return entry.health if entry is not None else None

    return health
