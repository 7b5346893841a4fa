"""deploy/base, the components and the PodMonitor, made from the Helm chart: `just overlays` writes them.

A resource in a kustomization.yaml is what the template renders whose name ends with the resource's: `rbac.yaml` of
components/dra is `templates/dra-rbac.yaml`. A patch has the lines of the DaemonSet, or of OpenShift's constraints, that
differ from those of what the component is on top of. The kustomization.yaml, the overlays and `k0s` are written by
hand.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from tests.deploy.chart import CHART, NAMESPACE, Values, rendered
from tests.deploy.manifests import DEPLOY

DRA: Final[Values] = {"dra": {"enabled": True}}
DOMAINS: Final[Values] = {**DRA, "computeDomains": {"enabled": True}}
EVENTS: Final[Values] = {"events": {"enabled": True}}
OPENSHIFT: Final[Values] = {"openshift": {"enabled": True}}
HOLDERS: Final[Values] = {"holders": "proc"}
KATA: Final[Values] = {"kata": {"enabled": True}}
FEATURES: Final[Values] = {"nodeFeatures": {"enabled": True}}
MODULES: Final[Values] = {"dra": {"enabled": True, "loadModules": True}}
HOST_MANAGED: Final[Values] = {**DRA, "computeDomains": {"enabled": True, "hostManaged": True}}
MONITORING: Final[Values] = {"monitoring": {"enabled": True}}

FLEET_FILE: Final = DEPLOY / "overlays/fleet/gpuactors.yaml"
"""The configuration file of which kustomize makes a ConfigMap."""


def fleet(content: Mapping[str, Any]) -> Values:
    """The values with which the chart makes a ConfigMap of the same content."""
    return {"nodes": content["nodes"], "settings": {k: v for k, v in content.items() if k != "nodes"}}


FLEET: Final[Values] = fleet(yaml.safe_load(FLEET_FILE.read_text(encoding="utf-8")))

VALUES: Final[Mapping[str, Values]] = {
    "base": {},
    "overlays/holders-proc": HOLDERS,
    "overlays/dra": DRA,
    "overlays/load-modules": MODULES,
    "overlays/compute-domains": DOMAINS,
    "overlays/compute-domains-host-managed": HOST_MANAGED,
    "overlays/events": EVENTS,
    "overlays/kata": KATA,
    "overlays/node-features": FEATURES,
    "overlays/openshift": OPENSHIFT,
    "overlays/openshift-dra": {**DRA, **OPENSHIFT},
    "monitoring": MONITORING,
}
"""The values of which the chart renders what each directory adds up to."""

MADE: Final[Mapping[str, tuple[Values, Values]]] = {
    "base": ({}, {}),
    "monitoring": (MONITORING, {}),
    "components/openshift": (OPENSHIFT, {}),
    "components/holders-proc": (HOLDERS, {}),
    "components/dra": (DRA, HOLDERS),
    "components/load-modules": (MODULES, DRA),
    "components/compute-domains": (DOMAINS, DRA),
    "components/compute-domains-host-managed": (HOST_MANAGED, DOMAINS),
    "components/events": (EVENTS, {}),
    "components/kata": (KATA, {}),
    "components/node-features": (FEATURES, {}),
    "components/fleet": (FLEET, {}),
}
"""By directory, the values of what it adds up to, and of what it is on top of."""

CONSTRAINTS: Final = "openshift-scc.yaml"

BY_HAND: Final = "rules.yaml"
"""With the dashboard: written by hand in `monitoring`, and copied into the chart. Helm talks about a link at each
run."""

OF_HELM: Final = {"app.kubernetes.io/managed-by": "Helm", "helm.sh/chart": "gpuactors-0.1.0"}
"""Labels that only objects of a release have."""

_OPTIONS: Final = ("--kube-version", "1.34", "--api-versions", "monitoring.coreos.com/v1")
_HEAD: Final = "# Made by `just overlays` from deploy/chart/gpuactors/templates: change it there.\n"

Templates = dict[str, str]
"""What each template renders, by its file's name."""


def written() -> dict[Path, str]:
    """Every generated file and its text."""
    files: dict[Path, str] = {}
    for name, (values, on_top_of) in MADE.items():
        directory = DEPLOY / name
        kustomization = yaml.safe_load((directory / "kustomization.yaml").read_text(encoding="utf-8"))
        templates = _templates(values)
        below = Templates() if name == "base" else _templates(on_top_of)
        for resource in kustomization.get("resources", ()):
            if resource != BY_HAND:
                (found,) = (t for t in templates.keys() - below.keys() if f"-{t}".endswith(f"-{resource}"))
                files[directory / resource] = _HEAD + templates[found]
        for patch in kustomization.get("patches", ()):
            if "path" not in patch:  # it changes nothing: another component must be there
                continue
            path = directory / patch["path"]
            if "target" in patch:  # applied where another component has brought the constraints
                constraints = (_templates({**one, **OPENSHIFT})[CONSTRAINTS] for one in (on_top_of, values))
                files[path] = _HEAD + patched(*constraints)
            else:
                files[path] = _HEAD + patched(below["daemonset.yaml"], templates["daemonset.yaml"])
    monitoring = DEPLOY / "monitoring"
    for path in (monitoring / BY_HAND, monitoring / "dashboard.json"):
        files[CHART / "monitoring" / path.name] = path.read_text(encoding="utf-8")
    return files


