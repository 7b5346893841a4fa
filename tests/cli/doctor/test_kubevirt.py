"""What KubeVirt must permit, of every kind of device: the YAML to paste, and a custom resource that is compared."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec.structs import replace

from gpuactors.cli.doctor.checks.kubevirt import check
from gpuactors.cli.doctor.custom_resource import parse
from gpuactors.cli.doctor.facts import Devices, Facts, KubeVirt, Unknown
from gpuactors.cli.doctor.finding import Check, Finding, Level
from gpuactors.cli.doctor.run import Examined, examined
from gpuactors.cli.progress import SILENT
from gpuactors.config import resolve
from gpuactors.control.view import DeviceView
from tests.cli.doctor.rig import GPU, open_patient

FAIL, WARN = Level.FAIL, Level.WARN

H100 = "nvidia.com/GH100_H100_SXM5_80GB"
VGPU, VGPU_RESOURCE = "NVIDIA A40-12Q", "nvidia.com/NVIDIA_A40-12Q"
MDEV, MDEV_RESOURCE = "GRID T4-1Q", "nvidia.com/GRID_T4-1Q"
VF_RESOURCE = "nvidia.com/GH100_H100_SXM5_80GB_VF"
UUID = "c5f9a3a0-0000-4000-8000-000000000001"


@pytest.fixture(scope="module")
def facts() -> Facts:
    """A whole GPU; two vGPUs of two profiles and a virtual function of one card, and a mediated device of another."""
    with open_patient() as patient:
        patient.gpu()
        found = patient.examined(pre=True).facts
    assert isinstance(found.devices, Devices)
    (whole,) = found.devices.view.devices
    views = (
        whole,
        part(whole, "0000:3b:00.4", "0000:3b:00.0", VGPU_RESOURCE, "vgpu", VGPU),
        part(whole, "0000:3b:00.5", "0000:3b:00.0", "nvidia.com/NVIDIA_A40-6Q", "vgpu", "NVIDIA A40-6Q"),
        part(whole, "0000:3b:00.6", "0000:3b:00.0", VF_RESOURCE, "virtual-function"),
        part(whole, UUID, "0000:41:00.0", MDEV_RESOURCE, "mdev", MDEV),
    )
    view = replace(found.devices.view, devices=views)
    return replace(found, devices=replace(found.devices, view=view))


def part(
    whole: DeviceView, key: str, parent: str, resource: str, kind: str, profile: str | None = None
) -> DeviceView:
    return replace(whole, address=key, parent=parent, resource=resource, kind=kind, profile=profile)


def to_paste(facts: Facts) -> dict[str, Any]:
    """The custom resource of somebody who has pasted what the report prints, and nothing else."""
    pasted = yaml.safe_load(Examined(facts, ()).text(80).rpartition("already:")[2])
    assert isinstance(pasted, dict)
    return {"apiVersion": "kubevirt.io/v1", "kind": "KubeVirt", **pasted}


def lists(custom_resource: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    found = custom_resource["spec"]["configuration"]["permittedHostDevices"]
    assert isinstance(found, dict)
    return found


def findings(facts: Facts, custom_resource: Mapping[str, Any]) -> list[Finding]:
    return [*check(replace(facts, kubevirt=parse(json.dumps(custom_resource))))]


# --- the YAML ---------------------------------------------------------------------------------------------------------


def test_the_yaml_has_every_resource_of_the_node_in_the_list_of_its_kind(facts: Facts) -> None:
    assert lists(to_paste(facts)) == {
        "pciHostDevices": [
            {"pciVendorSelector": "10DE:2330", "resourceName": name, "externalResourceProvider": True}
            for name in (H100, VF_RESOURCE, VGPU_RESOURCE, "nvidia.com/NVIDIA_A40-6Q")
        ],
        "mediatedDevices": [
            {"mdevNameSelector": MDEV, "resourceName": MDEV_RESOURCE, "externalResourceProvider": True}
        ],
    }
    known = json.loads(Examined(facts, ()).json())
    assert known["permitted_host_devices"] == lists(to_paste(facts))["pciHostDevices"]
    assert known["permitted_mediated_devices"] == lists(to_paste(facts))["mediatedDevices"]


def test_by_kubevirts_rules_the_pasted_yaml_permits_all_and_keeps_the_mediated_devices(facts: Facts) -> None:
    """A name is permitted if either list has it. A resource is virt-handler's own, and a mediated device is deleted,
    unless the entry is external (KubeVirt 1.9)."""
    entries = [entry for of_kind in lists(to_paste(facts)).values() for entry in of_kind]
    assert isinstance(facts.devices, Devices)
    assert {view.resource for view in facts.devices.view.devices} <= {e["resourceName"] for e in entries}
    assert all(entry["externalResourceProvider"] is True for entry in entries)
    external_types = {
        e["mdevNameSelector"].replace(" ", "_") for e in lists(to_paste(facts))["mediatedDevices"]
    }
    assert external_types == {"GRID_T4-1Q"}
    (finding,) = findings(facts, to_paste(facts))
    assert finding.level is Level.PASS


def test_a_card_that_is_given_away_in_parts_is_not_permitted_as_a_whole(facts: Facts) -> None:
    """Nobody offers it, as long as it has parts."""
    assert isinstance(facts.devices, Devices)
    (whole, *parts) = facts.devices.view.devices
    views = (whole, *(replace(p, parent=GPU) for p in parts))
    devices = replace(facts.devices, view=replace(facts.devices.view, devices=views))
    names = {e["resourceName"] for e in lists(to_paste(replace(facts, devices=devices)))["pciHostDevices"]}
    assert names == {VF_RESOURCE, VGPU_RESOURCE, "nvidia.com/NVIDIA_A40-6Q"}


@pytest.mark.parametrize("profile", ["a: b", 'x"y', "- 1", "tab\there"])
def test_a_name_that_yaml_would_mistake_is_quoted(facts: Facts, profile: str) -> None:
    assert isinstance(facts.devices, Devices)
    (*others, mdev) = facts.devices.view.devices
    view = replace(facts.devices.view, devices=(*others, replace(mdev, profile=profile)))
    odd = replace(facts, devices=replace(facts.devices, view=view))
    (entry,) = lists(to_paste(odd))["mediatedDevices"]
    assert entry["mdevNameSelector"] == profile


def test_without_a_custom_resource_the_resources_are_counted(facts: Facts) -> None:
    (finding,) = check(facts)
    assert finding.level is Level.PASS
    assert finding.message.startswith("5 resources to be permitted")
    assert "--kubevirt FILE" in finding.message
    off = replace(facts, config=replace(facts.config, device_plugin="off"))
    assert [*check(off)] == []


# --- a custom resource ------------------------------------------------------------------------------------------------


def test_a_name_that_it_does_not_list_is_refused_and_one_in_either_list_is_not(facts: Facts) -> None:
    has = to_paste(facts)
    (vgpu,) = [e for e in lists(has)["pciHostDevices"] if e["resourceName"] == VGPU_RESOURCE]
    lists(has)["pciHostDevices"].remove(vgpu)
    (found,) = findings(facts, has)
    assert (found.check, found.level) == (Check.PERMITTED_HOST_DEVICES, WARN)
    assert f"refuses a virtual machine with {VGPU_RESOURCE}:" in found.message
    lists(has)["mediatedDevices"].append(vgpu | {"mdevNameSelector": "any"})
    (found,) = findings(facts, has)
    assert found.level is Level.PASS


def test_without_the_list_no_name_is_refused_but_mediated_devices_are_deleted(facts: Facts) -> None:
    has: dict[str, Any] = {"kind": "KubeVirt", "spec": {"configuration": {}}}
    (found,) = findings(facts, has)
    assert (found.check, found.level) == (Check.PERMITTED_HOST_DEVICES, FAIL)
    assert f"deletes the mediated devices of the type {MDEV}:" in found.message
    gates = {"featureGates": ["DisableMDEVConfiguration"]}
    has["spec"]["configuration"]["developerConfiguration"] = gates
    (found,) = findings(facts, has)
    assert found.level is Level.PASS


@pytest.mark.parametrize("external", [False, None, "true"])
def test_a_mediated_device_whose_entry_is_not_external_is_deleted_and_served_by_kubevirt(
    facts: Facts, external: object
) -> None:
    has = to_paste(facts)
    (entry,) = lists(has)["mediatedDevices"]
    entry["externalResourceProvider"] = external
    served, deleted = findings(facts, has)
    assert f"KubeVirt serves {MDEV_RESOURCE} itself" in served.message
    assert "externalResourceProvider: true" in deleted.message
    assert {served.level, deleted.level} == {FAIL}


def test_a_type_is_compared_as_kubevirt_does(facts: Facts) -> None:
    has = to_paste(facts)
    (entry,) = lists(has)["mediatedDevices"]
    entry["mdevNameSelector"] = "GRID_T4-1Q"
    assert [f.level for f in findings(facts, has)] == [Level.PASS]
    entry["mdevNameSelector"] = "GRID T4-2Q"
    (found,) = findings(facts, has)
    assert f"of the type {MDEV}:" in found.message, "the name is permitted, and its devices are deleted"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kind: Pod", "no object of the kind KubeVirt"),
        ("- 1", "no object of the kind KubeVirt"),
        ("items: []", "a list of 0 objects"),
        ("items: [{kind: KubeVirt}, {kind: KubeVirt}]", "a list of 2 objects"),
        ("kind: KubeVirt\nspec: 1", "spec is no mapping"),
        ("{kind: KubeVirt, spec: {configuration: {permittedHostDevices: {pciHostDevices: 1}}}}", "no list"),
        ("kind: [", "line 1"),
    ],
)
def test_what_is_no_custom_resource(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse(text)


def test_a_list_of_kubectl_with_one_object_is_that_object() -> None:
    (one,) = {parse("items: [{kind: KubeVirt}]"), parse("kind: KubeVirt")}
    assert one == KubeVirt((), (), permits_by_list=False, deletes_mediated=True)


def test_the_command_reads_a_file_or_standard_input(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with open_patient() as patient:
        patient.gpu()
        monkeypatch.setattr("sys.stdin", io.StringIO("kind: KubeVirt"))
        known = [patient_facts(patient.words(), "-"), patient_facts(patient.words(), "-")]
        assert known[0] == parse("kind: KubeVirt")
        assert isinstance(known[1], Unknown)
        assert known[1].reason.startswith("standard input is not KubeVirt's custom resource")
        missing = patient_facts(patient.words(), str(tmp_path / "none.yaml"))
        assert isinstance(missing, Unknown)
        assert missing.reason == f"{tmp_path}/none.yaml cannot be read: No such file or directory"


def test_what_cannot_be_read_is_a_fail(facts: Facts) -> None:
    (found,) = check(replace(facts, kubevirt=Unknown("x.yaml cannot be read: Permission denied")))
    assert (found.level, found.message) == (FAIL, "x.yaml cannot be read: Permission denied")
    assert "kubectl -n kubevirt get kubevirt kubevirt -o yaml" in found.remedy


def patient_facts(words: Mapping[str, object], path: str) -> object:
    return examined(resolve(words, {}), pre=True, progress=SILENT, kubevirt=path).facts.kubevirt
