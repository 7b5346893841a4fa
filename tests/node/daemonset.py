"""gpuactors on the node as its users install it: an overlay by `kubectl apply -k`, or the chart, with the image.

What differs from a user's cluster: `/sys` is the fake host's, and without a service address the pod is told where the
API server is. Nothing else is changed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from tests.deploy.chart import template
from tests.deploy.manifests import DEPLOY
from tests.node.cluster import PODS, Api, Object, api_server_for_pods, eventually, kubectl
from tests.node.fake_host import BACKING, HOST
from tests.node.lane import LANE_VARIABLE
from tests.support.patience import patient

CHECKOUT: Final = Path(__file__).resolve().parents[2]
OVERLAYS: Final = DEPLOY / "overlays"
BASE: Final = DEPLOY / "base"
CHART_NAME: Final = "chart"

RENDERED: Final = CHECKOUT / "var" / "node" / f"rendered-{os.environ.get(LANE_VARIABLE, '0')}"
"""Of the overlays that are on top of those of deploy/; git-ignored."""

NAMESPACE: Final = "gpuactors"
LABEL: Final = "app.kubernetes.io/name=gpuactors"
IMAGE: Final = "gpuactors:0.1.0"
OTHER_IMAGE: Final = "gpuactors:0.1.1"
"""The same files under another name: what an update goes to."""

READY_S: Final = patient(60.0)
DAEMONSET: Final = f"/apis/apps/v1/namespaces/{NAMESPACE}/daemonsets/gpuactors"

_HOST_PATHS: Final = {
    "/sys": HOST / "sys",
    "/sys/bus/pci": HOST / "sys/bus/pci",
    "/sys/devices": HOST / "sys/devices",
    # Of overlays/compute-domains-host-managed.
    "/usr/bin/nvidia-imex-ctl": HOST / "usr/bin/nvidia-imex-ctl",
    "/etc/nvidia-imex": HOST / "etc/nvidia-imex",
    "/run/nvidia-imex": HOST / "run/nvidia-imex",
}

_OF_DRIVER: Final = "nvidias-driver"
"""The volume of what NVIDIA's driver says in /proc."""

Environment = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Installed:
    """What was applied, to be taken away again."""

    objects: tuple[Object, ...]


@dataclass(frozen=True, slots=True)
class Daemon:
    """The pod of the DaemonSet that serves."""

    name: str
    uid: str
    address: str
    """Its IP address."""
    restarts: int
    pod: Object = field(compare=False)

    def log(self, *, previous: bool = False) -> list[dict[str, Any]]:
        """The lines of its log. Lines of other origin have the event `not-json`."""
        words = ("--previous",) if previous else ()
        text = kubectl("logs", "-n", NAMESPACE, self.name, *words, check=False)
        lines: list[dict[str, Any]] = []
        for line in text.splitlines():
            try:
                lines.append(dict(json.loads(line)))
            except (ValueError, TypeError):
                lines.append({"event": "not-json", "level": "error", "text": line})
        return lines

    def run(self, *words: str, check: bool = True) -> str:
        """`gpuactors WORDS` in the pod, as `kubectl exec` runs it."""
        return kubectl("exec", "-n", NAMESPACE, self.name, "--", "gpuactors", *words, check=check)


