"""The manifests of deploy/, as kubectl renders them: unprivileged, the mounts that are needed, flags that the
CLI takes."""

from __future__ import annotations

import copy
import json
from pathlib import PurePosixPath

import pytest

from gpuactors import limits
from gpuactors.actors.hand_over import CONTROL_RETRY_S
from tests.deploy.manifests import DEPLOY, Manifest, of_kind, render
from tests.process.daemon import gpuactors


@pytest.fixture(scope="module")
def base() -> list[Manifest]:
    return render(DEPLOY / "base")


@pytest.fixture(scope="module")
def daemon_set(base: list[Manifest]) -> Manifest:
    return of_kind(base, "DaemonSet")


@pytest.fixture(scope="module")
def pod(daemon_set: Manifest) -> Manifest:
    spec: Manifest = daemon_set["spec"]["template"]["spec"]
    return spec


@pytest.fixture(scope="module")
def container(pod: Manifest) -> Manifest:
    assert "initContainers" not in pod
    (only,) = pod["containers"]
    assert isinstance(only, dict)
    return only


@pytest.fixture(scope="module")
def configuration(container: Manifest) -> dict[str, dict[str, object]]:
    """What the real command line makes of the container's arguments, with nothing else to go by."""
    command, *flags = container["args"]
    assert command == "run"
    done = gpuactors("config", "show", "-o", "json", *flags)
    assert done.returncode == 0, done.stderr
    shown: dict[str, dict[str, object]] = json.loads(done.stdout)
    return shown


def test_the_base_is_these_objects_in_one_namespace(base: list[Manifest]) -> None:
    assert sorted(manifest["kind"] for manifest in base) == [
        "DaemonSet",
        "Namespace",
        "NetworkPolicy",
        "ServiceAccount",
    ]
    for manifest in base:
        if manifest["kind"] != "Namespace":
            assert manifest["metadata"]["namespace"] == of_kind(base, "Namespace")["metadata"]["name"]


def test_the_pod_hears_the_kernels_uevents(pod: Manifest) -> None:
    """A user namespace is deaf to them."""
    assert pod.get("hostUsers", True) is True


def test_the_pod_has_an_account_of_its_own(base: list[Manifest], pod: Manifest) -> None:
    assert pod["serviceAccountName"] == of_kind(base, "ServiceAccount")["metadata"]["name"]


def test_only_what_is_needed_is_mounted_and_only_the_sockets_can_be_written(
    pod: Manifest, container: Manifest
) -> None:
    volumes = {volume["name"]: volume["hostPath"] for volume in pod["volumes"]}
    mounts = {
        mount["mountPath"]: (volumes[mount["name"]]["path"], mount.get("readOnly", False))
        for mount in container["volumeMounts"]
    }
    assert mounts == {
        "/var/lib/kubelet/device-plugins": ("/var/lib/kubelet/device-plugins", False),
        "/var/lib/kubelet/pod-resources": ("/var/lib/kubelet/pod-resources", True),
        "/var/lib/gpuactors": ("/var/lib/gpuactors", False),
        "/host/sys": ("/sys", True),
        "/host/dev": ("/dev", True),
        "/host/var/run/cdi": ("/var/run/cdi", True),
    }
    assert len(volumes) == len(mounts)
    # A hostPath that may be missing would otherwise be made, empty, where kubelet or the kernel should have
    # made it. The state directory is ours to make.
    made = {volume["path"] for volume in volumes.values() if volume["type"] == "DirectoryOrCreate"}
    assert made == {"/var/lib/gpuactors", "/var/run/cdi"}
    assert {volume["type"] for volume in volumes.values()} == {"Directory", "DirectoryOrCreate"}
    for mount in container["volumeMounts"]:
        if mount.get("readOnly"):
            # Without it /dev/shm and whatever else is mounted below stays writable; it excludes mount
            # propagation.
            assert mount["recursiveReadOnly"] == "IfPossible"
            assert "mountPropagation" not in mount


def test_the_flags_are_what_the_command_line_takes_and_agree_with_the_mounts(
    container: Manifest, configuration: dict[str, dict[str, object]]
) -> None:
    mounted = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    host_root = PurePosixPath(str(configuration["host_root"]["value"]))
    kubelet_dir = PurePosixPath(str(configuration["kubelet_dir"]["value"]))
    assert mounted[str(host_root / "sys")] == "sys"
    assert mounted[str(host_root / "dev")] == "dev"
    assert mounted[configuration["device_plugin_dir"]["value"]] == "device-plugins"
    assert mounted[str(kubelet_dir / "pod-resources")] == "pod-resources"
    assert mounted[str(configuration["state_dir"]["value"])] == "state"
    assert configuration["holders"]["value"] == "passive"
    assert configuration["uevents"]["value"] == "kernel"
    assert configuration["log_format"]["value"] == "json"


