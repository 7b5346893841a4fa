"""The output of `gpuactors inspect` and `gpuactors explain`: text, and values for JSON and YAML.

Must not decide anything: what is said of a device comes from the view.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from gpuactors.cli.inspect import claims_report, domains_report
from gpuactors.cli.inspect.claims_report import lasted, wrapped
from gpuactors.cli.inspect.view import (
    NO_DEVICES,
    AnyExplained,
    Explained,
    ExplainedClaim,
    ExplainedDomain,
    ExplainedPod,
    ExplainedResource,
    Inspected,
)
from gpuactors.cli.output import UNFOLDED, folded
from gpuactors.control.view import Change, DeviceView, LastCallView, Member, NodeView, ResourceView
from gpuactors.core.values.quote import quoted_id

# --- inspect ----------------------------------------------------------------------------------------------


def as_json(found: Inspected) -> str:
    """The node, its resources as kubelet counts them, its devices, and the problems that hide more."""
    known = {
        "node": found.node,
        "source": "daemon" if found.by_daemon else "inspection",
        "source_problem": found.problem or None,
        "role": found.view.role if found.by_daemon else None,
        "resources": [_resource_dict(resource, found) for resource in found.view.resources],
        "devices": [_as_dict(device, found) for device in shown(found.view)],
        "claims": claims_report.claims_dict(found.view.claims),
        "compute_domains": domains_report.domains_dict(found.view.domains),
        "offers_problem": found.view.offers_problem or None,
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


def shown(view: NodeView) -> list[DeviceView]:
    """The devices on the node, and those that are listed though they are gone."""
    return [device for device in view.devices if device.present or device.listed]


def _as_dict(device: DeviceView, found: Inspected) -> dict[str, object]:
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
        "for_claims": claims_report.device_dict(device, found.view),
        "nodes": list(device.nodes),
        "since_s": _rounded(device.since_s) if found.by_daemon else None,
    }


_CDEVS: Final = "/dev/vfio/devices/"

_REASON_MIN: Final = 30
"""A driver's long name must not squeeze the reason into a column of single words."""

_COLUMNS: Final = ("ADDRESS", "ID", "DRIVER", "GROUP", "NUMA", "HEALTH", "REASON")

WIDE: Final = (
    *(
        "ADDRESS",
        "ID",
        "DRIVER",
        "GROUP",
        "CDEV",
        "NUMA",
        "HEALTH",
        "CAUSE",
        "SINCE",
        "OWNER",
        "HOLDER",
        "REASON",
    ),
)
"""The columns of `-o wide`, which may be as wide as they need."""


def as_table(found: Inspected, columns: int = UNFOLDED) -> str:
    """The source of the view and what it lacks, then each resource with its totals and its devices, in so many columns:
    a reason that does not fit is continued below. Resource names have lines of their own, as a name may have 75
    characters."""
    return _table(found, _COLUMNS, columns, columns)


def as_wide(found: Inspected, columns: int = UNFOLDED) -> str:
    """`as_table` with more columns, and each GPU in one line however long."""
    return _table(found, WIDE, columns, UNFOLDED)


def _table(found: Inspected, names: Sequence[str], columns: int, columns_of_rows: int) -> str:
    devices = shown(found.view)
    sections = [_heading(found, columns)]
    of_claims = [
        *claims_report.sections(found.view.claims, columns),
        *domains_report.sections(found.view.domains, columns),
    ]
    if not devices:
        sections += [wrapped(NO_DEVICES, columns), *of_claims]
        return "\n\n".join("\n".join(section) for section in sections)
    rows = {device.address: cells(device, found.view, names) for device in devices}
    widths = [max(len(row[i]) for row in (names, *rows.values())) for i in range(len(names) - 1)]
    resources = {resource.name: resource for resource in found.view.resources}
    for name in sorted({device.resource for device in devices}):
        of_it = [device for device in devices if device.resource == name]
        section = [name, *wrapped(_totals(resources.get(name), len(of_it), found), columns, indent=2)]
        for row in (names, *(rows[device.address] for device in of_it)):
            section += _lines(row, widths, columns_of_rows)
        sections.append(section)
    sections += of_claims
    return "\n\n".join("\n".join(section) for section in sections)


