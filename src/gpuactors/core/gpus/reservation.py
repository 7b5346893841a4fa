"""The reservation of a claim of GPUs: each device with its companions, and the driver that each function is returned
to. Also the claims' devices by their key, for the device plugin and kubelet's list.

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
from gpuactors.core.kinds.kind import Act
from gpuactors.core.kinds.table import key_of, kind_of, slice_name
from gpuactors.core.state import NodeState
from gpuactors.core.state.claims import ClaimedGpu, ClaimRecord, ClaimSettings, gpus_of
from gpuactors.core.state.gpus import Gpus, OfClaim, OfClaims
from gpuactors.core.values import prebound
from gpuactors.core.values.claim import ClaimName, ClaimUid, OriginalDriver
from gpuactors.core.values.claim_states import ENDED, OWNING, ClaimState
from gpuactors.core.values.memo import memoized, memoized_each
from gpuactors.core.values.model import ClaimedDevice, DeviceKey, PciFunction, function_address


def with_whole_groups(state: NodeState, gpus: Sequence[ClaimedGpu]) -> tuple[ClaimedGpu, ...]:
    """Give all devices of one IOMMU group the functions of each: one act binds them."""
    group_of = {gpu.key: state.index.group_of.get(gpu.key, gpu.key) for gpu in gpus}

    def whole(gpu: ClaimedGpu) -> tuple[OriginalDriver, ...]:
        same = (g for g in gpus if group_of[g.key] == group_of[gpu.key])
        functions = {f.address: f for g in same for f in g.functions}
        return tuple(functions[address] for address in sorted(functions))

    return tuple(replace(gpu, functions=whole(gpu)) for gpu in gpus)


def claimed_gpu(state: NodeState, device: DeviceKey) -> ClaimedGpu:
    """Return the device as a claim that reserves it now would have it."""
    settings, original_drivers = state.gpus.settings, state.gpus.original_drivers
    functions = with_companions(state, device)
    decided = {
        f.address: prebound.decide(
            f.address,
            original_drivers.get(f.address),
            operator=settings.operator,
            hints=settings.hints,
            function=f,
        )
        for f in functions
    }
    own, present = decided.get(function_address(device)), state.index.present.get(device)
    as_it_is = present if present is not None and Act.BIND not in kind_of(present).acts else None
    return ClaimedGpu(
        device,
        tuple(
            _original_driver(f, original_drivers.get(f.address), keep_on_vfio=decided[f.address].is_prebound)
            for f in functions
        ),
        keep_on_vfio=own.sentence if own is not None and own.is_prebound else "",
        model=as_it_is.model if as_it_is is not None else "",
        group=as_it_is.group if as_it_is is not None else None,
    )


def _original_driver(
    function: PciFunction, seen: OriginalDriver | None, *, keep_on_vfio: bool
) -> OriginalDriver:
    """Return the driver that an act is to return a function to: a vfio driver, if it is to be kept on one."""
    return replace(seen or prebound.found_on(function), vfio=keep_on_vfio)


def with_reserved(before: Gpus, gpus: Gpus) -> Gpus:
    """Derive the effects of the claims on others: `of_claims`, `reserved`, `admin`, `ended` and `own`. Returns the same
    object if their inputs are those of `before`, the value after the last step."""
    claims = gpus.claims
    if (settings := claims.settings) is None:
        return gpus
    of_claims = _of_claims(settings, claims.entries)
    inputs = (of_claims, gpus.returned, gpus.owed, gpus.reserved)
    if inputs == (gpus.of_claims, before.returned, before.owed, before.reserved):
        return gpus
    gpus, by_claim = replace(gpus, of_claims=of_claims), of_claims.by_claim
    returned = {a: r.claim for a, r in gpus.returned.items()}
    returned |= {a: o.claim for a, o in gpus.owed.items() if o.act}
    reserved = {a: _claimed(settings, slice_name(a), claim) for a, claim in returned.items()}
    reserved |= {address: device for of_claim in by_claim.values() for address, device in of_claim.reserved}
    over_names = {str(of_claim.name) for of_claim in by_claim.values() if of_claim.is_over}
    # Kubelet lists an ended claim a little longer.
    listed = (access for access in gpus.admin if access[0][1] in over_names)
    admin = frozenset(chain(listed, *(of_claim.admin for of_claim in by_claim.values())))
    owning_names = (
        {str(of_claim.name) for of_claim in by_claim.values() if of_claim.owns} if over_names else set[str]()
    )
    ended = frozenset((settings.driver, name) for name in over_names - owning_names)
    own = own_claims(claims)
    if (reserved, admin, ended, own) == (gpus.reserved, gpus.admin, gpus.ended, gpus.own):
        return gpus
    return replace(gpus, reserved=reserved, admin=admin, ended=ended, own=own)


@memoized
def _of_claims(settings: ClaimSettings, entries: Mapping[ClaimUid, ClaimRecord]) -> OfClaims:
    by_claim = _of_each({uid: (settings, entry) for uid, entry in entries.items()})
    return OfClaims(by_claim, Counter(chain.from_iterable(of_claim.nodes for of_claim in by_claim.values())))


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
    """Return the allocated device name: NVIDIA's driver's for a device that it had allocated."""
    own = slice_name(gpu.key)
    nvidias = [device.device for device in entry.given]
    return own if not nvidias or own in nvidias else nvidias[0]


def _with_admin_access(entry: ClaimRecord) -> set[DeviceKey]:
    results = entry.claim.results or () if entry.claim is not None else ()
    named = {address for r in results if (address := key_of(r.device)) is not None}
    return named - {gpu.key for gpu in gpus_of(entry).gpus}
