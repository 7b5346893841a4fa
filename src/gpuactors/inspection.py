"""What `gpuactors inspect` and `gpuactors explain` show: the running daemon's view, or else one inspection by the
command. Its inspection is assessed by the same core that the daemon runs, from the same three sources: sysfs, kubelet's
ledger, the use of the groups. It opens no device and has no history. Must not write anything anywhere.
"""

from __future__ import annotations

import json
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

import trio

from gpuactors import inspection_claims, inspection_domains
from gpuactors.actors import pod_resources
from gpuactors.app import about, node_of, sysfs_of
from gpuactors.app import settings_of as core_settings_of
from gpuactors.config import Config, Resolved
from gpuactors.control.claims_view import ClaimView
from gpuactors.control.client import NoDaemonError, Running, read_status
from gpuactors.control.domains_view import DomainView
from gpuactors.control.unix import socket_path
from gpuactors.control.view import (
    Change,
    DeviceView,
    Member,
    NodeView,
    ResourceView,
    Setting,
    view_of,
)
from gpuactors.core.dra.names import is_domain_id
from gpuactors.core.events import Event, GroupsObserved, HostScanned
from gpuactors.core.model import PciFunction, Role
from gpuactors.core.snapshot import project
from gpuactors.core.state import NodeState
from gpuactors.core.step import initial_state, step
from gpuactors.host.reader import ThreadedReader
from gpuactors.host.root import HostRoot
from gpuactors.host.use import SysfsUse
from gpuactors.kubelet.ledger import KubeletLedger
from gpuactors.ports import ControlError, LedgerReader, UseReader

NO_DEVICES: Final = "No PCI function on this node matches the selectors (see gpuactors config show)."

_ROUNDS: Final = 8
"""Reads and polls of the command's own inspection: the first of each, and those that the core requests after their
results."""


class UnknownAddressError(Exception):
    """There is no such device; the text lists those there are."""


@dataclass(frozen=True, slots=True)
class Inspected:
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
    """When it was made, in seconds since 1970."""


@dataclass(frozen=True, slots=True)
class Explained:
    """One device of a view."""

    device: DeviceView
    inspected: Inspected


@dataclass(frozen=True, slots=True)
class ExplainedClaim:
    """One claim of a view."""

    claim: ClaimView | None
    """As the driver of GPUs has it; None if it has no device of this driver."""
    inspected: Inspected
    of_domains: ClaimView | None = None
    """As the driver of compute domains has it."""


@dataclass(frozen=True, slots=True)
class ExplainedDomain:
    """One compute domain of a view."""

    domain: DomainView
    inspected: Inspected


def inspect(config: Config) -> Inspected:
    """The running daemon's view of the node, or the command's own. Raises `ports.HostError` if the node cannot be
    read."""
    return trio.run(inspected, config)


def explain(config: Config, address: str) -> Explained | ExplainedClaim | ExplainedDomain:
    """The view of one device, whose `address` may lack the PCI domain (`23:00.0`), or of one claim or compute domain by
    its NAMESPACE/NAME or UID.

    Raises `UnknownAddressError`, and `ports.HostError` as `inspect`.
    """
    found = inspect(config)
    try:
        if (named := find_named(found, address)) is not None:
            return named
        return Explained(find(found.view, address), found)
    except UnknownAddressError as exc:
        if found.by_daemon:
            raise
        # In a pod the daemon has its settings as arguments, which this command does not know.
        raise UnknownAddressError(f"{exc}\nread by {found.source}") from None


async def inspected(config: Config) -> Inspected:
    """As `inspect`."""
    problem = ""
    try:
        running = await read_status(socket_path(str(config.state_dir)))
    except NoDaemonError as exc:
        source = f"this command itself: {exc}"
    except ControlError as exc:
        problem = str(exc)
        source = f"this command itself, not by the daemon: {exc}"
    else:
        node = running.about.node
        return Inspected(running.view, True, _name_of(running), "", node, time.time())
    return Inspected(await _inspect_host(config), False, source, problem, node_of(config), time.time())


def _name_of(running: Running) -> str:
    idle = "" if running.view.role == Role.SERVING else f", which does not serve kubelet: {running.view.role}"
    return f"the running daemon (process {running.pid}, version {running.version}){idle}"


@dataclass(frozen=True, slots=True)
class Shown:
    """Settings, and their source."""

    settings: tuple[Setting, ...]
    heading: str = ""
    """Empty where they are those of a daemon that is started now."""


