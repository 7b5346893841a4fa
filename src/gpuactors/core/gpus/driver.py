"""The claims of GPUs: their devices are PCI functions, which acts bind to a vfio driver and return.

Answers the questions of `claims/driver.py`, each from the module that decides it: `config.py`, `exclusion.py`,
`placement.py`, `values/prebound.py`, `reservation.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, final

from msgspec.structs import replace

from gpuactors.core.claims.driver import ClaimDriver, DeviceAct
from gpuactors.core.claims.files import PlacedFile
from gpuactors.core.claims.opaque_config import ConfigFault
from gpuactors.core.events.claims import ActDone, ActFailed, CheckpointRead
from gpuactors.core.gpus import config, exclusion, fitness, placement, returns
from gpuactors.core.gpus.cdi import ClaimDevice
from gpuactors.core.gpus.config import VfioConfig
from gpuactors.core.gpus.exclusion import (
    allocated_devices,
    exclusive_devices,
    has_another_owner,
    not_given,
    with_companions,
)
from gpuactors.core.gpus.reservation import claimed_gpu, with_reserved, with_whole_groups
from gpuactors.core.host import inspections, schedule
from gpuactors.core.ledger.identity import claimed_address
from gpuactors.core.state import NodeState, with_inspections
from gpuactors.core.state.claims import (
    FILES,
    ClaimedGpu,
    ClaimRecord,
    Claims,
    OwedReturn,
    StoredEntry,
    gpus_of,
    one_of_each_group,
    with_gpus,
)
from gpuactors.core.state.gpus import Gpus, Returned
from gpuactors.core.values import prebound
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.claim import (
    ActFault,
    BoundFunction,
    Claim,
    ClaimName,
    ClaimsOf,
    DeviceHealth,
    FitnessCheck,
    FitnessFinding,
    OriginalDriver,
    Target,
)
from gpuactors.core.values.claim_states import OWNING, ClaimState
from gpuactors.core.values.effects import Effect
from gpuactors.core.values.model import DeviceKey, function_address
from gpuactors.core.values.prebound import OperatorsList
from gpuactors.core.values.slices import AnyOffer
from gpuactors.core.values.status import Conflict, Reason

Stepped = tuple[NodeState, list[Effect]]


@final
class GpuDriver:
    """The claims of GPUs."""

    @property
    def of(self) -> ClaimsOf:
        return ClaimsOf.GPUS

    def claims(self, state: NodeState) -> Claims:
        return state.gpus.claims

    def with_claims(self, state: NodeState, claims: Claims) -> NodeState:
        return _with(state, replace(state.gpus, claims=claims)) if claims is not state.gpus.claims else state

    def offered(self, state: NodeState) -> tuple[AnyOffer | None, tuple[DeviceHealth, ...]]:
        return state.offered.offer, state.offered.health

    def restored(self, state: NodeState, event: CheckpointRead) -> tuple[NodeState, Sequence[StoredEntry]]:
        known = {f.address: f for f in event.original_drivers}
        owed = {o.gpu.address: o for o in event.owed}
        having = [gpu for e in event.entries for gpu in gpus_of(e).gpus] + [o.gpu for o in event.owed]
        # An older daemon, which noted no presence, kept those as well that it had returned.
        acted = {f.address for gpu in having for f in gpu.functions} | {a for a in known if known[a].presence}
        acted &= known.keys()
        unseen = dict.fromkeys(acted, returns.UNSEEN)
        gpus = replace(state.gpus, original_drivers=known, acted=frozenset(acted), settled=unseen, owed=owed)
        operator = gpus.settings.operator
        return _with(state, gpus), [
            with_gpus(stored, [_with_operators_word(operator, gpu) for gpu in gpus_of(stored).gpus])
            for stored in event.entries
        ]

    def on_state_changed(self, before: NodeState, state: NodeState) -> NodeState:
        if returns.UNSEEN in state.gpus.settled.values():
            state = _read_at_once(state)
        state = _with(state, returns.on_state_changed(before, state))
        state = _with(state, with_reserved(before.gpus, _seen_again(state)))
        return _with(state, fitness.on_state_changed(before, state))

    def validate(self, state: NodeState, claim: Claim) -> Reason | None:
        found = config.chosen(claim)
        if isinstance(found, ConfigFault):
            return Reason(Cause.INVALID_CONFIGURATION, found.sentence)
        return not_given(state, allocated_devices(claim)) if state.host.scanned else None

    def with_claim(self, entry: ClaimRecord, claim: Claim) -> ClaimRecord:
        return replace(entry, claim=claim)

    def request_reads(self, state: NodeState, entry: ClaimRecord, at: float) -> tuple[NodeState, ClaimRecord]:
        entry = replace(entry, since=state.host.inspections.last)
        if entry.state in OWNING:  # also a function that was not there when it was last looked for
            functions = [f for gpu in gpus_of(entry).gpus for f in gpu.functions]
            return _with_reads(state, [gpu.address for gpu in gpus_of(entry).gpus], functions, at), entry
        return _with_reads(state, _own_addresses(entry.claim), (), at), entry

    def conflict(self, state: NodeState, entry: ClaimRecord) -> Conflict | None:
        return exclusion.conflict(state, entry)

    def reserved(self, state: NodeState, entry: ClaimRecord) -> tuple[NodeState, ClaimRecord]:
        """Their original drivers are in the same checkpoint."""
        own = with_whole_groups(state, [claimed_gpu(state, a) for a in _own_addresses(entry.claim)])
        functions = {f.address for gpu in own for f in gpu.functions}
        gpus = returns.without_owed(state.gpus, functions)
        return _with(state, replace(gpus, acted=gpus.acted | functions)), with_gpus(entry, own)

    def binding(self, entry: ClaimRecord) -> Sequence[str]:
        return [str(gpu.address) for gpu in one_of_each_group(gpus_of(entry).gpus)]

    def unmet_prerequisite(self, state: NodeState, entry: ClaimRecord) -> Conflict | None:
        # Their acts are all a worker's.
        return None

    def undoing(self, state: NodeState, entry: ClaimRecord) -> Sequence[str]:
        """The files are removed, and each device is returned that is to be, and that nobody else has."""
        return [
            FILES,
            *(
                str(g.address)
                for g in one_of_each_group(gpus_of(entry).gpus)
                if returns.is_to_be_returned(state.gpus, g) and not has_another_owner(state, entry, g.address)
            ),
        ]

    def acted(self, state: NodeState, entry: ClaimRecord, event: ActDone) -> NodeState:
        """Have each function that an act has bound inspected. A device that was returned was last seen on vfio, or in
        the use of its virtual machine, and belongs to nobody any more: it is not offered before both are read again."""
        is_over = entry.state is ClaimState.RELEASING
        return _read_again(state, entry.name, gpus_of(entry).gpus if is_over else (), event, returned=is_over)

    def hindered(
        self, state: NodeState, entry: ClaimRecord, event: ActDone | ActFailed, at: float
    ) -> Stepped:
        if entry.state is not ClaimState.BINDING:
            return state, []
        if isinstance(event, ActFailed) and event.moved:
            state = _with(state, returns.half_done(state, event.moved))
        fault, reason = (event.fault, event.reason) if isinstance(event, ActFailed) else (None, "")
        devices = (g.address for g in gpus_of(entry).gpus if entry.acts.get(g.address) == event.number)
        findings = [FitnessFinding(address, fault, reason) for address in devices]
        gpus, lines = fitness.with_findings(state.gpus, findings, at)
        return _with(state, gpus), lines

    def owes(self, state: NodeState, entry: ClaimRecord, event: ActFailed, at: float) -> Stepped | None:
        if event.fault is not ActFault.NO_DRIVER:
            return None
        gpus = returns.owed_by(state.gpus, entry, event.number, event.reason, at)
        new = [owed for address, owed in gpus.owed.items() if address not in state.gpus.owed]
        lines: list[Effect] = [returns.log_owed(owed, owed.reason) for owed in new]
        return _with(state, gpus), lines

    def other_act_over(self, state: NodeState, event: ActDone | ActFailed, at: float) -> Stepped:
        gpus = state.gpus
        if (address := returns.of_act(gpus, event.number)) is None:
            return state, []
        owed = gpus.owed[address]
        if isinstance(event, ActDone):
            state = _read_again(state, owed.claim, (owed.gpu,), event, returned=True)
            return _with(state, returns.over(state.gpus, address)), [returns.log_done(owed)]
        if event.fault is ActFault.GONE:
            return _with(state, returns.over(gpus, address)), []
        return _with(state, returns.put_off(gpus, address, at, event.reason)), [
            returns.log_owed(owed, event.reason, known=event.reason == owed.reason)
        ]

    def due(self, state: NodeState, at: float) -> Stepped:
        """A return that is owed is tried when all is on disk and nobody has the device."""
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
                state = _with(state, returns.put_off(state.gpus, address, at))
            else:
                state = _with(state, returns.begun(state.gpus, address))
        return _with(state, fitness.due(state.gpus, at)), []

    def deadline(self, state: NodeState) -> float:
        returned_at = min((owed.retry_at for owed in state.gpus.owed.values()), default=math.inf)
        return min(returned_at, state.gpus.check_at)

    def is_seen(self, state: NodeState, entry: ClaimRecord) -> bool:
        return placement.is_seen(state, entry)

    def drift(self, state: NodeState, entry: ClaimRecord) -> Reason | None:
        return placement.drift(state, entry)

    def drifted(self, before: NodeState, state: NodeState) -> Sequence[tuple[ClaimRecord, Reason]]:
        return placement.drifted(before, state)

    def may_write(self, state: NodeState, entry: ClaimRecord) -> bool:
        return placement.may_write(state, entry)

    def found_again(self, entry: ClaimRecord, claim: Claim) -> ClaimRecord:
        """Its files name devices with admin access as well."""
        own = _own_addresses(claim)
        return with_gpus(replace(entry, claim=claim), [g for g in gpus_of(entry).gpus if g.address in own])

    def in_place(self, state: NodeState, device: DeviceKey) -> bool:
        functions = with_companions(state, device)
        return bool(functions) and all(function.vfio_bound for function in functions)

    def device_acts(self, state: NodeState, acting: Iterable[ClaimRecord]) -> Mapping[DeviceKey, DeviceAct]:
        """Those of the returns that are owed, and of the claims."""
        return returns.owed_acts(state.gpus) | {
            g.address: _act_of(state.gpus, e, g)
            for e in acting
            for g in gpus_of(e).gpus
            if g.address in e.acts
        }

    def fitness_check(self, state: NodeState) -> FitnessCheck | None:
        return state.gpus.fitness_check

    def kept(self, state: NodeState) -> tuple[tuple[OriginalDriver, ...], tuple[OwedReturn, ...]]:
        gpus = state.gpus
        firsts = tuple(f for a, f in sorted(gpus.original_drivers.items()) if a in gpus.acted)
        return firsts, tuple(owed for _, owed in sorted(gpus.owed.items()))

    def devices(
        self, state: NodeState, entry: ClaimRecord, claim: Claim
    ) -> tuple[ClaimDevice, ...]:  # all is in the entry
        configs = config.chosen(claim)
        gpus = {gpu.address: gpu for gpu in gpus_of(entry).gpus}
        found = []
        for result in claim.results or ():
            chosen = VfioConfig() if isinstance(configs, ConfigFault) else configs[result.request]
            gpu = gpus.get(claimed_address(result.device) or DeviceKey(""))
            # With admin access there is no node: an open would make the group busy for whoever has it.
            functions = () if gpu is None or result.admin_access else _bound(entry, gpu)
            found.append(ClaimDevice(result, functions, chosen))
        return tuple(found)

    def directories(self, state: NodeState, entry: ClaimRecord) -> tuple[str, ...]:  # theirs are kubelet's
        return ()

    def placed(
        self, state: NodeState, entry: ClaimRecord
    ) -> tuple[PlacedFile, ...]:  # no container writes to theirs
        return ()


def _with(state: NodeState, gpus: Gpus) -> NodeState:
    return replace(state, gpus_part=gpus) if gpus is not state.gpus else state


GPUS: Final[ClaimDriver] = GpuDriver()


def _own_addresses(claim: Claim | None) -> list[DeviceKey]:
    """The devices that a claim is to have for itself."""
    names = exclusive_devices(claim) if claim is not None else ()
    return [address for name in names if (address := claimed_address(name)) is not None]


def _act_of(gpus: Gpus, entry: ClaimRecord, gpu: ClaimedGpu) -> DeviceAct:
    number = entry.acts[gpu.address]
    beside = tuple(
        g.address for g in gpus_of(entry).gpus if g.functions == gpu.functions and g.address != gpu.address
    )
    if entry.state is ClaimState.RELEASING:
        functions = returns.ours(gpus, gpu).functions
        return DeviceAct(
            number, Target.ORIGINAL_DRIVER, tuple(returns.as_returned(entry, f) for f in functions), beside
        )
    return DeviceAct(number, Target.VFIO, gpu.functions, beside)


def _with_operators_word(operator: OperatorsList, gpu: ClaimedGpu) -> ClaimedGpu:
    """Keep a device on vfio that the operator names now, also where its claim was prepared before."""
    functions = tuple(replace(f, vfio=f.vfio or f.address in operator) for f in gpu.functions)
    address = function_address(gpu.address)
    if gpu.keep_on_vfio or address not in operator:
        return replace(gpu, functions=functions)
    decided = prebound.decide(address, None, operator=operator)
    return replace(gpu, functions=functions, keep_on_vfio=decided.sentence)


def _read_at_once(state: NodeState) -> NodeState:
    """`state` with fresh inspections of what the checkpoint names: another daemon may have acted on it since the last
    ones."""
    gpus, seen, since = state.gpus, state.host.seen, state.host.inspections.last
    settled = {a: since if n == returns.UNSEEN else n for a, n in gpus.settled.items() if a in seen}
    wanted = inspections.ask_inspections(state.host.inspections, sorted(settled))
    return with_inspections(replace(state, gpus_part=replace(gpus, settled=settled)), wanted)


def _read_again(
    state: NodeState, claim: ClaimName, gpus: Iterable[ClaimedGpu], event: ActDone, *, returned: bool
) -> NodeState:
    """`state` after an act: its functions are inspected again, and `gpus` are not offered before; nor before their
    groups are polled, if these were in use when they last were."""
    used = {g.address: group for g in gpus if (group := _group_in_use(state, g.address)) is not None}
    changed = sorted({*(b.address for b in event.bound), *map(function_address, used)})
    after, since = returns.settled_by(state, event.bound, returned=returned), state.host.inspections.last
    given = {g.address: Returned(claim, since) for g in gpus if function_address(g.address) in changed}
    after = replace(after, returned={**after.returned, **given}) if given else after
    state = schedule.ask_poll(state, frozenset(used.values())) if used else state
    wanted = inspections.ask_inspections(state.host.inspections, changed)
    return with_inspections(replace(state, gpus_part=after), wanted)


def _seen_again(state: NodeState) -> Gpus:
    """`state.gpus` without the returned devices that were inspected since, and polled where they were in use."""
    gpus, polled = state.gpus, state.host.polls.seen
    unseen = {
        a: r
        for a, r in gpus.returned.items()
        if (last := inspections.last_seen(state.host, a)) is not None
        and (
            last.inspection <= r.since
            or ((group := _group_in_use(state, a)) is not None and polled[group].poll <= r.since)
        )
    }
    return replace(gpus, returned=unseen) if len(unseen) < len(gpus.returned) else gpus


def _group_in_use(state: NodeState, device: DeviceKey) -> int | None:
    """The IOMMU group of a device, if it was in use when it was last polled."""
    index = state.index
    group = index.known.group_number(device)
    return group if group in index.in_use and group in index.polled else None


def _with_reads(
    state: NodeState, devices: Iterable[DeviceKey], others: Iterable[OriginalDriver], at: float
) -> NodeState:
    """`state` with fresh inspections of these devices, their companions and others requested, polls of their groups
    and a read of the ledger with kubelet's list: only that has the claims of other drivers."""
    devices = tuple(devices)
    if not devices:
        return state
    functions = [f for device in devices for f in with_companions(state, device)]
    looked_for = {*(f.address for f in functions), *(f.address for f in others)}
    state = with_inspections(state, inspections.ask_inspections(state.host.inspections, sorted(looked_for)))
    groups = state.index.known.group_numbers(devices)
    return schedule.ask_ledger(schedule.ask_poll(state, groups) if groups else state, at, lists=True)


def _bound(entry: ClaimRecord, gpu: ClaimedGpu) -> tuple[BoundFunction, ...]:
    """The device itself first, then its companions on vfio."""
    own = function_address(gpu.address)
    order = sorted(gpu.functions, key=lambda f: (f.address != own, f.address))
    known = (gpus_of(entry).bound.get(f.address) for f in order)
    return tuple(b for b in known if b is not None and (b.vfio or b.address == own))
