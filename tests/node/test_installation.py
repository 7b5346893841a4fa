"""Installations of the daemon: base, every overlay and the chart, as a real API server and kubelet take them."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.deploy.chart import CHART, template
from tests.deploy.manifests import DEPLOY, of_kind, render
from tests.deploy.overlays import VALUES as RENDERED_BY
from tests.deploy.test_chart import EXAMPLE, K0S, SITE
from tests.deploy.tools import HELM
from tests.node import daemonset, pods
from tests.node.cluster import (
    NODES,
    SLICES,
    ApiError,
    Object,
    api_server_for_pods,
    component,
    eventually,
    kubectl,
    kubelet_dir,
)
from tests.node.daemonset import NAMESPACE, Daemon
from tests.node.fake_host import A100, A100_RESOURCE, H100_RESOURCE
from tests.node.node import POSTED_S, Node
from tests.node.rights import (
    accepted,
    check_confined,
    check_opens_no_device,
    check_probes,
    check_token,
    imex_host,
    nvidias_definitions,
    troubles,
)  # fmt: skip

H: Final = H100_RESOURCE
SLOT: Final = 0x21

VALUES: Final[Mapping[str, Mapping[str, Any]]] = {
    **{name.removeprefix("overlays/"): RENDERED_BY[name] for name in RENDERED_BY if name != "monitoring"},
    "example": EXAMPLE,
    "k0s": K0S,
}
"""The chart's values for each overlay."""

EXAMPLE_IMAGE: Final = "registry.example/gpu/gpuactors:0.1.0"
GPU_NODES: Final = "gpuactors.io/enabled"
SCC: Final = "SecurityContextConstraints"


# --- what each overlay needs of the cluster -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nvidia(whole_node: Node) -> Iterator[None]:
    """What NVIDIA's DRA driver has brought, and a host with IMEX."""
    with nvidias_definitions(whole_node.api), imex_host():
        yield


@contextmanager
def _labelled(node: Node) -> Iterator[None]:
    """The node has the example's label and image. Without the label no daemon runs on it."""
    names = (f"docker.io/library/{daemonset.IMAGE}", EXAMPLE_IMAGE)
    subprocess.run(("ctr", "images", "tag", "--force", *names), capture_output=True, check=True)
    label = ("ctr", "images", "label", EXAMPLE_IMAGE, "io.cri-containerd.image=managed")
    subprocess.run(label, capture_output=True, check=True)
    path = f"{NODES}/{node.name}"
    node.api.merge(path, {"metadata": {"labels": {GPU_NODES: "true"}}})
    try:
        yield
    finally:
        node.api.merge(path, {"metadata": {"labels": {GPU_NODES: None}}})
    daemonset.wait_gone(node.api)


@contextmanager
def _k0s_directory(node: Node) -> Iterator[None]:
    """Kubelet's root directory under the path that k0s has, too."""
    path = Path("/var/lib/k0s/kubelet")
    made = [parent for parent in (path, path.parent) if not parent.exists()]
    path.mkdir(parents=True, exist_ok=True)
    subprocess.run(("mount", "--bind", str(kubelet_dir()), str(path)), check=True)
    try:
        yield
    finally:
        subprocess.run(("umount", "--lazy", str(path)), check=True)
        for directory in made:
            directory.rmdir()


NEEDS: Final = {"example": _labelled, "k0s": _k0s_directory}


def _installed(overlay: str) -> daemonset.Installed:
    """`kubectl apply -k`. For OpenShift: this API server does not know its kind, and takes all the rest."""
    if not overlay.startswith("openshift"):
        return daemonset.install(overlay)
    with pytest.raises(
        AssertionError, match=f'no matches for kind "{SCC}" in version "security.openshift.io/v1"'
    ):
        daemonset.install(overlay)
    objects = yaml.safe_load_all(kubectl("kustomize", str(daemonset.RENDERED / overlay)))
    return daemonset.Installed(tuple(one for one in objects if one["kind"] != SCC))


# --- overlays -------------------------------------------------------------------------------------------------------


def _slices(node: Node) -> dict[str, set[str]]:
    """The devices of each DRA driver in the ResourceSlices."""
    found: dict[str, set[str]] = {}
    for spec in (item["spec"] for item in node.api.items(SLICES)):
        found.setdefault(spec["driver"], set()).update(d["name"] for d in spec.get("devices", ()))
    return found


