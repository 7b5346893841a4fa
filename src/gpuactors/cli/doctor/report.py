"""The report: as text that fits a terminal, and as JSON. Must not judge."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import click

from gpuactors import VERSION
from gpuactors.cli.doctor.checks import Group
from gpuactors.cli.doctor.checks.kubevirt import Needed, permitted, yaml
from gpuactors.cli.doctor.facts import Facts, PermittedDevice
from gpuactors.cli.doctor.finding import DOCUMENTS, Finding, Level
from gpuactors.cli.output import UNFOLDED, folded
from gpuactors.core.values.quote import first_of

_INDENT = " " * 8
"""The indent of the lines below a finding's first one, where its message begins."""


def is_failed(groups: tuple[Group, ...]) -> bool:
    """Return whether any finding is a FAIL."""
    return any(finding.level is Level.FAIL for group in groups for finding in group.findings)


# --- text -------------------------------------------------------------------------------------------------


_STYLES: Final[Mapping[Level, Mapping[str, Any]]] = {
    Level.PASS: {"fg": "green"},
    Level.WARN: {"fg": "yellow"},
    Level.FAIL: {"fg": "red", "bold": True},
}


def as_text(facts: Facts, groups: tuple[Group, ...], columns: int = UNFOLDED, *, colour: bool = False) -> str:
    """Write the report in so many columns. The YAML at the end is never folded."""
    lines = folded(_heading(facts), columns, "", "  ")
    for group in groups:
        lines += ["", click.style(group.name, bold=True) if colour else group.name]
        last_of_check = {finding.check: finding for finding in group.findings if finding.remedy}
        for finding in group.findings:
            lines += _lines(finding, columns, colour=colour)
            if finding is last_of_check.get(finding.check):
                lines += folded(f"More: {DOCUMENTS[finding.check]}", columns, _INDENT, _INDENT)
    lines += ["", summary(groups), *_to_paste(permitted(facts), columns)]
    return "\n".join(lines)


def _heading(facts: Facts) -> str:
    when = ", before installation" if facts.pre else ""
    user = (
        f"; as user {facts.user}, not root: what that may not read or write is a FAIL" if facts.user else ""
    )
    return f"Node {facts.node}{when}; settings {facts.settings}{user}"


def _lines(finding: Finding, columns: int, *, colour: bool) -> Iterator[str]:
    devices = f"{', '.join(first_of(finding.devices))}: " if finding.devices else ""
    first, *continued = folded(f"{devices}{finding.message}", columns, f"  {finding.level}  ", _INDENT)
    if colour:
        styled = click.style(finding.level, **_STYLES[finding.level])
        first = first.replace(finding.level, styled, 1)
    yield first
    yield from continued
    if finding.remedy:
        yield from folded(f"To do: {finding.remedy}", columns, _INDENT, _INDENT)


def summary(groups: tuple[Group, ...]) -> str:
    """Return the number of findings of each level, in words."""
    counts = _counts(groups)
    return ", ".join(f"{counts[level]} {level}" for level in (Level.FAIL, Level.WARN, Level.PASS))


def _counts(groups: tuple[Group, ...]) -> Counter[Level]:
    return Counter(finding.level for group in groups for finding in group.findings)


def _to_paste(needed: Needed, columns: int) -> list[str]:
    if not needed.all:
        return []
    head = "To add to the custom resource KubeVirt (kubectl -n kubevirt edit kubevirt), beside what it permits already:"
    return ["", *folded(head, columns, "", "  "), "", yaml(needed)]


# --- JSON -------------------------------------------------------------------------------------------------


def as_json(facts: Facts, groups: tuple[Group, ...]) -> str:
    """Return the report as one object. Its keys are stable, and none is ever left out."""
    counts, needed = _counts(groups), permitted(facts)
    content = {
        "node": facts.node,
        "version": VERSION,
        "pre": facts.pre,
        "settings": facts.settings,
        "failed": is_failed(groups),
        "counts": {level: counts[level] for level in Level},
        "findings": [_finding(group.name, finding) for group in groups for finding in group.findings],
        "permitted_host_devices": _entries("pciVendorSelector", needed.pci),
        "permitted_mediated_devices": _entries("mdevNameSelector", needed.mediated),
    }
    return json.dumps(content, indent=2, ensure_ascii=False)


def _entries(selector: str, devices: Iterable[PermittedDevice]) -> list[dict[str, object]]:
    return [
        {
            selector: device.selector,
            "resourceName": device.resource,
            "externalResourceProvider": device.is_external,
        }
        for device in devices
    ]


def _finding(group: str, finding: Finding) -> dict[str, Any]:
    return {
        "group": group,
        "check": finding.check,
        "level": finding.level,
        "message": finding.message,
        "remedy": finding.remedy or None,
        "document": DOCUMENTS[finding.check],
        "cause": finding.cause,
        "devices": list(finding.devices),
    }
