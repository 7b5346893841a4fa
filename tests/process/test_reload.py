"""A daemon process whose configuration file changes as a mounted ConfigMap does: the link `..data` is replaced."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import grpc

from gpuactors.cli.ending import EX_CONFIG
from tests.process.daemon import DaemonProcess, eventually, gpuactors
from tests.process.node import H100, HEALTHY, Node, address, open_node
from tests.process.test_endpoints import metrics
from tests.support.kubelet_grpcio import EmptyAnswer, EndpointStopped

BIG: Final = "example.com/big"
SMALL: Final = "example.com/small"
AT_ONCE: Final = {
    "actors.config_watcher.CONFIG_LOOK_S": 0.1,
    "daemon.config_file.SETTLE_S": 0.02,
    # Of a kubelet this young the file counts as well, and it names a pod that ended before a List named it.
    "limits.LEDGER_SETTLE_S": 3.0,
    "limits.LEDGER_S": 1.0,
}
CHANGES: Final = 40


class Mounted:
    """A ConfigMap in a pod."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._versions = 0
        directory.mkdir()
        self.path = directory / "gpuactors.yaml"
        self.path.symlink_to("..data/gpuactors.yaml")

    def put(self, content: Mapping[str, Any] | str) -> None:
        """Kubelet brings another version."""
        self._versions += 1
        version = self._directory / f"..{self._versions}"
        version.mkdir()
        text = content if isinstance(content, str) else json.dumps(content)
        (version / self.path.name).write_text(text)
        self.lead_to(version.name)

    def lead_to(self, name: str) -> None:
        """The link leads there now."""
        new = self._directory / "..data_tmp"
        new.symlink_to(name)
        new.rename(self._directory / "..data")


def reloading(node: Node, mounted: Mounted, *tolerated: str) -> DaemonProcess:
    return node.daemon(f"--config={mounted.path}", "--reload=on", bounds=AT_ONCE, tolerated=tolerated)


def named(*names: str) -> Mapping[str, Any]:
    """The device in slot 0x21, 0x22, … has the name of this place."""
    rules = [f"{name}=address={address(0x21 + n)}" for n, name in enumerate(names)]
    return {"resource": rules}


def test_a_change_is_used_without_a_restart_and_a_pod_keeps_its_device() -> None:
    with open_node() as node:
        mounted = Mounted(node.directory / "config")
        mounted.put({})
        for slot in (0x21, 0x22):
            node.plug(slot, "2330", driver="vfio-pci")
        with reloading(node, mounted) as daemon:
            node.wait_device_lists({H100: {address(0x21): HEALTHY, address(0x22): HEALTHY}})
            node.kubelet.allocate(H100, [address(0x22)], pod="vm")
            mounted.put(named(BIG, BIG))
            node.wait_device_lists({BIG: {address(0x21): HEALTHY}, H100: {address(0x22): HEALTHY}})
            node.kubelet.end_pod("vm")
            node.wait_device_lists({BIG: {address(0x21): HEALTHY, address(0x22): HEALTHY}, H100: {}})
            mounted.put({"select": [f"!address={address(0x21)}"]})
            node.wait_device_lists({BIG: {}, H100: {address(0x22): HEALTHY}})
            shown = json.loads(
                gpuactors("config", "show", "-o", "json", f"--state-dir={node.directory / 's'}").stdout
            )
            assert f"!address={address(0x21)}" in shown["select"]["value"]
            assert [line["changed"] for line in daemon.log if line["event"] == "config.used"] == [
                "resource",
                "resource, select",
            ]
            node.assert_sound(daemon)


