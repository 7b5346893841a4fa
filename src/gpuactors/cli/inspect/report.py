"""The output of `gpuactors inspect` and `gpuactors explain`: text, and values for JSON and YAML.

Must not decide anything: what is said of a device comes from the view.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from gpuactors.cli.inspect import cards, claims_report, domains_report
from gpuactors.cli.inspect.claims_report import lasted, wrapped
from gpuactors.cli.inspect.colours import Paint, Part, plain
from gpuactors.cli.inspect.view import (
    NO_DEVICES,
    AnyExplained,
    Explained,
    ExplainedCard,
    ExplainedClaim,
    ExplainedDomain,
    ExplainedPod,
    ExplainedResource,
    Inspected,
)
from gpuactors.cli.output import UNFOLDED, folded
from gpuactors.control.view import (
    Change,
    DeviceView,
    LastCallView,
    Member,
    NodeView,
    PartitionView,
    ReleaseView,
    ResourceView,
)
from gpuactors.core.values.cause import MAY_LAST, Cause
from gpuactors.core.values.model import Health
from gpuactors.core.values.quote import quoted_id

# --- inspect ----------------------------------------------------------------------------------------------


def as_json(inspected: Inspected) -> str:
    """Return the node, its resources as kubelet counts them, its devices, and the problems that hide more."""
    content = {
        **_source(inspected),
        "role": inspected.view.role if inspected.by_daemon else None,
        "resources": [_resource_dict(resource, inspected) for resource in inspected.view.resources],
        "devices": [_device_dict(device, inspected) for device in shown(inspected.view)],
        "cards": [cards.card_dict(card) for card in inspected.view.cards],
        "claims": claims_report.claims_dict(inspected.view.claims),
        "compute_domains": domains_report.domains_dict(inspected.view.domains),
        "offers_problem": inspected.view.offers_problem or None,
        "config_problem": inspected.view.config_problem or None,
        "ledger_problem": inspected.view.ledger_problem or None,
        "kubelet_problem": inspected.view.kubelet_problem or None,
        "uevents_problem": inspected.view.uevents_problem or None,
    }
    return json.dumps(content, indent=2, ensure_ascii=False)


def _resource_dict(resource: ResourceView, inspected: Inspected) -> dict[str, object]:
    return {
        "name": resource.name,
        "listed": resource.listed,
        "healthy": resource.healthy,
        "allocated": resource.allocated,
        "free": resource.free,
        "registered": resource.registered if inspected.by_daemon else None,
        "problem": (resource.problem or None) if inspected.by_daemon else None,
    }


def shown(view: NodeView) -> list[DeviceView]:
    """Return the devices on the node, and those that are listed though they are gone."""
    return [device for device in view.devices if device.present or device.listed]


def _device_dict(device: DeviceView, inspected: Inspected) -> dict[str, object]:
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
        "needs_hand": device.listed and device.health == Health.UNHEALTHY and device.cause not in MAY_LAST,
        "reason": device.reason,
        "owner": device.owner,
        "holders": [{"pid": h.pid, "command": h.command, "pod_uid": h.pod_uid} for h in device.holders],
        "for_claims": claims_report.device_dict(device, inspected.view),
        "nodes": list(device.nodes),
        "since_s": _rounded(device.since_s) if inspected.by_daemon else None,
        "kind": device.kind,
        "parent": device.parent,
        "profile": device.profile,
        "vm": device.vm,
        "egm": {"name": egm.name, "node": egm.node or None, "gpus": list(egm.gpus)}
        if (egm := device.egm) is not None
        else None,
        "partitions": [
            {
                "name": one.name,
                "gpus": list(one.gpus),
                "is_active": one.is_active,
                "state": one.state,
                "problem": one.problem or None,
            }
            for one in device.partitions
        ],
    }


_CDEVS: Final = "/dev/vfio/devices/"

_GAP: Final = "  "
"""Between two columns, and before the first."""

_PART_INDENT: Final = 4
"""The indent of the parts of a card, below the name of their resource."""

_REASON_MIN: Final = 30
"""The least width of a reason: a driver's long name must not squeeze it into a column of single words."""

