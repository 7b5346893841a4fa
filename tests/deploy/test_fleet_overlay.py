"""One configuration file for a fleet: chart and overlay make a ConfigMap of it, mount it, and give the right to
read the labels of the Node, and no other."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from trio.testing import MockClock

from gpuactors.config import resolve
from tests.deploy.chart import Values, refusal, template
from tests.deploy.manifests import DEPLOY, ROOT, Manifest, configuration_of, of_kind, render
from tests.deploy.overlays import EVENTS, FLEET, FLEET_FILE, OPENSHIFT, fleet
from tests.deploy.rights import OF_FLEET, rights_of, used_by

PAGE: Final = ROOT / "docs/operate.md"
EXAMPLE: Final = DEPLOY / "examples/fleet/gpuactors.yaml"
MOUNTED_AT: Final = "/etc/gpuactors"
BY_NAME: Final[Values] = {"nodes": [{"match": {"names": ["a*"]}, "settings": {"log_level": "debug"}}]}
LABELS: Final = {"example.com/kind": "l40s"}
BY_LABEL: Final[Values] = {"nodes": [{"match": {"labels": LABELS}, "settings": {"log_level": "debug"}}]}

KUSTOMIZATIONS: Final = [
    block.removeprefix("yaml\n") for block in PAGE.read_text().split("```") if "configMapGenerator" in block
]


@pytest.fixture(scope="module")
def overlaid() -> list[Manifest]:
    return render(DEPLOY / "overlays/fleet")


def file_of(objects: list[Manifest]) -> str:
    """The file that the container sees where its variable says that it is."""
    pod = of_kind(objects, "DaemonSet")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    path = Path(next(entry["value"] for entry in container["env"] if entry["name"] == "GPUACTORS_CONFIG"))
    (mount,) = (one for one in container["volumeMounts"] if one["mountPath"] == str(path.parent))
    assert mount["readOnly"] is True
    (volume,) = (one for one in pod["volumes"] if one["name"] == mount["name"])
    config = of_kind(objects, "ConfigMap")
    assert volume["configMap"] == {"name": config["metadata"]["name"]}
    assert config["metadata"]["namespace"] == "gpuactors"
    is_fixed = config["metadata"]["name"] == "gpuactors-config"
    assert config.get("immutable", False) is not is_fixed, "a name with a hash, or a content that changes"
    assert "subPath" not in mount, "kubelet changes a file only in a directory of its own"
    content: str = config["data"][path.name]
    return content


def settings_of(tmp_path: Path, content: str, node: str, *labels: str, **variables: str) -> Mapping[str, Any]:
    """What a daemon makes of the file and the pod's variables, with the sources."""
    path = tmp_path / "gpuactors.yaml"
    path.write_text(content)
    environ = {f"GPUACTORS_{key.upper()}": value for key, value in variables.items()}
    resolved = resolve({"config": path, "node_name": node, "node_labels": labels or ("none=",)}, environ)
    return {key: getattr(resolved.config, key) for key in resolved.provenance}


def test_chart_and_overlay_make_the_same_file(overlaid: list[Manifest]) -> None:
    assert yaml.safe_load(file_of(overlaid)) == yaml.safe_load(FLEET_FILE.read_text())
    assert yaml.safe_load(file_of(template(FLEET))) == yaml.safe_load(FLEET_FILE.read_text())


def test_the_overlay_is_the_chart_with_these_values(overlaid: list[Manifest]) -> None:
    def pod(objects: list[Manifest]) -> Manifest:
        spec: Manifest = of_kind(objects, "DaemonSet")["spec"]["template"]["spec"]
        for volume in spec["volumes"]:
            if "configMap" in volume:  # by a hash of the file's text, which is not the same text
                name, _, hashed = volume["configMap"]["name"].rpartition("-")
                assert (name, len(hashed)) == ("gpuactors-config", 10)
                volume["configMap"] = name
        return {key: spec[key] for key in spec if key not in {"containers", "volumes"}} | {
            "volumes": sorted(spec["volumes"], key=lambda one: str(one["name"])),
            "env": sorted(spec["containers"][0]["env"], key=lambda one: str(one["name"])),
            "mounts": sorted(spec["containers"][0]["volumeMounts"], key=lambda one: str(one["name"])),
        }

    rendered = template(FLEET)
    assert {one["kind"] for one in overlaid} - {"Namespace"} == {one["kind"] for one in rendered}
    assert pod(overlaid) == pod(rendered)


