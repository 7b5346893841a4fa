"""What follows from the code in documents and in the chart: `just tables` writes it, test_tree.py compares it."""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Protocol

import yaml

from gpuactors import limits
from gpuactors.actors.slice_publisher import TAINTS_ASKED_S
from gpuactors.acts.persistenced import PERSISTENCED_DEADLINE_S
from gpuactors.cli.doctor.finding import Check
from gpuactors.config import DECLARATIONS, Declaration, file_schema, schema
from gpuactors.config.declaration import NODES_KEY
from gpuactors.core.claims.progress import CLAIM_TOMBSTONE_S
from gpuactors.core.reports.event_series import EVENT_BURST, EVENT_REFILL_S
from gpuactors.core.reports.kube_events import CONTESTED, OF_A_DEVICE
from gpuactors.core.reports.node_features import LABELS
from gpuactors.core.values.cause import CALL, MEANINGS
from gpuactors.core.values.claim_states import OWNING, TRANSITIONS, ClaimState, ClaimTrigger
from gpuactors.core.values.model import Health
from gpuactors.core.values.partition import PartitionState
from gpuactors.kube.client import API_REQUEST_S
from gpuactors.kube.events import EVENT_MESSAGE_MAX_BYTES
from gpuactors.observe.counts import METHODS, OUTCOMES, Counts
from gpuactors.observe.metrics import Metrics
from tests.deploy import picture
from tests.support import markdown

ROOT: Final = Path(__file__).resolve().parents[1]
CHART: Final = "deploy/chart/gpuactors"


class Written(Protocol):
    """A part of a file that follows from the code."""

    @property
    def name(self) -> str: ...

    def put(self) -> tuple[Path, str, str]:
        """The file, its text as it is, and its text as it should be."""
        ...


@dataclass(frozen=True, slots=True)
class Table:
    """A table between two marks of a document."""

    document: str
    name: str
    lines: Callable[[], list[str]]

    @property
    def begin(self) -> str:
        """The mark above it."""
        return f"<!-- {self.name}, written by `just tables` from here -->"

    def put(self) -> tuple[Path, str, str]:
        """The document, its text as it is, and its text with the table as it should be."""
        path = ROOT / self.document
        text = path.read_text(encoding="utf-8")
        return path, text, markdown.put_into(text, self.begin, "\n".join(self.lines()))


def settings() -> list[str]:
    """Every setting, as it is declared."""
    head = ["Key", "Flag", "Variable", "Value", "Default", "Meaning"]
    return markdown.table(head, map(_setting, DECLARATIONS.values()))


def _setting(setting: Declaration) -> list[str]:
    value = setting.metavar.replace("|", r"\|")
    names = [f"`{setting.key}`", f"`{setting.flag}`", f"`{setting.variable}`"]
    return [*names, f"`{value}`", setting.default_text("`{}`"), setting.described.description]


def causes() -> list[str]:
    """Every cause. The dashboard leads to its row by its name."""
    rows = (
        [f'<a id="{cause}"></a>`{cause}`', str(row.health), row.means, row.remedy]
        for cause, row in MEANINGS.items()
    )
    return markdown.table(["Cause", "Health", "What it means", "What to do"], rows)


def claim_states() -> list[str]:
    """Every state of a claim, from the table of transitions."""
    told = _documented(ClaimState)
    head = ["State", "Meaning", "Owns its devices", "Goes on to"]
    return markdown.table(
        head, ([f"`{s}`", told[s], "yes" if s in OWNING else "no", _ways_out(s)] for s in ClaimState)
    )


def _ways_out(state: ClaimState) -> str:
    events: dict[ClaimState, list[str]] = {}
    for (at, event), (after, _) in TRANSITIONS.items():
        if at is state and after is not state:
            events.setdefault(after, []).append(f"{event}")
    return "; ".join(f"`{after}` ({' or '.join(on)})" for after, on in events.items())


def claim_events() -> list[str]:
    """What the events in the table of states mean."""
    told = _documented(ClaimTrigger)
    return markdown.table(
        ["Event", "Meaning"], ([f"{event}", told[event]] for event in ClaimTrigger if event in told)
    )


