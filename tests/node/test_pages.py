"""The pages that an operator follows, played from top to bottom: install, from NVIDIA's plugin, upgrade, roll back,
uninstall (`reader.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import yaml

from tests.deploy.manifests import DEPLOY
from tests.node import daemonset, pods
from tests.node.cluster import NODES, kubectl
from tests.node.daemonset import IMAGE, OTHER_IMAGE
from tests.node.fake_host import H100_RESOURCE
from tests.node.node import Node
from tests.node.pages import (
    CLAIMS,
    FROM_NVIDIA,
    INSTALL,
    STEPS_FROM_NVIDIA,
    UPGRADE,
    selecting_expressions,
)
from tests.node.reader import GPU_NODES, MINE, STATE, NvidiasPlugin, Reader
from tests.node.test_device_plugin_restarts import image_of
from tests.test_tree import ROOT

H: Final = H100_RESOURCE


@contextmanager
def nvidias_plugin(node: Node, *gpus: str) -> Iterator[None]:
    """It serves these GPUs while the context is open."""
    plugin = NvidiasPlugin(H, node.host.group_of)
    try:
        plugin.serve(*gpus)
        yield
    finally:
        plugin.stop()


def test_pages_from_top_to_bottom(node: Node, tmp_path: Path) -> None:
    """A virtual machine that runs since NVIDIA's plugin was there keeps its GPU until the program is uninstalled."""
    node.uninstall()
    reader = Reader(node.name, lambda: node.daemon().name, node.said, tmp_path)
    gpus = node.host.plug(0x21), node.host.plug(0x22)
    node.excuse_no_plugin()

    install = reader.follow(INSTALL, "3. gpuactors")
    for line, _ in install:
        if line.startswith("cp "):
            reader.set_image(IMAGE)
        if line.startswith("kubectl apply "):
            break  # what follows is true of a node with the label of the overlay

    steps = reader.follow(FROM_NVIDIA, STEPS_FROM_NVIDIA)
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
