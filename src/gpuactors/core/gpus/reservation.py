"""The reservation of a claim of GPUs: each device with its companions, and the driver that each function is returned
to. And the other direction: whose a device is, for the device plugin and kubelet's list.

Must not decide who may have a device: that is `exclusion.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from gpuactors.core.claims.strangers import own_claims
from gpuactors.core.gpus.exclusion import with_companions
from gpuactors.core.ledger.identity import claimed_address
from gpuactors.core.state import NodeState
from gpuactors.core.state.claims import ClaimedGpu, Entry
from gpuactors.core.state.gpus import Gpus
from gpuactors.core.values import prebound
from gpuactors.core.values.claim import OriginalDriver
from gpuactors.core.values.claim_states import OWNING, ClaimState
from gpuactors.core.values.model import AdminAccess, ClaimedDevice, PciAddress, PciFunction
from gpuactors.core.values.offered_gpu import device_name
from gpuactors.core.values.remade import same_if_equal


def with_whole_groups(state: NodeState, gpus: Sequence[ClaimedGpu]) -> tuple[ClaimedGpu, ...]:
    """Devices of one IOMMU group have the same functions: one act binds them."""
    known = state.index.known.group_of
    group_of = {gpu.address: known.get(gpu.address, gpu.address) for gpu in gpus}

    def whole(gpu: ClaimedGpu) -> tuple[OriginalDriver, ...]:
        same = (g for g in gpus if group_of[g.address] == group_of[gpu.address])
        functions = {f.address: f for g in same for f in g.functions}
        return tuple(functions[address] for address in sorted(functions))

    return tuple(replace(gpu, functions=whole(gpu)) for gpu in gpus)


def claimed_gpu(state: NodeState, address: PciAddress) -> ClaimedGpu:
    """The device as it is reserved now."""
    settings, known = state.gpus.settings, state.gpus.original_drivers
    functions = with_companions(state, address)
    decided = {
        f.address: prebound.decide(
            f.address, known.get(f.address), operator=settings.operator, hints=settings.hints, function=f
        )
        for f in functions
    }
    return ClaimedGpu(
        address,
        tuple(_original_driver(known, f, keep_on_vfio=decided[f.address].is_prebound) for f in functions),
        keep_on_vfio=decided[address].sentence if decided[address].is_prebound else "",
    )


def _original_driver(
    known: Mapping[PciAddress, OriginalDriver], function: PciFunction, *, keep_on_vfio: bool
) -> OriginalDriver:
    """The driver that an act is to return it to. A device that the operator declared as pre-bound is treated as first
    seen on vfio."""
    return replace(known.get(function.address, prebound.found_on(function)), vfio=keep_on_vfio)


def with_reserved(before: Gpus, gpus: Gpus) -> Gpus:
    """`gpus` with the devices that belong to claims; the same object while these are the same. `before`: those of the
    step before, which have them."""
    claims = gpus.claims
    if (settings := claims.settings) is None:
        return gpus
    if (
        claims.entries is before.claims.entries
        and gpus.returned is before.returned
        and gpus.owed is before.owed
        and gpus.reserved is before.reserved
    ):
        return gpus
    owning = [entry for entry in claims.entries.values() if entry.state in OWNING]
    owners = {a: (device_name(a), r.claim) for a, r in gpus.returned.items()}
    owners |= {a: (device_name(a), o.claim) for a, o in gpus.owed.items() if o.act}
    owners |= {gpu.address: (_device_name(entry, gpu), entry.name) for entry in owning for gpu in entry.gpus}
    reserved = {
        a: ClaimedDevice(settings.driver, settings.pool, device, str(name), None)
        for a, (device, name) in owners.items()
    }
    admin = frozenset(
        ((settings.driver, str(entry.name)), address)
        for entry in owning
        for address in _with_admin_access(entry)
    ) | _still_listed(gpus)
    ended = frozenset(
        (settings.driver, str(e.name)) for e in claims.entries.values() if e.state is ClaimState.TOMBSTONE
    ) - {(settings.driver, str(e.name)) for e in owning}
    own = own_claims(claims)
    if (reserved, admin, ended, own) == (gpus.reserved, gpus.admin, gpus.ended, gpus.own):
        return gpus
    return replace(
        gpus,
        reserved=same_if_equal(gpus.reserved, reserved),
        admin=admin,
        ended=ended,
        own=same_if_equal(gpus.own, own),
    )


def _device_name(entry: Entry, gpu: ClaimedGpu) -> str:
    """By which the scheduler knows that it is given away: another one than ours where NVIDIA's driver had it."""
    own = device_name(gpu.address)
    theirs = [device.device for device in entry.given]
    return own if not theirs or own in theirs else theirs[0]


def _still_listed(gpus: Gpus) -> frozenset[AdminAccess]:
    """Admin access that has ended: kubelet lists it a little longer."""
    ended = {str(e.name) for e in gpus.claims.entries.values() if e.state is ClaimState.TOMBSTONE}
    return frozenset(access for access in gpus.admin if access[0][1] in ended)


def _with_admin_access(entry: Entry) -> set[PciAddress]:
    results = entry.claim.results or () if entry.claim is not None else ()
    named = {address for r in results if (address := claimed_address(r.device)) is not None}
    return named - {gpu.address for gpu in entry.gpus}
