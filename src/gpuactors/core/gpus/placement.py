"""Whether a claim's devices still are where its files say: there, the same model, on a vfio driver, in the IOMMU group
and under the cdev that the files name. A GPU may have been unplugged and plugged in again, or bound to another driver
by hand.

The kernel gives the number of a group or cdev that is gone to the next one (drivers/iommu/iommu.c and
drivers/vfio/vfio_main.c: the lowest that is free), and a container that restarts gets the files without a call. So
files whose device has drifted are removed at once, and none is written while another claim's may name the same node.

Must not decide who may have the devices: that is `exclusion.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from gpuactors.core.devices.index import Index
from gpuactors.core.gpus.exclusion import another_model, with_companions
from gpuactors.core.host import inspections
from gpuactors.core.host.bindings import changed_functions, changed_mediated
from gpuactors.core.kinds.kind import Act
from gpuactors.core.kinds.presence import moved
from gpuactors.core.kinds.table import kind_of
from gpuactors.core.state import NodeState
from gpuactors.core.state.claims import FILES, ClaimedGpu, ClaimRecord, gpus_of
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.claim_states import OWNING, ClaimState
from gpuactors.core.values.inventory import inspected_keys
from gpuactors.core.values.model import DeviceKey, InspectedKey, PciFunction, function_address
from gpuactors.core.values.quote import quoted_id
from gpuactors.core.values.status import Reason

_HAVE_FILES: Final = frozenset(
    {
        ClaimState.WRITING,
        ClaimState.COMMITTING,
        ClaimState.PREPARED,
        ClaimState.VERIFYING,
        ClaimState.STOPPED,
    }
)
"""The states of a claim that may have files."""


def is_seen(state: NodeState, entry: ClaimRecord) -> bool:
    """Return whether the claim's devices and each function of theirs have been inspected since `entry.since`, and since
    its last uevent."""
    return all(_is_seen(state, entry, key) for key in _inspected_keys(state.index, entry))


def _is_seen(state: NodeState, entry: ClaimRecord, key: InspectedKey) -> bool:
    seen = state.host.seen.get(key)
    if seen is not None and seen.inspection <= entry.since:
        return False  # else it is gone, if no inspection of it is outstanding
    return not inspections.is_unseen(state.host, key, entry.since, entry.since_at)


def _inspected_keys(index: Index, entry: ClaimRecord) -> Iterator[InspectedKey]:
    """Yield what shows where the claim's devices are: the functions that its acts bind; a device that no act binds, and
    its units."""
    for gpu in gpus_of(entry).gpus:
        if gpu.functions:
            yield from (function.address for function in gpu.functions)
        else:
            device = index.present.get(gpu.key)
            yield from inspected_keys(gpu.key, device.units if device is not None else ())


# --- drift ------------------------------------------------------------------------------------------------------------


def drifted(before: NodeState, state: NodeState) -> list[tuple[ClaimRecord, Reason]]:
    """Return the claims whose files are wrong now, each with the reason. Only a change since `before`, the state before
    the event, can have moved a device."""
    settled, left_out = state.gpus.settled, state.gpus.left_out
    if not state.host.scanned or (before.host is state.host and before.gpus.settled is settled):
        return []
    functions = changed_functions(before, state) | (before.gpus.settled.keys() - settled.keys())
    functions |= before.gpus.left_out - left_out
    changed: set[InspectedKey] = {*functions, *changed_mediated(before, state)}
    groups = {index.group_of.get(DeviceKey(a)) for a in changed for index in (before.index, state.index)}

    def is_of(entry: ClaimRecord) -> bool:
        """Return whether the claim has a changed device or function, or its files name a group of one."""
        is_in = any(not bound.nodes.isdisjoint(groups) for bound in gpus_of(entry).bound.values())
        return is_in or any(key in changed for key in _inspected_keys(before.index, entry))

    return [
        (entry, reason)
        for entry in state.gpus.claims.entries.values()
        if (FILES in entry.acts or (changed and is_of(entry)))
        and _has_files(entry)
        and (reason := drift(state, entry)) is not None
    ]


def _has_files(entry: ClaimRecord) -> bool:
    is_acted_on = entry.state is ClaimState.STOPPED and entry.acts
    has_files = entry.state in _HAVE_FILES and entry.claim is not None and entry.has_files
    return has_files and not is_acted_on and not entry.broken


def drift(state: NodeState, entry: ClaimRecord) -> Reason | None:
    """Return why the first device is not where the claim's files say; None if all are, or if the files have been
    removed and could be written again."""
    return next((why for gpu in gpus_of(entry).gpus if (why := _drift(state, entry, gpu)) is not None), None)


def _drift(state: NodeState, entry: ClaimRecord, gpu: ClaimedGpu) -> Reason | None:
    device = state.index.present.get(gpu.key)
    if device is None:
        if function_address(gpu.key) in state.gpus.left_out:
            return None
        return Reason(Cause.GONE, f"{gpu.key} is gone from this node")
    if (replaced := another_model(state, entry, device)) is not None:
        return replaced
    if not device.has_backing and Act.BIND not in kind_of(device).acts:
        return kind_of(device).not_backed(device)
    if gpu.group is not None and device.group != gpu.group:
        where = f"in IOMMU group {device.group}" if device.group is not None else "in no IOMMU group"
        return Reason(Cause.GROUP_CHANGED, f"{gpu.key} is {where}, and no longer in {gpu.group}")
    for member in with_companions(state, gpu.key):
        if not member.vfio_bound and _is_known(state, member):
            on = f"on {quoted_id(member.driver)}" if member.driver is not None else "without a driver"
            return Reason(Cause.NOT_BOUND, f"{member.address} is {on}, and no longer on a vfio driver")
    for original in gpu.functions if entry.has_files else ():
        bound = gpus_of(entry).bound.get(original.address)
        if bound is not None and bound.vfio:
            now = state.host.functions.get(original.address)
            if (now is None or _is_known(state, now)) and (reason := moved(bound, now)) is not None:
                return reason
    return None


def _is_known(state: NodeState, function: PciFunction) -> bool:
    """Return whether a function's facts are newer than the last act on it. If it cannot be read, its last facts stay,
    without its nodes."""
    return function.address not in state.gpus.settled


# --- what may be written ----------------------------------------------------------------------------------------------


def may_write(state: NodeState, entry: ClaimRecord) -> bool:
    """Return whether the claim's devices have been seen, and no other claim's files may name one of their nodes."""
    of_claims = state.gpus.of_claims
    nodes = of_claims.by_claim[entry.name.uid].nodes
    return _may_be_healed(state, entry) and not any(of_claims.named[node] > 1 for node in nodes)


def named_nodes(entry: ClaimRecord) -> frozenset[int | str]:
    """Return the groups and cdevs that the claim's files name, may name, or are to name."""
    if not entry.has_files or entry.state not in OWNING:
        return frozenset()
    bound = (node for b in gpus_of(entry).bound.values() if b.vfio for node in b.nodes)
    return frozenset((*bound, *(gpu.group for gpu in gpus_of(entry).gpus if gpu.group is not None)))


def _may_be_healed(state: NodeState, entry: ClaimRecord) -> bool:
    """Return whether removed files may be written again: those of a prepared claim only after its devices have been
    seen in their place."""
    match entry.state:
        case ClaimState.PREPARED:
            keys, gpus = {*_inspected_keys(state.index, entry)}, state.gpus
            return state.host.scanned and keys.isdisjoint(gpus.settled) and keys.isdisjoint(gpus.left_out)
        case ClaimState.VERIFYING:
            return is_seen(state, entry)
        case _:
            return True
