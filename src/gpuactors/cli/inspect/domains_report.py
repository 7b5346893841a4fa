"""Compute domains in the output of `gpuactors inspect` and `gpuactors explain`: as text, and as values for JSON.

Must not decide anything: what is said of a domain comes from the daemon's view.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from gpuactors.cli.inspect.claims_report import (
    MEANINGS,
    About,
    about,
    claim_dict,
    claim_facts,
    claim_lines,
    claim_title,
    lasted,
    slices_dict,
    slices_lines,
    wrapped,
)
from gpuactors.control.view import ClaimView, DomainsView, DomainView
from gpuactors.core.values.claim_states import ClaimState
from gpuactors.core.values.domain import LABEL, DomainMode
from gpuactors.core.values.quote import first_of
from gpuactors.core.values.reported import DomainStatus, LabelStatus, Readiness

_CLAIM_MEANINGS: Final[Mapping[str, str]] = {
    **MEANINGS,
    ClaimState.WAITING: "its domain is being read, or somebody else has its channel or the node",
    ClaimState.RESERVED: "its device is its own; that is being written to disk",
    ClaimState.BINDING: "its channel is its own; label, daemon and readiness are waited for",
    ClaimState.WRITING: "its CDI and metadata files are being written",
    ClaimState.VERIFYING: "it was prepared, and kubelet asks again: its domain and IMEX are being read",
    ClaimState.STOPPED: "an act failed; its device stays its own until kubelet asks again",
    ClaimState.RELEASING: "its files are being removed",
}

_MEANINGS: Final[Mapping[str, str]] = {
    DomainStatus.READY: "its channels can be used here",
    DomainStatus.UNREAD: "label and daemon are there; whether it is Ready is read when a claim waits for that",
    DomainStatus.UNUSED: "no claim here is for a channel of it",
}

_READINESS: Final[Mapping[str, str]] = {
    Readiness.READY: "the API server says Ready for this node, as last read",
    Readiness.NOT_READY: "the API server does not say Ready for this node, as last read",
    Readiness.UNREAD: "not read since the label was added, or since the daemon started",
}


# --- of a node --------------------------------------------------------------------------------------------


def sections(domains: DomainsView | None, columns: int) -> list[list[About]]:
    """Return the domains with their claims, and the slices, each as the lines of one section of so many columns;
    nothing while they are off."""
    if domains is None:
        return []
    claims = domains.claims
    facts = [f"Compute domains of driver {claims.driver}"]
    if claims.problem:
        facts += wrapped(claims.problem, columns, indent=2)
    for name, text in (*_imex_facts(domains), *_label_facts(domains)):
        facts += wrapped(f"{name}: {text}", columns, indent=2)
    head = about("", facts)
    for domain in domains.domains:
        domain_claims = [claim for claim in claims.claims if claim.domain == domain.uid]
        head += _domain_lines(domain, domain_claims, columns)
    without_domain = [claim for claim in claims.claims if domains.of(claim) is None]
    if without_domain:
        head += about("", ["  claims without a domain: not read yet, or ended"])
    for claim in without_domain:
        head += about(claim.uid, claim_lines(claim, columns, indent=4))
    slices = slices_lines(claims.slices, columns, f"ResourceSlices of driver {claims.driver}")
    return [head, about("", slices)]


def _imex_facts(domains: DomainsView) -> list[tuple[str, str]]:
    imex = domains.imex
    name = "IMEX" if imex.present or not imex.known else "No IMEX"
    state = (
        imex.reason or f"clique {imex.clique_id}" if imex.known else "the host has not said yet what it has"
    )
    return [(name, text) for text in (state, imex.host_problem, imex.problem) if text]


def _label_facts(domains: DomainsView) -> list[tuple[str, str]]:
    label = domains.label
    if domains.mode != DomainMode.ON and label.status == LabelStatus.ABSENT:
        return []
    return [("Label", text) for text in (label.said, label.problem) if text]


def _domain_lines(domain: DomainView, claims: list[ClaimView], columns: int) -> list[About]:
    """Return a domain with its claims. A reason that they have in common stands once."""
    own = wrapped(f"{_titled(domain)}  {domain.status}", columns, indent=2)
    reason = domain.missing or domain.problem
    own += wrapped(reason, columns, indent=4) if reason else []
    lines = about(domain.uid, own)
    for claim in claims:
        lines += about(claim.uid, claim_lines(claim, columns, indent=4, stated=reason))
    return lines


def _titled(domain: DomainView) -> str:
    return f"{domain}, UID {domain.uid}" if domain.name else f"UID {domain.uid}"


def domains_dict(domains: DomainsView | None) -> dict[str, Any] | None:
    """Return the domains, their claims and the slices for JSON; None while compute domains are off."""
    if domains is None:
        return None
    imex, label = domains.imex, domains.label
    return {
        "driver": domains.claims.driver,
        "mode": domains.mode,
        "problem": domains.claims.problem or None,
        "imex": {
            "present": imex.present if imex.known else None,
            "clique": imex.clique_id or None,
            "reason": imex.reason or None,
            "host_problem": imex.host_problem or None,
            "problem": imex.problem or None,
        },
        "label": {"status": label.status, "value": label.value, "problem": label.problem or None},
        "domains": [_domain_dict(domain) for domain in domains.domains],
        "claims": [_claim_dict(claim) for claim in domains.claims.claims],
        "slices": slices_dict(domains.claims.slices),
    }


def _domain_dict(domain: DomainView) -> dict[str, Any]:
    return {
        "namespace": domain.namespace or None,
        "name": domain.name or None,
        "uid": domain.uid,
        "status": domain.status,
        "missing": domain.missing or None,
        "labelled": domain.labelled,
        "daemon": domain.daemon_uid,
        "readiness": domain.readiness,
        "problem": domain.problem or None,
    }


def _claim_dict(claim: ClaimView) -> dict[str, Any]:
    fields = claim_dict(claim)
    del fields["admin_devices"]  # is refused
    return fields | {"domain": claim.domain or None}


# --- of a claim -------------------------------------------------------------------------------------------


def claim_explanation(
    claim: ClaimView, domains: DomainsView, time: Callable[[float], str]
) -> list[tuple[str, str]]:
    """Return the facts of a claim; `time` is the time of day of so many seconds ago."""
    domain = domains.of(claim)
    facts = [*claim_facts(claim, time), *(("Device", device) for device in first_of(claim.devices))]
    if domain is None:
        return facts
    facts.append(("ComputeDomain", f"{_titled(domain)}: {domain.status}"))
    missing = domain.missing if domain.missing != claim.problem else ""
    return facts + [("ComputeDomain", f"  {missing}")] * bool(missing)


def claim_titled(claim: ClaimView) -> list[str]:
    """Return the claim's name, and its state with the meaning."""
    return claim_title(claim, _CLAIM_MEANINGS)


