"""The pages that an operator follows, played from top to bottom: install, from NVIDIA's plugin, upgrade, roll back,
uninstall. A command runs as it stands in the page; only NODE and POD are put in, and what "set your image and your
nodes" asks for."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, final

import yaml

from tests.deploy.manifests import DEPLOY, of_kind
from tests.node import daemonset, pods
from tests.node.cluster import DEVICE_PLUGINS, NODES, kubectl
from tests.node.daemonset import IMAGE, OTHER_IMAGE
from tests.node.fake_host import H100_RESOURCE
from tests.node.node import Node
from tests.node.pages import (
    CLAIMS,
    ELSEWHERE,
    FROM_NVIDIA,
    INSTALL,
    UPGRADE,
    commands,
    section,
    selecting_expressions,
)
from tests.node.test_device_plugin_restarts import image_of
from tests.support.device_plugin_grpcio import message
from tests.support.patience import patient
from tests.support.tiny_plugin import TinyPlugin
from tests.test_tree import ROOT

H: Final = H100_RESOURCE
MINE: Final = "deploy/overlays/mine"
GPU_NODES: Final = "gpuactors.io/enabled"
STATE: Final = Path("/var/lib/gpuactors")


@final
class Reader:
    """Follows the pages in a clone."""

    def __init__(self, node: Node, clone: Path) -> None:
        self._node = node
        self._clone = clone
        shutil.copytree(DEPLOY, clone / "deploy", ignore=shutil.ignore_patterns("chart"))

    def follow(self, page: str, heading: str) -> Iterator[tuple[str, str]]:
        """Runs the commands of a section one after the other: each, and what it printed."""
        for line in commands(section((ROOT / page).read_text(encoding="utf-8"), heading)):
            if line not in ELSEWHERE:
                yield line, self._run(line)

    def set_image(self, image: str) -> None:
        """The image in the operator's overlay; with it what differs on this node (`daemonset.py`)."""
        path = self._clone / MINE / "kustomization.yaml"
        mine = yaml.safe_load(path.read_text())
        name, _, tag = image.partition(":")
        mine["images"] = [{"name": "gpuactors", "newName": name, "newTag": tag}]
        mine["patches"] = [{"path": "nodes.yaml"}, {"path": "host.yaml"}]
        base = of_kind(list(yaml.safe_load_all(kubectl("kustomize", str(DEPLOY / "base")))), "DaemonSet")
        (self._clone / MINE / "host.yaml").write_text(yaml.safe_dump(daemonset.host_patch(base, {})))
        path.write_text(yaml.safe_dump(mine))

    def _run(self, line: str) -> str:
        line = re.sub(r"\bNODE\b", self._node.name, line)
        line = line.replace(
            f"rm -rf {STATE}", f"rm -rf {STATE}/*"
        )  # here it is a mount, which cannot be removed
        if re.search(r"\bPOD\b", line):
            line = re.sub(r"\bPOD\b", self._node.daemon().name, line)
        self._node.said(f"$ {line}")
        done = subprocess.run(
            ("bash", "-c", line), cwd=self._clone, capture_output=True, text=True, stdin=subprocess.DEVNULL,
            timeout=patient(90), check=False,
        )  # fmt: skip
        # `kubectl diff` says by 1 that something changes.
        assert done.returncode == int(line.startswith("kubectl diff")), f"{line}: {done.stdout} {done.stderr}"
        return done.stdout


class NvidiasPlugin(TinyPlugin):
    """Lists PCI addresses and gives the node of their groups, as NVIDIA's plugin from 1.5 on."""

    def __init__(self, node: Node) -> None:
        super().__init__(DEVICE_PLUGINS, "kubevirt-GH100_H100_SXM5_80GB.sock")
        self._functions = node.host.tree.functions

    def Allocate(self, request: Any, context: Any) -> Any:
        (wanted,) = request.container_requests
        paths = [f"/dev/vfio/{self._functions[one].group}" for one in wanted.devices_ids]
        nodes = [message("DeviceSpec")(container_path=p, host_path=p, permissions="mrw") for p in paths]
        return message("AllocateResponse")(
            container_responses=[message("ContainerAllocateResponse")(devices=nodes)]
        )


