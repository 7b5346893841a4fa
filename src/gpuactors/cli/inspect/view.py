"""The view that `gpuactors inspect` and `gpuactors explain` show: the running daemon's, or else one inspection by the
command (`own.py`); `report.py` prints it. Must not import what only a daemon needs, unless none runs: a command takes
no longer than its imports.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final, TypeAlias

from msgspec import Struct

from gpuactors.cli.inspect import claims_report, domains_report
from gpuactors.cli.progress import SILENT, Progress
from gpuactors.config import Config, Resolved
from gpuactors.control.about import Setting
from gpuactors.control.client import NoDaemonError, Running, read_status
from gpuactors.control.path import socket_path
from gpuactors.control.view import (
    CardView,
    ClaimView,
    DeviceView,
    DomainView,
    NodeView,
    PodView,
    ResourceView,
)
from gpuactors.core.kinds.presence import NO_GPU_HERE
from gpuactors.core.values.model import Role
from gpuactors.core.values.names import is_domain_id
from gpuactors.core.values.selector import full_address
from gpuactors.core.values.virtual_machine import runs
from gpuactors.daemon.about import about, node_of
from gpuactors.ports.errors import ControlError

_POD: Final = "pod/"
"""The prefix of a pod's name, needed where a claim has the same name."""

_VM: Final = "vm/"
"""The prefix of NAMESPACE/NAME of a virtual machine, needed where a claim or pod has the same name."""

NO_DEVICES: Final = f"{NO_GPU_HERE[0].upper()}{NO_GPU_HERE[1:]} (gpuactors config show: select)."


class UnknownAddressError(Exception):
    """Nothing on this node has this address or name; the text lists what there is."""


class Inspected(Struct, frozen=True):
    """A view of the node, and its source."""

    view: NodeView
    by_daemon: bool
    source: str
    """The source of the view, in words."""
    problem: str = ""
    """Why a daemon that runs, or may run, was not asked: its view may differ. Empty if none runs for certain."""
    node: str = ""
    """The node's name."""
    wall: float = 0.0
    """The time of day when it was made, in seconds since 1970."""


class Explained(Struct, frozen=True):
    """One device of a view."""

    device: DeviceView
    inspected: Inspected


class ExplainedClaim(Struct, frozen=True):
    """One claim of a view."""

    claim: ClaimView | None
    """The claim in the driver of GPUs; None if it has no device of this driver."""
    inspected: Inspected
    domain_claim: ClaimView | None = None
    """The claim in the driver of compute domains."""


class ExplainedDomain(Struct, frozen=True):
    """One compute domain of a view."""

    domain: DomainView
    inspected: Inspected


class ExplainedPod(Struct, frozen=True):
    """One pod of a view."""

    pod: PodView
    inspected: Inspected


class ExplainedResource(Struct, frozen=True):
    """One resource of a view."""

    name: str
    resource: ResourceView | None
    """Kubelet's counts; None if kubelet gets no list of it."""
    devices: tuple[DeviceView, ...]
    inspected: Inspected


class ExplainedCard(Struct, frozen=True):
    """One parent of devices that is no device itself."""

    card: CardView
    inspected: Inspected


AnyExplained: TypeAlias = (
    Explained | ExplainedCard | ExplainedClaim | ExplainedDomain | ExplainedPod | ExplainedResource
)


def inspect(config: Config, progress: Progress = SILENT) -> Inspected:
    """Return the running daemon's view of the node, or the command's own. Raises `ports.errors.HostError` if the node
    cannot be read."""
    problem = ""
    try:
        running = _read_status(config, progress)
    except NoDaemonError as exc:
        source = f"this command itself: {exc}"
    except ControlError as exc:
        problem = str(exc)
        source = f"this command itself, not by the daemon: {exc}"
    else:
        return by_running(running, time.time())
    from gpuactors.cli.inspect import own  # nearly all of the daemon

    return Inspected(own.view(config, progress), False, source, problem, node_of(config), time.time())


def explain(config: Config, address: str, progress: Progress = SILENT) -> AnyExplained:
    """Return the view of one device, whose `address` may lack the PCI domain (`23:00.0`) or be a UUID, of the card that
    it is a part of, of one resource by its name or that of its vGPU profile, of one claim or compute domain by its
    NAMESPACE/NAME or UID, or of one pod by its NAMESPACE/NAME or that of its virtual machine.

    Raises `UnknownAddressError`, and `ports.errors.HostError` as `inspect`.
    """
    inspected = inspect(config, progress)
    try:
        return explain_in(inspected, address)
    except UnknownAddressError as exc:
        if inspected.by_daemon:
            raise
        # In a pod the daemon has its settings as arguments, which this command does not know.
        raise UnknownAddressError(f"{exc}\nread by {inspected.source}") from None