def _heading(found: Inspected, columns: int) -> list[str]:
    problems = [
        ("settings", found.view.offers_problem),
        ("uevents", found.view.uevents_problem),
        ("kubelet's ledger", found.view.ledger_problem),
        ("kubelet", found.view.kubelet_problem if found.by_daemon else ""),
    ]
    lines = wrapped(f"Node {found.node}, seen by {found.source}", columns)
    for name, problem in problems:
        lines += wrapped(f"{name}: {problem}", columns) if problem else []
    return lines


def _totals(resource: ResourceView | None, devices: int, found: Inspected) -> str:
    """Kubelet's counts of the resource, and whether it is registered."""
    if resource is None:
        return f"{devices} on this node, none listed"
    return totals(resource) if found.by_daemon else _counts(resource)


def totals(resource: ResourceView) -> str:
    """Kubelet's counts of the resource, and whether the daemon has registered it."""
    return f"{_counts(resource)}; {registration(resource)}"


def _counts(r: ResourceView) -> str:
    return f"{r.listed} listed, {r.healthy} Healthy, {r.allocated} allocated, {r.free} free"


def registration(resource: ResourceView) -> str:
    """Whether kubelet has accepted it, and else why not."""
    if resource.registered:
        return "registered with kubelet" + (f", but {resource.problem}" if resource.problem else "")
    return f"not registered with kubelet: {resource.problem or 'it is being registered'}"


_CELLS: Final[Mapping[str, Callable[[DeviceView, NodeView], str]]] = {
    "ADDRESS": lambda device, _: device.address,
    "ID": lambda device, _: f"{device.vendor}:{device.device}" if device.present else "gone",
    "DRIVER": lambda device, _: device.driver or "-",
    "GROUP": lambda device, _: "-" if device.iommu_group is None else str(device.iommu_group),
    "CDEV": lambda device, _: ",".join(filter(None, map(_cdev, device.nodes))) or "-",
    "NUMA": lambda device, _: "-" if device.numa_node is None else str(device.numa_node),
    "HEALTH": lambda device, _: claims_report.listing(device),
    "CAUSE": lambda device, _: device.cause or "-",
    "SINCE": lambda device, _: lasted(device.since_s) if device.since_s is not None else "-",
    "OWNER": lambda device, _: device.owner or "-",
    "HOLDER": lambda device, _: ",".join(f"{h.pid} ({quoted_id(h.command)})" for h in device.holders) or "-",
    "REASON": claims_report.reason,
}
"""Of each column of a table, what it has of a device."""


def cells(device: DeviceView, view: NodeView, names: Sequence[str]) -> tuple[str, ...]:
    """A device in the columns with these names."""
    return tuple(_CELLS[name](device, view) for name in names)


def _cdev(node: str) -> str:
    return node.removeprefix(_CDEVS) if node.startswith(_CDEVS) else ""


def _lines(row: Sequence[str], widths: Sequence[int], columns: int) -> list[str]:
    """The row, and below its reason the rest that does not fit."""
    before = "  " + "".join(f"{cell:<{width}}  " for cell, width in zip(row, widths, strict=False))
    room = max(_REASON_MIN, columns - len(before))
    first, *rest = folded(row[-1], room) or [""]
    return [(before + first).rstrip(), *(" " * len(before) + line for line in rest)]


# --- explain ----------------------------------------------------------------------------------------------


def explained_text(found: AnyExplained, columns: int = UNFOLDED) -> str:
    """The text output of `explain`, in so many columns."""
    match found:
        case Explained():
            return explanation(found, columns)
        case ExplainedClaim():
            return claim_explanation(found, columns)
        case ExplainedDomain():
            return domain_explanation(found, columns)
        case ExplainedPod():
            return pod_explanation(found, columns)
        case ExplainedResource():
            return resource_explanation(found, columns)


def explained_json(found: AnyExplained) -> str:
    """The output of `explain -o json`."""
    match found:
        case Explained():
            return explanation_json(found)
        case ExplainedClaim():
            return claim_explanation_json(found)
        case ExplainedDomain():
            return domain_explanation_json(found)
        case ExplainedPod():
            return pod_explanation_json(found)
        case ExplainedResource():
            return resource_explanation_json(found)


