"""The summary of a soak, its refusals and its verdict."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.node.cluster import Object
from tests.soak.audit import Requests, kinds
from tests.soak.sample import Sample
from tests.soak.story import Played, Story, page, write
from tests.soak.tenants import Tenant, judged, without_names


def sample(at_s: float, descriptors: int = 40) -> Sample:
    requests = {
        "list nodes": int(at_s),
        "patch resourceslices": 2,
        **{f"get {name}": 1 for name in "abcdefgh"},
    }
    return Sample(at_s, 7, 50.0 + at_s / 3600, 48.0, descriptors, 3, 0.1, requests)


def story(**changes: object) -> Story:
    ran = Tenant("plugin-1", "plugin", 2, 0.0, ran_after_s=3.4)
    refused = Tenant("plugin-2", "plugin", 1, 0.0, refused_by="UnexpectedAdmissionError: no healthy devices")
    found = Story(
        5, "Kubernetes v1", [Played(1.0, 1, "end", "end plugin-1", "deleted"), Played(2.0, 1, "end", "end x", "")],
        1, 1800.0, [ran, refused], [sample(at) for at in range(10, 1800, 10)], {"the GPU is held": 2},
    )  # fmt: skip
    for name, value in changes.items():
        setattr(found, name, value)
    return found


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ({"phase": "Running"}, "runs"),
        ({"phase": "Pending"}, "starts"),
        (
            {"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "False", "message": "m"}]},
            "waits",
        ),
        ({"phase": "Failed", "reason": "UnexpectedAdmissionError"}, "refused"),
        ({"phase": "Failed", "reason": "OutOfnvidia.com/GH100"}, "refused"),
        ({"phase": "Failed"}, "failed"),
        ({"phase": "Succeeded"}, "failed"),
    ],
)
def test_what_became_of_a_pod(status: Object, expected: str) -> None:
    assert judged({"status": status})[0] == expected
    assert judged(None)[0] == "gone"


def test_a_pod_that_was_refused_stays_so() -> None:
    tenant = Tenant("plugin-1", "plugin", 1, 10.0)
    tenant.look({"status": {"phase": "Failed", "reason": "OutOfGPU", "message": "of 0000:21:00.0"}}, 12.0)
    tenant.look(None, 13.0)
    assert (tenant.state, tenant.refused_by) == ("gone", "OutOfGPU: of 0000:21:00.0")
    tenant = Tenant("plugin-1", "plugin", 1, 10.0)
    tenant.look({"status": {"phase": "Running"}}, 12.5)
    assert tenant.ran_after_s == 2.5


def test_reasons_are_counted_without_names() -> None:
    said = "GPU 0000:21:00.0 of default/claim-12-gpu-x7 (6e4e1f2a-3b5c-4d7e-8f90-0a1b2c3d4e5f) is held"
    assert without_names(said) == "GPU … of default/… (…) is held"


def test_requests_are_counted_by_kind(tmp_path: Path) -> None:
    def line(verb: str, resource: str, stage: str = "ResponseComplete", sub: str = "") -> str:
        thing = {"resource": resource} | ({"subresource": sub} if sub else {})
        return json.dumps({"verb": verb, "stage": stage, "objectRef": thing, "requestURI": "/x"})

    lines = [
        line("patch", "nodes", sub="status"),
        line("watch", "nodes", "ResponseStarted"),
        line("watch", "nodes"),
    ]
    assert kinds(lines) == {"patch nodes/status": 1, "watch nodes": 1}
    bare = json.dumps({"verb": "get", "stage": "ResponseComplete", "requestURI": "/version?timeout=1s"})
    assert kinds([bare]) == {"get /version": 1}
    log = tmp_path / "audit.log"
    requests = Requests(log)
    assert requests.look() == {}
    log.write_text(f"{lines[0]}\n{lines[1][:10]}")
    assert requests.look() == {"patch nodes/status": 1}
    with log.open("a") as more:
        more.write(f"{lines[1][10:]}\n")
    assert requests.look() == {"patch nodes/status": 1, "watch nodes": 1}


def test_a_summary_without_a_fault(tmp_path: Path) -> None:
    found = story()
    assert found.verdict() == []
    write(found, tmp_path)
    text = (tmp_path / "summary.md").read_text()
    assert "**Nothing was wrong.**" in text
    assert "| plugin | 2 | 1 | 1 | 0 |" in text
    assert "| end | 1 | 1 |" in text
    assert "| UnexpectedAdmissionError: no healthy devices | 1 |" in text
    assert "| rss_mib | 50.0028 | 50.4972 | 50.4972 | +1.00 |" in text
    names = {path.name for path in tmp_path.iterdir()}
    assert {
        "memory.svg",
        "descriptors.svg",
        "journal.svg",
        "requests.svg",
        "requests.csv",
        "events.txt",
    } <= names
    assert ">others<" in (tmp_path / "requests.svg").read_text()


def test_what_was_wrong_is_told() -> None:
    leaking = [sample(at, 40 + at // 60) for at in range(10, 1800, 10)]
    found = story(failure="LateError: plugin-2 did not run", samples=leaking)
    assert len(found.verdict()) == 2
    assert "**Failed**: LateError: plugin-2 did not run" in page(found)
    assert "end plugin-1: deleted" in found.led_there()


def test_a_soak_that_has_not_begun_has_a_summary() -> None:
    assert "Of 0 pods 0 ran." in page(Story(1, "Kubernetes v1", failure="no node"))
