"""Compute domains on the simulated node: a host with IMEX, the domain's objects, NVIDIA's controller, and what is seen.

The daemon is the real one, as for claims of GPUs (`claims.py`). Must not judge: what must hold is in
`expectations_domains.py`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, final

import trio

from gpuactors.acts.files import MOUNTED
from gpuactors.core.state import NodeState
from gpuactors.core.values.domain import DRIVER
from gpuactors_simulation.cluster import NAMESPACE, NODE, Cluster, open_cluster
from gpuactors_simulation.domain_controller import DomainController
from gpuactors_simulation.host.imex import ImexTree
from gpuactors_simulation.kube import domain_objects
from gpuactors_simulation.kube.status import CLAIMS
from gpuactors_simulation.kubelet.dra.values import DraCall, Surroundings
from gpuactors_simulation.kubelet.values import KubeletView
from gpuactors_simulation.situation import CallSeen, ClaimsSeen, DomainsSeen

DOMAIN: Final = "training"
"""The name of the one ComputeDomain."""


@asynccontextmanager
async def open_domains(directory: Path, root: Path) -> AsyncIterator[DomainsSide]:
    """The API server of a node with IMEX, whose files are below `root`."""
    async with open_cluster(directory, DRIVER) as cluster:
        yield DomainsSide(cluster, ImexTree(root))


@final
class DomainsSide:
    """Made by `open_domains`."""

    def __init__(self, cluster: Cluster, imex: ImexTree) -> None:
        imex.load()
        imex.join()
        self.settings: Mapping[str, Any] = {
            "compute_domains": "on",
            "imex_management": "none",
            **cluster.settings,
        }
        """The daemon's configuration of compute domains."""
        self.controller = DomainController(cluster.server, NODE)
        self._cluster = cluster
        self._began_at = trio.current_time()
        self._first = cluster.server.store.version
        made = cluster.server.add_domain(NAMESPACE, DOMAIN)
        self._names = {made["metadata"]["uid"]: DOMAIN}

    def around(self) -> Surroundings:
        """Return the surroundings of kubelet's DRA manager."""
        return self._cluster.around()

    # --- what happens -------------------------------------------------------------------------------------------

    def allocate(self, name: str) -> None:
        """Make a claim for a channel of the domain, and allocate it to the node."""
        (uid,) = self._names
        domain_objects.add_channel(self._cluster.server, NODE, name, uid)

    def delete(self, name: str) -> None:
        """Delete a claim's object, even while its pod exists."""
        self._cluster.server.delete_claim(NAMESPACE, name)

    def end(self) -> None:
        """Delete the job's ComputeDomain."""
        self._cluster.server.delete_domain(NAMESPACE, DOMAIN)

    # --- what is seen -------------------------------------------------------------------------------------------

    def seen(self, view: KubeletView, state: NodeState | None, calls: Sequence[DraCall]) -> ClaimsSeen:
        """Collect the facts now, by the API server, the disk and kubelet; of the daemon only its words."""
        entries = state.domains.claims.entries.values() if state is not None else ()
        claims = self._cluster.claims(view, entries, str)
        mounted = self._cluster.plugin_dir / MOUNTED
        return ClaimsSeen(
            claims=claims,
            left=(*self._cluster.left(), *(f"the directory {path.name}" for path in _in(mounted))),
            domains=DomainsSeen(
                f"{NAMESPACE}/{DOMAIN}",
                self._labels(),
                self._says(),
                tuple(sorted(self._cluster.offers())),
                tuple(self._calls(calls)),
            ),
        )

    def _labels(self) -> tuple[str | None, ...]:
        values = domain_objects.labels_since(self._cluster.server, NODE, self._first)
        return (None, *(self._names.get(value, value) if value is not None else None for value in values))

    def _says(self) -> str:
        (uid,) = self._names
        domain = domain_objects.domain_by_uid(self._cluster.server, uid)
        status = domain.get("status", {}) if domain is not None else {}
        nodes = {node["name"]: node["status"] for node in status.get("nodes", ())}
        return str(nodes.get(NODE, ""))

    def _calls(self, calls: Sequence[DraCall]) -> Iterator[CallSeen]:
        """Each claim has a pod of its own, so a call is about one."""
        history = self._cluster.server.store.since(self._first)
        metas = (change.object["metadata"] for change in history if change.kind is CLAIMS)
        names = {meta["uid"]: meta["name"] for meta in metas}
        for call in sorted(calls, key=lambda c: c.began_at):
            began_s, took_s = call.began_at - self._began_at, call.ended_at - call.began_at
            yield CallSeen(call.call, names[call.claims[0]], began_s, took_s, call.error)


def _in(directory: Path) -> list[Path]:
    return sorted(directory.iterdir()) if directory.is_dir() else []
