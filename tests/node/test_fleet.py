"""One configuration for a fleet on a real API server: a daemon takes the entries of `nodes` that its Node's labels
match, and `gpuactors config check` says the same of the same Node. With `reload` a daemon that runs follows its
ConfigMap, where it can."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, final

from tests.node import daemonset, pods
from tests.node.books import pod_resources
from tests.node.claims import kill
from tests.node.cluster import NODES, Object, eventually, kubectl, kubelet_dir
from tests.node.daemonset import NAMESPACE, Daemon
from tests.node.fake_host import H100, H100_RESOURCE, L40S, L40S_RESOURCE
from tests.node.node import Node
from tests.node.rights import get
from tests.support.patience import patient

H: Final = H100_RESOURCE
L: Final = L40S_RESOURCE
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


# --- a ConfigMap that changes under a daemon that runs ---------------------------------------------------------------

CONFIG_MAP: Final = f"/api/v1/namespaces/{NAMESPACE}/configmaps/gpuactors-config"
ALL: Final = ["vendor=10de,class=03"]


@final
class Running:
    """A daemon with `reload`, from the chart."""

    def __init__(self, node: Node, values: Mapping[str, Any]) -> None:
        self._node = node
        self.daemon = node.install_chart(_reloading(values))
        self._container = _container(self.daemon)

    def upgrade(self, values: Mapping[str, Any]) -> None:
        """The administrator changes the values, as `helm upgrade` does it."""
        self._node.switch(lambda: daemonset.install_chart(_reloading(values)))
        self._wait_mounted()

    def edit(self, text: str) -> None:
        """The administrator changes the file by `kubectl edit`."""
        self._node.changed()
        self._node.api.merge(CONFIG_MAP, {"data": {"gpuactors.yaml": text}})
        self._wait_mounted()

    def _wait_mounted(self) -> None:
        """Waits until kubelet has brought the file to the node. A change of the pod has it look at once, and not within
        a minute and a half (syncFrequency)."""
        wanted = self._node.api.get(CONFIG_MAP)["data"]["gpuactors.yaml"]
        volumes = kubelet_dir() / "pods" / self.daemon.uid / "volumes/kubernetes.io~configmap"
        pod = f"/api/v1/namespaces/{NAMESPACE}/pods/{self.daemon.name}"

        def is_there() -> bool:
            (file,) = volumes.glob("*/gpuactors.yaml")
            if file.read_text() == wanted:
                return True
            self._node.api.merge(pod, {"metadata": {"annotations": {"nudged": str(daemonset.now())}}})
            return False

        eventually(is_there, "the changed file on the node", poll_s=1.0)

    def logged(self, event: str) -> list[dict[str, Any]]:
        """The lines with this event."""
        return [line for line in self.daemon.log() if line.get("event") == event]

    def wait_logged(self, event: str, count: int = 1) -> dict[str, Any]:
        """The last of so many lines with this event."""
        eventually(lambda: len(self.logged(event)) >= count, f"{count} lines of {event}", poll_s=0.5)
        lines = self.logged(event)
        assert len(lines) == count, lines
        return lines[-1]

    def is_in_use(self) -> bool:
        """What the metric says of the file."""
        _, page = get(self.daemon, "/metrics")
        (value,) = (
            line.split()[1] for line in page.splitlines() if line.startswith("gpuactors_config_file_in_use ")
        )
        return float(value) == 1

    def check_same(self) -> None:
        """Nothing was started again."""
        after = self._node.daemon()
        assert (after, _container(after)) == (self.daemon, self._container)


def explained(daemon: Daemon, gpu: str) -> str:
    """What `gpuactors explain` says in the pod, in one line."""
    return " ".join(daemon.run("explain", gpu).split())


def _reloading(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**values, "settings": {**values["settings"], "reload": "on"}}


def _without_rights() -> Object:
    """Takes the daemon's rights in the cluster: the list of the bindings, as they can be created again."""
    found: Object = json.loads(kubectl("get", "clusterrolebindings", "-l", daemonset.LABEL, "-o", "json"))
    kubectl("delete", "-f", "-", text=json.dumps(found))
    for one in found["items"]:
        one["metadata"] = {key: one["metadata"][key] for key in ("name", "labels")}
    return found


def _container(daemon: Daemon) -> str:
    """The container that runs."""
    (status,) = daemon.pod["status"]["containerStatuses"]
    return str(status["containerID"])