_COLUMNS: Final = ("ADDRESS", "ID", "DRIVER", "GROUP", "NUMA", "HEALTH", "REASON")
_LEFT_OUT: Final = ("ID", "NUMA", "GROUP")
"""Which of them are left out, one after the other, where no room is left for a reason. `-o wide` has them."""


def as_table(inspected: Inspected, columns: int = UNFOLDED, paint: Paint = plain) -> str:
    """Return the source of the view and what it lacks, then each resource with its totals and its devices, in so many
    columns: a reason that does not fit is continued below. Resource names have lines of their own, as a name may have
    75 characters."""
    return _table(inspected, _COLUMNS, columns, columns, paint)


def as_wide(inspected: Inspected, columns: int = UNFOLDED, paint: Paint = plain) -> str:
    """Return the table with more columns, and each GPU in one line however long."""
    return _table(inspected, WIDE, columns, UNFOLDED, paint)


def _table(
    inspected: Inspected, names: Sequence[str], columns: int, columns_of_rows: int, paint: Paint
) -> str:
    devices = shown(inspected.view)
    sections = [_heading(inspected, columns, paint)]
    claim_sections = [
        [paint(Part.HEADING, title), *(line for _, line in further)]
        for (_, title), *further in (
            *claims_report.sections(inspected.view.claims, columns),
            *domains_report.sections(inspected.view.domains, columns),
        )
    ]
    if not devices:
        sections += [wrapped(NO_DEVICES, columns), *claim_sections]
        return "\n\n".join("\n".join(section) for section in sections)
    of_cards = cards.cards_of(inspected.view, devices)
    divided = {card.address for card in of_cards}
    whole = [d for d in devices if d.parent is None and d.address not in divided]
    full_rows = {device.address: cells(device, inspected.view, names) for device in whole}
    head, rows, widths = _fitting(names, full_rows, columns_of_rows)
    resources = {resource.name: resource for resource in inspected.view.resources}
    for name in sorted({device.resource for device in devices if device.address not in divided}):
        gpus = [device for device in whole if device.resource == name]
        parts = [device for device in devices if device.parent is not None and device.resource == name]
        section = [paint(Part.HEADING, name)]
        section += _totals_lines(resources.get(name), len(gpus) + len(parts), inspected, columns, paint)
        if parts:
            section += wrapped(f"parts of {cards.places(parts, of_cards)}", columns, indent=2)
        if gpus:
            section += _lines(head, widths, columns_of_rows)
        for device in gpus:
            section += _lines(rows[device.address], widths, columns_of_rows, paint=_of_row(head, paint))
        sections.append(section)
    sections += [_card_lines(card, inspected.view, names, columns, paint) for card in of_cards]
    sections += claim_sections
    return "\n\n".join("\n".join(section) for section in sections)


def _fitting(
    names: Sequence[str], rows: Mapping[str, Sequence[str]], columns: int
) -> tuple[Sequence[str], Mapping[str, Sequence[str]], Sequence[int]]:
    """Return the columns that leave room for a reason, their rows, and the width of each before the reason."""
    for left_out in (None, *_LEFT_OUT):
        chosen = [i for i, name in enumerate(names) if name != left_out]
        names = [names[i] for i in chosen]
        rows = {address: [row[i] for i in chosen] for address, row in rows.items()}
        widths = [max(len(row[i]) for row in (names, *rows.values())) for i in range(len(names) - 1)]
        if sum(widths) + len(_GAP) * (len(widths) + 1) + _REASON_MIN <= columns:
            break
    return names, rows, widths


