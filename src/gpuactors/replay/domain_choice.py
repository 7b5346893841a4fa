"""The selection of a replay that is about one device of compute domains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

from gpuactors.core.domains.report import devices_of
from gpuactors.core.events.domains import ImexRead, LabelPatched, LabelRead, NodeTouched
from gpuactors.core.state import NodeState
from gpuactors.core.state.claims import ClaimRecord, domain_of
from gpuactors.core.values.claim import ClaimsOf
from gpuactors.core.values.domain import DomainDevice
from gpuactors.replay.choice import Device, is_about_claims, naming
from gpuactors.replay.play import Began, Moment, Played, Resumed
from gpuactors.replay.words import effect_words, event_words, is_worth_reading

_NODE_EVENTS: Final = (LabelRead, LabelPatched, NodeTouched, ImexRead)
"""The events of compute domains that concern every device of theirs."""


@final
@dataclass
class DeviceOfDomains:
    """One device of compute domains, and the moments that concern it: while a claim has it, or waits for it, also those
    of the label, of IMEX and of the claim's domain."""

    device: DomainDevice
    is_in_journal: bool = False
    """True once a state of the journal had it: offered, or in a claim."""

    def __str__(self) -> str:
        return str(self.device)

    def concerns(self, moment: Moment) -> bool:
        """Implement `Device.concerns`."""
        if isinstance(moment, Played):
            self._sees(moment.state)
            return self._is_about(moment) or bool(moment.differences or moment.failure)
        if isinstance(moment, Began | Resumed):
            self._sees(moment.state)
        return True

    def _sees(self, state: NodeState) -> None:
        offer = state.domains.offered.offer
        offered = offer is not None and any(device.name == str(self.device) for device in offer.devices)
        self.is_in_journal = self.is_in_journal or offered or bool(self._claims(state))

    def _is_about(self, played: Played) -> bool:
        claims = (*self._claims(played.before), *self._claims(played.state))
        if is_about_claims(played, ClaimsOf.DOMAINS, self._claims(played.before)):
            return True
        if claims and isinstance(played.event, _NODE_EVENTS):
            return True
        domains = {config.domain for entry in claims if (config := domain_of(entry).config) is not None}
        names = naming({str(self.device), *domains}, claims)
        lines = [event_words(played.event), *map(effect_words, filter(is_worth_reading, played.effects))]
        return any(names.search(line) for line in lines)

    def _claims(self, state: NodeState) -> list[ClaimRecord]:
        """Return the claims that have it or wait for it."""
        domains = state.domains
        return [e for e in domains.claims.entries.values() if self.device in devices_of(domains, e)]


Chosen = Device | DeviceOfDomains
"""The device to which a replay is limited."""