def settings_of(resolved: Resolved) -> tuple[Setting, ...]:
    """Each setting of a daemon that is started with this configuration, with its source."""
    return about(resolved.config, {key: str(source) for key, source in resolved.provenance.items()}).settings


def shown(resolved: Resolved) -> Shown:
    """The settings of the running daemon, or else those of one that is started now."""
    own = settings_of(resolved)
    try:
        running = trio.run(read_status, socket_path(str(resolved.config.state_dir)))
    except NoDaemonError:
        return Shown(own)
    except ControlError as exc:
        return Shown(
            own,
            f"Settings that a daemon started now would have; the running one could not be asked: {exc}",
        )
    if not running.about.settings:
        return Shown(
            own,
            f"Settings that a daemon started now would have; the running one (version {running.version}) "
            "does not report its own.",
        )
    return Shown(running.about.settings, f"Settings of {_name_of(running)} on node {running.about.node}")


async def _inspect_host(config: Config) -> NodeView:
    ledger = KubeletLedger(str(config.kubelet_dir))
    use = SysfsUse(HostRoot(str(config.host_root)), "proc" if config.holders == "proc" else "passive")
    return await assessed(config, await ThreadedReader(sysfs_of(config)).scan(), ledger, use)


async def assessed(
    config: Config, functions: tuple[PciFunction, ...], ledger: LedgerReader, use: UseReader
) -> NodeView:
    """The view of a node with these functions, by the core that the daemon runs. `ledger` and `use` are read as often
    as the core requests it."""
    state = initial_state(core_settings_of(config))
    number = project(state).inspections.scan
    assert number is not None
    event: Event | None = HostScanned(number, functions)
    for _ in range(_ROUNDS):
        if event is None:
            break
        state, _effects = step(state, event, trio.current_time())
        event = await _answer(state, ledger, use)
    # This command needs no uevents: it has just scanned.
    return replace(view_of(state, trio.current_time()), uevents_problem="")


async def _answer(state: NodeState, ledger: LedgerReader, use: UseReader) -> Event | None:
    """The next requests of the core."""
    wanted = project(state)
    if wanted.ledger.read is not None:
        return await pod_resources.read(wanted.ledger.read, (), ledger)
    if wanted.poll.poll is not None:
        return GroupsObserved(wanted.poll.poll, await use.observe(wanted.poll.targets, whole=True))
    return None


def find_named(found: Inspected, name: str) -> ExplainedClaim | ExplainedDomain | None:
    """The claim or the compute domain of this NAMESPACE/NAME or UID; None if it is no name of one. Raises
    `UnknownAddressError`."""
    view, text = found.view, name.strip()
    claim = inspection_claims.claim_named(view.claims, text)
    of_domains = inspection_claims.claim_named(
        view.domains.claims if view.domains is not None else None, text
    )
    domain = inspection_domains.domain_named(view.domains, text)
    if domain is not None and (named := claim or of_domains) is not None:
        raise UnknownAddressError(
            f"{text} is a claim, UID {named.uid}, and a ComputeDomain, UID {domain.uid}: explain one by its UID"
        )
    if domain is not None:
        return ExplainedDomain(domain, found)
    if claim is not None or of_domains is not None:
        return ExplainedClaim(claim, found, of_domains)
    if "/" not in text and not is_domain_id(text):  # the UID of an object is such a UUID
        return None
    if not found.by_daemon:
        raise UnknownAddressError(f"only the running daemon knows claims, and {name} looks like one")
    if view.claims is None and view.domains is None:
        raise UnknownAddressError(
            f"the running daemon serves no claims (--dra off, --compute-domains off), so it knows no claim {name}"
        )
    raise UnknownAddressError(f"the running daemon knows no claim {name}; it knows {_known_claims(view)}")


def _known_claims(view: NodeView) -> str:
    claims = [str(claim) for claim in view.claims.claims] if view.claims is not None else []
    if view.domains is not None:
        claims += [str(claim) for claim in view.domains.claims.claims]
        claims += [f"the ComputeDomain {domain}" for domain in view.domains.domains]
    return ", ".join(claims) or "none"


def find(view: NodeView, address: str) -> DeviceView:
    """The device at `address`. Raises `UnknownAddressError`."""
    wanted = address.strip().lower()
    full = wanted if wanted.count(":") == 2 else f"0000:{wanted}"
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


def _addresses(devices: tuple[DeviceView, ...] | list[DeviceView]) -> str:
    return ", ".join(device.address for device in devices)


