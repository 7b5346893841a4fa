"""How the history of a real node judges the workloads of compute domains; and the table that it has led to."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

from tests.node.domains import DOMAIN_OF, LABEL, NAMESPACE, NO_DAEMON, History, Seen, Uncovered

ROOT: Final = Path(__file__).resolve().parent.parent
DOMAIN: Final = "0f1e2d3c-0000-4000-8000-00000000000d"


class Told:
    """What was seen, one second after the other."""

    def __init__(self) -> None:
        self.history = History()
        self.seen: list[Seen] = []

    def node(self, label: str | None) -> None:
        """The Node has this label now."""
        self._add("Node", "node-1", "", {} if label is None else {LABEL: label}, {})

    def daemon(self, *, ready: bool) -> None:
        """The pod of the domain's daemon."""
        self._add("Pod", "daemon", NAMESPACE, {LABEL: DOMAIN}, _ready(ready=ready))

    def workload(self, phase: str, *, ending: bool = False) -> None:
        """A pod with a channel."""
        self._add("Pod", "job-0", "default", {DOMAIN_OF: DOMAIN}, {"phase": phase}, ending=ending)

    def _add(
        self, kind: str, name: str, namespace: str, labels: dict[str, str], status: object, *, ending: bool = False
    ) -> None:  # fmt: skip
        meta = {"uid": name, "name": name, "namespace": namespace, "labels": labels}
        thing = {
            "metadata": meta | ({"deletionTimestamp": "now"} if ending else {}),
            "spec": {"nodeName": "node-1"},
            "status": status,
        }
        number = len(self.seen)
        self.seen.append(Seen(number, self.history._began + number, kind, False, thing))


def _ready(*, ready: bool) -> dict[str, object]:
    return {"phase": "Running", "conditions": [{"type": "Ready", "status": str(ready)}]}


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    """Instead of the API server's watches."""
    found = Told()
    monkeypatch.setattr(History, "all", lambda *_: found.seen)
    return found


def uncovered(told: Told) -> list[Uncovered]:
    """What the history says, without an API server."""
    return told.history.uncovered_times(None)  # type: ignore[arg-type]


def test_a_time_without_label_or_daemon_is_measured(told: Told) -> None:
    told.node(DOMAIN)
    told.daemon(ready=True)
    told.workload("Running")
    assert uncovered(told) == []
    told.daemon(ready=False)  # 3 s
    told.node(None)
    told.daemon(ready=True)
    told.node(DOMAIN)
    found = [(one.workload, one.lacks, one.at_s, one.for_s, one.lasts) for one in uncovered(told)]
    assert found == [("job-0", NO_DAEMON, 3.0, 2.0, False), ("job-0", "the label is None", 4.0, 2.0, False)]


def test_a_time_that_lasts_goes_up_to_now(told: Told) -> None:
    told.node(DOMAIN)
    told.workload("Running")
    (one,) = uncovered(told)
    assert (one.lacks, one.at_s, one.lasts) == (NO_DAEMON, 1.0, True)
    assert str(one).startswith(f"job-0 runs while {NO_DAEMON}, at 1.00 s for ")


def test_a_workload_that_waits_or_ends_needs_nothing(told: Told) -> None:
    told.node(None)
    told.workload("Pending")
    told.workload("Running", ending=True)
    assert uncovered(told) == []


def test_the_page_has_each_scenario_that_both_are_compared_by() -> None:
    """By its text: only a node knows the marks of a scenario."""
    text = (ROOT / "tests" / "node" / "test_domains_compared.py").read_text()
    titles = re.findall(r'^@scenario\(\s*"(.*?)"', text, re.MULTILINE)
    assert len(titles) == text.count("\n@scenario(") > 0
    lines = (ROOT / "docs" / "dra.md").read_text().splitlines()
    first = lines.index("| Scenario | NVIDIA's | gpuactors |") + 2
    rows = [line.split(" | ")[0].removeprefix("| ") for line in lines[first : first + len(titles)]]
    assert rows == titles
    assert not lines[first + len(titles)].startswith("|")
