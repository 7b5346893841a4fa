"""deploy/monitoring, for Prometheus and Grafana: evaluated by Prometheus' own tool, and of metrics that there are."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from gpuactors.core.values.cause import Cause
from gpuactors.core.values.claim_states import ClaimState
from gpuactors.core.values.model import Health
from gpuactors.core.values.partition import PartitionState
from gpuactors.observe.counts import METHODS, OUTCOMES
from tests.deploy.manifests import DEPLOY, of_kind, render
from tests.deploy.scrapes import DECLARED
from tests.release.addresses import documents, project
from tests.support.markdown import anchors

MONITORING: Final = DEPLOY / "monitoring"
DOCS: Final = DEPLOY.parent / "docs"
DOCUMENTS: Final = documents(project())
"""Where the rules say that docs/ is; the chart's `monitoring.docsUrl` names another address."""

OF_OTHERS: Final = {
    "up",
    "ALERTS",
    "process_resident_memory_bytes",
    "process_start_time_seconds",
    "kube_node_status_condition",
    "kube_daemonset_status_number_unavailable",
}
"""Metrics of Prometheus, its client library and kube-state-metrics."""

LABELS: Final[dict[str, set[str]]] = {
    "cause": set(map(str, Cause)),
    "health": set(map(str, Health)),
    "state": {*map(str, ClaimState), *map(str, PartitionState)},
    "method": set(METHODS),
    "outcome": set(OUTCOMES),
}


