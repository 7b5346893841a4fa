"""A node with IMEX, and the objects that NVIDIA's controller and daemons make of a compute domain."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from gpuactors.core.domains.model import DRIVER, LABEL
from gpuactors.simulation.kube.status import NODES
from tests.support.claims import NODE, Api

NAMESPACE: Final = "nvidia-dra-driver-gpu"
CLIQUE: Final = "c0ffee00-0000-4000-8000-000000000001.7"
CHANNEL, DAEMON = "channel-0", "daemon-0"

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

    def set_nodes(self, name: str, nodes: Mapping[str, str], namespace: str = "default") -> None:
        """What NVIDIA's controller says of the domain's nodes: name and status."""
        self._api.do(self._api.server.set_domain_nodes, namespace, name, nodes)

    def channel(self, name: str, domain: str, **config: str) -> str:
        """A claim for a channel, allocated to our node; its UID."""
        return self._claim("default", name, CHANNEL, "ComputeDomainChannelConfig", domain, config)

    def daemon(self, name: str, domain: str) -> str:
        """The claim of a domain's daemon pod, allocated to our node; its UID."""
        return self._claim(NAMESPACE, name, DAEMON, "ComputeDomainDaemonConfig", domain, {})

    def _claim(
        self, namespace: str, name: str, device: str, kind: str, domain: str, config: Mapping[str, str]
    ) -> str:
        request = device.partition("-")[0]
        spec = {
            "devices": {"requests": [{"name": request, "exactly": {"deviceClassName": f"{request}.test"}}]}
        }
        made = self._api.do(
            self._api.server.add_claim, {"metadata": {"namespace": namespace, "name": name}, "spec": spec}
        )
        parameters = {
            "apiVersion": "resource.nvidia.com/v1beta1",
            "kind": kind,
            "domainID": domain,
            **config,
        }
        given = {"request": request, "driver": DRIVER, "pool": NODE, "device": device}
        opaque = {
            "source": "FromClaim",
            "requests": [request],
            "opaque": {"driver": DRIVER, "parameters": parameters},
        }
        status = {"allocation": {"devices": {"results": [given], "config": [opaque]}}}
        self._api.do(self._api.server.set_claim_status, namespace, name, status)
        return str(made["metadata"]["uid"])

    @property
    def label(self) -> str | None:
        """The value of the label of our Node."""
        return self._labels_of(self._api.do(self._api.server.store.get, NODES, "", NODE)).get(LABEL)

    def set_label(self, value: str | None) -> None:
        """As an operator does."""
        self._api.do(self._api.server.label_node, NODE, LABEL, value)

    def labels_since(self, version: int) -> list[str | None]:
        """Each value that the label has had since this version of the server, the same ones in a row once."""
        found: list[str | None] = []
        for change in self._api.do(self._api.server.store.since, version):
            if change.kind is NODES:
                value = self._labels_of(change.object).get(LABEL)
                if not found or found[-1] != value:
                    found.append(value)
        return found

    @property
    def version(self) -> int:
        """The server's present version, for `labels_since`."""
        return int(self._api.server.store.version)

    @staticmethod
    def _labels_of(node: Mapping[str, Any]) -> dict[str, str]:
        return dict(node["metadata"].get("labels") or {})
