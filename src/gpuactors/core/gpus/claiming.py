"""Which GPUs a claim gets, and whether it still has them: `Claiming` of `claims/driver.py`. Each answer comes from the
module that decides it: `config.py`, `exclusion.py`, `placement.py`, `reservation.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, final

from msgspec.structs import replace

from gpuactors.core.claims.opaque_config import ConfigFault
from gpuactors.core.gpus import config, exclusion, fitness, placement, returns
from gpuactors.core.gpus.exclusion import (
    allocated_devices,
    exclusive_devices,
    has_another_owner,
    not_given,
    of_the_host,
)
from gpuactors.core.gpus.reads import keys_of, looked_for, read_at_once, seen_again, with_reads
from gpuactors.core.gpus.reservation import claimed_gpu, with_reserved, with_whole_groups
from gpuactors.core.kinds.table import key_of
from gpuactors.core.state import NodeState
from gpuactors.core.state.claims import FILES, ClaimRecord, gpus_of, one_of_each_group, with_gpus
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.claim import Claim
from gpuactors.core.values.claim_states import OWNING, ClaimState
from gpuactors.core.values.model import DeviceKey, InspectedKey
from gpuactors.core.values.status import Conflict, Reason


@final
class GpuClaiming:
    """Claims of GPUs."""

    def on_state_changed(self, before: NodeState, state: NodeState) -> NodeState:
        if returns.UNSEEN in state.gpus.settled.values():
            state = read_at_once(state)
        gpus = looked_for(state, returns.on_state_changed(before, state))
        gpus = with_reserved(before.gpus, seen_again(state, gpus))
        return replace(state, gpus=fitness.on_state_changed(before, state, gpus))

    def validate(self, state: NodeState, claim: Claim) -> Reason | None:
        configs = config.chosen(claim)
        if isinstance(configs, ConfigFault):
            return Reason(Cause.INVALID_CONFIGURATION, configs.sentence)
        if not state.host.scanned:
            return None
        entry = state.gpus.claims.entries.get(claim.name.uid)
        own = [gpu.key for gpu in gpus_of(entry).gpus] if entry is not None else ()
        return not_given(state, allocated_devices(claim), own)

    def with_claim(self, entry: ClaimRecord, claim: Claim) -> ClaimRecord:
        return replace(entry, claim=claim)

    def found_again(self, state: NodeState, entry: ClaimRecord, claim: Claim) -> ClaimRecord:
        """Keep only the devices that the claim has for itself: its files name those with admin access as well. One that
        no act binds is taken as it is now, as no act sees its group."""
        own = _own_addresses(claim)
        gpus = [g if g.functions else claimed_gpu(state, g.key) for g in gpus_of(entry).gpus if g.key in own]
        return with_gpus(replace(entry, claim=claim), gpus)

    def request_reads(self, state: NodeState, entry: ClaimRecord, at: float) -> tuple[NodeState, ClaimRecord]:
        entry = replace(entry, since=state.host.inspections.last, since_at=at)
        if entry.state in OWNING:  # also functions that were missing at their last inspection
            functions = [f for gpu in gpus_of(entry).gpus for f in gpu.functions]
            return with_reads(state, [gpu.key for gpu in gpus_of(entry).gpus], functions, at), entry
        return with_reads(state, _own_addresses(entry.claim), (), at), entry

    def conflict(self, state: NodeState, entry: ClaimRecord) -> Conflict | None:
        return exclusion.conflict(state, entry)

    def reserve(self, state: NodeState, entry: ClaimRecord) -> tuple[NodeState, ClaimRecord]:
        """Reserve the devices; the functions' original drivers are in the same checkpoint."""
        own = with_whole_groups(state, [claimed_gpu(state, a) for a in _own_addresses(entry.claim)])
        functions = {f.address for gpu in own for f in gpu.functions}
        gpus = returns.without_owed(state.gpus, functions)
        return replace(state, gpus=replace(gpus, acted=gpus.acted | functions)), with_gpus(entry, own)

    def binding(self, entry: ClaimRecord) -> Sequence[str]:
        return [str(gpu.key) for gpu in one_of_each_group(gpus_of(entry).gpus) if gpu.functions]

    def unmet_prerequisite(self, state: NodeState, entry: ClaimRecord) -> Conflict | None:
        # The worker carries out all acts on GPUs.
        return None

    def undoing(self, state: NodeState, entry: ClaimRecord) -> Sequence[str]:
        """Remove the files, and return each device that is to be returned and has no other owner."""
        return [
            FILES,
            *(
                str(g.key)
                for g in one_of_each_group(gpus_of(entry).gpus)
                if returns.is_to_be_returned(state.gpus, g) and not has_another_owner(state, entry, g.key)
            ),
        ]

    def is_seen(self, state: NodeState, entry: ClaimRecord) -> bool:
        return placement.is_seen(state, entry)

    def drift(self, state: NodeState, entry: ClaimRecord) -> Reason | None:
        return placement.drift(state, entry)

    def unusable(self, state: NodeState, entry: ClaimRecord) -> Reason | None:
        """A function of the host may have come into the group. A process that has the group open keeps the host's
        drivers from it (drivers/iommu/iommu.c, iommu_device_use_default_domain), so no running container has it."""
        keys = [gpu.key for gpu in gpus_of(entry).gpus]
        devices = (d for key in keys if (d := state.index.present.get(key)) is not None)
        return next((why for d in devices if (why := of_the_host(state, d, keys)) is not None), None)


_WAITS_FOR_READS: Final = frozenset({ClaimState.WAITING, ClaimState.VERIFYING, ClaimState.DRIFTED})
"""The states of a claim that goes on when its devices have been read."""


def inspections_waited_for(state: NodeState) -> Iterator[InspectedKey]:
    """Yield what is inspected of the devices that claims have, or are to get, when these have been read."""
    for entry in state.gpus.claims.entries.values():
        if entry.state in _WAITS_FOR_READS:
            devices = {*_own_addresses(entry.claim), *(gpu.key for gpu in gpus_of(entry).gpus)}
            yield from keys_of(state, devices)


def _own_addresses(claim: Claim | None) -> list[DeviceKey]:
    """Return the keys of the devices that a claim is to have for itself; none before the claim has been read."""
    names = exclusive_devices(claim) if claim is not None else ()
    return [address for name in names if (address := key_of(name)) is not None]