def _card_lines(
    card: cards.Card, view: NodeView, names: Sequence[str], columns: int, paint: Paint
) -> list[str]:
    """Return the card, then its parts by resource and profile, each part in one line however long."""
    shown_names = cards.names_of_columns(card, names[:-1] if names == WIDE else cards.COLUMNS)
    full_rows = {part.address: cells(part, view, shown_names) for part in card.parts}
    room = UNFOLDED if names == WIDE else columns - _PART_INDENT + len(_GAP)
    head, rows, widths = _fitting(shown_names, full_rows, room)
    lines = [paint(Part.HEADING, line) for line in wrapped(cards.title(card, view), columns)]
    for (resource, profile), parts in cards.by_resource(card.parts).items():
        named = f"{resource} ({profile})" if profile else resource
        lines += wrapped(f"{named}: {cards.counted(parts)}", columns, indent=2)
        lines += _lines(head, widths, UNFOLDED, _PART_INDENT)
        for part in parts:
            lines += _lines(rows[part.address], widths, UNFOLDED, _PART_INDENT, _of_row(head, paint))
        lines += cards.reasons(parts, view, columns)
    return lines


def _heading(inspected: Inspected, columns: int, paint: Paint) -> list[str]:
    title = wrapped(f"Node {inspected.node}, seen by {inspected.source}", columns)
    lines = [paint(Part.HEADING, line) for line in title]
    for name, problem in inspected.view.problems:
        if problem and (inspected.by_daemon or name != "kubelet"):
            lines += [paint(Part.PROBLEM, line) for line in wrapped(f"{name}: {problem}", columns)]
    return lines


def _totals_lines(
    resource: ResourceView | None, devices: int, inspected: Inspected, columns: int, paint: Paint
) -> list[str]:
    lines = wrapped(_totals(resource, devices, inspected), columns, indent=2)
    if resource is None or not inspected.by_daemon or (resource.registered and not resource.problem):
        return lines
    return [paint(Part.PROBLEM, line) for line in lines]


def _totals(resource: ResourceView | None, devices: int, inspected: Inspected) -> str:
    """Return kubelet's counts of the resource, and whether it is registered."""
    if resource is None:
        return f"{devices} on this node, none listed"
    return totals(resource) if inspected.by_daemon else _counts(resource)


def totals(resource: ResourceView) -> str:
    """Return kubelet's counts of the resource, and whether the daemon has registered it."""
    return f"{_counts(resource)}; {registration(resource)}"


def _counts(r: ResourceView) -> str:
    return f"{r.listed} listed, {r.healthy} Healthy, {r.allocated} allocated, {r.free} free"


def registration(resource: ResourceView) -> str:
    """Return whether kubelet has accepted the resource, and else why not."""
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
    "VM": lambda device, _: device.vm or "-",
    "PART OF": lambda device, _: device.parent or "-",
    "HOLDER": lambda device, _: ",".join(f"{h.pid} ({quoted_id(h.command)})" for h in device.holders) or "-",
    "REASON": claims_report.reason,
}
"""The columns of a table, each with the function that returns its cell for a device."""

WIDE: Final = tuple(name for name in _CELLS if name != cards.PARENT)
"""The columns of `-o wide`, which may be as wide as they need."""


def cells(device: DeviceView, view: NodeView, names: Sequence[str]) -> tuple[str, ...]:
    """Return a device in the columns with these names."""
    return tuple(_CELLS[name](device, view) for name in names)


def _cdev(node: str) -> str:
    return node.removeprefix(_CDEVS) if node.startswith(_CDEVS) else ""


def _of_row(names: Sequence[str], paint: Paint) -> Callable[[int, str], str]:
    """Return the function that paints a cell, by the number of its column."""
    return lambda i, cell: paint(Part.HEALTH, cell) if names[i] == "HEALTH" else cell


def _lines(
    row: Sequence[str],
    widths: Sequence[int],
    columns: int,
    indent: int = 2,
    paint: Callable[[int, str], str] = lambda _, cell: cell,
) -> list[str]:
    """Return the row, and below its last cell what does not fit."""
    padded = [f"{cell:<{width}}{_GAP}" for cell, width in zip(row, widths, strict=False)]
    before = indent + sum(map(len, padded))
    first, *continued = folded(row[-1], max(_REASON_MIN, columns - before)) or [""]
    painted = " " * indent + "".join(paint(i, cell) for i, cell in enumerate(padded))
    return [(painted + first).rstrip(), *(" " * before + line for line in continued)]


