"""Why a claim cannot have a device: another claim has it, a pod by the device plugin API, or a process.

Checked are the device, its IOMMU group and its relatives, against every claim that owns a device, kubelet's ledger, the
pending allocations and the use of the groups as last polled. The other direction is `Gpus.reserved`, which
`devices/holdings.py` makes an owner for the device plugin.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Set
from itertools import chain
from typing import Final

from msgspec.structs import replace

from gpuactors.core.claims.report import belongs
from gpuactors.core.host import inspections
from gpuactors.core.host.sets import sets_unknown
from gpuactors.core.kinds.dead import dead
from gpuactors.core.kinds.presence import another
from gpuactors.core.kinds.sets import not_a_set
from gpuactors.core.kinds.table import key_of, kind_of
from gpuactors.core.state import NodeState
from gpuactors.core.state.claims import ClaimRecord, gpus_of
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.claim import Claim
from gpuactors.core.values.claim_states import ENDED, OWNING, ClaimState
from gpuactors.core.values.inventory import Device, described, inspected_keys
from gpuactors.core.values.model import (
    ClaimedDevice,
    DeviceKey,
    PciFunction,
    device_key,
    function_address,
)
from gpuactors.core.values.owner import NO_RESOURCE, Allocation, Owner
from gpuactors.core.values.quote import first_of, quoted_id
from gpuactors.core.values.status import Conflict, Reason

_NVIDIAS_NAME: Final = r"gpu-(?:vfio-)?[0-9]+(?:-mig-[0-9a-z.+-]+)?"
"""The names of NVIDIA's driver: `gpu-1`, `gpu-vfio-2`, `gpu-0-mig-1g24gb-19-0`."""

_WAITS: Final = (
    "it is free when its pod has ended: wait, or delete one of the two pods, so that it is scheduled anew"
)
"""The remedy for a device with another owner, which may run for weeks."""


def allocated_devices(claim: Claim) -> tuple[str, ...]:
    """Return the names of the claim's devices, those with admin access included, each once."""
    return tuple(dict.fromkeys(r.device for r in claim.results or ()))


def exclusive_devices(claim: Claim) -> tuple[str, ...]:
    """Return the names of the devices that a claim is to have for itself, each once, in the order of its results."""
    return tuple(dict.fromkeys(r.device for r in claim.results or () if not r.admin_access))


def with_companions(state: NodeState, device: DeviceKey) -> tuple[PciFunction, ...]:
    """Return the functions that a claim binds: the device's and its companions, sorted by address. Empty if the device
    is not there."""
    present = state.index.present.get(device)
    return () if present is None else kind_of(present).to_bind(present)


def of_the_host(state: NodeState, device: Device, claimed: Iterable[DeviceKey] = ()) -> Reason | None:
    """Return why the host keeps the device from every claim: it uses another member of its IOMMU group, or firmware has
    memory there. None if it does not. `claimed` has the other devices of the same claim."""
    kind = kind_of(device)
    of_the_claim = chain.from_iterable(with_companions(state, key) for key in claimed)
    return kind.not_viable(device, (*kind.to_bind(device), *of_the_claim))


def hosts_fabric(state: NodeState) -> str:
    """Return the sign that the host runs an NVLink fabric, because of which a GPU on its driver must not be bound to
    vfio, as a part of a sentence; empty without one, and where that is allowed."""
    if state.gpus.settings.nvswitch_allowed:
        return ""
    if state.index.switches:
        switch = state.host.functions[min(state.index.switches)]
        return f"NVSwitch {switch.address} is on {quoted_id(switch.driver or '')}"
    bridges = state.known_sets.bridges
    return f"{bridges[0]} is the bridge to its NVSwitches, and on a driver of the host" if bridges else ""


def not_given(state: NodeState, names: Iterable[str], own: Collection[DeviceKey] = ()) -> Reason | None:
    """Return why this node cannot give one of these devices; None if it can give all. The claim keeps its `own`,
    whatever is selected now."""
    index = state.index
    for name in names:
        key = key_of(name)
        if key is None:
            return Reason(Cause.UNKNOWN_ID, _no_device(name))
        if (device := index.present.get(key)) is None:
            unread = f"{key} is gone from this node, or no selector matches it any more (--select)"
            return Reason(Cause.GONE, unread)
        if (never := kind_of(device).never_given(device)) is not None:
            return _about(key, never)
        if key not in index.devices and key not in own:
            unselected = f"{key} is no device that is offered here: no selector matches it (--select)"
            return Reason(Cause.NOT_SELECTED, unselected)
    return None


def _no_device(name: str) -> str:
    """Return why an allocated name is no GPU here, with the remedy.

    A name of NVIDIA's driver cannot be resolved: it is a number in an order that changes with each added or removed
    card, and its ResourceSlice is overwritten. A container's GPU, or a part of one, is not offered here.
    """
    if re.fullmatch(_NVIDIAS_NAME, name) is None:
        return f"{quoted_id(name)} is no device of this driver"
    return (
        f"{quoted_id(name)} is a name by NVIDIA's DRA driver, which served this node when the claim was allocated, and "
        "gpuactors does not know which GPU that was: delete the pod, and the claim as well if no template made it, so "
        "that a new claim is allocated by the names of gpuactors"
    )


