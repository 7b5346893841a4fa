"""The state of compute domains: their claims, the node's label, and what the API server and the host say of them.

Frozen values. Numbers of the reads and patches in here come from one counter and only grow; claims have their own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from msgspec import Struct, field

from gpuactors.core.requests import Refresh
from gpuactors.core.state.claims import NO_CLAIMS, Claims
from gpuactors.core.values.claim import ClaimUid
from gpuactors.core.values.domain import (
    Clique,
    ComputeDomain,
    DomainSettings,
    DomainUid,
    ImexFacts,
    LabelChange,
    LabelPatch,
)
from gpuactors.core.values.model import ClaimedDevice
from gpuactors.core.values.offered_domains import NOTHING_OFFERED, OfferedDomains


class Label(Struct, frozen=True, gc=False):
    """The node's label as last known, and the read or patch of it that is under way. The two are never outstanding
    together: a read that began before a patch would return the old value."""

    value: str | None = None
    """The value as last read or patched; None if the label is absent, or not known."""
    is_read: bool = False
    """True if the label has been read since this daemon serves."""
    removable: tuple[str, ...] = ()
    """The values that may be removed, the last LABELS_KEPT: those of the claims' domains here, and the one at the
    start if no claim had a channel then. Any other value is foreign."""
    initial: str | None = None
    """The value at the start, until all claims that may have a channel have been read."""
    foreign: str | None = None
    """The foreign value that the log has named; None without one."""
    refresh: Refresh = field(default_factory=Refresh)
    """The state of its read, or of a patch."""
    patch: LabelPatch | None = None
    """The outstanding patch; None if a read is outstanding, or nothing is."""
    added: int = 0
    """The last number issued when the label was added, or first seen to be there: an earlier read of a domain says
    nothing about its daemon."""
    added_at: float = -math.inf
    """When that was, in seconds of the events' clock."""
    absent: int = 0
    """The last number issued when the label was last known to be absent: a domain that was read earlier may have been
    deleted since."""
    before: frozenset[ClaimUid] = frozenset()
    """The claims of daemons that were here then, and still are: the label that came later did not start these
    daemons."""
    lingers_until: float = math.inf
    """When the label is removed, as no claim of its domain is left; infinite while it has a reason to stay, or is to go
    at once."""
    lingers_from: int = 0
    """The last number issued when that began: an earlier read does not say whether the domain lives."""
    unsure: bool = False
    """True if the present value is not known: a patch has failed, or met another label than was read."""
    problem: str = ""
    """Why the last read or patch failed, as a sentence; empty if it did not."""
    conflicts: int = 0
    """The number of patches in a row that met another label than was read."""
    retry_at: float = math.inf
    """When the label is read again after a failure; nothing is decided before. Infinite without one."""

    @property
    def is_going(self) -> bool:
        """True while the label is being removed: it may be there or not."""
        return self.patch is not None and self.patch.change is LabelChange.REMOVE

    @property
    def is_idle(self) -> bool:
        """True if nothing is under way, so that the label can be decided on."""
        return self.is_read and self.refresh.outstanding is None and self.retry_at == math.inf


class DomainView(Struct, frozen=True, gc=False):
    """One compute domain, as last read from the API server."""

    number: int = 0
    """The number of the read that this is from; 0 before the first."""
    domain: ComputeDomain | None = None
    """The ComputeDomain; None if there is none with this UID."""
    clique: Clique | None = None
    """Its clique on this node's fabric; None if there is none."""
    problem: str = ""
    """Why the last read failed, as a sentence: the rest is from the read before. Empty if it did not."""
    refresh: Refresh = field(default_factory=Refresh)
    read_at: float = -math.inf
    """When that read came back, in seconds of the events' clock; minus infinity if that is not known."""

    unready_since: float = -math.inf
    """When the first read in a row showed a clique in which this node is not Ready; minus infinity if the last read did
    not."""

    @property
    def is_gone(self) -> bool:
        """True if it was read, and is missing or being deleted: it does not come back."""
        return self.number > 0 and (self.domain is None or self.domain.is_deleted)

    def is_ready_by_clique(self, node: str) -> bool:
        """Return whether this node's daemon is Ready by the clique, which the daemons write themselves."""
        return self.clique is not None and node in self.clique.ready_nodes

    def is_ready_by_status(self, node: str) -> bool:
        """Return whether it is Ready by the status of the ComputeDomain. NVIDIA's controller makes the status of the
        cliques some time later; where its driver has no cliques, the daemons write it."""
        return self.domain is not None and node in self.domain.ready_nodes


class ImexView(Struct, frozen=True, gc=False):
    """The host's last answer about IMEX."""

    number: int = 0
    """The number of the read that this is from; 0 before the first."""
    facts: ImexFacts | None = None
    problem: str = ""
    """Why the last read failed, as a sentence; empty if it did not."""
    refresh: Refresh = field(default_factory=Refresh)


class Domains(Struct, frozen=True, gc=False, eq=False):
    """The compute domains on this node. Comparison leaves out `offered`, which follows from the rest."""

    settings: DomainSettings | None = None
    """The settings; None while compute domains are off."""
    claims: Claims = NO_CLAIMS
    last: int = 0
    """The last issued number."""
    label: Label = Label()
    views: Mapping[DomainUid, DomainView] = field(default_factory=dict)
    """The domain of each claim here, and of a label that lingers, as last read."""
    imex: ImexView = ImexView()
    strangers: tuple[ClaimedDevice, ...] | None = ()
    """The claims of this driver that kubelet lists and that are not here, as another program has prepared them; None
    before kubelet's first answer."""
    stranger_domains: Mapping[ClaimedDevice, DomainUid] = field(default_factory=dict)
    """The domain of each of `strangers` whose claim kubelet has asked for: it was read then. After a reboot kubelet
    lists the devices of a claim, and asks for it, also where its domain is gone and each prepare is refused."""
    since: Mapping[DomainUid, tuple[str, float]] = field(default_factory=dict)
    """The status of each domain as an operator sees it (`report.DomainStatus`), and when it began."""
    offered: OfferedDomains = NOTHING_OFFERED
    """The devices offered to claims, derived from the rest; see `domains/offer.py`."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Domains) and all(
            getattr(self, name) == getattr(other, name)
            for name in self.__struct_fields__
            if name != "offered"
        )

    __hash__ = None  # type: ignore[assignment]  # as of every value with a mapping in it


NO_DOMAINS: Final = Domains()
"""The state of a node without compute domains."""