def test_a_changed_selector_is_used_without_a_restart_and_pods_keep_their_gpus(node: Node) -> None:
    h100, l40s = f"vendor=10de,device={H100}", f"vendor=10de,device={L40S}"
    running = Running(node, {"settings": {"select": [h100]}})
    both = {node.host.plug(0x21), node.host.plug(0x22)}
    node.host.plug(0x23, L40S)
    node.settled({H: 2}, {H: 2})
    pods.start(node.api, "vm-1", {H: 1})
    (mine,) = node.devices_of("vm-1")
    (other,) = both - {mine}

    # A kind of GPU comes, and one that a pod has is excluded: it stays in kubelet's books, and is not free.
    running.upgrade({"settings": {"select": [h100, l40s, f"!address={mine}"]}})
    node.settled({H: 2, L: 1}, {H: 2, L: 1})
    # Of the resources of scenarios before kubelet keeps none.
    assert {resource: free for resource, free in node.free().items() if free} == {H: 1, L: 1}
    pods.start(node.api, "vm-2", {H: 1})
    assert node.devices_of("vm-2") == {other}
    node.check_open("vm-1", "vm-2")
    pods.stop(node.api, "vm-1")
    node.settled({H: 1, L: 1}, {H: 1, L: 1})

    # All are excluded: the free one leaves at once, the other one with its pod.
    running.upgrade({"settings": {"select": [h100, l40s, "!vendor=10de"]}})
    node.settled({H: 1}, {H: 1})
    node.check_open("vm-2")
    pods.stop(node.api, "vm-2")
    node.settled({}, {})

    running.upgrade({"settings": {"select": [h100]}})
    node.settled({H: 2}, {H: 2})
    running.check_same()
    assert [line["changed"] for line in running.logged("config.used")] == ["select"] * 3
    assert shown(running.daemon)["select"]["value"] == [h100]
    assert running.is_in_use()


def test_of_a_file_that_needs_a_restart_or_is_wrong_nothing_is_used_and_it_is_said(node: Node) -> None:
    running = Running(node, {"settings": {"select": ALL}})
    gpu = node.host.plug(0x21)
    node.settled({H: 1}, {H: 1})
    before = node.api.get(CONFIG_MAP)["data"]["gpuactors.yaml"]
    assert running.is_in_use()

    running.upgrade({"settings": {"select": ["vendor=1002"], "log_level": "debug"}})
    assert running.wait_logged("config.restart_needed")["keys"] == "log_level"
    assert not running.is_in_use()
    assert "log_level changed, which needs a restart" in explained(running.daemon, gpu)
    assert shown(running.daemon)["select"]["value"] == ALL

    lines = before.splitlines()
    running.edit("\n".join([*lines, "resource: [unclosed"]))
    said = running.wait_logged("config.refused")["reason"]
    assert f"{FILE} (" in said
    assert f"line {len(lines) + 1}" in said, said
    assert said in explained(running.daemon, gpu), "also while the command has a wrong file"
    running.edit(f"{before}selekt: []\n")
    said = running.wait_logged("config.refused", 2)["reason"]
    assert "unknown key 'selekt'" in said, said
    assert not running.is_in_use()
    # Kubelet's books are as before all the time, and pods come and go.
    pods.start(node.api, "vm-1", {H: 1})
    node.settled({H: 1}, {H: 1})
    pods.stop(node.api, "vm-1")

    running.edit(before)
    assert running.wait_logged("config.used")["changed"] == "nothing"
    assert running.is_in_use()
    running.check_same()

    # A change that needs a restart is used by the next pod, as docs/operate.md#one-configuration-for-many-nodes says.
    running.upgrade({"settings": {"select": ALL, "log_level": "debug"}})
    running.wait_logged("config.restart_needed", 2)
    node.excuse_no_plugin()
    kubectl("-n", NAMESPACE, "rollout", "restart", "daemonset", "gpuactors")
    daemonset.wait_rolled_out(node.api)
    after = node.daemon()
    assert after.uid != running.daemon.uid
    assert shown(after)["log_level"] == {"value": "debug", "from": f"file {FILE}"}
    node.settled({H: 1}, {H: 1})


def test_a_label_that_changes_counts_when_the_file_is_read_again(node: Node) -> None:
    """A pod keeps its GPU under the name by which it got it. While the labels cannot be read, the file is not used;
    it is read again without another change."""
    entries = [
        {"match": {"labels": {KIND: "small"}}, "settings": named(SMALL)},
        {"match": {"labels": {KIND: "medium"}}, "settings": named(MEDIUM)},
    ]
    with labelled(node, "small"):
        running = Running(node, {"settings": {"select": ALL}, "nodes": entries})
        node.host.plug(0x21), node.host.plug(0x22)
        node.settled({SMALL: 2}, {SMALL: 2})
        pods.start(node.api, "vm-1", {SMALL: 1})
        set_kind(node, "medium")
        running.upgrade({"settings": {"select": ALL}, "nodes": [*entries, VALUES["nodes"][0]]})
        node.settled({SMALL: 1, MEDIUM: 1}, {SMALL: 1, MEDIUM: 1})
        assert running.wait_logged("config.used")["changed"] == "resource"
        assert shown(running.daemon)["resource"]["from"] == f"file {FILE}, entry 2 (labels {KIND}=medium)"
        pods.start(node.api, "vm-2", {MEDIUM: 1})
        node.check_open("vm-1", "vm-2")
        pods.stop(node.api, "vm-1")
        node.settled({MEDIUM: 2}, {MEDIUM: 2})

        set_kind(node, "small")
        node.changed()
        taken = _without_rights()
        before = node.api.get(CONFIG_MAP)["data"]["gpuactors.yaml"]
        running.edit(f"{before}# without the right\n")
        said = running.wait_logged("config.refused")["reason"]
        assert "entries of nodes match by labels of the Node, which cannot be read" in said, said
        node.settled({MEDIUM: 2}, {MEDIUM: 2})
        kubectl("create", "-f", "-", text=json.dumps(taken))
        node.settled({SMALL: 1, MEDIUM: 1}, {SMALL: 1, MEDIUM: 1}, within_s=patient(60.0))
        assert running.wait_logged("config.used", 2)["changed"] == "resource"
        running.check_same()