@contextmanager
def nvidias_plugin(node: Node, *gpus: str) -> Iterator[None]:
    """It serves these GPUs while the context is open."""
    plugin = NvidiasPlugin(node)
    try:
        plugin.lists.put([(gpu, "Healthy") for gpu in gpus])
        plugin.register(resource=H)
        yield
    finally:
        plugin.stop()


def test_pages_from_top_to_bottom(node: Node, tmp_path: Path) -> None:
    """A virtual machine that runs since NVIDIA's plugin was there keeps its GPU until the program is uninstalled."""
    node.uninstall()
    reader = Reader(node, tmp_path)
    gpus = node.host.plug(0x21), node.host.plug(0x22)
    node.excuse_no_plugin()

    install = reader.follow(INSTALL, "3. gpuactors")
    for line, _ in install:
        if line.startswith("cp "):
            reader.set_image(IMAGE)
        if line.startswith("kubectl apply "):
            break  # what follows is true of a node with the label of the overlay

    steps = reader.follow(FROM_NVIDIA, "Steps, node by node")
    with nvidias_plugin(node, *gpus):
        node.settled({H: 2})
        pods.start(node.api, "vm-1", {H: 1})
        mine = node.devices_of("vm-1")
        line, printed = next(steps)
        assert H in printed, line
        line, _ = next(steps)
        assert line.startswith("kubectl cordon "), line
    try:
        said = dict(steps)
        (table,) = (text for line, text in said.items() if line.endswith(" gpuactors inspect"))
        assert all(gpu in table for gpu in gpus), table
        assert dict(install)
        node.settled({H: 2})

        reader.set_image(OTHER_IMAGE)
        said = dict(reader.follow(UPGRADE, "Upgrade"))
        assert OTHER_IMAGE in said[f"kubectl diff -k {MINE}"]
        assert image_of(node.daemon()) == OTHER_IMAGE
        assert dict(reader.follow(UPGRADE, "Roll back"))
        assert image_of(node.daemon()) == IMAGE
        node.settled({H: 2})
        node.check_open("vm-1")
        assert node.devices_of("vm-1") == mine

        pods.stop(node.api, "vm-1")
        assert dict(reader.follow(UPGRADE, "Uninstall"))
        daemonset.wait_gone(node.api)
        assert not any(STATE.iterdir())
    finally:
        node.api.merge(f"{NODES}/{node.name}", {"metadata": {"labels": {GPU_NODES: None}}})
        kubectl("uncordon", node.name)
        kubectl("delete", "-k", str(tmp_path / MINE), "--ignore-not-found", check=False)


def test_the_api_server_takes_the_classes_and_expressions_of_each_kind(node: Node) -> None:
    """The files of the examples and the expressions of the page, by a dry run, in which the server compiles CEL. One
    that it refuses shows that it does."""
    examples = DEPLOY / "examples" / "dra"
    for name in ("device-class.yaml", "kinds.yaml", "extended-resource.yaml"):
        printed = kubectl("apply", "--dry-run=server", "-f", str(examples / name))
        node.said(printed)
        documents = [one for one in yaml.safe_load_all((examples / name).read_text()) if one["kind"] != "Pod"]
        assert all(one["metadata"]["name"] in printed for one in documents), printed
    found = selecting_expressions((ROOT / CLAIMS).read_text(encoding="utf-8"))
    assert len(found) >= 6, found
    for expression in found:
        assert "(server dry run)" in kubectl(
            "apply", "--dry-run=server", "-f", "-", text=class_of(expression)
        )
    refused = kubectl(
        "apply", "--dry-run=server", "-f", "-", text=class_of("device.attributes.x ="), check=False
    )
    assert "compilation failed" in refused


def class_of(expression: str) -> str:
    """A DeviceClass that selects by an expression."""
    selectors = [{"cel": {"expression": expression}}]
    kind = {"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": {"name": "tried"}}
    return yaml.safe_dump(kind | {"spec": {"selectors": selectors}})