GPU_DEVICE: Final = {"gpu.nvidia.com": {"gpu-0000-21-00-0"}}
DOMAINS: Final = "compute-domain.nvidia.com"
PUBLISHED: Final[Mapping[str, Mapping[str, set[str]]]] = {
    "dra": GPU_DEVICE,
    "openshift-dra": GPU_DEVICE,
    "compute-domains": {**GPU_DEVICE, DOMAINS: {"channel-0", "daemon-0"}},
    "compute-domains-host-managed": {**GPU_DEVICE, DOMAINS: {"channel-0"}},
}
"""By overlay, what the ResourceSlices have with one GPU."""


def _check(node: Node, overlay: str, daemon: Daemon) -> None:
    node.host.plug(SLOT)
    check_confined(daemon)
    check_token(daemon)
    node.settled({H: 1})
    check_probes(daemon)
    # Kubelet takes the slices of a driver that is gone away 30 s later, so others may be there as well.
    wanted = PUBLISHED.get(overlay, {})
    eventually(lambda: wanted.items() <= _slices(node).items(), f"the slices of {overlay}")
    if overlay in ("base", "dra"):
        check_opens_no_device(daemon, SLOT)
    assert not troubles(daemon), troubles(daemon)


@pytest.mark.parametrize("overlay", ["base", *(name for name in VALUES if name != "base")])
def test_overlay(node: Node, overlay: str, request: pytest.FixtureRequest) -> None:
    """`kubectl apply -k` over what runs: the pod becomes ready, offers a GPU, and may do what is declared. So does the
    chart with the overlay's values."""
    if "compute-domains" in overlay:
        request.getfixturevalue("nvidia")
    with ExitStack() as stack:
        if overlay in NEEDS:
            stack.enter_context(NEEDS[overlay](node))
        daemon = node.switch(lambda: _installed(overlay))
        _check(node, overlay, daemon)
        if overlay in ("base", "dra", "compute-domains"):
            chart = node.switch(lambda: daemonset.install_chart(VALUES[overlay]))
            check_confined(chart)
            check_token(chart)
            node.settled({H: 1})
            # The base in the same order of lists: nothing has changed for the API server. Else a rolling change.
            assert (chart.uid == daemon.uid) == (overlay == "base")


def test_a_kubelet_with_another_root_directory(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of k0s, by `--root-dir`: PodResources and the plugins are below it, device-plugins is not."""
    root = Path(K0S["kubeletDir"])
    node.uninstall()
    component("down.sh", "kubelet")
    arguments = f"{os.environ.get('K8S_KUBELET_ARGS', '')} --root-dir={root}"
    component("up.sh", "kubelet", environment={"K8S_KUBELET_ARGS": arguments})
    try:
        with monkeypatch.context() as moved:
            moved.setenv("K8S_KUBELET_DIR", str(root))
            assert not (root / "device-plugins").exists()
            daemon = node.switch(lambda: daemonset.install_chart({**VALUES["dra"], **K0S}))
            _check(node, "dra", daemon)
            node.uninstall()
    finally:
        component("down.sh", "kubelet")
        component("up.sh", "kubelet")


def test_chart_with_a_combination_that_no_overlay_has(node: Node) -> None:
    values = {**VALUES["dra"], **VALUES["events"]}
    _check(node, "dra", node.switch(lambda: daemonset.install_chart(values)))


OF_THE_RELEASE: Final = (
    "all,networkpolicies,resourcequotas,clusterroles,clusterrolebindings,"
    "validatingadmissionpolicies,validatingadmissionpolicybindings"
)


def _helm(*words: str) -> None:
    done = subprocess.run(
        (HELM, *words, "--namespace", NAMESPACE, "--wait", "--timeout", f"{daemonset.READY_S:.0f}s"),
        capture_output=True, text=True, timeout=2 * daemonset.READY_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_helm_installs_updates_and_uninstalls(node: Node, tmp_path: Path) -> None:
    """Helm itself: what it installs becomes ready, an update is rolled out, and nothing is left in the end. The pod
    sees this machine's own `/sys`, without a GPU."""
    node.uninstall()
    host, port = api_server_for_pods()
    addresses = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}
    values = {
        "events": {"enabled": True},
        "extraEnv": [{"name": name, "value": value} for name, value in addresses.items()],
        "resourceQuota": {"enabled": True},
    }
    file = tmp_path / "values.json"
    file.write_text(json.dumps(values))
    kubectl("create", "namespace", NAMESPACE)
    try:
        kubectl("label", "namespace", NAMESPACE, "pod-security.kubernetes.io/enforce=privileged")
        _helm("install", "mine", str(CHART), "--values", str(file))
        first = daemonset.wait_ready(node.api)
        _helm("upgrade", "mine", str(CHART), "--values", str(file), "--set", "settings.log_level=debug")
        second = daemonset.wait_ready(node.api)
        assert second.uid != first.uid
        shown = json.loads(second.run("config", "show", "-o", "json"))
        assert shown["log_level"] == {"value": "debug", "from": "environment GPUACTORS_LOG_LEVEL"}
        _helm("uninstall", "mine")
        daemonset.wait_gone(node.api)
        assert kubectl("get", OF_THE_RELEASE, "-A", "-l", daemonset.LABEL, "-o", "name") == ""
    finally:
        kubectl("delete", "namespace", NAMESPACE, "--wait=true", timeout_s=90)


