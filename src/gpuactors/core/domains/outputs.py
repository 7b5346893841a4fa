"""The orders to the actors of compute domains, as they follow from the state. Derived each time, never kept.

Standing orders with numbers: each actor does the newest number of each kind once. A read of the label and a patch of it
are never wanted at the same time.
"""

from __future__ import annotations

from msgspec import Struct

from gpuactors.core.claims.outputs import NO_CLAIMS_WANTED, ClaimsWanted, claims_wanted
from gpuactors.core.claims.view import view_of
from gpuactors.core.domains.driver import DOMAINS
from gpuactors.core.domains.reads import watched
from gpuactors.core.domains.step import is_serving
from gpuactors.core.state import NodeState
from gpuactors.core.state.claims import domain_of
from gpuactors.core.state.domains import Domains
from gpuactors.core.values.domain import DeviceKind, DomainUid, LabelPatch


class LabelPatchWanted(Struct, frozen=True, gc=False):
    """A patch of the node's label to make."""

    number: int
    patch: LabelPatch


class DomainReadWanted(Struct, frozen=True, gc=False):
    """A ComputeDomain to read by its UID, and its clique on this node's fabric."""

    number: int
    uid: DomainUid
    clique_id: str
    """The clique; empty while unknown, and on a node without fabric: then no clique is read."""
    namespace: str = ""
    """The namespace of its clique: that of the claim of its daemon here, or today's default without one."""


class DomainsWanted(Struct, frozen=True, gc=False):
    """The input of the actors of compute domains."""

    claims: ClaimsWanted = NO_CLAIMS_WANTED
    """The input of the claims' actors."""
    label_read: int = 0
    """The number of the outstanding read of the node's label; 0 without one."""
    label_patch: LabelPatchWanted | None = None
    domains: tuple[DomainReadWanted, ...] = ()
    watched: tuple[DomainUid, ...] = ()
    """The ComputeDomains to watch: those that something here waits for, and that of a label which lingers."""
    imex: int = 0
    """The number of the outstanding read of the host's IMEX; 0 without one."""


NO_DOMAINS_WANTED = DomainsWanted()
"""The orders while compute domains are off."""


def _namespace(domains: Domains, uid: DomainUid) -> str:
    assert domains.settings is not None
    configs = ((domain_of(e).config, e.name.namespace) for e in domains.claims.entries.values())
    namespaces = (
        namespace
        for config, namespace in configs
        if config is not None and config.kind is DeviceKind.DAEMON and config.domain == uid
    )
    return next(namespaces, domains.settings.namespaces[0])


def domains_wanted(state: NodeState) -> DomainsWanted:
    """Return the orders. A daemon that does not serve gives only those of its claims."""
    domains = state.domains
    if domains.settings is None:
        return NO_DOMAINS_WANTED
    claims = claims_wanted(view_of(state, DOMAINS))
    if not is_serving(state):
        return DomainsWanted(claims)
    imex, patch, label = domains.imex, domains.label.patch, domains.label.refresh.outstanding or 0
    clique_id = imex.facts.clique_id if imex.facts is not None else ""
    return DomainsWanted(
        claims,
        label if patch is None else 0,
        LabelPatchWanted(label, patch) if patch is not None else None,
        tuple(
            DomainReadWanted(view.refresh.outstanding, uid, clique_id, _namespace(domains, uid))
            for uid, view in domains.views.items()
            if view.refresh.outstanding is not None
        ),
        watched(domains),
        imex.refresh.outstanding or 0,
    )
