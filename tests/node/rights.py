"""What the daemon's container and its account may do, as the kernel and the API server have it."""

from __future__ import annotations

import http.client
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from tests.deploy.chart import CHART
from tests.node.cluster import Api, Object, eventually, kubectl
from tests.node.daemonset import NAMESPACE, Daemon
from tests.node.fake_host import BACKING, HOST
from tests.support.patience import patient

ACCOUNT: Final = f"system:serviceaccount:{NAMESPACE}:gpuactors"

NVIDIA_NAMESPACE: Final = "dra-driver-nvidia-gpu"
"""The namespace of NVIDIA's DRA driver."""

DOMAIN_LABEL: Final = "resource.nvidia.com/computeDomain"

IDLE: Final = "trap 'exit 0' TERM; while :; do sleep 1 & wait $!; done"
"""A program that opens nothing."""

CLAIMS_OF: Final = "/apis/resource.k8s.io/v1/namespaces/{}/resourceclaims"

CAPABILITIES: Final = {"DAC_READ_SEARCH": 2, "SYS_MODULE": 16, "SYS_CHROOT": 18, "SYS_PTRACE": 19}
"""include/uapi/linux/capability.h"""

TOKEN: Final = "/run/secrets/kubernetes.io/serviceaccount/token"
"""The image has /var/run as a link to /run."""
HTTP_S: Final = patient(5.0)

_OF: Final[Mapping[str, str]] = {
    "Namespace": "/api/v1/namespaces",
    "ServiceAccount": "/api/v1/namespaces/{}/serviceaccounts",
    "ResourceQuota": "/api/v1/namespaces/{}/resourcequotas",
    "DaemonSet": "/apis/apps/v1/namespaces/{}/daemonsets",
    "NetworkPolicy": "/apis/networking.k8s.io/v1/namespaces/{}/networkpolicies",
    "ClusterRole": "/apis/rbac.authorization.k8s.io/v1/clusterroles",
    "ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
    "Role": "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/roles",
    "RoleBinding": "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/rolebindings",
    "ValidatingAdmissionPolicy": "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies",
    "ValidatingAdmissionPolicyBinding": "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings",
    "SecurityContextConstraints": "/apis/security.openshift.io/v1/securitycontextconstraints",
}
"""The path of each kind's list, by namespace."""


# --- the container --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Process:
    """The first process of the daemon's container, as /proc of the host shows it."""

    pid: int
    status: Mapping[str, str]
    mounts: Mapping[str, frozenset[str]]
    """The options of the last mount at each path."""

    def capabilities(self, kind: str) -> int:
        """One of its sets as a mask: `CapEff`, `CapPrm`, `CapBnd`, …"""
        return int(self.status[kind], 16)

    def namespace(self, kind: str) -> str:
        """`pid:[4026531836]`"""
        return os.readlink(f"/proc/{self.pid}/ns/{kind}")

    def has(self, path: str) -> bool:
        """There is such a file in its root."""
        return Path(f"/proc/{self.pid}/root{path}").exists()


def process_of(daemon: Daemon) -> Process:
    """Reads it. Raises AssertionError if containerd has no such process."""
    (status,) = daemon.pod["status"]["containerStatuses"]
    name = status["containerID"].removeprefix("containerd://")
    done = subprocess.run(
        ("ctr", "tasks", "ls"), capture_output=True, text=True, timeout=patient(30), check=True
    )
    pids = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith(name)]
    assert len(pids) == 1, done.stdout
    proc = Path(f"/proc/{pids[0]}")
    lines = (line.partition(":") for line in (proc / "status").read_text().splitlines())
    mounts = (line.split() for line in (proc / "mountinfo").read_text().splitlines())
    return Process(
        pids[0],
        {name: value.strip() for name, _, value in lines},
        {mount[4]: frozenset(mount[5].split(",")) for mount in mounts},
    )


def check_confined(daemon: Daemon) -> None:
    """The container runs with the declared security context, and that is what the documents say."""
    pod = daemon.pod["spec"]
    (container,) = pod["containers"]
    context, process = container["securityContext"], process_of(daemon)
    for ids in ("Uid", "Gid"):
        assert process.status[ids].split() == ["0"] * 4, (ids, process.status[ids])
    assert context["capabilities"]["drop"] == ["ALL"]
    added = context["capabilities"].get("add", [])
    assert set(added) <= CAPABILITIES.keys(), added
    mask = sum(1 << CAPABILITIES[name] for name in added)
    for kind in ("CapEff", "CapPrm", "CapBnd"):
        assert process.capabilities(kind) == mask, (kind, process.status[kind], added)
    assert process.capabilities("CapAmb") == 0
    assert process.status["NoNewPrivs"] == "1"
    assert process.status["Seccomp"] == "2", process.status["Seccomp"]
    assert "ro" in process.mounts["/"], process.mounts["/"]
    _check_namespaces(process, pod)
    for mount in container["volumeMounts"]:
        # /var/run is a link in the image; below /host it is a directory of its own.
        options = process.mounts[re.sub(r"\A/var/run/", "/run/", mount["mountPath"])]
        assert ("ro" if mount.get("readOnly") else "rw") in options, (mount, options)


