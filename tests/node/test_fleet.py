"""One configuration for a fleet on a real API server: a daemon takes the entries of `nodes` that its Node's labels
match, and `gpuactors config check` says the same of the same Node."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from tests.node import daemonset, pods
from tests.node.books import pod_resources
from tests.node.claims import kill
from tests.node.cluster import NODES, Object, eventually, kubectl
from tests.node.daemonset import NAMESPACE, Daemon
from tests.node.fake_host import H100_RESOURCE
from tests.node.node import Node
from tests.support.patience import patient

H: Final = H100_RESOURCE
LARGE: Final = "example.com/gpu-large"
SMALL: Final = "nvidia.com/gpu-small"
MEDIUM: Final = "nvidia.com/gpu-medium"

KIND: Final = "example.com/kind"
FILE: Final = "/etc/gpuactors/gpuactors.yaml"
LABELS_FILE: Final = "/var/lib/gpuactors/node-labels.json"

NO_SUCH_RIGHT: Final = 78
"""Exit code of a daemon whose configuration is wrong (sysexits.h, EX_CONFIG)."""


def named(resource: str) -> Object:
    """The settings that give the H100s this name."""
    return {"resource": [f"{resource}=vendor=10de,device=2330"]}


VALUES: Final[Mapping[str, Any]] = {
    "settings": {"select": ["vendor=10de,class=03"]},
    "nodes": [
        {"match": {"names": ["another-*"]}, "settings": named(LARGE)},
        {"match": {"labels": {KIND: "small"}}, "settings": named(SMALL)},
        {"match": {"labels": {KIND: "medium"}}, "settings": {**named(MEDIUM), "log_level": "debug"}},
    ],
}


@contextmanager
def labelled(node: Node, kind: str) -> Iterator[None]:
    """The Node has this label, whatever is done to it."""
    set_kind(node, kind)
    try:
        yield
    finally:
        node.api.merge(f"{NODES}/{node.name}", {"metadata": {"labels": {KIND: None}}})


def set_kind(node: Node, kind: str) -> None:
    node.api.merge(f"{NODES}/{node.name}", {"metadata": {"labels": {KIND: kind}}})


def shown(daemon: Daemon) -> dict[str, Object]:
    """The daemon's settings, each with where it is from."""
    found: dict[str, Object] = json.loads(daemon.run("config", "show", "-o", "json"))
    return found