# --- inspect ----------------------------------------------------------------------------------------------


def as_json(found: Inspected) -> str:
    """The node, its resources as kubelet counts them, its devices, and the problems that hide more."""
    known = {
        "node": found.node,
        "source": "daemon" if found.by_daemon else "inspection",
        "source_problem": found.problem or None,
        "role": found.view.role if found.by_daemon else None,
        "resources": [_resource_dict(resource, found) for resource in found.view.resources],
        "devices": [_as_dict(device, found.view) for device in _shown(found)],
        "claims": inspection_claims.claims_dict(found.view.claims),
        "compute_domains": inspection_domains.domains_dict(found.view.domains),
        "ledger_problem": found.view.ledger_problem or None,
        "kubelet_problem": found.view.kubelet_problem or None,
        "uevents_problem": found.view.uevents_problem or None,
    }
    return json.dumps(known, indent=2, ensure_ascii=False)


def _resource_dict(resource: ResourceView, found: Inspected) -> dict[str, object]:
    return {
        "name": resource.name,
        "listed": resource.listed,
        "healthy": resource.healthy,
        "allocated": resource.allocated,
        "free": resource.free,
        "registered": resource.registered if found.by_daemon else None,
        "problem": (resource.problem or None) if found.by_daemon else None,
    }


def _shown(found: Inspected) -> list[DeviceView]:
    """The devices on the node, and those that are listed though they are gone."""
    return [device for device in found.view.devices if device.present or device.listed]


def _as_dict(device: DeviceView, view: NodeView) -> dict[str, object]:
    return {
        "address": device.address,
        "vendor": device.vendor,
        "device": device.device,
        "class": device.class_code,
        "driver": device.driver,
        "iommu_group": device.iommu_group,
        "group_members": [member.address for member in device.group],
        "numa_node": device.numa_node,
        "model": device.model,
        "resource": device.resource,
        "listed": device.listed,
        "health": device.health,
        "cause": device.cause or None,
        "reason": device.reason,
        "owner": device.owner,
        "holders": [{"pid": h.pid, "command": h.command, "pod_uid": h.pod_uid} for h in device.holders],
        "for_claims": inspection_claims.device_dict(device, view),
    }


TABLE_COLUMNS: Final = inspection_claims.COLUMNS
"""How wide the table may get: a reason that does not fit is continued below. Resource names have lines of their own, as
a name may have 75 characters."""

_REASON_MIN: Final = 30
"""A driver's long name must not squeeze the reason into a column of single words."""

_COLUMNS = ("ADDRESS", "ID", "DRIVER", "GROUP", "NUMA", "HEALTH", "REASON")


def as_table(found: Inspected) -> str:
    """The source of the view and what it lacks, then each resource with its totals and its devices."""
    devices = _shown(found)
    sections = [_heading(found)]
    of_claims = [
        *inspection_claims.sections(found.view.claims),
        *inspection_domains.sections(found.view.domains),
    ]
    if not devices:
        sections += [[NO_DEVICES], *of_claims]
        return "\n\n".join("\n".join(section) for section in sections)
    rows = {device.address: _row(device, found.view) for device in devices}
    widths = [max(len(row[i]) for row in (_COLUMNS, *rows.values())) for i in range(len(_COLUMNS) - 1)]
    totals = {resource.name: resource for resource in found.view.resources}
    for name in sorted({device.resource for device in devices}):
        of_it = [device for device in devices if device.resource == name]
        section = [name, *_wrapped(_totals(totals.get(name), len(of_it), found), indent=2)]
        for row in (_COLUMNS, *(rows[device.address] for device in of_it)):
            section += _lines(row, widths)
        sections.append(section)
    sections += of_claims
    return "\n\n".join("\n".join(section) for section in sections)


def _heading(found: Inspected) -> list[str]:
    problems = [
        ("uevents", found.view.uevents_problem),
        ("kubelet's ledger", found.view.ledger_problem),
        ("kubelet", found.view.kubelet_problem if found.by_daemon else ""),
    ]
    lines = _wrapped(f"Node {found.node}, seen by {found.source}")
    for name, problem in problems:
        lines += _wrapped(f"{name}: {problem}") if problem else []
    return lines