def explanation_json(explained: Explained) -> str:
    """The view of the device, as one object."""
    device, view = explained.device, explained.inspected.view
    resource = next((r for r in view.resources if r.name == device.resource), None)
    known: dict[str, Any] = {
        **_as_dict(device, explained.inspected),
        "id": device.id,
        "present": device.present,
        "remedy": device.remedy,
        "since": _when(device.since_s, explained.inspected),
        "inspected_s": _rounded(device.inspected_s),
        "polled_s": _rounded(device.polled_s),
        "ledger_age_s": _rounded(view.ledger_age_s),
        "calls": [
            {
                "call": call.kind,
                "time": _when(call.age_s, explained.inspected),
                "age_s": _rounded(call.age_s),
                "granted": not call.refused,
                "causes": list(call.causes),
                "reason": call.refused or None,
            }
            for call in device.calls
        ],
        "group": [{"address": m.address, "driver": m.driver} for m in device.group],
        "registered": resource.registered if resource is not None else None,
        "registration_problem": (resource.problem or None) if resource is not None else None,
        "ledger_problem": view.ledger_problem or None,
        "kubelet_problem": view.kubelet_problem or None,
        "uevents_problem": view.uevents_problem or None,
        "history": [
            {
                "time": utc(explained.inspected.wall - c.age_s),
                "age_s": round(c.age_s, 1),
                "health": c.health,
                "cause": c.cause or None,
                "reason": c.reason,
            }
            for c in device.history
        ],
        **_source(explained.inspected),
    }
    del known["group_members"]
    return json.dumps(known, indent=2)


def explanation(explained: Explained, columns: int = UNFOLDED) -> str:
    """The one reason in a sentence, then the device's owner and holders, its place in the host, and its former
    reasons."""
    device = explained.device
    facts = [
        *_since(device.since_s, explained.inspected),
        ("To do", device.remedy),
        ("Owner", _owner(device, explained.inspected.view)),
        *claims_report.device_facts(device, explained.inspected.view),
        *(("Held by", str(holder)) for holder in device.holders),
        ("IOMMU group", _group(device)),
        ("Resource", _resource(device, explained.inspected)),
        ("Kubelet's ID", device.id),
        ("NUMA node", "none" if device.numa_node is None else str(device.numa_node)),
        ("Inspected", _ago_text(device.inspected_s)),
        ("Use polled", _ago_text(device.polled_s)),
        ("Ledger read", _ago_text(explained.inspected.view.ledger_age_s)),
        *((f"Last {call.kind}", _call(call, explained.inspected)) for call in device.calls),
        ("Kubelet", explained.inspected.view.kubelet_problem or None),
        ("Ledger", explained.inspected.view.ledger_problem or None),
        ("Uevents", explained.inspected.view.uevents_problem or None),
        *(("Before", line) for line in _history(device.history, explained.inspected.wall)),
        ("Node", explained.inspected.node or None),
        ("Seen by", explained.inspected.source),
    ]
    seen = explained.inspected.view
    status = f"{claims_report.listing(device)}: {claims_report.reason(device, seen)}"
    return "\n".join([*_title([_title_of(device), status], columns), "", *_columns(facts, columns)])


def claim_explanation(explained: ExplainedClaim, columns: int = UNFOLDED) -> str:
    """The meaning of its state, its devices, and the fate of each at its end. Of one of both drivers once for each."""
    found, parts = explained.inspected, []
    if explained.claim is not None:
        facts = claims_report.claim_explanation(explained.claim, found.view, _ago(found))
        parts.append((claims_report.claim_title(explained.claim), facts))
    if explained.of_domains is not None and found.view.domains is not None:
        facts = domains_report.claim_explanation(explained.of_domains, found.view.domains, _ago(found))
        parts.append((domains_report.claim_titled(explained.of_domains), facts))
    parts[-1][1].extend(_seen(found))
    return "\n\n".join(
        "\n".join([*_title(title, columns), "", *_columns(facts, columns)]) for title, facts in parts
    )


def claim_explanation_json(explained: ExplainedClaim) -> str:
    """The view of the claim, as one object; of a claim of both drivers with a second one in `compute_domain_claim`."""
    found, known = explained.inspected, list[dict[str, Any]]()
    if (claim := explained.claim) is not None:
        known.append(claims_report.claim_dict(claim) | {"time": _ago(found)(claim.age_s)})
    if (claim := explained.of_domains) is not None and found.view.domains is not None:
        of_domains = domains_report.claim_explanation_dict(claim, found.view.domains)
        known.append(of_domains | {"time": _ago(found)(claim.age_s)})
    first, *second = known
    more = {"compute_domain_claim": second[0]} if second else {}
    return json.dumps({**first, **more, "node": found.node, "source": "daemon"}, indent=2)


