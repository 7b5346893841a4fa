"""Each state that may last sets off the alerts that it must, and no other: evaluated by Prometheus' own tool."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from gpuactors.core.values.cause import AS_BEFORE, CALL, HEALTHY, MAY_LAST, MEANINGS
from gpuactors.core.values.claim_states import ClaimState
from gpuactors.core.values.domain import DRIVER as DOMAINS
from gpuactors.core.values.model import Health
from gpuactors.core.values.partition import PartitionState
from gpuactors.observe.counts import METHODS, OUTCOMES
from gpuactors.observe.metrics_of_state import GAUGES
from tests.core.builders import H100
from tests.core.gpus.claim_core import DRIVER as GPUS
from tests.deploy import lasting_claims, lasting_states
from tests.deploy.lasting_claims import MINUTES, NO_ALERT, Film, filmed
from tests.deploy.lasting_states import Changed, always
from tests.deploy.manifests import DEPLOY, ROOT
from tests.deploy.scrapes import DECLARED, series
from tests.deploy.test_monitoring import documented, groups, promtool, rules, shown

PARTS: Final = 4
"""promtool takes half a minute for all rows, and three times that beside other tests."""

_COUNT: Final = re.compile(r"\w+_(total|bucket)\b")


@dataclass(frozen=True, slots=True)
class Row:
    """A state, by its scrapes, and the alerts that fire."""

    name: str
    film: Film
    changed: Changed
    fires: frozenset[str]


def test_commands_alert_and_dashboard_leave_out_the_same_causes() -> None:
    mine = "|".join(cause for cause in MEANINGS if cause in MAY_LAST)
    dashboard = (DEPLOY / "monitoring" / "dashboard.json").read_text()
    assert f'cause!~"{mine}"' in (DEPLOY / "monitoring" / "rules.yaml").read_text()
    assert dashboard.count(f'cause!~\\"{mine}\\"') == dashboard.count("cause!~") == 2
    assert f'cause!~"{mine}"' in (ROOT / "docs" / "reference.md").read_text()


@cache
def rows() -> tuple[Row, ...]:
    """Every state that may last."""
    return (*_rows(),)


def _rows() -> Iterator[Row]:
    for state, (script, fires) in lasting_claims.OF_EACH_STATE.items():
        film = filmed(script())
        shown = series("gpuactors_claims", driver=GPUS, state=state)
        assert any(shot[shown] for shot in film), f"no claim is {state} in its film"
        yield Row(f"a claim is {state}", film, {}, fires)
    for name, (script, fires) in lasting_claims.OF_DOMAINS.items():
        yield Row(name, filmed(script()), {}, fires)
    turns = filmed(lasting_claims.one_after_the_other())
    binding = series("gpuactors_claims", driver=GPUS, state=ClaimState.BINDING)
    assert all(shot[binding] for shot in turns[1:])
    yield Row("claims are bound one after the other", turns, {}, NO_ALERT)
    quiet = filmed(lasting_claims.quiet())
    yield Row("a quiet node", quiet, {}, NO_ALERT)
    for name, changed, fires in _changes():
        yield Row(name, quiet, changed, fires)


def _changes() -> Iterator[tuple[str, Changed, frozenset[str]]]:
    for cause, fires in lasting_states.DEVICES.items():
        health = MEANINGS[cause].health
        for one in Health if health == AS_BEFORE else (health,):
            yield f"a GPU is {one}: {cause}", lasting_states.device(cause, one), fires
        if health != Health.HEALTHY and not fires & lasting_states.AT_ONCE:
            yield f"GPUs are {cause} by turns", lasting_states.by_turns(cause), NO_ALERT
    for state, fires in lasting_states.PARTITIONS.items():
        yield f"a partition is {state}", {series("gpuactors_partitions", state=state): always(1)}, fires
    for counter, fires in lasting_states.COUNTERS.items():
        yield f"{counter.partition('{')[0]} grows", {counter: lasting_states.GROWS}, fires
    yield from (*lasting_states.FLAGS, *lasting_states.FIGURES, *lasting_states.OF_OTHERS)


def asked(row: Row, used: frozenset[str]) -> dict[str, Any]:
    """A test of promtool's: the series of its scrapes that a rule asks for, and what must fire after them."""
    names = dict.fromkeys(name for shot in row.film for name in shot)
    values = {name: [shot.get(name) for shot in row.film] for name in names if name.partition("{")[0] in used}
    # A count that does not change says nothing to a rule, and a page has many.
    told = {n: v for n, v in values.items() if not _COUNT.match(n) or len({*v}) > 1}
    spelt = {n: " ".join("_" if one is None else f"{one!r}" for one in v) for n, v in told.items()}
    return {
        "name": row.name,
        "interval": "1m",
        "input_series": [{"series": n, "values": v} for n, v in {**spelt, **_well(), **row.changed}.items()],
        "promql_expr_test": [
            {"expr": _firing(row), "eval_time": f"{MINUTES}m", "exp_samples": _expected(row)}
        ],
    }


