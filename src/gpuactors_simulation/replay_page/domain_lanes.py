"""Compute domains over time: a lane for the node's label, for each domain, and for each device that a claim has had."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from gpuactors.core.domains.report import domain_reports, label_report
from gpuactors.core.state import NodeState
from gpuactors.core.state.claims import ClaimRecord, domain_of
from gpuactors.core.values.claim_states import OWNING
from gpuactors.core.values.domain import DomainDevice, DomainUid
from gpuactors.core.values.model import Role
from gpuactors.core.values.reported import DomainStatus, LabelStatus
from gpuactors.replay.words import domain_words
from gpuactors_simulation.replay_page.lane import Lane

LABEL_KINDS: Final[Mapping[LabelStatus, str]] = {
    LabelStatus.UNREAD: "label-unknown",
    LabelStatus.UNSURE: "label-unknown",
    LabelStatus.ABSENT: "label-absent",
    LabelStatus.ADDING: "label-unknown",
    LabelStatus.SET: "label-set",
    LabelStatus.REMOVING: "label-unknown",
    LabelStatus.FOREIGN: "label-foreign",
}
"""The kind of the label's band."""

KINDS: Final[Mapping[DomainStatus, str]] = {
    DomainStatus.READY: "ready",
    DomainStatus.NOT_READY: "not-ready",
    DomainStatus.UNREAD: "unread",
    DomainStatus.UNUSED: "unused",
}
"""The kind of a domain's band."""


@dataclass
class DomainLanes:
    """The lanes of compute domains; none while they are off."""

    label: Lane | None = None
    """Named by the DRA driver."""
    domains: dict[DomainUid, Lane] = field(default_factory=dict)
    devices: dict[DomainDevice, Lane] = field(default_factory=dict)

    def sees(self, state: NodeState, at: float) -> None:
        """The state from `at` on."""
        of_driver = state.domains.claims.settings
        if of_driver is None or state.daemon.role is not Role.SERVING:
            self.ends(at)
            return
        if self.label is None:
            self.label = Lane(of_driver.driver, "the node's label, compute domains and their devices")
        label = label_report(state.domains)
        text = "\n".join(filter(None, (f"label {label}", label.problem)))
        self.label.is_now(at, LABEL_KINDS[label.status], text)
        self._domains(state, at)
        self._devices(state, at)

    def ends(self, at: float) -> None:
        """From `at` on nothing is known of them."""
        for lane in self.all():
            lane.ends(at)

    def all(self) -> Iterator[Lane]:
        """Yield every lane, in the order in which they are shown."""
        if self.label is not None:
            yield self.label
        yield from self.domains.values()
        yield from (self.devices[device] for device in sorted(self.devices, key=order))

    def _domains(self, state: NodeState, at: float) -> None:
        reports = {report.uid: report for report in domain_reports(state.domains)}
        for uid, report in reports.items():
            lane = self.domains.setdefault(uid, Lane(uid, f"ComputeDomain {uid}"))
            lane.name = str(report)  # known when it has been read
            lane.is_now(at, KINDS[report.status], domain_words(report))
        for uid, lane in self.domains.items():
            if uid not in reports:
                lane.ends(at)

    def _devices(self, state: NodeState, at: float) -> None:
        """A device that no claim has had has no lane: a node may offer thousands of channels."""
        claimed, offer = devices_of_claims(state), state.domains.offered.offer
        offered = {device.name for device in offer.devices} if offer is not None else set()
        for device, entry in claimed.items():
            lane = self.devices.setdefault(device, Lane(str(device)))
            lane.is_now(at, "claimed", claim_words(entry))
        for device, lane in self.devices.items():
            if str(device) not in offered:
                lane.ends(at)
            elif device not in claimed:
                lane.is_now(at, "free", "offered to claims")


def order(device: DomainDevice) -> tuple[str, int]:
    """In which devices are shown: `channel-2` before `channel-10`."""
    return device.kind, device.id


def devices_of_claims(state: NodeState) -> dict[DomainDevice, ClaimRecord]:
    """Return the claim that has a device of a compute domain for itself."""
    owning = (entry for entry in state.domains.claims.entries.values() if entry.state in OWNING)
    return {
        device: entry
        for entry in owning
        if (own := domain_of(entry).domain) is not None
        for device in own.devices
    }


def claim_words(entry: ClaimRecord) -> str:
    """Return a claim with its state, and why it is not further."""
    return f"claim {entry.name}: {entry.state}" + (f", {entry.problem}" if entry.problem else "")
