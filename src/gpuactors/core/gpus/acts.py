"""The acts on GPUs: binding them to a vfio driver for a claim, and returning them. Also the original drivers, the owed
returns and the check of what could be bound: `returns.py`, `fitness.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import final

from msgspec.structs import replace

from gpuactors.core.claims.driver import DeviceAct
from gpuactors.core.events.claims import ActDone, ActFailed, CheckpointRead
from gpuactors.core.gpus import fitness, placement, returns
from gpuactors.core.gpus.exclusion import has_another_owner, with_companions
from gpuactors.core.gpus.reads import read_again, with_left_out
from gpuactors.core.state import NodeState
from gpuactors.core.state.claims import (
    ClaimedGpu,
    ClaimRecord,
    OwedReturn,
    StoredEntry,
    gpus_of,
    with_bound,
    with_gpus,
)
from gpuactors.core.state.gpus import Gpus
from gpuactors.core.values import prebound
from gpuactors.core.values.claim import ActFault, FitnessCheck, FitnessFinding, OriginalDriver, Target
from gpuactors.core.values.claim_states import ClaimState
from gpuactors.core.values.effects import Effect
from gpuactors.core.values.model import DeviceKey, function_address
from gpuactors.core.values.prebound import OperatorsList
from gpuactors.core.values.status import Reason

Stepped = tuple[NodeState, list[Effect]]


@final
class GpuActs:
    """The worker's acts on PCI functions."""

    def restored(self, state: NodeState, event: CheckpointRead) -> tuple[NodeState, Sequence[StoredEntry]]:
        original_drivers = {f.address: f for f in event.original_drivers}
        owed = {o.gpu.key: o for o in event.owed}
        claimed = [gpu for e in event.entries for gpu in gpus_of(e).gpus] + [o.gpu for o in event.owed]
        # An older daemon, which recorded no presence, also kept the drivers of functions that it had returned.
        acted = {f.address for gpu in claimed for f in gpu.functions} | {
            a for a in original_drivers if original_drivers[a].presence
        }
        acted &= original_drivers.keys()
        unseen = dict.fromkeys(acted, returns.UNSEEN)
        gpus = replace(
            state.gpus, original_drivers=original_drivers, acted=frozenset(acted), settled=unseen, owed=owed
        )
        operator, addresses = gpus.settings.operator, [function_address(gpu.key) for gpu in claimed]
        return with_left_out(replace(state, gpus=gpus), addresses), [
            with_gpus(stored, [_with_operators_list(operator, gpu) for gpu in gpus_of(stored).gpus])
            for stored in event.entries
        ]

    def kept(self, state: NodeState) -> tuple[tuple[OriginalDriver, ...], tuple[OwedReturn, ...]]:
        gpus = state.gpus
        original_drivers = tuple(f for a, f in sorted(gpus.original_drivers.items()) if a in gpus.acted)
        return original_drivers, tuple(owed for _, owed in sorted(gpus.owed.items()))

    def device_acts(self, state: NodeState, acting: Iterable[ClaimRecord]) -> Mapping[DeviceKey, DeviceAct]:
        return returns.owed_acts(state.gpus) | {
            g.key: _act_of(state.gpus, e, g) for e in acting for g in gpus_of(e).gpus if g.key in e.acts
        }

    def fitness_check(self, state: NodeState) -> FitnessCheck | None:
        return state.gpus.fitness_check

    def in_place(self, state: NodeState, device: DeviceKey) -> bool:
        present = state.index.present.get(device)
        functions = with_companions(state, device)
        return present is not None and present.has_backing and all(f.vfio_bound for f in functions)

    def drifted(self, before: NodeState, state: NodeState) -> Sequence[tuple[ClaimRecord, Reason]]:
        return placement.drifted(before, state)

    def acted(
        self, state: NodeState, entry: ClaimRecord, event: ActDone, at: float
    ) -> tuple[NodeState, ClaimRecord, list[Effect]]:
        """Request inspections of each function that the act has bound. A returned device was last seen on vfio or in
        use, and has no owner any more: it is not offered before both are read again."""
        state, lines = _with_finding(state, entry, event.number, None, "", at)
        is_over = entry.state is ClaimState.RELEASING
        gpus = gpus_of(entry).gpus if is_over else ()
        # An act that found a function on vfio does not know that an earlier one took it from nvidia-persistenced.
        persistent = {a for a, b in gpus_of(entry).bound.items() if b.persistence}
        bound = [replace(b, persistence=b.persistence or b.address in persistent) for b in event.bound]
        return (
            read_again(state, entry.name, gpus, event, returned=is_over),
            with_bound(entry, bound),
            lines,
        )

    def failed(
        self, state: NodeState, entry: ClaimRecord, event: ActFailed, at: float
    ) -> tuple[NodeState, ClaimRecord, list[Effect]]:
        """Keep what a failed bind has moved: also a function that was plugged in since the reservation is returned."""
        if entry.state not in (ClaimState.BINDING, ClaimState.STOPPED):
            return state, entry, []
        if event.moved:
            state = replace(state, gpus=returns.half_done(state, event.moved))
        state, lines = _with_finding(state, entry, event.number, event.fault, event.reason, at)
        return state, with_bound(entry, event.moved), lines

    def owes(self, state: NodeState, entry: ClaimRecord, event: ActFailed, at: float) -> Stepped | None:
        if event.fault is not ActFault.NO_DRIVER:
            return None
        gpus = returns.owed_by(state.gpus, entry, event.number, event.reason, at)
        new = [owed for address, owed in gpus.owed.items() if address not in state.gpus.owed]
        lines: list[Effect] = [returns.log_owed(owed, owed.reason) for owed in new]
        return replace(state, gpus=gpus), lines

    def other_act_over(self, state: NodeState, event: ActDone | ActFailed, at: float) -> Stepped:
        gpus = state.gpus
        if (address := returns.device_returned_by(gpus, event.number)) is None:
            return state, []
        owed = gpus.owed[address]
        if isinstance(event, ActDone):
            state = read_again(state, owed.claim, (owed.gpu,), event, returned=True)
            return replace(state, gpus=returns.over(state.gpus, address)), [returns.log_done(owed)]
        if event.fault is ActFault.GONE:
            return replace(state, gpus=returns.over(gpus, address)), []
        return replace(state, gpus=returns.put_off(gpus, address, at, event.reason)), [
            returns.log_owed(owed, event.reason, is_repeated=event.reason == owed.reason)
        ]

    def due(self, state: NodeState, at: float) -> Stepped:
        """Begin each owed return that is due. It is put off while anything is not on disk, or the device has an
        owner."""
        for address, owed in state.gpus.owed.items():
            if owed.retry_at > at:
                continue
            claims = state.gpus.claims
            stub = ClaimRecord(owed.claim, ClaimState.TOMBSTONE, 0)
            if (
                not (claims.loaded and state.host.scanned and state.kubelet.ledger.tried)
                or claims.checkpoint > claims.durable
                or has_another_owner(state, stub, address) is not None
            ):
                state = replace(state, gpus=returns.put_off(state.gpus, address, at))
            else:
                state = replace(state, gpus=returns.begun(state.gpus, address))
        return replace(state, gpus=fitness.due(state.gpus, at)), []

    def deadline(self, state: NodeState) -> float:
        returned_at = min((owed.retry_at for owed in state.gpus.owed.values()), default=math.inf)
        return min(returned_at, state.gpus.check_at)