def explain_in(inspected: Inspected, address: str) -> AnyExplained:
    """Find what `address` names in a view; see `explain`. Raises `UnknownAddressError`."""
    if (named := find_named(inspected, address)) is not None:
        return named
    if (card := _card(inspected.view, address)) is not None:
        return ExplainedCard(card, inspected)
    if ":" in (text := address.strip()) or "/" in text or _by_slice_name(text.lower()) is not None:
        return Explained(find(inspected.view, address), inspected)
    return _explain_in_any_namespace(inspected, text)


def _explain_in_any_namespace(inspected: Inspected, text: str) -> AnyExplained:
    """Find the device of another kind, or the claim, compute domain, pod or virtual machine of this name without its
    namespace. Raises `UnknownAddressError`."""
    view = inspected.view
    if any(device.address == text.lower() for device in view.devices):
        return Explained(find(view, text), inspected)
    if pods := _pods_of_vm(view, text):
        return ExplainedPod(_only(pods, text), inspected)
    fitting = dict.fromkeys(name for _, name in _named(view) if name.rpartition("/")[2] == text)
    if len(fitting) == 1 and (named := find_named(inspected, *fitting)) is not None:
        return named
    if fitting:
        raise UnknownAddressError(f"{text} is in several namespaces: say which of {', '.join(fitting)}")
    there = f"; there are {', '.join(names)}" if (names := _names(view)) else ""
    gpus = f"; the GPUs are at {_addresses(view.devices)}" if view.devices else f". {NO_DEVICES}"
    raise UnknownAddressError(
        f"nothing on this node is called {text}: no GPU, resource, claim, ComputeDomain, pod or virtual machine"
        f"{there}{gpus}"
    )


def _read_status(config: Config, progress: Progress) -> Running:
    path = socket_path(str(config.state_dir))
    return progress.while_blocked("the running daemon's view", lambda: read_status(path))


def by_running(running: Running, wall: float) -> Inspected:
    """Return the view of this daemon, made at `wall`, in seconds since 1970."""
    return Inspected(running.view, True, _name_of(running), "", running.about.node, wall)


def _name_of(running: Running) -> str:
    idle = "" if running.view.role == Role.SERVING else f", which does not serve kubelet: {running.view.role}"
    return f"the running daemon (process {running.pid}, version {running.version}){idle}"


class Shown(Struct, frozen=True):
    """Settings, and their source."""

    settings: tuple[Setting, ...]
    heading: str = ""
    """The heading, which names their source; empty for those of a daemon that is started now."""


def settings_of(resolved: Resolved) -> tuple[Setting, ...]:
    """Return each setting of a daemon that is started with this configuration, with its source."""
    return about(resolved.config, {key: str(source) for key, source in resolved.provenance.items()}).settings


def shown(resolved: Resolved, progress: Progress = SILENT) -> Shown:
    """Return the settings of the running daemon, or else those of one that is started now."""
    own = settings_of(resolved)
    try:
        running = _read_status(resolved.config, progress)
    except NoDaemonError:
        return Shown(own)
    except ControlError as exc:
        return Shown(
            own,
            f"Settings that a daemon started now would have; the running one could not be asked: {exc}",
        )
    return Shown(running.about.settings, f"Settings of {_name_of(running)} on node {running.about.node}")


def find_named(
    inspected: Inspected, name: str
) -> ExplainedClaim | ExplainedDomain | ExplainedPod | ExplainedResource | None:
    """Find the resource of this name, or the claim, the compute domain or the pod of this NAMESPACE/NAME or UID; None
    if it is no name of one. Raises `UnknownAddressError`."""
    view, text = inspected.view, name.strip()
    if (resource := _resource(inspected, text)) is not None:
        return resource
    pod = next((p for p in view.pods if text.removeprefix(_POD) in {str(p), p.uid} - {""}), None)
    if pod is not None and text.startswith(_POD):
        return ExplainedPod(pod, inspected)
    pods_of_vm = _pods_of_vm(view, text) if "/" in text else []
    claim = claims_report.claim_named(view.claims, text)
    domain_claim = claims_report.claim_named(view.domains.claims if view.domains is not None else None, text)
    domain = domains_report.domain_named(view.domains, text)
    any_claim = claim or domain_claim
    kinds = {
        "claim": any_claim.uid if any_claim is not None else "",
        "ComputeDomain": domain.uid if domain is not None else "",
        "pod": f"{_POD}{pod}" if pod is not None else "",
        "virtual machine": f"{_VM}{text.removeprefix(_VM)}" if pods_of_vm else "",
    }
    if len(ambiguous := {kind: word for kind, word in kinds.items() if word}) > 1:
        raise UnknownAddressError(
            f"{text} is a {' and a '.join(ambiguous)}: run gpuactors explain "
            + ", or gpuactors explain ".join(ambiguous.values())
        )
    if pod is not None:
        return ExplainedPod(pod, inspected)
    if pods_of_vm:
        return ExplainedPod(_only(pods_of_vm, text), inspected)
    if domain is not None:
        return ExplainedDomain(domain, inspected)
    if claim is not None or domain_claim is not None:
        return ExplainedClaim(claim, inspected, domain_claim)
    is_uuid = is_domain_id(text)  # as the UID of an object, and the key of a mediated device, is
    if "/" not in text and (not is_uuid or any(d.address == text.lower() for d in view.devices)):
        return None
    if not inspected.by_daemon:
        raise UnknownAddressError(
            f"kubelet has given a GPU to no pod {name}, and only the running daemon knows claims"
        )
    serves = view.claims is not None or view.domains is not None
    no_claim = "no claim" if serves else "no claim (--dra off, --compute-domains off)"
    raise UnknownAddressError(
        f"the running daemon knows {no_claim} and no pod that is called {name}; it knows "
        f"{', '.join(_names(view)) or 'none'}"
    )


