"""A replay of a node that takes part in compute domains: in text, as JSON, as a page, and of one device."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpuactors.core.events.domains import DomainRead
from gpuactors.core.events.kubelet import KubeletAppeared
from gpuactors.core.values.domain import DomainSettings
from gpuactors.replay.run import DeviceError
from gpuactors_simulation.replay_page.domain_lanes import LABEL_KINDS
from gpuactors_simulation.replay_page.page import DOMAIN_DEVICES_MAX, DOMAIN_KINDS
from tests.core.builders import gpu
from tests.core.domains.domain_core import (
    DAEMON,
    DOMAIN_SETTINGS,
    NODE,
    RED,
    DomainCore,
    channel,
    daemon,
    name,
)
from tests.observe.recording import RecordedCore, RecordedSteps, write
from tests.replay.replayed import replayed
from tests.support.browser import open_browser

OLD, NEW = name("old"), name("new")
STRANGER = "99999999-9999-9999-9999-999999999999"


class RecordedDomains(RecordedSteps, DomainCore):
    """`DomainCore`, whose steps are kept, from the first one with compute domains on."""

    def __init__(self, settings: DomainSettings = DOMAIN_SETTINGS) -> None:
        super().__init__(settings=settings)
        del self.steps[: [step.before.domains.settings is not None for step in self.steps].index(True)]


def story() -> RecordedDomains:
    """NVIDIA issue 641: the new claim's prepare comes before the old one's unprepare. Then a stranger's label."""
    core = RecordedDomains()
    core.feed(KubeletAppeared("kubelet"))
    core.created(channel(OLD), channel(NEW), daemon(DAEMON))
    core.prepare(OLD)
    core.pass_time(20.0)
    core.prepare(DAEMON)
    core.ready()
    core.pass_time(20.0)
    core.prepare(NEW)
    core.pass_time(0.5)
    core.unprepare(OLD)
    core.pass_time(60.0)
    core.labelled(STRANGER)
    core.pass_time(5.0)
    core.unprepare(NEW)
    core.unprepare(DAEMON)
    core.pass_time(5.0)
    return core


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("journal")
    write(directory, *story().steps)
    return directory


def said(lines: list[str], what: str) -> list[str]:
    """The lines about the label, or about domains, in their order."""
    return [line.split(what, 1)[1].strip() for line in lines if line.lstrip().startswith(f"{what} ")]


def test_what_changes_of_label_and_domains_is_told_where_it_does(journal: Path) -> None:
    told = replayed(journal)
    assert said(told, "label") == [
        "absent",
        f"{RED} is being added",
        RED,
        f"{STRANGER}, set by no claim here",
    ]
    named = f"the ComputeDomain default/red does not say yet that the node {NODE} is Ready"
    assert [line for line in said(told, "domain") if "read" not in line] == [
        f"default/red: NotReady: the label resource.nvidia.com/computeDomain of the node {NODE} is not there yet",
        "default/red: NotReady: the daemon of the ComputeDomain default/red has no prepared claim on this node yet",
        f"default/red: NotReady: {named}",
        "default/red: Ready",
        f"default/red: NotReady: the label resource.nvidia.com/computeDomain of the node {NODE} is {STRANGER}, which "
        "no claim here has set: its owner must remove it",
        "default/red: Unused",
        "default/red: no claim of it is left",
    ]


def test_reads_that_change_nothing_are_counted(journal: Path) -> None:
    told = replayed(journal)
    assert any(re.search(r"nothing new in .*domain reads", line) for line in told)
    reads = sum(isinstance(step.event, DomainRead) for step in story().steps)
    assert sum("is default/red, ready on" in line for line in told) < reads / 2


def test_each_step_has_label_and_domains_as_json(journal: Path) -> None:
    steps = [json.loads(line) for line in replayed(journal, as_json=True)]
    known = [step["compute_domains"] for step in steps if "step" in step]
    assert known[-1] == {"label": {"status": "Foreign", "value": STRANGER}, "domains": {}}
    statuses = [of["domains"][RED]["status"] for of in known if RED in of["domains"]]
    assert [s for i, s in enumerate(statuses) if i == 0 or statuses[i - 1] != s] == [
        "NotReady",
        "Ready",
        "NotReady",
        "Unused",
    ]


def test_without_compute_domains_a_step_has_none(tmp_path: Path) -> None:
    write(tmp_path, *RecordedCore(gpu("0000:01:00.0")).steps)
    steps = [json.loads(line) for line in replayed(tmp_path, as_json=True)]
    assert {step["compute_domains"] for step in steps if "step" in step} == {None}
    page = tmp_path / "page.html"
    replayed(tmp_path, html=page)
    assert not any(words in page.read_text() for words in DOMAIN_KINDS.values())