# --- explain ----------------------------------------------------------------------------------------------


def explained_text(explained: AnyExplained, columns: int = UNFOLDED) -> str:
    """Return the text output of `explain`, in so many columns."""
    match explained:
        case Explained():
            return explanation(explained, columns)
        case ExplainedCard():
            return card_explanation(explained, columns)
        case ExplainedClaim():
            return claim_explanation(explained, columns)
        case ExplainedDomain():
            return domain_explanation(explained, columns)
        case ExplainedPod():
            return pod_explanation(explained, columns)
        case ExplainedResource():
            return resource_explanation(explained, columns)


def explained_json(explained: AnyExplained) -> str:
    """Return the output of `explain -o json`."""
    match explained:
        case Explained():
            return explanation_json(explained)
        case ExplainedCard():
            return card_explanation_json(explained)
        case ExplainedClaim():
            return claim_explanation_json(explained)
        case ExplainedDomain():
            return domain_explanation_json(explained)
        case ExplainedPod():
            return pod_explanation_json(explained)
        case ExplainedResource():
            return resource_explanation_json(explained)


def explanation_json(explained: Explained) -> str:
    """Return the view of the device, as one object."""
    device, inspected, view = explained.device, explained.inspected, explained.inspected.view
    resource = next((r for r in view.resources if r.name == device.resource), None)
    content: dict[str, Any] = {
        **_device_dict(device, inspected),
        "id": device.id,
        "present": device.present,
        "remedy": device.remedy,
        "since": _when(device.since_s, inspected),
        "inspected_s": _rounded(device.inspected_s),
        "polled_s": _rounded(device.polled_s),
        "ledger_age_s": _rounded(view.ledger_age_s),
        "calls": [
            {
                "call": call.kind,
                "time": _when(call.age_s, inspected),
                "age_s": _rounded(call.age_s),
                "granted": not call.refused,
                "causes": list(call.causes),
                "reason": call.refused or None,
            }
            for call in device.calls
        ],
        "dead": device.dead,
        "releases": [
            {
                "tenant": release.tenant,
                "time": utc(inspected.wall - release.age_s),
                "age_s": round(release.age_s, 1),
                "reset_methods": release.reset_methods,
                "enumerated_again": release.enumerated_again,
            }
            for release in device.releases
        ],
        "group": [{"address": m.address, "driver": m.driver} for m in device.group],
        "registered": resource.registered if resource is not None else None,
        "registration_problem": (resource.problem or None) if resource is not None else None,
        "ledger_problem": view.ledger_problem or None,
        "kubelet_problem": view.kubelet_problem or None,
        "uevents_problem": view.uevents_problem or None,
        "config_problem": view.config_problem or None,
        "history": [
            {
                "time": utc(inspected.wall - c.age_s),
                "age_s": round(c.age_s, 1),
                "health": c.health,
                "cause": c.cause or None,
                "reason": c.reason,
            }
            for c in device.history
        ],
        **_source(inspected),
    }
    if parts := cards.parts_of(device.address, view):
        content["parts"] = [_device_dict(part, inspected) for part in parts]
    del content["group_members"]
    return json.dumps(content, indent=2)


def _egm(device: DeviceView) -> str | None:
    """Return its EGM, and with which GPUs a virtual machine gets it."""
    if (egm := device.egm) is None:
        return None
    node = egm.node or "whose device node is missing, so that no container gets it"
    others = [gpu for gpu in egm.gpus if gpu != device.address]
    return f"{egm.name}, {node}; together with {', '.join(others) or 'this GPU alone'}"