def conflict(state: NodeState, entry: ClaimRecord) -> Conflict | None:
    """Return the first reason why the claim cannot reserve its devices now; None if it can."""
    assert entry.claim is not None
    if not state.host.scanned or not state.kubelet.ledger.tried:
        late = Cause.LEDGER_LATE if state.host.scanned else Cause.INSPECTION_LATE
        return Conflict(Reason(late, "the node has not been read yet"))
    own = [gpu.key for gpu in gpus_of(entry).gpus]
    if missing := not_given(state, allocated_devices(entry.claim), own):
        return Conflict(missing, is_final=True)
    names = exclusive_devices(entry.claim)
    keys = tuple(key for name in names if (key := key_of(name)) is not None)
    if state.daemon.settings.sets_required:
        if (unknown := sets_unknown(state)) is not None:
            return Conflict(unknown)
        if (no_set := not_a_set(keys, state.sets)) is not None:
            return Conflict(no_set, is_final=True)
    for key in keys:
        if (device := state.index.present.get(key)) is None:
            continue
        if unseen := _unseen(state, entry, device):
            return Conflict(_about(key, unseen))
        if sign := dead(device):
            return Conflict(_about(key, sign), is_final=True)
        if device.fault is not None:
            # What was known of it before the inspection failed would give away one that has died since.
            return Conflict(_about(key, Reason(Cause.UNREADABLE, device.fault)))
        fabric = kind_of(device).of_the_hosts_fabric(device, hosts_fabric(state))
        if never := another_model(state, entry, device) or fabric:
            return Conflict(never, is_final=True)
        if claimed := _by_another_claim(state, entry, key, device):
            return Conflict(_about(key, claimed), is_owner=True)
        if hosts := of_the_host(state, device, keys):
            return Conflict(_about(key, hosts), is_final=True)
        if unsettled := _unsettled(state, device, keys):
            return Conflict(_about(key, unsettled))
        if held := _by_holding(state, entry, key, device):
            return Conflict(_about(key, held), is_owner=True, outdates=True)
    return None


def another_model(state: NodeState, entry: ClaimRecord, device: Device) -> Reason | None:
    """Return why the device is not the claim's: the claim's device of this key is, or was in an earlier boot, of
    another model. None if it may be the same one: no serial number is read."""
    earlier = state.gpus.claims.earlier_models.get(entry.name.uid, {})
    address = function_address(device.key)
    gpus = gpus_of(entry).gpus
    originals = (original for gpu in gpus for original in gpu.functions if original.address == address)
    reserved = next((gpu.model for gpu in gpus if gpu.key == device.key), "")
    ids = reserved or next((original.ids for original in originals), "") or earlier.get(device.key, "")
    now = device.model
    if not ids or not now or now == ids:
        return None
    replaced = another(f"{now}, and the claim has {ids}")
    return replace(
        replaced, message=f"{device.key}: {replaced.message}; delete its pod, so that it gets a claim anew"
    )


def _about(device: DeviceKey, why: Reason) -> Reason:
    return Reason(why.cause, f"{device}: {why.message}")


def has_another_owner(state: NodeState, entry: ClaimRecord, key: DeviceKey) -> Reason | None:
    """Return why a claim that ends must not touch a device: it has another owner. None if it has none."""
    device = state.index.present.get(key)
    return _by_another_claim(state, entry, key, device, ends=True) or _by_holding(
        state, entry, key, device, ends=True
    )


def _own_keys(device: Device | None) -> set[DeviceKey]:
    """Return the keys of the device and of every function of its IOMMU group: its owner has them all. Empty if it is
    not there."""
    return set() if device is None else device.owned_keys


def _relatives(state: NodeState, key: DeviceKey, *, ends: bool) -> frozenset[DeviceKey]:
    """Return the relatives whose owner excludes the device. None if its claim `ends`: the act itself leaves a physical
    function with virtual functions as it is, and takes nothing from a part."""
    return frozenset() if ends else state.index.relatives(key)


def _unseen(state: NodeState, entry: ClaimRecord, device: Device) -> Reason | None:
    """Return what of the device has not been read since the claim was, or since the last uevent; None if all has."""
    ledger, group = state.kubelet.ledger, device.group
    for key in inspected_keys(device.key, (*device.members, *device.units)):
        if inspections.is_unseen(state.host, key, entry.since, entry.since_at):
            if (short := state.host.short.get(key)) is not None:
                return Reason(Cause.SHORTAGE, short)
            return Reason(Cause.INSPECTION_LATE, f"sysfs has not answered yet for {key}")
    if group is not None and group in state.index.polled:
        last = state.host.polls.seen.get(group)
        if last is None or last.poll <= entry.since:
            return Reason(Cause.USE_LATE, f"the users of IOMMU group {group} have not been determined yet")
    if ledger.asking.done <= entry.since:
        return Reason(Cause.LEDGER_LATE, "kubelet has not returned its ledger yet")
    return None


