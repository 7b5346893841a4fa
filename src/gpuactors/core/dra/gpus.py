"""The claims of GPUs: their devices are PCI functions, which acts bind to a vfio driver and return.

Answers the questions of `driver.py`, each from the module that decides it: `config.py`, `exclusion.py`, `placement.py`,
`prebound.py`, `reservation.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, final

from gpuactors.core import inspections, schedule
from gpuactors.core.assessment.cause import Cause
from gpuactors.core.assessment.status import Obstacle
from gpuactors.core.dra import config, exclusion, placement, prebound
from gpuactors.core.dra.cdi import ClaimDevice
from gpuactors.core.dra.claim import BoundFunction, Claim, ClaimsOf, DeviceHealth
from gpuactors.core.dra.config import VfioConfig
from gpuactors.core.dra.entries import (
    FILES,
    ClaimedGpu,
    Claims,
    ClaimSettings,
    Entry,
    Returned,
    StoredEntry,
    one_of_each_group,
)
from gpuactors.core.dra.exclusion import (
    InTheWay,
    allocated_devices,
    exclusive_devices,
    has_another_owner,
    not_given,
    with_companions,
)
from gpuactors.core.dra.reservation import claimed_gpu, is_returned, with_reserved, with_whole_groups
from gpuactors.core.dra.table import OWNING, ClaimState
from gpuactors.core.identity import claimed_address
from gpuactors.core.index import index_of
from gpuactors.core.model import PciAddress
from gpuactors.core.state import NodeState, with_inspections

if TYPE_CHECKING:
    from gpuactors.core.dra.driver import ClaimDriver
    from gpuactors.core.dra.slices import AnyOffer
    from gpuactors.core.events import ActDone, CheckpointRead


@final
class Gpus:
    """The claims of GPUs."""

    @property
    def of(self) -> ClaimsOf:
        return ClaimsOf.GPUS

    def claims(self, state: NodeState) -> Claims:
        return state.claims

    def with_claims(self, state: NodeState, claims: Claims) -> NodeState:
        return replace(state, claims=claims) if claims is not state.claims else state

    def offered(self, state: NodeState) -> tuple[AnyOffer | None, tuple[DeviceHealth, ...]]:
        return state.offered.offer, state.offered.health

    def restored(self, claims: Claims, event: CheckpointRead) -> tuple[Claims, Sequence[StoredEntry]]:
        settings = claims.settings
        assert settings is not None
        known = {f.address: f for f in event.first_drivers}
        claims = replace(claims, first_drivers=known, acted=frozenset(known))
        return claims, [
            replace(stored, gpus=tuple(_with_operators_word(settings, gpu) for gpu in stored.gpus))
            for stored in event.entries
        ]

    def followed(self, before: NodeState, state: NodeState) -> NodeState:
        if index_of(before).functions is not index_of(state).functions or (
            before.claims.first_drivers is not state.claims.first_drivers
        ):
            state = self.with_claims(state, _first_drivers_noted(state))
        return self.with_claims(state, with_reserved(_seen_again(state)))

    def unfit(self, state: NodeState, claim: Claim) -> Obstacle | None:
        found = config.chosen(claim)
        if isinstance(found, config.ConfigFault):
            return Obstacle(Cause.INVALID_CONFIGURATION, found.sentence)
        return not_given(state, allocated_devices(claim)) if state.host.scanned else None

    def with_claim(self, entry: Entry, claim: Claim) -> Entry:
        return replace(entry, claim=claim)

    def looked_at(self, state: NodeState, entry: Entry, at: float) -> tuple[NodeState, Entry]:
        entry = replace(entry, since=state.host.inspections.last)
        if entry.state in OWNING:  # also a function that was not there when it was last looked for
            functions = frozenset(f.address for gpu in entry.gpus for f in gpu.functions)
            return _looked(state, [gpu.address for gpu in entry.gpus], functions, at), entry
        return _looked(state, _own_addresses(entry.claim), frozenset(), at), entry

    def in_the_way(self, state: NodeState, entry: Entry) -> InTheWay | None:
        return exclusion.in_the_way(state, entry)

    def reserved(self, state: NodeState, entry: Entry) -> tuple[NodeState, Entry]:
        """Their first drivers are in the same checkpoint."""
        gpus = with_whole_groups(claimed_gpu(state, address) for address in _own_addresses(entry.claim))
        acted = state.claims.acted | {f.address for gpu in gpus for f in gpu.functions}
        return self.with_claims(state, replace(state.claims, acted=acted)), replace(entry, gpus=gpus)

    def binding(self, entry: Entry) -> Sequence[str]:
        return [str(gpu.address) for gpu in one_of_each_group(entry.gpus)]

    def lacking(self, state: NodeState, entry: Entry) -> Obstacle | None:  # their acts are all a worker's
        return None

    def undoing(self, state: NodeState, entry: Entry) -> Sequence[str]:
        """The files are removed, and each device is returned that is to be, and that nobody else has."""
        return [
            FILES,
            *(
                str(g.address)
                for g in one_of_each_group(entry.gpus)
                if is_returned(g) and not has_another_owner(state, entry, g.address)
            ),
        ]

    def acted(self, state: NodeState, entry: Entry, event: ActDone) -> NodeState:
        """What an act has bound is inspected. A device that was returned was last seen on vfio, and belongs to nobody
        any more: it is not offered before that inspection."""
        changed = sorted(b.address for b in event.bound)
        claims, since = state.claims, state.host.inspections.last
        if entry.state is ClaimState.RELEASING and changed:
            given = [g.address for g in entry.gpus if g.address in changed]
            returned = dict.fromkeys(given, Returned(entry.name, since))
            claims = replace(claims, returned={**claims.returned, **returned})
        wanted = inspections.ask_inspections(state.host.inspections, changed)
        return with_inspections(self.with_claims(state, claims), wanted)

    def astray(self, state: NodeState, entry: Entry) -> str | None:
        return placement.astray(state, entry) if placement.is_seen(state, entry) else None

    def found_again(self, entry: Entry, claim: Claim) -> Entry:
        """Its files name devices with admin access as well."""
        own = _own_addresses(claim)
        return replace(entry, claim=claim, gpus=tuple(gpu for gpu in entry.gpus if gpu.address in own))

    def devices(
        self, state: NodeState, entry: Entry, claim: Claim
    ) -> tuple[ClaimDevice, ...]:  # all is in the entry
        configs = config.chosen(claim)
        gpus = {gpu.address: gpu for gpu in entry.gpus}
        found = []
        for result in claim.results or ():
            chosen = VfioConfig() if isinstance(configs, config.ConfigFault) else configs[result.request]
            gpu = gpus.get(claimed_address(result.device) or PciAddress(""))
            # With admin access there is no node: an open would make the group busy for whoever has it.
            functions = () if gpu is None or result.admin_access else _bound(entry, gpu)
            found.append(ClaimDevice(result, functions, chosen))
        return tuple(found)

    def directories(self, state: NodeState, entry: Entry) -> tuple[str, ...]:  # theirs are kubelet's
        return ()


GPUS: Final[ClaimDriver] = Gpus()


def _own_addresses(claim: Claim | None) -> list[PciAddress]:
    """The devices that a claim is to have for itself."""
    names = exclusive_devices(claim) if claim is not None else ()
    return [address for name in names if (address := claimed_address(name)) is not None]


def _with_operators_word(settings: ClaimSettings, gpu: ClaimedGpu) -> ClaimedGpu:
    """What the operator names now stays on vfio, also where the claim was prepared before."""
    functions = tuple(replace(f, vfio=f.vfio or f.address in settings.operator) for f in gpu.functions)
    if gpu.stays or gpu.address not in settings.operator:
        return replace(gpu, functions=functions)
    decided = prebound.decide(gpu.address, None, operator=settings.operator)
    return replace(gpu, functions=functions, stays=decided.sentence)


def _first_drivers_noted(state: NodeState) -> Claims:
    claims, functions = state.claims, index_of(state).functions
    found = prebound.noted(claims.first_drivers, functions.values(), claims.acted)
    return replace(claims, first_drivers=found) if found is not claims.first_drivers else claims


def _seen_again(state: NodeState) -> Claims:
    """The claims without the returned devices that an inspection has seen since."""
    claims, facts = state.claims, state.host.facts
    unseen = {
        a: r
        for a, r in claims.returned.items()
        if (fact := facts.get(a)) is not None and fact.inspection <= r.since
    }
    return replace(claims, returned=unseen) if len(unseen) < len(claims.returned) else claims


def _looked(
    state: NodeState, addresses: Iterable[PciAddress], others: frozenset[PciAddress], at: float
) -> NodeState:
    """`state` with fresh inspections of these devices, their companions and others requested, polls of their groups
    and a read of the ledger."""
    addresses = tuple(addresses)
    if not addresses:
        return state
    functions = [f for a in addresses for f in with_companions(state, a)]
    looked_for = {f.address for f in functions} | others
    state = with_inspections(state, inspections.ask_inspections(state.host.inspections, sorted(looked_for)))
    groups = frozenset(f.iommu_group for f in functions if f.iommu_group is not None)
    return schedule.ask_ledger(schedule.ask_poll(state, groups) if groups else state, at)


def _bound(entry: Entry, gpu: ClaimedGpu) -> tuple[BoundFunction, ...]:
    """The device itself first, then its companions on vfio."""
    order = sorted(gpu.functions, key=lambda f: (f.address != gpu.address, f.address))
    known = (entry.bound.get(f.address) for f in order)
    return tuple(b for b in known if b is not None and (b.vfio or b.address == gpu.address))
