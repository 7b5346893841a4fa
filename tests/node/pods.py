"""Pods that ask for GPUs, as a virtual machine's would: each opens what it was given, and has it open until it ends."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final

from tests.node.cluster import Api, Object, eventually, kubectl, node_name

IMAGE: Final = "registry.local/busybox:1"
NAMESPACE: Final = "default"
PATH: Final = f"/api/v1/namespaces/{NAMESPACE}/pods"
LABEL: Final = "tests.node/tenant"
OF_GAP: Final = ("no healthy devices present", "has been stopped")
"""What kubelet says of a pod that it admits in the milliseconds between two daemons."""

HOSTNAME: Final = "kubernetes.io/hostname"
"""The label of a Node by which a pod asks the scheduler for it."""

TENANT: Final = """\
n=3
for node in /dev/vfio/*; do
  case $node in */vfio|'/dev/vfio/*') continue;; esac
  eval "exec $n<>$node" || exit 1
  n=$((n + 1))
done
echo "has $(ls /dev/vfio 2>/dev/null | tr '\\n' ' ')"
trap 'sleep {dies_after_s}; exit 0' TERM
while :; do sleep 1 & wait $!; done
"""
"""The tenant's program; what it has open is a character device for each IOMMU group (`real_tenants.py`)."""


def tenant(
    name: str,
    resources: Mapping[str, int] | None = None,
    *,
    claims: Sequence[Object] = (),
    dies_after_s: float = 0,
    grace_s: int = 1,
    restart: str = "Never",
    labels: Mapping[str, str] | None = None,
    command: str | None = None,
    node: str | None = None,
) -> Object:
    """A pod, of any node unless one is named. `resources`: how many of each extended resource. `claims`: entries of
    `spec.resourceClaims`, all of which its container uses. `dies_after_s`: it has its devices open for so long after
    SIGTERM."""
    amounts = {resource: str(count) for resource, count in (resources or {}).items()}
    program = command or TENANT.replace("{dies_after_s}", str(dies_after_s))
    container: Object = {
        "name": "compute", "image": IMAGE, "imagePullPolicy": "Never", "command": ["sh", "-c", program],
        "resources": {"limits": amounts, "claims": [{"name": claim["name"]} for claim in claims]},
    }  # fmt: skip
    spec: dict[str, Any] = {
        "restartPolicy": restart, "terminationGracePeriodSeconds": grace_s, "automountServiceAccountToken": False,
        "containers": [container],
    }  # fmt: skip
    if claims:
        spec["resourceClaims"] = list(claims)
    if node is not None:
        spec["nodeSelector"] = {HOSTNAME: node}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {LABEL: "yes", **(labels or {})}},
        "spec": spec,
    }


def create(api: Api, pod: Object) -> Object:
    """Creates a pod."""
    return api.create(PATH, pod)


def start(api: Api, name: str, resources: Mapping[str, int] | None = None, **options: Any) -> Object:
    """Creates a pod and waits until it runs."""
    create(api, tenant(name, resources, **options))
    return wait_running(api, name)


def get(api: Api, name: str) -> Object | None:
    """A pod, or None if there is none."""
    return api.find(f"{PATH}/{name}")


def phase(pod: Object | None) -> str:
    """`Pending`, `Running`, `Succeeded`, `Failed`, or `gone`."""
    return "gone" if pod is None else str(pod.get("status", {}).get("phase", ""))


def wait_running(api: Api, name: str, within_s: float | None = None) -> Object:
    """Waits until a pod runs, and its container has opened its devices."""

    def look() -> Object | None:
        pod = get(api, name)
        assert pod is not None, f"there is no pod {name}"
        assert phase(pod) == "Running", told(pod)
        return pod

    return _wait(look, f"pod {name} to run", within_s)


def wait_phase(api: Api, name: str, wanted: str, within_s: float | None = None) -> Object:
    """Waits until a pod is in a phase; `gone` returns an empty object."""

    def look() -> Object | None:
        pod = get(api, name)
        assert phase(pod) == wanted, told(pod)
        return pod or {"gone": True}

    return _wait(look, f"pod {name} to be {wanted}", within_s)


def _wait(look: Any, what: str, within_s: float | None) -> Object:
    found: Object = eventually(look, what) if within_s is None else eventually(look, what, within_s)
    return found


def delete(api: Api, name: str, *, grace_s: int | None = None) -> None:
    """Deletes a pod, and does not wait."""
    api.delete(f"{PATH}/{name}", grace_s)


def stop(api: Api, name: str, *, grace_s: int | None = None, within_s: float | None = None) -> None:
    """Deletes a pod, and waits until it is gone."""
    delete(api, name, grace_s=grace_s)
    wait_phase(api, name, "gone", within_s)


def stream(
    api: Api, prefix: str, resource: str, over: threading.Event, ran: list[str], failed: list[str], *,
    node: str | None = None, begins_s: float | None = None,
) -> None:  # fmt: skip
    """Pods with a device, one after the other, until it is `over`: those that ran, and what kubelet said of those that
    failed. `begins_s`: until a pod runs or has failed."""

    def begun() -> Object | None:
        pod = get(api, name)
        return pod if phase(pod) in ("Running", "Failed") else None

    number = 0
    while not over.is_set():
        number += 1
        name = f"{prefix}-{number}"
        create(api, tenant(name, {resource: 1}, node=node))
        pod = _wait(begun, f"pod {name} to run or to fail", begins_s)
        if phase(pod) == "Failed":
            failed.append(told(pod))
        else:
            ran.append(name)
        stop(api, name)


def all_tenants(api: Api) -> list[Object]:
    """The pods that these tests have made."""
    return api.items(PATH, labelSelector=LABEL)


def clear(api: Api) -> None:
    """Deletes all of them, and waits until they are gone."""
    for pod in all_tenants(api):
        api.delete(f"{PATH}/{pod['metadata']['name']}", 1)
    eventually(lambda: not all_tenants(api), "the end of all tenants")


def nodes_in(name: str) -> frozenset[str]:
    """The names in /dev/vfio of a pod's container."""
    return frozenset(_in(name, "sh", "-c", "ls /dev/vfio 2>/dev/null || true").split())


def variables_in(name: str) -> dict[str, str]:
    """The variables of a pod's container from which KubeVirt learns its devices."""
    pairs = (line.partition("=") for line in _in(name, "env").splitlines())
    return {key: value for key, _, value in pairs if key.startswith(("PCI_RESOURCE_", "MDEV_PCI_RESOURCE_"))}


def _in(name: str, *command: str) -> str:
    return kubectl("exec", "-n", NAMESPACE, name, "--", *command)


def told(pod: Object | None) -> str:
    """What the pod's status says of it."""
    if pod is None:
        return "there is no such pod"
    status = pod.get("status", {})
    states = [container.get("state") for container in status.get("containerStatuses", ())]
    conditions = [c.get("message", "") for c in status.get("conditions", ()) if c.get("status") == "False"]
    said = (status.get("phase"), status.get("reason", ""), status.get("message", ""), states, conditions)
    return f"{pod['metadata']['name']}: {said}"


def is_scheduled(pod: Object | None) -> bool:
    """The scheduler has chosen this node."""
    return pod is not None and pod["spec"].get("nodeName") == node_name()