def claim_explanation_dict(claim: ClaimView, domains: DomainsView) -> dict[str, Any]:
    """Return a claim with its domain for JSON."""
    domain = domains.of(claim)
    return _claim_dict(claim) | {"domain": _domain_dict(domain) if domain is not None else None}


# --- of a domain ------------------------------------------------------------------------------------------


def domain_named(domains: DomainsView | None, text: str) -> DomainView | None:
    """Return the domain of this NAMESPACE/NAME or UID. Of several of one name the last one: the others were deleted."""
    candidates = domains.domains if domains is not None else ()
    return next((domain for domain in reversed(candidates) if text in (str(domain), domain.uid)), None)


def domain_title(domain: DomainView) -> list[str]:
    """Return the domain's name, and its status with the meaning."""
    meaning = _MEANINGS.get(domain.status) or domain.missing
    return [f"ComputeDomain {domain}", f"{domain.status}: {meaning}"]


def domain_explanation(domain: DomainView, domains: DomainsView) -> list[tuple[str, str]]:
    """Return the facts of a domain: what its channels need, and the claims."""
    claims = [claim for claim in domains.claims.claims if claim.domain == domain.uid]
    daemon = next((claim for claim in claims if claim.uid == domain.daemon_uid), None)
    facts = [("UID", domain.uid)]
    if domains.mode == DomainMode.ON:
        label = [f"{LABEL} names it"] if domain.labelled else [text for _, text in _label_facts(domains)]
        facts += [("Label", text) for text in label]
        facts.append(("Daemon", _claim_text(daemon) if daemon is not None else "no claim of it is here"))
        facts.append(("Readiness", _READINESS.get(domain.readiness or "", "not known")))
    if domain.read_s is not None:
        facts.append(("Last read", f"{lasted(domain.read_s)} ago"))
    facts += [("Problem", domain.problem)] * bool(domain.problem)
    facts += [("Claim", _claim_text(claim)) for claim in claims if claim is not daemon]
    return facts + _imex_facts(domains)


def _claim_text(claim: ClaimView) -> str:
    devices = ", ".join(first_of(claim.devices))
    return f"{claim}, {claim.state} for {lasted(claim.age_s)}" + (f", {devices}" if devices else "")


def domain_explanation_dict(domain: DomainView, domains: DomainsView) -> dict[str, Any]:
    """Return a domain with its claims for JSON."""
    claims = [_claim_dict(claim) for claim in domains.claims.claims if claim.domain == domain.uid]
    return _domain_dict(domain) | {"claims": claims}