def _unsettled(state: NodeState, device: Device, claimed: Collection[DeviceKey]) -> Reason | None:
    """Return that an act has just returned another function of the group to its host: until that is read again it is
    unknown whether the group is viable. None if there is none."""
    own = {f.address for key in claimed for f in with_companions(state, key)}
    for function in device.members:
        if function.address in state.gpus.settled and function.address not in own:
            return Reason(Cause.INSPECTION_LATE, f"sysfs has not answered yet for {function.address}")
    return None


def _by_another_claim(
    state: NodeState, entry: ClaimRecord, key: DeviceKey, device: Device | None, *, ends: bool = False
) -> Reason | None:
    own_keys, index = _own_keys(device), state.index
    relatives = _relatives(state, key, ends=ends)
    for other in state.gpus.claims.entries.values():
        if other.name.uid == entry.name.uid or other.state not in OWNING:
            continue
        for gpu in gpus_of(other).gpus:
            owned = gpu.owned_keys
            is_of_group = device is not None and device.group in index.group_numbers(owned)
            if is_of_group or gpu.key in relatives or not owned.isdisjoint(own_keys):
                who = _subject(state, key, gpu.key, relatives)
                if other.state is ClaimState.RELEASING:
                    message = f"{who} {belongs(other)}"
                else:
                    message = f"{who} {belongs(other, _pods(state, other, gpu.key))}; {_WAITS}"
                return Reason(_taken(key, gpu.key, relatives), message)
    return _by_owed_return(state, own_keys, key, relatives)


def _by_owed_return(
    state: NodeState, own_keys: Set[DeviceKey], device: DeviceKey, relatives: Set[DeviceKey]
) -> Reason | None:
    for owed in state.gpus.owed.values():
        returned = {device_key(f.address) for f in owed.gpu.functions}
        if owed.act and (owed.gpu.key in relatives or not returned.isdisjoint(own_keys)):
            who = _subject(state, device, owed.gpu.key, relatives)
            message = f"{who} is being returned from the claim {owed.claim}"
            return Reason(_taken(device, owed.gpu.key, relatives), message)
    return None


def _subject(state: NodeState, device: DeviceKey, owned: DeviceKey, relatives: Set[DeviceKey]) -> str:
    """Return the subject of a sentence about `device`, of which it or `owned` has an owner."""
    if owned not in relatives:
        return "it"
    present = state.index.present.get(device)
    return described(device, owned, is_part=present is None or owned not in present.ancestors)


def _pods(state: NodeState, entry: ClaimRecord, device: DeviceKey) -> str:
    """Return the pods for which kubelet lists a claim, as a part of a sentence; empty if it lists it for none yet."""
    claims = state.kubelet.ledger.claims.get(device, ())
    pods = sorted({str(c.pod) for c in claims if c.claim == str(entry.name) and c.pod is not None})
    return f" of pod {', '.join(first_of(pods))}" if pods else ""


def _taken(device: DeviceKey, owned: DeviceKey, relatives: Set[DeviceKey]) -> Cause:
    """Return the cause for a claim that is to get `device` while `owned` has an owner."""
    if owned in relatives:
        return Cause.CARD_IN_USE
    return Cause.CLAIMED_ELSEWHERE if owned == device else Cause.GROUP_IN_USE


def _by_holding(
    state: NodeState, entry: ClaimRecord, key: DeviceKey, device: Device | None, *, ends: bool = False
) -> Reason | None:
    """Return the first holder of the device, of its IOMMU group or of a relative, that is not this claim. A process is
    a holder also where kubelet still lists an ended claim, which may still run.

    If the claim `ends`, the device goes back to its host's driver: a container's GPU needs that, and the act itself
    reports a process that has the device open."""
    own_keys = _own_keys(device) | _relatives(state, key, ends=ends)

    def is_own(owned: DeviceKey, allocation: Allocation) -> bool:
        is_hosts = ends and allocation.is_by_hosts_driver
        return owned not in own_keys or is_hosts or _is_own(state, entry, allocation)

    held = state.holding(key, NO_RESOURCE, is_own)
    if held is None or not isinstance(held.holder, Owner):
        return None if held is None or ends else held.reason
    return replace(held.reason, message=f"{held.reason.message}; {_WAITS}")


def _is_own(state: NodeState, entry: ClaimRecord, allocation: Allocation) -> bool:
    """Return whether the owner is this claim, or another one that is known here. Kubelet's list is some seconds old and
    has a claim until its pod has ended: what a known claim owns is in its entry."""
    owner, settings = allocation.to, state.gpus.claims.settings
    if not isinstance(owner, ClaimedDevice) or settings is None or owner.driver != settings.driver:
        return False
    if allocation.doubt or not owner.claim:
        return entry.name.uid == owner.uid or str(entry.name) == owner.claim
    return any(
        str(e.name) == owner.claim
        for e in state.gpus.claims.entries.values()
        if e.name.uid == entry.name.uid or e.state in ENDED or e.state in OWNING
    )
