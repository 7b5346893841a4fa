"""Before NVIDIA's DRA driver is started again: all that still uses this node is a FAIL, and so is what is not known."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from gpuactors.acts.disk import RealDisk
from gpuactors.acts.theirs import prepared_by
from gpuactors.cli.commands import cli
from gpuactors.cli.doctor.checks.way_back import check
from gpuactors.cli.doctor.facts import Devices, Facts, Known, NoDaemon, TheirFile, Unknown
from gpuactors.cli.doctor.finding import Check, Finding, Level
from gpuactors.cli.doctor.run import examined
from gpuactors.cli.progress import SILENT
from gpuactors.config import resolve
from gpuactors.control.about import About
from gpuactors.control.client import Running
from gpuactors.control.view import ClaimsView, ClaimView, DomainsView, LabelView, NodeView, PodView
from gpuactors.core.values.cause import Cause
from gpuactors.core.values.claim_states import ENDED, OWNING, ClaimState
from gpuactors.core.values.domain import DRIVER as DOMAINS
from gpuactors.core.values.model import Holder, Role
from gpuactors.core.values.reported import ImexReport, LabelStatus
from gpuactors.ports.errors import StateFileError
from tests.cli.doctor.rig import GPU, SECOND, open_patient
from tests.test_tree import ROOT

PASS, WARN, FAIL = Level.PASS, Level.WARN, Level.FAIL
GPUS = "gpu.nvidia.com"
UID, OTHER_UID = "0b4c5a52-6d7b-4c1a-8f63-0d1b7a2c9e01", "0b4c5a52-6d7b-4c1a-8f63-0d1b7a2c9e02"
FILE = "/var/lib/kubelet/plugins/gpu.nvidia.com/checkpoint.json"


@pytest.fixture(scope="module")
def read() -> Facts:
    """A node with a GPU on vfio and one on nvidia, as it is read without a daemon."""
    with open_patient() as patient:
        patient.gpu()
        patient.gpu(0x24, "nvidia")
        return examined(resolve(patient.words(), {}), pre=False, progress=SILENT, before_nvidia=True).facts


@pytest.fixture
def drained(read: Facts) -> Facts:
    """Its daemon serves and nothing is in use."""
    assert isinstance(read.devices, Devices)
    view = replace(
        read.devices.view,
        role=str(Role.SERVING),
        ledger_problem="",
        claims=ClaimsView(GPUS, "", (), None),
        pods=(),
    )
    return replace(
        read, daemon=Running(7, "1", About("node-1"), view), before_nvidia=(TheirFile(FILE, GPUS, ()),)
    )


def with_view(facts: Facts, **changes: Any) -> Facts:
    assert isinstance(facts.daemon, Running)
    view: NodeView = replace(facts.daemon.view, **changes)
    return replace(facts, daemon=replace(facts.daemon, view=view))


def claim(state: ClaimState, *devices: str, uid: str = UID) -> ClaimView:
    return ClaimView("shop", "gpu", uid, str(state), 1.0, devices, (), "", 0)


def of(facts: Facts, which: Check = Check.NODE_DRAINED) -> list[Finding]:
    return [finding for finding in check(facts) if finding.check is which]


def levels(facts: Facts, which: Check = Check.NODE_DRAINED) -> list[Level]:
    return [finding.level for finding in of(facts, which)]


def test_an_ordinary_examination_says_nothing_of_it(drained: Facts) -> None:
    busy = with_view(drained, claims=ClaimsView(GPUS, "", (claim(ClaimState.PREPARED, GPU),), None))
    assert list(check(replace(busy, before_nvidia=None))) == []


def test_a_drained_node_has_no_fail(drained: Facts) -> None:
    found = {finding.check: finding.level for finding in check(drained)}
    assert found == {Check.NODE_DRAINED: PASS, Check.NVIDIA_CHECKPOINT: PASS, Check.LEFT_ON_VFIO: WARN}


@pytest.mark.parametrize("state", [*sorted(OWNING), ClaimState.FETCHING, ClaimState.WAITING])
def test_a_claim_that_has_not_ended_is_named(drained: Facts, state: ClaimState) -> None:
    (found,) = of(with_view(drained, claims=ClaimsView(GPUS, "", (claim(state, GPU),), None)))
    assert (found.level, f"shop/gpu of {GPUS} is {state}: {GPU}" in found.message) == (FAIL, True), found
    assert "kubectl drain node-1 --ignore-daemonsets --delete-emptydir-data" in found.remedy


def test_the_page_has_the_commands_of_the_remedies(drained: Facts) -> None:
    page = (ROOT / "docs/migrate.md").read_text(encoding="utf-8")
    claims = ClaimsView(GPUS, "", (claim(ClaimState.PREPARED, GPU),), None)
    label = LabelView(str(LabelStatus.ABSENT), UID, "", "")
    busy = with_view(drained, claims=claims, domains=of_domains(label=label))
    commands = [re.findall(r"kubectl .*?(?=\. |$)", finding.remedy) for finding in of(busy)]
    assert [len(found) for found in commands] == [1, 1], commands
    assert all(command.replace("node-1", "NODE") in page for (command,) in commands), commands


@pytest.mark.parametrize("state", sorted(ENDED))
def test_a_claim_that_has_ended_is_none(drained: Facts, state: ClaimState) -> None:
    assert levels(with_view(drained, claims=ClaimsView(GPUS, "", (claim(state, GPU),), None))) == [PASS]


def test_the_pod_that_uses_a_claim_is_named(drained: Facts) -> None:
    claims = ClaimsView(GPUS, "", (claim(ClaimState.PREPARED, GPU),), None)
    (found,) = of(
        with_view(drained, claims=claims, pods=(PodView("shop/vm-1", "", (GPU,), ("shop/gpu",), ()),))
    )
    assert found.message.endswith(f"{GPU}, used by the pod shop/vm-1")


ABSENT = LabelView(str(LabelStatus.ABSENT), None, "absent", "")


def of_domains(*claims: ClaimView, label: LabelView = ABSENT) -> DomainsView:
    return DomainsView(
        "on", ClaimsView(DOMAINS, "", claims, None), ImexReport(True, True, "", "", "", ""), label, ()
    )


def test_a_channel_of_a_compute_domain_is_one(drained: Facts) -> None:
    (found,) = of(with_view(drained, domains=of_domains(claim(ClaimState.PREPARED, "channel-0"))))
    assert (found.level, "channel-0" in found.message, DOMAINS in found.message) == (FAIL, True, True)


def test_a_domains_daemon_and_label_are_one_and_end_after_its_workloads(drained: Facts) -> None:
    """A drain leaves the daemon: it needs other words than a workload."""
    label = LabelView(str(LabelStatus.ABSENT), OTHER_UID, "", "")
    channel = claim(ClaimState.TAKEN_OVER, "channel-0")
    daemon = claim(ClaimState.TAKEN_OVER, "daemon-0", uid=OTHER_UID)
    workload, both = of(with_view(drained, domains=of_domains(channel, daemon, label=label)))
    assert "channel-0" in workload.message
    assert "the daemon of a compute domain (shop/gpu) and the label" in both.message
    assert OTHER_UID in both.message
    assert "kubectl label" not in both.remedy, (
        "gpuactors would put it back, and the daemon would end under its workload"
    )
    for facts in (of_domains(daemon, label=label), of_domains(label=label)):
        (found,) = of(with_view(drained, domains=facts))
        assert found.level is FAIL
        assert "kubectl label node node-1 resource.nvidia.com/computeDomain-" in found.remedy
    assert levels(with_view(drained, domains=of_domains(claim(ClaimState.TOMBSTONE, "daemon-0")))) == [PASS]


def test_pods_of_the_device_plugin_are_named_once_each(drained: Facts) -> None:
    has = PodView("shop/vm-1", "", (GPU,), (), ())
    left = PodView("shop/vm-2", "", (), (), (SECOND,))
    found = of(with_view(drained, pods=(has, left)))
    assert [f.level for f in found] == [FAIL, FAIL]
    assert "shop/vm-1" in found[0].message
    assert GPU in found[0].message
    assert "shop/vm-2" in found[1].message
    assert "may hold" in found[1].message
    by_claim = ClaimsView(GPUS, "", (claim(ClaimState.PREPARED, GPU),), None)
    assert len(of(with_view(drained, pods=(has,), claims=by_claim))) == 1, "the pod has it by that claim"
    waits = ClaimsView(GPUS, "", (claim(ClaimState.WAITING, GPU),), None)
    assert len(of(with_view(drained, pods=(has,), claims=waits))) == 2, "the claim waits for the pod's GPU"


def test_a_gpu_with_another_owner_or_an_open_file_is_named(drained: Facts) -> None:
    assert isinstance(drained.daemon, Running)
    for change in (
        {"owner": "shop/old"},
        {"holders": (Holder(4711, "qemu", None),)},
        {"cause": str(Cause.ORPHANED)},
    ):
        devices = tuple(replace(d, **change) if d.address == GPU else d for d in drained.daemon.view.devices)
        (found,) = of(with_view(drained, devices=devices))
        assert (found.level, found.message.startswith(GPU)) == (FAIL, True)


@pytest.mark.parametrize("daemon", [NoDaemon("no daemon runs"), Unknown("it hangs"), None])
def test_a_daemon_that_cannot_be_asked_is_a_fail(drained: Facts, daemon: Any) -> None:
    (found,) = of(replace(drained, daemon=daemon))
    assert (found.check, found.level) == (Check.NODE_DRAINED, FAIL)
    assert "is not known" in found.message


@pytest.mark.parametrize(
    "change",
    [
        {"ledger_problem": "rate limit"},
        {"claims": ClaimsView(GPUS, "no checkpoint can be read", (), None)},
        {"role": str(Role.HANDED_OVER)},
    ],
    ids=["ledger", "claims", "role"],
)
def test_a_daemon_that_does_not_know_is_a_fail(drained: Facts, change: dict[str, Any]) -> None:
    assert levels(with_view(drained, **change)) == [FAIL]


# --- NVIDIA's checkpoint ----------------------------------------------------------------------------------


def test_claims_that_ended_are_named_with_the_command(drained: Facts) -> None:
    facts = replace(drained, before_nvidia=(TheirFile(FILE, GPUS, (UID, OTHER_UID)),))
    taken_over = ClaimsView(GPUS, "", (claim(ClaimState.TAKEN_OVER, GPU),), None)
    (found,) = of(with_view(facts, claims=taken_over), Check.NVIDIA_CHECKPOINT)
    assert (found.check, found.level) == (Check.NVIDIA_CHECKPOINT, FAIL)
    assert (OTHER_UID in found.message, UID in found.message) == (True, False)
    assert f"rm {FILE}" in found.remedy
    assert levels(replace(drained, before_nvidia=Unknown("may not read")), Check.NVIDIA_CHECKPOINT) == [FAIL]


def of_boot(boot: str) -> str:
    """NVIDIA's checkpoint with one prepared claim."""
    claims = {UID: {"checkpointState": "PrepareCompleted", "preparedDevices": []}}
    return json.dumps({"checksum": 1, "v2": {"checksum": 2, "nodeBootID": boot, "preparedClaims": claims}})


