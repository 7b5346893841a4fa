"""A node with IMEX, and the objects that NVIDIA's controller and daemons make of a compute domain."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Final

from gpuactors.core.values.domain import LABEL
from gpuactors_simulation.kube import domain_objects
from gpuactors_simulation.kube.domain_objects import CHANNEL, DAEMON, NAMESPACE
from tests.support.claims import NODE, Api

__all__ = ["CHANNEL", "CLIQUE", "DAEMON", "NAMESPACE", "DomainObjects", "with_imex"]

CLIQUE: Final = "c0ffee00-0000-4000-8000-000000000001.7"

DEVICES: Final = """\
Character devices:
  1 mem
195 nvidia
234 nvidia-caps
235 nvidia-caps-imex-channels

Block devices:
259 blkext
"""


def with_imex(root: Path, clique: str = CLIQUE) -> None:
    """What NVIDIA's driver and GPU Feature Discovery say, below a host's root."""
    features = root / "etc/kubernetes/node-feature-discovery/features.d"
    capabilities = root / "proc/driver/nvidia/capabilities"
    for directory in (features, capabilities):
        directory.mkdir(parents=True, exist_ok=True)
    (root / "proc/devices").write_text(DEVICES)
    (features / "gfd").write_text(f"nvidia.com/gpu.clique={clique}\n")
    (capabilities / "fabric-imex-mgmt").write_text("DeviceFileMinor: 3\nDeviceFileMode: 256\n")


class DomainObjects:
    """The compute domains of an API server."""

    def __init__(self, api: Api) -> None:
        self._api = api

    def domain(self, name: str, namespace: str = "default") -> str:
        """A new ComputeDomain; its UID."""
        made = self._api.do(self._api.server.add_domain, namespace, name)
        return str(made["metadata"]["uid"])

    def delete(self, name: str, namespace: str = "default") -> None:
        """A ComputeDomain is deleted. Nobody takes its label away, as NVIDIA's controller would."""
        self._api.do(self._api.server.delete_domain, namespace, name)

    def set_nodes(self, name: str, nodes: Mapping[str, str], namespace: str = "default") -> None:
        """What NVIDIA's daemons say in their clique, and its controller of the domain's nodes: name and status."""
        made = self._api.do(self._api.server.set_domain_nodes, namespace, name, nodes)
        self._api.do(self._api.server.set_clique, NAMESPACE, made["metadata"]["uid"], CLIQUE, nodes)

    def channel(self, name: str, domain: str, **config: str) -> str:
        """A claim for a channel, allocated to our node; its UID. `config`: as `domain_objects.add_channel`."""
        make = partial(domain_objects.add_channel, self._api.server, NODE, name, domain, **config)
        return str(self._api.do(make))

    def daemon(self, name: str, domain: str) -> str:
        """The claim of a domain's daemon pod, allocated to our node; its UID."""
        return str(self._api.do(domain_objects.add_daemon, self._api.server, NODE, name, domain))

    @property
    def label(self) -> str | None:
        """The value of the label of our Node."""
        found: str | None = self._api.do(domain_objects.label_of, self._api.server, NODE)
        return found

    def set_label(self, value: str | None) -> None:
        """As an operator does."""
        self._api.do(self._api.server.label_node, NODE, LABEL, value)

    def labels_since(self, version: int) -> list[str | None]:
        """As `domain_objects.labels_since`."""
        found: list[str | None] = self._api.do(domain_objects.labels_since, self._api.server, NODE, version)
        return found

    @property
    def version(self) -> int:
        """The server's present version, for `labels_since`."""
        return int(self._api.server.store.version)