def promtool(directory: Path, *words: str) -> str:
    program = shutil.which("promtool")
    assert program is not None, "./do test takes it from Debian's package prometheus"
    done = subprocess.run(
        [program, *words], cwd=directory, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def groups() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = of_kind(render(MONITORING), "PrometheusRule")["spec"]["groups"]
    return found


def rules() -> Iterator[dict[str, Any]]:
    return (rule for group in groups() for rule in group["rules"])


def dashboard() -> dict[str, Any]:
    config = of_kind(render(MONITORING), "ConfigMap")
    assert config["metadata"]["labels"]["grafana_dashboard"] == "1", "what Grafana's sidecar looks for"
    found: dict[str, Any] = json.loads(config["data"]["gpuactors.json"])
    return found


def shown() -> Iterator[str]:
    """Each expression of the dashboard, with its variable filled in."""
    for panel in dashboard()["panels"]:
        for target in panel["targets"]:
            yield target["expr"].replace("$node", ".*")


def documented() -> list[str]:
    """Each query of docs/reference.md#metrics."""
    return re.findall(r"^```promql\n(.*)\n```$", (DOCS / "reference.md").read_text(), re.MULTILINE)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The rules as promtool reads them, with their tests."""
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": groups()}))
    shutil.copy(MONITORING / "rules_test.yaml", tmp_path)
    return tmp_path


def test_every_alert_fires_where_it_should_and_is_quiet_where_not(directory: Path) -> None:
    promtool(directory, "check", "rules", "--lint=all", "--lint-fatal", "rules.yaml")
    assert "SUCCESS" in promtool(directory, "test", "rules", "rules_test.yaml")
    tests = yaml.safe_load((directory / "rules_test.yaml").read_text())["tests"]
    tested = {
        (test["alertname"], bool(test["exp_alerts"]))
        for one in tests
        for test in one.get("alert_rule_test", ())
    }
    alerts = {rule["alert"] for rule in rules() if "alert" in rule}
    assert tested == {(alert, fires) for alert in alerts for fires in (True, False)}
    recorded = {sample["expr"] for one in tests for sample in one.get("promql_expr_test", ())}
    assert recorded >= {r["record"] for r in rules() if r.get("record", "").startswith("node_resource:")}


def test_a_rule_that_is_changed_fails_its_test(directory: Path) -> None:
    text = (directory / "rules.yaml").read_text()
    assert "gpuactors_ready == 0" in text
    (directory / "rules.yaml").write_text(text.replace("gpuactors_ready == 0", "gpuactors_ready == 1"))
    with pytest.raises(AssertionError, match="GpuactorsNotReady"):
        promtool(directory, "test", "rules", "rules_test.yaml")


def test_each_alert_has_a_severity_and_says_what_and_what_to_do() -> None:
    for rule in rules():
        if "alert" not in rule:
            continue
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert rule["annotations"]["summary"].endswith(".")
        assert rule["annotations"]["description"].endswith(".")
        # It is about nodes that have no series of ours.
        about = "nodes" if rule["alert"] == "GpuactorsPodMissing" else "$labels.node"
        assert about in rule["annotations"]["summary"]


def test_each_alert_leads_to_its_section_of_the_runbooks() -> None:
    headings = anchors((DOCS / "troubleshoot.md").read_text())
    alerts = [rule for rule in rules() if "alert" in rule]
    for rule in alerts:
        page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert (page, anchor) == (f"{DOCUMENTS}/troubleshoot.md", rule["alert"].lower())
        assert anchor in headings, f"docs/troubleshoot.md#alerts has no section {rule['alert']}"
    assert {heading for heading in headings if re.fullmatch("gpuactors[a-z]+", heading)} == {
        rule["alert"].lower() for rule in alerts
    }


def test_the_links_of_the_dashboard_lead_to_documents() -> None:
    leads = re.findall(rf'"url": "{re.escape(DOCUMENTS)}/([^"#]*)#?([^"]*)"', json.dumps(dashboard()))
    assert {"troubleshoot.md", "reference.md"} == {page for page, _ in leads}
    names = {
        "troubleshoot.md": {rule["alert"] for rule in rules() if "alert" in rule},
        "reference.md": {*map(str, Cause)},
    }
    for page, anchor in leads:
        wanted = names[page] if anchor == "${__value.raw}" else {anchor} - {""}
        assert wanted <= anchors((DOCS / page).read_text()), f"{page}#{anchor}"


def test_the_line_of_a_pending_claim_is_where_the_alert_fires() -> None:
    (expr,) = (rule["expr"] for rule in rules() if rule.get("alert") == "GpuactorsClaimStuck")
    (panel,) = (panel for panel in dashboard()["panels"] if panel["title"] == "Longest pending claim")
    line = panel["fieldConfig"]["defaults"]["thresholds"]["steps"][-1]["value"]
    assert expr.split(" > ")[-1] == f"{line}"


def test_no_panel_lies_over_another_one_or_beyond_the_edge() -> None:
    places = [tuple(panel["gridPos"].values()) for panel in dashboard()["panels"]]
    assert len(set(places)) == len(places)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in dashboard()["panels"])


def test_every_metric_and_label_value_that_is_named_is_one_of_ours() -> None:
    ours = DECLARED.keys()
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    for text in [*(rule["expr"] for rule in rules()), *shown(), *documented()]:
        plain = re.sub(r'"[^"]*"', '""', text)
        named = set(
            re.findall(r"\b(?:gpuactors|process|kube_|node_\w+:gpuactors|up\b|ALERTS)[a-z0-9_:]*", plain)
        )
        assert named, text
        assert named <= ours | recorded | OF_OTHERS, text
        for label, values in re.findall(r'(\w+)[!=]=?~?"([^"]*)"', text):
            if label in LABELS:
                assert set(values.split("|")) <= LABELS[label], text


def test_the_pods_are_found_by_their_label_and_their_port() -> None:
    base = render(DEPLOY / "base")
    template = of_kind(base, "DaemonSet")["spec"]["template"]
    (endpoint,) = of_kind(render(MONITORING), "PodMonitor")["spec"]["podMetricsEndpoints"]
    selector = of_kind(render(MONITORING), "PodMonitor")["spec"]["selector"]["matchLabels"]
    assert selector.items() <= template["metadata"]["labels"].items()
    (container,) = template["spec"]["containers"]
    assert endpoint["port"] in [port["name"] for port in container["ports"]]
    assert of_kind(render(MONITORING), "PodMonitor")["metadata"]["namespace"] == "gpuactors"