def _totals(resource: ResourceView | None, devices: int, found: Inspected) -> str:
    """Kubelet's counts of the resource, and whether it is registered."""
    if resource is None:
        return f"{devices} on this node, none listed"
    r = resource
    counts = f"{r.listed} listed, {r.healthy} Healthy, {r.allocated} allocated, {r.free} free"
    if not found.by_daemon:
        return counts
    return f"{counts}; {_registration(resource)}"


def _registration(resource: ResourceView) -> str:
    if resource.registered:
        return "registered with kubelet" + (f", but {resource.problem}" if resource.problem else "")
    return f"not registered with kubelet: {resource.problem or 'it is being registered'}"


def _row(device: DeviceView, view: NodeView) -> tuple[str, ...]:
    return (
        device.address,
        f"{device.vendor}:{device.device}" if device.present else "gone",
        device.driver or "-",
        "-" if device.iommu_group is None else str(device.iommu_group),
        "-" if device.numa_node is None else str(device.numa_node),
        inspection_claims.listing(device),
        inspection_claims.reason(device, view),
    )


def _lines(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    """The row, and below its reason the rest that does not fit."""
    before = "  " + "".join(f"{cell:<{width}}  " for cell, width in zip(row, widths, strict=False))
    room = max(_REASON_MIN, TABLE_COLUMNS - len(before))
    first, *rest = textwrap.wrap(row[-1], room, break_on_hyphens=False) or [""]
    return [(before + first).rstrip(), *(" " * len(before) + line for line in rest)]


def _wrapped(text: str, indent: int = 0) -> list[str]:
    margin = " " * indent
    return textwrap.wrap(
        text, TABLE_COLUMNS, initial_indent=margin, subsequent_indent=margin + "  ", break_on_hyphens=False
    )


# --- explain ----------------------------------------------------------------------------------------------


def explanation_json(explained: Explained) -> str:
    """The view of the device, as one object."""
    device, view = explained.device, explained.inspected.view
    resource = next((r for r in view.resources if r.name == device.resource), None)
    known: dict[str, Any] = {
        **_as_dict(device, view),
        "id": device.id,
        "present": device.present,
        "remedy": device.remedy,
        "group": [{"address": m.address, "driver": m.driver} for m in device.group],
        "registered": resource.registered if resource is not None else None,
        "registration_problem": (resource.problem or None) if resource is not None else None,
        "ledger_problem": view.ledger_problem or None,
        "kubelet_problem": view.kubelet_problem or None,
        "uevents_problem": view.uevents_problem or None,
        "history": [
            {
                "time": _time(explained.inspected.wall - c.age_s),
                "age_s": round(c.age_s, 1),
                "health": c.health,
                "cause": c.cause or None,
                "reason": c.reason,
            }
            for c in device.history
        ],
        "node": explained.inspected.node,
        "source": "daemon" if explained.inspected.by_daemon else "inspection",
        "source_problem": explained.inspected.problem or None,
    }
    del known["group_members"]
    return json.dumps(known, indent=2)


def explanation(explained: Explained) -> str:
    """The one reason in a sentence, then the device's owner and holders, its place in the host, and its former
    reasons."""
    device = explained.device
    facts = [
        ("To do", device.remedy),
        ("Owner", _owner(device, explained.inspected.view)),
        *inspection_claims.device_facts(device, explained.inspected.view),
        *(("Held by", str(holder)) for holder in device.holders),
        ("IOMMU group", _group(device)),
        ("Resource", _resource(device, explained.inspected)),
        ("Kubelet's ID", device.id),
        ("NUMA node", "none" if device.numa_node is None else str(device.numa_node)),
        ("Kubelet", explained.inspected.view.kubelet_problem or None),
        ("Ledger", explained.inspected.view.ledger_problem or None),
        ("Uevents", explained.inspected.view.uevents_problem or None),
        *(("Before", line) for line in _history(device.history, explained.inspected.wall)),
        ("Node", explained.inspected.node or None),
        ("Seen by", explained.inspected.source),
    ]
    seen = explained.inspected.view
    status = f"{inspection_claims.listing(device)}: {inspection_claims.reason(device, seen)}"
    return "\n".join([_title(device), status, "", *_columns(facts)])


def claim_explanation(explained: ExplainedClaim) -> str:
    """What its state means, its devices and what becomes of each at its end. Of one of both drivers once for each."""
    found, parts = explained.inspected, []
    if explained.claim is not None:
        facts = inspection_claims.claim_explanation(explained.claim, found.view, _ago(found))
        parts.append((inspection_claims.claim_title(explained.claim), facts))
    if explained.of_domains is not None and found.view.domains is not None:
        facts = inspection_domains.claim_explanation(explained.of_domains, found.view.domains, _ago(found))
        parts.append((inspection_domains.claim_titled(explained.of_domains), facts))
    parts[-1][1].extend(_seen(found))
    return "\n\n".join("\n".join([*title, "", *_columns(facts)]) for title, facts in parts)


def claim_explanation_json(explained: ExplainedClaim) -> str:
    """The view of the claim, as one object; of a claim of both drivers with a second one in `compute_domain_claim`."""
    found, known = explained.inspected, list[dict[str, Any]]()
    if (claim := explained.claim) is not None:
        known.append(inspection_claims.claim_dict(claim) | {"time": _ago(found)(claim.age_s)})
    if (claim := explained.of_domains) is not None and found.view.domains is not None:
        of_domains = inspection_domains.claim_explanation_dict(claim, found.view.domains)
        known.append(of_domains | {"time": _ago(found)(claim.age_s)})
    first, *second = known
    more = {"compute_domain_claim": second[0]} if second else {}
    return json.dumps({**first, **more, "node": found.node, "source": "daemon"}, indent=2)


def domain_explanation(explained: ExplainedDomain) -> str:
    """Whether its channels can be used here, what they need for it, and the claims."""
    domain, found = explained.domain, explained.inspected
    assert found.view.domains is not None
    facts = [*inspection_domains.domain_explanation(domain, found.view.domains), *_seen(found)]
    return "\n".join([*inspection_domains.domain_title(domain), "", *_columns(facts)])


def domain_explanation_json(explained: ExplainedDomain) -> str:
    """The view of the domain, as one object."""
    domain, found = explained.domain, explained.inspected
    assert found.view.domains is not None
    known = inspection_domains.domain_explanation_dict(domain, found.view.domains)
    return json.dumps({**known, "node": found.node, "source": "daemon"}, indent=2)


def _seen(found: Inspected) -> list[tuple[str, str]]:
    """By whom, on which node."""
    return [("Node", found.node)] * bool(found.node) + [("Seen by", found.source)]


def _ago(found: Inspected) -> Callable[[float], str]:
    """The time of day of so many seconds before the view was made."""
    return lambda age_s: _time(found.wall - age_s)


def _columns(facts: Sequence[tuple[str, str | None]]) -> list[str]:
    """Each fact with its name, which is not repeated."""
    width = max(len(name) for name, _ in facts)
    lines, last = [], ""
    for name, fact in facts:
        if fact is not None:
            lines.append(f"{'' if name == last else name:{width}}  {fact}")
            last = name
    return lines


def _title(device: DeviceView) -> str:
    if not device.present:
        return f"{device.address}  (not on this node any more)"
    return f"{device.address}  {device.model or 'unknown model'} ({device.vendor}:{device.device})"


def _owner(device: DeviceView, view: NodeView) -> str:
    """The owner, with a reservation: kubelet's ledger may have changed since it became unreadable."""
    if not view.ledger_problem:
        return device.owner or "none: kubelet has given it to no pod"
    if device.owner is not None:
        return f"{device.owner}, when kubelet's ledger was last readable"
    return "not known, as kubelet's ledger cannot be read"


def _group(device: DeviceView) -> str | None:
    if not device.present:
        return None
    if device.iommu_group is None:
        return "none"
    return f"{device.iommu_group}: " + ", ".join(_member(member) for member in device.group)


def _member(member: Member) -> str:
    return f"{member.address} ({member.driver or 'no driver'})"


def _resource(device: DeviceView, found: Inspected) -> str | None:
    if not device.resource:
        return None
    if not found.by_daemon:
        return device.resource
    resource = next((r for r in found.view.resources if r.name == device.resource), None)
    if resource is None:
        return f"{device.resource}, which is not advertised to kubelet"
    return f"{device.resource}, {_registration(resource)}"


def _history(history: tuple[Change, ...], wall: float) -> list[str]:
    """The newest first, in columns; `wall`: when the ages were counted."""
    rows = [
        (_time(wall - c.age_s), age(c.age_s), c.health or "not listed", c.reason) for c in reversed(history)
    ]
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
    return [
        "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]]) for row in rows
    ]


def _time(wall: float) -> str:
    """The time of day as the log has it, UTC, in seconds."""
    return datetime.fromtimestamp(wall, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def age(seconds: float) -> str:
    """How long ago, in the largest unit that is not 0."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit} ago"
    return "just now"
