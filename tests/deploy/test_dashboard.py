"""Each panel of the dashboard shows what it says, evaluated by promtool from two scrapes of a daemon's own metrics."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from msgspec.structs import replace

from gpuactors.core.deviceplugin.registration import AGAINST
from gpuactors.core.state import NodeState
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.effects import Granted, Refusal, Refused
from gpuactors.core.values.model import Holder
from gpuactors.observe.counts import Counts
from gpuactors.observe.metrics import Metrics
from tests.core.builders import gpu
from tests.core.gpus.claim_core import ClaimCore, allocated, name
from tests.deploy.answers import (
    ASKED,
    CALLS,
    EXACT,
    KUBEVIRTS,
    LAUNCHER,
    MEMORY_BYTES,
    SCRAPED,
    SHOWN,
    A,
    B,
    C,
    D,
)
from tests.deploy.test_monitoring import dashboard, documented, groups, promtool

ONE: Final = name("one")


def state() -> NodeState:
    """A pod has A, nobody B, a process of nobody's C, a claim D; another plugin has our resource."""
    core = ClaimCore(*(gpu(address, n) for n, address in enumerate((A, B, C, D), start=1)))
    core.created(allocated(ONE, D))
    core.ledger[A] = LAUNCHER
    core.enabled[C], core.holders[3] = 1, (Holder(77, "vfio-tool", None),)
    core.prepare(ONE)
    core.pass_time(60)
    plugins = {
        resource: replace(plugin, listing=replace(plugin.listing, against=AGAINST))
        for resource, plugin in core.state.published.plugins.items()
    }
    return replace(core.state, published=replace(core.state.published, plugins=plugins))


def scrape(metrics: Metrics, of: NodeState, started: float) -> Mapping[str, float]:
    """The series with their values, as Prometheus stores them. `started`: when the process did."""
    own = "".join(f',{label}="{value}"' for label, value in SCRAPED.items())
    found = {
        f"process_resident_memory_bytes{{{own[1:]}}}": float(MEMORY_BYTES),
        f"process_start_time_seconds{{{own[1:]}}}": started,
    }
    for line in metrics.page(of, 0.0, 0).decode().splitlines():
        if line.startswith("#"):
            continue
        series, _, value = line.rpartition(" ")
        series = f"{series[:-1]}{own}}}" if series.endswith("}") else f"{series}{{{own[1:]}}}"
        found[re.sub(r'(?<=[{,])\w+="",?', "", series)] = float(value)
    return found


def stored() -> list[dict[str, str]]:
    """Both scrapes, five minutes each, a sample a minute; and what KubeVirt says of the virtual machine."""
    counts, now = Counts(), state()
    metrics = Metrics("1", counts, process=False)
    counts.restarted("pod_resources")
    first = scrape(metrics, now, 1.0)
    counts.restarted("pod_resources")
    for _ in range(CALLS):
        counts.called("Allocate", 0.004, Granted(()))
        counts.called("Allocate", 0.004, Refused(Refusal.UNAVAILABLE, "r", (Cause.LEDGER_LATE,)))
    second = scrape(metrics, now, 2.0)
    assert first.keys() == second.keys()
    own = [{"series": one, "values": f"{first[one]!r}x4 {second[one]!r}x5"} for one in first]
    return [*own, {"series": KUBEVIRTS, "values": "1x9"}]


def queries() -> Iterator[tuple[str, str, dict[str, float]]]:
    """Each query of each panel, with what it is to show."""
    panels = {panel["title"]: panel for panel in dashboard()["panels"]}
    assert panels.keys() == SHOWN.keys()
    for title, expected in SHOWN.items():
        for target, shows in zip(panels[title]["targets"], expected, strict=True):
            assert target["expr"].count('node=~"$node"') == target["expr"].count("$node") > 0
            yield title, target["expr"].replace("$node", ".*"), shows


def asked(title: str, expr: str, shows: Mapping[str, float]) -> dict[str, Any]:
    """A question to promtool. A panel may show zeros beside what is expected."""
    if title in EXACT:
        expr = f"round({expr}, {EXACT[title]})"
    if all(shows.values()):
        expr = f"({expr}) != 0"
    samples = [{"labels": labels, "value": value} for labels, value in shows.items()]
    return {"expr": expr, "eval_time": "9m", "exp_samples": samples}


def evaluated(directory: Path, questions: list[dict[str, Any]]) -> str:
    """What promtool says. Raises `AssertionError` if a panel shows anything else."""
    test = {"interval": "1m", "input_series": stored(), "promql_expr_test": questions}
    (directory / "rules.yaml").write_text(yaml.safe_dump({"groups": groups()}))
    asked_of = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [test]}
    (directory / "panels_test.yaml").write_text(yaml.safe_dump(asked_of))
    return promtool(directory, "test", "rules", "panels_test.yaml")


def test_each_panel_and_each_documented_query_shows_what_a_node_is_like(tmp_path: Path) -> None:
    questions = [asked(*query) for query in queries()]
    assert len(questions) > len(SHOWN)
    titles = ["Calls, 99th percentile" if "histogram_quantile" in expr else "" for expr in documented()]
    questions += [asked(*one) for one in zip(titles, documented(), ASKED, strict=True)]
    assert "SUCCESS" in evaluated(tmp_path, questions)


def test_a_panel_that_can_never_show_anything_is_found(tmp_path: Path) -> None:
    """Of a label that no series has: promtool only parses it."""
    found = next(query for query in queries() if query[0] == "Refusals by cause")
    wrong = asked(found[0], found[1].replace("by (cause)", "by (reason)"), found[2])
    with pytest.raises(AssertionError, match="LedgerLate"):
        evaluated(tmp_path, [wrong])