def _with_finding(
    state: NodeState, entry: ClaimRecord, number: int, fault: ActFault | None, reason: str, at: float
) -> Stepped:
    """Record for later requests why a bind of a claim's devices failed, or that it succeeded."""
    if entry.state is not ClaimState.BINDING:
        return state, []
    devices = (g.key for g in gpus_of(entry).gpus if entry.acts.get(g.key) == number)
    findings = [FitnessFinding(address, fault, reason) for address in devices]
    gpus, lines = fitness.with_findings(state.gpus, findings, at)
    return replace(state, gpus=gpus), lines


def _act_of(gpus: Gpus, entry: ClaimRecord, gpu: ClaimedGpu) -> DeviceAct:
    number = entry.acts[gpu.key]
    beside = tuple(g.key for g in gpus_of(entry).gpus if g.functions == gpu.functions and g.key != gpu.key)
    if entry.state is ClaimState.RELEASING:
        functions = returns.with_acted_functions(gpus, gpu).functions
        return DeviceAct(
            number, Target.ORIGINAL_DRIVER, tuple(returns.as_returned(entry, f) for f in functions), beside
        )
    return DeviceAct(number, Target.VFIO, gpu.functions, beside)


def _with_operators_list(operator: OperatorsList, gpu: ClaimedGpu) -> ClaimedGpu:
    """Keep the functions on vfio that the operator's list names now, also of a claim that was prepared before."""
    functions = tuple(replace(f, vfio=f.vfio or f.address in operator) for f in gpu.functions)
    address = function_address(gpu.key)
    if gpu.keep_on_vfio or address not in operator:
        return replace(gpu, functions=functions)
    decided = prebound.decide(address, None, operator=operator)
    return replace(gpu, functions=functions, keep_on_vfio=decided.sentence)