def domain_explanation(explained: ExplainedDomain, columns: int = UNFOLDED) -> str:
    """Whether its channels can be used here, what they need for it, and the claims."""
    domain, found = explained.domain, explained.inspected
    assert found.view.domains is not None
    uid, *facts = domains_report.domain_explanation(domain, found.view.domains)
    facts = [uid, *_since(domain.since_s, found), *facts, *_seen(found)]
    title = _title(domains_report.domain_title(domain), columns)
    return "\n".join([*title, "", *_columns(facts, columns)])


def domain_explanation_json(explained: ExplainedDomain) -> str:
    """The view of the domain, as one object."""
    domain, found = explained.domain, explained.inspected
    assert found.view.domains is not None
    known = domains_report.domain_explanation_dict(domain, found.view.domains)
    times = {
        "since": _when(domain.since_s, found),
        "since_s": _rounded(domain.since_s),
        "read_s": _rounded(domain.read_s),
    }
    return json.dumps({**known, **times, "node": found.node, "source": "daemon"}, indent=2)


def pod_explanation(explained: ExplainedPod, columns: int = UNFOLDED) -> str:
    """The GPUs that kubelet has given it, and by which claims; those that it has left behind; claims without a GPU."""
    pod, found = explained.pod, explained.inspected
    had = f"has {_gpus(len(pod.devices))} by kubelet's ledger" if pod.devices else ""
    if not (pod.devices or pod.left):
        had = "has no GPU by kubelet's ledger, and " + (
            "a claim" if len(pod.claims) == 1 else f"{len(pod.claims)} claims"
        )
    left = f"it has left kubelet's ledger and may still hold {_gpus(len(pod.left))}" if pod.left else ""
    facts: list[tuple[str, str | None]] = [("UID", pod.uid or None)]
    facts += [("GPU", line) for address in pod.devices for line in _gpu(address, found.view)]
    facts += [("Held on", line) for address in pod.left for line in _gpu(address, found.view)]
    facts += [("Claim", line) for name in pod.claims for line in _claim(name, found.view)]
    facts += [*_of_ledger(found), *_seen(found)]
    title = [f"Pod {pod}", "; ".join(filter(None, (had, left)))]
    return "\n".join([*_title(title, columns), "", *_columns(facts, columns)])


def pod_explanation_json(explained: ExplainedPod) -> str:
    """The pod with its devices, as one object."""
    pod, found = explained.pod, explained.inspected
    known = {
        "pod": pod.name or None,
        "uid": pod.uid or None,
        "devices": [_as_dict(d, found) for d in found.view.devices if d.address in pod.devices],
        "left": [_as_dict(d, found) for d in found.view.devices if d.address in pod.left],
        "claims": list(pod.claims),
        "ledger_problem": found.view.ledger_problem or None,
    }
    return json.dumps(known | _source(found), indent=2, ensure_ascii=False)


def resource_explanation(explained: ExplainedResource, columns: int = UNFOLDED) -> str:
    """Kubelet's counts of it, each GPU with its health and reason, and the pods that have some."""
    found, devices = explained.inspected, explained.devices
    models = dict.fromkeys(
        f"{d.model or 'unknown model'} ({d.vendor}:{d.device})" for d in devices if d.present
    )
    facts: list[tuple[str, str | None]] = [("Model", model) for model in models]
    facts += [
        ("GPU", f"{d.address}, {claims_report.listing(d)}: {claims_report.reason(d, found.view)}")
        for d in devices
    ]
    of_it = {device.address for device in devices}
    for pod in found.view.pods:
        if mine := [address for address in pod.devices if address in of_it]:
            facts.append(("Pod", f"{pod}: {', '.join(mine)}"))
    facts += [*_of_ledger(found), *_seen(found)]
    title = [explained.name, _totals(explained.resource, len(devices), found)]
    return "\n".join([*_title(title, columns), "", *_columns(facts, columns)])


def resource_explanation_json(explained: ExplainedResource) -> str:
    """The resource with its devices, as one object."""
    found, resource = explained.inspected, explained.resource
    of_it = {device.address for device in explained.devices}
    pods = {str(pod): [a for a in pod.devices if a in of_it] for pod in found.view.pods}
    known = {
        "name": explained.name,
        **(_resource_dict(resource, found) if resource is not None else {}),
        "devices": [_as_dict(device, found) for device in explained.devices],
        "pods": {name: addresses for name, addresses in pods.items() if addresses},
        "ledger_problem": found.view.ledger_problem or None,
    }
    return json.dumps(known | _source(found), indent=2, ensure_ascii=False)


