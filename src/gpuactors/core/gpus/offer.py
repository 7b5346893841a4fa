"""The devices that the node offers to claims, and why one must not be given away now.

A GPU on its host's driver is offered: a claim binds it, and its companions, to vfio. A device must not be given away
while a pod has it by the device plugin, a process holds it, or no virtual machine could open it. Derived once a step,
at its end, for the devices that have changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from gpuactors.core.assessment.blockers import blocker_of
from gpuactors.core.gpus.exclusion import hosts_fabric, not_given
from gpuactors.core.kinds.kind import Act
from gpuactors.core.kinds.presence import gone
from gpuactors.core.kinds.sets import KnownSets, set_attributes, with_attributes
from gpuactors.core.kinds.table import kind_of, slice_name
from gpuactors.core.state import NodeState
from gpuactors.core.state.claims import ClaimSettings, gpus_of
from gpuactors.core.state.gpus import Fitness
from gpuactors.core.state.offered import Offered
from gpuactors.core.values.cause import OF_A_PART, Cause
from gpuactors.core.values.claim import DeviceHealth, DraHealth
from gpuactors.core.values.claim_states import ClaimState
from gpuactors.core.values.inventory import Device
from gpuactors.core.values.memo import memoized, memoized_each
from gpuactors.core.values.model import (
    ClaimedDevice,
    DeviceKey,
    ResourceName,
    function_address,
    is_pci_address,
)
from gpuactors.core.values.slices import BlockKind, BlockReason, Offer, OfferedDevice
from gpuactors.core.values.status import Assessment, Reason

_GONE: Final = BlockReason(BlockKind.UNHEALTHY, str(Cause.GONE))
_NOT_SELECTED: Final = BlockReason(BlockKind.UNHEALTHY, str(Cause.NOT_SELECTED))

_NO_ATTRIBUTES: Final[Mapping[str, int | str | None]] = {}

_BOUND_BY_CLAIMS: Final = frozenset({Cause.NOT_BOUND, Cause.GROUP_NOT_VIABLE})
"""The causes that a prepare may remove itself: it binds the device and its companions to vfio."""

_PREPARED: Final = frozenset({ClaimState.PREPARED, ClaimState.VERIFYING, ClaimState.DRIFTED})
"""The states of a claim whose acts have bound its devices to vfio: on another driver these are Unhealthy."""


class _Inputs(Struct, frozen=True, gc=False):
    """The inputs of a device's offer and of its health."""

    key: DeviceKey
    pool: str
    device: Device | None
    """The device; None if it is not there, or no selector chooses it and no pod has it."""
    present: Device | None
    """The device, whatever the selectors choose; None if it is not there."""
    is_selected: bool
    assessment: Assessment | None
    claimed_as: str
    """The name in the slice by which a claim has it; empty if no claim does."""
    bind_blocker: Reason | None
    """The same as `Fitness.bind_blocker`."""
    is_placed: bool
    """True if it is in `Offered.placed`."""
    last: OfferedDevice | None
    """Its last offer, if it is not selected any more and a claim has it."""
    of_sets: Mapping[str, int | str | None]
    """The attributes by which a claim requests a set with the device (`kinds/sets.py`)."""
    fabric: str
    """The sign that the host runs an NVLink fabric, in words; empty without one (`exclusion.hosts_fabric`)."""


def offered(state: NodeState) -> NodeState:
    """Derive `state.offered`. Returns the same object if nothing changes."""
    gpus, index, before = state.gpus, state.index, state.offered
    if (
        gpus.claims.settings is None
        or not gpus.claims.loaded
        or not state.host.scanned
        or not state.kubelet.ledger.tried
    ):
        return state
    now = _offered(
        gpus.claims.settings,
        index.devices,
        index.names,
        index.present,
        state.assessments,
        gpus.reserved,
        gpus.fitness,
        _placed(state),
        {
            key: before.devices[key]
            for key in gpus.reserved
            if key in before.devices and key not in index.names
        },
        hosts_fabric(state),
        state.known_sets,
    )
    return state if now == before else replace(state, offered=now)


@memoized
def _offered(
    settings: ClaimSettings,
    devices: Mapping[DeviceKey, Device],
    selected: Mapping[DeviceKey, ResourceName],
    present: Mapping[DeviceKey, Device],
    assessments: Mapping[DeviceKey, Assessment],
    reserved: Mapping[DeviceKey, ClaimedDevice],
    fitness: Mapping[DeviceKey, Fitness],
    placed: frozenset[DeviceKey],
    last_offers: Mapping[DeviceKey, OfferedDevice],
    fabric: str,
    sets: KnownSets,
) -> Offered:
    """Offer each device that is selected, or that a claim has."""
    inputs = {
        key: _Inputs(
            key=key,
            pool=settings.pool,
            device=devices.get(key),
            present=present.get(key),
            is_selected=key in selected,
            assessment=assessments.get(key),
            claimed_as=reserved[key].device if key in reserved else "",
            bind_blocker=fitness[key].bind_blocker if key in fitness else None,
            is_placed=key in placed,
            last=last_offers.get(key),
            of_sets=set_attributes(key, sets.sets, sets.modules)
            if sets.sets or sets.modules
            else _NO_ATTRIBUTES,
            fabric=fabric,
        )
        for key in sorted(selected.keys() | reserved.keys())
    }
    offers_and_health = _offer_each(inputs)
    offers = {key: device for key, (device, _) in offers_and_health.items() if device is not None}
    health = sorted([health for _, health in offers_and_health.values()], key=attrgetter("device"))
    return Offered(
        placed, offers, Offer(settings.driver, settings.pool, tuple(offers.values())), tuple(health)
    )


