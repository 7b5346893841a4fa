"""deploy/kubectl: the view of a cluster, by a kubectl that answers from a file (`tests/node/test_operators.py`: by the
real one)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from tests.deploy.manifests import DEPLOY

PLUGIN: Final = DEPLOY / "kubectl" / "kubectl-gpuactors"

KUBECTL: Final = """\
#!/usr/bin/env python3
import json, sys
answers = json.load(open(ANSWERS))
words = sys.argv[1:]
if words[0] == "get":
    items = answers["objects"].get(" ".join(words[1:-2]), [])
    print(json.dumps({"items": items}))
    sys.exit(0)
pod, command = words[3], " ".join(words[6:])
out, err, code = answers["pods"].get(pod, {}).get(command, ["", f"pod {pod} not found", 1])
print(out, end="")
print(err, file=sys.stderr)
sys.exit(code)
"""

LABEL: Final = "-A -l app.kubernetes.io/name=gpuactors"


def daemonset(selector: Mapping[str, str]) -> dict[str, Any]:
    return {
        "metadata": {"name": "gpuactors", "namespace": "gpus"},
        "spec": {"template": {"spec": {"nodeSelector": {**selector}}}},
    }


def node(name: str, **labels: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "labels": labels}}


def pod(on: str, *, waiting: str = "", phase: str = "Running") -> dict[str, Any]:
    state = {"waiting": {"reason": waiting, "message": "Back-off\npulling"}} if waiting else {"running": {}}
    ready = "False" if waiting else "True"
    return {
        "metadata": {"name": f"pod-{on}", "namespace": "gpus"},
        "spec": {"nodeName": on},
        "status": {
            "phase": phase,
            "containerStatuses": [{"state": state}],
            "conditions": [{"type": "Ready", "status": ready}],
        },
    }


def view(*devices: dict[str, Any], free: int = 1, ledger_problem: str | None = None) -> str:
    resource = {
        "name": "nvidia.com/h100", "listed": 2, "healthy": 1, "allocated": 0, "free": free, "registered": True,
        "problem": None,
    }  # fmt: skip
    claims = {"claims": [{"name": "default/c"}]}
    return json.dumps(
        {
            "resources": [resource], "devices": devices, "claims": claims, "compute_domains": None,
            "ledger_problem": ledger_problem, "config_problem": None,
        }
    )  # fmt: skip


HELD: Final = {"address": "0000:21:00.0", "needs_hand": True, "reason": "process 4711 (qemu) has it open"}
FINE: Final = {"address": "0000:22:00.0", "needs_hand": False, "reason": "free"}


class Cluster:
    """Five nodes: one is well, one needs a hand, one cannot pull the image, one has no pod, one is not chosen."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "answers.json"
        kubectl = directory / "bin" / "kubectl"
        kubectl.parent.mkdir()
        kubectl.write_text(KUBECTL.replace("ANSWERS", repr(str(self._path))))
        kubectl.chmod(0o755)
        self._bin = kubectl.parent
        chosen = {"gpus": "yes"}
        names = ("a-well", "b-held", "c-image", "d-none")
        self.objects: dict[str, list[Any]] = {
            f"daemonsets {LABEL}": [daemonset(chosen)],
            f"pods {LABEL}": [pod("a-well"), pod("b-held"), pod("c-image", waiting="ImagePullBackOff")],
            "nodes": [*(node(name, **chosen) for name in names), node("e-other")],
        }
        self.pods: dict[str, dict[str, tuple[str, str, int]]] = {
            "pod-a-well": {"inspect -o json": (view(FINE), "", 0)},
            "pod-b-held": {"inspect -o json": (view(HELD, FINE, free=-1), "", 0)},
        }

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        self._path.write_text(json.dumps({"objects": self.objects, "pods": self.pods}))
        return subprocess.run(
            (sys.executable, str(PLUGIN), *words),
            env={"PATH": f"{self._bin}:/usr/bin:/bin"},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30, check=False,
        )  # fmt: skip


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def test_the_nodes_that_need_a_hand_come_first(cluster: Cluster) -> None:
    done = cluster.run("inspect")
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["NODE", "GPUS", "HEALTHY", "ALLOCATED", "FREE", "CLAIMS", "NEEDS", "A", "HAND"],
        ["b-held", "2", "1", "0", "-1", "1", "nvidia.com/h100:", "free", "is", "-1", "(and", "1", "more)"],
        ["c-image", *"-----", "ImagePullBackOff:", "Back-off", "pulling"],
        ["d-none", *"-----", "no", "pod", "of", "gpuactors", "is", "on", "it"],
        ["a-well", "2", "1", "0", "1", "1"],
    ]
    assert (done.returncode, done.stderr) == (1, "")
    assert cluster.run("inspect", "a-well").returncode == 0