def test_of_a_file_that_is_wrong_or_needs_a_restart_nothing_is_used_and_it_is_said() -> None:
    with open_node() as node:
        mounted = Mounted(node.directory / "config")
        mounted.put({})
        node.plug(0x21, "2330", driver="vfio-pci")
        there = {H100: {address(0x21): HEALTHY}}
        with reloading(node, mounted, "config.refused") as daemon:
            node.wait_device_lists(there)
            assert metrics(node)["gpuactors_config_file_in_use"] == 1
            mounted.put({**named(BIG), "events": "on"})
            assert daemon.wait_event("config.restart_needed")["keys"] == "events"
            assert metrics(node)["gpuactors_config_file_in_use"] == 0
            explained = gpuactors("explain", address(0x21), *node.directories).stdout
            assert "events changed, which needs a restart: nothing of the change is used" in explained
            mounted.put('{"resource": ["exam')
            refused = daemon.wait_event("config.refused")["reason"]
            assert "cannot be read" in refused
            # In a pod a command has the same file.
            done = gpuactors("explain", address(0x21), *node.directories, f"--config={mounted.path}")
            assert done.returncode == 0
            assert f"it is refused: {refused}" in " ".join(done.stdout.split())
            assert "A daemon runs without this file" in done.stderr
            mounted.lead_to("..nowhere")
            eventually(
                lambda: any("No such file" in line.get("reason", "") for line in daemon.log), "its refusal"
            )
            assert node.device_lists() == there
            mounted.put({})
            assert daemon.wait_event("config.used")["changed"] == "nothing"
            explained = gpuactors("explain", address(0x21), *node.directories).stdout
            assert "Config file" not in explained
            node.assert_sound(daemon)
        mounted.put('{"resource": ["exam')
        done = gpuactors("explain", address(0x21), *node.directories, f"--config={mounted.path}")
        assert done.returncode == EX_CONFIG, "no daemon runs"


def test_reload_without_a_file_is_refused() -> None:
    ended = gpuactors("run", "--reload=on")
    assert ended.returncode == EX_CONFIG
    assert "there is no configuration file to read again" in ended.stderr


def test_changes_under_load_give_no_device_to_two_pods_under_two_names() -> None:
    chance = random.Random(40)
    slots = (0x21, 0x22, 0x23, 0x24)
    with open_node() as node:
        mounted = Mounted(node.directory / "config")
        mounted.put({})
        for slot in slots:
            node.plug(slot, "2330", driver="vfio-pci")
        with reloading(node, mounted) as daemon:
            node.wait_device_lists({H100: {address(slot): HEALTHY for slot in slots}})
            over, load = threading.Event(), Load(node)
            worker = threading.Thread(target=load.run, args=(over,))
            worker.start()
            try:
                for number in range(1, CHANGES + 1):
                    mounted.put(named(*(chance.choice((BIG, SMALL, H100)) for _ in slots)))
                    eventually(lambda n=number: used(daemon) == n, f"change {number}")  # type: ignore[misc]
            finally:
                over.set()
                worker.join()
            assert load.faults == []
            assert load.granted > CHANGES
            mounted.put(named(BIG, SMALL, BIG, SMALL))
            eventually(
                lambda: (
                    settled(node)
                    == {BIG: {address(0x21), address(0x23)}, SMALL: {address(0x22), address(0x24)}}
                ),
                "the last names",
            )
            node.assert_sound(daemon)


def used(daemon: DaemonProcess) -> int:
    return sum(line["event"] == "config.used" for line in daemon.log)


def settled(node: Node) -> Mapping[str, set[str]]:
    """The healthy devices of each resource that has any."""
    return {
        resource: healthy
        for resource, devices in node.device_lists().items()
        if (healthy := {name for name, health in devices.items() if health == HEALTHY})
    }


class Load:
    """Pods come and go while names change. Kubelet picks from the lists as it has them at that moment."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._pods: dict[str, str] = {}
        """The pod of each device."""
        self._chance = random.Random(41)
        self.granted = 0
        self.faults: list[str] = []

    def run(self, over: threading.Event) -> None:
        """Until `over`; then all pods end."""
        while not over.is_set():
            if self._pods and self._chance.random() < 0.4:
                self._end(self._chance.choice(sorted(self._pods)))
            else:
                self._begin()
        for device in sorted(self._pods):
            self._end(device)

    def _begin(self) -> None:
        listed = [(r, name) for r, names in settled(self._node).items() for name in sorted(names)]
        if not listed:
            return
        resource, device = self._chance.choice(sorted(listed))
        pod = f"pod-{self.granted}-{device}"
        with suppress(grpc.RpcError, EmptyAnswer, EndpointStopped, ValueError, KeyError):
            self._node.kubelet.allocate(resource, [device], pod=pod)
            if device in self._pods:
                self.faults.append(
                    f"{device} is given to {pod} as {resource}, and {self._pods[device]} has it"
                )
            self._pods[device] = pod
            self.granted += 1

    def _end(self, device: str) -> None:
        self._node.kubelet.end_pod(self._pods.pop(device))
