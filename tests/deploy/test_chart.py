"""deploy/base and the overlays are what the Helm chart renders, alone and combined; it refuses wrong values by their
path. Helm itself renders, and kubectl."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import pytest
import yaml

from tests.deploy.chart import CHART, NAMESPACE, RELEASE, Values, helm, refusal, rendered, template
from tests.deploy.manifests import (
    DEPLOY,
    Manifest,
    configuration_of,
    kustomize,
    normal,
    of_kind,
    render,
    seen_at,
)
from tests.deploy.overlays import (
    DOMAINS,
    DRA,
    EVENTS,
    FEATURES,
    KATA,
    MADE,
    OF_HELM,
    OPENSHIFT,
    VALUES,
    in_any_namespace,
    written,
)
from tests.tables import OF_THE_CHART

EXAMPLE: Final[Values] = {
    "image": {"repository": "registry.example/gpu/gpuactors"},
    "nodeSelector": {"gpuactors.io/enabled": "true"},
}

SITE: Final[Values] = {
    "extraEnv": [{"name": "TZ", "value": "UTC"}],
    "extraVolumes": [{"name": "names", "hostPath": {"path": "/srv"}}],
    "extraVolumeMounts": [{"name": "names", "mountPath": "/srv"}],
    "settings": {"pci_ids": "/srv/pci.ids", "log_format": "console", "log_level": "debug"},
    "port": 9500,
    "probes": {"readiness": {"periodSeconds": 9}, "liveness": {"initialDelaySeconds": 3}},
    "imagePullSecrets": [{"name": "registry"}],
    "nodeFeatures": {"affinity": True},
    "affinity": {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
    "priorityClassName": "site-critical",
    "resourceQuota": {"enabled": True},
}
"""What a site adds."""

K0S: Final[Values] = {"kubeletDir": "/var/lib/k0s/kubelet"}

WITH_OPERATOR: Final = ("--api-versions", "monitoring.coreos.com/v1")
"""A cluster that has Prometheus' operator."""

IN_THE_BASE: Final[Values] = {"namespace": {"create": True}}
"""`helm install` needs the namespace before; the base has it."""


def of_the_chart(values: Values, *, options: tuple[str, ...] = ()) -> dict[tuple[str, str], Manifest]:
    """The chart's objects, less the labels that they must have and an overlay's do not, and with its policies."""
    text = in_any_namespace(rendered({**IN_THE_BASE, **values}, options=options))
    found = normal([one for one in yaml.safe_load_all(text) if one is not None])
    for one in found.values():
        labels = one["metadata"]["labels"]
        assert {key: labels.pop(key) for key in OF_HELM} == OF_HELM
    return found


# --- base and overlays ------------------------------------------------------------------------------------


def test_base_and_overlays_are_what_the_chart_renders() -> None:
    for path, text in written().items():
        assert path.read_text() == text, f"{path}: run 'just overlays' and commit the result"


@pytest.mark.parametrize("overlay", [*VALUES, "overlays/k0s", "overlays/example"])
def test_kubectl_makes_of_a_directory_what_its_values_render(overlay: str) -> None:
    """Without a warning. The patches merge to the object of which they are a part."""
    values = {**VALUES, "overlays/k0s": K0S, "overlays/example": EXAMPLE}[overlay]
    expected = of_the_chart(values, options=WITH_OPERATOR)
    if overlay == "monitoring":  # beside the rest, and not on top of it
        expected = {key: one for key, one in expected.items() if key not in of_the_chart({})}
    assert normal(render(DEPLOY / overlay)) == expected