def test_of_one_device_only_its_claims_are_shown(journal: Path) -> None:
    told = "\n".join(replayed(journal, device="channel-0"))
    for words in (
        "claim default/old is allocated channel-0",
        "channel-0: it belongs to the claim default/old",
        "NodeUnprepareResources of claim default/old",
        f"{STRANGER}, set by no claim here",
    ):
        assert words in told, words
    assert re.search(r"answer  call \d+: unprepared", told)
    of_daemon = "NodeUnprepareResources of claim dra-driver-nvidia-gpu/daemon"
    assert of_daemon not in told
    told = "\n".join(replayed(journal, device="daemon-0"))
    assert of_daemon in told
    assert "NodeUnprepareResources of claim default/old" not in told
    with pytest.raises(
        DeviceError, match="channel-7 is in no state of this journal; its ResourceSlice names"
    ):
        replayed(journal, device="channel-7")


# --- the page -------------------------------------------------------------------------------------------------


def rows(page: Path) -> dict[str, list[tuple[str, str]]]:
    """Each row's bands: kind and reason."""
    found = re.search(r'<script id="data" type="application/json">(.*)</script>', page.read_text())
    assert found is not None
    data = json.loads(found[1])
    return {row["name"]: [(kind, data["texts"][t]) for _, _, kind, t in row["bands"]] for row in data["rows"]}


def test_the_page_has_a_lane_for_label_domain_and_devices(journal: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    replayed(journal, html=page)
    of = rows(page)
    assert [*of][-4:] == ["compute-domain.nvidia.com", "default/red", "channel-0", "daemon-0"]
    assert [kind for kind, _ in of["compute-domain.nvidia.com"]] == [
        "label-unknown",
        "label-absent",
        "label-unknown",
        "label-set",
        "label-foreign",
    ]
    assert of["compute-domain.nvidia.com"][-1][1] == f"label {STRANGER}, set by no claim here"
    reached = [kind for kind, _ in of["default/red"]]
    assert [kind for i, kind in enumerate(reached) if i == 0 or reached[i - 1] != kind] == [
        "not-ready",
        "ready",
        "not-ready",
        "unused",
    ]
    assert [text for kind, text in of["channel-0"] if text.endswith(": Prepared")] == [
        "claim default/old: Prepared",
        "claim default/new: Prepared",
    ]
    assert of["channel-0"][-1] == ("free", "offered to claims")
    text = page.read_text()
    occurring = {kind for bands in of.values() for kind, _ in bands}
    assert {"ready", "not-ready", "unused"} <= occurring, "the legend has what occurs"
    assert "NodePrepareResources of claim default/new done" in text
    for kind, words in DOMAIN_KINDS.items():
        assert re.search(rf"\.k-{kind} \{{", text), "each kind has its pattern"
        assert re.search(rf"\.b-{kind} \{{", text)
        assert (words in text) == (kind in occurring)
    for kind in LABEL_KINDS.values():
        assert re.search(rf"\.b-{kind} \{{", text)


def test_the_page_of_one_device_has_its_lane_and_what_it_depends_on(journal: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    replayed(journal, device="channel-0", html=page)
    assert [*rows(page)][-3:] == ["compute-domain.nvidia.com", "default/red", "channel-0"]


def test_of_thousands_of_channels_some_have_lanes_and_the_others_are_counted(tmp_path: Path) -> None:
    core = RecordedDomains(replace(DOMAIN_SETTINGS, channels=2048))
    core.prepare(channel(OLD, allocationMode="All"))
    core.pass_time(1.0)
    write(tmp_path, *core.steps)
    page = tmp_path / "page.html"
    replayed(tmp_path, html=page)
    assert [name for name in rows(page) if name.startswith("channel-")] == [
        f"channel-{number}" for number in range(DOMAIN_DEVICES_MAX)
    ]
    assert "32 lanes of devices of compute domains are shown, 2016 are not; --device NAME" in page.read_text()
    replayed(tmp_path, html=page, device="channel-2047")
    assert "channel-2047" in rows(page)


def test_a_browser_draws_them(journal: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    replayed(journal, html=page)
    with open_browser() as tab:
        tab.open(page.as_uri())
        tab.wait("document.getElementById('chart').dataset.drawn === 'yes'")
        assert (
            tab.run("document.querySelectorAll('.row.device .b-ready, .row.device .b-not-ready').length") >= 3
        )
        assert tab.run("document.querySelectorAll('.row.resource .b-label-set').length") == 1
        assert tab.run("document.querySelectorAll('#chart .m-granted').length") == 2, "of channel and daemon"
        fills = "[...document.querySelectorAll('.band')].map(b => getComputedStyle(b).fill)"
        assert "rgb(0, 0, 0)" not in tab.run(fills), "a kind without a colour would be black"
        assert not [e for e in tab.events if e["method"] in ("Runtime.exceptionThrown", "Log.entryAdded")]
