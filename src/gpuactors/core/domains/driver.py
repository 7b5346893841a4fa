"""The claims of compute domains: channels and daemons. Answers the questions of `claims/driver.py`.

A channel becomes usable by others: the label is there, the domain's daemon has its claim on this node, and the API
server says that it is Ready. No worker does that, so it is the act AWAITED.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, final

from msgspec.structs import replace

from gpuactors.core.claims.driver import ClaimDriver, DeviceAct
from gpuactors.core.claims.files import PlacedFile
from gpuactors.core.claims.opaque_config import ConfigFault
from gpuactors.core.claims.strangers import strangers
from gpuactors.core.domains import exclusion, reads, template
from gpuactors.core.domains.cdi import DomainEdits, edits_of
from gpuactors.core.domains.config import chosen
from gpuactors.core.events.claims import ActDone, ActFailed, CheckpointRead
from gpuactors.core.host import schedule
from gpuactors.core.state import NodeState
from gpuactors.core.state.claims import (
    AWAITED,
    FILES,
    ClaimRecord,
    Claims,
    DomainReservation,
    OwedReturn,
    StoredEntry,
    domain_of,
)
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.claim import (
    Claim,
    ClaimsOf,
    DeviceHealth,
    FitnessCheck,
    OriginalDriver,
)
from gpuactors.core.values.claim_states import ClaimState
from gpuactors.core.values.domain import (
    ClaimedDomain,
    DeviceKind,
    DomainConfig,
    DomainMode,
    DomainSettings,
    device_of,
)
from gpuactors.core.values.domain_reservation import claimed_domain, imex_of_claim
from gpuactors.core.values.effects import Effect
from gpuactors.core.values.model import DeviceKey
from gpuactors.core.values.quote import quoted_id
from gpuactors.core.values.slices import AnyOffer
from gpuactors.core.values.status import Conflict, Reason

Stepped = tuple[NodeState, list[Effect]]


@final
class ComputeDomains:
    """The claims of compute domains."""

    @property
    def of(self) -> ClaimsOf:
        return ClaimsOf.DOMAINS

    def claims(self, state: NodeState) -> Claims:
        return state.domains.claims

    def with_claims(self, state: NodeState, claims: Claims) -> NodeState:
        if claims is state.domains.claims:
            return state
        return replace(state, domains_part=replace(state.domains, claims=claims))

    def offered(self, state: NodeState) -> tuple[AnyOffer | None, tuple[DeviceHealth, ...]]:
        return state.domains.offered.offer, state.domains.offered.health

    def restored(self, state: NodeState, event: CheckpointRead) -> tuple[NodeState, Sequence[StoredEntry]]:
        return state, event.entries

    def on_state_changed(self, before: NodeState, state: NodeState) -> NodeState:
        """Apply kubelet's list to channels and the label, as GPUs do."""
        ledger, domains = state.kubelet.ledger, state.domains
        found = strangers(domains.claims, state) if ledger.tried else None
        if found == domains.strangers:
            return state
        return replace(state, domains_part=replace(domains, strangers=found))

    def validate(self, state: NodeState, claim: Claim) -> Reason | None:
        settings, config = state.domains.settings, chosen(claim)
        assert settings is not None
        if isinstance(config, ConfigFault):
            return Reason(Cause.INVALID_CONFIGURATION, config.sentence)
        if any(result.admin_access for result in claim.results or ()):
            return Reason(
                Cause.INVALID_CONFIGURATION,
                "admin access to a device of a compute domain is not given: remove adminAccess from the claim",
            )
        if (why := _not_offered(claim, settings)) is not None:
            return why
        if config.kind is DeviceKind.DAEMON and claim.name.namespace not in settings.namespaces:
            return Reason(
                Cause.INVALID_CONFIGURATION,
                f"the claim {claim.name} is for a daemon, and these are in the namespace "
                f"{' or '.join(settings.namespaces)} only (--domains-namespace)",
            )
        return None

    def with_claim(self, entry: ClaimRecord, claim: Claim) -> ClaimRecord:
        config, own = chosen(claim), domain_of(entry).domain
        if entry.state is ClaimState.TAKEN_OVER and own is not None:  # whatever its configuration was then
            known: DomainConfig | None = DomainConfig(own.devices[0].kind, own.uid)
        else:
            known = None if isinstance(config, ConfigFault) else config
        return replace(entry, claim=claim, reservation=DomainReservation(known, own))

    def request_reads(self, state: NodeState, entry: ClaimRecord, at: float) -> tuple[NodeState, ClaimRecord]:
        config = domain_of(entry).config
        assert config is not None
        entry = replace(entry, since=state.domains.last)
        domains = reads.imex_asked(reads.domain_asked(state.domains, config.domain))
        return schedule.ask_ledger(replace(state, domains_part=domains), at, lists=True), entry

    def conflict(self, state: NodeState, entry: ClaimRecord) -> Conflict | None:
        reason = exclusion.conflict(state.domains, entry)
        ledger = state.kubelet.ledger
        # It was asked for when the claim came. After a read that failed its last contents count.
        is_asked = ledger.outstanding is not None and ledger.asking.lists
        if reason is None and (is_asked or (ledger.asking.wanted and ledger.problem is None)):
            return Conflict(Reason(Cause.LEDGER_LATE, "kubelet has not returned its ledger yet"))
        return reason

    def reserved(self, state: NodeState, entry: ClaimRecord) -> tuple[NodeState, ClaimRecord]:
        domains, config = state.domains, domain_of(entry).config
        assert config is not None
        assert entry.claim is not None
        assert domains.settings is not None
        domain, imex = domains.known[config.domain].domain, domains.imex.facts
        assert domain is not None
        assert imex is not None
        own = claimed_domain(entry.claim, config, domain, imex, domains.settings)
        return state, replace(entry, reservation=DomainReservation(config, own))

    def binding(self, entry: ClaimRecord) -> Sequence[str]:  # nothing of it is a worker's
        return (AWAITED,)

    def unmet_prerequisite(self, state: NodeState, entry: ClaimRecord) -> Conflict | None:
        why = exclusion.unmet_prerequisite(state.domains, entry)
        return Conflict(why, is_final=why.cause is Cause.DOMAIN_NOT_FOUND) if why is not None else None

    def undoing(self, state: NodeState, entry: ClaimRecord) -> Sequence[str]:  # the label is not an act
        return (FILES,)

    def acted(self, state: NodeState, entry: ClaimRecord, event: ActDone) -> NodeState:
        return state

    def hindered(
        self, state: NodeState, entry: ClaimRecord, event: ActDone | ActFailed, at: float
    ) -> Stepped:
        return state, []

    def owes(self, state: NodeState, entry: ClaimRecord, event: ActFailed, at: float) -> Stepped | None:
        return None

    def other_act_over(self, state: NodeState, event: ActDone | ActFailed, at: float) -> Stepped:
        return state, []

    def due(self, state: NodeState, at: float) -> Stepped:  # `domains/step.py` does it
        return state, []

    def deadline(self, state: NodeState) -> float:
        return math.inf

    def is_seen(self, state: NodeState, entry: ClaimRecord) -> bool:
        config, own = domain_of(entry).config, domain_of(entry).domain
        return (
            config is not None and own is not None and exclusion.unseen(state.domains, entry, config) is None
        )

    def drift(self, state: NodeState, entry: ClaimRecord) -> Reason | None:
        config, own, facts = domain_of(entry).config, domain_of(entry).domain, state.domains.imex.facts
        if (
            config is not None
            and own is not None
            and facts is not None
            and imex_of_claim(facts, config.kind) != own.imex
        ):
            return Reason(
                Cause.IMEX_MISSING, "the host's driver reports IMEX otherwise than the claim's files"
            )
        return exclusion.unmet_prerequisite(state.domains, entry)

    def drifted(self, before: NodeState, state: NodeState) -> Sequence[tuple[ClaimRecord, Reason]]:
        # A node of theirs is of a driver, and not of one tenant.
        return ()

    def may_write(self, state: NodeState, entry: ClaimRecord) -> bool:
        return True

    def in_place(self, state: NodeState, address: DeviceKey) -> bool:  # no device of theirs has an address
        return False

    def found_again(self, entry: ClaimRecord, claim: Claim) -> ClaimRecord:
        """Its domain's name and the host's facts are read before its files are written again (`unmet_prerequisite`)."""
        entry = self.with_claim(entry, claim)
        config = domain_of(entry).config
        assert config is not None
        devices = tuple(d for r in claim.results or () if (d := device_of(r.device)) is not None)
        own = ClaimedDomain(config.domain, "", "", devices, None)
        return replace(entry, reservation=DomainReservation(config, own))

    def device_acts(self, state: NodeState, acting: Iterable[ClaimRecord]) -> Mapping[DeviceKey, DeviceAct]:
        return {}  # nothing of it is bound to a driver

    def fitness_check(self, state: NodeState) -> FitnessCheck | None:
        return None

    def kept(self, state: NodeState) -> tuple[tuple[OriginalDriver, ...], tuple[OwedReturn, ...]]:
        return (), ()

    def devices(self, state: NodeState, entry: ClaimRecord, claim: Claim) -> tuple[DomainEdits, ...]:
        own = domain_of(entry).domain
        assert own is not None
        directory = _directory(state, own)
        named = ((result, device_of(result.device)) for result in claim.results or ())
        return tuple(DomainEdits(r, edits_of(own, d, directory)) for r, d in named if d is not None)

    def directories(self, state: NodeState, entry: ClaimRecord) -> tuple[str, ...]:
        """A daemon's container has its domain's."""
        own = domain_of(entry).domain
        if own is None or all(device.kind is not DeviceKind.DAEMON for device in own.devices):
            return ()
        return (_directory(state, own),)

    def placed(self, state: NodeState, entry: ClaimRecord) -> tuple[PlacedFile, ...]:
        """The content from which NVIDIA's daemon makes IMEX's configuration."""
        return tuple(
            PlacedFile(f"{d}/{template.NAME}", template.TEXT) for d in self.directories(state, entry)
        )


DOMAINS: Final[ClaimDriver] = ComputeDomains()


def _directory(state: NodeState, own: ClaimedDomain) -> str:
    settings = state.domains.settings
    assert settings is not None
    return f"{settings.directory}/{own.uid}"


def _not_offered(claim: Claim, settings: DomainSettings) -> Reason | None:
    """The device of the claim that this node does not have; None if it has all."""
    for result in claim.results or ():
        device = device_of(result.device)
        if device is None:
            return Reason(Cause.UNKNOWN_ID, f"{quoted_id(result.device)} is no device of this driver")
        if device.kind is DeviceKind.CHANNEL and device.id >= settings.channels:
            few = f"{device} is not offered here: the node has {settings.channels} (--imex-channels)"
            return Reason(Cause.NOT_OFFERED, few)
        if device.kind is DeviceKind.DAEMON and (device.id or settings.mode is not DomainMode.ON):
            off = f"{device} is not offered here (--compute-domains {settings.mode})"
            return Reason(Cause.NOT_OFFERED, off)
    return None