def test_what_hides_more_is_told_first(cluster: Cluster) -> None:
    cluster.pods["pod-b-held"]["inspect -o json"] = (view(HELD, ledger_problem="no answer"), "", 0)
    assert "no answer (and 1 more)" in cluster.run("inspect", "b-held").stdout


@pytest.mark.parametrize("said", ["{}", "[]", view({"address": "0000:21:00.0", "reason": "free"})])
def test_an_answer_of_another_version_is_told_and_the_others_are_shown(cluster: Cluster, said: str) -> None:
    cluster.pods["pod-b-held"]["inspect -o json"] = (said, "", 0)
    rows = cluster.run("inspect", "a-well", "b-held").stdout.splitlines()
    assert "of another version" in rows[1]
    assert rows[2].split() == ["a-well", "2", "1", "0", "1", "1"]


@pytest.mark.parametrize("command", ["inspect", "doctor"])
def test_what_is_no_json_ends_nothing_else(cluster: Cluster, command: str) -> None:
    cluster.pods["pod-a-well"]["doctor -o json"] = (json.dumps({"findings": []}), "", 0)
    cluster.pods["pod-b-held"][f"{command} -o json"] = ("Traceback", "", 0)
    done = cluster.run(command, "a-well", "b-held")
    assert "its answer is no JSON" in done.stdout
    assert (done.returncode, done.stderr) == (1, "")


def test_as_json_each_node_has_its_answer_or_its_problem(cluster: Cluster) -> None:
    done = cluster.run("inspect", "-o", "json")
    found = {one["node"]: one for one in json.loads(done.stdout)}
    assert [*found] == ["a-well", "b-held", "c-image", "d-none"]
    assert found["b-held"]["answer"]["devices"][0] == HELD
    assert (found["d-none"]["answer"], found["d-none"]["problem"]) == (None, "no pod of gpuactors is on it")
    assert done.returncode == 1


def finding(level: str, check: str) -> dict[str, Any]:
    return {"level": level, "check": check, "message": f"about {check}", "remedy": f"mend {check}"}


def test_a_finding_of_several_nodes_is_told_once(cluster: Cluster) -> None:
    both, own = finding("FAIL", "IommuOn"), finding("WARN", "VfioPci")
    findings = {"a-well": [both, finding("PASS", "Socket")], "b-held": [both, own]}
    for name, of in findings.items():
        cluster.pods[f"pod-{name}"]["doctor -o json"] = (
            json.dumps({"findings": of}),
            "command terminated with exit code 1",
            1,
        )
    done = cluster.run("doctor", "a-well", "b-held")
    assert done.stdout == (
        "FAIL  IommuOn: about IommuOn\n      on a-well, b-held\n      mend IommuOn\n\n"
        "WARN  VfioPci: about VfioPci\n      on b-held\n      mend VfioPci\n\n"
        "2 nodes: 2 with a FAIL\n"
    )
    assert done.returncode == 1


def test_only_the_node_of_a_virtual_machine_is_asked_about_it(cluster: Cluster) -> None:
    launcher = pod("b-held")
    launcher["metadata"] = {"name": "virt-launcher-vm-1-x", "labels": {"vm.kubevirt.io/name": "vm-1"}}
    cluster.objects["pods -n team"] = [launcher]
    cluster.pods["pod-b-held"]["explain team/vm-1"] = ("0000:21:00.0  GH100\n", "", 0)
    cluster.pods["pod-a-well"]["explain team/vm-1"] = ("not asked\n", "", 0)
    done = cluster.run("explain", "team/vm-1")
    assert (done.returncode, done.stdout) == (0, "Node b-held\n0000:21:00.0  GH100\n\n")


def test_of_a_name_that_nobody_knows_each_node_says_why(cluster: Cluster) -> None:
    for name in ("a-well", "b-held"):
        noise = 'E1129 19:41:49.978087   28361 memcache.go:265] "noise"'
        said = f"{noise}\nthere is no GPU\ncommand terminated with exit code 64"
        cluster.pods[f"pod-{name}"]["explain 99:00.0"] = ("", said, 64)
    done = cluster.run("explain", "99:00.0")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[:2] == ["a-well: there is no GPU", "b-held: there is no GPU"]


def test_a_cluster_without_it_and_an_unknown_node_are_told(cluster: Cluster) -> None:
    unknown = cluster.run("inspect", "x")
    assert unknown.returncode == 69
    assert "gpuactors is on no node x; it is on a-well, b-held, c-image, d-none" in unknown.stderr
    cluster.objects.clear()
    assert "no DaemonSet in this cluster has the label" in cluster.run("inspect").stderr


def test_it_needs_no_newer_python_than_it_says_and_nothing_but_the_standard_library() -> None:
    text = PLUGIN.read_text()
    assert "needs kubectl and Python 3.9" in text
    compile(text, str(PLUGIN), "exec")
    imported = {line.split()[1] for line in text.splitlines() if line.startswith(("import ", "from "))}
    assert {name.partition(".")[0] for name in imported} <= sys.stdlib_module_names