def _partition(one: PartitionView, device: DeviceView) -> str:
    """Return one partition of the fabric, with its other GPUs."""
    others = ", ".join(gpu for gpu in one.gpus if gpu != device.address) or "this GPU alone"
    if one.state is None:
        return f"{one.name} with {others}: {'active, not by gpuactors' if one.is_active else 'inactive'}"
    return f"{one.name} with {others}: {one.state}{f' ({one.problem})' if one.problem else ''}"


def explanation(explained: Explained, columns: int = UNFOLDED) -> str:
    """Return the one reason in a sentence, then the device's owner and holders, its place in the host, and its former
    reasons."""
    device, inspected, view = explained.device, explained.inspected, explained.inspected.view
    facts = [
        *_since(device.since_s, inspected),
        ("Dead", device.dead if device.dead != device.reason else None),
        ("To do", device.remedy),
        ("Owner", _owner(device, view)),
        ("VM", device.vm),
        *claims_report.device_facts(device, view),
        *(("Held by", str(holder)) for holder in device.holders),
        ("IOMMU group", _group(device)),
        ("Resource", _resource(device, inspected)),
        ("Profile", device.profile),
        ("EGM", _egm(device)),
        ("Partitions", "; ".join(_partition(one, device) for one in device.partitions) or None),
        ("Part of", cards.parent_of(device, view)),
        *(("Parts", line) for line in cards.part_lines(device.address, view)),
        ("Kubelet's ID", device.id),
        ("NUMA node", "none" if device.numa_node is None else str(device.numa_node)),
        ("Inspected", _ago_text(device.inspected_s)),
        ("Use polled", _ago_text(device.polled_s)),
        ("Ledger read", _ago_text(view.ledger_age_s)),
        *((f"Last {call.kind}", _call(call, inspected)) for call in device.calls),
        *(("Released", _release(release, inspected)) for release in reversed(device.releases)),
        ("Kubelet", view.kubelet_problem or None),
        ("Ledger", view.ledger_problem or None),
        ("Uevents", view.uevents_problem or None),
        ("Config file", view.config_problem or None),
        *(("Before", line) for line in _history(device.history, inspected.wall)),
        ("Node", inspected.node or None),
        ("Seen by", inspected.source),
    ]
    status = f"{claims_report.listing(device)}: {claims_report.reason(device, view)}"
    return _page([_title_of(device), status], facts, columns)


def card_explanation(explained: ExplainedCard, columns: int = UNFOLDED) -> str:
    """Return a card that is no device: its driver, and what each of its parts is given away as."""
    card, inspected = explained.card, explained.inspected
    facts = [
        ("Driver", card.driver or "none"),
        ("Part of", card.parent),
        *(("Parts", line) for line in cards.part_lines(card.address, inspected.view)),
        *_seen(inspected),
    ]
    title = [f"{card.address}  {cards.described(card)}", "no selector matches the card itself"]
    return _page(title, facts, columns)


def card_explanation_json(explained: ExplainedCard) -> str:
    """Return the card with its parts, as one object."""
    card, inspected = explained.card, explained.inspected
    parts = cards.parts_of(card.address, inspected.view)
    content = {
        **cards.card_dict(card),
        "parts": [_device_dict(part, inspected) for part in parts],
    }
    return json.dumps(content | _source(inspected), indent=2, ensure_ascii=False)


def claim_explanation(explained: ExplainedClaim, columns: int = UNFOLDED) -> str:
    """Return the meaning of its state, its devices, and the fate of each at its end; once for each driver that has
    it."""
    inspected, parts = explained.inspected, []
    if explained.claim is not None:
        facts = claims_report.claim_explanation(explained.claim, inspected.view, _ago(inspected))
        parts.append((claims_report.claim_title(explained.claim), facts))
    if (claim := explained.domain_claim) is not None and (domains := inspected.view.domains) is not None:
        facts = domains_report.claim_explanation(claim, domains, _ago(inspected))
        parts.append((domains_report.claim_titled(claim), facts))
    parts[-1][1].extend(_seen(inspected))
    return "\n\n".join(_page(title, facts, columns) for title, facts in parts)


