"""The report: the text fits a terminal, the JSON keeps its keys, the YAML is KubeVirt's, and every check has a test."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import trio
import yaml
from msgspec.structs import replace
from trio.testing import MockClock

from gpuactors.cli.doctor import run
from gpuactors.cli.doctor.facts import Facts
from gpuactors.cli.doctor.finding import DOCUMENTS, Check, Finding, Level
from gpuactors.cli.doctor.run import Examined, examined_within
from gpuactors.cli.progress import SILENT
from gpuactors.config import resolve
from tests.cli.doctor.rig import GPU, SECOND, open_patient
from tests.support.markdown import anchors

ROOT = Path(__file__).parents[3]
RESOLVED = resolve({}, {})

H100, A100 = "nvidia.com/GH100_H100_SXM5_80GB", "nvidia.com/GA100_A100_SXM4_40GB"
LONG = "a-device-plugin-of-somebody-else-with-a-name-that-is-longer-than-a-line-of-any-terminal-that-is-left.sock"


@pytest.fixture(scope="module")
def ill() -> Examined:
    """A node with two models, of which one GPU is on a driver of the host."""
    with open_patient() as patient:
        patient.gpu(driver="nvidia")
        patient.gpu(0x24)
        patient.node.plug(0x25, "20b0", driver="vfio-pci")
        return patient.examined(pre=False)


def test_the_json_has_these_keys_and_no_other(ill: Examined) -> None:
    known = json.loads(ill.json())
    assert list(known) == [
        "node", "version", "pre", "settings", "failed", "counts", "findings", "permitted_host_devices",
        "permitted_mediated_devices",
    ]  # fmt: skip
    assert list(known["counts"]) == ["PASS", "WARN", "FAIL"]
    assert sum(known["counts"].values()) == len(known["findings"])
    assert (known["node"], known["pre"], known["failed"]) == ("node-1", False, True)
    assert all(
        list(f) == ["group", "check", "level", "message", "remedy", "document", "cause", "devices"]
        for f in known["findings"]
    )
    assert [f for f in known["findings"] if f["cause"]] == [
        {
            "group": "GPUs",
            "check": "GpusUsable",
            "level": "WARN",
            "message": "bound to nvidia, which is no vfio driver; bind it to vfio-pci to offer it",
            "remedy": f"Bind it to vfio-pci. For instance, as root: driverctl set-override {GPU} vfio-pci",
            "document": "docs/reference.md#causes",
            "cause": "NotBound",
            "devices": [GPU],
        }
    ]
    assert all((f["remedy"] is None) == (f["level"] == "PASS") for f in known["findings"])


@pytest.mark.parametrize("columns", [60, 80, 100, 200])
def test_the_text_fits(ill: Examined, columns: int) -> None:
    text = replace(ill, facts=replace(ill.facts, user=0)).text(columns)
    prose, _, _ = text.partition("\nspec:")
    assert all(len(line) <= columns for line in prose.splitlines() if len(line.split()) > 1), text
    whole = replace(ill, facts=replace(ill.facts, user=0)).text()
    assert text.split() == whole.split()


def test_the_text_of_a_pipe_has_a_line_for_each_sentence(ill: Examined) -> None:
    text = replace(ill, facts=replace(ill.facts, user=0)).text()
    assert text.splitlines()[0] == (
        "Node node-1; settings of this command: flags, environment, file and defaults"
    )
    assert re.search(r"\n\n1 FAIL, 1 WARN, \d+ PASS\n\nTo add to the custom resource KubeVirt", text)
    assert f"\n  WARN  {GPU}: bound to nvidia, which is no vfio driver;" in text
    assert "\n        To do: Bind it to vfio-pci. For instance" in text


def test_a_check_names_one_document_below_the_last_of_its_findings_that_is_no_pass(ill: Examined) -> None:
    (first, *rest) = ill.groups
    findings = tuple(
        Finding(Check.NODE_MODES, level, f"number {i}", "Do it." * (level is not Level.PASS))
        for i, level in enumerate((Level.WARN, Level.WARN, Level.PASS))
    )
    text = replace(ill, groups=(replace(first, findings=findings), *rest)).text()
    assert (
        "  WARN  number 0\n        To do: Do it.\n"
        "  WARN  number 1\n        To do: Do it.\n        More: docs/operate.md#files-on-the-node\n"
        "  PASS  number 2\n"
    ) in text
    assert text.count("docs/operate.md#files-on-the-node") == 1


def test_every_check_names_a_document_that_is_there() -> None:
    assert DOCUMENTS.keys() == {*Check}
    for document in DOCUMENTS.values():
        path, _, anchor = document.partition("#")
        assert not anchor or anchor in anchors((ROOT / path).read_text(encoding="utf-8")), document
        assert (ROOT / path).is_file()


def test_a_terminal_gets_colours_that_change_no_line(ill: Examined) -> None:
    coloured, plain = ill.text(100, colour=True), ill.text(100)
    assert "\x1b[32mPASS\x1b[0m" in coloured
    assert "\x1b[33mWARN\x1b[0m" in coloured
    assert "\x1b[31m\x1b[1mFAIL\x1b[0m" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain


async def test_with_wait_it_examines_until_nothing_fails(
    ill: Examined, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    well = replace(ill.facts, pre=True, daemon=None)
    times: list[float] = []

    async def gather(*_: object, **__: object) -> Facts:
        times.append(trio.current_time())
        return well if len(times) == 3 else ill.facts

    monkeypatch.setattr(run, "gather", gather)
    began_at = trio.current_time()
    found = await examined_within(RESOLVED, pre=False, progress=SILENT, wait_s=60.0)
    assert not found.is_failed
    assert [at - began_at for at in times] == pytest.approx([0.0, 2.0, 4.0])
    times[:] = [0.0] * 3
    began_at = trio.current_time()
    found = await examined_within(RESOLVED, pre=False, progress=SILENT, wait_s=5.0)
    assert found.is_failed
    assert [at - began_at for at in times[3:]] == pytest.approx([0.0, 2.0, 4.0, 5.0])
    times.clear()
    assert (await examined_within(RESOLVED, pre=False, progress=SILENT, wait_s=0.0)).is_failed
    assert len(times) == 1


def test_a_word_that_is_longer_than_the_line_is_not_broken(ill: Examined) -> None:
    (first, *rest) = ill.groups
    finding = Finding(Check.OTHER_PLUGINS, Level.PASS, f"other sockets: {LONG}", devices=(GPU, SECOND))
    text = replace(ill, groups=(replace(first, findings=(finding,)), *rest)).text(80)
    assert f"  PASS  {GPU}, {SECOND}: other sockets:\n        {LONG}\n" in text


def test_the_yaml_is_what_kubevirt_takes_and_the_same_as_in_the_json(ill: Examined) -> None:
    pasted: Any = yaml.safe_load(ill.text(80).rpartition("already:")[2])
    permitted = pasted["spec"]["configuration"]["permittedHostDevices"]["pciHostDevices"]
    assert permitted == json.loads(ill.json())["permitted_host_devices"]
    assert permitted == [
        {"pciVendorSelector": "10DE:20B0", "resourceName": A100, "externalResourceProvider": True},
        {"pciVendorSelector": "10DE:2330", "resourceName": H100, "externalResourceProvider": True},
    ]


def test_who_is_not_root_is_told_so(ill: Examined) -> None:
    told = replace(ill, facts=replace(ill.facts, user=65534)).text(100)
    assert "; as user 65534, not root: what that may not read or write is a FAIL\n" in told.replace(
        "\n  ", " ", 1
    )
    assert "not root" not in replace(ill, facts=replace(ill.facts, user=0)).text(100)


def test_claims_alone_need_no_permission() -> None:
    with open_patient() as patient:
        patient.gpu()
        patient.flags |= {"device_plugin": "off", "dra": "on"}
        found = patient.examined(pre=True)
        assert json.loads(found.json())["permitted_host_devices"] == []
        assert found.text(100).endswith("PASS")


def test_a_remedy_belongs_to_what_is_wrong() -> None:
    with pytest.raises(AssertionError):
        Finding(Check.IOMMU_ON, Level.FAIL, "no IOMMU")
    with pytest.raises(AssertionError):
        Finding(Check.IOMMU_ON, Level.PASS, "IOMMU", "Nothing.")


def test_every_check_is_seeded() -> None:
    """Each is expected as a WARN or FAIL somewhere, but for the one that is only a hint."""
    names = ("host", "node", "preflight", "kubevirt", "grace", "way_back")
    seeded = "".join(Path(__file__).with_name(f"test_{name}.py").read_text() for name in names)
    expected = set(re.findall(r"Check\.(\w+),\s+(?:WARN|FAIL|level)\b", seeded))
    assert expected == {check.name for check in Check} - {"LOCKED_MEMORY"}