def _firing(row: Row) -> str:
    """A question for the alerts that fire. promtool does not name the test that fails, so the answer does."""
    return (
        f'label_replace(count by (alertname) (ALERTS{{alertstate="firing"}}), "where", "{row.name}", "", "")'
    )


def _expected(row: Row) -> list[dict[str, Any]]:
    named = (f'{{alertname="{alert}",where="{row.name}"}}' for alert in sorted(row.fires))
    return [{"labels": labels, "value": 1} for labels in named]


def _well() -> Changed:
    """What stands beside the core on a node that is well: kubelet and the API server have what is offered."""
    node = (series("gpuactors_ready"), series("gpuactors_uevents_received"))
    drivers = (series("gpuactors_slices_published", driver=d) for d in (GPUS, DOMAINS))
    return dict.fromkeys((*node, *drivers, series("gpuactors_resource_registered", resource=H100)), always(1))


def alerts() -> frozenset[str]:
    return frozenset(rule["alert"] for rule in rules() if "alert" in rule)


def metrics_of(*changed: Changed) -> frozenset[str]:
    """The names of the series."""
    return frozenset(one.partition("{")[0] for series in changed for one in series)


def evaluated(directory: Path, tests: list[dict[str, Any]]) -> str:
    """What promtool says. Raises `AssertionError` where anything else fires."""
    (directory / "rules.yaml").write_text(yaml.safe_dump({"groups": groups()}))
    whole = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": tests}
    (directory / "lasting_test.yaml").write_text(json.dumps(whole))  # which is YAML
    return promtool(directory, "test", "rules", "lasting_test.yaml")


def used() -> frozenset[str]:
    """The metrics that a rule asks for."""
    exprs = " ".join(re.sub(r'"[^"]*"', "", rule["expr"]) for rule in rules())
    return frozenset(re.findall(r"[a-z_]{2,}", exprs))


def test_each_alert_fires_in_a_row() -> None:
    assert frozenset[str]().union(*(row.fires for row in rows())) == alerts()


@pytest.mark.parametrize("part", range(PARTS))
def test_each_state_that_may_last_sets_off_its_alerts_and_no_other(tmp_path: Path, part: int) -> None:
    assert "SUCCESS" in evaluated(tmp_path, [asked(row, used()) for row in rows()[part::PARTS]])


def test_an_alert_that_a_state_must_not_set_off_is_found(tmp_path: Path) -> None:
    """As the first alert of claims did, by the number of those in one state."""
    (row,) = (row for row in rows() if row.name == "a claim is TakenOver")
    former = 'sum by (node, state) (gpuactors_claims{state!~"Prepared|Unprepared"}) > 0'
    alert = {"alert": "ClaimStuckByItsState", "expr": former, "for": "15m"}
    test = asked(row, used() | {"gpuactors_claims"})
    assert "SUCCESS" in evaluated(tmp_path, [test])
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "former", "rules": [alert]}]}))
    with pytest.raises(AssertionError, match="ClaimStuckByItsState"):
        promtool(tmp_path, "test", "rules", "lasting_test.yaml")


def test_what_needs_a_hand_is_the_same_to_the_dashboard_the_documents_and_the_alerts() -> None:
    """The causes that are left out set off no alert."""
    quiet = {cause for cause, fires in lasting_states.DEVICES.items() if not fires}
    unhealthy = {str(cause) for cause in quiet if MEANINGS[cause].health != HEALTHY}
    found = [re.search(r'cause!~"([^"]*)"', text) for text in (*shown(), *documented())]
    left_out = [one[1].split("|") for one in found if one is not None]
    assert len(left_out) >= 2
    assert all(sorted(causes) == sorted(unhealthy) for causes in left_out)


def test_every_state_has_a_row() -> None:
    of_devices = {cause for cause, meaning in MEANINGS.items() if meaning.health != CALL}
    assert lasting_states.DEVICES.keys() == of_devices
    assert lasting_claims.OF_EACH_STATE.keys() == {*ClaimState} - {ClaimState.ABSENT}
    assert lasting_states.PARTITIONS.keys() == {*PartitionState} - {PartitionState.ABSENT}
    assert lasting_states.SLOW.keys() == {*METHODS}
    outcomes = {series("gpuactors_calls_total", method="Allocate", outcome=outcome) for outcome in OUTCOMES}
    assert outcomes <= lasting_states.COUNTERS.keys()
    says_whether = {gauge.name for gauge in GAUGES if gauge.help.startswith("Whether ")}
    assert says_whether == metrics_of(*(changed for _, changed, _ in lasting_states.FLAGS))


def test_every_metric_has_a_row_or_says_no_state() -> None:
    changed = metrics_of(*(changed for _, changed, _ in _changes())) & DECLARED.keys()
    told = lasting_states.SAYS_NO_STATE | lasting_states.BY_FILMS
    assert not changed & told
    assert changed | told == DECLARED.keys()