def _names(view: NodeView) -> list[str]:
    return [f"{kind}{name}" for kind, name in _named(view)]


def _named(view: NodeView) -> Iterator[tuple[str, str]]:
    """Yield what kind of thing is here, in words, and its NAMESPACE/NAME."""
    for claims in view.drivers:
        yield from (("", str(claim)) for claim in claims.claims)
    domains = view.domains.domains if view.domains is not None else ()
    yield from (("the ComputeDomain ", str(domain)) for domain in domains)
    yield from (("the pod ", str(pod)) for pod in view.pods)
    yield from (("the virtual machine ", vm) for vm in dict.fromkeys(p.vm for p in view.pods if p.vm))


def _pods_of_vm(view: NodeView, text: str) -> list[PodView]:
    """Return the pods of the virtual machine of this NAMESPACE/NAME, or of this NAME in any namespace. One that starts
    again has its former pod for a while: the pods without a device are left out if another has one."""
    text = text.removeprefix(_VM) if text.count("/") > 1 else text
    namespace, _, machine = text.rpartition("/")
    named = [(pod, pod.name.partition("/")) for pod in view.pods]
    pods = [pod for pod, (of, _, name) in named if namespace in ("", of) and runs(name, machine)]
    return [pod for pod in pods if pod.devices] or pods


def _only(pods: list[PodView], name: str) -> PodView:
    """Return the only one of the pods. Raises `UnknownAddressError` if there are more."""
    if len(pods) > 1:
        commands = " or ".join(f"gpuactors explain {_POD}{pod}" for pod in pods)
        raise UnknownAddressError(f"{name} is the virtual machine of {len(pods)} pods: run {commands}")
    return pods[0]


def _resource(inspected: Inspected, text: str) -> ExplainedResource | None:
    """Find a resource by its name, which may lack the domain, or by the name of its vGPU profile. Raises
    `UnknownAddressError` for one that no device here has: a domain has a dot, a namespace has none."""
    view = inspected.view
    names = sorted({r.name for r in view.resources} | {d.resource for d in view.devices if d.resource})
    name = next((n for n in names if text in (n, n.partition("/")[2])), None)
    of_profile = sorted({d.resource for d in view.devices if d.profile is not None and d.profile == text})
    if name is None and len(of_profile) > 1:
        raise UnknownAddressError(
            f"devices of the profile {text} have several resources: say which of {', '.join(of_profile)}"
        )
    if name is None and of_profile:
        (name,) = of_profile
    if name is None:
        if "." in text.partition("/")[0] and text.count("/") == 1:
            raise UnknownAddressError(
                f"no device of this node has the resource {text}; there are {', '.join(names) or 'none'}"
            )
        return None
    return ExplainedResource(
        name,
        next((r for r in view.resources if r.name == name), None),
        tuple(d for d in view.devices if d.resource == name),
        inspected,
    )


def _card(view: NodeView, address: str) -> CardView | None:
    """Return the parent of devices at `address` that is no device; None if there is none."""
    wanted = address.strip().lower()
    names = (wanted, full_address(wanted), _by_slice_name(wanted))
    return next((card for card in view.cards if card.address in names), None)


def find(view: NodeView, address: str) -> DeviceView:
    """Return the device at `address`. Raises `UnknownAddressError`."""
    wanted = address.strip().lower()
    full = full_address(wanted) or _by_slice_name(wanted) or wanted
    fitting = [d for d in view.devices if d.address == full] or [
        d for d in view.devices if d.address.partition(":")[2] == wanted
    ]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise UnknownAddressError(f"{address} is in several PCI domains: say which of {_addresses(fitting)}")
    for device in view.devices:
        if any(member.address in (wanted, full) for member in device.group):
            raise UnknownAddressError(
                f"{address} is no GPU that the selectors match, but in the IOMMU group of {device.address}: "
                "explain that one"
            )
    if not view.devices:
        raise UnknownAddressError(f"there is no GPU at {address}. {NO_DEVICES}")
    raise UnknownAddressError(f"there is no GPU at {address}; there are {_addresses(view.devices)}")


def _by_slice_name(name: str) -> str | None:
    """Return the address of a device by its name in a ResourceSlice."""
    if ":" in name:
        return None
    from gpuactors.core.kinds.table import key_of  # only this needs the core

    return key_of(name)


def _addresses(devices: tuple[DeviceView, ...] | list[DeviceView]) -> str:
    return ", ".join(device.address for device in devices)
