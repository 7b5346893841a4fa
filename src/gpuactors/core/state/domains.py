"""The part of the node's state that is about compute domains: their claims, the node's label, and what the API server
and the host say of them.

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
    """The node's label as last known, and what is under way about it. A read and a patch are never outstanding at the
    same time: a read that was begun before a patch would say what was."""

    value: str | None = None
    known: bool = False
    """It has been read since this daemon serves."""
    ours: tuple[str, ...] = ()
    """Its values that may be removed, the last LABELS_KEPT: those of our claims' domains, and what was found at the
    start while no claim had a channel. Any other one is foreign."""
    found: str | None = None
    """The files found at the start, as long as claims that may have a channel have not been read."""
    foreign: str | None = None
    """Its value, if that is foreign: it has been named in the log."""
    refresh: Refresh = field(default_factory=Refresh)
    """Of its read, or of a patch."""
    patch: LabelPatch | None = None
    """The outstanding patch; None: what is outstanding is a read."""
    added: int = 0
    """The last number that had been issued when it was seen to be there, or added: what was read of a domain before is
    no fact of its daemon."""
    added_at: float = -math.inf
    """When that was."""
    absent: int = 0
    """The last number that had been issued when it was last known to be absent: a domain that was read before may have
    been deleted since."""
    before: frozenset[ClaimUid] = frozenset()
    """The claims of daemons that were here then, and still are: these daemons are not of the label that came after."""
    lingers_until: float = math.inf
    """No claim of its domain is left: when it goes. Infinite while it has a reason to stay, or is to go at once."""
    unsure: bool = False
    """A patch has failed or met another label since it was read: what it is now is not known."""
    problem: str = ""
    """Why the last read or patch failed, as a sentence; empty if it did not."""
    conflicts: int = 0
    """Patches in a row that did not find the label as it was read."""
    retry_at: float = math.inf
    """When it is read again after a failure: until then nothing is decided."""

    @property
    def is_going(self) -> bool:
        """It is being removed: until that has an answer it may be there or not."""
        return self.patch is not None and self.patch.change is LabelChange.REMOVE

    @property
    def is_idle(self) -> bool:
        """Nothing is under way, so it can be decided on."""
        return self.known and self.refresh.outstanding is None and self.retry_at == math.inf


class DomainView(Struct, frozen=True, gc=False):
    """One compute domain, as the API server said last."""

    number: int = 0
    """Of the read that this is from; 0: not read yet."""
    domain: ComputeDomain | None = None
    """None: there is none by this UID."""
    clique: Clique | None = None
    """None: there is none of this domain on this node's fabric."""
    problem: str = ""
    """Why the last read failed, as a sentence; the rest is from the one before."""
    refresh: Refresh = field(default_factory=Refresh)
    read_at: float = -math.inf
    """When that read came back; infinitely long ago if it is not known."""

    unready_since: float = -math.inf
    """When the first read in a row came back with a clique that does not have this node as Ready; infinitely long ago
    if the last one was otherwise."""

    def is_ready_by_clique(self, node: str) -> bool:
        """The daemon of this node is Ready by the clique, which the daemons write themselves."""
        return self.clique is not None and node in self.clique.ready_nodes

    def is_ready_by_status(self, node: str) -> bool:
        """It is by the status of the ComputeDomain. NVIDIA's controller makes that of the cliques some time later, or,
        where its driver does without cliques, the daemons write it."""
        return self.domain is not None and node in self.domain.ready_nodes


class ImexView(Struct, frozen=True, gc=False):
    """The host's last answer about IMEX."""

    number: int = 0
    facts: ImexFacts | None = None
    problem: str = ""
    refresh: Refresh = field(default_factory=Refresh)


class Domains(Struct, frozen=True, gc=False, eq=False):
    """Compute domains on this node. Equal to another if all is but what is offered, which follows."""

    settings: DomainSettings | None = None
    """None: they are off."""
    claims: Claims = NO_CLAIMS
    last: int = 0
    """The last issued number."""
    label: Label = Label()
    known: Mapping[DomainUid, DomainView] = field(default_factory=dict)
    """The domains of the claims that are here."""
    imex: ImexView = ImexView()
    strangers: tuple[ClaimedDevice, ...] | None = ()
    """Claims of this driver that kubelet lists and that are not here: another program has prepared them. None: kubelet
    has not been asked yet."""
    since: Mapping[DomainUid, tuple[str, float]] = field(default_factory=dict)
    """The status of each domain as an operator sees it (`report.DomainStatus`), and when it came to it."""
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
"""Of a node without compute domains."""
