"""What operators see of the daemon on a real node: events, metrics, probes, doctor, inspect, node features, the log."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import socket
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gpuactors.kube.config import SERVICE_ACCOUNT
from tests.deploy.manifests import DEPLOY, ROOT
from tests.node import daemonset, pods
from tests.node.cluster import DEVICE_PLUGINS, Api, Object, eventually, kubectl, kubelet_dir
from tests.node.daemonset import NAMESPACE, Daemon
from tests.node.fake_host import A100, A100_RESOURCE, H100_RESOURCE, HOST
from tests.node.node import Node
from tests.node.rights import CLAIMS_OF, IDLE, events_of, get, open_group
from tests.node.test_device_plugin_restarts import readiness
from tests.observe.documented_events import EVENTS
from tests.support.patience import patient

H: Final = H100_RESOURCE
VALUES: Final[Mapping[str, Any]] = {
    "dra": {"enabled": True},
    "events": {"enabled": True},
    "nodeFeatures": {"enabled": True},
}
FEATURES: Final = Path("/etc/kubernetes/node-feature-discovery/features.d")
LABEL: Final = "gpuactors.feature.node.kubernetes.io/"


@pytest.fixture(scope="module", autouse=True)
def installed(whole_node: Node) -> None:
    """The chart with claims, events and node features."""
    kubectl("apply", "-f", str(DEPLOY / "examples/dra/device-class.yaml"))
    whole_node.switch(lambda: daemonset.install_chart(VALUES))


# --- events ---------------------------------------------------------------------------------------------------------


def _allocated_claim(api: Api, node: str, pod: str, device: str) -> None:
    """A pod whose claim the scheduler has given a device just before that became unusable: played here, so that no
    withdrawal of the device comes first."""
    entry = {"name": "it", "resourceClaimName": pod}
    body = pods.tenant(pod, claims=[entry], command=IDLE)
    body["spec"]["schedulingGates"] = [{"name": "tests.node/allocation"}]
    uid = pods.create(api, body)["metadata"]["uid"]
    request = {"name": "it", "exactly": {"deviceClassName": "vfio.gpu.nvidia.com"}}
    claim = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": pod}}
    api.create(CLAIMS_OF.format(pods.NAMESPACE), {**claim, "spec": {"devices": {"requests": [request]}}})
    result = {"request": "it", "driver": "gpu.nvidia.com", "pool": node, "device": device}
    status = {
        "allocation": {"devices": {"results": [result]}},
        "reservedFor": [{"resource": "pods", "name": pod, "uid": uid}],
    }
    api.merge(f"{CLAIMS_OF.format(pods.NAMESPACE)}/{pod}/status", {"status": status})
    api.merge(f"{pods.PATH}/{pod}", {"spec": {"schedulingGates": []}})


def test_events_as_kubectl_shows_them(node: Node) -> None:
    """A GPU that a process of the host has is told on the Node; a claim that waits for one, on its pod."""
    first, second = node.host.plug(0x21), node.host.plug(0x22)
    node.settled({H: 2})
    with open_group(0x22), open_group(0x21) as pid:
        _allocated_claim(node.api, node.name, "waits", "gpu-0000-22-00-0")
        (told,) = eventually(
            lambda: events_of(node.api, "HeldByOther", node.name, f"process {pid} "), "the event on the Node"
        )
        (waiting,) = eventually(lambda: _from_us(node.api, "waits"), "the event on the pod")
        shown = kubectl("describe", "node", node.name)
        listed = kubectl("get", "events", "-A", "--field-selector", "source=gpuactors")
        of_the_pod = kubectl("describe", "pod", "-n", pods.NAMESPACE, "waits")
    assert first in told["message"]
    assert second in waiting["message"]
    for event in (told, waiting):
        assert (event["type"], event["source"]["host"]) == ("Warning", node.name)
    for words, event in ((shown, told), (of_the_pod, waiting), (listed, told), (listed, waiting)):
        line = next((line for line in words.splitlines() if event["message"] in line), "")
        assert "Warning" in line, words
        assert event["reason"] in line, words
    pods.wait_running(node.api, "waits")
    pods.stop(node.api, "waits")
    node.settled({H: 2})


def _from_us(api: Api, about: str) -> list[Object]:
    selector = f"source=gpuactors,involvedObject.name={about}"
    return api.items(f"/api/v1/namespaces/{pods.NAMESPACE}/events", fieldSelector=selector)


# --- metrics and probes ---------------------------------------------------------------------------------------------


def _metrics(daemon: Daemon) -> dict[str, dict[frozenset[tuple[str, str]], float]]:
    """The page as Prometheus would read it from the pod's address: name → labels → value."""
    status, page = get(daemon, "/metrics")
    assert status == 200, page
    found: dict[str, dict[frozenset[tuple[str, str]], float]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            found.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
    return found


def _sum(series: Mapping[frozenset[tuple[str, str]], float], **labels: str) -> float:
    return sum(value for key, value in series.items() if labels.items() <= dict(key).items())


def test_metrics_agree_with_the_books(node: Node) -> None:
    given, held, other = node.host.plug(0x21), node.host.plug(0x22), node.host.plug(0x31, A100)
    node.settled({H: 2, A100_RESOURCE: 1})
    pods.start(node.api, "vm-1", {A100_RESOURCE: 1})
    with open_group(0x22):
        look = node.settled({H: 1, A100_RESOURCE: 1})

        def agrees() -> bool:
            found = _metrics(node.daemon())
            devices = found["gpuactors_devices"]
            for resource in (H, A100_RESOURCE):
                healthy = _sum(devices, resource=resource, health="Healthy")
                assert healthy == look.allocatable[resource], devices
                allocated = _sum(found["gpuactors_devices_allocated"], resource=resource)
                assert allocated == look.requests.get(resource, 0), resource
                assert _sum(found["gpuactors_resource_registered"], resource=resource) == 1
            assert _sum(devices, resource=H, health="Unhealthy", cause="HeldByOther") == 1
            owner = {"gpu": other, "pod_name": "vm-1", "pod_namespace": pods.NAMESPACE}
            assert _sum(found["gpuactors_device_owner_info"], **owner) == 1, found[
                "gpuactors_device_owner_info"
            ]
            assert sum(found["gpuactors_device_owner_info"].values()) == 1
            assert _sum(found["gpuactors_functions"]) == len((given, held, other))
            for name in ("ready", "serving", "kubelet_found", "ledger_readable", "uevents_received"):
                assert _sum(found[f"gpuactors_{name}"]) == 1, name
            return True

        eventually(agrees, "metrics that agree with the books")
    node.settled({H: 2, A100_RESOURCE: 1})


def test_pages_by_the_proxy_of_the_api_server(node: Node) -> None:
    node.host.plug(0x21)
    node.settled({H: 1})
    path = f"/api/v1/namespaces/{NAMESPACE}/pods/{node.daemon().name}:9400/proxy"
    assert kubectl("get", "--raw", f"{path}/readyz") == "ready\n"
    assert "gpuactors_build_info" in kubectl("get", "--raw", f"{path}/metrics")
    assert "on loopback" in kubectl("get", "--raw", f"{path}/debug/state", check=False)


# --- doctor, inspect, explain -----------------------------------------------------------------------------------------


IN_ORDER: Final = ("KubeletRuns", "DaemonRuns", "KubeletList", "DaemonSees", "ApiServer", "ClaimsServed")
"""The checks of `doctor` that a healthy node with claims passes, whatever its hardware."""


def _findings(text: str) -> list[Object]:
    """Of `doctor -o json`; kubectl says an exit code after it."""
    found, _ = json.JSONDecoder().raw_decode(text)
    return list(found["findings"])


def _failed(text: str) -> list[Object]:
    return [one for one in _findings(text) if one["level"] == "FAIL"]


def test_doctor_on_the_node_and_in_the_pod(node: Node, tmp_path: Path) -> None:
    """Neither finds a reason to fail, but that the machine itself may not remap interrupts. On the node `--pre` is run
    from the checkout, with the fake host as its root."""
    node.host.plug(0x21)
    node.settled({H: 1})
    for name, target in (("sys", HOST / "sys"), ("dev", "/dev"), ("proc", "/proc")):
        (tmp_path / name).symlink_to(target)
    words = (
        "doctor",
        "--pre",
        "-o",
        "json",
        "--host-root",
        str(tmp_path),
        "--kubelet-dir",
        str(kubelet_dir()),
    )
    environment = {"PATH": os.environ["PATH"], "NODE_NAME": node.name}
    done = subprocess.run(
        (sys.executable, "-m", "gpuactors", *words), capture_output=True, text=True, timeout=patient(60), check=False,
        env=environment,
    )  # fmt: skip
    machine = [] if " IR-" in Path("/proc/interrupts").read_text() else ["InterruptRemapping"]
    failed = [one["check"] for one in _failed(done.stdout)]
    assert (done.returncode, failed) == (len(machine), machine), done.stdout + done.stderr
    inside = node.daemon().run("doctor", "-o", "json", check=False)
    assert [one["check"] for one in _failed(inside)] == machine, inside
    levels = {one["check"]: one["level"] for one in _findings(inside)}
    assert {check: levels.get(check) for check in IN_ORDER} == dict.fromkeys(IN_ORDER, "PASS"), inside


def test_doctor_before_anything_is_installed(node: Node) -> None:
    """From the debug pod of docs/install.md. Its /host is the root of the node, whose /sys has no GPU here."""
    before = set(debug_pods())
    kubectl("debug", f"node/{node.name}", f"--image={daemonset.IMAGE}", "--profile=sysadmin", "--quiet", "--",
            "gpuactors", "doctor", "--pre", "-o", "json", "--host-root=/host",
            f"--kubelet-dir=/host{kubelet_dir()}", f"--device-plugin-dir=/host{DEVICE_PLUGINS}")  # fmt: skip
    (pod,) = set(debug_pods()) - before
    try:
        eventually(lambda: phase_of(pod) in ("Succeeded", "Failed"), "the end of the debug pod")
        found = json.loads(kubectl("logs", pod))
        levels = {one["check"]: one["level"] for one in found["findings"]}
        assert levels["GpusSelected"] == "FAIL", found
        assert levels["KubeletDirectory"] == levels["KubeletRuns"] == levels["PodResources"] == "PASS", found
        assert "DaemonRuns" not in levels
    finally:
        kubectl("delete", pod, "--wait=false")


def debug_pods() -> list[str]:
    """The names of the pods that `kubectl debug node/…` has made."""
    return [name for name in kubectl("get", "pods", "-o", "name").split() if "/node-debugger-" in name]


def phase_of(pod: str) -> str:
    return kubectl("get", pod, "-o", "jsonpath={.status.phase}")


def test_inspect_and_explain_in_the_pod(node: Node) -> None:
    free, given = node.host.plug(0x21), node.host.plug(0x31, A100)
    node.settled({H: 1, A100_RESOURCE: 1})
    pods.start(node.api, "vm-1", {A100_RESOURCE: 1})
    daemon = node.daemon()
    eventually(lambda: "vm-1" in daemon.run("explain", given), "the owner in explain")
    shown = daemon.run("inspect")
    assert free in shown
    assert given in shown
    assert "free" in daemon.run("explain", "21:00.0")
    node.settled({H: 1, A100_RESOURCE: 1})


def test_the_archive_for_a_report(node: Node, tmp_path: Path) -> None:
    """The command of docs/troubleshoot.md. The image has no tar. The token is that of the pod, which the doctor has
    used."""
    gpu = node.host.plug(0x21)
    node.settled({H: 1})
    inside = ("kubectl", "exec", "-n", NAMESPACE, node.daemon().name, "--")
    token = f"print(open({str(SERVICE_ACCOUNT / 'token')!r}).read())"
    secret = subprocess.run((*inside, "python3", "-c", token), capture_output=True, check=True).stdout.strip()
    done = subprocess.run(
        (*inside, "gpuactors", "bundle"), capture_output=True, check=False, timeout=patient(60)
    )
    assert done.returncode == 0, done.stderr.decode()
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(done.stdout))) as tar:
        tar.extractall(tmp_path, filter="data")
    (directory,) = tmp_path.iterdir()
    assert directory.name == f"gpuactors-{node.name}"
    files = {path.relative_to(directory).as_posix(): path for path in directory.rglob("*") if path.is_file()}
    assert [name for name in files if name.endswith(".error")] == [], done.stderr.decode()
    assert all(name in done.stderr.decode() for name in files)
    assert gpu in files["inspect.txt"].read_text()
    findings = {one["check"]: one["level"] for one in _findings(files["doctor.json"].read_text())}
    assert findings["ApiServer"] == "PASS"
    assert len(secret) > 100
    assert [name for name, path in files.items() if secret in path.read_bytes()] == []
    words = (sys.executable, "-m", "gpuactors", "replay", str(directory))
    replayed = subprocess.run(words, capture_output=True, text=True, timeout=patient(60), check=False)
    assert gpu in replayed.stdout, replayed.stderr


