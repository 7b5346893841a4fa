"""Compute domains: the node's label, the domains and their cliques, IMEX."""

from __future__ import annotations

from dataclasses import dataclass

from gpuactors.core.values.domain import Clique, ComputeDomain, DomainUid, ImexFacts, NodeLabel


@dataclass(frozen=True, slots=True)
class LabelRead:
    """The read with this number has seen the label of our Node."""

    number: int
    label: NodeLabel


@dataclass(frozen=True, slots=True)
class LabelUnreadable:
    """The read with this number failed."""

    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class LabelPatched:
    """The API server has made the patch with this number."""

    number: int


@dataclass(frozen=True, slots=True)
class LabelConflicted:
    """The API server has refused the patch with this number, as the label was not as the patch expects it (422)."""

    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class LabelFailed:
    """The patch with this number failed; whether it was made is not known."""

    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class NodeTouched:
    """Our Node has changed: a hint that its label may have."""


@dataclass(frozen=True, slots=True)
class DomainRead:
    """The read with this number came back: the ComputeDomain with this UID, and its clique on this node's fabric."""

    number: int
    uid: DomainUid
    domain: ComputeDomain | None
    """None: there is none with this UID."""
    clique: Clique | None = None
    """None: there is none, or the node is on no fabric."""


@dataclass(frozen=True, slots=True)
class DomainUnreadable:
    """The read with this number failed: nothing is known of the domain."""

    number: int
    uid: DomainUid
    reason: str


@dataclass(frozen=True, slots=True)
class DomainsTouched:
    """A ComputeDomain or a clique has changed: a hint."""


@dataclass(frozen=True, slots=True)
class ImexRead:
    """The read with this number came back: what the host says of IMEX."""

    number: int
    facts: ImexFacts


@dataclass(frozen=True, slots=True)
class ImexUnreadable:
    """The read with this number failed."""

    number: int
    reason: str


DomainEvent = (
    LabelRead
    | LabelUnreadable
    | LabelPatched
    | LabelConflicted
    | LabelFailed
    | NodeTouched
    | DomainRead
    | DomainUnreadable
    | DomainsTouched
    | ImexRead
    | ImexUnreadable
)