def test_the_file_is_read_for_this_boot(tmp_path: Path) -> None:
    file = tmp_path / "checkpoint.json"
    assert prepared_by(RealDisk(), str(tmp_path), GPUS, "boot-1") == (str(file), ())
    text = of_boot("boot-1")
    file.write_text(text)
    assert prepared_by(RealDisk(), str(tmp_path), GPUS, "boot-1")[1] == (UID,)
    assert prepared_by(RealDisk(), str(tmp_path), GPUS, "boot-2")[1] == (), "its driver begins anew"
    file.write_text(text.replace("PrepareCompleted", "PrepareStarted"))
    assert prepared_by(RealDisk(), str(tmp_path), GPUS, "boot-1")[1] == ()


@pytest.mark.parametrize(
    "text", ["", "{}", '{"checksum":1,"v2":[', '{"checksum":"sha256:00","checkpoint":{}}']
)
def test_a_file_that_is_not_understood_is_not_empty(tmp_path: Path, text: str) -> None:
    (tmp_path / "checkpoint.json").write_text(text)
    with pytest.raises(StateFileError, match=r"checkpoint\.json"):
        prepared_by(RealDisk(), str(tmp_path), GPUS, "boot-1")


def test_the_command_reads_the_file_of_each_driver_that_is_on() -> None:
    with open_patient() as patient:
        patient.flags |= {"dra": "on", "cdi_dir": str(patient.node.directory / "cdi")}
        directory = patient.node.kubelet_dir / "plugins" / GPUS
        directory.mkdir(parents=True)

        def found() -> Known[tuple[TheirFile, ...]] | None:
            resolved = resolve(patient.words(), {})
            return examined(resolved, pre=False, progress=SILENT, before_nvidia=True).facts.before_nvidia

        path = str(directory / "checkpoint.json")
        assert found() == (TheirFile(path, GPUS, ()),)
        (directory / "checkpoint.json").write_text(of_boot(""))
        assert found() == (TheirFile(path, GPUS, (UID,)),), "an old release writes no boot"
        (directory / "checkpoint.json").write_text("torn")
        assert isinstance(found(), Unknown)


def test_it_is_not_for_a_node_without_a_daemon() -> None:
    said = CliRunner().invoke(cli, ["doctor", "--pre", "--before-nvidia"])
    assert (said.exit_code, "give one of them" in said.output) == (2, True)


# --- GPUs on vfio -----------------------------------------------------------------------------------------


def test_a_gpu_on_vfio_is_named_with_the_command(drained: Facts) -> None:
    (found,) = of(drained, Check.LEFT_ON_VFIO)
    assert (found.check, found.level) == (Check.LEFT_ON_VFIO, WARN)
    assert found.devices == (GPU,)
    assert f"driverctl unset-override {GPU}" in found.remedy
    assert levels(replace(drained, devices=Unknown("sysfs hangs")), Check.LEFT_ON_VFIO) == [FAIL]


def test_a_gpu_on_vfio_that_is_in_use_is_not_returned_yet(drained: Facts) -> None:
    assert isinstance(drained.daemon, Running)
    devices = tuple(replace(d, owner="shop/vm-1") for d in drained.daemon.view.devices)
    assert levels(with_view(drained, devices=devices), Check.LEFT_ON_VFIO) == [PASS]
