"""Compute domains: the node's label, the domains and their cliques, IMEX."""

from __future__ import annotations

from msgspec import Struct

from gpuactors.core.requests import Failure
from gpuactors.core.values.domain import Clique, ComputeDomain, DomainUid, ImexFacts, NodeLabel


class LabelRead(Struct, frozen=True, gc=False):
    """The read with this number has an answer: the label of our Node."""

    number: int
    label: NodeLabel | Failure


class LabelPatched(Struct, frozen=True, gc=False):
    """The patch with this number has an answer. If it failed, whether it was made is not known."""

    number: int
    failure: Failure | None = None
    conflict: bool = False
    """The API server has refused it, as the label was not as the patch expects it (422)."""


class NodeTouched(Struct, frozen=True, gc=False):
    """Our Node has changed: a hint that its label may have."""


class DomainRead(Struct, frozen=True, gc=False):
    """The read with this number has an answer: the ComputeDomain with this UID, its clique on this node's fabric."""

    number: int
    uid: DomainUid
    domain: ComputeDomain | Failure | None
    """None: there is none with this UID."""
    clique: Clique | None = None
    """None: there is none, or the node is on no fabric."""


class DomainsTouched(Struct, frozen=True, gc=False):
    """A ComputeDomain or a clique has changed: a hint."""


class ImexRead(Struct, frozen=True, gc=False):
    """The read with this number has an answer: what the host says of IMEX."""

    number: int
    facts: ImexFacts | Failure


DomainEvent = LabelRead | LabelPatched | NodeTouched | DomainRead | DomainsTouched | ImexRead