def test_the_view_of_the_cluster(node: Node) -> None:
    """kubectl finds the plugin on PATH by its name."""
    well, held = node.host.plug(0x21), node.host.plug(0x22)
    node.settled({H: 2})
    pods.start(node.api, "vm-1", {H: 1})
    with open_group(0x22 if node.devices_of("vm-1") == {well} else 0x21) as pid:
        words = f"process {pid} "

        def look() -> str:
            found = _of_cluster("inspect")
            return found if words in found else ""

        shown = eventually(look, "the holder")
        row = shown.splitlines()[1].split()
        assert row[:5] == [node.name, "2", "1", "1", "0"]
        assert words in _of_cluster("doctor")
        told = _of_cluster("explain", f"{pods.NAMESPACE}/vm-1")
        assert told.startswith(f"Node {node.name}\n")
        assert ({well, held} & node.devices_of("vm-1")).pop() in told
        (one,) = json.loads(_of_cluster("inspect", node.name, "-o", "json"))
        assert [device["needs_hand"] for device in one["answer"]["devices"]].count(True) == 1
        node.said(f"kubectl gpuactors inspect:\n{shown}")
    node.settled({H: 2})


def _of_cluster(*words: str) -> str:
    """What `kubectl gpuactors` prints: doctor ends with 1 where it finds something."""
    path = f"{DEPLOY / 'kubectl'}:{os.environ['PATH']}"
    done = subprocess.run(
        ("kubectl", "gpuactors", *words), env={**os.environ, "PATH": path}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=patient(60), check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


# --- node features ----------------------------------------------------------------------------------------------------


def _labels() -> dict[str, str]:
    lines = (FEATURES / "gpuactors").read_text().splitlines()
    pairs = (line.removeprefix(LABEL).partition("=") for line in lines if not line.startswith("#"))
    return {name: value for name, _, value in pairs}


def test_feature_file_of_nfd(node: Node) -> None:
    model, other = H.partition("/")[2], A100_RESOURCE.partition("/")[2]
    node.host.plug(0x21)
    late = node.host.plug(0x22, driver=None)
    wanted = {model: "2", "driver.vfio-pci": "1", "driver.none": "1", "iommu": "true"}
    eventually(lambda: _labels() == wanted, "the labels of two GPUs")
    node.host.bind(late)
    node.host.plug(0x31, A100)
    wanted = {model: "2", other: "1", "driver.vfio-pci": "3", "iommu": "true"}
    eventually(lambda: _labels() == wanted, "the labels of three GPUs")
    file = FEATURES / "gpuactors"
    assert file.stat().st_mode & 0o777 == 0o644
    (until,) = re.findall(r"^# \+expiry-time=(\S+)$", file.read_text(), re.MULTILINE)
    left_s = (datetime.fromisoformat(until) - datetime.now(UTC)).total_seconds()
    assert 1800 < left_s <= 3600, until
    assert all(line.startswith((LABEL, "# ")) for line in file.read_text().splitlines())
    assert [path.name for path in FEATURES.iterdir()] == ["gpuactors"]
    node.settled({H: 2, A100_RESOURCE: 1})


# --- the log ----------------------------------------------------------------------------------------------------------


def test_log_of_a_calm_life(node: Node) -> None:
    """Each line is JSON, has the documented fields and a documented event, and none is an error."""
    gpu = node.host.plug(0x21)
    node.settled({H: 1})
    pods.start(node.api, "vm-1", {H: 1})
    pods.stop(node.api, "vm-1")
    node.host.unplug(gpu)
    node.settled({})
    lines = node.daemon().log()
    assert {line["event"] for line in lines} <= {*EVENTS}
    assert {"resource.appeared", "device.changed", "plugin.registered"} <= {line["event"] for line in lines}
    for line in lines:
        assert line["node"] == node.name, line
        assert datetime.fromisoformat(line["timestamp"]).tzinfo is not None, line
        assert line["level"] in ("info", "warning"), line


# --- kubelet is away, and clients that are slow -----------------------------------------------------------------------


def test_readiness_around_a_restart_of_kubelet(node: Node) -> None:
    """While kubelet is away the page says so; afterwards it is ready again, and so is the pod with the same container.

    The pod's Ready condition stays True all the time: kubelet makes it False after three failed probes, 15 s, and
    cannot probe while it is away."""
    node.host.plug(0x21)
    node.settled({H: 1})
    daemon = node.daemon()
    with node.without("kubelet"):
        missing = f"- {H}: cannot reach kubelet"
        eventually(lambda: missing in _unready(daemon), "a page that says what is missing", 10)
        assert get(daemon, "/livez")[0] == 200
        assert _metrics(daemon)["gpuactors_ready"][frozenset()] == 0
    eventually(lambda: get(daemon, "/readyz")[0] == 200, "readiness")
    node.settled({H: 1})
    after = node.daemon()
    assert (after.uid, after.restarts) == (daemon.uid, daemon.restarts)


def _unready(daemon: Daemon) -> str:
    """What a page says that is not ready; else nothing."""
    status, text = get(daemon, "/readyz")
    return text if status == 503 else ""


def test_probes_answer_beside_slow_clients(node: Node) -> None:
    daemon = node.daemon()
    with ExitStack() as stack:
        for _ in range(64):
            client = stack.enter_context(socket.create_connection((daemon.address, 9400), timeout=patient(5)))
            client.sendall(b"GET /metrics HTTP/1.1\r\nHost: a\r\n")
        for path in ("/readyz", "/livez"):
            assert get(daemon, path)[0] == 200, path
        turned_away = _metrics(daemon)["gpuactors_http_connections_turned_away_total"][frozenset()]
        assert turned_away >= 32
        eventually(lambda: node.sampler.looks > 0, "a look of the sampler beside them")


def test_clients_whose_body_has_no_end(node: Node) -> None:
    """30 of them: the probes answer, a pod starts, and the daemon's own pod stays ready."""
    gpu = node.host.plug(0x21)
    node.settled({H: 1})
    before = node.daemon()
    with bodies_without_end(before, 30), readiness() as lapses:
        pods.start(node.api, "vm-1", {H: 1})
        for path in ("/readyz", "/livez") * 10:
            assert get(before, path)[0] == 200, path
        node.settled({H: 1})
        assert node.devices_of("vm-1") == {gpu}
        node.check_open("vm-1")
        pods.stop(node.api, "vm-1")
        node.settled({H: 1})
    assert not lapses, lapses
    after = node.daemon()
    assert (after.uid, after.restarts) == (before.uid, before.restarts)


@contextmanager
def bodies_without_end(daemon: Daemon, clients: int) -> Iterator[None]:
    """So many clients of the daemon's HTTP endpoints send a request whose body never ends, while the context is open.
    One whose connection is closed comes back at once. They are a process of their own."""
    words = ("-m", "tests.support.body_flood", f"{daemon.address}:9400", str(clients))
    with subprocess.Popen((sys.executable, *words), stdout=subprocess.PIPE, cwd=ROOT) as sending:
        try:
            assert sending.stdout is not None
            assert sending.stdout.readline() == b"all send\n"
            yield
            assert sending.poll() is None, "the clients have ended too early"
        finally:
            sending.kill()
