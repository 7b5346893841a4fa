"""Follows the pages of an operator in a clone: a command runs as it stands in the page. Only NODE and POD are put in,
and what "set your image and your nodes" asks for."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, final

import yaml

from tests.deploy.manifests import DEPLOY, ROOT, of_kind
from tests.node import daemonset
from tests.node.cluster import DEVICE_PLUGINS, kubectl
from tests.node.pages import ELSEWHERE, commands, section
from tests.support.device_plugin_grpcio import message
from tests.support.patience import patient
from tests.support.tiny_plugin import TinyPlugin

MINE: Final = "deploy/overlays/mine"
GPU_NODES: Final = "gpuactors.io/enabled"
STATE: Final = Path("/var/lib/gpuactors")


@final
class Reader:
    """Follows the pages for one node. `pod` is the name of its pod of gpuactors, `said` gets each command."""

    def __init__(self, node: str, pod: Callable[[], str], said: Callable[[str], None], clone: Path) -> None:
        self._node = node
        self._pod = pod
        self._said = said
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
        line = re.sub(r"\bNODE\b", self._node, line)
        line = line.replace(
            f"rm -rf {STATE}", f"rm -rf {STATE}/*"
        )  # here it is a mount, which cannot be removed
        if re.search(r"\bPOD\b", line):
            line = re.sub(r"\bPOD\b", self._pod(), line)
        self._said(f"$ {line}")
        done = subprocess.run(
            ("bash", "-c", line), cwd=self._clone, capture_output=True, text=True, stdin=subprocess.DEVNULL,
            timeout=patient(90), check=False,
        )  # fmt: skip
        # `kubectl diff` says by 1 that something changes.
        assert done.returncode == int(line.startswith("kubectl diff")), f"{line}: {done.stdout} {done.stderr}"
        return done.stdout


class NvidiasPlugin(TinyPlugin):
    """Lists PCI addresses and gives the node of their groups, as NVIDIA's plugin for KubeVirt from 1.5 on. `group_of`:
    by address."""

    def __init__(self, resource: str, group_of: Callable[[str], int]) -> None:
        super().__init__(DEVICE_PLUGINS, f"kubevirt-{resource.rpartition('/')[2]}.sock")
        self._resource = resource
        self._group_of = group_of

    def serve(self, *gpus: str) -> None:
        """Registers with kubelet, and lists these."""
        self.lists.put([(gpu, "Healthy") for gpu in gpus])
        self.register(resource=self._resource)

    def Allocate(self, request: Any, context: Any) -> Any:
        (wanted,) = request.container_requests
        paths = [f"/dev/vfio/{self._group_of(one)}" for one in wanted.devices_ids]
        nodes = [message("DeviceSpec")(container_path=p, host_path=p, permissions="mrw") for p in paths]
        return message("AllocateResponse")(
            container_responses=[message("ContainerAllocateResponse")(devices=nodes)]
        )