def claim_explanation_json(explained: ExplainedClaim) -> str:
    """Return the view of the claim, as one object; of a claim of both drivers with a second one in
    `compute_domain_claim`."""
    inspected, contents = explained.inspected, list[dict[str, Any]]()
    if (claim := explained.claim) is not None:
        contents.append(claims_report.claim_dict(claim) | {"time": _ago(inspected)(claim.age_s)})
    if (claim := explained.domain_claim) is not None and inspected.view.domains is not None:
        domain_claim = domains_report.claim_explanation_dict(claim, inspected.view.domains)
        contents.append(domain_claim | {"time": _ago(inspected)(claim.age_s)})
    first, *second = contents
    more = {"compute_domain_claim": second[0]} if second else {}
    return json.dumps({**first, **more, "node": inspected.node, "source": "daemon"}, indent=2)


def domain_explanation(explained: ExplainedDomain, columns: int = UNFOLDED) -> str:
    """Return whether its channels can be used here, what they need for it, and the claims."""
    domain, inspected = explained.domain, explained.inspected
    assert inspected.view.domains is not None
    uid, *facts = domains_report.domain_explanation(domain, inspected.view.domains)
    facts = [uid, *_since(domain.since_s, inspected), *facts, *_seen(inspected)]
    return _page(domains_report.domain_title(domain), facts, columns)


def domain_explanation_json(explained: ExplainedDomain) -> str:
    """Return the view of the domain, as one object."""
    domain, inspected = explained.domain, explained.inspected
    assert inspected.view.domains is not None
    content = domains_report.domain_explanation_dict(domain, inspected.view.domains)
    times = {
        "since": _when(domain.since_s, inspected),
        "since_s": _rounded(domain.since_s),
        "read_s": _rounded(domain.read_s),
    }
    return json.dumps({**content, **times, "node": inspected.node, "source": "daemon"}, indent=2)


def pod_explanation(explained: ExplainedPod, columns: int = UNFOLDED) -> str:
    """Return the GPUs that kubelet has given it, and by which claims; those that it has left behind; claims without a
    GPU."""
    pod, inspected = explained.pod, explained.inspected
    allocated = f"has {_gpus(len(pod.devices))} by kubelet's ledger" if pod.devices else ""
    if not (pod.devices or pod.left):
        allocated = "has no GPU by kubelet's ledger, and " + (
            "a claim" if len(pod.claims) == 1 else f"{len(pod.claims)} claims"
        )
    held = f"it has left kubelet's ledger and may still hold {_gpus(len(pod.left))}" if pod.left else ""
    facts: list[tuple[str, str | None]] = [("UID", pod.uid or None), ("VM", pod.vm or None)]
    facts += [("GPU", line) for address in pod.devices for line in _gpu(address, inspected.view)]
    facts += [("Held on", line) for address in pod.left for line in _gpu(address, inspected.view)]
    facts += [("Claim", line) for name in pod.claims for line in _claim(name, inspected.view)]
    facts += [*_ledger_facts(inspected), *_seen(inspected)]
    title = [f"Pod {pod}", "; ".join(filter(None, (allocated, held)))]
    return _page(title, facts, columns)


def pod_explanation_json(explained: ExplainedPod) -> str:
    """Return the pod with its devices, as one object."""
    pod, inspected = explained.pod, explained.inspected
    content = {
        "pod": pod.name or None,
        "uid": pod.uid or None,
        "vm": pod.vm or None,
        "devices": [_device_dict(d, inspected) for d in inspected.view.devices if d.address in pod.devices],
        "left": [_device_dict(d, inspected) for d in inspected.view.devices if d.address in pod.left],
        "claims": list(pod.claims),
        "ledger_problem": inspected.view.ledger_problem or None,
    }
    return json.dumps(content | _source(inspected), indent=2, ensure_ascii=False)