def test_a_daemon_per_node_that_stays_where_virtual_machines_are(
    daemon_set: Manifest, pod: Manifest, container: Manifest
) -> None:
    assert daemon_set["spec"]["updateStrategy"] == {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxSurge": "10%", "maxUnavailable": 0},
    }
    # The old pod stays until the new one is ready, which the probe tells.
    assert "minReadySeconds" not in daemon_set["spec"]
    template = daemon_set["spec"]["template"]["metadata"]["labels"]
    assert daemon_set["spec"]["selector"]["matchLabels"].items() <= template.items()
    assert pod["priorityClassName"] == "system-node-critical"
    assert pod["tolerations"] == [{"operator": "Exists"}]
    assert container["resources"]["requests"].keys() == {"cpu", "memory"}
    assert "memory" in container["resources"]["limits"]


def test_the_reason_of_an_end_is_shown_by_describe(container: Manifest) -> None:
    assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"


def test_the_pod_knows_the_nodes_name(container: Manifest) -> None:
    assert container["env"] == [
        {"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
    ]


def test_the_k0s_overlay_names_kubelets_root_in_all_its_places_and_leaves_device_plugins(
    base: list[Manifest],
) -> None:
    """Kubelet's directory of device plugins is a constant (pkg/kubelet/cm/devicemanager, NewManagerImpl)."""
    overlaid = json.dumps(render(DEPLOY / "overlays" / "k0s"), sort_keys=True)
    plain = json.dumps(base, sort_keys=True)
    assert plain.count("/var/lib/kubelet") == 5, "the flag, two volumes, two mounts"
    moved = plain.replace("/var/lib/kubelet", "/var/lib/k0s/kubelet")
    assert overlaid == moved.replace("/var/lib/k0s/kubelet/device-plugins", "/var/lib/kubelet/device-plugins")


def test_the_readme_says_which_versions_take_recursive_read_only(container: Manifest) -> None:
    assert any("recursiveReadOnly" in mount for mount in container["volumeMounts"])
    told = (DEPLOY / "README.md").read_text()
    _, _, versions = told.partition("## Kubernetes versions")
    assert all(
        word in versions for word in ("recursiveReadOnly", "1.33", "1.31", "1.30", "1.29", "--validate=warn")
    )


def test_the_example_overlay_changes_the_image_and_the_nodes_and_nothing_else(base: list[Manifest]) -> None:
    overlaid = render(DEPLOY / "overlays" / "example")
    plain = copy.deepcopy(base)
    changed = of_kind(overlaid, "DaemonSet")["spec"]["template"]["spec"]
    original = of_kind(plain, "DaemonSet")["spec"]["template"]["spec"]
    assert changed["containers"][0].pop("image") == "registry.example/gpu/gpuactors:0.1.0"
    assert original["containers"][0].pop("image") == "gpuactors:0.1.0"
    assert changed.pop("nodeSelector") == {
        "kubernetes.io/os": "linux",
        "gpuactors.io/enabled": "true",
    }
    original.pop("nodeSelector")
    assert overlaid == plain


def test_the_holders_overlay_adds_the_hosts_processes_and_what_reading_them_needs(
    base: list[Manifest],
) -> None:
    overlaid = render(DEPLOY / "overlays" / "holders-proc")
    changed = of_kind(overlaid, "DaemonSet")["spec"]["template"]["spec"]
    (container,) = changed["containers"]
    original = copy.deepcopy(base)
    plain = of_kind(original, "DaemonSet")["spec"]["template"]["spec"]
    assert (changed.pop("hostPID"), plain.pop("hostPID")) == (True, False)
    assert {"name": "GPUACTORS_HOLDERS", "value": "proc"} in container["env"]
    container["env"].remove({"name": "GPUACTORS_HOLDERS", "value": "proc"})
    assert container["securityContext"]["seLinuxOptions"].pop("type") == "spc_t"
    assert plain["containers"][0]["securityContext"]["seLinuxOptions"].pop("type")
    # Listing /proc/PID/fd of another user, and reading its links.
    capabilities = container["securityContext"]["capabilities"]
    assert sorted(capabilities.pop("add")) == ["DAC_READ_SEARCH", "SYS_PTRACE"]
    mount = next(m for m in container["volumeMounts"] if m["mountPath"] == "/host/proc")
    volume = next(v for v in changed["volumes"] if v["name"] == mount["name"])
    assert (mount["readOnly"], volume["hostPath"]) == (True, {"path": "/proc", "type": "Directory"})
    container["volumeMounts"].remove(mount)
    changed["volumes"].remove(volume)
    assert overlaid == original


def test_the_probes_ask_what_the_daemon_serves(container: Manifest) -> None:
    """The address in the arguments is one that kubelet reaches; the paths are routes of the endpoints."""
    (port,) = (port for port in container["ports"] if port["name"] == "http")
    arguments = [word for word in container["args"] if word.startswith("--http-address=")]
    assert arguments == [f"--http-address=:{port['containerPort']}"]
    readiness, liveness = container["readinessProbe"], container["livenessProbe"]
    assert [probe["httpGet"] for probe in (readiness, liveness)] == [
        {"path": "/readyz", "port": "http"},
        {"path": "/livez", "port": "http"},
    ]
    for probe in (readiness, liveness):
        assert probe["timeoutSeconds"] > limits.DIAL_OWN_S
    until_restart_s = liveness["periodSeconds"] * liveness["failureThreshold"]
    assert until_restart_s > limits.SERVE_BACKOFF_S[-1] + CONTROL_RETRY_S