def checked(file: Path, *words: str, text: str = "") -> str:
    """What `gpuactors config check` says of a file on the administrator's machine."""
    command = (sys.executable, "-m", "gpuactors", "config", "check", "--config", str(file), *words)
    done = subprocess.run(
        command, input=text, capture_output=True, text=True, timeout=patient(60), check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def renewed(node: Node) -> None:
    """Another pod of the DaemonSet."""
    node.excuse_no_plugin()
    before = node.daemon()
    node.api.delete(f"/api/v1/namespaces/{NAMESPACE}/pods/{before.name}", 1)
    eventually(lambda: node.daemon().uid != before.uid, "another pod")


def test_a_daemon_takes_the_entries_that_the_labels_of_its_node_match(node: Node, tmp_path: Path) -> None:
    with labelled(node, "small"):
        daemon = node.install_chart(VALUES)
        node.host.plug(0x21)
        node.settled({SMALL: 1})
        pods.start(node.api, "vm-1", {SMALL: 1})
        node.check_open("vm-1")
        pods.stop(node.api, "vm-1")
        resource = shown(daemon)["resource"]
        assert resource["value"] == named(SMALL)["resource"]
        assert resource["from"] == f"file {FILE}, entry 2 (labels {KIND}=small)"
        assert f"{KIND}=small" in shown(daemon)["node_labels"]["value"]
        check_agrees(node, daemon, tmp_path / "gpuactors.yaml")
        # A label that changes counts at the next start.
        set_kind(node, "medium")
        node.settled({SMALL: 1}, {SMALL: 1})
        renewed(node)
        node.settled({MEDIUM: 1})
        after = shown(node.daemon())
        assert after["log_level"] == {
            "value": "debug",
            "from": f"file {FILE}, entry 3 (labels {KIND}=medium)",
        }
    renewed(node)
    node.settled({H: 1})
    assert shown(node.daemon())["resource"] == {"value": [], "from": "default"}


def check_agrees(node: Node, daemon: Daemon, file: Path) -> None:
    """The check of the same file, with the Node as the API server has it, gives what the daemon has."""
    (config,) = node.api.items(f"/api/v1/namespaces/{NAMESPACE}/configmaps", labelSelector=daemonset.LABEL)
    file.write_text(config["data"]["gpuactors.yaml"])
    counted = checked(file, "--nodes", "-", text=kubectl("get", "nodes", "-o", "json"))
    assert [line.split() for line in counted.splitlines() if node.name in line] == [["2", "1", node.name]]
    assert "entry 1 (names another-*) matches no node of the list" in counted, counted
    labels = node.node_object()["metadata"]["labels"]
    words = ",".join(f"{name}={value}" for name, value in sorted(labels.items()))
    one = json.loads(checked(file, "--node", node.name, "--labels", words, "-o", "json"))
    mine = shown(daemon)
    for setting in ("resource", "select", "log_level"):
        assert one[setting]["value"] == mine[setting]["value"], setting
    assert one["resource"]["from"] == f"file {file}, entry 2 (labels {KIND}=small)"


def test_while_the_api_server_is_away_the_labels_that_were_read_last_count(node: Node) -> None:
    """Kubelet starts the daemon's container again, and nobody can be asked for the labels."""
    with labelled(node, "small"):
        daemon = node.install_chart(VALUES)
        node.host.plug(0x21)
        node.settled({SMALL: 1})
        node.excuse_no_plugin()
        with node.without("api"):
            kill(daemon)
            eventually(lambda: SMALL not in _healthy(), "kubelet without a plugin")
            eventually(lambda: SMALL in _healthy(), "the resource of the entry")
        node.settled({SMALL: 1})
        # Kubelet posts the pod's status late, as it could not while the server was away.
        eventually(
            lambda: node.daemon().restarts == daemon.restarts + 1, "a container that was started again"
        )
        after = node.daemon()
        assert after.uid == daemon.uid
        found = shown(after)["node_labels"]
        assert found["from"] == f"file {LABELS_FILE}", found
        assert f"{KIND}=small" in found["value"], found


def _healthy() -> set[str]:
    """The resources of which kubelet may give a device."""
    return {devices.resource_name for devices in pod_resources("GetAllocatableResources").devices}


def test_without_the_right_to_read_its_node_a_daemon_does_not_start(node: Node) -> None:
    """It would have the settings of another kind of node. Its last words are in the pod's status."""
    with labelled(node, "small"):
        before = node.install_chart(VALUES)
        binding = kubectl("get", "clusterrolebindings", "-l", daemonset.LABEL, "-o", "name").split()
        node.changed()
        kubectl("delete", *binding)
        node.api.delete(f"/api/v1/namespaces/{NAMESPACE}/pods/{before.name}", 1)

        def last_words() -> str:
            for pod in daemonset.pods_of(node.api):
                for status in pod["status"].get("containerStatuses", ()):
                    for state in (status["state"], status.get("lastState", {})):
                        if (ended := state.get("terminated")) is not None and pod["metadata"][
                            "uid"
                        ] != before.uid:
                            assert ended["exitCode"] == NO_SUCH_RIGHT, ended
                            return str(ended["message"])
            return ""

        said = eventually(last_words, "the end of the next daemon")
        assert "entries of nodes match by labels of the Node, which cannot be read" in said, said
        assert "Let the pod get its Node (component fleet)" in said, said
        node.uninstall()


def test_the_overlay_of_a_fleet(node: Node) -> None:
    """The ConfigMap of deploy/overlays/fleet, whose entry is for nodes with a label."""
    label = "example.com/gpuactors-log"
    path = f"{NODES}/{node.name}"
    node.api.merge(path, {"metadata": {"labels": {label: "debug"}}})
    try:
        daemon = node.install("fleet")
        node.host.plug(0x21)
        node.settled({H: 1})
        assert shown(daemon)["log_level"] == {
            "value": "debug",
            "from": f"file {FILE}, entry 1 (labels {label}=debug)",
        }
    finally:
        node.api.merge(path, {"metadata": {"labels": {label: None}}})
    renewed(node)
    node.settled({H: 1})
    assert shown(node.daemon())["log_level"]["from"] != f"file {FILE}, entry 1 (labels {label}=debug)"