def _documented(enum: type[StrEnum]) -> Mapping[str, str]:
    """The text below each member that has one."""
    (body,) = ast.parse(inspect.getsource(enum)).body
    assert isinstance(body, ast.ClassDef)
    found: dict[str, str] = {}
    for node, below in zip(body.body, body.body[1:], strict=False):
        match node, below:
            case (
                ast.Assign(targets=[ast.Name(id=name)]),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                found[enum[name]] = " ".join(text.split())
    return found


def claim_bounds() -> list[str]:
    """What waits for how long."""
    rows = [
        ("A prepare or unprepare is answered within", limits.CLAIM_ANSWER_S),
        ("One write to sysfs counts as hanging after", limits.SYSFS_WRITE_DEADLINE_S),
        ("All writes for one GPU and its companions end within", limits.ACT_DEADLINE_S),
        ("A release that failed is tried again after", limits.CLAIM_RETRY_S),
        ("One request to the API server ends within", API_REQUEST_S),
        ("A read of a claim that failed is tried again after", limits.CLAIM_READ_RETRY_S),
        (
            "The API server is asked for a prepared claim that kubelet lists for no pod after",
            limits.CLAIM_COLLECT_S,
        ),
        (
            "After its answer that there is no such claim, it is asked again, and the claim released, after",
            limits.CLAIM_COLLECT_S,
        ),
        ("An unprepared claim is forgotten after", CLAIM_TOMBSTONE_S),
        ("gpuactors waits for nvidia-persistenced at most", PERSISTENCED_DEADLINE_S),
        (
            "Whether the API server keeps taints is checked again after (a quarter sooner or later)",
            TAINTS_ASKED_S,
        ),
    ]
    return markdown.table(["Bound", "Seconds"], ([what, f"{seconds:g}"] for what, seconds in rows))


def checks() -> list[str]:
    """Every check of the doctor."""
    told = _documented(Check)
    return markdown.table(["Check", "What it says"], ([f"`{check}`", told[check]] for check in Check))


def node_labels() -> list[str]:
    """Every label of Node Feature Discovery, after its prefix."""
    return markdown.table(["Label", "Meaning"], ([f"`{name}`", told] for name, told in LABELS.items()))


def event_reasons() -> list[str]:
    """The Kubernetes Events about a device."""
    causes = ", ".join(f"[`{cause}`](#{cause})" for cause in OF_A_DEVICE)
    rows = [[causes, "The cause of the device's health.", "See the row of the cause."]]
    rows.append(
        [
            f"`{CONTESTED}`",
            "Kubelet has another plugin's devices under one of gpuactors' resource names.",
            "Let one plugin serve it; the message names the other one where it is known.",
        ]
    )
    return markdown.table(["Reason", "What it means", "What to do"], rows)


def event_bounds() -> list[str]:
    """How often Events are posted."""
    rows = [
        ("Minimum duration of a condition that is reported", f"{limits.EVENT_SETTLE_S:g} s"),
        ("Minimum interval before a recurring condition is reported again", f"{limits.EVENT_AGAIN_S:g} s"),
        ("Interval at which a lasting condition is reported again", f"{limits.EVENT_REPEAT_S:g} s"),
        ("Maximum burst of Events per daemon", f"{EVENT_BURST}"),
        ("Interval per further Event", f"{EVENT_REFILL_S:g} s"),
        ("Maximum length of a message", f"{EVENT_MESSAGE_MAX_BYTES} bytes"),
    ]
    return markdown.table(["Bound", "Value"], map(list, rows))


def alerts() -> list[str]:
    """Every alert with its summary. What to do is in its runbook, below the table."""
    config = yaml.safe_load((ROOT / "deploy/monitoring/rules.yaml").read_text(encoding="utf-8"))
    rules = [rule for group in config["spec"]["groups"] for rule in group["rules"] if "alert" in rule]
    return markdown.table(["Alert", "Severity", "After", "It says"], map(_alert, rules))


def _alert(rule: Mapping[str, Any]) -> list[str]:
    said = re.sub(r"\{\{ \$labels\.(\w+) \}\}", r"`\1`", rule["annotations"]["summary"])
    shown = re.sub(r"\{\{ \$value.*?\}\}", "`N`", said)
    alert = rule["alert"]
    name = f'<a id="{alert}"></a>[`{alert}`](#{alert.lower()})'
    # The dashboard leads to the row by the alert's name, which no heading's anchor is: those are in small letters.
    return [name, rule["labels"]["severity"], rule.get("for", "at once"), shown]


def metrics() -> list[str]:
    """Every metric that the daemon declares."""
    found = sorted(Metrics("", Counts(), process=False).families(), key=lambda one: one[0].name)
    rows = (
        [
            f"`{family.name}{'_total' * (family.type == 'counter')}`",
            family.type,
            ", ".join(f"`{label}`" for label in labels),
            family.documentation,
        ]
        for family, labels in found
    )
    return markdown.table(["Metric", "Type", "Labels", "What it says"], rows)


LABEL_VALUES: Final[Mapping[str, str]] = {
    "resource": "the extended resource: `nvidia.com/GH100_H100_SXM5_80GB`",
    "gpu": "the GPU's PCI address: `0000:23:00.0`",
    "claim": "namespace and name of a claim: `default/gpu`; empty where a pod has the GPU by the device plugin",
    "pod_namespace": "namespace of the pod that has the GPU; empty if no pod has it",
    "pod_name": "name of the pod that has the GPU; empty where only its UID is known",
    "pod_uid": "UID of the pod that has the GPU",
    "vm": "name of the VirtualMachineInstance whose pod has the GPU: `vm-1`; empty if it is none, or "
    "[not known](#gpus-by-virtual-machine)",
    "driver": "the DRA driver: `gpu.nvidia.com`, `compute-domain.nvidia.com`",
    "actor": "the part of the daemon, as in the log line `actor.restarting`",
    "version": "the version of the daemon",
}
"""Labels whose values are not a closed set."""


def metric_labels() -> list[str]:
    """Every label with its values."""
    of_calls = [cause for cause, meaning in MEANINGS.items() if meaning.health == CALL]
    values = {
        "health": _listed(Health),
        "cause": f"{_listed(c for c in MEANINGS if c not in of_calls)}; of refusals also {_listed(of_calls)}",
        "state": f"{_listed(s for s in ClaimState if s is not ClaimState.ABSENT)}; of partitions "
        f"{_listed(s for s in PartitionState if s is not PartitionState.ABSENT)}",
        "method": _listed(METHODS),
        "outcome": _listed(OUTCOMES),
        **LABEL_VALUES,
    }
    names = {name for _, labels in Metrics("", Counts(), process=False).families() for name in labels}
    return markdown.table(["Label", "Values"], ([f"`{name}`", values[name]] for name in sorted(names)))


def _listed(values: Iterable[str]) -> str:
    return ", ".join(f"`{value}`" for value in values)


OF_THE_CHART: Final[Mapping[str, str]] = {
    "host_root": "",
    "node_name": "",
    "kubelet_dir": "kubeletDir",
    "device_plugin_dir": "devicePluginDir",
    "state_dir": "stateDir",
    "holders": "holders",
    "http_address": "port",
    "dra": "dra.enabled",
    "driver_name": "dra.driverName",
    "cdi_dir": "dra.cdiDir",
    "driver_root": "dra.driverRoot",
    "load_modules": "dra.loadModules",
    "compute_domains": "computeDomains.enabled",
    "domains_driver": "computeDomains.driverName",
    "domains_namespace": "computeDomains.namespace",
    "imex_ctl": "computeDomains.imexCtl",
    "preset": "kata.enabled",
    "events": "events.enabled",
    "nfd_file": "nodeFeatures.enabled",
}
"""Settings that the chart makes of a value of its own, as mounts or rights follow from it, or of the pod itself."""


@dataclass(frozen=True, slots=True)
class ChartSettings:
    """`settings` and `nodes` in the schema of the chart's values: the daemon's own schema of each setting, and of the
    entries. The templates refuse those of the chart's own values by a sentence."""

    name: str = "settings of the chart"

    def put(self) -> tuple[Path, str, str]:
        """The schema, as it is and as it should be."""
        path = ROOT / CHART / "values.schema.json"
        text = path.read_text(encoding="utf-8")
        values = json.loads(text)
        values["properties"]["settings"]["properties"] = _without_the_charts(schema()["properties"])
        entries = file_schema()["properties"][NODES_KEY]
        entries.pop("minItems")  # without entries there is no file
        of_entry = entries["items"]["properties"]["settings"]
        of_entry["properties"] = _without_the_charts(of_entry["properties"])
        values["properties"]["nodes"] = {**entries, "default": []}
        return path, text, json.dumps(values, indent=2, ensure_ascii=False) + "\n"


def _without_the_charts(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: {"description": _of_the_chart(key)} if key in OF_THE_CHART else described
        for key, described in settings.items()
    }


def _of_the_chart(key: str) -> str:
    return (
        f"Not here: set `{OF_THE_CHART[key]}`." if OF_THE_CHART[key] else "Not here: it follows from the pod."
    )


@dataclass(frozen=True, slots=True)
class ChartDefaults:
    """The settings in the chart's values.yaml, with their defaults, as a comment."""

    name: str = "defaults of the chart"

    def put(self) -> tuple[Path, str, str]:
        """The values, as they are and as they should be."""
        path = ROOT / CHART / "values.yaml"
        text = path.read_text(encoding="utf-8")
        before, begin, rest = text.partition("# settings, written by `just tables` from here\n")
        _, end, after = rest.partition("# to here\n")
        assert begin, path
        assert end, path
        lines = [
            f"#   {key}: {json.dumps(described.get('default'), ensure_ascii=False)}\n"
            for key, described in schema()["properties"].items()
            if key not in OF_THE_CHART
        ]
        return path, text, "".join((before, begin, *lines, end, after))


@dataclass(frozen=True, slots=True)
class DashboardPicture:
    """The picture of the dashboard."""

    name: str = "picture of the dashboard"

    def put(self) -> tuple[Path, str, str]:
        """The picture, as it is and as it should be."""
        path = ROOT / "docs/media/dashboard.svg"
        return path, path.read_text(encoding="utf-8"), picture.drawn(picture.board())


def chart_values() -> list[str]:
    """Every value of the chart, as its schema describes it and values.yaml sets it."""
    described = json.loads((ROOT / CHART / "values.schema.json").read_text(encoding="utf-8"))
    values = yaml.safe_load((ROOT / CHART / "values.yaml").read_text(encoding="utf-8"))
    return markdown.table(["Value", "Default", "Meaning"], _chart_values(described, values, ""))


def _chart_values(schema: Mapping[str, Any], values: Mapping[str, Any], above: str) -> Iterator[list[str]]:
    for key, described in schema["properties"].items():
        if (
            key in values
            and key not in {"settings", "resources", "updateStrategy", "probes"}
            and "properties" in described
        ):
            yield from _chart_values(described, values[key], f"{above}{key}.")
        elif key in values:
            yield [f"`{above}{key}`", f"`{json.dumps(values[key])}`", described["description"]]
        if key == "settings":
            for setting, told in described["properties"].items():
                default = f"`{json.dumps(told['default'])}`" if told.get("default") is not None else ""
                yield [f"`settings.{setting}`", default, told["description"]]


TABLES: Final[tuple[Written, ...]] = (
    Table("docs/reference.md", "settings", settings),
    Table("docs/reference.md", "causes", causes),
    Table("docs/dra.md", "claim states", claim_states),
    Table("docs/dra.md", "claim events", claim_events),
    Table("docs/dra.md", "claim bounds", claim_bounds),
    Table("docs/reference.md", "event reasons", event_reasons),
    Table("docs/install.md", "node labels", node_labels),
    Table("docs/reference.md", "event bounds", event_bounds),
    ChartSettings(),
    ChartDefaults(),
    DashboardPicture(),
    Table("docs/troubleshoot.md", "checks", checks),
    Table("docs/troubleshoot.md", "alerts", alerts),
    Table("docs/reference.md", "metrics", metrics),
    Table("docs/reference.md", "metric labels", metric_labels),
    Table(f"{CHART}/README.md", "values", chart_values),
)


def main() -> int:
    """Command line of `just tables`."""
    for table in TABLES:
        path, _, text = table.put()
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
