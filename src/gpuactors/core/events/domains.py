"""Compute domains: the node's label, the domains and their cliques, IMEX."""

from __future__ import annotations

from msgspec import Struct

from gpuactors.core.requests import Failure
from gpuactors.core.values.domain import Clique, ComputeDomain, DomainUid, ImexFacts, NodeLabel


class LabelRead(Struct, frozen=True, gc=False):
    """The answer to the read with this number: the label of this daemon's Node."""

    number: int
    label: NodeLabel | Failure


class LabelPatched(Struct, frozen=True, gc=False):
    """The answer to the patch with this number. After a failure it is not known whether the patch was made."""

    number: int
    failure: Failure | None = None
    conflict: bool = False
    """True if the API server refused the patch because the label is not as the patch expects it (422)."""


class NodeTouched(Struct, frozen=True, gc=False):
    """This daemon's Node has changed: a hint that its label may have."""


class DomainRead(Struct, frozen=True, gc=False):
    """The answer to the read with this number: the ComputeDomain with this UID, and its clique on this node's
    fabric."""

    number: int
    uid: DomainUid
    domain: ComputeDomain | Failure | None
    """The ComputeDomain; None if there is none with this UID."""
    clique: Clique | None = None
    """The clique; None if there is none, or the node is on no fabric."""


class DomainsTouched(Struct, frozen=True, gc=False):
    """A ComputeDomain or a clique has changed: a hint."""


class ImexRead(Struct, frozen=True, gc=False):
    """The answer to the read with this number: the host's facts about IMEX."""

    number: int
    facts: ImexFacts | Failure


DomainEvent = LabelRead | LabelPatched | NodeTouched | DomainRead | DomainsTouched | ImexRead
