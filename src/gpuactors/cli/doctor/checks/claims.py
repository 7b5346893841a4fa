"""Checks of the additional needs of DRA and compute domains: directories, the API server, the daemon's part, IMEX."""

from __future__ import annotations

from collections.abc import Iterator
from shlex import quote

from gpuactors.cli.doctor.facts import Claims, Facts, NewerCheckpoint, Place, Unknown
from gpuactors.cli.doctor.finding import Check, Finding, failed, passed, sentence, warned
from gpuactors.control.client import Running
from gpuactors.control.view import ClaimsView, DomainsView
from gpuactors.core.claims.checkpoint import VERSION
from gpuactors.core.gpus.device_classes import REMEDY, contested, sentence_of
from gpuactors.core.kinds.table import key_of
from gpuactors.core.values.domain import ImexFacts
from gpuactors.core.values.selector import full_address


def check(facts: Facts) -> Iterator[Finding]:
    """Check what claims need: nothing where both are off, before installation only the host."""
    newer: tuple[NewerCheckpoint, ...] = ()
    if isinstance(facts.claims, Claims):
        newer = facts.claims.newer
        yield from _directories(facts.claims)
        yield from (_refused(checkpoint, facts.node) for checkpoint in newer)
    elif facts.claims is not None:
        yield failed(Check.CDI_DIRECTORY, facts.claims.reason, "Check these disks.")
    match facts.api:
        case None:
            pass
        case Unknown(reason):
            yield failed(
                Check.API_SERVER,
                reason,
                "Check --kubeconfig or the pod's service account, --node-name, and the role of deploy/overlays/dra "
                "(with compute domains of deploy/overlays/compute-domains). Claims need Kubernetes 1.34 or newer.",
            )
        case api:
            yield passed(Check.API_SERVER, f"{api.address} answers, and knows the node {facts.node}")
    yield from _classes(facts)
    if isinstance(facts.daemon, Running):
        view = facts.daemon.view
        if facts.config.dra == "on":
            yield from _served(view.claims, "--dra", newer)
        if facts.config.compute_domains != "off":
            domain_claims = view.domains.claims if view.domains is not None else None
            yield from _served(domain_claims, "--compute-domains", newer)
            yield from _label(view.domains, facts.node)
    yield from _imex(facts)


def _directories(claims: Claims) -> Iterator[Finding]:
    yield _writable(
        Check.CDI_DIRECTORY, claims.cdi, "Make it writable for the daemon, or name another with --cdi-dir."
    )
    places = (claims.registry, *claims.plugins)
    findings = [
        _writable(
            Check.PLUGIN_DIRECTORIES,
            place,
            "See that --kubelet-dir is kubelet's --root-dir; in a pod mount the directory writable.",
        )
        for place in places
    ]
    if wrong := [finding for finding in findings if finding.remedy]:
        yield from wrong
    else:
        yield passed(Check.PLUGIN_DIRECTORIES, f"{', '.join(place.path for place in places)}: writable")


def _writable(check: Check, place: Place, remedy: str) -> Finding:
    if not place.writable:
        where = (
            "" if place.nearest == place.path else f": it does not exist, and {place.nearest} is not writable"
        )
        return failed(check, f"{place.path} is not writable{where}", remedy)
    if not place.is_directory:
        return passed(check, f"{place.path} will be made")
    return passed(check, f"{place.path} is writable")


def _classes(facts: Facts) -> Iterator[Finding]:
    """Warn, do not fail: a class with such a name may be meant for nodes without the device plugin."""
    match facts.classes:
        case None:
            return
        case Unknown(reason):
            yield warned(
                Check.DEVICE_CLASSES,
                f"whether a DeviceClass has a resource of this node is not known: {reason}",
                "See the reason. The daemon's account needs `list` of deviceclasses (resource.k8s.io), which the role "
                "of deploy/overlays/dra grants.",
            )
        case classes:
            conflicts = contested(classes, facts.resources)
            yield from (
                warned(Check.DEVICE_CLASSES, sentence_of(conflict), sentence(REMEDY))
                for conflict in conflicts
            )
            if not conflicts:
                what = f"none of {len(classes)} DeviceClasses has a resource of this node's device plugin"
                yield passed(Check.DEVICE_CLASSES, what)


def _label(domains: DomainsView | None, node: str) -> Iterator[Finding]:
    if domains is not None and domains.label.problem:
        yield warned(
            Check.CLAIMS_SERVED,
            f"the node's label: {domains.label.problem}",
            f"Compare `kubectl get node {node} --show-labels` with `gpuactors inspect`.",
        )