def _check_namespaces(process: Process, pod: Object) -> None:
    shared = {kind for kind in ("pid", "net", "ipc", "mnt", "uts") if process.namespace(kind) == _mine(kind)}
    declared = {("pid", "hostPID"), ("net", "hostNetwork"), ("ipc", "hostIPC")}
    assert shared == {kind for kind, key in declared if pod.get(key)}, shared


def _mine(kind: str) -> str:
    return os.readlink(f"/proc/self/ns/{kind}")


def check_opens_no_device(daemon: Daemon, group: int) -> None:
    """The device cgroup refuses to open the node of a GPU's group, which the container sees."""
    program = f"import os; os.open('/host/dev/vfio/{group}', os.O_RDWR)"
    words = ("exec", "-n", NAMESPACE, daemon.name, "--", "python3", "-c", program)
    said = kubectl(*words, check=False)
    assert f"Operation not permitted: '/host/dev/vfio/{group}'" in said, said


def check_token(daemon: Daemon) -> None:
    """The container has a service account token exactly where the pod's template asks for one."""
    pod = daemon.pod["spec"]
    declared = pod.get("automountServiceAccountToken", False)
    volumes = [v for v in pod["volumes"] if "projected" in v]
    assert len(volumes) == (1 if declared else 0), volumes
    assert process_of(daemon).has(TOKEN) == declared


def get(daemon: Daemon, path: str, port: int = 9400) -> tuple[int, str]:
    """GET from the pod's address. Raises OSError without an answer."""
    connection = http.client.HTTPConnection(daemon.address, port, timeout=HTTP_S)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def check_probes(daemon: Daemon) -> None:
    """Both declared probes are those of the documents, and answer at the declared port of the pod's address."""
    (container,) = daemon.pod["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    declared = [container[probe]["httpGet"] for probe in ("readinessProbe", "livenessProbe")]
    assert [probe["path"] for probe in declared] == ["/readyz", "/livez"], declared

    def answers() -> bool:
        return all(get(daemon, probe["path"], ports[probe["port"]])[0] == 200 for probe in declared)

    # Not at once: a resource that has just appeared is not registered yet, for some milliseconds.
    eventually(answers, "an answer to the probes", 5)


def troubles(daemon: Daemon) -> list[dict[str, Any]]:
    """The lines of its log that are errors, or say that something is missing."""
    missing = re.compile(r"\.(un\w+|failed)$")
    return [line for line in daemon.log() if line["level"] == "error" or missing.search(line["event"])]


# --- the API server -------------------------------------------------------------------------------------------------


def accepted(api: Api, one: Object) -> Object:
    """What the API server would make of an object, were its name new; an unknown field is an error. Raises ApiError."""
    metadata = one["metadata"]
    other = {**one, "metadata": {**metadata, "name": f"{metadata['name']}-dry-run"}}
    path = _OF[one["kind"]].format(metadata.get("namespace", ""))
    return api.call("POST", path, other, query={"dryRun": "All", "fieldValidation": "Strict"})


def events_of(api: Api, reason: str, about: str, words: str = "") -> list[Object]:
    """The Events with this reason about an object of this name whose message has these words."""
    selector = f"reason={reason},involvedObject.name={about}"
    found = api.items("/api/v1/events", fieldSelector=selector)
    return [event for event in found if words in event["message"]]


# --- the host and the cluster as compute domains need them ------------------------------------------------------------


@contextmanager
def imex_host() -> Iterator[None]:
    """NVIDIA's driver has IMEX channels, and the operator's own IMEX daemon says that it is ready."""
    devices = BACKING / "proc/devices"
    before = devices.read_text()
    assert before.startswith("Character devices:\n"), before
    # Written in place: the file is mounted over /proc/devices.
    devices.write_text(before.replace("\n", "\n504 nvidia-caps\n505 nvidia-caps-imex-channels\n", 1))
    tool, config = HOST / "usr/bin/nvidia-imex-ctl", HOST / "etc/nvidia-imex"
    for directory in (tool.parent, config):
        directory.mkdir(parents=True, exist_ok=True)
    tool.write_text("#!/bin/sh\necho READY\n")
    tool.chmod(0o755)
    (config / "config.cfg").write_text("IMEX_CMD_ENABLED=1\n")
    try:
        yield
    finally:
        devices.write_text(before)


@contextmanager
def nvidias_definitions(api: Api) -> Iterator[None]:
    """The namespace and the CustomResourceDefinitions that NVIDIA's DRA driver brings."""
    namespace: Object = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NVIDIA_NAMESPACE}}
    objects = [namespace]
    objects += [yaml.safe_load(file.read_text()) for file in sorted((CHART / "definitions").glob("*.yaml"))]
    text = yaml.safe_dump_all(objects)
    kubectl("apply", "-f", "-", text=text)
    path = "/apis/resource.nvidia.com/v1beta1/computedomains"
    eventually(lambda: api.find(path), "NVIDIA's definitions")
    try:
        yield
    finally:
        kubectl("delete", "-f", "-", "--ignore-not-found", "--wait=true", text=text)


# --- what a scenario does with them -----------------------------------------------------------------------------------


@contextmanager
def open_group(group: int) -> Iterator[int]:
    """A process of the host has a group open, and is no pod's. Its PID."""
    # Not in this process: its descriptors are read by the sampler.
    opening = f"exec 3<>/dev/vfio/{group}; echo open; read -r end"
    process = subprocess.Popen(
        ("sh", "-c", opening), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        yield process.pid
    finally:
        process.communicate("\n", timeout=patient(30))
