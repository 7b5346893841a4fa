"""The reservation of a claim of GPUs: each device with its companions, and the driver that each function is returned
to. And the other direction: whose a device is, for the device plugin and kubelet's list.

Must not decide who may have a device: that is `exclusion.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain

from msgspec.structs import replace

from gpuactors.core.claims.strangers import own_claims
from gpuactors.core.gpus.exclusion import with_companions
from gpuactors.core.gpus.placement import named_nodes
from gpuactors.core.kinds.table import key_of, slice_name
from gpuactors.core.state import NodeState
from gpuactors.core.state.claims import ClaimedGpu, ClaimRecord, ClaimSettings, gpus_of
from gpuactors.core.state.gpus import Gpus, OfClaim, OfClaims
from gpuactors.core.values import prebound
from gpuactors.core.values.claim import ClaimName, ClaimUid, OriginalDriver
from gpuactors.core.values.claim_states import ENDED, OWNING, ClaimState
from gpuactors.core.values.memo import memoized, memoized_each
from gpuactors.core.values.model import ClaimedDevice, DeviceKey, PciFunction, function_address


def with_whole_groups(state: NodeState, gpus: Sequence[ClaimedGpu]) -> tuple[ClaimedGpu, ...]:
    """Devices of one IOMMU group have the same functions: one act binds them."""
    known = state.index.group_of
    group_of = {gpu.key: known.get(gpu.key, gpu.key) for gpu in gpus}

    def whole(gpu: ClaimedGpu) -> tuple[OriginalDriver, ...]:
        same = (g for g in gpus if group_of[g.key] == group_of[gpu.key])
        functions = {f.address: f for g in same for f in g.functions}
        return tuple(functions[address] for address in sorted(functions))

    return tuple(replace(gpu, functions=whole(gpu)) for gpu in gpus)


def claimed_gpu(state: NodeState, device: DeviceKey) -> ClaimedGpu:
    """The device as it is reserved now."""
    settings, known = state.gpus.settings, state.gpus.original_drivers
    functions = with_companions(state, device)
    decided = {
        f.address: prebound.decide(
            f.address, known.get(f.address), operator=settings.operator, hints=settings.hints, function=f
        )
        for f in functions
    }
    own = decided.get(function_address(device))
    return ClaimedGpu(
        device,
        tuple(
            _original_driver(f, known.get(f.address), keep_on_vfio=decided[f.address].is_prebound)
            for f in functions
        ),
        keep_on_vfio=own.sentence if own is not None and own.is_prebound else "",
    )


def _original_driver(
    function: PciFunction, known: OriginalDriver | None, *, keep_on_vfio: bool
) -> OriginalDriver:
    """The driver that an act is to return it to. A device that the operator declared as pre-bound is treated as first
    seen on vfio."""
    return replace(known or prebound.found_on(function), vfio=keep_on_vfio)


def with_reserved(before: Gpus, gpus: Gpus) -> Gpus:
    """`gpus` with the devices that belong to claims; the same object while these are the same. `before`: those of the
    step before, which have them."""
    claims = gpus.claims
    if (settings := claims.settings) is None:
        return gpus
    of_claims = _of_claims(settings, claims.entries)
    inputs = (of_claims, gpus.returned, gpus.owed, gpus.reserved)
    if inputs == (gpus.of_claims, before.returned, before.owed, before.reserved):
        return gpus
    gpus, of = replace(gpus, of_claims=of_claims), of_claims.of
    returned = {a: r.claim for a, r in gpus.returned.items()}
    returned |= {a: o.claim for a, o in gpus.owed.items() if o.act}
    reserved = {a: _claimed(settings, slice_name(a), claim) for a, claim in returned.items()}
    reserved |= {address: device for of_it in of.values() for address, device in of_it.reserved}
    over = {str(of_it.name) for of_it in of.values() if of_it.is_over}
    # Kubelet lists one that has ended a little longer.
    listed = (access for access in gpus.admin if access[0][1] in over)
    admin = frozenset(chain(listed, *(of_it.admin for of_it in of.values())))
    again = {str(of_it.name) for of_it in of.values() if of_it.owns} if over else set[str]()
    ended = frozenset((settings.driver, name) for name in over - again)
    own = own_claims(claims)
    if (reserved, admin, ended, own) == (gpus.reserved, gpus.admin, gpus.ended, gpus.own):
        return gpus
    return replace(gpus, reserved=reserved, admin=admin, ended=ended, own=own)


@memoized
def _of_claims(settings: ClaimSettings, entries: Mapping[ClaimUid, ClaimRecord]) -> OfClaims:
    of = _of_each({uid: (settings, entry) for uid, entry in entries.items()})
    return OfClaims(of, Counter(chain.from_iterable(of_claim.nodes for of_claim in of.values())))


@memoized_each
def _of_each(inputs: tuple[ClaimSettings, ClaimRecord]) -> OfClaim:
    settings, entry = inputs
    if entry.state not in OWNING:
        return OfClaim(
            entry.name, has_ended=entry.state in ENDED, is_over=entry.state is ClaimState.TOMBSTONE
        )
    name, admin = (settings.driver, str(entry.name)), sorted(_with_admin_access(entry))
    return OfClaim(
        entry.name,
        owns=True,
        reserved=tuple(
            (g.key, _claimed(settings, _device_name(entry, g), entry.name)) for g in gpus_of(entry).gpus
        ),
        unplaced=entry.unplaced,
        admin=tuple((name, address) for address in admin),
        nodes=named_nodes(entry),
    )


def _claimed(settings: ClaimSettings, device: str, claim: ClaimName) -> ClaimedDevice:
    return ClaimedDevice(settings.driver, settings.pool, device, str(claim), None)


def _device_name(entry: ClaimRecord, gpu: ClaimedGpu) -> str:
    """By which the scheduler knows that it is given away: another one than ours where NVIDIA's driver had it."""
    own = slice_name(gpu.key)
    theirs = [device.device for device in entry.given]
    return own if not theirs or own in theirs else theirs[0]


def _with_admin_access(entry: ClaimRecord) -> set[DeviceKey]:
    results = entry.claim.results or () if entry.claim is not None else ()
    named = {address for r in results if (address := key_of(r.device)) is not None}
    return named - {gpu.key for gpu in gpus_of(entry).gpus}
