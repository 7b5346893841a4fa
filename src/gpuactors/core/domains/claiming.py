"""Which channels and daemon devices a claim gets. A channel becomes usable by others: the label is there, the domain's
daemon has its claim on this node, and the API server says that it is Ready. No worker does that, so it is the act
AWAITED.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from msgspec.structs import replace

from gpuactors.core.claims.opaque_config import ConfigFault
from gpuactors.core.claims.strangers import is_of, strangers
from gpuactors.core.domains import exclusion, reads
from gpuactors.core.domains.config import chosen
from gpuactors.core.host import schedule
from gpuactors.core.state import NodeState
from gpuactors.core.state.claims import AWAITED, FILES, ClaimRecord, DomainReservation, domain_of
from gpuactors.core.state.domains import Domains
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.claim import Claim
from gpuactors.core.values.claim_states import ClaimState
from gpuactors.core.values.domain import (
    ClaimedDomain,
    DeviceKind,
    DomainConfig,
    DomainMode,
    DomainSettings,
    DomainUid,
    device_of,
)
from gpuactors.core.values.domain_reservation import claimed_domain, imex_of_claim
from gpuactors.core.values.model import ClaimedDevice
from gpuactors.core.values.quote import quoted_id
from gpuactors.core.values.status import Conflict, Reason


@final
class DomainClaiming:
    """Claims of compute domains."""

    def on_state_changed(self, before: NodeState, state: NodeState) -> NodeState:
        """Apply kubelet's list to channels and the label, as GPUs do."""
        ledger, domains = state.kubelet.ledger, state.domains
        foreign_claims = strangers(domains.claims, state) if ledger.tried else None
        known = _domains_of(domains, foreign_claims or ())
        if foreign_claims == domains.strangers and known == domains.stranger_domains:
            return state
        return replace(state, domains=replace(domains, strangers=foreign_claims, stranger_domains=known))

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
            own_config: DomainConfig | None = DomainConfig(own.devices[0].kind, own.uid)
        else:
            own_config = None if isinstance(config, ConfigFault) else config
        return replace(entry, claim=claim, reservation=DomainReservation(own_config, own))

    def found_again(self, state: NodeState, entry: ClaimRecord, claim: Claim) -> ClaimRecord:
        """Restore a claim from its files. Its domain's name and the host's facts are read before its files are written
        again (`unmet_prerequisite`)."""
        entry = self.with_claim(entry, claim)
        config = domain_of(entry).config
        assert config is not None
        devices = tuple(d for r in claim.results or () if (d := device_of(r.device)) is not None)
        own = ClaimedDomain(config.domain, "", "", devices, None)
        return replace(entry, reservation=DomainReservation(config, own))

    def request_reads(self, state: NodeState, entry: ClaimRecord, at: float) -> tuple[NodeState, ClaimRecord]:
        config = domain_of(entry).config
        assert config is not None
        entry = replace(entry, since=state.domains.last)
        domains = reads.imex_asked(reads.domain_asked(state.domains, config.domain))
        return schedule.ask_ledger(replace(state, domains=domains), at, lists=True), entry

    def conflict(self, state: NodeState, entry: ClaimRecord) -> Conflict | None:
        reason = exclusion.conflict(state.domains, entry)
        ledger = state.kubelet.ledger
        # It was asked for when the claim came. After a read that failed its last contents count.
        is_asked = ledger.refresh.outstanding is not None and ledger.asking.lists
        if reason is None and (is_asked or (ledger.asking.wanted and ledger.problem is None)):
            return Conflict(Reason(Cause.LEDGER_LATE, "kubelet has not returned its ledger yet"))
        return reason

    def reserve(self, state: NodeState, entry: ClaimRecord) -> tuple[NodeState, ClaimRecord]:
        domains, config = state.domains, domain_of(entry).config
        assert config is not None
        assert entry.claim is not None
        assert domains.settings is not None
        domain, imex = domains.views[config.domain].domain, domains.imex.facts
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

    def is_seen(self, state: NodeState, entry: ClaimRecord) -> bool:
        config, own = domain_of(entry).config, domain_of(entry).domain
        return (
            config is not None and own is not None and exclusion.unseen(state.domains, entry, config) is None
        )

    def unusable(self, state: NodeState, entry: ClaimRecord) -> Reason | None:
        return None

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


def _domains_of(domains: Domains, listed: Sequence[ClaimedDevice]) -> dict[ClaimedDevice, DomainUid]:
    """Return the domains of listed devices, of each whose claim was read since kubelet lists it."""
    known = {device: uid for device in listed if (uid := domains.stranger_domains.get(device)) is not None}
    for entry in domains.claims.entries.values() if listed else ():
        if (config := domain_of(entry).config) is not None:
            known |= {device: config.domain for device in listed if is_of(device, entry.name)}
    return known


def _not_offered(claim: Claim, settings: DomainSettings) -> Reason | None:
    """Return why this node does not have a device of the claim; None if it has all."""
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
