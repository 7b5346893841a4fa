"""The names of the models, which are their resources' names: those that lack one, or that a newer file changes."""

from __future__ import annotations

from collections.abc import Iterator

from gpuactors.cli.doctor.facts import Facts, ModelNames, Unknown
from gpuactors.cli.doctor.finding import Check, Finding, failed, passed, warned
from gpuactors.core.values.model import ResourceName
from gpuactors.core.values.naming import resource_name
from gpuactors.host.pci_ids import Names


def check(facts: Facts) -> Iterator[Finding]:
    """Check the names. Only an unreadable file is a FAIL: a resource with the device ID as its name can be
    allocated."""
    if isinstance(facts.names, Unknown):
        yield failed(
            Check.MODEL_NAMES,
            facts.names.reason,
            "Name a readable pci.ids file with --pci-ids, or leave it out.",
        )
        return
    used, newer = facts.names.used, facts.names.newer
    if not used.names:
        return
    nameless = sorted(model for model, name in used.names.items() if name is None)
    for vendor, device in nameless:
        resource = resource_name(vendor, device, None)
        yield warned(
            Check.MODEL_NAMES,
            f"{vendor}:{device} has no name in pci.ids{_dated(used)}, so its resource is {resource}",
            f"{_remedy(newer, (vendor, device))} Pods that request {resource} have to be changed with it.",
        )
    renamed = _renamed(facts.names)
    if newer is not None and renamed:
        yield passed(
            Check.MODEL_NAMES,
            f"with the newer {newer.file}{_dated(newer)} some resources have another name: "
            + ", ".join(f"{before} is {after}" for before, after in renamed),
        )
    elif not nameless:
        unchanged = f"; the newer {newer.file}{_dated(newer)} changes none" if newer is not None else ""
        yield passed(Check.MODEL_NAMES, f"every model has a name in pci.ids{_dated(used)}{unchanged}")


def _dated(names: Names) -> str:
    return f" of {names.date}" if names.date is not None else ""


def _remedy(newer: Names | None, model: tuple[str, str]) -> str:
    ids = ":".join(model)
    own_name = f"Name its resource: --resource-name={ids}=nvidia.com/NAME."
    if newer is None or (name := newer.names[model]) is None:
        return own_name
    return f"Use --pci-ids={newer.file}{_dated(newer)}, which names it {resource_name(*model, name)}. Or: {own_name}"


def _renamed(names: ModelNames) -> list[tuple[ResourceName, ResourceName]]:
    """Return the resource names, now and by the newer file, of the models whose name it changes."""
    if names.newer is None:
        return []
    named = ((m, now, names.newer.names[m]) for m, now in names.used.names.items() if now is not None)
    pairs = {(resource_name(*m, now), resource_name(*m, later)) for m, now, later in named}
    return sorted(pair for pair in pairs if pair[0] != pair[1])
