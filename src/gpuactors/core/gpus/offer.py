"""The devices that the node offers to claims, and why one must not be given away now.

A GPU on its host's driver is offered: a claim binds it, and its companions, to vfio. One that a pod has by the device
plugin, or a process holds, is not to be given away, nor is one that no virtual machine could open. Made once in a step,
at its end, of the devices of which something has changed, and carried in the state with what it is made of.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import repeat
from operator import attrgetter, is_, ne
from typing import Final

from msgspec.structs import replace

from gpuactors.core.gpus.exclusion import of_the_host, of_the_hosts_fabric
from gpuactors.core.kinds.kind import Act
from gpuactors.core.kinds.table import kind_of, slice_name
from gpuactors.core.state import NodeState
from gpuactors.core.state.claims import gpus_of
from gpuactors.core.state.offered import Offered, OfferRow
from gpuactors.core.values.cause import OF_A_PART, Cause
from gpuactors.core.values.claim import DeviceHealth, DraHealth
from gpuactors.core.values.claim_states import ClaimState
from gpuactors.core.values.inventory import Device
from gpuactors.core.values.model import DeviceKey, function_address
from gpuactors.core.values.remade import remade, same_if_equal
from gpuactors.core.values.slices import BlockKind, BlockReason, Offer, OfferedDevice
from gpuactors.core.values.status import Assessment, Reason

_GONE: Final = BlockReason(BlockKind.UNHEALTHY, str(Cause.GONE))

_BOUND_BY_CLAIMS: Final = frozenset({Cause.NOT_BOUND, Cause.GROUP_NOT_VIABLE})
"""The causes that a prepare may remove itself: it binds the device and its companions to vfio."""

_PREPARED: Final = frozenset({ClaimState.PREPARED, ClaimState.VERIFYING, ClaimState.DRIFTED})
"""The states of a claim whose devices its own acts have brought to vfio: elsewhere they are Unhealthy."""


def offered(state: NodeState) -> NodeState:
    """`state` with what it offers, for the snapshot."""
    settings = state.gpus.claims.settings
    if (
        settings is None
        or not state.gpus.claims.loaded
        or not state.host.scanned
        or not state.kubelet.ledger.tried
    ):
        return state
    before, index, gpus = state.offered, state.index, state.gpus
    placed = same_if_equal(before.placed, _placed(state))
    made_of = (
        *(index.functions, index.devices, index.names),
        *(state.assessments, gpus.reserved, gpus.fitness, placed),
    )
    if before.offer is not None and all(map(is_, before.made_of, made_of)):
        return state
    rows = _rows(state, placed)

    def offered_device(address: DeviceKey, row: OfferRow) -> tuple[OfferedDevice | None, DeviceHealth]:
        device, assessment, is_named, *_, is_placed, _, _ = row
        gpu, _ = before.of_devices.get(address, (None, None))
        if is_named and device is not None and assessment is not None:
            gpu = _offered(state, device, assessment)
        elif gpu is not None:
            # A pool never has less than what is held: it stays until its claim ends.
            gpu = replace(gpu, claimed=True, blocked=_GONE)
        return gpu, _health(state, settings.pool, address, is_placed=is_placed)

    of_devices = remade(before.of_devices, before.rows, rows, offered_device, ne)
    if of_devices is before.of_devices and before.offer is not None:
        return replace(state, offered_part=replace(before, made_of=made_of, placed=placed, rows=rows))
    offers = [of_devices[a][0] for a in sorted(of_devices)]
    offer = Offer(settings.driver, settings.pool, tuple(gpu for gpu in offers if gpu is not None))
    health = tuple(sorted([health for _, health in of_devices.values()], key=attrgetter("device")))
    offer = same_if_equal(before.offer, offer)
    return replace(state, offered_part=Offered(made_of, placed, rows, of_devices, offer, health))


def _rows(state: NodeState, placed: frozenset[DeviceKey]) -> Mapping[DeviceKey, OfferRow]:
    """The inputs of the offer of each device that is selected, or that a claim has."""
    index, reserved = state.index, state.gpus.reserved
    switches = tuple([index.functions[address] for address in sorted(index.switches)])
    addresses = {**index.names, **reserved} if reserved.keys() - index.names.keys() else index.names
    found = {a: known.found for a, known in state.gpus.fitness.items() if known.found is not None}
    of_each = zip(
        map(index.devices.get, addresses),
        map(state.assessments.get, addresses),
        map(index.names.__contains__, addresses),
        map(reserved.get, addresses),
        map(found.get, addresses),
        map(placed.__contains__, addresses),
        map(index.present.__contains__, addresses),
        repeat(switches),
        strict=False,  # the last is endless
    )
    return dict(zip(addresses, of_each, strict=True))


def _placed(state: NodeState) -> frozenset[DeviceKey]:
    """The value of `Offered.placed`. A device is inspected at once after an act has bound it, and earlier inspections
    are not used; a device that is inspected again later stays included."""
    single, before = state.host.inspections.single, state.offered.placed
    return frozenset(
        gpu.address
        for entry in state.gpus.claims.entries.values()
        if entry.state in _PREPARED
        for gpu in gpus_of(entry).gpus
        if gpu.address in before
        or (r := single.get(function_address(gpu.address))) is None
        or r.outstanding is None
    )


def _offered(state: NodeState, device: Device, assessment: Assessment) -> OfferedDevice:
    owner = state.gpus.reserved.get(device.key)
    # The scheduler knows that it is given away by its name: NVIDIA's driver had another one for it.
    claimed = owner is not None and owner.device == slice_name(device.key)
    offered = kind_of(device).offer(device, claimed=claimed)
    return offered if claimed else replace(offered, blocked=_blocked(state, device, assessment))


def why_blocked(state: NodeState, address: DeviceKey) -> str:
    """Why the device must not be given to a claim now, as a sentence; empty if it may, or is not there."""
    device, assessment = state.index.devices.get(address), state.assessments.get(address)
    if device is None or assessment is None:
        return ""
    if assessment.holding is not None:
        return assessment.holding.reason.message
    if (fault := _fault(state, device, assessment)) is not None:
        return fault.message
    fitness = state.gpus.fitness.get(address)
    return fitness.found.message if fitness is not None and fitness.found is not None else ""


def _blocked(state: NodeState, device: Device, assessment: Assessment) -> BlockReason | None:
    if assessment.holding is not None:
        cause = assessment.holding.reason.cause
        # A pod that kubelet lists half a second later has it as it had it before: that is one change of the slice.
        return BlockReason(BlockKind.HELD, str(Cause.ALLOCATED if cause is Cause.JUST_ALLOCATED else cause))
    if (fault := _fault(state, device, assessment)) is not None:
        return BlockReason(BlockKind.UNHEALTHY, str(fault.cause))
    fitness = state.gpus.fitness.get(device.key)
    if fitness is None or fitness.found is None:
        return None
    held = fitness.found.cause is Cause.IN_USE_ON_HOST
    return BlockReason(BlockKind.HELD if held else BlockKind.UNHEALTHY, str(fitness.found.cause))


def _fault(
    state: NodeState, device: Device, assessment: Assessment, *, is_placed: bool = False
) -> Reason | None:
    """Why no claim could use it, whoever has it now; None if one could. `is_placed`: a claim has bound it, and does
    not bind it again while its virtual machine runs."""
    kind = kind_of(device)
    blocker = kind.never_given(device) or assessment.blocker
    mended = OF_A_PART if is_placed else _BOUND_BY_CLAIMS if Act.BIND in kind.acts else frozenset()
    if blocker is not None and blocker.cause not in mended:
        return blocker
    return of_the_host(state, device) or of_the_hosts_fabric(state, device)


def _health(state: NodeState, pool: str, address: DeviceKey, *, is_placed: bool) -> DeviceHealth:
    """The health that kubelet shows in the status of the pod that has the device. A device in use is healthy."""
    name, index = slice_name(address), state.index
    if address not in index.present:
        return DeviceHealth(pool, name, DraHealth.UNHEALTHY, "the PCI function is gone from this node")
    device, assessment = index.devices.get(address), state.assessments.get(address)
    fault = None
    if device is not None and assessment is not None:
        fault = _fault(state, device, assessment, is_placed=is_placed)
    if fault is not None:
        return DeviceHealth(pool, name, DraHealth.UNHEALTHY, fault.message)
    return DeviceHealth(pool, name, DraHealth.HEALTHY, "")