# --- what the API server makes of it --------------------------------------------------------------------------------


def test_the_api_server_knows_every_field_of_every_overlay(node: Node, nvidia: None) -> None:
    """A dry run on the server, which refuses unknown fields. The chart renders the same objects (tests/deploy)."""
    if node.api.find(daemonset.DAEMONSET) is None:
        node.install()
    for overlay in VALUES:
        directory = DEPLOY / "base" if overlay == "base" else DEPLOY / "overlays" / overlay
        for one in render(directory):
            if one["kind"] == SCC:
                with pytest.raises(ApiError) as refused:
                    accepted(node.api, one)
                assert refused.value.status == 404
            else:
                accepted(node.api, one)


def test_the_api_server_knows_every_field_of_what_the_chart_adds(node: Node) -> None:
    if node.api.find(daemonset.DAEMONSET) is None:
        node.install()
    objects = template(
        {**SITE, **RENDERED_BY["overlays/events"], "serviceAccount": {"annotations": {"a": "b"}}}
    )
    assert "ResourceQuota" in {one["kind"] for one in objects}
    for one in objects:
        accepted(node.api, one)


def test_pod_security_label_of_the_namespace_is_needed(node: Node) -> None:
    """Pod Security refuses the pod under `restricted` and under `baseline`, and admits it by the label of the base."""
    node.switch(daemonset.install)
    node.host.plug(SLOT)
    node.settled({H: 1})
    namespace = f"/api/v1/namespaces/{NAMESPACE}"
    label = "pod-security.kubernetes.io/enforce"
    declared = of_kind(render(DEPLOY / "base"), "Namespace")["metadata"]["labels"][label]
    found = node.api.get(namespace)
    assert found["metadata"]["labels"][label] == declared
    spec = node.api.get(daemonset.DAEMONSET)["spec"]["template"]["spec"]
    pod: Object = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "another"}, "spec": spec}

    def create() -> Object:
        return node.api.call("POST", f"{namespace}/pods", pod, query={"dryRun": "All"})

    def refused() -> ApiError | None:
        try:
            create()
        except ApiError as error:
            return error
        return None

    assert create()["spec"]["volumes"]
    for level in ("restricted", "baseline"):
        node.api.merge(namespace, {"metadata": {"labels": {label: level}}})
        try:
            # The label reaches the admission plugin by its watch.
            error = eventually(refused, f"a refusal under {level}")
            assert error is not None
            assert error.status == 403
            assert f'violates PodSecurity "{level}:latest"' in error.message, error
            assert "hostPath" in error.message, error
        finally:
            node.api.merge(namespace, {"metadata": {"labels": {label: declared}}})


# --- a change of a setting ------------------------------------------------------------------------------------------


def test_rolling_change_of_a_setting(node: Node) -> None:
    """`kubectl set env` while a pod has a GPU: the pod keeps it, and the setting counts from then on."""
    node.switch(daemonset.install)
    first, second = node.host.plug(SLOT), node.host.plug(0x31, A100)
    node.settled({H: 1, A100_RESOURCE: 1})
    pods.start(node.api, "vm-1", {H: 1})
    node.excuse_no_plugin(
        2 * POSTED_S
    )  # two hand-overs: their gap of milliseconds is in the node's status by chance
    before = node.daemon()
    named, setting = "nvidia.com/PASSTHROUGH", "GPUACTORS_RESOURCE_NAME"
    words = ("set", "env", "-n", NAMESPACE, "daemonset/gpuactors")
    node.changed()
    kubectl(*words, f"{setting}=10de:{A100}={named}")
    try:
        daemonset.wait_rolled_out(node.api)
        node.settled({H: 1, named: 1})
        after = node.daemon()
        assert after.uid != before.uid
        assert node.devices_of("vm-1") == {first}
        pods.start(node.api, "vm-2", {named: 1})
        assert node.devices_of("vm-2") == {second}
        shown = json.loads(after.run("config", "show", "-o", "json"))["resource_name"]
        assert shown == {"value": [f"10de:{A100}={named}"], "from": f"environment {setting}"}, shown
        node.settled({H: 1, named: 1})
    finally:
        # It would outlive every `kubectl apply`, which changes only what it has applied before.
        kubectl(*words, f"{setting}-")