async def test_the_role_has_exactly_the_verbs_that_the_client_uses(
    overlaid: list[Manifest], autojump_clock: MockClock
) -> None:
    granted = rights_of(one for one in overlaid if "rules" in one)
    assert sorted(granted) == sorted(await used_by(OF_FLEET)) == [("", ("", "nodes", "get"))]
    account, binding = of_kind(overlaid, "ServiceAccount"), of_kind(overlaid, "ClusterRoleBinding")
    assert [one["name"] for one in binding["subjects"]] == [account["metadata"]["name"]]
    assert binding["roleRef"]["name"] == of_kind(overlaid, "ClusterRole")["metadata"]["name"]


@pytest.mark.parametrize(
    ("values", "reads"),
    [
        (BY_LABEL, True),
        (BY_NAME, False),
        ({"nodes": [*BY_NAME["nodes"], *BY_LABEL["nodes"]]}, True),
        ({**BY_LABEL, "settings": {"node_labels": ["example.com/kind=l40s"]}}, False),
        ({}, False),
    ],
    ids=["labels", "names", "both", "labels that are set", "no entries"],
)
def test_there_is_a_token_only_where_labels_decide_that_no_setting_has(values: Values, reads: bool) -> None:
    objects = template(values)
    pod = of_kind(objects, "DaemonSet")["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is reads
    assert ("ClusterRole" in {one["kind"] for one in objects}) is reads
    assert ("ConfigMap" in {one["kind"] for one in objects}) is bool(values)


def test_entries_win_over_settings_as_no_variable_has_these(tmp_path: Path) -> None:
    settings = {"log_level": "error", "resource_name": ["10de:2330=a.b/c"], "node_labels": ["a=b"]}
    objects = template({**BY_NAME, "settings": settings})
    (container,) = of_kind(objects, "DaemonSet")["spec"]["template"]["spec"]["containers"]
    named = {entry["name"] for entry in container["env"]}
    assert named & {"GPUACTORS_LOG_LEVEL", "GPUACTORS_RESOURCE_NAME"} == set()
    assert "GPUACTORS_NODE_LABELS" in named, "a file for several nodes cannot have them"
    content = file_of(objects)
    assert settings_of(tmp_path, content, "a1")["log_level"] == "debug"
    other = settings_of(tmp_path, content, "b1")
    assert (other["log_level"], other["resource_name"]) == ("error", ("10de:2330=a.b/c",))
    (container,) = of_kind(template({"settings": settings}), "DaemonSet")["spec"]["template"]["spec"][
        "containers"
    ]
    shown = configuration_of(container)
    assert shown["log_level"] == {"value": "error", "from": "environment GPUACTORS_LOG_LEVEL"}


def test_a_change_of_the_file_changes_the_pods_template() -> None:
    def name(values: Values) -> str:
        found: str = of_kind(template(values), "ConfigMap")["metadata"]["name"]
        return found

    same, other = {**BY_NAME, "podLabels": {"a": "b"}}, {**BY_NAME, "settings": {"log_format": "console"}}
    assert name(BY_NAME) == name(same) != name(other)


@pytest.mark.parametrize("on", ["on", True, "yes"])
@pytest.mark.parametrize("values", [{}, BY_NAME], ids=["no entries", "entries"])
def test_where_the_file_is_read_again_it_changes_under_the_same_pods(
    tmp_path: Path, values: Values, on: object
) -> None:
    first, other = (
        template({**values, "settings": {"reload": on, "select": [f"vendor={vendor}"]}})
        for vendor in ("10de", "1002")
    )
    assert of_kind(first, "DaemonSet") == of_kind(other, "DaemonSet")
    assert of_kind(first, "ConfigMap")["metadata"]["name"] == "gpuactors-config"
    found = settings_of(tmp_path, file_of(other), "b1")
    assert (found["select"], found["reload"]) == (("vendor=1002",), "on")
    (container,) = of_kind(first, "DaemonSet")["spec"]["template"]["spec"]["containers"]
    named = {entry["name"] for entry in container["env"]}
    assert named & {"GPUACTORS_SELECT", "GPUACTORS_RELOAD"} == set(), "a variable would win over the file"


def test_reload_switched_off_makes_no_file() -> None:
    assert "ConfigMap" not in {one["kind"] for one in template({"settings": {"reload": "off"}})}


def test_the_kustomization_of_the_page_for_reload_has_a_config_map_that_changes(tmp_path: Path) -> None:
    kustomization = next(b for b in KUSTOMIZATIONS if "disableNameSuffixHash" in b)
    directory = combined(tmp_path, "fleet")
    (directory / "kustomization.yaml").write_text(kustomization)
    (directory / "gpuactors.yaml").write_text("reload: on\n" + EXAMPLE.read_text())
    objects = render(directory)
    assert of_kind(objects, "ConfigMap")["metadata"]["name"] == "gpuactors-config"
    assert settings_of(tmp_path, file_of(objects), "n", "none=")["reload"] == "on"


def test_each_entry_of_the_example_is_a_value_of_the_chart(tmp_path: Path) -> None:
    content = yaml.safe_load(EXAMPLE.read_text())
    settings = {**content, "resource": "example.com/gpu-large=vendor=10de,device=2330"}  # a variable's form
    file = file_of(template(fleet(settings)))
    grace = settings_of(tmp_path, file, "n", "example.com/kind=gb200")
    assert grace["resource"] == ("example.com/gpu-grace=vendor=10de,device=2941",)
    assert settings_of(tmp_path, file, "n")["resource"] == ("example.com/gpu-large=vendor=10de,device=2330",)


def test_openshifts_constraints_allow_the_file_and_the_token() -> None:
    for values, allowed in (
        (BY_NAME, ["configMap", "hostPath"]),
        (BY_LABEL, ["configMap", "hostPath", "projected"]),
    ):
        objects = template({**OPENSHIFT, **values})
        assert of_kind(objects, "SecurityContextConstraints")["volumes"] == allowed


def test_the_component_combines_with_those_before_it(tmp_path: Path) -> None:
    objects = render(combined(tmp_path, "openshift", "dra", "events", "fleet"))
    values = {**OPENSHIFT, **EVENTS, **FLEET, "dra": {"enabled": True}}
    for kind, key in (("SecurityContextConstraints", "volumes"), ("SecurityContextConstraints", "users")):
        assert of_kind(objects, kind)[key] == of_kind(template(values), kind)[key]
    assert yaml.safe_load(file_of(objects)) == yaml.safe_load(FLEET_FILE.read_text())


def test_the_kustomization_of_the_page_has_the_sites_own_file(tmp_path: Path) -> None:
    kustomization = next(b for b in KUSTOMIZATIONS if "immutable" in b)
    directory = combined(tmp_path, "fleet")
    (directory / "kustomization.yaml").write_text(kustomization)
    shutil.copy(EXAMPLE, directory)
    assert file_of(render(directory)) == EXAMPLE.read_text()


def test_the_values_of_the_page_are_a_file_with_its_entries(tmp_path: Path) -> None:
    block = next(b for b in PAGE.read_text().split("```") if b.startswith("yaml\nsettings:"))
    file = file_of(template(yaml.safe_load(block.removeprefix("yaml\n"))))
    found = settings_of(tmp_path, file, "n", "example.com/kind=l40s")
    assert found["resource"] == ("example.com/gpu-small=vendor=10de,device=26b9",)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"dra": "on"}, "nodes[1].settings.dra cannot be set: set dra.enabled, from which the pod's mounts"),
        ({"reload": "on"}, "nodes[1].settings.reload cannot be set: set settings.reload"),
        ({"host_root": "/"}, "nodes[1].settings.host_root cannot be set: it follows from the pod"),
        ({"node_name": "x"}, "at '/nodes/1/settings': additional properties 'node_name' not allowed"),
        ({"log_level": "loud"}, "at '/nodes/1/settings/log_level': value must be one of"),
        ({}, "at '/nodes/1/settings': minProperties: got 0, want 1"),
    ],
)
def test_a_wrong_entry_is_refused_by_its_path(settings: Values, said: str) -> None:
    assert said in refusal({"nodes": [*BY_NAME["nodes"], {"match": {"names": ["b"]}, "settings": settings}]})


def combined(tmp_path: Path, *components: str) -> Path:
    """A directory beside copies of base and components, with the overlay's kustomization of these components."""
    for name in ("base", "components"):
        shutil.copytree(DEPLOY / name, tmp_path / name)
    (tmp_path / "overlays/mine").mkdir(parents=True)
    shutil.copy(FLEET_FILE, tmp_path / "overlays/mine")
    kustomization = yaml.safe_load((DEPLOY / "overlays/fleet/kustomization.yaml").read_text())
    kustomization |= {
        "resources": ["../../base"],
        "components": [f"../../components/{name}" for name in components],
    }
    (tmp_path / "overlays/mine/kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    return tmp_path / "overlays/mine"