def _refused(newer: NewerCheckpoint, node: str) -> Finding:
    """Give the remedy of docs/operate.md#upgrade-roll-back-uninstall, with this node's names."""
    drain = f"kubectl drain {quote(node)} --ignore-daemonsets --delete-emptydir-data"
    pods = f"-l app.kubernetes.io/name=gpuactors --field-selector spec.nodeName={quote(node)}"
    return failed(
        Check.CLAIMS_SERVED,
        f"{newer.path} is of version {newer.version}, this gpuactors knows {VERSION}: a newer one wrote it, and "
        "this one serves no claim",
        f"Upgrade again: the newer gpuactors continues with these claims. To stay with this version, release them "
        f"while the newer one runs: {drain}. Then roll back, run rm {quote(newer.path)} on the node, "
        f"kubectl -n gpuactors delete pod {pods}, and kubectl uncordon {quote(node)}.",
    )


def _served(claims: ClaimsView | None, flag: str, newer: tuple[NewerCheckpoint, ...]) -> Iterator[Finding]:
    if claims is None:
        yield warned(
            Check.CLAIMS_SERVED,
            f"the running daemon serves no claims ({flag} off)",
            f"Start it with {flag} on, or leave {flag} out here.",
        )
        return
    if any(checkpoint.path in claims.problem for checkpoint in newer):
        return  # said above, with what to do
    slices = claims.slices
    problems = [
        claims.problem,
        slices.problem if slices is not None else "nothing is known of the ResourceSlices yet",
    ]
    for problem in filter(None, problems):
        yield failed(
            Check.CLAIMS_SERVED,
            problem,
            "See the daemon's log: it tries again by itself, and says when it succeeds.",
        )
    blocked = [] if slices is None else [*slices.tainted, *slices.withdrawn, *slices.left_out]
    for device in blocked:
        yield warned(
            Check.CLAIMS_SERVED,
            f"{device.name} is not to be given to a claim now: {device.reason or 'no reason is known'}",
            f"Run {_how_to_see(device.name)}, which says more.",
        )
    if not any(problems) and slices is not None and not blocked:
        yield passed(
            Check.CLAIMS_SERVED,
            f"{claims.driver}: {slices.slices} ResourceSlices, {len(claims.claims)} claims",
        )


def _how_to_see(name: str) -> str:
    """Return the command that says more of a device. One in no slice has its address as its name; one of compute
    domains has none."""
    address = key_of(name) or full_address(name)
    return f"gpuactors explain {address}" if address is not None else "gpuactors inspect"


def _imex(facts: Facts) -> Iterator[Finding]:
    match facts.imex:
        case None:
            return
        case Unknown(reason):
            yield failed(Check.IMEX, reason, "Check --host-root; in a pod the mount of the host's /proc.")
        case imex if imex.absent:
            yield failed(
                Check.IMEX, imex.absent, "Load NVIDIA's driver (550 or newer), or set --compute-domains off."
            )
        case imex if imex.host_problem:
            yield warned(Check.IMEX, imex.host_problem, "See the operator's own IMEX daemon on this host.")
        case imex:
            yield from _fabric(imex, facts)


def _fabric(imex: ImexFacts, facts: Facts) -> Iterator[Finding]:
    """Judge the fabric and the daemon's devices. Unknown is not "no fabric": claims of channels are refused."""
    running = facts.daemon.view.domains if isinstance(facts.daemon, Running) else None
    if imex.unknown and running is not None and running.imex.clique_id:
        yield warned(
            Check.IMEX,
            f"{imex.unknown}. The running daemon goes on with the clique {running.imex.clique_id}, which it has read "
            "before: until it is restarted",
            "Set --clique, or have GPU Feature Discovery label the Node, before the next restart.",
        )
    elif imex.unknown:
        yield failed(
            Check.IMEX,
            f"claims of channels are refused: {imex.unknown}",
            "Set --clique of this node, or to none where there is no such fabric (docs/dra.md#the-clique).",
        )
    elif imex.clique_is_past:
        yield warned(
            Check.IMEX,
            f"the clique {imex.clique_id} is known by {imex.clique_source} only, as long as that claim lives",
            "Set --clique, or have GPU Feature Discovery label the Node: the label of NVIDIA's plugin goes with it.",
        )
    if imex.unmanaged:
        yield failed(
            Check.IMEX,
            f"claims of the domains' daemons are refused: {imex.unmanaged}",
            "Let NVIDIA's container toolkit make the CDI device, or set --imex-management.",
        )
    if imex.clique_id and imex.mgmt_minor is None and facts.config.compute_domains == "on":
        yield warned(
            Check.IMEX,
            "NVIDIA's driver has no capability fabric-imex-mgmt (/proc/driver/nvidia/capabilities): a domain's daemon "
            "does not get its device, and IMEX may not become ready",
            "In a pod check the mount of the host's /proc/driver/nvidia; else load a newer driver of NVIDIA's.",
        )
    if imex.unknown or imex.unmanaged or imex.clique_is_past:
        return
    no_fabric = f"no NVLink fabric beyond this node, by {imex.clique_source}"
    clique = f"clique {imex.clique_id}" if imex.clique_id else no_fabric
    yield passed(Check.IMEX, f"IMEX channels have the major number {imex.channel_major}; {clique}")
