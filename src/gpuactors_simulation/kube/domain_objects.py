"""The objects of compute domains at a fake API server, as users, the scheduler and NVIDIA's controller make them.

A claim is made as the template of a workload or of the domain's daemon makes it, and the scheduler has allocated it to
a node. Must not play anybody: who does this, and when, is the caller's.
"""

from __future__ import annotations

from itertools import groupby
from typing import Final

from gpuactors.core.claims.opaque_config import API_VERSION
from gpuactors.core.domains.config import CHANNEL_CONFIG, DAEMON_CONFIG
from gpuactors.core.values.domain import DRIVER, LABEL
from gpuactors_simulation.kube.server import FakeApiServer
from gpuactors_simulation.kube.status import DOMAINS, NODES, Object

CHANNEL: Final = "channel-0"
DAEMON: Final = "daemon-0"

NAMESPACE: Final = "dra-driver-nvidia-gpu"
"""Where NVIDIA's driver has its own objects: the daemons' pods and claims, and the cliques."""


def add_channel(
    server: FakeApiServer,
    node: str,
    name: str,
    domain: str,
    namespace: str = "default",
    *,
    device: str = CHANNEL,
    **config: str,
) -> str:
    """A claim for a channel of the domain with this UID; its own UID. `config`: fields of its configuration beside
    `domainID`."""
    return _add(server, node, namespace, name, device, {"kind": CHANNEL_CONFIG, "domainID": domain, **config})


def add_daemon(server: FakeApiServer, node: str, name: str, domain: str, namespace: str = NAMESPACE) -> str:
    """Add the claim of a domain's daemon pod; return its UID."""
    return _add(server, node, namespace, name, DAEMON, {"kind": DAEMON_CONFIG, "domainID": domain})


def _add(server: FakeApiServer, node: str, namespace: str, name: str, device: str, parameters: Object) -> str:
    request = device.partition("-")[0]
    exactly = {"deviceClassName": f"compute-domain-{request}.nvidia.com"}
    spec = {"devices": {"requests": [{"name": request, "exactly": exactly}]}}
    made = server.add_claim({"metadata": {"namespace": namespace, "name": name}, "spec": spec})
    result = {"request": request, "driver": DRIVER, "pool": node, "device": device}
    opaque = {"driver": DRIVER, "parameters": {"apiVersion": API_VERSION, **parameters}}
    config = {"source": "FromClaim", "requests": [request], "opaque": opaque}
    status = {"allocation": {"devices": {"results": [result], "config": [config]}}}
    server.set_claim_status(namespace, name, status)
    return str(made["metadata"]["uid"])


def label_of(server: FakeApiServer, node: str) -> str | None:
    """Return the value of the label of compute domains; None if the node has none."""
    return label_in(server.store.get(NODES, "", node))


def label_in(node: Object) -> str | None:
    """`label_of` for a Node object."""
    value = (node["metadata"].get("labels") or {}).get(LABEL)
    return None if value is None else str(value)


def labels_since(server: FakeApiServer, node: str, version: int) -> list[str | None]:
    """Each value that the label was given after this version of the server's, the same ones in a row once. Raises
    `Failure` 410 if the server has forgotten that version."""
    changes = (c.object for c in server.store.since(version) if c.kind is NODES)
    values = (label_in(stored_node) for stored_node in changes if stored_node["metadata"]["name"] == node)
    return [value for value, _ in groupby(values)]


def domain_by_uid(server: FakeApiServer, uid: str | None) -> Object | None:
    """Return the ComputeDomain; None if there is none by this UID."""
    return next((o for o in server.store.objects(DOMAINS) if o["metadata"]["uid"] == uid), None)