def _gpus(count: int) -> str:
    return f"{count} GPU" + "s" * (count != 1)


def _gpu(address: str, view: NodeView) -> list[str]:
    """Lines of a GPU: model and resource, then health and reason."""
    device = next((d for d in view.devices if d.address == address), None)
    if device is None:
        return [f"{address}, which the selectors do not match"]
    what = [device.model or "unknown model", device.resource] if device.present else ["gone from this node"]
    return [
        ", ".join(filter(None, (address, *what))),
        f"  {claims_report.listing(device)}: {claims_report.reason(device, view)}",
    ]


def _claim(name: str, view: NodeView) -> list[str]:
    """Lines of a claim, once for each driver that knows it: its state, then why it is not further."""
    of_domains = view.domains.claims if view.domains is not None else None
    lines = []
    for claim in (claims_report.claim_named(claims, name) for claims in (view.claims, of_domains)):
        if claim is not None:
            lines += [
                f"{claim}: {claim.state} for {lasted(claim.age_s)}",
                *([f"  {claim.problem}"] * bool(claim.problem)),
            ]
    return lines or [f"{name}: not known here; kubelet has not asked for it now, or it is another driver's"]


def _of_ledger(found: Inspected) -> list[tuple[str, str | None]]:
    return [
        ("Ledger read", _ago_text(found.view.ledger_age_s) if found.by_daemon else None),
        ("Ledger", found.view.ledger_problem or None),
    ]


def _source(found: Inspected) -> dict[str, object]:
    return {
        "node": found.node,
        "source": "daemon" if found.by_daemon else "inspection",
        "source_problem": found.problem or None,
    }


def _seen(found: Inspected) -> list[tuple[str, str]]:
    """By whom, on which node."""
    return [("Node", found.node)] * bool(found.node) + [("Seen by", found.source)]


def _ago(found: Inspected) -> Callable[[float], str]:
    """The time of day of so many seconds before the view was made."""
    return lambda age_s: utc(found.wall - age_s)


def _title(lines: Iterable[str], columns: int) -> list[str]:
    return [part for line in lines for part in wrapped(line, columns)]


def _columns(facts: Sequence[tuple[str, str | None]], columns: int) -> list[str]:
    """Each fact with its name, which is not repeated, and below it what does not fit."""
    width = max(len(name) for name, _ in facts)
    lines, last = [], ""
    for name, fact in facts:
        if fact is not None:
            before = f"{'' if name == last else name:{width}}  "
            lines += folded(fact, max(columns, width + _REASON_MIN), before, " " * len(before))
            last = name
    return lines


def _since(age_s: float | None, found: Inspected) -> list[tuple[str, str]]:
    """Since when, and for how long; the command's own inspection knows no past."""
    if age_s is None or not found.by_daemon:
        return []
    return [("Since", f"{utc(found.wall - age_s)}, for {lasted(age_s)}")]


def _ago_text(age_s: float | None) -> str | None:
    return age(age_s) if age_s is not None else None


def _when(age_s: float | None, found: Inspected) -> str | None:
    return utc(found.wall - age_s) if age_s is not None and found.by_daemon else None


def _rounded(age_s: float | None) -> float | None:
    return round(age_s, 1) if age_s is not None else None


def _call(call: LastCallView, found: Inspected) -> str:
    """When it was answered, and how."""
    answer = "refused: " + call.refused if call.refused else "granted"
    return f"{utc(found.wall - call.age_s)}, {age(call.age_s)}: {answer}"


def _title_of(device: DeviceView) -> str:
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
    return f"{device.resource}, {registration(resource)}"


def _history(history: tuple[Change, ...], wall: float) -> list[str]:
    """The newest first, in columns; `wall`: when the ages were counted."""
    rows = [
        (utc(wall - c.age_s), age(c.age_s), c.health or "not listed", c.reason) for c in reversed(history)
    ]
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
    return [
        "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]]) for row in rows
    ]


def utc(wall: float) -> str:
    """The time of day as the log has it, UTC, in seconds; `wall` in seconds since 1970."""
    return datetime.fromtimestamp(wall, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def age(seconds: float) -> str:
    """How long ago, in the largest unit that is not 0."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit} ago"
    return "just now"