def resource_explanation(explained: ExplainedResource, columns: int = UNFOLDED) -> str:
    """Return kubelet's counts of it, each GPU with its health and reason, and the pods that have some."""
    inspected, devices = explained.inspected, explained.devices
    models = dict.fromkeys(
        f"{d.model or 'unknown model'} ({d.vendor}:{d.device})" for d in devices if d.present
    )
    facts: list[tuple[str, str | None]] = [("Model", model) for model in models]
    facts += [("Profile", profile) for profile in dict.fromkeys(d.profile for d in devices)]
    facts += [
        ("GPU", f"{d.address}, {claims_report.listing(d)}: {claims_report.reason(d, inspected.view)}")
        for d in devices
    ]
    addresses = {device.address for device in devices}
    for pod in inspected.view.pods:
        if allocated := [address for address in pod.devices if address in addresses]:
            facts.append(("Pod", f"{pod}: {', '.join(allocated)}"))
    facts += [*_ledger_facts(inspected), *_seen(inspected)]
    title = [explained.name, _totals(explained.resource, len(devices), inspected)]
    return _page(title, facts, columns)


def resource_explanation_json(explained: ExplainedResource) -> str:
    """Return the resource with its devices, as one object."""
    inspected, resource = explained.inspected, explained.resource
    own_addresses = {device.address for device in explained.devices}
    pods = {str(pod): [a for a in pod.devices if a in own_addresses] for pod in inspected.view.pods}
    content = {
        "name": explained.name,
        **(_resource_dict(resource, inspected) if resource is not None else {}),
        "devices": [_device_dict(device, inspected) for device in explained.devices],
        "pods": {name: addresses for name, addresses in pods.items() if addresses},
        "ledger_problem": inspected.view.ledger_problem or None,
    }
    return json.dumps(content | _source(inspected), indent=2, ensure_ascii=False)


def _gpus(count: int) -> str:
    return f"{count} GPU" + "s" * (count != 1)


def _gpu(address: str, view: NodeView) -> list[str]:
    """Return the lines of a GPU: model and resource, then health and reason."""
    device = next((d for d in view.devices if d.address == address), None)
    if device is None:
        return [f"{address}, which the selectors do not match"]
    what = [device.model or "unknown model", device.resource] if device.present else ["gone from this node"]
    return [
        ", ".join(filter(None, (address, *what))),
        f"  {claims_report.listing(device)}: {claims_report.reason(device, view)}",
    ]


def _claim(name: str, view: NodeView) -> list[str]:
    """Return the lines of a claim, once for each driver that knows it: its state, then why it is not further."""
    lines = []
    for claim in (claims_report.claim_named(claims, name) for claims in view.drivers):
        if claim is not None:
            lines += [
                f"{claim}: {claim.state} for {lasted(claim.age_s)}",
                *([f"  {claim.problem}"] * bool(claim.problem)),
            ]
    return lines or [f"{name}: not known here; kubelet has not asked for it now, or it is another driver's"]


def _ledger_facts(inspected: Inspected) -> list[tuple[str, str | None]]:
    return [
        ("Ledger read", _ago_text(inspected.view.ledger_age_s) if inspected.by_daemon else None),
        ("Ledger", inspected.view.ledger_problem or None),
    ]


def _source(inspected: Inspected) -> dict[str, object]:
    return {
        "node": inspected.node,
        "source": "daemon" if inspected.by_daemon else "inspection",
        "source_problem": inspected.problem or None,
    }


def _seen(inspected: Inspected) -> list[tuple[str, str]]:
    """Return by whom the view was made, and on which node."""
    return [("Node", inspected.node)] * bool(inspected.node) + [("Seen by", inspected.source)]


def _ago(inspected: Inspected) -> Callable[[float], str]:
    """Return the time of day of so many seconds before the view was made, as a function."""
    return lambda age_s: utc(inspected.wall - age_s)


def _page(title: Iterable[str], facts: Sequence[tuple[str, str | None]], columns: int) -> str:
    """Return the title, and below it the facts."""
    head = [part for line in title for part in wrapped(line, columns)]
    return "\n".join([*head, "", *_columns(facts, columns)])