def _templates(values: Values) -> Templates:
    return _rendered(json.dumps(values))


@functools.cache
def _rendered(values: str) -> Templates:
    """The chart's objects, without Helm's labels."""
    text = rendered(
        {"namespace": {"create": True}, **json.loads(values)}, namespace=NAMESPACE, options=_OPTIONS
    )
    text = without_hash(in_any_namespace(text))
    for label in OF_HELM:
        text = re.sub(rf"^ *{re.escape(label)}: .*\n", "", text, flags=re.MULTILINE)
    found = Templates()
    for one in re.split(r"^---\n", text, flags=re.MULTILINE)[1:]:
        source, _, content = one.partition("\n")
        template = source.rpartition("/")[2]
        content = f"{content.strip()}\n"
        found[template] = f"{found[template]}---\n{content}" if template in found else content
    return found


def in_any_namespace(text: str) -> str:
    """The policies match the account by its name in any namespace: kustomize puts the account into another one, and
    does not follow it into an expression."""
    ours = f'request.userInfo.username == "system:serviceaccount:{NAMESPACE}:gpuactors"'
    return text.replace(ours, 'request.userInfo.username.matches("^system:serviceaccount:[^:]+:gpuactors$")')


def without_hash(text: str) -> str:
    """The ConfigMap of the configuration file by the name that it has in the component. Helm and kustomize each add a
    hash of their own."""
    return re.sub(r"\bgpuactors-config-[0-9a-z]{10}\b", "gpuactors-config", text)


def patched(below: str, text: str) -> str:
    """The lines of `text` that make a strategic merge patch for the object `below`, with the comments right above them.

    Raises ValueError if `text` lacks something of `below`: such a patch removes nothing.
    """
    known = yaml.safe_load(below)
    metadata = known["metadata"]
    # These name the object that is patched, so they are taken for changed.
    for keys, owner in ((("apiVersion", "kind"), known), (("name", "namespace"), metadata)):
        for key in keys:
            owner.pop(key, None)
    lines = text.splitlines(keepends=True)
    node = yaml.compose(text)
    assert node is not None
    kept = sorted({*_changed(known, node, lines)})
    return "".join(lines[number] for number in kept)


def _changed(known: Any, node: yaml.Node, lines: list[str]) -> Iterator[int]:
    """Numbers of the lines of `node` that differ from `known`, and of the keys and names above them."""
    missing = {*_by_name(known)} - {name for name, _, _ in _children(node)}
    if missing:
        raise ValueError(f"a patch cannot remove {sorted(missing)}")
    for name, start, value in _children(node):
        old = _by_name(known).get(name)
        if old == _plain(value):
            continue
        if old is None or not _by_name(old):
            comment = start
            while lines[comment - 1].lstrip().startswith("#"):
                comment -= 1
            yield from range(comment, _last(value) + 1)
        else:
            yield start
            yield from _changed(old, value, lines)


def _by_name(value: Any) -> dict[str, Any]:
    """A mapping, or a list of named things by their names. Empty for what a patch replaces as a whole."""
    if isinstance(value, list) and all(isinstance(item, dict) and "name" in item for item in value):
        return {item["name"]: item for item in value}
    return value if isinstance(value, dict) else {}


def _children(node: yaml.Node) -> Iterator[tuple[str, int, yaml.Node]]:
    """Key or name of each child, the line on which it starts, and its value."""
    for child in node.value:
        if isinstance(child, tuple):
            key, value = child
            yield key.value, key.start_mark.line, value
        else:
            yield _plain(child)["name"], child.start_mark.line, child


def _plain(node: yaml.Node) -> Any:
    return yaml.safe_load(yaml.serialize(node))


def _last(node: yaml.Node) -> int:
    """The last line of a node. The mark at the end of a block is where the next one begins."""
    while isinstance(node, yaml.CollectionNode) and node.value and not node.flow_style:
        child = node.value[-1]
        node = child[1] if isinstance(child, tuple) else child
    return node.end_mark.line


def main() -> int:
    """Command line of `just overlays`."""
    for path, text in written().items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