@memoized_each
def _offer_each(inputs: _Inputs) -> tuple[OfferedDevice | None, DeviceHealth]:
    """Return the offer of one device, and its health; no offer if a claim has it and it was never offered."""
    device, assessment, offer = inputs.device, inputs.assessment, inputs.last
    if inputs.is_selected and device is not None and assessment is not None:
        # The scheduler knows by its name that it is allocated. NVIDIA's driver may have allocated it by another name.
        claimed = inputs.claimed_as == slice_name(inputs.key)
        offer = _of_card(kind_of(device).offer(device, claimed=claimed), device)
        offer = with_attributes(offer, inputs.of_sets)
        if not claimed:
            offer = replace(offer, blocked=_blocked(device, assessment, inputs.bind_blocker, inputs.fabric))
    elif offer is not None:
        # A pool never lacks an allocated device: it stays until its claim ends.
        offer = replace(offer, claimed=True, blocked=_GONE if inputs.present is None else _NOT_SELECTED)
    return offer, _health(inputs)


def _of_card(offer: OfferedDevice, device: Device) -> OfferedDevice:
    """Add the counter set of the device's card, by the name that AMD's driver gives it; none if the card has no parts,
    or is no PCI function."""
    card = device.ancestors[-1] if device.ancestors else device.key
    if not (device.ancestors or device.parts) or not is_pci_address(card):
        return offer
    name = f"pf-{card.replace(':', '-').replace('.', '-')}-counter-set"
    return replace(offer, counter_set=name, is_whole=not device.ancestors)


def _placed(state: NodeState) -> frozenset[DeviceKey]:
    """Return the value of `Offered.placed`. A device is inspected at once after an act has bound it, and earlier
    inspections are not used; a device that is inspected again later stays included."""
    single, before = state.host.inspections.single, state.offered.placed
    return frozenset(
        gpu.key
        for entry in state.gpus.claims.entries.values()
        if entry.state in _PREPARED
        for gpu in gpus_of(entry).gpus
        if gpu.key in before or (r := single.get(function_address(gpu.key))) is None or r.outstanding is None
    )


def why_blocked(state: NodeState, key: DeviceKey) -> str:
    """Return why the device must not be given to a claim now, as a sentence; empty if it may, or is not offered."""
    device, assessment = state.index.devices.get(key), state.assessments.get(key)
    if device is None or assessment is None:
        left = not_given(state, [slice_name(key)]) if key in state.offered.devices else None
        return left.message if left is not None else ""
    if assessment.holding is not None:
        return assessment.holding.reason.message
    if (fault := _fault(device, assessment.blocker, hosts_fabric(state))) is not None:
        return fault.message
    fitness = state.gpus.fitness.get(key)
    return fitness.bind_blocker.message if fitness is not None and fitness.bind_blocker is not None else ""


def _blocked(
    device: Device, assessment: Assessment, bind_blocker: Reason | None, fabric: str
) -> BlockReason | None:
    if assessment.holding is not None:
        cause = assessment.holding.reason.cause
        # Kubelet lists the pod half a second after its allocation: with one cause the slice changes once.
        return BlockReason(BlockKind.HELD, str(Cause.ALLOCATED if cause is Cause.JUST_ALLOCATED else cause))
    if (fault := _fault(device, assessment.blocker, fabric)) is not None:
        return BlockReason(BlockKind.UNHEALTHY, str(fault.cause))
    if bind_blocker is None:
        return None
    held = bind_blocker.cause is Cause.IN_USE_ON_HOST
    return BlockReason(BlockKind.HELD if held else BlockKind.UNHEALTHY, str(bind_blocker.cause))


def _fault(device: Device, blocker: Reason | None, fabric: str, *, is_placed: bool = False) -> Reason | None:
    """Return why no claim could use the device, whoever has it now; None if one could. `blocker`: why no virtual
    machine could. `is_placed` is true if a claim has bound it, and does not bind it again while its virtual machine
    runs."""
    kind = kind_of(device)
    blocker = kind.never_given(device) or blocker
    ignored = OF_A_PART if is_placed else _BOUND_BY_CLAIMS if Act.BIND in kind.acts else frozenset()
    if blocker is not None and blocker.cause not in ignored:
        return blocker
    return kind.not_viable(device, kind.to_bind(device)) or kind.of_the_hosts_fabric(device, fabric)


def _health(inputs: _Inputs) -> DeviceHealth:
    """Return the health that kubelet shows in the status of the pod that has the device. A device in use is healthy."""
    pool, name = inputs.pool, slice_name(inputs.key)
    if inputs.present is None:
        return DeviceHealth(pool, name, DraHealth.UNHEALTHY, gone(inputs.key).message)
    # Without an assessment a claim has it, and no selector chooses it any more.
    seen = inputs.assessment
    blocker = seen.blocker if seen is not None else blocker_of(inputs.present, None, None)
    fault = _fault(inputs.present, blocker, inputs.fabric, is_placed=inputs.is_placed)
    if fault is not None:
        return DeviceHealth(pool, name, DraHealth.UNHEALTHY, fault.message)
    return DeviceHealth(pool, name, DraHealth.HEALTHY, "")