def install(
    overlay: str = "base", environment: Environment | None = None, image: str = IMAGE, base: Path = BASE
) -> Installed:
    """`kubectl apply -k` of base or an overlay. `environment`: settings of the daemon in addition."""
    directory = base if overlay == "base" else OVERLAYS / overlay
    mine = RENDERED / overlay
    shutil.rmtree(mine, ignore_errors=True)
    mine.mkdir(parents=True)
    objects = _rendered(directory)
    (daemonset,) = (item for item in objects if item["kind"] == "DaemonSet")
    name, _, tag = image.partition(":")
    kustomization: Object = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [os.path.relpath(directory, mine)],
        "images": [{"name": "gpuactors", "newName": name, "newTag": tag}],
        "patches": [{"path": "host.yaml"}],
    }
    (mine / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    (mine / "host.yaml").write_text(yaml.safe_dump(host_patch(daemonset, environment or {})))
    kubectl("apply", "-k", str(mine))
    return Installed(tuple(_rendered(mine)))


def install_chart(values: Mapping[str, object], environment: Environment | None = None) -> Installed:
    """The chart's objects by `kubectl apply`, with the same changes."""
    objects = template(dict(values))
    namespace: Object = {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": NAMESPACE, "labels": {"pod-security.kubernetes.io/enforce": "privileged"}},
    }
    mine = RENDERED / CHART_NAME
    shutil.rmtree(mine, ignore_errors=True)
    mine.mkdir(parents=True)
    (mine / "chart.yaml").write_text(yaml.safe_dump_all([namespace, *objects]))
    (daemonset,) = (item for item in objects if item["kind"] == "DaemonSet")
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": ["chart.yaml"],
        "patches": [{"path": "host.yaml"}],
    }
    (mine / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    (mine / "host.yaml").write_text(yaml.safe_dump(host_patch(daemonset, environment or {})))
    kubectl("apply", "-k", str(mine))
    return Installed(tuple(_rendered(mine)))


def uninstall(installed: Installed) -> None:
    """Deletes what was applied, and waits until all of it is gone, the pods first."""
    text = yaml.safe_dump_all(installed.objects)
    kubectl(
        "delete",
        "-f",
        "-",
        "--ignore-not-found",
        "--wait=true",
        f"--timeout={READY_S:.0f}s",
        text=text,
        timeout_s=90,
    )


def prune(before: Installed, now: Installed) -> None:
    """Deletes the objects that only the former installation has."""
    kept = {_key(one) for one in now.objects}
    if gone := [one for one in before.objects if _key(one) not in kept]:
        kubectl("delete", "-f", "-", "--ignore-not-found", "--wait=false", text=yaml.safe_dump_all(gone))


def _key(one: Object) -> tuple[str, str, str]:
    return one["kind"], one["metadata"]["name"], one["metadata"].get("namespace", "")


def wait_rolled_out(api: Api, within_s: float = READY_S) -> None:
    """Waits until the pods of the DaemonSet are those of its newest template, as `kubectl rollout status` sees it."""

    def look() -> bool:
        found = api.get(DAEMONSET)
        status = found["status"]
        wanted = status["desiredNumberScheduled"]
        assert status.get("observedGeneration") == found["metadata"]["generation"], status
        assert status.get("updatedNumberScheduled", 0) == status.get("numberAvailable", 0) == wanted, status
        return True

    eventually(look, "the end of the rolling change", within_s)


def _rendered(directory: Path) -> list[Object]:
    return [item for item in yaml.safe_load_all(kubectl("kustomize", str(directory))) if item]


def host_patch(daemonset: Object, environment: Environment) -> Object:
    """The strategic merge patch of what differs on this node."""
    pod = daemonset["spec"]["template"]["spec"]
    host, port = api_server_for_pods()
    variables = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port, **environment}
    volumes = [
        {"name": volume["name"], "hostPath": {"path": str(_HOST_PATHS[volume["hostPath"]["path"]])}}
        for volume in pod["volumes"]
        if volume.get("hostPath", {}).get("path") in _HOST_PATHS
    ]
    container: Object = {
        "name": pod["containers"][0]["name"],
        "env": [{"name": name, "value": value} for name, value in variables.items()],
    }
    if not any(volume.get("hostPath", {}).get("path") == "/proc" for volume in pod["volumes"]):
        # A real pod's own /proc has the directory of NVIDIA's driver; the fake one is a mount that only the node's has.
        volumes.append({"name": _OF_DRIVER, "hostPath": {"path": str(BACKING / "proc/driver/nvidia")}})
        container["volumeMounts"] = [
            {"name": _OF_DRIVER, "mountPath": "/host/proc/driver/nvidia", "readOnly": True}
        ]
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": daemonset["metadata"]["name"], "namespace": NAMESPACE},
        "spec": {"template": {"spec": {"containers": [container], "volumes": volumes}}},
    }


# --- its pods -------------------------------------------------------------------------------------------------------


def pods_of(api: Api, node: str | None = None) -> list[Object]:
    """The DaemonSet's pods that are not being deleted; those of one node, if it is named."""
    query = {"labelSelector": LABEL} | ({} if node is None else {"fieldSelector": f"spec.nodeName={node}"})
    pods = api.items(f"/api/v1/namespaces/{NAMESPACE}/pods", **query)
    return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]


def is_ready(pod: Object) -> bool:
    """Kubelet's readiness probe of the pod succeeds."""
    conditions: Sequence[Object] = pod.get("status", {}).get("conditions", ())
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def wait_ready(api: Api, within_s: float = READY_S, node: str | None = None) -> Daemon:
    """Waits until the one pod of the DaemonSet is Ready; of several nodes, that of the one that is named."""

    def ready() -> Daemon | None:
        pods = pods_of(api, node)
        assert len(pods) == 1, f"{len(pods)} pods of the DaemonSet"
        assert is_ready(pods[0]), why_not_ready(pods[0])
        return daemon_of(pods[0])

    found = eventually(ready, "a ready pod of the DaemonSet", within_s)
    assert found is not None
    return found


def daemon_of(pod: Object) -> Daemon:
    """A pod of the DaemonSet."""
    status = pod["status"]
    restarts = sum(c["restartCount"] for c in status.get("containerStatuses", ()))
    return Daemon(pod["metadata"]["name"], pod["metadata"]["uid"], status.get("podIP", ""), restarts, pod)


def why_not_ready(pod: Object) -> str:
    """What kubelet says of its container."""
    statuses = pod.get("status", {}).get("containerStatuses", ())
    return f"{pod['metadata']['name']}: {[status.get('state') for status in statuses]}"


def wait_gone(api: Api, within_s: float = READY_S) -> None:
    """Waits until no pod of the DaemonSet is left, those being deleted included."""
    eventually(lambda: not api.items(PODS, labelSelector=LABEL), "the end of the DaemonSet's pods", within_s)


def logged(api: Api, event: str, within_s: float = READY_S, **fields: object) -> dict[str, Any]:
    """Waits for a line of the ready pod's log."""

    def look() -> dict[str, Any] | None:
        for pod in pods_of(api):
            for line in daemon_of(pod).log():
                if line.get("event") == event and all(line.get(k) == v for k, v in fields.items()):
                    return line
        return None

    found = eventually(look, f"the log event {event} {fields}", within_s, poll_s=0.5)
    assert found is not None
    return found


def now() -> float:
    """A clock for times between two steps."""
    return time.monotonic()


def images() -> str:
    """The images that the node has."""
    return subprocess.run(("ctr", "images", "ls", "-q"), capture_output=True, text=True, check=True).stdout
