"""Each panel of the dashboard shows what it says, evaluated by promtool from two scrapes of a daemon's own metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

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
    ASKED_AT_S,
    CALLS,
    EXACT,
    KUBEVIRTS,
    LAUNCHER,
    MEMORY_BYTES,
    PENDING_S,
    SHOWN,
    A,
    B,
    C,
    D,
    E,
)
from tests.deploy.scrapes import scrape, text
from tests.deploy.test_monitoring import dashboard, documented, groups, promtool

ONE, TWO = name("one"), name("two")


def core_in_trouble() -> ClaimCore:
    """A pod has A, nobody B, a process of nobody's C, a claim D; the bind of a claim of E hangs."""
    on_vfio = (gpu(address, n) for n, address in enumerate((A, B, C, D), start=1))
    core = ClaimCore(*on_vfio, gpu(E, 5, driver="nvidia"))
    core.created(allocated(ONE, D), allocated(TWO, E))
    core.ledger[A] = LAUNCHER
    core.enabled[C], core.holders[3] = 1, (Holder(77, "vfio-tool", None),)
    core.prepare(ONE)
    core.held_back = {"device"}
    core.prepare(TWO)
    core.pass_time(60)
    return core


def contested(state: NodeState) -> NodeState:
    """The same node, while another plugin has our resource."""
    plugins = {
        resource: replace(plugin, listing=replace(plugin.listing, against=AGAINST))
        for resource, plugin in state.published.plugins.items()
    }
    return replace(state, published=replace(state.published, plugins=plugins))


def scraped(metrics: Metrics, core: ClaimCore, started: float) -> Mapping[str, float]:
    """A scrape, with what Prometheus' client library says of the process. `started`: when that did."""
    process = {"process_resident_memory_bytes": float(MEMORY_BYTES), "process_start_time_seconds": started}
    own = scrape(metrics, contested(core.state), core.at)
    return {**own, **{text(name, {}): value for name, value in process.items()}}


def stored() -> list[dict[str, str]]:
    """Both scrapes, five minutes each, a sample a minute; and what KubeVirt says of the virtual machine."""
    counts, core = Counts(), core_in_trouble()
    # The claim is pending for a minute when it is scraped.
    metrics = Metrics("1", counts, now=lambda: 60.0 + ASKED_AT_S - PENDING_S, process=False)
    counts.restarted("pod_resources")
    first = scraped(metrics, core, 1.0)
    counts.restarted("pod_resources")
    for _ in range(CALLS):
        counts.called("Allocate", 0.004, Granted(()))
        counts.called("Allocate", 0.004, Refused(Refusal.UNAVAILABLE, "r", (Cause.LEDGER_LATE,)))
    second = scraped(metrics, core, 2.0)
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
    return {"expr": expr, "eval_time": f"{ASKED_AT_S}s", "exp_samples": samples}


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