@pytest.mark.parametrize(
    ("components", "values"),
    [
        (("dra", "events"), {**DRA, **EVENTS}),
        # Both mount the CDI directory to write it.
        (("dra", "kata"), {**DRA, **KATA}),
        # Both name the account's token and the constraints' kinds of volumes, once.
        (("openshift", "events"), {**OPENSHIFT, **EVENTS}),
        # Both mount the directory of Node Feature Discovery, one of them to read a file of it.
        (
            (
                "openshift",
                "holders-proc",
                "dra",
                "load-modules",
                "compute-domains",
                "events",
                "node-features",
            ),
            {
                **OPENSHIFT,
                **EVENTS,
                **FEATURES,
                "dra": {"enabled": True, "loadModules": True},
                "computeDomains": {"enabled": True},
            },
        ),
    ],
    ids=["dra, events", "dra, kata", "openshift, events", "all"],
)
def test_components_combine_to_both_their_values(
    tmp_path: Path, components: tuple[str, ...], values: Values
) -> None:
    assert normal(render(combined(tmp_path, components))) == of_the_chart(values)


def combined(directory: Path, components: Iterable[str]) -> Path:
    """A copy of the base with these components, as an operator writes it."""
    for name in ("base", "components"):
        shutil.copytree(DEPLOY / name, directory / name)
    kustomization = {
        "resources": ["../base"],
        "components": [f"../components/{name}" for name in components],
    }
    mine = directory / "mine"
    mine.mkdir()
    (mine / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    return mine


@pytest.mark.parametrize(
    ("components", "missing"),
    [
        (["compute-domains"], "gpuactors-dra"),
        (["compute-domains", "dra"], "gpuactors-dra"),
        (["load-modules"], "gpuactors-dra"),
        (["dra", "compute-domains-host-managed"], "gpuactors-compute-domains"),
    ],
)
def test_a_component_without_the_one_that_it_needs_is_refused(
    tmp_path: Path, components: list[str], missing: str
) -> None:
    done = kustomize(combined(tmp_path, components))
    assert (done.returncode, done.stdout) == (1, "")
    assert f"no matches for Id ClusterRole.v1.rbac.authorization.k8s.io/{missing}.[noNs]" in done.stderr


def test_every_component_but_one_is_made_from_the_chart_and_is_in_an_overlay() -> None:
    components = {path.name for path in (DEPLOY / "components").iterdir()}
    assert components - {name.removeprefix("components/") for name in MADE} == {"k0s"}
    assert components <= {path.name for path in (DEPLOY / "overlays").iterdir()}


def test_a_prometheus_chooses_by_labels_and_finds_the_pods_of_another_name() -> None:
    labels = {"release": "kube-prometheus-stack"}
    values = {"nameOverride": "gpu-b", "monitoring": {"enabled": True, "labels": labels}}
    objects = template(values, namespace="elsewhere", options=WITH_OPERATOR)
    for kind in ("PodMonitor", "PrometheusRule"):
        metadata = of_kind(objects, kind)["metadata"]
        assert labels.items() <= metadata["labels"].items()
        assert (metadata["name"], metadata["namespace"]) == ("gpu-b", "elsewhere")
    selector = of_kind(objects, "PodMonitor")["spec"]["selector"]
    assert selector == of_kind(objects, "DaemonSet")["spec"]["selector"]
    assert of_kind(objects, "ConfigMap")["metadata"]["name"] == "gpu-b-dashboard"


def test_the_rules_follow_the_daemon_sets_name_and_the_address_of_the_runbooks() -> None:
    address = "https://git.example/docs"
    values = {"nameOverride": "gpu-b", "monitoring": {"enabled": True, "docsUrl": address}}
    objects = template(values, options=WITH_OPERATOR)
    groups = of_kind(objects, "PrometheusRule")["spec"]["groups"]
    alerts = {rule["alert"]: rule for group in groups for rule in group["rules"] if "alert" in rule}
    missing = alerts["GpuactorsPodMissing"]
    assert missing["expr"] == 'kube_daemonset_status_number_unavailable{daemonset="gpu-b"} > 0'
    for name, rule in alerts.items():
        assert rule["annotations"]["runbook_url"] == f"{address}/troubleshoot.md#{name.lower()}"
    board = json.loads(of_kind(objects, "ConfigMap")["data"]["gpuactors.json"])
    assert [link["url"] for link in board["links"]] == [
        f"{address}/{n}" for n in ("troubleshoot.md#alerts", "reference.md#causes", "reference.md#metrics")
    ]


def test_where_every_gpu_is_prebound_the_pod_is_the_base_with_the_three_mounts_that_claims_need() -> None:
    """The third column of the README's table."""
    bound, plain = of_the_chart(DRA), of_the_chart({})
    found = of_the_chart({"dra": {"enabled": True, "allPrebound": True}})
    key = ("DaemonSet", "gpuactors")
    assert {name: one for name, one in found.items() if name != key} == {
        name: one for name, one in bound.items() if name != key
    }
    pod, base = found[key]["spec"]["template"]["spec"], plain[key]["spec"]["template"]["spec"]
    (container,), (known,) = pod["containers"], base["containers"]
    needed = {"plugin", "plugins-registry", "cdi"}
    assert {one["name"] for one in pod["volumes"] if one not in base["volumes"]} == needed
    assert {one["name"] for one in container["volumeMounts"] if one not in known["volumeMounts"]} == needed
    assert {one["name"] for one in container["env"] if one not in known["env"]} == {
        "GPUACTORS_DRA",
        "POD_UID",
    }
    # For what it writes: /var/run/cdi is no container's directory.
    assert container["securityContext"].pop("seLinuxOptions") == {"type": "spc_t"}
    assert known["securityContext"].pop("seLinuxOptions") == {"type": "container_device_plugin_t"}
    assert (container["securityContext"], pod["hostPID"]) == (known["securityContext"], False)


def test_the_device_class_and_the_definitions_are_those_that_deploy_has() -> None:
    found = of_kinds(
        template(
            {
                "dra": {"enabled": True, "deviceClass": True},
                "computeDomains": {"enabled": True, "definitions": True},
            }
        ),
        {"DeviceClass", "CustomResourceDefinition"},
    )
    for one in found:
        if one["kind"] == "CustomResourceDefinition":
            # They are NVIDIA's, and with them every ComputeDomain would go.
            assert one["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
        else:
            one["metadata"].pop("labels")
    files = [DEPLOY / "examples" / "dra" / "device-class.yaml", *(CHART / "definitions").glob("*.yaml")]
    assert normal(found) == normal([one for file in files for one in yaml.safe_load_all(file.read_text())])


def of_kinds(objects: list[Manifest], kinds: set[str]) -> list[Manifest]:
    return [one for one in objects if one["kind"] in kinds]


# --- values -----------------------------------------------------------------------------------------------


def test_another_name_and_namespace_are_followed_everywhere() -> None:
    """Two releases in one cluster: nothing of cluster scope has a name of both."""
    values = {**DOMAINS, "nameOverride": "gpu-b"}
    other = template(values, namespace="elsewhere")
    assert json.dumps(other).count("system:serviceaccount:elsewhere:gpu-b") == 2
    names = {(one["kind"], one["metadata"]["name"]) for one in other}
    assert not names & normal(template(DOMAINS)).keys()
    for one in other:
        assert one["metadata"].get("namespace", "elsewhere") == "elsewhere"
        for subject in one.get("subjects", ()):
            assert (subject["name"], subject["namespace"]) == ("gpu-b", "elsewhere")
    daemon_set = of_kind(other, "DaemonSet")
    assert daemon_set["spec"]["selector"]["matchLabels"] == {"app.kubernetes.io/name": "gpu-b"}


def test_other_drivers_and_directories_are_followed_and_taken_by_the_daemon() -> None:
    values = {
        "devicePluginDir": "/srv/device-plugins",
        "stateDir": "/srv/gpuactors",
        "dra": {
            "enabled": True,
            "driverName": "gpus.example",
            "cdiDir": "/etc/cdi",
            "driverRoot": "/opt/nvidia/driver",
        },
        "computeDomains": {
            "enabled": True,
            "driverName": "domains.example",
            "namespace": "nvidia",
            "hostManaged": True,
            "imexCtl": "/opt/imex/ctl",
        },
    }
    objects = template(values)
    pod = of_kind(objects, "DaemonSet")["spec"]["template"]["spec"]
    shown = {key: entry["value"] for key, entry in configuration_of(pod["containers"][0]).items()}
    assert (shown["driver_name"], shown["cdi_dir"]) == ("gpus.example", "/etc/cdi")
    assert shown["driver_root"] == "/opt/nvidia/driver"
    assert seen_at(pod, "/host/opt/nvidia/driver/run") == ("/opt/nvidia/driver/run", False)
    assert (shown["domains_driver"], shown["domains_namespace"]) == ("domains.example", "nvidia")
    assert shown["state_dir"] == "/srv/gpuactors"
    assert shown["device_plugin_dir"] == "/srv/device-plugins"
    assert (shown["compute_domains"], shown["imex_ctl"]) == ("host-managed", "/opt/imex/ctl")
    assert seen_at(pod, "/opt/imex/ctl") == ("/opt/imex/ctl", False)
    paths = {volume["hostPath"]["path"] for volume in pod["volumes"]}
    assert {
        "/var/lib/kubelet/plugins/gpus.example",
        "/var/lib/kubelet/plugins/domains.example",
        "/etc/cdi",
        "/srv/device-plugins",
        "/srv/gpuactors",
    } <= paths


def test_a_setting_of_the_daemon_reaches_it_as_it_was_written() -> None:
    settings = {
        "select": ["vendor=10de,class=03", "!address=0000:23:00.0"],
        "resync_interval_s": 86400,
        "journal": "off",
        "device_plugin": False,
        "prebound": "all",
        "imex_channels": 2048,
    }
    pod = of_kind(template({"settings": settings}), "DaemonSet")["spec"]["template"]["spec"]
    shown = configuration_of(pod["containers"][0])
    expected = {**settings, "device_plugin": "off", "prebound": ["all"]}
    assert {key: shown[key]["value"] for key in settings} == expected


def test_what_the_chart_sets_itself_is_set_where_all_of_it_is_on() -> None:
    values = {
        "devicePluginDir": "/srv/device-plugins",
        "stateDir": "/srv/gpuactors",
        "dra": {
            "enabled": True,
            "driverName": "gpus.example",
            "cdiDir": "/etc/cdi",
            "driverRoot": "/opt/nvidia/driver",
            "loadModules": True,
        },
        "computeDomains": {
            "enabled": True,
            "driverName": "domains.example",
            "namespace": "nvidia",
            "hostManaged": True,
            "imexCtl": "/opt/imex/ctl",
        },
        "events": {"enabled": True},
        "nodeFeatures": {"enabled": True},
        "kata": {"enabled": True},
    }
    (container,) = of_kind(template(values), "DaemonSet")["spec"]["template"]["spec"]["containers"]
    named = {entry["name"].removeprefix("GPUACTORS_").lower() for entry in container["env"]}
    named |= {flag.partition("=")[0].removeprefix("--").replace("-", "_") for flag in container["args"][1:]}
    assert named == {*OF_THE_CHART, "pod_uid"}


def test_an_image_is_named_by_its_digest_where_there_is_one() -> None:
    digest = f"sha256:{'0123456789abcdef' * 4}"
    for image, name in (
        ({}, "gpuactors:0.1.0"),
        ({"repository": "registry.example/g", "tag": "1"}, "registry.example/g:1"),
        ({"repository": "registry.example/g", "tag": "1", "digest": digest}, f"registry.example/g@{digest}"),
    ):
        pod = of_kind(template({"image": image}), "DaemonSet")["spec"]["template"]["spec"]
        assert pod["containers"][0]["image"] == name


def test_a_site_names_its_own_selinux_type_and_annotations() -> None:
    values = {**OPENSHIFT, "seLinuxType": "site_t", "podAnnotations": {"site.example/x": "y"}}
    found = of_kind(template(values), "DaemonSet")["spec"]["template"]
    (container,) = found["spec"]["containers"]
    assert container["securityContext"]["seLinuxOptions"] == {"type": "site_t"}
    assert found["metadata"]["annotations"] == {
        "site.example/x": "y",
        "openshift.io/required-scc": "gpuactors",
    }


def test_a_cluster_that_does_not_know_recursive_read_only_gets_mounts_without_it() -> None:
    for version, known in (("1.29", False), ("1.30", True)):
        objects = template(options=("--kube-version", version))
        assert ("recursiveReadOnly" in json.dumps(objects)) is known


def test_the_network_policy_admits_the_port_of_the_probes_from_prometheus_and_nobody_else() -> None:
    objects = template({"networkPolicy": {"namespaces": ["prometheus"]}, "nameOverride": "gpu-b"})
    policy, daemon_set = of_kind(objects, "NetworkPolicy")["spec"], of_kind(objects, "DaemonSet")["spec"]
    assert policy["podSelector"] == daemon_set["selector"]
    assert policy["policyTypes"] == ["Ingress"]
    (rule,) = policy["ingress"]
    (port,), (peer,) = rule["ports"], rule["from"]
    (container,) = daemon_set["template"]["spec"]["containers"]
    assert port["port"] in {named["name"] for named in container["ports"]}
    (expression,) = peer["namespaceSelector"]["matchExpressions"]
    assert (expression["key"], expression["values"]) == ("kubernetes.io/metadata.name", ["prometheus"])
    nobody = template({"networkPolicy": {"namespaces": []}})
    assert of_kind(nobody, "NetworkPolicy")["spec"]["ingress"] == []
    assert "NetworkPolicy" not in {one["kind"] for one in template({"networkPolicy": {"enabled": False}})}


def test_what_a_site_adds_reaches_the_pod() -> None:
    objects = template(SITE)
    pod = of_kind(objects, "DaemonSet")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert {"name": "TZ", "value": "UTC"} in container["env"]
    assert [*SITE["extraVolumes"]] == [one for one in pod["volumes"] if one["name"] == "names"]
    assert [*SITE["extraVolumeMounts"]] == [
        one for one in container["volumeMounts"] if one["name"] == "names"
    ]
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    assert [port["containerPort"] for port in container["ports"]] == [9500]
    readiness, liveness = container["readinessProbe"], container["livenessProbe"]
    assert (readiness["periodSeconds"], readiness["timeoutSeconds"]) == (9, 2)
    assert (liveness["initialDelaySeconds"], liveness["failureThreshold"]) == (3, 6)
    shown = {key: entry["value"] for key, entry in configuration_of(container).items()}
    assert (shown["log_level"], shown["log_format"], shown["http_address"]) == ("debug", "console", ":9500")
    assert shown["pci_ids"] == "/srv/pci.ids"
    affinity = pod["affinity"]
    assert affinity["podAffinity"] == SITE["affinity"]["podAffinity"]
    (required,) = affinity["nodeAffinity"].values()
    keys = [term["matchExpressions"][0]["key"] for term in required["nodeSelectorTerms"]]
    assert "feature.node.kubernetes.io/pci-10de.present" in keys
    quota = of_kind(objects, "ResourceQuota")["spec"]
    (expression,) = quota["scopeSelector"]["matchExpressions"]
    assert (quota["hard"], expression["values"]) == ({"pods": "10000"}, ["site-critical"])


def test_two_releases_of_one_application_select_their_own_pods() -> None:
    values = {"fullnameOverride": "gpu-b", "serviceAccount": {"name": "gpus", "annotations": {"a": "b"}}}
    objects = template({**values, **EVENTS})
    daemon_set, account = of_kind(objects, "DaemonSet"), of_kind(objects, "ServiceAccount")
    own = {"app.kubernetes.io/name": "gpuactors", "app.kubernetes.io/instance": RELEASE}
    assert daemon_set["metadata"]["name"] == "gpu-b"
    assert daemon_set["spec"]["selector"]["matchLabels"] == own
    assert own.items() <= daemon_set["spec"]["template"]["metadata"]["labels"].items()
    assert of_kind(objects, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"] == own
    assert (account["metadata"]["name"], account["metadata"]["annotations"]) == ("gpus", {"a": "b"})
    assert daemon_set["spec"]["template"]["spec"]["serviceAccountName"] == "gpus"
    assert of_kind(objects, "ClusterRoleBinding")["subjects"][0]["name"] == "gpus"
    assert "serviceaccount:gpuactors:gpus" in json.dumps(of_kind(objects, "ValidatingAdmissionPolicy"))
    for one in objects:
        labels = one["metadata"]["labels"]
        assert (labels["app.kubernetes.io/instance"], labels["app.kubernetes.io/version"]) == (
            RELEASE,
            "0.1.0",
        )
    existing = template({"serviceAccount": {"create": False, "name": "gpus"}})
    assert "ServiceAccount" not in {one["kind"] for one in existing}


def test_the_templates_and_the_schema_refuse_the_same_settings() -> None:
    helpers = (CHART / "templates" / "_helpers.tpl").read_text()
    (listed,) = re.findall(r"range \$key, \$value := dict\n(.*?)\}\}", helpers, re.DOTALL)
    words = re.findall(r'"([^"]*)"', listed)
    assert dict(zip(words[::2], words[1::2], strict=True)) == OF_THE_CHART


# --- wrong values -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"dra": {"enabeld": True}}, "at '/dra': additional properties 'enabeld' not allowed"),
        ({"tolerationss": []}, "at '': additional properties 'tolerationss' not allowed"),
        ({"holders": "open"}, "at '/holders': value must be one of 'passive', 'proc'"),
        ({"kubeletDir": "/var/lib/kubelet/"}, "at '/kubeletDir': '/var/lib/kubelet/' does not match pattern"),
        (
            {"settings": {"device_plugin": "maybe"}},
            "at '/settings/device_plugin': value must be one of 'off', 'on'",
        ),
        (
            {"settings": {"resync_interval_s": 100000}},
            "at '/settings/resync_interval_s': maximum: got 100,000, want 86,400",
        ),
        (
            {"settings": {"dra": "on"}},
            "settings.dra cannot be set: set dra.enabled, from which the pod's mounts and rights follow",
        ),
        ({"settings": {"node_name": "n1"}}, "settings.node_name cannot be set: it follows from the pod"),
        ({"settings": {"drb": "on"}}, "at '/settings': additional properties 'drb' not allowed"),
        (
            {"extraEnv": [{"name": "GPUACTORS_LOG_LEVEL", "value": "debug"}]},
            "extraEnv has GPUACTORS_LOG_LEVEL: set settings.log_level",
        ),
        ({"serviceAccount": {"create": False}}, "serviceAccount.create: false needs serviceAccount.name"),
        (
            {"serviceAccount": {"name": "default"}},
            "serviceAccount.name: default is the account of every pod without one of its own",
        ),
        (
            {"nodeFeatures": {"affinity": True}, "affinity": {"nodeAffinity": {"x": "y"}}},
            "nodeFeatures.affinity is a nodeAffinity, as is affinity.nodeAffinity: set one of them",
        ),
        (
            {"podLabels": {"app.kubernetes.io/name": "x"}},
            "invalid propertyName 'app.kubernetes.io/name'",
        ),
        (
            {"settings": {"allocate_as": "cdi"}},
            "settings.allocate_as: cdi needs kata.enabled",
        ),
        ({"extraArgs": ["--dra=on"]}, "at '': additional properties 'extraArgs' not allowed"),
        ({"settings": {"select": ["foo"]}}, "at '/settings/select/0': 'foo' does not match pattern"),
        (
            {"nodes": [{"match": {"names": ["a"]}, "settings": {"select": "foo"}}]},
            "at '/nodes/0/settings/select': 'foo' does not match pattern",
        ),
        (
            {"settings": {"resource": ["a/b=foo"]}},
            "at '/settings/resource/0': 'a/b=foo' does not match pattern",
        ),
        (
            {"nodeSelector": {"gpuactors.io/enabled": ""}},
            "at '/nodeSelector/gpuactors.io~1enabled': value must be 'true'",
        ),
        ({"nodeSelector": {"": "x"}}, "invalid propertyName ''"),
        ({"computeDomains": {"enabled": True}}, "computeDomains.enabled needs dra.enabled: set it as well"),
        (
            {"computeDomains": {"hostManaged": True}},
            "computeDomains.hostManaged needs computeDomains.enabled: set it as well",
        ),
        (
            {"monitoring": {"enabled": True}},
            "this cluster does not know monitoring.coreos.com/v1: install that first",
        ),
    ],
)
def test_a_wrong_value_is_refused_by_its_path(values: Values, said: str) -> None:
    assert said in refusal(values)


def test_helm_has_nothing_else_to_say() -> None:
    done = helm("template", RELEASE, str(CHART))
    assert (done.returncode, done.stderr) == (0, "")


def test_a_cluster_that_is_too_old_is_refused_with_its_version() -> None:
    said = refusal(DRA, "--kube-version", "1.33.1")
    assert "dra.enabled needs Kubernetes 1.34 or newer, and this is v1.33.1" in said
    said = refusal(EVENTS, "--kube-version", "1.31.2")
    assert "events.enabled needs Kubernetes 1.32 or newer, and this is v1.31.2" in said
    assert "chart requires kubeVersion: >=1.22.0-0" in refusal({}, "--kube-version", "1.21.0")


def properties(schema: Manifest, path: str = "") -> Iterator[tuple[str, Manifest]]:
    for name, inner in schema.get("properties", {}).items():
        yield f"{path}.{name}", inner
        yield from properties(inner, f"{path}.{name}")


def test_every_value_is_described_and_has_the_default_that_values_yaml_shows() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    described = [*properties(schema)]
    assert len(described) > 40
    for path, inner in described:
        assert inner["description"].endswith("."), path
        if inner.get("type") == "object" and "properties" in inner:
            assert inner["additionalProperties"] is False, path
    assert schema["additionalProperties"] is False

    def keys(schema: Manifest, value: Manifest, path: str) -> Iterator[str]:
        for name, inner in schema["properties"].items():
            if f"{path}.{name}" in {".global", ".settings", ".probes"}:
                continue
            if name not in value:
                yield f"{path}.{name}"
            elif inner.get("properties"):
                yield from keys(inner, value[name], f"{path}.{name}")

    assert [*keys(schema, values, "")] == []


# --- the package ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [{}, DOMAINS], ids=["plain", "compute domains"])
def test_helm_has_nothing_to_say_against_it(values: Values) -> None:
    done = helm("lint", "--strict", "--quiet", str(CHART), values=values)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stdout + done.stderr


def test_the_notes_name_the_release_and_what_it_still_needs() -> None:
    def notes(values: Values) -> str:
        done = helm("install", "r", str(CHART), "--dry-run=client", "--namespace", NAMESPACE, values=values)
        assert done.returncode == 0, done.stderr
        return done.stdout.partition("\nNOTES:\n")[2]

    plain = notes({})
    assert "kubectl -n gpuactors rollout status daemonset/gpuactors\n" in plain
    assert "kubectl label namespace gpuactors pod-security.kubernetes.io/enforce=privileged \\\n" in plain
    assert "ImagePullBackOff, its node cannot pull gpuactors:0.1.0. That name has\nno registry" in plain
    assert "Claims" not in plain
    on = notes({**IN_THE_BASE, **DOMAINS, **EXAMPLE})
    assert "kubectl label" not in on
    assert "cannot pull registry.example/gpu/gpuactors:0.1.0. Check that the image is in that\nregistry" in on
    assert "gpuactors.io/enabled=true kubernetes.io/os=linux." in on
    assert re.search(r"^Claims are on: .*driver gpu\.nvidia\.com\.", on, re.MULTILINE)
    assert "They ask for a\nDeviceClass" in on
    assert "Compute domains are on." in on