def _columns(facts: Sequence[tuple[str, str | None]], columns: int) -> list[str]:
    """Return each fact with its name, which is not repeated, and below it what does not fit."""
    width = max(len(name) for name, _ in facts)
    lines, last_name = [], ""
    for name, fact in facts:
        if fact is not None:
            margin = f"{'' if name == last_name else name:{width}}  "
            lines += folded(fact, max(columns, width + _REASON_MIN), margin, " " * len(margin))
            last_name = name
    return lines


def _since(age_s: float | None, inspected: Inspected) -> list[tuple[str, str]]:
    """Return since when, and for how long; the command's own inspection knows no past."""
    if age_s is None or not inspected.by_daemon:
        return []
    return [("Since", f"{utc(inspected.wall - age_s)}, for {lasted(age_s)}")]


def _ago_text(age_s: float | None) -> str | None:
    return age(age_s) if age_s is not None else None


def _when(age_s: float | None, inspected: Inspected) -> str | None:
    return utc(inspected.wall - age_s) if age_s is not None and inspected.by_daemon else None


def _rounded(age_s: float | None) -> float | None:
    return round(age_s, 1) if age_s is not None else None


def _call(call: LastCallView, inspected: Inspected) -> str:
    """Return when it was answered, and how."""
    answer = "refused: " + call.refused if call.refused else "granted"
    return f"{utc(inspected.wall - call.age_s)}, {age(call.age_s)}: {answer}"


def _title_of(device: DeviceView) -> str:
    if not device.present:
        is_left_out = device.cause == Cause.NOT_SELECTED
        return f"{device.address}  (not {'selected' if is_left_out else 'on this node'} any more)"
    if not (device.vendor or device.model):  # its parent is no PCI function
        return f"{device.address}  {device.profile or 'unknown model'}"
    return f"{device.address}  {cards.described(device)}"


def _owner(device: DeviceView, view: NodeView) -> str:
    """Return the owner, with a reservation: kubelet's ledger may have changed since it became unreadable."""
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


def _release(release: ReleaseView, inspected: Inspected) -> str:
    """Return who had it until when, and what is known of a reset: no more than the methods that there were."""
    if release.enumerated_again:
        reset = "enumerated again since"
    elif release.reset_methods is None:
        reset = "the methods to reset it are unknown, and whether it was reset"
    elif not release.reset_methods:
        reset = "the kernel has no method to reset it alone; whether its bus was reset is not known"
    else:
        reset = f"the kernel can reset it by {', '.join(release.reset_methods)}; whether it did is not known"
    when = f"{utc(inspected.wall - release.age_s)} ({age(release.age_s)})"
    return f"by {release.tenant} at {when}: {reset}"


def _member(member: Member) -> str:
    return f"{member.address} ({member.driver or 'no driver'})"


def _resource(device: DeviceView, inspected: Inspected) -> str | None:
    if not device.resource:
        return None
    if not inspected.by_daemon:
        return device.resource
    resource = next((r for r in inspected.view.resources if r.name == device.resource), None)
    if resource is None:
        return f"{device.resource}, which is not advertised to kubelet"
    return f"{device.resource}, {registration(resource)}"


def _history(history: tuple[Change, ...], wall: float) -> list[str]:
    """Return the changes in columns, the newest first; `wall`: when the ages were counted."""
    rows = [
        (utc(wall - c.age_s), age(c.age_s), c.health or "not listed", c.reason) for c in reversed(history)
    ]
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
    return [
        "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]]) for row in rows
    ]


def utc(wall: float) -> str:
    """Return the time of day as the log has it, UTC, in seconds; `wall` in seconds since 1970."""
    return datetime.fromtimestamp(wall, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def age(seconds: float) -> str:
    """Return how long ago, in the largest unit that is not 0."""
    return f"{lasted(seconds)} ago" if seconds >= 1 else "just now"
